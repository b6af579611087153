//! Committing a batch, and recovery when the store fails: rebuild the pool, and try the store again.

use std::sync::Arc;
use std::time::Instant;

use gpupool_core::{ApplyOutcome, Pool};
use gpupool_store::CommitError;

use crate::clock;
use crate::limits::{BUFFERED_BATCHES, STORE_RETRY};

use super::AuthorityThread;
use super::batch::shared_words;
use super::handle::Refusal;

/// The state of the store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum StoreState {
    /// It commits everything.
    #[default]
    Fine,
    /// The disk has no space: only commands that free resources are committed.
    Full(Arc<str>),
    /// It cannot commit or read rows. Every request is refused until it can.
    Broken(Arc<str>),
}

impl StoreState {
    /// Returns the published name of the state.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Fine => "ok",
            Self::Full(_) => "full",
            Self::Broken(_) => "broken",
        }
    }
}

impl AuthorityThread {
    /// Commits the rows of a batch. If that fails, the pool returns to its last committed state, and the refusal has
    /// the reason.
    pub(super) fn commit(&mut self, outcome: &ApplyOutcome) -> Result<(), Refusal> {
        if outcome.rows.is_empty() {
            return Ok(());
        }
        let begun = Instant::now();
        let call = self.cell.enter_store();
        let committed = match self.store_state {
            StoreState::Fine => self.store.commit(&outcome.rows, self.at),
            StoreState::Full(_) | StoreState::Broken(_) => self.store.commit_urgent(&outcome.rows, self.at),
        };
        drop(call);
        let Err(error) = committed else {
            self.metrics.committed(outcome.rows.len(), begun.elapsed());
            return Ok(());
        };
        let refusal = self.record_failure(&error);
        self.undo();
        Err(refusal)
    }

    /// Flushes the write-ahead buffer of the store if it holds many batches or the thread is idle.
    pub(super) fn flush_store(&mut self, is_idle: bool) {
        let is_time = is_idle || self.store.unflushed_batches() >= BUFFERED_BATCHES;
        if !is_time || self.store_state != StoreState::Fine || self.store.unflushed_batches() == 0 {
            return;
        }
        let call = self.cell.enter_store();
        let flushed = self.store.flush();
        drop(call);
        if let Err(error) = flushed {
            self.record_failure(&error);
        }
    }

    fn record_failure(&mut self, error: &CommitError) -> Refusal {
        let why = shared_words(error);
        let (state, refusal) = match error {
            CommitError::Full { .. } => (StoreState::Full(why.clone()), Refusal::DiskFull(why)),
            _ => (StoreState::Broken(why.clone()), Refusal::NotDurable(why)),
        };
        self.set_store_state(state);
        refusal
    }

    /// Rebuilds the pool from the store.
    fn undo(&mut self) {
        let call = self.cell.enter_store();
        let loaded = self.store.load();
        drop(call);
        let rows = match loaded {
            Ok(loaded) => loaded.rows,
            Err(error) => {
                // The pool stays empty, and no command is applied to it, until the rows can be read again.
                self.set_store_state(StoreState::Broken(shared_words(&error)));
                Vec::new()
            }
        };
        let (pool, bad_rows) = Pool::restore(self.settings, self.policies.clone(), self.at.pool, rows);
        for row in bad_rows {
            tracing::error!(%row, "ignoring an invalid row");
        }
        self.pool = pool;
        self.rebuild_indexes();
        self.samples_are_due = true;
    }

    /// Tries a failed store again after a pause.
    pub(super) fn retry_store(&mut self) {
        if self.store_state == StoreState::Fine || self.retried_at.elapsed() < STORE_RETRY {
            return;
        }
        self.retried_at = Instant::now();
        let call = self.cell.enter_store();
        let recovered = self.store.recover(&clock::anchor());
        drop(call);
        let state = match recovered {
            Ok(()) => StoreState::Fine,
            Err(error @ CommitError::Full { .. }) => StoreState::Full(shared_words(error)),
            Err(_) => return,
        };
        if self.is_broken() {
            self.at = clock::both();
            self.store_state = state.clone();
            self.undo();
            if self.is_broken() {
                return;
            }
        }
        if state == StoreState::Fine {
            tracing::info!("the store commits everything again");
        }
        self.set_store_state(state);
    }

    fn set_store_state(&mut self, state: StoreState) {
        let is_new = std::mem::discriminant(&state) != std::mem::discriminant(&self.store_state);
        match &state {
            _ if !is_new => {}
            StoreState::Full(why) => {
                tracing::error!(%why, "requests are refused until there is space; releases are committed");
            }
            StoreState::Broken(why) => tracing::error!(%why, "every request is refused until the store works again"),
            StoreState::Fine => {}
        }
        self.metrics.store(state.name());
        self.store_state = state;
        self.retried_at = Instant::now();
        self.publish_store_state();
    }
}

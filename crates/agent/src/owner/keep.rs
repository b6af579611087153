//! Keeping a batch, and what happens when the store does not: build the pool anew, and mend what can be mended.

use std::time::Instant;

use gpupool_core::{Outcome, Pool};
use gpupool_store::CommitError;

use crate::limits::{NOTES, STORE_RETRY};

use super::batch::shared;
use super::message::Refusal;
use super::{OwnerThread, StoreState};

impl OwnerThread {
    /// Commits the rows of a batch. Where that fails, the pool is as it was last committed, and the refusal says why.
    pub(super) fn keep(&mut self, outcome: &Outcome) -> Result<(), Refusal> {
        if outcome.rows.is_empty() {
            return Ok(());
        }
        let begun = Instant::now();
        let kept = match self.store_state {
            StoreState::Fine => self.store.commit(&outcome.rows, self.at),
            StoreState::Full(_) | StoreState::Broken(_) => self.store.commit_urgent(&outcome.rows, self.at),
        };
        let Err(error) = kept else {
            self.watcher.committed(outcome.rows.len(), begun.elapsed());
            return Ok(());
        };
        let refusal = self.not_kept(&error);
        self.undo();
        Err(refusal)
    }

    /// Lets the store's tables hear of its notes: when there are many, and when nothing is asked.
    pub(super) fn hear_notes(&mut self, is_idle: bool) {
        let is_time = is_idle || self.store.unflushed() >= NOTES;
        if is_time
            && self.store_state == StoreState::Fine
            && let Err(error) = self.store.flush()
        {
            self.not_kept(&error);
        }
    }

    /// Takes note of a commit that failed.
    fn not_kept(&mut self, error: &CommitError) -> Refusal {
        let why = shared(error);
        match error {
            CommitError::Full { .. } => {
                self.note(StoreState::Full(why.clone()));
                Refusal::DiskFull(why)
            }
            _ => {
                self.note(StoreState::Broken(why.clone()));
                Refusal::NotDurable(why)
            }
        }
    }

    /// The pool as the store has it.
    fn undo(&mut self) {
        let rows = match self.store.load() {
            // The complaints were told at the start.
            Ok(loaded) => loaded.rows,
            Err(error) => {
                // The empty pool stands in until there are rows again; nothing is applied to it.
                self.note(StoreState::Broken(shared(&error)));
                Vec::new()
            }
        };
        let (pool, bad) = Pool::restore(self.settings, self.policies.clone(), self.at.pool, rows);
        for bad in bad {
            tracing::error!(row = %bad, "a row was left out");
        }
        self.pool = pool;
        self.take_stock();
        self.sample_is_due = true;
    }

    /// Tries a store that failed again, from time to time.
    pub(super) fn mend_store(&mut self) {
        if self.store_state == StoreState::Fine || self.retried.elapsed() < STORE_RETRY {
            return;
        }
        self.retried = Instant::now();
        let mended = match self.store.recover(&crate::clock::anchor()) {
            Ok(()) => true,
            // A store that was broken can be written again; the next commit that finds no space says so.
            Err(CommitError::Full { .. }) => matches!(self.store_state, StoreState::Broken(_)),
            Err(_) => false,
        };
        if mended {
            if matches!(self.store_state, StoreState::Broken(_)) {
                self.at = crate::clock::both();
                self.undo();
            }
            tracing::info!("the store keeps everything again");
            self.store_state = StoreState::Fine;
            self.watcher.store(&StoreState::Fine);
        }
    }

    fn note(&mut self, state: StoreState) {
        match &state {
            StoreState::Full(why) => {
                tracing::error!(%why, "requests are refused until there is space; releases are kept")
            }
            StoreState::Broken(why) => tracing::error!(%why, "every wish is refused until the store works again"),
            StoreState::Fine => {}
        }
        self.watcher.store(&state);
        self.store_state = state;
        self.retried = Instant::now();
    }
}

//! Leases that were granted a moment ago and need no renewal yet. Most are given back before they do: until then none has a
//! task of its own, which would cost more than everything else that is done for a lease.
//!
//! One task for all leases of a client sleeps until the first one is due, hands those that are to tasks of their own, and
//! ends when there are none.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::Notify;
use tokio::time::Instant;

use super::Inner;
use super::guard::Keeping;

/// Which young lease: when it is due, and a number.
pub(crate) type YoungId = (Instant, u64);

/// The young leases of one client.
#[derive(Debug, Default)]
pub(crate) struct Young {
    leases: Mutex<Leases>,
    /// One is due before the task planned to wake.
    sooner: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Leases {
    last: u64,
    by_due: BTreeMap<YoungId, Keeping>,
    /// When the task wakes; `None` where there is no task.
    planned: Option<Instant>,
}

impl Young {
    /// Keeps one until it is due.
    pub fn add(inner: &Arc<Inner>, due: Instant, keeping: Keeping) -> YoungId {
        let mut leases = inner.young.lock();
        leases.last += 1;
        let id = (due, leases.last);
        leases.by_due.insert(id, keeping);
        match leases.planned {
            None => {
                leases.planned = Some(due);
                tokio::spawn(hand_on(Arc::downgrade(inner), inner.young.sooner.clone(), due));
            }
            Some(planned) if due < planned => inner.young.sooner.notify_one(),
            Some(_) => {}
        }
        id
    }

    /// Takes one out; `None` where it has a task of its own by now.
    pub fn take(&self, id: YoungId) -> Option<Keeping> {
        self.lock().by_due.remove(&id)
    }

    /// Those that are due; then when the next one is, where there is any.
    fn due(&self, now: Instant) -> (Vec<Keeping>, Option<Instant>) {
        let mut leases = self.lock();
        let later = leases.by_due.split_off(&(now, u64::MAX));
        let due = std::mem::replace(&mut leases.by_due, later);
        leases.planned = leases.by_due.keys().next().map(|(due, _)| *due);
        (due.into_values().collect(), leases.planned)
    }

    fn lock(&self) -> MutexGuard<'_, Leases> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn hand_on(inner: Weak<Inner>, sooner: Arc<Notify>, mut next: Instant) {
    let gone = Gone(inner.clone());
    loop {
        tokio::select! {
            biased;
            () = sooner.notified() => {}
            () = tokio::time::sleep_until(next) => {}
        }
        // A lease that is kept keeps its client; where there is none, there is none.
        let Some(inner) = inner.upgrade() else { return };
        let (due, later) = inner.young.due(Instant::now());
        for keeping in due {
            tokio::spawn(keeping.keep());
        }
        match later {
            Some(later) => next = later,
            // Whoever comes from now on has another task.
            None => return std::mem::forget(gone),
        }
    }
}

/// Where the task ends with its runtime, the next lease needs another.
struct Gone(Weak<Inner>);

impl Drop for Gone {
    fn drop(&mut self) {
        if let Some(inner) = self.0.upgrade() {
            inner.young.lock().planned = None;
        }
    }
}

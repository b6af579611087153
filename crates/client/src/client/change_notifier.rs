//! Notification of many observers, and a counter of pending work to wait for.
//!
//! Unlike a watch channel, [`ChangeNotifier`] wakes its observers in the order of their arrival, so that a simulated
//! run can be repeated exactly.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tokio::sync::Notify;

/// Counter of changes that wakes its observers.
#[derive(Debug, Default)]
pub(crate) struct ChangeNotifier {
    count: AtomicU64,
    wake: Notify,
}

impl ChangeNotifier {
    pub(super) fn notify(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        self.wake.notify_waiters();
    }

    /// Observes all changes, including earlier ones.
    pub(super) fn observe_from_start(self: &Arc<Self>) -> ChangeObserver {
        ChangeObserver { changes: self.clone(), seen: 0 }
    }

    /// Observes changes from now on.
    pub(super) fn observe(self: &Arc<Self>) -> ChangeObserver {
        ChangeObserver { changes: self.clone(), seen: self.count.load(Ordering::SeqCst) }
    }
}

/// Observer of changes; misses none.
#[derive(Debug)]
pub(crate) struct ChangeObserver {
    changes: Arc<ChangeNotifier>,
    seen: u64,
}

impl ChangeObserver {
    /// Marks all changes so far as seen.
    pub(super) fn mark_seen(&mut self) {
        self.seen = self.changes.count.load(Ordering::SeqCst);
    }

    /// Waits for an unseen change and marks it as seen.
    pub(super) async fn changed(&mut self) {
        let wake = self.changes.wake.notified();
        tokio::pin!(wake);
        // Enabled before the count is read, so that every later change wakes it.
        wake.as_mut().enable();
        while self.changes.count.load(Ordering::SeqCst) == self.seen {
            wake.as_mut().await;
            wake.set(self.changes.wake.notified());
            wake.as_mut().enable();
        }
        self.seen = self.changes.count.load(Ordering::SeqCst);
    }
}

/// Counter of work in progress.
#[derive(Debug, Default)]
pub(super) struct PendingWork {
    count: AtomicUsize,
    changes: Arc<ChangeNotifier>,
}

impl PendingWork {
    /// Counts one more piece of work until the guard is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> PendingWorkGuard {
        self.count.fetch_add(1, Ordering::SeqCst);
        PendingWorkGuard(self.clone())
    }

    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// Waits until no work is in progress.
    pub(super) async fn wait_until_idle(&self) {
        let mut changes = self.changes.observe();
        while self.count() > 0 {
            changes.changed().await;
        }
    }
}

/// One piece of work in progress.
#[derive(Debug)]
pub(super) struct PendingWorkGuard(Arc<PendingWork>);

impl Drop for PendingWorkGuard {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.changes.notify();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_change_is_never_missed_and_seen_once() {
        let changes = Arc::new(ChangeNotifier::default());
        let mut observer = changes.observe();
        changes.notify();
        observer.changed().await;
        let again = tokio::time::timeout(std::time::Duration::ZERO, observer.changed()).await;
        assert!(again.is_err(), "nothing happened since");
        let waits = tokio::spawn(async move { observer.changed().await });
        tokio::task::yield_now().await;
        changes.notify();
        waits.await.unwrap();
    }
}

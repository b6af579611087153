//! Telling many that something changed.
//!
//! Unlike a watch channel it wakes those who wait in the order they came, so that a run can be repeated exactly.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// Counts changes, and wakes whoever waits for one.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    count: AtomicU64,
    wake: Notify,
}

impl Changes {
    pub fn tell(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        self.wake.notify_waiters();
    }

    /// Whoever follows from now on.
    pub fn follow(self: &Arc<Self>) -> Follower {
        Follower { changes: self.clone(), seen: self.count.load(Ordering::SeqCst) }
    }
}

/// Follows changes, none of which it misses.
#[derive(Debug)]
pub(crate) struct Follower {
    changes: Arc<Changes>,
    seen: u64,
}

impl Follower {
    /// What happened so far is known.
    pub fn mark_seen(&mut self) {
        self.seen = self.changes.count.load(Ordering::SeqCst);
    }

    /// Waits until something happened that was not seen; it is then.
    pub async fn changed(&mut self) {
        let wake = self.changes.wake.notified();
        tokio::pin!(wake);
        // Before the count is read: whatever changes later wakes.
        wake.as_mut().enable();
        while self.changes.count.load(Ordering::SeqCst) == self.seen {
            wake.as_mut().await;
            wake.set(self.changes.wake.notified());
            wake.as_mut().enable();
        }
        self.seen = self.changes.count.load(Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_change_is_never_missed_and_told_once() {
        let changes = Arc::new(Changes::default());
        let mut follower = changes.follow();
        changes.tell();
        follower.changed().await;
        let again = tokio::time::timeout(std::time::Duration::ZERO, follower.changed()).await;
        assert!(again.is_err(), "nothing happened since");
        let waits = tokio::spawn(async move { follower.changed().await });
        tokio::task::yield_now().await;
        changes.tell();
        waits.await.unwrap();
    }
}

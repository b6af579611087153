//! Leases that were granted a moment ago and need no renewal yet. Most are released before their first renewal: until
//! then none has a task of its own, which would cost more than all other work for a lease.
//!
//! One task for all leases of a client sleeps until the first renewal is due, starts a task for each due lease, and
//! ends when no lease is left.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::Notify;
use tokio::time::Instant;

use super::AgentClientInner;
use super::lease_guard::LeaseRenewal;

/// Key of a pending renewal: its due time and a number.
pub(crate) type RenewalKey = (Instant, u64);

/// Pending first renewals of one client.
#[derive(Debug)]
pub(crate) struct RenewalTimer {
    renewals: Mutex<PendingRenewals>,
    /// Notified if a renewal is due before the planned wake-up, or the client was dropped.
    earlier_wakeup: Arc<Notify>,
    creator_pid: u32,
}

impl Default for RenewalTimer {
    fn default() -> Self {
        Self { renewals: Mutex::default(), earlier_wakeup: Arc::default(), creator_pid: std::process::id() }
    }
}

impl Drop for RenewalTimer {
    fn drop(&mut self) {
        // The task ends with the client. A forked child has no task, and waking it could block forever on a lock.
        if self.creator_pid == std::process::id() {
            self.earlier_wakeup.notify_one();
        }
    }
}

#[derive(Debug, Default)]
struct PendingRenewals {
    last_number: u64,
    by_due: BTreeMap<RenewalKey, LeaseRenewal>,
    /// Planned wake-up of the task; `None` without a task.
    next_wakeup: Option<Instant>,
}

impl RenewalTimer {
    /// Adds a lease until its first renewal is due.
    pub(crate) fn add(inner: &Arc<AgentClientInner>, due: Instant, renewal: LeaseRenewal) -> RenewalKey {
        let mut renewals = inner.renewal_timer.lock_renewals();
        renewals.last_number += 1;
        let id = (due, renewals.last_number);
        renewals.by_due.insert(id, renewal);
        match renewals.next_wakeup {
            None => {
                renewals.next_wakeup = Some(due);
                tokio::spawn(run_timer(Arc::downgrade(inner), inner.renewal_timer.earlier_wakeup.clone(), due));
            }
            Some(next_wakeup) if due < next_wakeup => inner.renewal_timer.earlier_wakeup.notify_one(),
            Some(_) => {}
        }
        id
    }

    /// Removes a lease; `None` if it already has a task of its own.
    pub(crate) fn take(&self, id: RenewalKey) -> Option<LeaseRenewal> {
        self.lock_renewals().by_due.remove(&id)
    }

    /// Takes the due renewals and returns them with the time of the next one, if any.
    fn take_due(&self, now: Instant) -> (Vec<LeaseRenewal>, Option<Instant>) {
        let mut renewals = self.lock_renewals();
        let later = renewals.by_due.split_off(&(now, u64::MAX));
        let due = std::mem::replace(&mut renewals.by_due, later);
        renewals.next_wakeup = renewals.by_due.keys().next().map(|(due, _)| *due);
        (due.into_values().collect(), renewals.next_wakeup)
    }

    fn lock_renewals(&self) -> MutexGuard<'_, PendingRenewals> {
        self.renewals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn run_timer(inner: Weak<AgentClientInner>, earlier_wakeup: Arc<Notify>, mut next: Instant) {
    let task_guard = TimerTaskGuard(inner.clone());
    loop {
        tokio::select! {
            biased;
            () = earlier_wakeup.notified() => {}
            () = tokio::time::sleep_until(next) => {}
        }
        // Every held lease keeps its client alive: without a client there are no renewals.
        let Some(inner) = inner.upgrade() else { return };
        let (due, later) = inner.renewal_timer.take_due(Instant::now());
        for renewal in due {
            // Ends when the guard is dropped, or the lease is lost.
            tokio::spawn(renewal.renew_until_detached());
        }
        match later {
            Some(later) => next = later,
            // The next lease starts another task.
            None => return std::mem::forget(task_guard),
        }
    }
}

/// Clears the planned wake-up if the task ends with its runtime, so that the next lease starts another one.
struct TimerTaskGuard(Weak<AgentClientInner>);

impl Drop for TimerTaskGuard {
    fn drop(&mut self) {
        if let Some(inner) = self.0.upgrade() {
            inner.renewal_timer.lock_renewals().next_wakeup = None;
        }
    }
}

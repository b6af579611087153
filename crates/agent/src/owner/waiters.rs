//! Who waits for which lease to leave the queue or to end, and how many requests of each owner are queued.

use std::collections::HashMap;
use std::sync::Arc;

use gpupool_core::LeaseId;
use gpupool_core::lease::LeaseState;
use gpupool_core::{Effect, Pool};
use tokio::sync::oneshot;

use super::calls::Calls;

#[derive(Default)]
pub(super) struct Waiters {
    /// Those who wait for leases to leave the queue.
    pub calls: Calls,
    /// Those who wait for the end of a lease.
    ends: HashMap<LeaseId, Vec<oneshot::Sender<()>>>,
    queued: HashMap<LeaseId, Arc<str>>,
    by_owner: HashMap<Arc<str>, usize>,
}

impl Waiters {
    /// Counts anew who is queued; those who wait go on waiting.
    pub fn recount(&mut self, pool: &Pool) {
        self.queued.clear();
        self.by_owner.clear();
        for lease in pool.leases().filter(|lease| lease.state == LeaseState::Queued) {
            self.enter(lease.id, lease.request.owner.clone());
        }
        for lease in self.calls.leases() {
            if !self.queued.contains_key(&lease) {
                self.calls.wake(lease);
            }
        }
        let ended: Vec<LeaseId> = self.ends.keys().copied().filter(|id| has_ended(pool, *id)).collect();
        for lease in ended {
            wake(self.ends.remove(&lease));
        }
    }

    /// How many requests of an owner are queued.
    pub fn of_owner(&self, owner: &str) -> usize {
        self.by_owner.get(owner).copied().unwrap_or(0)
    }

    /// Somebody waits for the end of a lease; told at once where it is over.
    pub fn wait_for_end(&mut self, lease: LeaseId, waiter: oneshot::Sender<()>, pool: &Pool) {
        if has_ended(pool, lease) {
            let _gone = waiter.send(());
        } else {
            let waiters = self.ends.entry(lease).or_default();
            waiters.retain(|waiter| !waiter.is_closed());
            waiters.push(waiter);
        }
    }

    /// Takes in what happened, and wakes whom it concerns.
    pub fn follow(&mut self, effect: &Effect, pool: &Pool) {
        match effect {
            Effect::Queued { lease } => {
                if let Some(row) = pool.lease(*lease) {
                    self.enter(*lease, row.request.owner.clone());
                }
            }
            Effect::Granted { lease, .. } | Effect::Offered { lease, .. } | Effect::Ended { lease, .. } => {
                self.leave(*lease);
                self.calls.wake(*lease);
                if matches!(effect, Effect::Ended { .. }) {
                    wake(self.ends.remove(lease));
                }
            }
            _ => {}
        }
    }

    fn enter(&mut self, lease: LeaseId, owner: Arc<str>) {
        if self.queued.insert(lease, owner.clone()).is_none() {
            *self.by_owner.entry(owner).or_default() += 1;
        }
    }

    fn leave(&mut self, lease: LeaseId) {
        let Some(owner) = self.queued.remove(&lease) else { return };
        if let Some(count) = self.by_owner.get_mut(&owner) {
            *count -= 1;
            if *count == 0 {
                self.by_owner.remove(&owner);
            }
        }
    }
}

fn wake(waiters: Option<Vec<oneshot::Sender<()>>>) {
    for waiter in waiters.into_iter().flatten() {
        let _gone = waiter.send(());
    }
}

fn has_ended(pool: &Pool, lease: LeaseId) -> bool {
    pool.lease(lease).is_none_or(|lease| lease.state.is_ended())
}

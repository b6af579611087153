//! The callers that wait: for leases to leave the queue, and for leases to end. Also the number of requests in the queue.
//!
//! A call is stored once, under its number, and its number is stored beside each lease that it follows. A call is
//! removed when it gets its reply or when its client hangs up. A call whose hang-up was missed is removed when the
//! patience of waiting leases is next extended, or earlier if there are many open calls.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use gpupool_api::lease::FollowResponse;
use gpupool_core::{ApplyOutcome, LeaseId, LeaseState, Pool, PoolCommand, PoolEffect, PoolTime};
use tokio::sync::oneshot;

use crate::limits::{FOLLOW_EVERY, FOLLOWED, FOLLOWED_BY_CALL};

use super::handle::{CallId, FollowCall, Refusal, Reply};
use super::{AuthorityThread, StoreState};

/// Everything that waits for the pool.
#[derive(Default)]
pub(super) struct Waiters {
    calls: FollowCalls,
    /// The callers that wait for the end of a lease.
    ends: HashMap<LeaseId, Vec<oneshot::Sender<()>>>,
    /// The waiting requests with their owners and the times at which they were made.
    queued: BTreeMap<LeaseId, (Arc<str>, PoolTime)>,
    by_owner: HashMap<Arc<str>, usize>,
    /// Whether the agent is stopping, so that no call waits any more.
    replies_at_once: bool,
}

impl Waiters {
    /// Counts the waiting requests of a pool that was rebuilt. Open calls stay open.
    pub(super) fn recount(&mut self, pool: &Pool) {
        self.queued.clear();
        self.by_owner.clear();
        for lease in pool.leases().filter(|lease| lease.state == LeaseState::Queued) {
            self.enter(lease.id, lease.request.owner.clone(), lease.created_at);
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

    /// Returns the number of waiting requests of an owner.
    pub(super) fn of_owner(&self, owner: &str) -> usize {
        self.by_owner.get(owner).copied().unwrap_or(0)
    }

    /// Returns the number of waiting requests.
    pub(super) fn queued(&self) -> usize {
        self.queued.len()
    }

    /// Whether a request waits.
    pub(super) fn is_queued(&self, lease: LeaseId) -> bool {
        self.queued.contains_key(&lease)
    }

    /// Returns the time at which the oldest waiting request was made.
    pub(super) fn oldest_request_at(&self) -> Option<PoolTime> {
        self.queued.values().next().map(|(_, created_at)| *created_at)
    }

    /// Returns the time at which the next reply is due.
    pub(super) fn next_deadline(&self) -> Option<PoolTime> {
        self.calls.next_deadline()
    }

    /// Notifies the caller when the lease has ended; at once if it has.
    pub(super) fn wait_for_end(&mut self, lease: LeaseId, waiter: oneshot::Sender<()>, pool: &Pool) {
        if has_ended(pool, lease) {
            let _hung_up = waiter.send(());
        } else {
            let waiters = self.ends.entry(lease).or_default();
            waiters.retain(|waiter| !waiter.is_closed());
            waiters.push(waiter);
        }
    }

    /// Takes an effect into account, and wakes the calls that it concerns.
    pub(super) fn follow(&mut self, effect: &PoolEffect, pool: &Pool) {
        match effect {
            PoolEffect::Queued { lease } => {
                if let Some(row) = pool.lease(*lease) {
                    self.enter(*lease, row.request.owner.clone(), row.created_at);
                }
            }
            PoolEffect::Granted { lease, .. } | PoolEffect::Offered { lease, .. } | PoolEffect::Ended { lease, .. } => {
                self.leave(*lease);
                self.calls.wake(*lease);
                if matches!(effect, PoolEffect::Ended { .. }) {
                    wake(self.ends.remove(lease));
                }
            }
            _ => {}
        }
    }

    /// Removes a call whose client hung up.
    pub(super) fn hang_up(&mut self, call: CallId) {
        if let Some(call) = self.calls.remove(call) {
            self.calls.abandon(&call);
        }
    }

    /// Returns the leases of clients that hung up and cannot find them again, once.
    pub(super) fn take_abandoned(&mut self) -> Vec<LeaseId> {
        std::mem::take(&mut self.calls.abandoned)
    }

    /// Lets every call get its reply now, and later ones at once.
    pub(super) fn stop_waiting(&mut self) {
        self.replies_at_once = true;
    }

    fn enter(&mut self, lease: LeaseId, owner: Arc<str>, created_at: PoolTime) {
        if self.queued.insert(lease, (owner.clone(), created_at)).is_none() {
            *self.by_owner.entry(owner).or_default() += 1;
        }
    }

    fn leave(&mut self, lease: LeaseId) {
        let Some((owner, _)) = self.queued.remove(&lease) else { return };
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
        let _hung_up = waiter.send(());
    }
}

fn has_ended(pool: &Pool, lease: LeaseId) -> bool {
    pool.lease(lease).is_none_or(|lease| lease.state.is_ended())
}

impl AuthorityThread {
    /// Extends the patience of the leases of a call, so that they stay in the queue.
    pub(super) fn extend_patience(&mut self, call: &FollowCall, outcome: &mut ApplyOutcome) {
        if self.is_broken() || !call.is_poll {
            return;
        }
        for &lease in call.leases.iter() {
            let known = self.pool.lease(lease).filter(|known| known.state == LeaseState::Queued);
            if known.is_some_and(|known| call.caller.may_act_for(&known.request.owner)) {
                self.apply(PoolCommand::Follow { lease }, outcome).ok();
            }
        }
    }

    /// Extends the patience of the leases of all open calls, from time to time.
    pub(super) fn extend_followed_patience(&mut self, outcome: &mut ApplyOutcome) {
        if self.follow_due().is_none_or(|due| self.at.pool < due) {
            return;
        }
        self.followed_at = self.at.pool;
        for lease in self.waiters.calls.followed() {
            self.apply(PoolCommand::Follow { lease }, outcome).ok();
        }
    }

    /// Returns the time at which the patience of the leases of open calls is next extended.
    pub(super) fn follow_due(&self) -> Option<PoolTime> {
        (!self.waiters.calls.is_empty()).then(|| self.followed_at.after(FOLLOW_EVERY))
    }

    /// Replies to the calls that were woken or are due, and to the new calls with changes.
    pub(super) fn reply_to_followers(&mut self, new: Vec<FollowCall>) {
        let is_stopping = self.waiters.replies_at_once;
        let due = self.waiters.calls.take_due(if is_stopping { PoolTime(u64::MAX) } else { self.at.pool });
        for call in due.into_iter().chain(new) {
            self.reply_or_wait(call);
        }
    }

    pub(super) fn reply_or_wait(&mut self, call: FollowCall) {
        if call.reply.is_closed() {
            return self.waiters.calls.abandon(&call);
        }
        if let StoreState::Broken(why) = &self.store_state {
            let refusal = Refusal::NotDurable(why.clone());
            let _hung_up = call.reply.send(Err(refusal));
            return;
        }
        let is_due = call.until <= self.at.pool || self.waiters.replies_at_once;
        let result = if call.is_single { self.single_reply(&call, is_due) } else { self.list_reply(&call, is_due) };
        match result {
            Some(result) => drop(call.reply.send(result)),
            None => self.waiters.calls.add(call),
        }
    }

    /// Returns the one lease that a call follows, unless it still waits and the call is not due.
    fn single_reply(&mut self, call: &FollowCall, is_due: bool) -> Option<Result<Reply, Refusal>> {
        let lease = *call.leases.first()?;
        let waits = self
            .pool
            .lease(lease)
            .is_some_and(|known| known.state == LeaseState::Queued && call.caller.may_act_for(&known.request.owner));
        (is_due || !waits).then(|| self.lease_reply(lease, &call.caller))
    }

    /// Returns the leases of a call that no longer wait, if there are any or the call is due.
    fn list_reply(&self, call: &FollowCall, is_due: bool) -> Option<Result<Reply, Refusal>> {
        let mut followed = FollowResponse::default();
        for &lease in call.leases.iter() {
            let known = self.pool.lease(lease);
            match known.filter(|known| call.caller.may_act_for(&known.request.owner)) {
                None => followed.unknown.push(lease.0),
                Some(known) if known.state == LeaseState::Queued => {}
                Some(known) => followed.changed.push(self.lease_body(known, None, &call.caller)),
            }
        }
        let has_changes = !followed.changed.is_empty() || !followed.unknown.is_empty();
        (is_due || has_changes).then_some(Ok(Reply::Followed(followed)))
    }
}

/// The calls that wait for leases to leave the queue.
#[derive(Default)]
struct FollowCalls {
    by_id: BTreeMap<CallId, FollowCall>,
    by_lease: BTreeSet<(LeaseId, CallId)>,
    by_deadline: BTreeSet<(PoolTime, CallId)>,
    /// Calls with a lease that left the queue; they get their replies after the batch.
    woken: BTreeSet<CallId>,
    /// Leases that only their calls could find, and whose clients hung up.
    abandoned: Vec<LeaseId>,
    /// The number of followed leases from which a search for clients that hung up pays off.
    sweep_at: usize,
}

impl FollowCalls {
    /// Adds a call, or refuses it if too much is followed already.
    fn add(&mut self, call: FollowCall) {
        if self.by_lease.len() >= self.sweep_at.min(FOLLOWED - FOLLOWED_BY_CALL) {
            self.sweep();
        }
        // A single lease may always be followed: each takes a connection, and connections are bounded.
        if call.leases.len() > 1 && self.by_lease.len() + call.leases.len() > FOLLOWED {
            let _hung_up = call.reply.send(Err(Refusal::Busy));
            return;
        }
        self.by_lease.extend(call.leases.iter().map(|lease| (*lease, call.id)));
        self.by_deadline.insert((call.until, call.id));
        self.by_id.insert(call.id, call);
    }

    /// Marks the calls that follow a lease as due.
    fn wake(&mut self, lease: LeaseId) {
        let calls = self.by_lease.range((lease, CallId(0))..=(lease, CallId(u64::MAX)));
        self.woken.extend(calls.map(|(_, call)| *call));
    }

    /// Removes the calls that were woken or are due at `now`, in the order in which they came.
    fn take_due(&mut self, now: PoolTime) -> Vec<FollowCall> {
        let mut due = std::mem::take(&mut self.woken);
        due.extend(self.by_deadline.range(..=(now, CallId(u64::MAX))).map(|(_, call)| *call));
        due.into_iter().filter_map(|call| self.remove(call)).collect()
    }

    fn next_deadline(&self) -> Option<PoolTime> {
        self.by_deadline.first().map(|(until, _)| *until)
    }

    /// Returns the leases whose clients are still connected.
    fn followed(&mut self) -> Vec<LeaseId> {
        self.sweep();
        self.leases()
    }

    /// Returns the leases of all calls, each once.
    fn leases(&self) -> Vec<LeaseId> {
        let mut leases: Vec<LeaseId> = self.by_lease.iter().map(|(lease, _)| *lease).collect();
        leases.dedup();
        leases
    }

    fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// Removes the calls whose clients hung up.
    fn sweep(&mut self) {
        let closed = self.by_id.values().filter(|call| call.reply.is_closed());
        let closed: Vec<CallId> = closed.map(|call| call.id).collect();
        for call in closed {
            if let Some(call) = self.remove(call) {
                self.abandon(&call);
            }
        }
        self.sweep_at = 2 * self.by_lease.len().max(FOLLOWED_BY_CALL);
    }

    /// Records the leases of a call whose client hung up, if it has no other way to find them.
    fn abandon(&mut self, call: &FollowCall) {
        if call.releases {
            self.abandoned.extend(call.leases.iter());
        }
    }

    fn remove(&mut self, call: CallId) -> Option<FollowCall> {
        let call = self.by_id.remove(&call)?;
        self.by_deadline.remove(&(call.until, call.id));
        for lease in call.leases.iter() {
            self.by_lease.remove(&(*lease, call.id));
        }
        Some(call)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Caller;

    type ReplyReceiver = oneshot::Receiver<Result<Reply, Refusal>>;

    fn call(id: u64, leases: impl IntoIterator<Item = u64>) -> (FollowCall, ReplyReceiver) {
        let (reply, receiver) = oneshot::channel();
        let leases = leases.into_iter().map(LeaseId).collect();
        let (id, until) = (CallId(id), PoolTime(u64::MAX - 1));
        (
            FollowCall {
                id,
                caller: Caller::reader(),
                leases,
                until,
                is_single: false,
                is_poll: true,
                releases: false,
                reply,
            },
            receiver,
        )
    }

    fn due(calls: &mut FollowCalls, now: u64) -> Vec<Vec<u64>> {
        let due = calls.take_due(PoolTime(now));
        due.iter().map(|call| call.leases.iter().map(|lease| lease.0).collect()).collect()
    }

    #[test]
    fn a_lease_wakes_each_of_its_followers_once_and_no_other() {
        let mut calls = FollowCalls::default();
        let (both, _both) = call(1, [1, 2]);
        let (second, _second) = call(2, [2]);
        let (third, _third) = call(3, [3]);
        for call in [both, second, third] {
            calls.add(call);
        }
        calls.wake(LeaseId(2));
        calls.wake(LeaseId(1));
        calls.wake(LeaseId(9));
        assert_eq!(due(&mut calls, 0), [vec![1, 2], vec![2]], "in the order in which they came");
        assert!(due(&mut calls, 0).is_empty());
        assert_eq!(calls.leases(), [LeaseId(3)], "an answered call follows nothing");
        calls.wake(LeaseId(2));
        assert!(due(&mut calls, 0).is_empty());
    }

    #[test]
    fn a_call_is_due_at_its_deadline() {
        let mut calls = FollowCalls::default();
        let (mut early, _early) = call(1, [1]);
        let (mut late, _late) = call(2, [2]);
        (early.until, late.until) = (PoolTime(10), PoolTime(20));
        calls.add(late);
        calls.add(early);
        assert_eq!((calls.next_deadline(), due(&mut calls, 9)), (Some(PoolTime(10)), vec![]));
        assert_eq!((due(&mut calls, 10), calls.next_deadline()), (vec![vec![1]], Some(PoolTime(20))));
        assert_eq!((due(&mut calls, 30), calls.next_deadline()), (vec![vec![2]], None));
    }

    #[test]
    fn a_client_that_hung_up_follows_nothing() {
        let mut calls = FollowCalls::default();
        let (stays, _stays) = call(1, [1, 2]);
        let (goes, gone) = call(2, [2, 3]);
        calls.add(stays);
        calls.add(goes);
        assert_eq!(calls.followed(), [1, 2, 3].map(LeaseId));
        drop(gone);
        assert_eq!(calls.followed(), [1, 2].map(LeaseId));
        drop(_stays);
        assert!(calls.followed().is_empty() && calls.is_empty() && calls.by_deadline.is_empty());
    }

    #[test]
    fn following_again_and_again_does_not_accumulate_calls() {
        const LEASES: u64 = 1_000;
        let mut calls = FollowCalls::default();
        let (stays, _stays) = call(0, 0..LEASES);
        calls.add(stays);
        // Leases come and go meanwhile, so each call follows others.
        for round in 0..1_000 {
            let (again, answer) = call(round + 1, round..round + LEASES);
            calls.add(again);
            drop(answer);
            let most = 2 * FOLLOWED_BY_CALL + LEASES as usize;
            assert!(calls.by_lease.len() <= most, "round {round}: {} of {most}", calls.by_lease.len());
            let of_calls: usize = calls.by_id.values().map(|call| call.leases.len()).sum();
            assert_eq!(of_calls, calls.by_lease.len(), "round {round}");
        }
        assert_eq!(calls.followed().len(), LEASES as usize);
        assert_eq!((calls.by_id.len(), calls.by_lease.len()), (1, LEASES as usize));
    }

    #[test]
    fn too_many_followed_leases_are_refused_and_closed_calls_do_not_count() {
        let mut calls = FollowCalls::default();
        let most = FOLLOWED / FOLLOWED_BY_CALL;
        let all = |id| call(id, 0..FOLLOWED_BY_CALL as u64);
        let mut waiting: Vec<ReplyReceiver> = Vec::new();
        for id in 0..most as u64 {
            let (call, answer) = all(id);
            calls.add(call);
            waiting.push(answer);
        }
        let (refused, mut answer) = all(1_000_000);
        calls.add(refused);
        assert_eq!(answer.try_recv(), Ok(Err(Refusal::Busy)));
        let (single, mut answer) = call(1_000_001, [7]);
        calls.add(single);
        assert!(answer.try_recv().is_err(), "a single lease is followed regardless of the limit");
        waiting.clear();
        let (call, mut answer) = all(1_000_002);
        calls.add(call);
        assert!(answer.try_recv().is_err(), "there is room again");
    }
}

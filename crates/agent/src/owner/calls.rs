//! Calls that wait until one of their leases leaves the queue.
//!
//! A call is kept once, under a number, and for each of its leases there is that number beside the lease's. A call that
//! is told is taken out whole. One whose asker went away is taken out when those who wait are next kept in the queue, and
//! in any case before such calls take more room than the others: however often somebody asks, what is kept here is about
//! as much as is waited for.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpupool_api::lease::Followed;
use gpupool_core::LeaseId;
use tokio::sync::oneshot;

use crate::identity::Caller;
use crate::limits::{FOLLOWED, FOLLOWED_BY_CALL};

use super::Refusal;

/// Somebody asks for leases.
pub(super) struct Call {
    pub caller: Caller,
    /// Which ones, each once.
    pub leases: Arc<[LeaseId]>,
    pub patience: Patience,
    pub reply: oneshot::Sender<Result<Followed, Refusal>>,
}

/// When an answer that tells of nothing new is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Patience {
    /// At once.
    None,
    /// Never: whoever asks goes away when it has waited long enough.
    UntilChanged,
}

impl Call {
    /// Gives the answer; whoever asked may have gone.
    pub fn tell(self, answer: Result<Followed, Refusal>) {
        let _gone = self.reply.send(answer);
    }
}

/// All calls that wait.
#[derive(Default)]
pub(super) struct Calls {
    by_number: BTreeMap<u64, Call>,
    by_lease: BTreeSet<(LeaseId, u64)>,
    /// Calls one of whose leases left the queue, to be told when the batch is through.
    woken: BTreeSet<u64>,
    last: u64,
    /// How many followed leases make it worth looking for those who went away.
    sweep_at: usize,
}

impl Calls {
    /// Keeps a call until it is woken, or refuses it where too much is followed already.
    pub fn add(&mut self, call: Call) {
        if self.by_lease.len() >= self.sweep_at.min(FOLLOWED - FOLLOWED_BY_CALL) {
            self.sweep();
        }
        // A single lease is always followed: there is one connection for each, which are bounded.
        if call.leases.len() > 1 && self.by_lease.len() + call.leases.len() > FOLLOWED {
            return call.tell(Err(Refusal::Busy));
        }
        self.last += 1;
        self.by_lease.extend(call.leases.iter().map(|lease| (*lease, self.last)));
        self.by_number.insert(self.last, call);
    }

    /// A lease left the queue.
    pub fn wake(&mut self, lease: LeaseId) {
        let calls = self.by_lease.range((lease, 0)..=(lease, u64::MAX));
        self.woken.extend(calls.map(|(_, number)| *number));
    }

    /// Takes out those that were woken, in the order they came.
    pub fn take_woken(&mut self) -> Vec<Call> {
        let woken = std::mem::take(&mut self.woken);
        woken.into_iter().filter_map(|number| self.remove(number)).collect()
    }

    /// Leases somebody waits for right now.
    pub fn awaited(&mut self) -> Vec<LeaseId> {
        self.sweep();
        self.leases()
    }

    /// Leases of all calls, each once.
    pub fn leases(&self) -> Vec<LeaseId> {
        let mut leases: Vec<LeaseId> = self.by_lease.iter().map(|(lease, _)| *lease).collect();
        leases.dedup();
        leases
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.by_number.is_empty()
    }

    /// Takes out those whose askers went away.
    fn sweep(&mut self) {
        let gone = self.by_number.iter().filter(|(_, call)| call.reply.is_closed());
        let gone: Vec<u64> = gone.map(|(number, _)| *number).collect();
        for number in gone {
            self.remove(number);
        }
        self.sweep_at = 2 * self.by_lease.len().max(FOLLOWED_BY_CALL);
    }

    fn remove(&mut self, number: u64) -> Option<Call> {
        let call = self.by_number.remove(&number)?;
        for lease in call.leases.iter() {
            self.by_lease.remove(&(*lease, number));
        }
        Some(call)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Answer = oneshot::Receiver<Result<Followed, Refusal>>;

    fn call(leases: impl IntoIterator<Item = u64>) -> (Call, Answer) {
        let (reply, answer) = oneshot::channel();
        let leases = leases.into_iter().map(LeaseId).collect();
        (Call { caller: Caller::reader(), leases, patience: Patience::UntilChanged, reply }, answer)
    }

    fn woken(calls: &mut Calls) -> Vec<Vec<u64>> {
        let woken = calls.take_woken();
        woken.iter().map(|call| call.leases.iter().map(|lease| lease.0).collect()).collect()
    }

    #[test]
    fn a_lease_wakes_whoever_follows_it_once_and_nobody_else() {
        let mut calls = Calls::default();
        let (both, _both) = call([1, 2]);
        let (second, _second) = call([2]);
        let (third, _third) = call([3]);
        for call in [both, second, third] {
            calls.add(call);
        }
        calls.wake(LeaseId(2));
        calls.wake(LeaseId(1));
        calls.wake(LeaseId(9));
        assert_eq!(woken(&mut calls), [vec![1, 2], vec![2]], "in the order they asked");
        assert!(woken(&mut calls).is_empty());
        assert_eq!(calls.leases(), [LeaseId(3)], "who was told waits for nothing");
        calls.wake(LeaseId(2));
        assert!(woken(&mut calls).is_empty());
    }

    #[test]
    fn whoever_went_away_keeps_nothing_in_the_queue() {
        let mut calls = Calls::default();
        let (stays, _stays) = call([1, 2]);
        let (goes, gone) = call([2, 3]);
        calls.add(stays);
        calls.add(goes);
        assert_eq!(calls.awaited(), [1, 2, 3].map(LeaseId));
        drop(gone);
        assert_eq!(calls.awaited(), [1, 2].map(LeaseId));
        drop(_stays);
        assert!(calls.awaited().is_empty() && calls.is_empty());
    }

    #[test]
    fn asking_again_and_again_leaves_no_more_behind_than_is_waited_for() {
        const LEASES: u64 = 1_000;
        let mut calls = Calls::default();
        let (stays, _stays) = call(0..LEASES);
        calls.add(stays);
        // Leases come and go meanwhile: each time it is others that are asked for.
        for round in 0..1_000 {
            let (again, answer) = call(round..round + LEASES);
            calls.add(again);
            drop(answer);
            let most = 2 * FOLLOWED_BY_CALL + LEASES as usize;
            assert!(calls.by_lease.len() <= most, "round {round}: {} of {most}", calls.by_lease.len());
            let of_calls: usize = calls.by_number.values().map(|call| call.leases.len()).sum();
            assert_eq!(of_calls, calls.by_lease.len(), "round {round}");
        }
        assert_eq!(calls.awaited().len(), LEASES as usize);
        assert_eq!((calls.by_number.len(), calls.by_lease.len()), (1, LEASES as usize));
    }

    #[test]
    fn too_many_at_once_are_refused_and_those_who_went_away_do_not_count() {
        let mut calls = Calls::default();
        let most = FOLLOWED / FOLLOWED_BY_CALL;
        let all = || call(0..FOLLOWED_BY_CALL as u64);
        let mut waiting: Vec<Answer> = Vec::new();
        for _ in 0..most {
            let (call, answer) = all();
            calls.add(call);
            waiting.push(answer);
        }
        let (refused, mut answer) = all();
        calls.add(refused);
        assert_eq!(answer.try_recv(), Ok(Err(Refusal::Busy)));
        let (single, mut answer) = call([7]);
        calls.add(single);
        assert!(answer.try_recv().is_err(), "a single one waits all the same");
        waiting.clear();
        let (call, mut answer) = all();
        calls.add(call);
        assert!(answer.try_recv().is_err(), "there is room again");
    }
}

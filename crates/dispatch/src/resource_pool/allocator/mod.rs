//! Who waits, who has which worker, and how many workers there are: decides, and touches nothing.
//!
//! One function for each thing that happens; each takes the time, and adds to `effects` what is to be done about it. The time
//! is wanted again at [`Roster::next_deadline`].

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ResourcePoolStatus;
use crate::limits::MAX_SETUP_TRIES;
use crate::process::backoff;

/// Somebody who asked for a worker; later the hold on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct AcquireTicket(pub u64);

#[derive(Debug, Clone, Copy)]
pub(super) struct AllocatorRules {
    pub min_workers: usize,
    pub max_workers: usize,
    pub acquire_patience: Duration,
    pub worker_timeout: Duration,
    pub idle_time: Duration,
    /// Workers are started only once they have a device: see [`Roster::equip`].
    pub waits_for_devices: bool,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AllocatorEffect {
    /// A process is to be started in this slot.
    Start(usize),
    Grant {
        ticket: AcquireTicket,
        slot: usize,
    },
    Refuse {
        ticket: AcquireTicket,
        why: AcquireRefusal,
    },
    /// The hold took too long and is over; the worker is to be killed.
    HoldTimedOut {
        ticket: AcquireTicket,
        slot: usize,
    },
    /// The worker is to clean up and end.
    Stop(usize),
    Kill(usize),
}

/// Why somebody who waited gets nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AcquireRefusal {
    /// None was free in time.
    TimedOut,
    /// None can be started; the last reason.
    NoWorker(Arc<str>),
    Closed,
}

/// In what state a worker is given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerCondition {
    Reusable,
    /// Nobody else may have it as it is.
    Unusable,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SlotState {
    Empty,
    /// Its process failed; the next one is started then.
    Paused(Instant),
    Starting,
    /// Nobody has it, since then.
    Free(Instant),
    Held {
        ticket: AcquireTicket,
        until: Option<Instant>,
    },
    /// Killed or told to end, and not gone yet.
    Ending,
}

impl SlotState {
    fn holder(self) -> Option<AcquireTicket> {
        if let Self::Held { ticket, .. } = self { Some(ticket) } else { None }
    }
}

#[derive(Debug)]
struct AllocatorSlot {
    state: SlotState,
    device: DeviceAvailability,
    /// Times in a row that its process failed, without a hold that ended well between.
    failures: u32,
    /// Its process will be gone in a moment.
    is_dying: bool,
}

#[derive(Debug)]
struct AcquireWaiter {
    ticket: AcquireTicket,
    until: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct WorkerAllocator {
    rules: AllocatorRules,
    slots: Vec<AllocatorSlot>,
    waiters: VecDeque<AcquireWaiter>,
    /// Times in a row that no process could be started.
    start_failures: u32,
    last_failure: Option<Arc<str>>,
    is_closed: bool,
}

impl WorkerAllocator {
    /// An empty one; [`Roster::tick`] has the first workers started.
    pub(super) fn new(rules: AllocatorRules) -> Self {
        let device = if rules.waits_for_devices { DeviceAvailability::Awaited } else { DeviceAvailability::Available };
        let slot = |_| AllocatorSlot { state: SlotState::Empty, device, failures: 0, is_dying: false };
        Self {
            rules,
            slots: (0..rules.max_workers).map(slot).collect(),
            waiters: VecDeque::new(),
            start_failures: 0,
            last_failure: None,
            is_closed: false,
        }
    }

    /// Somebody wants a worker, after all who wait.
    pub(super) fn enqueue(&mut self, ticket: AcquireTicket, now: Instant, effects: &mut Vec<AllocatorEffect>) {
        if self.is_closed {
            return effects.push(AllocatorEffect::Refuse { ticket, why: AcquireRefusal::Closed });
        }
        self.waiters.push_back(AcquireWaiter { ticket, until: now.checked_add(self.rules.acquire_patience) });
        self.rebalance(now, effects);
    }

    /// Somebody does not want to wait any longer.
    pub(super) fn cancel_wait(&mut self, ticket: AcquireTicket) {
        // From the front, where those who have waited longest give up first.
        if let Some(index) = self.waiters.iter().position(|waiter| waiter.ticket == ticket) {
            self.waiters.remove(index);
        }
    }

    /// A worker was started and set up.
    pub(super) fn mark_ready(&mut self, slot: usize, now: Instant, effects: &mut Vec<AllocatorEffect>) {
        self.start_failures = 0;
        // One that is ending already stays so.
        if self.slots[slot].state == SlotState::Starting {
            self.slots[slot].state = SlotState::Free(now);
            self.rebalance(now, effects);
        }
    }

    /// A hold is over, by the will of whoever had it. Whether it was not over before.
    pub(super) fn release_worker(
        &mut self,
        ticket: AcquireTicket,
        condition: WorkerCondition,
        now: Instant,
        effects: &mut Vec<AllocatorEffect>,
    ) -> bool {
        let Some(index) = self.slots.iter().position(|slot| slot.state.holder() == Some(ticket)) else { return false };
        let slot = &mut self.slots[index];
        slot.failures = 0;
        slot.state = match condition {
            WorkerCondition::Reusable if !self.is_closed && !slot.is_dying => SlotState::Free(now),
            // Also one that was told to end when all was closed.
            _ => SlotState::Ending,
        };
        if condition == WorkerCondition::Unusable {
            effects.push(AllocatorEffect::Kill(index));
        }
        self.rebalance(now, effects);
        true
    }

    /// A worker's process will be gone in a moment: nobody gets it any more. Whoever has it is told when it is gone.
    pub(super) fn mark_dying(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        slot.is_dying = true;
        if let SlotState::Free(_) = slot.state {
            slot.state = SlotState::Ending;
        }
    }

    /// A worker's process is gone, or never was; whose hold is over by that. `failure` is why it could not be started or died by
    /// itself; `None` where we ended it.
    pub(super) fn process_gone(
        &mut self,
        index: usize,
        failure: Option<Arc<str>>,
        now: Instant,
        effects: &mut Vec<AllocatorEffect>,
    ) -> Option<AcquireTicket> {
        self.slots[index].is_dying = false;
        let was = std::mem::replace(&mut self.slots[index].state, SlotState::Empty);
        if let Some(why) = failure {
            self.slots[index].failures += 1;
            self.start_failures += u32::from(was == SlotState::Starting);
            self.last_failure = Some(why);
        }
        if !self.is_closed && self.slots[index].device == DeviceAvailability::Available && self.needs_worker() {
            let pause = backoff(self.slots[index].failures);
            self.slots[index].state = SlotState::Paused(now + pause);
        }
        self.refuse_if_unavailable(effects);
        self.rebalance(now, effects);
        was.holder()
    }

    /// It is later: who waited, worked or idled long enough.
    pub(super) fn advance_time(&mut self, now: Instant, effects: &mut Vec<AllocatorEffect>) {
        let is_due = |until: Option<Instant>| until.is_some_and(|until| until <= now);
        while let Some(waiter) = self.waiters.pop_front_if(|waiter| is_due(waiter.until)) {
            effects.push(AllocatorEffect::Refuse { ticket: waiter.ticket, why: AcquireRefusal::TimedOut });
        }
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if let SlotState::Held { ticket, until } = slot.state
                && is_due(until)
            {
                (slot.state, slot.failures) = (SlotState::Ending, 0);
                effects.push(AllocatorEffect::HoldTimedOut { ticket, slot: index });
            }
        }
        self.stop_idle_workers(now, effects);
        self.rebalance(now, effects);
    }

    /// Nobody gets a worker any more, and all workers end.
    pub(super) fn close(&mut self, effects: &mut Vec<AllocatorEffect>) {
        self.is_closed = true;
        let refused = self.waiters.drain(..);
        effects.extend(
            refused.map(|waiter| AllocatorEffect::Refuse { ticket: waiter.ticket, why: AcquireRefusal::Closed }),
        );
        for (index, slot) in self.slots.iter_mut().enumerate() {
            match slot.state {
                SlotState::Paused(_) => slot.state = SlotState::Empty,
                SlotState::Starting => {
                    slot.state = SlotState::Ending;
                    effects.push(AllocatorEffect::Kill(index));
                }
                SlotState::Free(_) => {
                    slot.state = SlotState::Ending;
                    effects.push(AllocatorEffect::Stop(index));
                }
                // Whoever has it keeps it while it is told to end.
                SlotState::Held { .. } => effects.push(AllocatorEffect::Stop(index)),
                SlotState::Empty | SlotState::Ending => {}
            }
        }
    }

    /// When the time is wanted next.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let may_shrink = self.live_count() > self.rules.min_workers;
        let of_slot = |slot: &AllocatorSlot| match slot.state {
            SlotState::Paused(until) => Some(until),
            SlotState::Held { until, .. } => until,
            SlotState::Free(since) if may_shrink => since.checked_add(self.rules.idle_time),
            _ => None,
        };
        let waiter = self.waiters.front().and_then(|waiter| waiter.until);
        self.slots.iter().filter_map(of_slot).chain(waiter).min()
    }

    /// Why no worker can be had for now: there is none, and none could be started for a while.
    pub(super) fn unavailable_reason(&self) -> Option<Arc<str>> {
        let is_failing = |slot: &AllocatorSlot| match slot.state {
            SlotState::Empty => slot.device != DeviceAvailability::Awaited,
            SlotState::Paused(_) | SlotState::Starting => slot.failures > 0,
            SlotState::Free(_) | SlotState::Held { .. } | SlotState::Ending => false,
        };
        let all = |is: &dyn Fn(&AllocatorSlot) -> bool| self.slots.iter().all(is);
        let is_denied = all(&|slot| slot.state == SlotState::Empty && slot.device == DeviceAvailability::Denied);
        let is_unavailable = is_denied || self.start_failures >= MAX_SETUP_TRIES && all(&is_failing);
        self.last_failure.clone().filter(|_| is_unavailable)
    }

    /// Who has the worker of a slot.
    pub(super) fn holder(&self, slot: usize) -> Option<AcquireTicket> {
        self.slots[slot].state.holder()
    }

    /// Why a process last failed.
    pub(super) fn last_failure(&self) -> Option<&Arc<str>> {
        self.last_failure.as_ref()
    }

    /// How many workers are in which state, and whether any can be had.
    pub(super) fn status(&self) -> ResourcePoolStatus {
        let count = |is: fn(&SlotState) -> bool| self.slots.iter().filter(|slot| is(&slot.state)).count();
        ResourcePoolStatus {
            total_workers: self.live_count(),
            available_workers: count(|state| matches!(state, SlotState::Free(_))),
            active_tasks: count(|state| matches!(state, SlotState::Held { .. })),
            waiting_tasks: self.waiters.len(),
            failure: self.unavailable_reason(),
            ..ResourcePoolStatus::default()
        }
    }

    /// Whether all is closed and every worker gone.
    pub(super) fn is_over(&self) -> bool {
        self.is_closed && self.live_count() == 0
    }
}

impl WorkerAllocator {
    fn live_count(&self) -> usize {
        self.slots.iter().filter(|slot| slot.state != SlotState::Empty).count()
    }

    /// Those that may soon be free, and have not failed.
    fn starting_count(&self) -> usize {
        let is_coming = |slot: &&AllocatorSlot| {
            matches!(slot.state, SlotState::Starting | SlotState::Paused(_)) && slot.failures == 0
        };
        self.slots.iter().filter(is_coming).count()
    }

    fn refuse_if_unavailable(&mut self, effects: &mut Vec<AllocatorEffect>) {
        let Some(why) = self.unavailable_reason().map(AcquireRefusal::NoWorker) else { return };
        let waiters = self.waiters.drain(..);
        effects.extend(waiters.map(|waiter| AllocatorEffect::Refuse { ticket: waiter.ticket, why: why.clone() }));
    }

    fn needs_worker(&self) -> bool {
        self.live_count() < self.rules.min_workers || self.waiters.len() > self.starting_count()
    }

    /// Where none can be started, trying in more and more places helps nobody.
    fn can_grow(&self) -> bool {
        let is_trying = |slot: &AllocatorSlot| matches!(slot.state, SlotState::Starting | SlotState::Paused(_));
        self.start_failures < MAX_SETUP_TRIES || !self.slots.iter().any(is_trying)
    }

    /// Ends those that idled too long, the last ones first.
    fn stop_idle_workers(&mut self, now: Instant, effects: &mut Vec<AllocatorEffect>) {
        let mut left = self.live_count();
        for (index, slot) in self.slots.iter_mut().enumerate().rev() {
            let SlotState::Free(since) = slot.state else { continue };
            let is_idle = since.checked_add(self.rules.idle_time).is_some_and(|until| until <= now);
            if is_idle && left > self.rules.min_workers {
                slot.state = SlotState::Ending;
                left -= 1;
                effects.push(AllocatorEffect::Stop(index));
            }
        }
    }

    /// Gives free workers to those who wait, and has workers started where there are too few.
    fn rebalance(&mut self, now: Instant, effects: &mut Vec<AllocatorEffect>) {
        if self.is_closed {
            return;
        }
        self.grant_free_workers(now, effects);
        self.restart_paused_slots(now, effects);
        while self.live_count() < self.rules.min_workers
            || (self.waiters.len() > self.starting_count() && self.can_grow())
        {
            let may_start =
                |slot: &AllocatorSlot| slot.state == SlotState::Empty && slot.device == DeviceAvailability::Available;
            let empty = self.slots.iter_mut().enumerate().filter(|(_, slot)| may_start(slot));
            // One that never failed is worth more hope.
            let Some((index, slot)) = empty.min_by_key(|(index, slot)| (slot.failures, *index)) else { return };
            slot.state = SlotState::Starting;
            effects.push(AllocatorEffect::Start(index));
        }
    }

    fn grant_free_workers(&mut self, now: Instant, effects: &mut Vec<AllocatorEffect>) {
        while !self.waiters.is_empty() {
            let Some(index) = self.slots.iter().position(|slot| matches!(slot.state, SlotState::Free(_))) else {
                return;
            };
            let Some(AcquireWaiter { ticket, .. }) = self.waiters.pop_front() else { return };
            let until = now.checked_add(self.rules.worker_timeout);
            self.slots[index].state = SlotState::Held { ticket, until };
            effects.push(AllocatorEffect::Grant { ticket, slot: index });
        }
    }

    fn restart_paused_slots(&mut self, now: Instant, effects: &mut Vec<AllocatorEffect>) {
        for index in 0..self.slots.len() {
            if !matches!(self.slots[index].state, SlotState::Paused(until) if until <= now) {
                continue;
            }
            self.slots[index].state = SlotState::Empty;
            if self.needs_worker() {
                self.slots[index].state = SlotState::Starting;
                effects.push(AllocatorEffect::Start(index));
            }
        }
    }
}

/// Whether there is something for a worker to work on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DeviceAvailability {
    Available,
    Awaited,
    /// It will never come.
    Denied,
}

impl WorkerAllocator {
    /// The worker of a slot has a device now, and may be started.
    pub(super) fn attach_device(&mut self, index: usize, now: Instant, effects: &mut Vec<AllocatorEffect>) {
        self.slots[index].device = DeviceAvailability::Available;
        self.rebalance(now, effects);
    }

    /// The device of a slot is gone, and its worker must be; whose hold is over by that. Another device may come.
    pub(super) fn detach_device(
        &mut self,
        index: usize,
        now: Instant,
        effects: &mut Vec<AllocatorEffect>,
    ) -> Option<AcquireTicket> {
        let slot = &mut self.slots[index];
        slot.device = DeviceAvailability::Awaited;
        let was = slot.state;
        match was {
            SlotState::Empty | SlotState::Ending => {}
            SlotState::Paused(_) => slot.state = SlotState::Empty,
            SlotState::Starting | SlotState::Free(_) | SlotState::Held { .. } => {
                slot.state = SlotState::Ending;
                effects.push(AllocatorEffect::Kill(index));
            }
        }
        self.rebalance(now, effects);
        was.holder()
    }

    /// No device will ever come for this slot.
    pub(super) fn deny_device(&mut self, index: usize, why: Arc<str>, effects: &mut Vec<AllocatorEffect>) {
        self.slots[index].device = DeviceAvailability::Denied;
        self.last_failure = Some(why);
        self.refuse_if_unavailable(effects);
    }
}

//! The worker allocator: decides which waiter gets which worker, and how many workers run. It performs no I/O.
//!
//! Each event is a function that takes the time and adds to `effects`. Time must advance again at
//! [`WorkerAllocator::next_deadline`].

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ResourcePoolStatus;
use crate::limits::MAX_SETUP_TRIES;
use crate::process::backoff;

/// Ticket of an acquire, and of the hold that follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct AcquireTicket(pub u64);

#[derive(Debug, Clone, Copy)]
pub(super) struct PoolRules {
    pub min_workers: usize,
    pub max_workers: usize,
    pub acquire_patience: Duration,
    pub worker_timeout: Duration,
    pub idle_time: Duration,
    /// Whether workers start only once they have a device: see [`WorkerAllocator::attach_device`].
    pub waits_for_devices: bool,
}

/// An effect that the pool applies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AllocatorEffect {
    /// Start a process in this slot.
    Start(usize),
    Grant {
        ticket: AcquireTicket,
        slot: usize,
    },
    Refuse {
        ticket: AcquireTicket,
        why: AcquireRefusal,
    },
    /// The hold reached its time limit and has ended; kill the worker.
    HoldTimedOut {
        ticket: AcquireTicket,
        slot: usize,
    },
    /// Order the worker to clean up and exit.
    Stop(usize),
    Kill(usize),
}

/// Reason for which a waiter gets no worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AcquireRefusal {
    /// No worker was free in time.
    TimedOut,
    /// No worker can be started; holds the last reason.
    NoWorker(Arc<str>),
    Closed,
}

/// Condition of a returned worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerCondition {
    Reusable,
    /// The worker must not be reused.
    Unusable,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SlotState {
    Empty,
    /// The process failed; the next one starts at this time.
    Paused(Instant),
    Starting,
    /// Idle since this time.
    Free(Instant),
    Held {
        ticket: AcquireTicket,
        until: Option<Instant>,
    },
    /// Killed or ordered to exit, and not gone yet.
    Ending,
}

impl SlotState {
    fn holder(self) -> Option<AcquireTicket> {
        if let Self::Held { ticket, .. } = self { Some(ticket) } else { None }
    }
}

#[derive(Debug)]
struct PoolSlot {
    state: SlotState,
    device: DeviceAvailability,
    /// Consecutive failures of its process without a hold that ended well.
    failures: u32,
    /// Whether its process is about to exit.
    is_dying: bool,
}

#[derive(Debug)]
struct AcquireWaiter {
    ticket: AcquireTicket,
    until: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct WorkerAllocator {
    rules: PoolRules,
    slots: Vec<PoolSlot>,
    waiters: VecDeque<AcquireWaiter>,
    /// Consecutive failures to start a process, over all slots.
    start_failures: u32,
    last_failure: Option<Arc<str>>,
    is_closed: bool,
}

impl WorkerAllocator {
    /// Creates an allocator without workers; [`WorkerAllocator::advance_time`] starts the first ones.
    pub(super) fn new(rules: PoolRules) -> Self {
        let device = if rules.waits_for_devices { DeviceAvailability::Awaited } else { DeviceAvailability::Available };
        let slot = |_| PoolSlot { state: SlotState::Empty, device, failures: 0, is_dying: false };
        Self {
            rules,
            slots: (0..rules.max_workers).map(slot).collect(),
            waiters: VecDeque::new(),
            start_failures: 0,
            last_failure: None,
            is_closed: false,
        }
    }

    /// Appends a waiter to the queue.
    pub(super) fn enqueue(&mut self, ticket: AcquireTicket, now: Instant, effects: &mut Vec<AllocatorEffect>) {
        if self.is_closed {
            return effects.push(AllocatorEffect::Refuse { ticket, why: AcquireRefusal::Closed });
        }
        self.waiters.push_back(AcquireWaiter { ticket, until: now.checked_add(self.rules.acquire_patience) });
        self.rebalance(now, effects);
    }

    /// Removes a waiter from the queue.
    pub(super) fn cancel_wait(&mut self, ticket: AcquireTicket) {
        // From the front, because the oldest waiters give up first.
        if let Some(index) = self.waiters.iter().position(|waiter| waiter.ticket == ticket) {
            self.waiters.remove(index);
        }
    }

    /// Marks a started worker as set up.
    pub(super) fn mark_ready(&mut self, slot: usize, now: Instant, effects: &mut Vec<AllocatorEffect>) {
        self.start_failures = 0;
        // A worker that is ending already stays so.
        if self.slots[slot].state == SlotState::Starting {
            self.slots[slot].state = SlotState::Free(now);
            self.rebalance(now, effects);
        }
    }

    /// Ends a hold by its holder. Returns whether the hold had not ended before.
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
            // Includes a worker that was ordered to exit when the pool closed.
            _ => SlotState::Ending,
        };
        if condition == WorkerCondition::Unusable {
            effects.push(AllocatorEffect::Kill(index));
        }
        self.rebalance(now, effects);
        true
    }

    /// Marks a worker as about to exit, so that it is not granted any more. Its holder is notified when the process is
    /// gone.
    pub(super) fn mark_dying(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        slot.is_dying = true;
        if let SlotState::Free(_) = slot.state {
            slot.state = SlotState::Ending;
        }
    }

    /// Removes the process of a slot and returns the hold that ends with it. `failure` is the reason if the process
    /// failed to start or exited on its own.
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

    /// Handles deadlines: waiters, holds and idle workers.
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

    /// Refuses all waiters and ends all workers.
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
                // The holder keeps the worker until it exits.
                SlotState::Held { .. } => effects.push(AllocatorEffect::Stop(index)),
                SlotState::Empty | SlotState::Ending => {}
            }
        }
    }

    /// Returns the time of the next deadline.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let may_shrink = self.live() > self.rules.min_workers;
        let of_slot = |slot: &PoolSlot| match slot.state {
            SlotState::Paused(until) => Some(until),
            SlotState::Held { until, .. } => until,
            SlotState::Free(since) if may_shrink => since.checked_add(self.rules.idle_time),
            _ => None,
        };
        let waiter = self.waiters.front().and_then(|waiter| waiter.until);
        self.slots.iter().filter_map(of_slot).chain(waiter).min()
    }

    /// Returns the reason if no worker is available for now: none runs, and none could be started for a while.
    pub(super) fn unavailable_reason(&self) -> Option<Arc<str>> {
        let is_failing = |slot: &PoolSlot| match slot.state {
            SlotState::Empty => slot.device != DeviceAvailability::Awaited,
            SlotState::Paused(_) | SlotState::Starting => slot.failures > 0,
            SlotState::Free(_) | SlotState::Held { .. } | SlotState::Ending => false,
        };
        let all = |is: &dyn Fn(&PoolSlot) -> bool| self.slots.iter().all(is);
        let is_denied = all(&|slot| slot.state == SlotState::Empty && slot.device == DeviceAvailability::Denied);
        let is_unavailable = is_denied || self.start_failures >= MAX_SETUP_TRIES && all(&is_failing);
        self.last_failure.clone().filter(|_| is_unavailable)
    }

    /// Returns the holder of a slot's worker.
    pub(super) fn holder(&self, slot: usize) -> Option<AcquireTicket> {
        self.slots[slot].state.holder()
    }

    /// Returns the reason of the last process failure.
    pub(super) fn last_failure(&self) -> Option<&Arc<str>> {
        self.last_failure.as_ref()
    }

    /// Returns the numbers of workers by state, and the failure if none is available.
    pub(super) fn status(&self) -> ResourcePoolStatus {
        let count = |is: fn(&SlotState) -> bool| self.slots.iter().filter(|slot| is(&slot.state)).count();
        ResourcePoolStatus {
            total_workers: self.live(),
            available_workers: count(|state| matches!(state, SlotState::Free(_))),
            active_tasks: count(|state| matches!(state, SlotState::Held { .. })),
            waiting_tasks: self.waiters.len(),
            failure: self.unavailable_reason(),
            ..ResourcePoolStatus::default()
        }
    }

    /// Whether the allocator is closed and every worker is gone.
    pub(super) fn is_over(&self) -> bool {
        self.is_closed && self.live() == 0
    }
}

impl WorkerAllocator {
    fn live(&self) -> usize {
        self.slots.iter().filter(|slot| slot.state != SlotState::Empty).count()
    }

    /// Returns the number of workers that may soon be free and have not failed.
    fn starting(&self) -> usize {
        let is_coming =
            |slot: &&PoolSlot| matches!(slot.state, SlotState::Starting | SlotState::Paused(_)) && slot.failures == 0;
        self.slots.iter().filter(is_coming).count()
    }

    fn refuse_if_unavailable(&mut self, effects: &mut Vec<AllocatorEffect>) {
        let Some(why) = self.unavailable_reason().map(AcquireRefusal::NoWorker) else { return };
        let waiters = self.waiters.drain(..);
        effects.extend(waiters.map(|waiter| AllocatorEffect::Refuse { ticket: waiter.ticket, why: why.clone() }));
    }

    fn needs_worker(&self) -> bool {
        self.live() < self.rules.min_workers || self.waiters.len() > self.starting()
    }

    /// Whether more slots may be tried; after repeated start failures that helps no waiter.
    fn can_grow(&self) -> bool {
        let is_trying = |slot: &PoolSlot| matches!(slot.state, SlotState::Starting | SlotState::Paused(_));
        self.start_failures < MAX_SETUP_TRIES || !self.slots.iter().any(is_trying)
    }

    /// Stops workers that idled too long, the last slots first.
    fn stop_idle_workers(&mut self, now: Instant, effects: &mut Vec<AllocatorEffect>) {
        let mut running = self.live();
        for (index, slot) in self.slots.iter_mut().enumerate().rev() {
            let SlotState::Free(since) = slot.state else { continue };
            let is_idle = since.checked_add(self.rules.idle_time).is_some_and(|until| until <= now);
            if is_idle && running > self.rules.min_workers {
                slot.state = SlotState::Ending;
                running -= 1;
                effects.push(AllocatorEffect::Stop(index));
            }
        }
    }

    /// Grants free workers to waiters and starts workers if there are too few.
    fn rebalance(&mut self, now: Instant, effects: &mut Vec<AllocatorEffect>) {
        if self.is_closed {
            return;
        }
        self.grant_free_workers(now, effects);
        self.restart_paused_slots(now, effects);
        while self.live() < self.rules.min_workers || (self.waiters.len() > self.starting() && self.can_grow()) {
            let may_start =
                |slot: &PoolSlot| slot.state == SlotState::Empty && slot.device == DeviceAvailability::Available;
            let empty = self.slots.iter_mut().enumerate().filter(|(_, slot)| may_start(slot));
            // Prefers the slots with the fewest failures.
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

/// Availability of a device for a slot's worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DeviceAvailability {
    Available,
    Awaited,
    /// The slot will never have a device.
    Denied,
}

impl WorkerAllocator {
    /// Assigns a slot its device, so that its worker may start.
    pub(super) fn attach_device(&mut self, index: usize, now: Instant, effects: &mut Vec<AllocatorEffect>) {
        self.slots[index].device = DeviceAvailability::Available;
        self.rebalance(now, effects);
    }

    /// Takes the device of a slot, which ends its worker, and returns the hold that ends with it. Another device may
    /// follow.
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

    /// Marks that this slot will never have a device.
    pub(super) fn deny_device(&mut self, index: usize, why: Arc<str>, effects: &mut Vec<AllocatorEffect>) {
        self.slots[index].device = DeviceAvailability::Denied;
        self.last_failure = Some(why);
        self.refuse_if_unavailable(effects);
    }
}

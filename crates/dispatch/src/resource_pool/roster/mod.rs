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
use crate::limits::SETUP_TRIES;
use crate::process::backoff;

/// Somebody who asked for a worker; later the hold on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Ticket(pub u64);

#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    pub min_workers: usize,
    pub max_workers: usize,
    pub acquire_patience: Duration,
    pub worker_timeout: Duration,
    pub idle_time: Duration,
    /// Workers are started only once they have a device: see [`Roster::equip`].
    pub devices_come_later: bool,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Effect {
    /// A process is to be started in this slot.
    Start(usize),
    Grant {
        ticket: Ticket,
        slot: usize,
    },
    Refuse {
        ticket: Ticket,
        why: Refusal,
    },
    /// The hold took too long and is over; the worker is to be killed.
    TimeUp {
        ticket: Ticket,
        slot: usize,
    },
    /// The worker is to clean up and end.
    Stop(usize),
    Kill(usize),
}

/// Why somebody who waited gets nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Refusal {
    /// None was free in time.
    Patience,
    /// None can be started; the last reason.
    NoWorker(Arc<str>),
    Closed,
}

/// In what state a worker is given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fitness {
    Fit,
    /// Nobody else may have it as it is.
    Unfit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Empty,
    /// Its process failed; the next one is started then.
    Pausing(Instant),
    Starting,
    /// Nobody has it, since then.
    Free(Instant),
    Held {
        ticket: Ticket,
        until: Option<Instant>,
    },
    /// Killed or told to end, and not gone yet.
    Ending,
}

impl State {
    fn holder(self) -> Option<Ticket> {
        if let Self::Held { ticket, .. } = self { Some(ticket) } else { None }
    }
}

#[derive(Debug)]
struct Slot {
    state: State,
    device: Device,
    /// Times in a row that its process failed, without a hold that ended well between.
    deaths: u32,
    /// Its process will be gone in a moment.
    is_dying: bool,
}

#[derive(Debug)]
struct Waiter {
    ticket: Ticket,
    until: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Roster {
    rules: Rules,
    slots: Vec<Slot>,
    line: VecDeque<Waiter>,
    /// Times in a row that no process could be started.
    failures: u32,
    last_failure: Option<Arc<str>>,
    is_closed: bool,
}

impl Roster {
    /// An empty one; [`Roster::tick`] has the first workers started.
    pub(super) fn new(rules: Rules) -> Self {
        let device = if rules.devices_come_later { Device::Awaited } else { Device::Here };
        let slot = |_| Slot { state: State::Empty, device, deaths: 0, is_dying: false };
        Self {
            rules,
            slots: (0..rules.max_workers).map(slot).collect(),
            line: VecDeque::new(),
            failures: 0,
            last_failure: None,
            is_closed: false,
        }
    }

    /// Somebody wants a worker, after all who wait.
    pub(super) fn ask(&mut self, ticket: Ticket, now: Instant, effects: &mut Vec<Effect>) {
        if self.is_closed {
            return effects.push(Effect::Refuse { ticket, why: Refusal::Closed });
        }
        self.line.push_back(Waiter { ticket, until: now.checked_add(self.rules.acquire_patience) });
        self.settle(now, effects);
    }

    /// Somebody does not want to wait any longer.
    pub(super) fn leave(&mut self, ticket: Ticket) {
        // From the front, where those who have waited longest give up first.
        if let Some(at) = self.line.iter().position(|waiter| waiter.ticket == ticket) {
            self.line.remove(at);
        }
    }

    /// A worker was started and set up.
    pub(super) fn ready(&mut self, slot: usize, now: Instant, effects: &mut Vec<Effect>) {
        self.failures = 0;
        // One that is ending already stays so.
        if self.slots[slot].state == State::Starting {
            self.slots[slot].state = State::Free(now);
            self.settle(now, effects);
        }
    }

    /// A hold is over, by the will of whoever had it. Whether it was not over before.
    pub(super) fn give_back(
        &mut self,
        ticket: Ticket,
        fitness: Fitness,
        now: Instant,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Some(at) = self.slots.iter().position(|slot| slot.state.holder() == Some(ticket)) else { return false };
        let slot = &mut self.slots[at];
        slot.deaths = 0;
        slot.state = match fitness {
            Fitness::Fit if !self.is_closed && !slot.is_dying => State::Free(now),
            // Also one that was told to end when all was closed.
            _ => State::Ending,
        };
        if fitness == Fitness::Unfit {
            effects.push(Effect::Kill(at));
        }
        self.settle(now, effects);
        true
    }

    /// A worker's process will be gone in a moment: nobody gets it any more. Whoever has it is told when it is gone.
    pub(super) fn dying(&mut self, at: usize) {
        let slot = &mut self.slots[at];
        slot.is_dying = true;
        if let State::Free(_) = slot.state {
            slot.state = State::Ending;
        }
    }

    /// A worker's process is gone, or never was; whose hold is over by that. `failure` is why it could not be started or died by
    /// itself; `None` where we ended it.
    pub(super) fn gone(
        &mut self,
        at: usize,
        failure: Option<Arc<str>>,
        now: Instant,
        effects: &mut Vec<Effect>,
    ) -> Option<Ticket> {
        self.slots[at].is_dying = false;
        let was = std::mem::replace(&mut self.slots[at].state, State::Empty);
        if let Some(why) = failure {
            self.slots[at].deaths += 1;
            self.failures += u32::from(was == State::Starting);
            self.last_failure = Some(why);
        }
        if !self.is_closed && self.slots[at].device == Device::Here && self.needs_another() {
            let pause = backoff(self.slots[at].deaths);
            self.slots[at].state = State::Pausing(now + pause);
        }
        self.refuse_if_hopeless(effects);
        self.settle(now, effects);
        was.holder()
    }

    /// It is later: who waited, worked or idled long enough.
    pub(super) fn tick(&mut self, now: Instant, effects: &mut Vec<Effect>) {
        let is_due = |until: Option<Instant>| until.is_some_and(|until| until <= now);
        while let Some(waiter) = self.line.pop_front_if(|waiter| is_due(waiter.until)) {
            effects.push(Effect::Refuse { ticket: waiter.ticket, why: Refusal::Patience });
        }
        for (at, slot) in self.slots.iter_mut().enumerate() {
            if let State::Held { ticket, until } = slot.state
                && is_due(until)
            {
                (slot.state, slot.deaths) = (State::Ending, 0);
                effects.push(Effect::TimeUp { ticket, slot: at });
            }
        }
        self.shrink(now, effects);
        self.settle(now, effects);
    }

    /// Nobody gets a worker any more, and all workers end.
    pub(super) fn close(&mut self, effects: &mut Vec<Effect>) {
        self.is_closed = true;
        let refused = self.line.drain(..);
        effects.extend(refused.map(|waiter| Effect::Refuse { ticket: waiter.ticket, why: Refusal::Closed }));
        for (at, slot) in self.slots.iter_mut().enumerate() {
            match slot.state {
                State::Pausing(_) => slot.state = State::Empty,
                State::Starting => {
                    slot.state = State::Ending;
                    effects.push(Effect::Kill(at));
                }
                State::Free(_) => {
                    slot.state = State::Ending;
                    effects.push(Effect::Stop(at));
                }
                // Whoever has it keeps it while it is told to end.
                State::Held { .. } => effects.push(Effect::Stop(at)),
                State::Empty | State::Ending => {}
            }
        }
    }

    /// When the time is wanted next.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let may_shrink = self.total() > self.rules.min_workers;
        let of_slot = |slot: &Slot| match slot.state {
            State::Pausing(until) => Some(until),
            State::Held { until, .. } => until,
            State::Free(since) if may_shrink => since.checked_add(self.rules.idle_time),
            _ => None,
        };
        let waiter = self.line.front().and_then(|waiter| waiter.until);
        self.slots.iter().filter_map(of_slot).chain(waiter).min()
    }

    /// Why no worker can be had for now: there is none, and none could be started for a while.
    pub(super) fn hopeless(&self) -> Option<Arc<str>> {
        let is_failing = |slot: &Slot| match slot.state {
            State::Empty => slot.device != Device::Awaited,
            State::Pausing(_) | State::Starting => slot.deaths > 0,
            State::Free(_) | State::Held { .. } | State::Ending => false,
        };
        let all = |is: &dyn Fn(&Slot) -> bool| self.slots.iter().all(is);
        let is_denied = all(&|slot| slot.state == State::Empty && slot.device == Device::Denied);
        let is_hopeless = is_denied || self.failures >= SETUP_TRIES && all(&is_failing);
        self.last_failure.clone().filter(|_| is_hopeless)
    }

    /// Who has the worker of a slot.
    pub(super) fn holder(&self, slot: usize) -> Option<Ticket> {
        self.slots[slot].state.holder()
    }

    /// Why a process last failed.
    pub(super) fn last_failure(&self) -> Option<&Arc<str>> {
        self.last_failure.as_ref()
    }

    /// How many workers are in which state, and whether any can be had.
    pub(super) fn status(&self) -> ResourcePoolStatus {
        let count = |is: fn(&State) -> bool| self.slots.iter().filter(|slot| is(&slot.state)).count();
        ResourcePoolStatus {
            total_workers: self.total(),
            available_workers: count(|state| matches!(state, State::Free(_))),
            active_tasks: count(|state| matches!(state, State::Held { .. })),
            waiting_tasks: self.line.len(),
            failure: self.hopeless(),
            ..ResourcePoolStatus::default()
        }
    }

    /// Whether all is closed and every worker gone.
    pub(super) fn is_over(&self) -> bool {
        self.is_closed && self.total() == 0
    }
}

impl Roster {
    fn total(&self) -> usize {
        self.slots.iter().filter(|slot| slot.state != State::Empty).count()
    }

    /// Those that may soon be free, and have not failed.
    fn coming(&self) -> usize {
        let is_coming = |slot: &&Slot| matches!(slot.state, State::Starting | State::Pausing(_)) && slot.deaths == 0;
        self.slots.iter().filter(is_coming).count()
    }

    fn refuse_if_hopeless(&mut self, effects: &mut Vec<Effect>) {
        let Some(why) = self.hopeless().map(Refusal::NoWorker) else { return };
        let line = self.line.drain(..);
        effects.extend(line.map(|waiter| Effect::Refuse { ticket: waiter.ticket, why: why.clone() }));
    }

    fn needs_another(&self) -> bool {
        self.total() < self.rules.min_workers || self.line.len() > self.coming()
    }

    /// Where none can be started, trying in more and more places helps nobody.
    fn may_grow(&self) -> bool {
        let is_trying = |slot: &Slot| matches!(slot.state, State::Starting | State::Pausing(_));
        self.failures < SETUP_TRIES || !self.slots.iter().any(is_trying)
    }

    /// Ends those that idled too long, the last ones first.
    fn shrink(&mut self, now: Instant, effects: &mut Vec<Effect>) {
        let mut left = self.total();
        for (at, slot) in self.slots.iter_mut().enumerate().rev() {
            let State::Free(since) = slot.state else { continue };
            let is_idle = since.checked_add(self.rules.idle_time).is_some_and(|until| until <= now);
            if is_idle && left > self.rules.min_workers {
                slot.state = State::Ending;
                left -= 1;
                effects.push(Effect::Stop(at));
            }
        }
    }

    /// Gives free workers to those who wait, and has workers started where there are too few.
    fn settle(&mut self, now: Instant, effects: &mut Vec<Effect>) {
        if self.is_closed {
            return;
        }
        self.serve(now, effects);
        self.end_pauses(now, effects);
        while self.total() < self.rules.min_workers || (self.line.len() > self.coming() && self.may_grow()) {
            let may_start = |slot: &Slot| slot.state == State::Empty && slot.device == Device::Here;
            let empty = self.slots.iter_mut().enumerate().filter(|(_, slot)| may_start(slot));
            // One that never failed is worth more hope.
            let Some((at, slot)) = empty.min_by_key(|(at, slot)| (slot.deaths, *at)) else { return };
            slot.state = State::Starting;
            effects.push(Effect::Start(at));
        }
    }

    fn serve(&mut self, now: Instant, effects: &mut Vec<Effect>) {
        while !self.line.is_empty() {
            let Some(at) = self.slots.iter().position(|slot| matches!(slot.state, State::Free(_))) else { return };
            let Some(Waiter { ticket, .. }) = self.line.pop_front() else { return };
            let until = now.checked_add(self.rules.worker_timeout);
            self.slots[at].state = State::Held { ticket, until };
            effects.push(Effect::Grant { ticket, slot: at });
        }
    }

    fn end_pauses(&mut self, now: Instant, effects: &mut Vec<Effect>) {
        for at in 0..self.slots.len() {
            if !matches!(self.slots[at].state, State::Pausing(until) if until <= now) {
                continue;
            }
            self.slots[at].state = State::Empty;
            if self.needs_another() {
                self.slots[at].state = State::Starting;
                effects.push(Effect::Start(at));
            }
        }
    }
}

/// Whether there is something for a worker to work on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Device {
    Here,
    Awaited,
    /// It will never come.
    Denied,
}

impl Roster {
    /// The worker of a slot has a device now, and may be started.
    pub(super) fn equip(&mut self, at: usize, now: Instant, effects: &mut Vec<Effect>) {
        self.slots[at].device = Device::Here;
        self.settle(now, effects);
    }

    /// The device of a slot is gone, and its worker must be; whose hold is over by that. Another device may come.
    pub(super) fn strip(&mut self, at: usize, now: Instant, effects: &mut Vec<Effect>) -> Option<Ticket> {
        let slot = &mut self.slots[at];
        slot.device = Device::Awaited;
        let was = slot.state;
        match was {
            State::Empty | State::Ending => {}
            State::Pausing(_) => slot.state = State::Empty,
            State::Starting | State::Free(_) | State::Held { .. } => {
                slot.state = State::Ending;
                effects.push(Effect::Kill(at));
            }
        }
        self.settle(now, effects);
        was.holder()
    }

    /// No device will ever come for this slot.
    pub(super) fn deny(&mut self, at: usize, why: Arc<str>, effects: &mut Vec<Effect>) {
        self.slots[at].device = Device::Denied;
        self.last_failure = Some(why);
        self.refuse_if_hopeless(effects);
    }
}

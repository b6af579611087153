//! Workers whose devices come and go.

use std::sync::Arc;
use std::time::Instant;

use super::{Effect, Roster, State, Ticket};

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
    pub fn equip(&mut self, at: usize, now: Instant, effects: &mut Vec<Effect>) {
        self.slots[at].device = Device::Here;
        self.settle(now, effects);
    }

    /// The device of a slot is gone, and its worker must be; whose hold is over by that. Another device may come.
    pub fn strip(&mut self, at: usize, now: Instant, effects: &mut Vec<Effect>) -> Option<Ticket> {
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
        match was {
            State::Held { ticket, .. } => Some(ticket),
            _ => None,
        }
    }

    /// No device will ever come for this slot.
    pub fn deny(&mut self, at: usize, why: Arc<str>, effects: &mut Vec<Effect>) {
        self.slots[at].device = Device::Denied;
        self.last_failure = Some(why);
        self.refuse_if_hopeless(effects);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::{Death, Refusal, Rules};
    use super::*;

    fn roster(workers: usize) -> Roster {
        let long = Duration::from_secs(1_000);
        Roster::new(Rules {
            min_workers: workers,
            max_workers: workers,
            acquire_patience: long,
            worker_timeout: long,
            idle_time: long,
            devices_come_later: true,
        })
    }

    fn told(happens: impl FnOnce(&mut Vec<Effect>)) -> Vec<Effect> {
        let mut effects = Vec::new();
        happens(&mut effects);
        effects
    }

    #[test]
    fn a_worker_is_started_when_it_has_a_device_and_goes_with_it() {
        let (mut roster, now, ticket) = (roster(2), Instant::now(), Ticket(0));
        assert_eq!(told(|effects| roster.tick(now, effects)), []);
        assert_eq!(told(|effects| roster.ask(ticket, now, effects)), []);
        assert_eq!(told(|effects| roster.equip(1, now, effects)), [Effect::Start(1)]);
        assert_eq!(told(|effects| roster.ready(1, now, effects)), [Effect::Grant { ticket, slot: 1 }]);
        let mut effects = Vec::new();
        assert_eq!(roster.strip(1, now, &mut effects), Some(ticket), "whoever has it is told");
        assert_eq!(effects, [Effect::Kill(1)]);
        let gone = told(|effects| assert_eq!(roster.gone(1, Death::Wanted, now, effects), None));
        assert_eq!(gone, [], "without a device it is not started again");
        assert_eq!(told(|effects| roster.equip(1, now, effects)), [Effect::Start(1)]);
    }

    #[test]
    fn a_device_that_comes_back_while_the_old_worker_ends_is_used_after_it() {
        let (mut roster, now) = (roster(1), Instant::now());
        assert_eq!(told(|effects| roster.equip(0, now, effects)), [Effect::Start(0)]);
        assert_eq!(told(|effects| assert_eq!(roster.strip(0, now, effects), None)), [Effect::Kill(0)]);
        assert_eq!(told(|effects| roster.equip(0, now, effects)), []);
        let gone = told(|effects| assert_eq!(roster.gone(0, Death::Wanted, now, effects), None));
        assert_eq!(gone, [Effect::Start(0)]);
    }

    #[test]
    fn who_waits_is_told_when_no_device_will_ever_come() {
        let (mut roster, now, ticket) = (roster(2), Instant::now(), Ticket(0));
        assert_eq!(told(|effects| roster.ask(ticket, now, effects)), []);
        assert_eq!(told(|effects| roster.deny(0, "no such GPU".into(), effects)), []);
        assert_eq!(roster.hopeless(), None, "the other may come");
        let why = Refusal::NoWorker("no such GPU".into());
        assert_eq!(told(|effects| roster.deny(1, "no such GPU".into(), effects)), [Effect::Refuse { ticket, why }]);
        assert_eq!(roster.hopeless().as_deref(), Some("no such GPU"));
    }
}

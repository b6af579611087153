//! What other threads want, and what they have done for the engine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpupool_confine::Signal;

use super::Engine;
use super::post::Message;
use super::slot::{Phase, Slot, Stage};
use crate::limits::CANCEL_GRACE;
use crate::{Cause, Place, WorkerId};

impl Engine {
    pub(super) fn take_messages(&mut self, now: Instant) {
        for message in self.post.take() {
            match message {
                Message::Started { slot, generation, outcome } => self.started(slot, generation, outcome, now),
                Message::Buried { slot, generation, end, excess } => self.buried(slot, generation, end, excess, now),
                Message::Excess { slot, generation, excess } => {
                    if self.slots.get(slot).is_some_and(|slot| slot.generation == generation) {
                        self.bury(slot, Some(Cause::Excess(excess)), Duration::ZERO);
                    }
                }
                Message::ReportedExcess { worker, pid, excess } => {
                    let is_it = |slot: &Slot| matches!(&slot.stage, Stage::Alive(it, _) if it.job.id().pid == pid);
                    if let Some(at) = self.slot_of(worker).filter(|at| is_it(&self.slots[*at])) {
                        self.bury(at, Some(Cause::Excess(excess)), Duration::ZERO);
                    }
                }
                Message::Add(place) => self.add(place, now),
                Message::Withdraw { worker, why } => self.withdraw(worker, &why),
                Message::Cancel => self.cancel(),
                Message::Stop => self.stop(now),
                Message::FinishSoon => {
                    self.take_all_tasks();
                    self.ledger.finish_soon(&mut self.effects);
                }
                Message::Stats(to) => {
                    // Whoever asked may have gone.
                    let _ = to.try_send(self.stats());
                }
            }
        }
    }

    fn add(&mut self, place: Place, now: Instant) {
        let same = self.slots.iter().position(|slot| slot.place.id == place.id);
        let Some(at) = same else { return self.slots.push(Slot::new(place, now)) };
        let slot = &mut self.slots[at];
        slot.place = place;
        (slot.withdrawn, slot.deaths) = (None, 0);
        // One that still dies comes back when it has.
        if matches!(slot.stage, Stage::Gone) {
            slot.stage = Stage::Waiting(now);
        }
    }

    fn withdraw(&mut self, worker: WorkerId, why: &Arc<str>) {
        let Some(at) = self.slots.iter().position(|slot| slot.place.id == worker) else { return };
        self.slots[at].withdrawn = Some(Arc::clone(why));
        match &mut self.slots[at].stage {
            waiting @ Stage::Waiting(_) => *waiting = Stage::Gone,
            Stage::Starting => self.slots[at].is_outdated = true,
            Stage::Alive(..) | Stage::Dying(_) | Stage::Gone => {}
        }
        self.bury(at, Some(Cause::Withdrawn(Arc::clone(why))), Duration::ZERO);
    }

    fn cancel(&mut self) {
        self.take_all_tasks();
        self.ledger.cancel(&mut self.effects);
        for at in 0..self.slots.len() {
            self.interrupt(at);
            self.bury(at, Some(Cause::Stopped), CANCEL_GRACE);
        }
    }

    /// What workers are at is given up within the grace. Whoever did so, or had nothing, is told to end when all have.
    fn stop(&mut self, now: Instant) {
        self.take_all_tasks();
        self.ledger.cancel(&mut self.effects);
        let until = now + self.plan.rules.grace;
        for at in 0..self.slots.len() {
            if self.ledger.at(self.slots[at].place.id).0.is_none() {
                continue;
            }
            if let Stage::Alive(_, phase @ Phase::AtWork(_)) = &mut self.slots[at].stage {
                *phase = Phase::GivingUp(until);
                self.interrupt(at);
            }
        }
    }

    /// Has a worker give up what it is at, and begin nothing else.
    fn interrupt(&mut self, at: usize) {
        let Stage::Alive(process, _) = &self.slots[at].stage else { return };
        process.counters.interrupt_any();
        let claimed = process.counters.recall();
        // One that is gone already needs no interrupt.
        let _ = process.job.signal(Signal::INT);
        let worker = self.slots[at].place.id;
        if self.ledger.can_recall(worker) {
            self.ledger.recalled(worker, claimed, &mut self.effects);
        }
    }
}

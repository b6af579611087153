//! Doing what the ledger decided.

use std::time::{Duration, Instant};

use gpupool_confine::Signal;

use super::Engine;
use super::slot::Stage;
use crate::event::{Event, Over};
use crate::ledger::Effect;
use crate::{Cause, Outcome, TaskId, WorkerId};

impl Engine {
    pub(super) fn obey_effects(&mut self, now: Instant) {
        while !self.effects.is_empty() {
            for effect in std::mem::take(&mut self.effects) {
                match effect {
                    Effect::Send { worker, tasks } => self.put_tasks(worker, &tasks, now),
                    Effect::Over { task, worker, outcome, begun, tries } => {
                        self.over(task, worker, outcome, begun, tries, now);
                    }
                    Effect::Retried { task, worker, outcome } => {
                        self.outputs.remove(&task);
                        if let Some(at) = self.slot_of(worker) {
                            // Begun once more by the same worker, it is told once more.
                            self.slots[at].told = None;
                        }
                        self.delivery.tally.retried += 1;
                        self.delivery.tell(Event::Retried { task, worker, outcome });
                    }
                    Effect::Interrupt { worker, begun } => {
                        if let Some(Stage::Alive(process, _)) = self.slot_of(worker).map(|at| &self.slots[at].stage) {
                            process.counters.interrupt(begun);
                            // One that is gone already needs no interrupt.
                            let _ = process.job.signal(Signal::INT);
                        }
                    }
                    Effect::Recall { worker } => self.recall(worker),
                    Effect::Kill { worker } => {
                        if let Some(at) = self.slot_of(worker) {
                            self.bury(at, Some(Cause::Stuck), Duration::ZERO);
                        }
                    }
                }
            }
        }
    }

    fn over(
        &mut self,
        task: TaskId,
        worker: Option<WorkerId>,
        outcome: Outcome,
        started: Option<Instant>,
        tries: u32,
        now: Instant,
    ) {
        self.payloads.remove(&task);
        let output = self.outputs.remove(&task);
        if let Some(at) = worker.and_then(|worker| self.slot_of(worker)) {
            let slot = &mut self.slots[at];
            match outcome {
                Outcome::Done(_) => slot.counts.completed += 1,
                Outcome::TimedOut(_) => slot.counts.timeouts += 1,
                Outcome::Failed(_) | Outcome::WorkerLost(_) => slot.counts.failed += 1,
                Outcome::Cancelled => {}
            }
        }
        self.delivery.over(Over { task, worker, outcome, started, finished: now, tries, output });
    }
}

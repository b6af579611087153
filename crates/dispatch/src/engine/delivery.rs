//! Events on their way to whoever wants them, results in the order that is wanted.

use std::collections::{BTreeMap, VecDeque};

use crate::event::{Event, Over};
use crate::plan::Order;
use crate::{Outcome, Stats, TaskId};

#[derive(Debug)]
pub(super) struct Delivery {
    order: Order,
    ready: VecDeque<Event>,
    /// Results that are to be told after others.
    held: BTreeMap<TaskId, Over>,
    next: TaskId,
    pub tally: Stats,
}

impl Delivery {
    pub fn new(order: Order) -> Self {
        let (ready, held) = (VecDeque::new(), BTreeMap::new());
        Self { order, ready, held, next: TaskId(0), tally: Stats::default() }
    }

    pub fn tell(&mut self, event: Event) {
        self.ready.push_back(event);
    }

    pub fn over(&mut self, over: Over) {
        let tally = &mut self.tally;
        match &over.outcome {
            Outcome::Done(_) => tally.completed += 1,
            Outcome::Failed(_) => tally.failed += 1,
            Outcome::TimedOut(_) => tally.timeouts += 1,
            Outcome::WorkerLost(_) => (tally.failed, tally.lost) = (tally.failed + 1, tally.lost + 1),
            Outcome::Cancelled => tally.cancelled += 1,
        }
        if self.order == Order::Completion {
            self.ready.push_back(Event::Over(over));
            return;
        }
        self.held.insert(over.task, over);
        while let Some(over) = self.held.remove(&self.next) {
            self.next.0 += 1;
            self.ready.push_back(Event::Over(over));
        }
    }

    /// Moves what is ready to be told.
    pub fn take(&mut self, into: &mut VecDeque<Event>) {
        if into.is_empty() {
            std::mem::swap(&mut self.ready, into);
        } else {
            into.append(&mut self.ready);
        }
    }

    /// Events that can be told now.
    pub fn ready(&self) -> usize {
        self.ready.len()
    }

    /// What nobody took yet.
    pub fn undelivered(&self) -> usize {
        self.ready.len() + self.held.len()
    }
}

//! The rhythm: asks, waits, tells; and between two rounds tells what comes late.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use gpupool_devices::ProbeAnswer;

use super::limits;
use super::sample::{Book, Sample};
use super::slot::Slot;
use crate::stats::Statistics;

/// What the thread hears.
#[derive(Debug)]
pub enum Event {
    /// The source with this number has answered.
    Answered(usize),
    /// It is over.
    Stop,
}

/// Why waiting ended.
#[derive(PartialEq, Eq)]
enum Waited {
    Enough,
    Stopped,
}

/// Everything the thread owns.
pub struct Rounds {
    slots: Vec<Slot>,
    book: Book,
    refresh: Duration,
    deliver: Box<dyn FnMut(Sample) + Send>,
    publish: Arc<Statistics>,
    events: Receiver<Event>,
    /// Answers that were taken and not told yet, with the number of their source.
    taken: Vec<(usize, ProbeAnswer)>,
    /// Told once, after the first round.
    first: Option<Sender<()>>,
}

impl Rounds {
    pub fn new(
        slots: Vec<Slot>,
        book: Book,
        refresh: Duration,
        deliver: Box<dyn FnMut(Sample) + Send>,
        publish: Arc<Statistics>,
        events: Receiver<Event>,
        first: Sender<()>,
    ) -> Self {
        let refresh = refresh.max(limits::SHORTEST_REFRESH);
        Self { slots, book, refresh, deliver, publish, events, taken: Vec::new(), first: Some(first) }
    }

    /// Goes on until it is told to stop.
    pub fn run(mut self) {
        let mut due = Instant::now();
        let mut patience = limits::FIRST_PATIENCE;
        loop {
            self.slots.iter_mut().for_each(Slot::ask);
            if self.gather(due + patience) == Waited::Stopped {
                return;
            }
            // Whoever is overdue is complained of once a round, and an answer whose event is still on its way is taken.
            for slot in 0..self.slots.len() {
                self.take(slot);
            }
            self.tell();
            due = next_due(due, self.refresh, Instant::now());
            if self.tell_late_answers(due) == Waited::Stopped {
                return;
            }
            patience = limits::PATIENCE.min(self.refresh / 2);
        }
    }

    /// Takes answers until all that were asked for in this round are there, or it is time.
    fn gather(&mut self, until: Instant) -> Waited {
        while self.slots.iter().any(Slot::is_awaited) {
            match self.hear(until) {
                Ok(Event::Answered(slot)) => {
                    self.take(slot);
                }
                Ok(Event::Stop) | Err(RecvTimeoutError::Disconnected) => return Waited::Stopped,
                Err(RecvTimeoutError::Timeout) => return Waited::Enough,
            }
        }
        Waited::Enough
    }

    fn tell_late_answers(&mut self, until: Instant) -> Waited {
        loop {
            match self.hear(until) {
                Ok(Event::Answered(slot)) => {
                    if self.take(slot) {
                        self.tell();
                    }
                }
                Ok(Event::Stop) | Err(RecvTimeoutError::Disconnected) => return Waited::Stopped,
                Err(RecvTimeoutError::Timeout) => return Waited::Enough,
            }
        }
    }

    fn hear(&self, until: Instant) -> Result<Event, RecvTimeoutError> {
        self.events.recv_timeout(until.saturating_duration_since(Instant::now()))
    }

    /// Takes an answer, if there is one; the event of one that was taken before finds none.
    fn take(&mut self, slot: usize) -> bool {
        let Some(answer) = self.slots.get_mut(slot).and_then(Slot::poll) else { return false };
        self.taken.push((slot, answer));
        true
    }

    fn tell(&mut self) {
        // In the order of the sources, not of their answers: new devices are numbered as they come.
        self.taken.sort_by_key(|(slot, _)| *slot);
        self.taken.drain(..).for_each(|(_, answer)| self.book.observe(answer));
        let (sample, round) = self.book.tell(&self.slots, &self.publish);
        self.publish.publish(round);
        (self.deliver)(sample);
        if let Some(first) = self.first.take() {
            let _ = first.send(());
        }
    }
}

/// When the next round is due: in step with those before, leaving out those that were missed.
fn next_due(due: Instant, refresh: Duration, now: Instant) -> Instant {
    let late = now.saturating_duration_since(due);
    let missed = late.as_nanos() / refresh.as_nanos().max(1);
    let steps = u32::try_from(missed).unwrap_or(u32::MAX).saturating_add(1);
    refresh.checked_mul(steps).and_then(|step| due.checked_add(step)).unwrap_or(now + refresh)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_keep_step_however_long_one_took() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let due_after = |millis| next_due(start, second, start + Duration::from_millis(millis)) - start;
        assert_eq!(due_after(0), second);
        assert_eq!(due_after(250), second);
        assert_eq!(due_after(999), second);
        assert_eq!(due_after(1000), 2 * second, "a round that took all the time leaves one out");
        assert_eq!(due_after(7_300), 8 * second);
    }
}

//! The latest events, each with a number from which a stream can continue.
//!
//! The authority adds events after their commit; any number of streams read them. A stream that fell behind the
//! retained events, or that continues from another run of the agent, gets a reset.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpupool_api::events::EventBody;
use tokio::sync::watch;

use crate::limits::EVENTS_RETAINED;

/// The number of an event: the run of the agent and the place in that run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EventId {
    /// The id of the run.
    pub run: Arc<str>,
    /// Its place, from 1.
    pub place: u64,
}

impl std::fmt::Display for EventId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.run, self.place)
    }
}

/// Events that a stream has not seen.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct EventBatch {
    /// Whether events before these are missing.
    pub missed: bool,
    /// The events with their places.
    pub events: Vec<(u64, Arc<EventBody>)>,
}

/// The latest events. A lock rather than messages: it is held for a copy of a few pointers, and streams come and go.
pub(crate) struct Events {
    run: Arc<str>,
    retained: Mutex<RetainedEvents>,
    last: watch::Sender<u64>,
}

#[derive(Default)]
struct RetainedEvents {
    events: VecDeque<Arc<EventBody>>,
    /// The place of the last one.
    last: u64,
}

impl Events {
    /// Returns the empty events of a run.
    pub(crate) fn new(run: Arc<str>) -> Self {
        Self { run, retained: Mutex::default(), last: watch::Sender::new(0) }
    }

    /// Returns the id of this run of the agent.
    pub(crate) fn run(&self) -> &Arc<str> {
        &self.run
    }

    /// Adds events, runs `publish` with the place of the last one, and then wakes the streams. No stream sees an event
    /// before `publish` has returned.
    pub(crate) fn add(&self, events: impl IntoIterator<Item = Arc<EventBody>>, publish: impl FnOnce(u64)) {
        let mut retained = self.lock();
        let before = retained.last;
        for event in events {
            retained.last += 1;
            retained.events.push_back(event);
            if retained.events.len() > EVENTS_RETAINED {
                retained.events.pop_front();
            }
        }
        publish(retained.last);
        if retained.last != before {
            self.last.send_replace(retained.last);
        }
    }

    /// Returns the place of the last event.
    pub(crate) fn last(&self) -> u64 {
        self.lock().last
    }

    /// Returns the place in an event id from a client; `None` if the id is malformed, of another run, or not issued
    /// yet.
    pub(crate) fn place_of(&self, id: &str) -> Option<u64> {
        let (run, place) = id.rsplit_once('-')?;
        let place = place.parse().ok()?;
        (run == &*self.run && place <= self.last()).then_some(place)
    }

    /// Returns the events after a place, at most `most` of them.
    pub(crate) fn after(&self, place: u64, most: usize) -> EventBatch {
        let retained = self.lock();
        let first = retained.last + 1 - retained.events.len() as u64;
        let from = (place + 1).max(first);
        let skip = usize::try_from(from - first).unwrap_or(usize::MAX);
        let events = retained.events.iter().skip(skip).take(most).cloned();
        EventBatch { missed: place + 1 < first, events: (from..).zip(events).collect() }
    }

    /// Returns a receiver that changes when there are more events.
    pub(crate) fn follow(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, RetainedEvents> {
        // A panic while adding leaves only complete events.
        self.retained.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: &str) -> EventBody {
        EventBody {
            kind: kind.into(),
            at: String::new(),
            lease: None,
            owner: None,
            worker_id: None,
            gpu_ids: Vec::new(),
            node: None,
            reason: None,
        }
    }

    #[test]
    fn a_stream_continues_where_it_stopped_and_learns_of_missed_events() {
        let events = Events::new("run".into());
        events.add(["a", "b", "c"].map(event).map(Arc::new), |_| ());
        let after = events.after(1, 10);
        assert!(!after.missed);
        assert_eq!(after.events.iter().map(|(place, e)| (*place, &*e.kind)).collect::<Vec<_>>(), [(2, "b"), (3, "c")]);
        events.add((0..EVENTS_RETAINED).map(|_| Arc::new(event("x"))), |_| ());
        let after = events.after(1, 2);
        assert!(after.missed);
        assert_eq!(after.events.first().map(|(place, _)| *place), Some(4));
        assert_eq!(events.after(events.last(), 10), EventBatch::default());
    }

    #[test]
    fn a_stream_is_woken_after_the_state_with_its_event_is_published() {
        let events = Events::new("run".into());
        let stream = events.follow();
        let mut published = None;
        events.add([Arc::new(event("a"))], |last| published = Some((last, stream.has_changed().unwrap())));
        assert_eq!((published, stream.has_changed().unwrap()), (Some((1, false)), true));
    }

    #[test]
    fn a_number_of_another_run_or_of_the_future_is_refused() {
        let events = Events::new("run-a".into());
        events.add([Arc::new(event("a"))], |_| ());
        assert_eq!(events.place_of("run-a-1"), Some(1));
        assert_eq!(events.place_of("run-b-1"), None);
        assert_eq!(events.place_of("run-a-2"), None);
        assert_eq!(events.place_of("nonsense"), None);
    }
}

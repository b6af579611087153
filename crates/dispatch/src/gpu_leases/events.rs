//! News of the GPUs of a run, on their way to the thread or task that starts and stops workers.
//!
//! The keeper never waits for its reader, and what waits to be read stays small: newer news of a place replaces what it makes
//! untrue. So a reader that is slow misses texts for people, and grants that were lost again before it read of them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use gpupool_confine::lock;
use tokio::sync::mpsc;

use super::GrantedLease;
use crate::limits::MAX_GPU_NOTES;

/// What became of a place, or of the agent.
#[derive(Debug, Clone, PartialEq)]
pub enum GpuEvent {
    /// Workers may be started on this now.
    Granted(GrantedLease),
    /// The workers of this place must stop now: within five seconds the agent kills what runs under the lease. Another one is
    /// asked for, and told when it is granted.
    Lost {
        /// Which place.
        slot: usize,
        /// Why, for people.
        why: String,
    },
    /// It is waited for.
    Waiting {
        /// Which place.
        slot: usize,
        /// How it goes, for people.
        text: String,
    },
    /// It is not granted, and not asked for any more: it can never be, or the agent does not want to.
    Refused {
        /// Which place.
        slot: usize,
        /// Why, for people.
        why: String,
    },
    /// Good to know, for people: the agent is away, or back, or will take something back soon.
    Note(String),
}

/// News that was not read yet. At most one of each kind for each place, and [`GPU_NOTES`].
#[derive(Debug, Default)]
struct UnreadEvents(VecDeque<GpuEvent>);

impl UnreadEvents {
    fn push(&mut self, event: GpuEvent) {
        let unread = &mut self.0;
        match &event {
            GpuEvent::Lost { slot, .. } => {
                let grant = |old: &GpuEvent| matches!(old, GpuEvent::Granted(granted) if granted.slot == *slot);
                if let Some(at) = unread.iter().position(grant) {
                    // No worker was started on it.
                    unread.remove(at);
                    return;
                }
            }
            GpuEvent::Waiting { slot, .. }
            | GpuEvent::Refused { slot, .. }
            | GpuEvent::Granted(GrantedLease { slot, .. }) => {
                unread.retain(|old| !matches!(old, GpuEvent::Waiting { slot: of, .. } if of == slot));
            }
            GpuEvent::Note(_) => {
                let is_note = |old: &GpuEvent| matches!(old, GpuEvent::Note(_));
                if unread.iter().filter(|old| is_note(old)).count() >= MAX_GPU_NOTES
                    && let Some(oldest) = unread.iter().position(is_note)
                {
                    unread.remove(oldest);
                }
            }
        }
        unread.push_back(event);
    }
}

/// The keeper's end. When the last clone is dropped, the reader ends.
#[derive(Debug, Clone)]
pub(super) struct GpuEventSender {
    unread: Arc<Mutex<UnreadEvents>>,
    /// Holds one call to look.
    wake: mpsc::Sender<()>,
}

impl GpuEventSender {
    /// Never waits.
    pub(super) fn send(&self, event: GpuEvent) {
        lock(&self.unread).push(event);
        // Where a call waits already, it is for this as well; where the reader is gone, the news is not needed.
        let _ = self.wake.try_send(());
    }
}

/// The news of one [`super::GpuLeaseManager`], in the order they came.
#[derive(Debug)]
pub struct GpuEventReceiver {
    unread: Arc<Mutex<UnreadEvents>>,
    wake: mpsc::Receiver<()>,
}

impl GpuEventReceiver {
    /// Waits for the next news; `None` when the keeper is gone and all was read. Can be dropped while it waits.
    pub async fn next(&mut self) -> Option<GpuEvent> {
        loop {
            if let Some(event) = self.pop_event() {
                return Some(event);
            }
            if self.wake.recv().await.is_none() {
                return self.pop_event();
            }
        }
    }

    /// The same, for a thread without a runtime.
    pub fn blocking_next(&mut self) -> Option<GpuEvent> {
        loop {
            if let Some(event) = self.pop_event() {
                return Some(event);
            }
            if self.wake.blocking_recv().is_none() {
                return self.pop_event();
            }
        }
    }

    fn pop_event(&self) -> Option<GpuEvent> {
        lock(&self.unread).0.pop_front()
    }
}

/// Both ends.
pub(super) fn gpu_event_channel() -> (GpuEventSender, GpuEventReceiver) {
    let unread = Arc::default();
    let (wake_sender, wake) = mpsc::channel(1);
    (GpuEventSender { unread: Arc::clone(&unread), wake: wake_sender }, GpuEventReceiver { unread, wake })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn granted(slot: usize, lease: u64) -> GpuEvent {
        GpuEvent::Granted(GrantedLease { slot, lease, token: lease, devices: Vec::new(), env: Vec::new() })
    }

    fn lost(slot: usize) -> GpuEvent {
        GpuEvent::Lost { slot, why: "why".into() }
    }

    fn waiting(slot: usize, text: &str) -> GpuEvent {
        GpuEvent::Waiting { slot, text: text.into() }
    }

    /// What a reader that comes late reads.
    fn read_late(events: impl IntoIterator<Item = GpuEvent>) -> Vec<GpuEvent> {
        let (sender, mut reader) = gpu_event_channel();
        events.into_iter().for_each(|event| sender.send(event));
        drop(sender);
        std::iter::from_fn(|| reader.blocking_next()).collect()
    }

    #[test]
    fn a_reader_in_time_reads_everything() {
        let (sender, mut reader) = gpu_event_channel();
        for event in [waiting(0, "second"), waiting(0, "first"), granted(0, 1), lost(0), GpuEvent::Note("x".into())] {
            sender.send(event.clone());
            assert_eq!(reader.blocking_next(), Some(event));
        }
        drop(sender);
        assert_eq!(reader.blocking_next(), None);
    }

    #[test]
    fn a_reader_that_comes_late_reads_what_is_still_true() {
        let refused = GpuEvent::Refused { slot: 3, why: "no".into() };
        let events = [
            waiting(0, "second"),
            waiting(1, "third"),
            waiting(0, "first"),
            granted(0, 1),
            lost(1),
            granted(1, 2),
            lost(1),
            granted(1, 3),
            granted(2, 4),
            lost(2),
            waiting(3, "first"),
            refused.clone(),
        ];
        assert_eq!(read_late(events), [granted(0, 1), lost(1), granted(1, 3), refused]);
    }

    #[test]
    fn however_long_nobody_reads_what_is_kept_is_bounded() {
        let read = read_late((0..10_000).flat_map(|number: u64| {
            let (slot, text) = ((number % 3) as usize, number.to_string());
            [waiting(slot, &text), granted(slot, number), lost(slot), GpuEvent::Note(text)]
        }));
        let notes: Vec<&GpuEvent> = read.iter().filter(|event| matches!(event, GpuEvent::Note(_))).collect();
        assert_eq!((notes.len(), notes[MAX_GPU_NOTES - 1]), (MAX_GPU_NOTES, &GpuEvent::Note("9999".into())));
        assert!(read.len() <= 4 * 3 + MAX_GPU_NOTES, "{read:#?}");
    }

    #[tokio::test]
    async fn a_task_that_waits_is_woken_and_ends_with_the_keeper() {
        let (sender, mut reader) = gpu_event_channel();
        let read = tokio::spawn(async move { (reader.next().await, reader.next().await, reader.next().await) });
        tokio::task::yield_now().await;
        sender.send(granted(0, 1));
        sender.send(granted(1, 2));
        drop(sender);
        assert_eq!(read.await.unwrap(), (Some(granted(0, 1)), Some(granted(1, 2)), None));
    }
}

//! Events of the GPU leases of a run, for the thread or task that starts and stops workers.
//!
//! The sender never waits, and the queue stays small: a newer event of a slot replaces the ones it makes obsolete. A
//! slow reader misses notes, and grants that were lost before it read them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use gpupool_confine::lock;
use tokio::sync::mpsc;

use super::GrantedLease;
use crate::limits::MAX_GPU_NOTES;

/// Event of a lease slot or of the agent.
#[derive(Debug, Clone, PartialEq)]
pub enum GpuEvent {
    /// Workers may start on this lease.
    Granted(GrantedLease),
    /// The workers of this slot must stop now: the agent kills them within five seconds. The slot requests another
    /// lease.
    Lost {
        /// Lease slot.
        slot: usize,
        /// Reason, for people.
        why: String,
    },
    /// The request waits in the queue.
    Waiting {
        /// Lease slot.
        slot: usize,
        /// Queue position and reason, for people.
        text: String,
    },
    /// The request was refused permanently, and the slot ends.
    Refused {
        /// Lease slot.
        slot: usize,
        /// Reason, for people.
        why: String,
    },
    /// Note for people, such as an absent agent or an announced revocation.
    Note(String),
}

/// Unread events: at most one of each kind for each slot, and [`MAX_GPU_NOTES`] notes.
#[derive(Debug, Default)]
struct UnreadEvents(VecDeque<GpuEvent>);

impl UnreadEvents {
    fn push(&mut self, event: GpuEvent) {
        let unread = &mut self.0;
        match &event {
            GpuEvent::Lost { slot, .. } => {
                let grant = |old: &GpuEvent| matches!(old, GpuEvent::Granted(granted) if granted.slot == *slot);
                if let Some(at) = unread.iter().position(grant) {
                    // No worker was started on the lost grant.
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

/// Sending end. The receiver ends when the last clone is dropped.
#[derive(Debug, Clone)]
pub(super) struct GpuEventSender {
    unread: Arc<Mutex<UnreadEvents>>,
    /// Holds at most one pending wakeup.
    wake: mpsc::Sender<()>,
}

impl GpuEventSender {
    /// Sends an event without waiting.
    pub(super) fn send(&self, event: GpuEvent) {
        lock(&self.unread).push(event);
        // A pending wakeup covers this event, too; without a receiver the event is not needed.
        let _ = self.wake.try_send(());
    }
}

/// Events of one [`super::GpuLeaseManager`], in order.
#[derive(Debug)]
pub struct GpuEventReceiver {
    unread: Arc<Mutex<UnreadEvents>>,
    wake: mpsc::Receiver<()>,
}

impl GpuEventReceiver {
    /// Waits for the next event. Returns `None` when the manager has ended and all events were read. Cancel safe.
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

    /// Same as [`Self::next`] for a thread without a runtime.
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

/// Creates a sender and its receiver.
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

    /// Returns the events that a late reader gets.
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
    fn a_late_reader_reads_only_current_events() {
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
    fn unread_events_are_bounded() {
        let read = read_late((0..10_000).flat_map(|number: u64| {
            let (slot, text) = ((number % 3) as usize, number.to_string());
            [waiting(slot, &text), granted(slot, number), lost(slot), GpuEvent::Note(text)]
        }));
        let notes: Vec<&GpuEvent> = read.iter().filter(|event| matches!(event, GpuEvent::Note(_))).collect();
        assert_eq!((notes.len(), notes[MAX_GPU_NOTES - 1]), (MAX_GPU_NOTES, &GpuEvent::Note("9999".into())));
        assert!(read.len() <= 4 * 3 + MAX_GPU_NOTES, "{read:#?}");
    }

    #[tokio::test]
    async fn a_waiting_task_is_woken_and_ends_with_the_sender() {
        let (sender, mut reader) = gpu_event_channel();
        let read = tokio::spawn(async move { (reader.next().await, reader.next().await, reader.next().await) });
        tokio::task::yield_now().await;
        sender.send(granted(0, 1));
        sender.send(granted(1, 2));
        drop(sender);
        assert_eq!(read.await.unwrap(), (Some(granted(0, 1)), Some(granted(1, 2)), None));
    }
}

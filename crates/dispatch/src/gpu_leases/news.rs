//! News of the GPUs of a run, on their way to the thread or task that starts and stops workers.
//!
//! The keeper never waits for its reader, and what waits to be read stays small: newer news of a place replaces what it makes
//! untrue. So a reader that is slow misses texts for people, and grants that were lost again before it read of them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use gpupool_confine::lock;
use tokio::sync::mpsc;

use super::GrantedLease;
use crate::limits::GPU_NOTES;

/// What became of a place, or of the agent.
#[derive(Debug, Clone, PartialEq)]
pub enum GpuEvent {
    /// Workers may be started on this now.
    Granted(GrantedLease),
    /// The workers of this place must stop now: within five seconds the agent kills what runs under the lease. Another one is
    /// asked for, and told when it is granted.
    Lost {
        /// Which place.
        place: usize,
        /// Why, for people.
        why: String,
    },
    /// It is waited for.
    Waiting {
        /// Which place.
        place: usize,
        /// How it goes, for people.
        text: String,
    },
    /// It is not granted, and not asked for any more: it can never be, or the agent does not want to.
    Refused {
        /// Which place.
        place: usize,
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
    fn add(&mut self, news: GpuEvent) {
        let unread = &mut self.0;
        match &news {
            GpuEvent::Lost { place, .. } => {
                let grant = |old: &GpuEvent| matches!(old, GpuEvent::Granted(granted) if granted.place == *place);
                if let Some(at) = unread.iter().position(grant) {
                    // No worker was started on it.
                    unread.remove(at);
                    return;
                }
            }
            GpuEvent::Waiting { place, .. }
            | GpuEvent::Refused { place, .. }
            | GpuEvent::Granted(GrantedLease { place, .. }) => {
                unread.retain(|old| !matches!(old, GpuEvent::Waiting { place: of, .. } if of == place));
            }
            GpuEvent::Note(_) => {
                let is_note = |old: &GpuEvent| matches!(old, GpuEvent::Note(_));
                if unread.iter().filter(|old| is_note(old)).count() >= GPU_NOTES
                    && let Some(oldest) = unread.iter().position(is_note)
                {
                    unread.remove(oldest);
                }
            }
        }
        unread.push_back(news);
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
    pub(super) fn send(&self, news: GpuEvent) {
        lock(&self.unread).add(news);
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
            if let Some(news) = self.take() {
                return Some(news);
            }
            if self.wake.recv().await.is_none() {
                return self.take();
            }
        }
    }

    /// The same, for a thread without a runtime.
    pub fn blocking_next(&mut self) -> Option<GpuEvent> {
        loop {
            if let Some(news) = self.take() {
                return Some(news);
            }
            if self.wake.blocking_recv().is_none() {
                return self.take();
            }
        }
    }

    fn take(&self) -> Option<GpuEvent> {
        lock(&self.unread).0.pop_front()
    }
}

/// Both ends.
pub(super) fn gpu_event_channel() -> (GpuEventSender, GpuEventReceiver) {
    let unread = Arc::default();
    let (calls, wake) = mpsc::channel(1);
    (GpuEventSender { unread: Arc::clone(&unread), wake: calls }, GpuEventReceiver { unread, wake })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn granted(place: usize, lease: u64) -> GpuEvent {
        GpuEvent::Granted(GrantedLease { place, lease, token: lease, devices: Vec::new(), env: Vec::new() })
    }

    fn lost(place: usize) -> GpuEvent {
        GpuEvent::Lost { place, why: "why".into() }
    }

    fn waiting(place: usize, text: &str) -> GpuEvent {
        GpuEvent::Waiting { place, text: text.into() }
    }

    /// What a reader that comes late reads.
    fn read_late(news: impl IntoIterator<Item = GpuEvent>) -> Vec<GpuEvent> {
        let (sender, mut reader) = gpu_event_channel();
        news.into_iter().for_each(|news| sender.send(news));
        drop(sender);
        std::iter::from_fn(|| reader.blocking_next()).collect()
    }

    #[test]
    fn a_reader_in_time_reads_everything() {
        let (sender, mut reader) = gpu_event_channel();
        for news in [waiting(0, "second"), waiting(0, "first"), granted(0, 1), lost(0), GpuEvent::Note("x".into())] {
            sender.send(news.clone());
            assert_eq!(reader.blocking_next(), Some(news));
        }
        drop(sender);
        assert_eq!(reader.blocking_next(), None);
    }

    #[test]
    fn a_reader_that_comes_late_reads_what_is_still_true() {
        let refused = GpuEvent::Refused { place: 3, why: "no".into() };
        let news = [
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
        assert_eq!(read_late(news), [granted(0, 1), lost(1), granted(1, 3), refused]);
    }

    #[test]
    fn however_long_nobody_reads_what_is_kept_is_bounded() {
        let read = read_late((0..10_000).flat_map(|number: u64| {
            let (place, text) = ((number % 3) as usize, number.to_string());
            [waiting(place, &text), granted(place, number), lost(place), GpuEvent::Note(text)]
        }));
        let notes: Vec<&GpuEvent> = read.iter().filter(|news| matches!(news, GpuEvent::Note(_))).collect();
        assert_eq!((notes.len(), notes[GPU_NOTES - 1]), (GPU_NOTES, &GpuEvent::Note("9999".into())));
        assert!(read.len() <= 4 * 3 + GPU_NOTES, "{read:#?}");
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

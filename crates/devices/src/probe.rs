//! Reads a source on its own thread with a deadline, so that a hung driver blocks only that thread.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::source::{DeviceSource, SourceError, SourceKind, SourceState, SourceStatus};
use crate::source_reading::SourceReading;

/// Reply of a source, and its time.
#[derive(Debug)]
pub struct ProbeReply {
    /// Kind of the source that was read; a fallback source names the candidate that it read.
    pub kind: SourceKind,
    /// Time when the reading finished, which is the age of a late reply.
    pub taken: Instant,
    /// Reading or error.
    pub result: Result<SourceReading, SourceError>,
}

/// A source on its own thread. The thread ends when the probe is dropped and the source has returned.
///
/// Only one request is pending at a time, so at most one reading hangs.
#[derive(Debug)]
pub struct SourceProbe {
    kind: SourceKind,
    deadline: Duration,
    requests: SyncSender<()>,
    replies: Receiver<ProbeReply>,
    requested_at: Option<Instant>,
    state: SourceState,
}

impl SourceProbe {
    /// Starts the thread; each reading gets `deadline`.
    pub fn start(source: Box<dyn DeviceSource>, deadline: Duration) -> io::Result<Self> {
        Self::start_with_callback(source, deadline, || {})
    }

    /// Starts the thread, which calls `on_reply` whenever a reply is ready for [`Self::poll_reading`].
    pub fn start_with_callback(
        mut source: Box<dyn DeviceSource>,
        deadline: Duration,
        on_reply: impl Fn() + Send + 'static,
    ) -> io::Result<Self> {
        let kind = source.kind();
        // Only one request is pending at a time, so neither channel holds more than one message: a request does not
        // block while the source hangs, and a late reply does not block the thread.
        let (requests, pending) = sync_channel::<()>(1);
        let (reply_sender, replies) = sync_channel(1);
        let serve = move || {
            for () in pending {
                let result = catch_unwind(AssertUnwindSafe(|| source.read()))
                    .unwrap_or_else(|_| Err(SourceError::Driver(format!("reading {kind} panicked"))));
                if reply_sender.send(ProbeReply { kind: source.kind(), taken: Instant::now(), result }).is_err() {
                    return;
                }
                on_reply();
            }
        };
        thread::Builder::new().name(format!("probe-{kind}")).spawn(serve)?;
        Ok(Self { kind, deadline, requests, replies, requested_at: None, state: SourceState::Pending })
    }

    /// Requests a reading, unless one is pending. Request several probes first to read them in parallel.
    pub fn request_reading(&mut self) {
        if self.requested_at.is_none() && self.requests.try_send(()).is_ok() {
            self.requested_at = Some(Instant::now());
        }
    }

    /// Returns the kind of the source; for a fallback source, of the candidate that replied last.
    pub const fn kind(&self) -> SourceKind {
        self.kind
    }

    /// Returns the state after the last reply that was taken.
    pub fn status(&self) -> SourceStatus {
        SourceStatus { kind: self.kind, state: self.state.clone() }
    }

    /// Whether a request is pending.
    pub const fn is_pending(&self) -> bool {
        self.requested_at.is_some()
    }

    /// Waits for the reply until its deadline. An overdue request may return at once.
    pub fn wait_reading(&mut self) -> ProbeReply {
        let requested_at = self.requested_at.unwrap_or_else(Instant::now);
        // An overdue reading gets no second deadline.
        let left = self.deadline.saturating_sub(requested_at.elapsed());
        let received = self.replies.recv_timeout(left);
        self.take_reply(requested_at, received)
    }

    /// Returns the reply, an error if it is overdue, or `None` while it may still come. Does not wait.
    pub fn poll_reading(&mut self) -> Option<ProbeReply> {
        let requested_at = self.requested_at.unwrap_or_else(Instant::now);
        let received = match self.replies.try_recv() {
            Ok(reply) => Ok(reply),
            Err(TryRecvError::Disconnected) => Err(RecvTimeoutError::Disconnected),
            Err(TryRecvError::Empty) if self.is_pending() && requested_at.elapsed() >= self.deadline => {
                Err(RecvTimeoutError::Timeout)
            }
            Err(TryRecvError::Empty) => return None,
        };
        Some(self.take_reply(requested_at, received))
    }

    fn take_reply(&mut self, requested_at: Instant, received: Result<ProbeReply, RecvTimeoutError>) -> ProbeReply {
        let reply = match received {
            Ok(reply) => {
                self.requested_at = None;
                self.kind = reply.kind;
                reply
            }
            Err(RecvTimeoutError::Timeout) => {
                let what = self.kind.name().into();
                self.error_reply(SourceError::Unresponsive { what, after: requested_at.elapsed() })
            }
            Err(RecvTimeoutError::Disconnected) => {
                self.error_reply(SourceError::Driver(format!("the reader thread of {} ended", self.kind)))
            }
        };
        self.state = match &reply.result {
            Ok(_) => SourceState::Ready,
            Err(error) => SourceState::Failed(error.clone()),
        };
        reply
    }

    fn error_reply(&self, error: SourceError) -> ProbeReply {
        ProbeReply { kind: self.kind, taken: Instant::now(), result: Err(error) }
    }

    /// Requests a reading and waits for it.
    pub fn read(&mut self) -> Result<SourceReading, SourceError> {
        self.request_reading();
        self.wait_reading().result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    /// Source that replies when the test opens the gate, and counts its reads.
    struct GatedSource {
        gate: Arc<Mutex<()>>,
        asked: Arc<AtomicUsize>,
    }

    impl DeviceSource for GatedSource {
        fn kind(&self) -> SourceKind {
            SourceKind::Nvml
        }

        fn read(&mut self) -> Result<SourceReading, SourceError> {
            self.asked.fetch_add(1, Ordering::SeqCst);
            let _open = self.gate.lock();
            Ok(SourceReading::default())
        }
    }

    #[test]
    fn a_hanging_source_is_unresponsive_and_read_only_once_until_it_returns() {
        let (gate, asked) = (Arc::new(Mutex::new(())), Arc::new(AtomicUsize::new(0)));
        let source = GatedSource { gate: gate.clone(), asked: asked.clone() };
        let mut probe = SourceProbe::start(Box::new(source), Duration::from_millis(20)).unwrap();
        let closed = gate.lock().unwrap();
        for _ in 0..3 {
            assert_eq!(probe.read().unwrap_err().code(), "driver_unresponsive");
        }
        assert!(asked.load(Ordering::SeqCst) <= 1);
        drop(closed);
        probe.deadline = Duration::from_secs(60);
        assert!(probe.read().is_ok());
        assert_eq!(asked.load(Ordering::SeqCst), 1);
        assert!(probe.read().is_ok());
        assert_eq!(asked.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_reply_can_be_polled_after_the_callback() {
        let (gate, asked) = (Arc::new(Mutex::new(())), Arc::new(AtomicUsize::new(0)));
        let (notify, notified) = sync_channel(1);
        let source = GatedSource { gate: gate.clone(), asked };
        let on_reply = move || notify.send(()).expect("the test listens");
        let mut probe = SourceProbe::start_with_callback(Box::new(source), Duration::from_secs(60), on_reply).unwrap();
        assert!(probe.poll_reading().is_none() && !probe.is_pending());
        assert_eq!(probe.status().problem().as_deref(), Some("nvml: has not answered yet"));
        let closed = gate.lock().unwrap();
        probe.request_reading();
        assert!(probe.poll_reading().is_none() && probe.is_pending());
        probe.deadline = Duration::ZERO;
        assert_eq!(probe.poll_reading().unwrap().result.unwrap_err().code(), "driver_unresponsive");
        assert!(matches!(probe.status().state, SourceState::Failed(SourceError::Unresponsive { .. })));
        drop(closed);
        notified.recv_timeout(Duration::from_secs(60)).expect("the source answers within a minute");
        assert!(probe.poll_reading().unwrap().result.is_ok() && !probe.is_pending());
        assert_eq!((probe.status().kind, probe.status().is_ready()), (SourceKind::Nvml, true));
    }

    struct PanickingSource;

    impl DeviceSource for PanickingSource {
        fn kind(&self) -> SourceKind {
            SourceKind::AmdSysfs
        }

        fn read(&mut self) -> Result<SourceReading, SourceError> {
            panic!("a bug in a source");
        }
    }

    #[test]
    fn a_panicking_source_fails_each_reading() {
        let mut probe = SourceProbe::start(Box::new(PanickingSource), Duration::from_secs(60)).unwrap();
        for _ in 0..2 {
            assert_eq!(probe.read().unwrap_err().code(), "driver_failed");
        }
    }
}

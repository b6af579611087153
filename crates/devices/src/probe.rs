//! Reading a source off the caller's thread, with a deadline: a driver that hangs takes one thread with it, no more.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::source::{DeviceSource, SourceError, SourceKind, SourceState, SourceStatus};
use crate::source_reading::SourceReading;

/// What a source answered, and when it had the answer.
#[derive(Debug)]
pub struct ProbeReply {
    /// Which source was read; one that stands for several says which of them it was.
    pub kind: SourceKind,
    /// When the source was done reading; a late answer is as old as this.
    pub taken: Instant,
    /// What it said.
    pub result: Result<SourceReading, SourceError>,
}

/// A source on a thread of its own, which ends when the probe is dropped and the source has answered.
///
/// While the source has not answered it is not asked again: a reading that hangs stays the only one.
#[derive(Debug)]
pub struct SourceProbe {
    kind: SourceKind,
    deadline: Duration,
    asks: SyncSender<()>,
    answers: Receiver<ProbeReply>,
    asked: Option<Instant>,
    state: SourceState,
}

impl SourceProbe {
    /// Starts the thread; each reading gets `deadline`.
    pub fn start(source: Box<dyn DeviceSource>, deadline: Duration) -> io::Result<Self> {
        Self::start_with_callback(source, deadline, || {})
    }

    /// Starts the thread, which calls `answered` whenever an answer is there to be taken with [`Self::poll_reading`].
    pub fn start_with_callback(
        mut source: Box<dyn DeviceSource>,
        deadline: Duration,
        answered: impl Fn() + Send + 'static,
    ) -> io::Result<Self> {
        let kind = source.kind();
        // One reading is out at a time, so neither channel ever holds more than one message: asking does not block while
        // the source hangs, and a late answer does not wait until it is taken.
        let (asks, asked) = sync_channel::<()>(1);
        let (answer, answers) = sync_channel(1);
        let serve = move || {
            for () in asked {
                let result = catch_unwind(AssertUnwindSafe(|| source.read()))
                    .unwrap_or_else(|_| Err(SourceError::Driver(format!("reading {kind} panicked"))));
                if answer.send(ProbeReply { kind: source.kind(), taken: Instant::now(), result }).is_err() {
                    return;
                }
                answered();
            }
        };
        thread::Builder::new().name(format!("probe-{kind}")).spawn(serve)?;
        Ok(Self { kind, deadline, asks, answers, asked: None, state: SourceState::Pending })
    }

    /// Asks for a reading, unless one is still out. Several probes are asked first and then waited for together.
    pub fn request_reading(&mut self) {
        if self.asked.is_none() && self.asks.try_send(()).is_ok() {
            self.asked = Some(Instant::now());
        }
    }

    /// Which source it reads; one that stands for several is the one that answered last.
    pub const fn kind(&self) -> SourceKind {
        self.kind
    }

    /// Returns the state of the source by the last answer that was taken.
    pub fn status(&self) -> SourceStatus {
        SourceStatus { kind: self.kind, state: self.state.clone() }
    }

    /// Whether a reading was asked for and has not been answered.
    pub const fn is_pending(&self) -> bool {
        self.asked.is_some()
    }

    /// Waits for the answer until its deadline. One that was out before the ask may come at once, or be overdue.
    pub fn wait_reading(&mut self) -> ProbeReply {
        let asked = self.asked.unwrap_or_else(Instant::now);
        // An overdue reading gets one short look each time, not another deadline.
        let left = self.deadline.saturating_sub(asked.elapsed());
        let received = self.answers.recv_timeout(left);
        self.heard(asked, received)
    }

    /// The answer if it is there, the complaint if it is overdue, or `None` while it may still come. Does not wait.
    pub fn poll_reading(&mut self) -> Option<ProbeReply> {
        let asked = self.asked.unwrap_or_else(Instant::now);
        let received = match self.answers.try_recv() {
            Ok(answer) => Ok(answer),
            Err(TryRecvError::Disconnected) => Err(RecvTimeoutError::Disconnected),
            Err(TryRecvError::Empty) if self.is_pending() && asked.elapsed() >= self.deadline => {
                Err(RecvTimeoutError::Timeout)
            }
            Err(TryRecvError::Empty) => return None,
        };
        Some(self.heard(asked, received))
    }

    fn heard(&mut self, asked: Instant, received: Result<ProbeReply, RecvTimeoutError>) -> ProbeReply {
        let answer = match received {
            Ok(answer) => {
                self.asked = None;
                self.kind = answer.kind;
                answer
            }
            Err(RecvTimeoutError::Timeout) => {
                let what = self.kind.name().into();
                self.failed(SourceError::Unresponsive { what, after: asked.elapsed() })
            }
            Err(RecvTimeoutError::Disconnected) => {
                self.failed(SourceError::Driver(format!("the thread that reads {} has ended", self.kind)))
            }
        };
        self.state = match &answer.result {
            Ok(_) => SourceState::Ready,
            Err(error) => SourceState::Failed(error.clone()),
        };
        answer
    }

    fn failed(&self, error: SourceError) -> ProbeReply {
        ProbeReply { kind: self.kind, taken: Instant::now(), result: Err(error) }
    }

    /// Asks and waits.
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

    /// A source that answers when the test lets it, and counts how often it was asked.
    struct Gated {
        gate: Arc<Mutex<()>>,
        asked: Arc<AtomicUsize>,
    }

    impl DeviceSource for Gated {
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
    fn a_source_that_hangs_is_unresponsive_asked_once_and_heard_when_it_comes_back() {
        let (gate, asked) = (Arc::new(Mutex::new(())), Arc::new(AtomicUsize::new(0)));
        let source = Gated { gate: gate.clone(), asked: asked.clone() };
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
    fn an_answer_can_be_taken_without_waiting_once_it_was_told() {
        let (gate, asked) = (Arc::new(Mutex::new(())), Arc::new(AtomicUsize::new(0)));
        let (tell, told) = sync_channel(1);
        let source = Gated { gate: gate.clone(), asked };
        let answered = move || tell.send(()).expect("the test listens");
        let mut probe = SourceProbe::start_with_callback(Box::new(source), Duration::from_secs(60), answered).unwrap();
        assert!(probe.poll_reading().is_none() && !probe.is_pending());
        assert_eq!(probe.status().problem().as_deref(), Some("nvml: has not answered yet"));
        let closed = gate.lock().unwrap();
        probe.request_reading();
        assert!(probe.poll_reading().is_none() && probe.is_pending());
        probe.deadline = Duration::ZERO;
        assert_eq!(probe.poll_reading().unwrap().result.unwrap_err().code(), "driver_unresponsive");
        assert!(matches!(probe.status().state, SourceState::Failed(SourceError::Unresponsive { .. })));
        drop(closed);
        told.recv_timeout(Duration::from_secs(60)).expect("the source answers within a minute");
        assert!(probe.poll_reading().unwrap().result.is_ok() && !probe.is_pending());
        assert_eq!((probe.status().kind, probe.status().is_ready()), (SourceKind::Nvml, true));
    }

    struct Panics;

    impl DeviceSource for Panics {
        fn kind(&self) -> SourceKind {
            SourceKind::AmdSysfs
        }

        fn read(&mut self) -> Result<SourceReading, SourceError> {
            panic!("a bug in a source");
        }
    }

    #[test]
    fn a_source_that_panics_is_a_failed_reading_each_time() {
        let mut probe = SourceProbe::start(Box::new(Panics), Duration::from_secs(60)).unwrap();
        for _ in 0..2 {
            assert_eq!(probe.read().unwrap_err().code(), "driver_failed");
        }
    }
}

//! Reading a source off the caller's thread, with a deadline: a driver that hangs takes one thread with it, no more.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::snapshot::Snapshot;
use crate::source::{Source, SourceError, SourceKind};

/// What a source answered, and when it had the answer.
#[derive(Debug)]
pub struct Answer {
    /// Which source was read; one that stands for several says which of them it was.
    pub kind: SourceKind,
    /// When the source was done reading; a late answer is as old as this.
    pub taken: Instant,
    /// What it said.
    pub result: Result<Snapshot, SourceError>,
}

/// A source on a thread of its own, which ends when the probe is dropped and the source has answered.
///
/// While the source has not answered it is not asked again: a reading that hangs stays the only one.
#[derive(Debug)]
pub struct Probe {
    kind: SourceKind,
    deadline: Duration,
    asks: Sender<()>,
    answers: Receiver<Answer>,
    asked: Option<Instant>,
}

impl Probe {
    /// Starts the thread; each reading gets `deadline`.
    pub fn start(mut source: Box<dyn Source>, deadline: Duration) -> io::Result<Self> {
        let kind = source.kind();
        let (asks, asked) = channel::<()>();
        let (answer, answers) = channel();
        let serve = move || {
            for () in asked {
                let result = catch_unwind(AssertUnwindSafe(|| source.read()))
                    .unwrap_or_else(|_| Err(SourceError::Driver(format!("reading {kind} panicked"))));
                if answer.send(Answer { kind: source.kind(), taken: Instant::now(), result }).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().name(format!("probe-{kind}")).spawn(serve)?;
        Ok(Self { kind, deadline, asks, answers, asked: None })
    }

    /// Asks for a reading, unless one is still out. Several probes are asked first and then waited for together.
    pub fn ask(&mut self) {
        if self.asked.is_none() && self.asks.send(()).is_ok() {
            self.asked = Some(Instant::now());
        }
    }

    /// Waits for the answer until its deadline. One that was out before the ask may come at once, or be overdue.
    pub fn answer(&mut self) -> Answer {
        let asked = self.asked.unwrap_or_else(Instant::now);
        // An overdue reading gets one short look each time, not another deadline.
        let left = self.deadline.saturating_sub(asked.elapsed());
        match self.answers.recv_timeout(left) {
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
        }
    }

    fn failed(&self, error: SourceError) -> Answer {
        Answer { kind: self.kind, taken: Instant::now(), result: Err(error) }
    }

    /// Asks and waits.
    pub fn read(&mut self) -> Result<Snapshot, SourceError> {
        self.ask();
        self.answer().result
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

    impl Source for Gated {
        fn kind(&self) -> SourceKind {
            SourceKind::Nvml
        }

        fn read(&mut self) -> Result<Snapshot, SourceError> {
            self.asked.fetch_add(1, Ordering::SeqCst);
            let _open = self.gate.lock();
            Ok(Snapshot::default())
        }
    }

    #[test]
    fn a_source_that_hangs_is_unresponsive_asked_once_and_heard_when_it_comes_back() {
        let (gate, asked) = (Arc::new(Mutex::new(())), Arc::new(AtomicUsize::new(0)));
        let source = Gated { gate: gate.clone(), asked: asked.clone() };
        let mut probe = Probe::start(Box::new(source), Duration::from_millis(20)).unwrap();
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

    struct Panics;

    impl Source for Panics {
        fn kind(&self) -> SourceKind {
            SourceKind::AmdSysfs
        }

        fn read(&mut self) -> Result<Snapshot, SourceError> {
            panic!("a bug in a source");
        }
    }

    #[test]
    fn a_source_that_panics_is_a_failed_reading_each_time() {
        let mut probe = Probe::start(Box::new(Panics), Duration::from_secs(60)).unwrap();
        for _ in 0..2 {
            assert_eq!(probe.read().unwrap_err().code(), "driver_failed");
        }
    }
}

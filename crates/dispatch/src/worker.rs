//! The worker's side of the protocol, for workers written in Rust: set up, process tasks in order, clean up.
//!
//! Runs in the calling thread until the dispatcher stops the worker or exits.

use std::env;
use std::io::{self, Write as _};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::Thread;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use gpupool_confine::lock;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::fcntl_dupfd_cloexec;
use serde::{Deserialize, Serialize};

use crate::TaskId;
use crate::process::spawn_without_signals;
use crate::protocol::{
    FrameDecoder, FrameKind, PROTOCOL_VERSION, SOCKET_VARIABLE, WorkerCounters, WorkerFrame, receive_with_fds,
};

/// First message to a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkerHello {
    /// Protocol version.
    pub protocol: u32,
    /// Worker id.
    pub worker_id: u32,
    /// GPUs of the worker, by their numbers on the node.
    #[serde(default)]
    pub gpu_ids: Vec<u32>,
    /// Settings from [`crate::RunPlan::settings`].
    #[serde(default)]
    pub settings: serde_json::Value,
    /// Memory shared with the dispatcher, if [`crate::RunPlan::memory`] is set.
    #[serde(skip)]
    pub memory: Option<Arc<OwnedFd>>,
    /// Shared counters, which also hold the reason of an interrupt.
    #[serde(skip)]
    pub counters: Option<Arc<WorkerCounters>>,
}

/// Message of a worker that is set up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ReadyMessage {
    /// Protocol version.
    pub protocol: u32,
    /// Whether the worker uses the shared counters. A worker without counters gets one task at a time.
    #[serde(default)]
    pub counts: bool,
    /// Whether unclaimed tasks can be recalled from the worker.
    #[serde(default)]
    pub recalls: bool,
}

/// Error that ends a worker.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The program was not started by a dispatcher.
    #[error("{SOCKET_VARIABLE} does not name an open socket; a dispatcher must start this program")]
    NotAWorker,
    /// The dispatcher uses another protocol version.
    #[error("the dispatcher speaks protocol version {0}, this worker {PROTOCOL_VERSION}")]
    Version(u32),
    /// The dispatcher violated the worker protocol.
    #[error("the dispatcher violated the worker protocol: {0}")]
    ProtocolViolation(String),
    /// The socket failed.
    #[error("the socket to the dispatcher failed: {0}")]
    Socket(#[from] io::Error),
}

/// A worker that processes tasks.
pub trait TaskWorker: Sized {
    /// Loads models and other resources. An error ends the worker and is reported.
    fn set_up(hello: &WorkerHello) -> Result<Self, String>;

    /// Processes one task. An error fails the task only.
    fn process(&mut self, task: TaskId, payload: Bytes) -> Result<Bytes, String>;

    /// Releases resources.
    fn clean_up(self) -> Result<(), String> {
        Ok(())
    }
}

/// Processes tasks until the dispatcher stops the worker.
pub fn serve_tasks<W: TaskWorker>() -> Result<(), ServeError> {
    WorkerSession::connect(UnixStream::from(dispatcher_socket()?))?.run::<W>()
}

/// Duplicates the socket to the dispatcher. If the socket was the standard input, reads from that return nothing
/// afterwards.
#[allow(unsafe_code, reason = "a file descriptor that was inherited")]
fn dispatcher_socket() -> Result<OwnedFd, ServeError> {
    let number: Option<RawFd> = env::var(SOCKET_VARIABLE).ok().and_then(|text| text.parse().ok());
    let number = number.filter(|number| *number >= 0).ok_or(ServeError::NotAWorker)?;
    // SAFETY: the descriptor is only duplicated, which fails if it is not open.
    let inherited = unsafe { BorrowedFd::borrow_raw(number) };
    let copy = fcntl_dupfd_cloexec(inherited, 3).map_err(|_| ServeError::NotAWorker)?;
    if !rustix::fs::fstat(&copy).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket) {
        return Err(ServeError::NotAWorker);
    }
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(io::Error::from)?;
    if number == 0 {
        rustix::stdio::dup2_stdin(&null).map_err(io::Error::from)?;
    }
    Ok(copy)
}

struct WorkerSession {
    socket: Arc<UnixStream>,
    counters: Option<Arc<WorkerCounters>>,
    memory: Option<Arc<OwnedFd>>,
    decoder: FrameDecoder,
    results: ResultSender,
}

impl WorkerSession {
    fn connect(socket: UnixStream) -> io::Result<Self> {
        let socket = Arc::new(socket);
        // The shared counters and the outbox come with the first bytes.
        let mut bytes = [0; 4_096];
        let (read, [counters, memory]) = receive_with_fds(&*socket, &mut bytes)?;
        let mut decoder = FrameDecoder::default();
        decoder.push_bytes(&bytes[..read]);
        let counters = counters.map(WorkerCounters::from_memory).transpose()?.map(Arc::new);
        let outbox = counters.clone().filter(|counters| counters.has_outbox());
        let results = ResultSender::start(Arc::clone(&socket), outbox)?;
        Ok(Self { socket, counters, memory: memory.map(Arc::new), decoder, results })
    }

    fn run<W: TaskWorker>(mut self) -> Result<(), ServeError> {
        let Some(first) = self.next_frame()? else { return Ok(()) };
        let hello = WorkerHello { memory: self.memory.take(), counters: self.counters.clone(), ..parse_hello(&first)? };
        let mut worker = match W::set_up(&hello) {
            Ok(worker) => worker,
            Err(why) => return self.send_frame(&WorkerFrame::new(FrameKind::SetupFailed, why)),
        };
        let counts = self.counters.is_some();
        let ready = ReadyMessage { protocol: PROTOCOL_VERSION, counts, recalls: counts };
        // A struct of three plain fields always serializes.
        self.send_frame(&WorkerFrame::new(FrameKind::Ready, serde_json::to_vec(&ready).unwrap_or_default()))?;
        while let Some(frame) = self.next_frame()? {
            match frame.kind {
                // A task that cannot be claimed was recalled.
                FrameKind::Task if self.counters.as_ref().is_none_or(|counters| counters.claim_task()) => {
                    self.process_task(&mut worker, frame)?;
                }
                FrameKind::Task => {}
                FrameKind::Recalled => self.counters.iter().for_each(|counters| counters.reopen_claims()),
                FrameKind::Stop => break,
                other => return Err(ServeError::ProtocolViolation(format!("unexpected {other:?} after setup"))),
            }
        }
        match worker.clean_up() {
            Ok(()) => Ok(self.results.send_queued()?),
            Err(why) => self.send_frame(&WorkerFrame::new(FrameKind::CleanupFailed, why)),
        }
    }

    fn process_task<W: TaskWorker>(&mut self, worker: &mut W, frame: WorkerFrame) -> Result<(), ServeError> {
        match &self.counters {
            Some(counters) => counters.record_start(),
            None => self.send_frame(&WorkerFrame::for_task(FrameKind::Started, frame.task, Bytes::new()))?,
        }
        self.results.send_in_background();
        let result = match worker.process(frame.task, frame.payload) {
            Ok(result) => WorkerFrame::for_task(FrameKind::Done, frame.task, result),
            Err(why) => WorkerFrame::for_task(FrameKind::Failed, frame.task, why),
        };
        if let Some(counters) = &self.counters {
            counters.record_finish();
        }
        Ok(self.results.queue_frame(&result)?)
    }

    /// Returns the next frame; `None` if the dispatcher is gone. Sends queued results before it waits.
    fn next_frame(&mut self) -> Result<Option<WorkerFrame>, ServeError> {
        loop {
            let next = self.decoder.next_frame().map_err(|error| ServeError::ProtocolViolation(error.to_string()))?;
            if next.is_some() {
                return Ok(next);
            }
            self.results.send_queued()?;
            if self.decoder.read_from(&*self.socket)? == 0 {
                return Ok(None);
            }
        }
    }

    fn send_frame(&mut self, frame: &WorkerFrame) -> Result<(), ServeError> {
        self.results.queue_frame(frame)?;
        Ok(self.results.send_queued()?)
    }
}

fn parse_hello(frame: &WorkerFrame) -> Result<WorkerHello, ServeError> {
    if frame.kind != FrameKind::Hello {
        return Err(ServeError::ProtocolViolation(format!("{:?} before Hello", frame.kind)));
    }
    let hello: WorkerHello =
        serde_json::from_slice(&frame.payload).map_err(|error| ServeError::ProtocolViolation(error.to_string()))?;
    if hello.protocol == PROTOCOL_VERSION { Ok(hello) } else { Err(ServeError::Version(hello.protocol)) }
}

// Outgoing results: short ones are sent together, and none waits for long.
//
// The worker sends queued results before it waits for frames. If a task runs while results are queued, a sender thread
// sends them after a moment, so that a long task does not delay them. Queued results lie in the outbox and survive
// the worker; without an outbox each result is sent at once. The sender sleeps while the outbox is empty, and ends
// with the worker.

/// Maximum number of bytes of results that are sent together.
const SEND_BYTES: usize = 64 * 1024;
/// Longest time that a result waits for others.
const SEND_AFTER: Duration = Duration::from_millis(3);
/// Idle checks of the sender before it sleeps.
const IDLE_ROUNDS: u32 = 20;

struct ResultSender {
    context: Arc<SenderContext>,
    sender: Thread,
    has_unsent: bool,
}

struct SenderContext {
    socket: Arc<UnixStream>,
    unsent: Mutex<UnsentResults>,
    is_asleep: AtomicBool,
    is_finished: AtomicBool,
}

impl ResultSender {
    pub(crate) fn start(socket: Arc<UnixStream>, outbox: Option<Arc<WorkerCounters>>) -> io::Result<Self> {
        let unsent = Mutex::new(UnsentResults { header: BytesMut::new(), copy: BytesMut::new(), outbox });
        let (is_asleep, is_finished) = (AtomicBool::new(false), AtomicBool::new(false));
        let context = Arc::new(SenderContext { socket, unsent, is_asleep, is_finished });
        let sender_context = Arc::clone(&context);
        let thread = std::thread::Builder::new().name("gpupool-results".into());
        let sender = spawn_without_signals(|| thread.spawn(move || sender_context.run_sender()))?;
        Ok(Self { context, sender: sender.thread().clone(), has_unsent: false })
    }

    /// Queues a frame.
    pub(crate) fn queue_frame(&mut self, frame: &WorkerFrame) -> io::Result<()> {
        self.has_unsent = true;
        lock(&self.context.unsent).queue_frame(frame, &self.context.socket)
    }

    /// Sends queued frames.
    pub(crate) fn send_queued(&mut self) -> io::Result<()> {
        if !std::mem::take(&mut self.has_unsent) {
            return Ok(());
        }
        lock(&self.context.unsent).send_queued(&self.context.socket)
    }

    /// Lets the sender thread send queued results, because a long task may follow.
    pub(crate) fn send_in_background(&self) {
        if self.has_unsent && self.context.is_asleep.swap(false, Ordering::SeqCst) {
            self.sender.unpark();
        }
    }
}

impl Drop for ResultSender {
    fn drop(&mut self) {
        self.context.is_finished.store(true, Ordering::SeqCst);
        self.sender.unpark();
    }
}

impl SenderContext {
    fn run_sender(&self) {
        let mut idle = 0;
        while !self.is_finished.load(Ordering::SeqCst) {
            if idle >= IDLE_ROUNDS {
                self.is_asleep.store(true, Ordering::SeqCst);
                // A frame queued before the flag was set is seen here; a later one wakes this thread.
                if lock(&self.unsent).is_empty() {
                    std::thread::park();
                }
                self.is_asleep.store(false, Ordering::SeqCst);
                idle = 0;
            }
            std::thread::sleep(SEND_AFTER);
            let mut unsent = lock(&self.unsent);
            idle = if unsent.is_empty() { idle + 1 } else { 0 };
            // The dispatcher is gone, which the worker notices as well.
            let _ = unsent.send_queued(&self.socket);
        }
    }
}

/// Results that wait in the outbox, if there is one.
struct UnsentResults {
    header: BytesMut,
    /// Copy of the outbox for sending.
    copy: BytesMut,
    outbox: Option<Arc<WorkerCounters>>,
}

impl UnsentResults {
    fn queue_frame(&mut self, frame: &WorkerFrame, mut socket: &UnixStream) -> io::Result<()> {
        let too_large = || io::Error::new(io::ErrorKind::InvalidInput, "a result is too large to send");
        self.header.clear();
        frame.write_header(&mut self.header).ok_or_else(too_large)?;
        let Some(outbox) = &self.outbox else {
            socket.write_all(&self.header)?;
            return socket.write_all(&frame.payload);
        };
        // Large payloads are sent directly, without a copy into the outbox.
        let is_large = frame.payload.len() >= SEND_BYTES;
        // Always true: the outbox is sent before it lacks room for one more frame.
        let has_room = outbox.append_outbox([&self.header, if is_large { b"" } else { &frame.payload }]);
        debug_assert!(has_room, "the outbox is full");
        if is_large || outbox.outbox_length() >= SEND_BYTES {
            outbox.send_outbox(&mut self.copy, |bytes| socket.write_all(bytes))?;
        }
        if is_large {
            socket.write_all(&frame.payload)?;
            outbox.record_sent(frame.payload.len() as u64);
        }
        Ok(())
    }

    fn is_empty(&self) -> bool {
        self.outbox.as_ref().is_none_or(|outbox| outbox.outbox_length() == 0)
    }

    fn send_queued(&mut self, mut socket: &UnixStream) -> io::Result<()> {
        self.outbox
            .as_ref()
            .map_or(Ok(()), |outbox| outbox.send_outbox(&mut self.copy, |bytes| socket.write_all(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsFd;
    use std::thread;

    use bytes::BytesMut;

    use crate::protocol::send_with_fds;

    use super::*;

    struct DoublingWorker(String);

    impl TaskWorker for DoublingWorker {
        fn set_up(hello: &WorkerHello) -> Result<Self, String> {
            match hello.settings["name"].as_str() {
                Some(name) => Ok(Self(name.to_owned())),
                None => Err("a name is missing".into()),
            }
        }

        fn process(&mut self, task: TaskId, payload: Bytes) -> Result<Bytes, String> {
            if payload.is_empty() {
                return Err(format!("{}: task {task} is empty", self.0));
            }
            Ok([&payload[..], &payload[..]].concat().into())
        }
    }

    /// The dispatcher's end of a worker.
    struct TestDispatcher {
        socket: UnixStream,
        decoder: FrameDecoder,
        counters: WorkerCounters,
    }

    impl TestDispatcher {
        fn send_frame(&mut self, frames: &[WorkerFrame]) {
            let mut bytes = BytesMut::new();
            for frame in frames {
                frame.write_header(&mut bytes).unwrap();
                bytes.extend_from_slice(&frame.payload);
            }
            self.socket.write_all(&bytes).unwrap();
        }

        fn next_frame(&mut self) -> Option<WorkerFrame> {
            loop {
                if let Some(frame) = self.decoder.next_frame().unwrap() {
                    return Some(frame);
                }
                let mut bytes = [0; 4_096];
                let read = self.socket.read(&mut bytes).unwrap();
                if read == 0 {
                    return None;
                }
                self.decoder.push_bytes(&bytes[..read]);
            }
        }
    }

    fn start(settings: &str) -> (TestDispatcher, thread::JoinHandle<Result<(), ServeError>>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let counters = WorkerCounters::new().unwrap();
        let worker = thread::spawn(move || WorkerSession::connect(theirs)?.run::<DoublingWorker>());
        let dispatcher = TestDispatcher { socket: ours, decoder: FrameDecoder::default(), counters };
        let hello = format!(r#"{{"protocol":1,"worker_id":3,"settings":{settings}}}"#);
        let hello = WorkerFrame::new(FrameKind::Hello, hello);
        let mut bytes = BytesMut::new();
        hello.write_header(&mut bytes).unwrap();
        bytes.extend_from_slice(&hello.payload);
        assert_eq!(send_with_fds(&dispatcher.socket, &bytes, &[dispatcher.counters.as_fd()]).unwrap(), bytes.len());
        (dispatcher, worker)
    }

    #[test]
    fn tasks_are_processed_in_order_and_counted() {
        let (mut dispatcher, worker) = start(r#"{"name":"d"}"#);
        let ready: ReadyMessage = serde_json::from_slice(&dispatcher.next_frame().unwrap().payload).unwrap();
        assert_eq!(ready, ReadyMessage { protocol: 1, counts: true, recalls: true });
        let large = vec![7; 300_000];
        let task = |number, payload: &[u8]| WorkerFrame::for_task(FrameKind::Task, TaskId(number), payload.to_vec());
        dispatcher.send_frame(&[task(0, b"ab"), task(1, b""), task(2, &large), WorkerFrame::new(FrameKind::Stop, "")]);
        assert_eq!(dispatcher.next_frame(), Some(WorkerFrame::for_task(FrameKind::Done, TaskId(0), "abab")));
        assert_eq!(
            dispatcher.next_frame(),
            Some(WorkerFrame::for_task(FrameKind::Failed, TaskId(1), "d: task 1 is empty"))
        );
        assert_eq!(dispatcher.next_frame().unwrap().payload.len(), 600_000);
        assert_eq!(dispatcher.next_frame(), None);
        worker.join().unwrap().unwrap();
        assert_eq!((dispatcher.counters.read().started, dispatcher.counters.read().finished), (3, 3));
    }

    #[test]
    fn recalled_tasks_are_skipped_and_later_ones_processed() {
        let (mut dispatcher, worker) = start(r#"{"name":"d"}"#);
        dispatcher.next_frame().unwrap();
        assert_eq!(dispatcher.counters.recall_unclaimed(), 0);
        let task = |number: u64| WorkerFrame::for_task(FrameKind::Task, TaskId(number), "x");
        dispatcher.send_frame(&[
            task(0),
            task(1),
            WorkerFrame::new(FrameKind::Recalled, ""),
            task(2),
            WorkerFrame::new(FrameKind::Stop, ""),
        ]);
        assert_eq!(dispatcher.next_frame(), Some(WorkerFrame::for_task(FrameKind::Done, TaskId(2), "xx")));
        assert_eq!(dispatcher.next_frame(), None);
        worker.join().unwrap().unwrap();
        assert_eq!(dispatcher.counters.read().started, 1);
    }

    #[test]
    fn a_failed_setup_is_reported() {
        let (mut dispatcher, worker) = start("{}");
        assert_eq!(dispatcher.next_frame(), Some(WorkerFrame::new(FrameKind::SetupFailed, "a name is missing")));
        worker.join().unwrap().unwrap();
    }

    #[test]
    fn protocol_violations_and_other_versions_end_the_worker() {
        let (mut dispatcher, worker) = start(r#"{"name":"d"}"#);
        dispatcher.send_frame(&[WorkerFrame::new(FrameKind::Ready, "")]);
        assert!(worker.join().unwrap().unwrap_err().to_string().contains("Ready"));
        let frame = WorkerFrame::new(FrameKind::Hello, r#"{"protocol":9,"worker_id":0}"#);
        assert!(matches!(parse_hello(&frame), Err(ServeError::Version(9))));
    }
}

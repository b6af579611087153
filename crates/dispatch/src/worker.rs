//! The worker's side of the protocol, for workers written in Rust: be set up, work tasks off in order, clean up.
//!
//! Runs in the thread that calls it until it is told to stop, or whoever gave it work is gone.

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
use crate::process::untaken_by_threads_of;
use crate::protocol::{Decoder, Frame, Kind, SOCKET_VARIABLE, VERSION, WorkerCounters, receive};

/// What a worker is told first.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkerHello {
    /// The version of the protocol.
    pub protocol: u32,
    /// Which worker it is.
    pub worker_id: u32,
    /// The GPUs it has, by their numbers on the node.
    #[serde(default)]
    pub gpu_ids: Vec<u32>,
    /// Whatever the program that dispatches wants it to know.
    #[serde(default)]
    pub settings: serde_json::Value,
    /// Memory it shares with the dispatcher, where the [`crate::RunPlan`] has some.
    #[serde(skip)]
    pub memory: Option<Arc<OwnedFd>>,
    /// Where it counts, and finds what an interrupt is about.
    #[serde(skip)]
    pub counters: Option<Arc<WorkerCounters>>,
}

/// What a worker says when it is set up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// The version of the protocol.
    pub protocol: u32,
    /// Whether it counts in the memory it was given. One that does not has one task at a time.
    #[serde(default)]
    pub counts: bool,
    /// Whether tasks it has not begun can be taken back from it.
    #[serde(default)]
    pub recalls: bool,
}

/// Why a worker ended otherwise than by being told to.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// It was not started by a dispatcher.
    #[error("{SOCKET_VARIABLE} does not name an open socket: this program is started by a dispatcher")]
    NotAWorker,
    /// The dispatcher speaks another version.
    #[error("the dispatcher speaks version {0} of the protocol, this worker {VERSION}")]
    Version(u32),
    /// The dispatcher sent what is none of its frames.
    #[error("the dispatcher sent what cannot be understood: {0}")]
    Nonsense(String),
    /// The socket failed.
    #[error("the socket to the dispatcher failed: {0}")]
    Socket(#[from] io::Error),
}

/// A worker.
pub trait TaskWorker: Sized {
    /// Loads what takes long. An error ends the worker, and is told.
    fn set_up(hello: &WorkerHello) -> Result<Self, String>;

    /// Does one task. An error is the task's, and the worker lives on.
    fn process(&mut self, task: TaskId, payload: Bytes) -> Result<Bytes, String>;

    /// Gives back what was loaded.
    fn clean_up(self) -> Result<(), String> {
        Ok(())
    }
}

/// Works until it is told to stop.
pub fn serve_tasks<W: TaskWorker>() -> Result<(), ServeError> {
    Serving::on(UnixStream::from(socket()?))?.run::<W>()
}

/// The socket to the dispatcher. As a copy: the number it came by, which may be that of the standard input, then reads nothing.
#[allow(unsafe_code, reason = "a file descriptor that was inherited")]
fn socket() -> Result<OwnedFd, ServeError> {
    let number: Option<RawFd> = env::var(SOCKET_VARIABLE).ok().and_then(|text| text.parse().ok());
    let number = number.filter(|number| *number >= 0).ok_or(ServeError::NotAWorker)?;
    // SAFETY: only copied; where it is not open, that fails.
    let inherited = unsafe { BorrowedFd::borrow_raw(number) };
    let copy = fcntl_dupfd_cloexec(inherited, 3).map_err(|_| ServeError::NotAWorker)?;
    if !rustix::fs::fstat(&copy).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket) {
        return Err(ServeError::NotAWorker);
    }
    let nothing =
        rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(io::Error::from)?;
    if number == 0 {
        rustix::stdio::dup2_stdin(&nothing).map_err(io::Error::from)?;
    }
    Ok(copy)
}

struct Serving {
    socket: Arc<UnixStream>,
    counters: Option<Arc<WorkerCounters>>,
    memory: Option<Arc<OwnedFd>>,
    decoder: Decoder,
    answers: Answers,
}

impl Serving {
    fn on(socket: UnixStream) -> io::Result<Self> {
        let socket = Arc::new(socket);
        // With the first bytes comes the memory to count in, and to keep answers in.
        let mut bytes = [0; 4_096];
        let (read, [counters, memory]) = receive(&*socket, &mut bytes)?;
        let mut decoder = Decoder::default();
        decoder.add(&bytes[..read]);
        let counters = counters.map(WorkerCounters::of).transpose()?.map(Arc::new);
        let outbox = counters.clone().filter(|counters| counters.has_outbox());
        let answers = Answers::to(Arc::clone(&socket), outbox)?;
        Ok(Self { socket, counters, memory: memory.map(Arc::new), decoder, answers })
    }

    fn run<W: TaskWorker>(mut self) -> Result<(), ServeError> {
        let Some(first) = self.next_frame()? else { return Ok(()) };
        let hello = WorkerHello { memory: self.memory.take(), counters: self.counters.clone(), ..hello_of(&first)? };
        let mut worker = match W::set_up(&hello) {
            Ok(worker) => worker,
            Err(why) => return self.say(&Frame::new(Kind::SetupFailed, why)),
        };
        let counts = self.counters.is_some();
        let ready = Ready { protocol: VERSION, counts, recalls: counts };
        // Three fields always have a form in JSON.
        self.say(&Frame::new(Kind::Ready, serde_json::to_vec(&ready).unwrap_or_default()))?;
        while let Some(frame) = self.next_frame()? {
            match frame.kind {
                // One that cannot be claimed was taken back.
                Kind::Task if self.counters.as_ref().is_none_or(|counters| counters.claim()) => {
                    self.work(&mut worker, frame)?;
                }
                Kind::Task => {}
                Kind::Recalled => self.counters.iter().for_each(|counters| counters.reopen()),
                Kind::Stop => break,
                other => return Err(ServeError::Nonsense(format!("{other:?} to a worker that is set up"))),
            }
        }
        match worker.clean_up() {
            Ok(()) => Ok(self.answers.send()?),
            Err(why) => self.say(&Frame::new(Kind::CleanupFailed, why)),
        }
    }

    fn work<W: TaskWorker>(&mut self, worker: &mut W, frame: Frame) -> Result<(), ServeError> {
        match &self.counters {
            Some(counters) => counters.start(),
            None => self.say(&Frame::about(Kind::Started, frame.task, Bytes::new()))?,
        }
        self.answers.may_take_long();
        let answer = match worker.process(frame.task, frame.payload) {
            Ok(result) => Frame::about(Kind::Done, frame.task, result),
            Err(why) => Frame::about(Kind::Failed, frame.task, why),
        };
        if let Some(counters) = &self.counters {
            counters.finish();
        }
        Ok(self.answers.put(&answer)?)
    }

    /// The next frame; `None` where the dispatcher is gone. Whoever waits for results gets them before this waits.
    fn next_frame(&mut self) -> Result<Option<Frame>, ServeError> {
        loop {
            let next = self.decoder.next().map_err(|garbage| ServeError::Nonsense(garbage.to_string()))?;
            if next.is_some() {
                return Ok(next);
            }
            self.answers.send()?;
            if self.decoder.read_from(&*self.socket)? == 0 {
                return Ok(None);
            }
        }
    }

    fn say(&mut self, frame: &Frame) -> Result<(), ServeError> {
        self.answers.put(frame)?;
        Ok(self.answers.send()?)
    }
}

fn hello_of(frame: &Frame) -> Result<WorkerHello, ServeError> {
    if frame.kind != Kind::Hello {
        return Err(ServeError::Nonsense(format!("{:?} before Hello", frame.kind)));
    }
    let hello: WorkerHello =
        serde_json::from_slice(&frame.payload).map_err(|error| ServeError::Nonsense(error.to_string()))?;
    if hello.protocol == VERSION { Ok(hello) } else { Err(ServeError::Version(hello.protocol)) }
}

// Answers on their way out: several short ones are sent together, and none waits for long.
//
// The worker sends before it waits for more. While it works on a task with answers unsent, a thread of its own (the sender)
// sends them after a moment, so that none is held back by a long task. They wait in the outbox, and do not even die with the
// worker; where there is no outbox each is sent at once. The sender sleeps while there is nothing to send, and ends with the worker.

/// Answers that are sent together at most, in bytes.
const SEND_BYTES: usize = 64 * 1024;
/// How long an answer may wait for others to be sent with it.
const SEND_AFTER: Duration = Duration::from_millis(3);
/// How often the sender finds nothing to send before it sleeps for longer.
const IDLE_ROUNDS: u32 = 20;

struct Answers {
    shared: Arc<Shared>,
    sender: Thread,
    has_unsent: bool,
}

struct Shared {
    socket: Arc<UnixStream>,
    unsent: Mutex<Unsent>,
    is_asleep: AtomicBool,
    is_over: AtomicBool,
}

impl Answers {
    pub(crate) fn to(socket: Arc<UnixStream>, outbox: Option<Arc<WorkerCounters>>) -> io::Result<Self> {
        let unsent = Mutex::new(Unsent { header: BytesMut::new(), copy: BytesMut::new(), outbox });
        let (is_asleep, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
        let shared = Arc::new(Shared { socket, unsent, is_asleep, is_over });
        let for_sender = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("gpupool-answers".into());
        let sender = untaken_by_threads_of(|| thread.spawn(move || for_sender.send_late()))?;
        Ok(Self { shared, sender: sender.thread().clone(), has_unsent: false })
    }

    /// An answer is to be sent, now or in a moment.
    pub(crate) fn put(&mut self, frame: &Frame) -> io::Result<()> {
        self.has_unsent = true;
        lock(&self.shared.unsent).put(frame, &self.shared.socket)
    }

    /// Sends what there is.
    pub(crate) fn send(&mut self) -> io::Result<()> {
        if !std::mem::take(&mut self.has_unsent) {
            return Ok(());
        }
        lock(&self.shared.unsent).send(&self.shared.socket)
    }

    /// What comes now may take long: answers that wait are sent by somebody else.
    pub(crate) fn may_take_long(&self) {
        if self.has_unsent && self.shared.is_asleep.swap(false, Ordering::SeqCst) {
            self.sender.unpark();
        }
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::SeqCst);
        self.sender.unpark();
    }
}

impl Shared {
    fn send_late(&self) {
        let mut idle = 0;
        while !self.is_over.load(Ordering::SeqCst) {
            if idle >= IDLE_ROUNDS {
                self.is_asleep.store(true, Ordering::SeqCst);
                // What was put before that was said is seen now; what comes after wakes.
                if lock(&self.unsent).is_empty() {
                    std::thread::park();
                }
                self.is_asleep.store(false, Ordering::SeqCst);
                idle = 0;
            }
            std::thread::sleep(SEND_AFTER);
            let mut unsent = lock(&self.unsent);
            idle = if unsent.is_empty() { idle + 1 } else { 0 };
            // Nobody listens any more: the worker sees that as well.
            let _ = unsent.send(&self.socket);
        }
    }
}

/// Answers that wait in the outbox, if there is one.
struct Unsent {
    header: BytesMut,
    /// What of the outbox is being sent.
    copy: BytesMut,
    outbox: Option<Arc<WorkerCounters>>,
}

impl Unsent {
    fn put(&mut self, frame: &Frame, mut socket: &UnixStream) -> io::Result<()> {
        let too_large = || io::Error::new(io::ErrorKind::InvalidInput, "a result is too large to be sent");
        self.header.clear();
        frame.put_header(&mut self.header).ok_or_else(too_large)?;
        let Some(outbox) = &self.outbox else {
            socket.write_all(&self.header)?;
            return socket.write_all(&frame.payload);
        };
        // Large ones go as they are, not copied together with others first.
        let is_large = frame.payload.len() >= SEND_BYTES;
        // There is always room: what is there is sent before it is as much as one frame less than fits.
        let has_room = outbox.put([&self.header, if is_large { b"" } else { &frame.payload }]);
        debug_assert!(has_room, "the outbox is full");
        if is_large || outbox.unsent() >= SEND_BYTES {
            outbox.send(&mut self.copy, |bytes| socket.write_all(bytes))?;
        }
        if is_large {
            socket.write_all(&frame.payload)?;
            outbox.said_more(frame.payload.len() as u64);
        }
        Ok(())
    }

    fn is_empty(&self) -> bool {
        self.outbox.as_ref().is_none_or(|outbox| outbox.unsent() == 0)
    }

    fn send(&mut self, mut socket: &UnixStream) -> io::Result<()> {
        self.outbox.as_ref().map_or(Ok(()), |outbox| outbox.send(&mut self.copy, |bytes| socket.write_all(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsFd;
    use std::thread;

    use bytes::BytesMut;

    use crate::protocol::send_with;

    use super::*;

    struct Doubler(String);

    impl TaskWorker for Doubler {
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

    /// What a dispatcher has of a worker.
    struct Other {
        socket: UnixStream,
        decoder: Decoder,
        counters: WorkerCounters,
    }

    impl Other {
        fn say(&mut self, frames: &[Frame]) {
            let mut bytes = BytesMut::new();
            for frame in frames {
                frame.put_header(&mut bytes).unwrap();
                bytes.extend_from_slice(&frame.payload);
            }
            self.socket.write_all(&bytes).unwrap();
        }

        fn hear(&mut self) -> Option<Frame> {
            loop {
                if let Some(frame) = self.decoder.next().unwrap() {
                    return Some(frame);
                }
                let mut bytes = [0; 4_096];
                let read = self.socket.read(&mut bytes).unwrap();
                if read == 0 {
                    return None;
                }
                self.decoder.add(&bytes[..read]);
            }
        }
    }

    fn start(settings: &str) -> (Other, thread::JoinHandle<Result<(), ServeError>>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let counters = WorkerCounters::new().unwrap();
        let running = thread::spawn(move || Serving::on(theirs)?.run::<Doubler>());
        let other = Other { socket: ours, decoder: Decoder::default(), counters };
        let hello = format!(r#"{{"protocol":1,"worker_id":3,"settings":{settings}}}"#);
        let hello = Frame::new(Kind::Hello, hello);
        let mut bytes = BytesMut::new();
        hello.put_header(&mut bytes).unwrap();
        bytes.extend_from_slice(&hello.payload);
        assert_eq!(send_with(&other.socket, &bytes, &[other.counters.as_fd()]).unwrap(), bytes.len());
        (other, running)
    }

    #[test]
    fn tasks_are_done_in_order_and_counted() {
        let (mut other, running) = start(r#"{"name":"d"}"#);
        let ready: Ready = serde_json::from_slice(&other.hear().unwrap().payload).unwrap();
        assert_eq!(ready, Ready { protocol: 1, counts: true, recalls: true });
        let large = vec![7; 300_000];
        let task = |number, payload: &[u8]| Frame::about(Kind::Task, TaskId(number), payload.to_vec());
        other.say(&[task(0, b"ab"), task(1, b""), task(2, &large), Frame::new(Kind::Stop, "")]);
        assert_eq!(other.hear(), Some(Frame::about(Kind::Done, TaskId(0), "abab")));
        assert_eq!(other.hear(), Some(Frame::about(Kind::Failed, TaskId(1), "d: task 1 is empty")));
        assert_eq!(other.hear().unwrap().payload.len(), 600_000);
        assert_eq!(other.hear(), None);
        running.join().unwrap().unwrap();
        assert_eq!((other.counters.read().started, other.counters.read().finished), (3, 3));
    }

    #[test]
    fn what_was_taken_back_is_left_out_and_what_comes_after_is_done() {
        let (mut other, running) = start(r#"{"name":"d"}"#);
        other.hear().unwrap();
        assert_eq!(other.counters.recall(), 0);
        let task = |number: u64| Frame::about(Kind::Task, TaskId(number), "x");
        other.say(&[task(0), task(1), Frame::new(Kind::Recalled, ""), task(2), Frame::new(Kind::Stop, "")]);
        assert_eq!(other.hear(), Some(Frame::about(Kind::Done, TaskId(2), "xx")));
        assert_eq!(other.hear(), None);
        running.join().unwrap().unwrap();
        assert_eq!(other.counters.read().started, 1);
    }

    #[test]
    fn a_set_up_that_fails_is_told() {
        let (mut other, running) = start("{}");
        assert_eq!(other.hear(), Some(Frame::new(Kind::SetupFailed, "a name is missing")));
        running.join().unwrap().unwrap();
    }

    #[test]
    fn nonsense_and_other_versions_end_the_worker_with_a_reason() {
        let (mut other, running) = start(r#"{"name":"d"}"#);
        other.say(&[Frame::new(Kind::Ready, "")]);
        assert!(running.join().unwrap().unwrap_err().to_string().contains("Ready"));
        let frame = Frame::new(Kind::Hello, r#"{"protocol":9,"worker_id":0}"#);
        assert!(matches!(hello_of(&frame), Err(ServeError::Version(9))));
    }
}

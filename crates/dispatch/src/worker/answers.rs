//! Answers on their way out: several short ones are sent together, and none waits for long.
//!
//! The worker sends before it waits for more. While it works on a task with answers unsent, a thread of its own (the sender)
//! sends them after a moment, so that none is held back by a long task. Where there is memory for it they wait in the outbox, and
//! do not even die with the worker. The sender sleeps while there is nothing to send, and ends with the worker.

use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::Duration;

use bytes::BytesMut;

use crate::protocol::{Counters, Frame};
use crate::signals::untaken_by_threads_of;

/// Answers that are sent together at most, in bytes.
const SEND_BYTES: usize = 64 * 1024;
/// How long an answer may wait for others to be sent with it.
const SEND_AFTER: Duration = Duration::from_millis(3);
/// How often the sender finds nothing to send before it sleeps for longer.
const IDLE_ROUNDS: u32 = 20;

pub(super) struct Answers {
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
    pub fn to(socket: Arc<UnixStream>, counters: Option<Arc<Counters>>) -> io::Result<Self> {
        let unsent = Mutex::new(Unsent { header: BytesMut::new(), bytes: BytesMut::new(), counters });
        let (is_asleep, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
        let shared = Arc::new(Shared { socket, unsent, is_asleep, is_over });
        let for_sender = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("gpupool-answers".into());
        let sender = untaken_by_threads_of(|| thread.spawn(move || for_sender.send_late()))?;
        Ok(Self { shared, sender: sender.thread().clone(), has_unsent: false })
    }

    /// An answer is to be sent, now or in a moment.
    pub fn put(&mut self, frame: &Frame) -> io::Result<()> {
        let mut unsent = self.shared.lock();
        self.has_unsent = true;
        unsent.put(frame, &self.shared.socket)
    }

    /// Sends what there is.
    pub fn send(&mut self) -> io::Result<()> {
        if !std::mem::take(&mut self.has_unsent) {
            return Ok(());
        }
        self.shared.lock().send(&self.shared.socket)
    }

    /// What comes now may take long: answers that wait are sent by somebody else.
    pub fn may_take_long(&self) {
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
    fn lock(&self) -> MutexGuard<'_, Unsent> {
        self.unsent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send_late(&self) {
        let mut idle = 0;
        while !self.is_over.load(Ordering::SeqCst) {
            if idle >= IDLE_ROUNDS {
                self.is_asleep.store(true, Ordering::SeqCst);
                // What was put before that was said is seen now; what comes after wakes.
                if self.lock().is_empty() {
                    std::thread::park();
                }
                self.is_asleep.store(false, Ordering::SeqCst);
                idle = 0;
            }
            std::thread::sleep(SEND_AFTER);
            let mut unsent = self.lock();
            idle = if unsent.is_empty() { idle + 1 } else { 0 };
            // Nobody listens any more: the worker sees that as well.
            let _ = unsent.send(&self.socket);
        }
    }
}

/// Answers that wait: in the outbox, or here where there is none.
struct Unsent {
    header: BytesMut,
    bytes: BytesMut,
    counters: Option<Arc<Counters>>,
}

impl Unsent {
    fn put(&mut self, frame: &Frame, socket: &UnixStream) -> io::Result<()> {
        let too_large = || io::Error::new(io::ErrorKind::InvalidInput, "a result is too large to be sent");
        self.header.clear();
        frame.put_header(&mut self.header).ok_or_else(too_large)?;
        let payload = &frame.payload;
        if payload.len() >= SEND_BYTES {
            // Large ones go as they are, not copied together with others first.
            self.add(b"");
            self.send(socket)?;
            (&*socket).write_all(payload)?;
            self.sent(payload.len());
            return Ok(());
        }
        self.add(payload);
        if self.length() >= SEND_BYTES { self.send(socket) } else { Ok(()) }
    }

    /// Adds the header and this. There is always room: what is there is sent before it is as much as one frame less than fits.
    fn add(&mut self, payload: &[u8]) {
        match &self.counters {
            Some(counters) => {
                let has_room = counters.put([&self.header, payload]);
                debug_assert!(has_room, "the outbox is full");
            }
            None => {
                self.bytes.extend_from_slice(&self.header);
                self.bytes.extend_from_slice(payload);
            }
        }
    }

    fn length(&self) -> usize {
        self.counters.as_ref().map_or(self.bytes.len(), |counters| counters.unsent())
    }

    fn is_empty(&self) -> bool {
        self.length() == 0
    }

    fn send(&mut self, mut socket: &UnixStream) -> io::Result<()> {
        match &self.counters {
            Some(counters) => counters.send(|bytes| socket.write_all(bytes)),
            None => {
                let sent = socket.write_all(&self.bytes);
                self.bytes.clear();
                sent
            }
        }
    }

    fn sent(&self, bytes: usize) {
        if let Some(counters) = &self.counters {
            counters.said_more(bytes as u64);
        }
    }
}

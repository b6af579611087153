//! Answers on their way out: several short ones are sent together, and none waits for long.
//!
//! The worker sends before it waits for more. While it works on a task with answers unsent, a thread of its own (the sender)
//! sends them after a moment, so that none is held back by a long task, or dies with it. The sender sleeps while there is
//! nothing of that kind, and ends with the worker.

use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::Duration;

use bytes::BytesMut;

use crate::protocol::Frame;

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
    unsent: Mutex<BytesMut>,
    is_asleep: AtomicBool,
    is_over: AtomicBool,
}

impl Answers {
    pub fn to(socket: Arc<UnixStream>) -> io::Result<Self> {
        let unsent = Mutex::new(BytesMut::new());
        let (is_asleep, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
        let shared = Arc::new(Shared { socket, unsent, is_asleep, is_over });
        let for_sender = Arc::clone(&shared);
        let sender =
            std::thread::Builder::new().name("gpupool-answers".into()).spawn(move || for_sender.send_late())?;
        Ok(Self { shared, sender: sender.thread().clone(), has_unsent: false })
    }

    /// An answer is to be sent, now or in a moment.
    pub fn put(&mut self, frame: &Frame) -> io::Result<()> {
        let mut unsent = self.shared.lock();
        let too_large = || io::Error::new(io::ErrorKind::InvalidInput, "a result is too large to be sent");
        frame.put_header(&mut unsent).ok_or_else(too_large)?;
        self.has_unsent = true;
        if frame.payload.len() < SEND_BYTES {
            unsent.extend_from_slice(&frame.payload);
            return if unsent.len() >= SEND_BYTES { self.shared.send(&mut unsent) } else { Ok(()) };
        }
        // Large ones go as they are, not copied together with others first.
        self.shared.send(&mut unsent)?;
        (&*self.shared.socket).write_all(&frame.payload)
    }

    /// Sends what there is.
    pub fn send(&mut self) -> io::Result<()> {
        if !std::mem::take(&mut self.has_unsent) {
            return Ok(());
        }
        self.shared.send(&mut self.shared.lock())
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
    fn lock(&self) -> MutexGuard<'_, BytesMut> {
        self.unsent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, unsent: &mut BytesMut) -> io::Result<()> {
        let sent = (&*self.socket).write_all(unsent);
        unsent.clear();
        sent
    }

    fn send_late(&self) {
        take_no_signals();
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
            let _ = self.send(&mut unsent);
        }
    }
}

/// Signals are for the thread that works: there they interrupt what waits.
#[allow(unsafe_code, reason = "signal masks have no safe wrapper")]
fn take_no_signals() {
    // SAFETY: the set is local, and filled before it is used.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, std::ptr::null_mut());
    }
}

//! A future that an event loop polls, in its own thread: what it waits for wakes nobody else first.
//!
//! That is for questions that are answered soon. One that takes longer is handed to the thread of the runtime, which also sees
//! to it that nothing is left behind where the loop was closed meanwhile.

use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

use gpupool_client::watch::watched_by;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::{Letter, Mailbox, Shared};

/// What becomes of it is a letter to the loop.
type Coming = Pin<Box<dyn Future<Output = Letter> + Send>>;

const IDLE: u8 = 0;
const POLLED: u8 = 1;
/// It is to be polled (once more).
const WOKEN: u8 = 2;

/// Such a future.
pub(crate) struct Carried {
    pub(super) number: u64,
    pub(super) since: Instant,
    mailbox: Mailbox,
    state: AtomicU8,
    by: Mutex<By>,
    process: u32,
}

enum By {
    Loop(Coming),
    Runtime(AbortHandle),
    /// It came to its end, or is not wanted any more.
    Nobody,
}

impl Carried {
    pub(super) fn new(number: u64, mailbox: Mailbox, coming: Coming) -> Arc<Self> {
        let (state, by) = (AtomicU8::new(WOKEN), Mutex::new(By::Loop(coming)));
        Arc::new(Self { number, since: Instant::now(), mailbox, state, by, process: std::process::id() })
    }

    /// Polls it, in the thread of the loop; gives the letter it came to.
    pub(super) fn poll(self: &Arc<Self>, at: &Shared) -> Option<Letter> {
        let waker = Waker::from(self.clone());
        let mut by = self.by();
        let By::Loop(coming) = &mut *by else { return None };
        let (sockets, _entered) = (at.sockets.as_ref()?, at.runtime.enter());
        loop {
            self.state.store(POLLED, Ordering::SeqCst);
            let polled = watched_by(sockets.clone(), || coming.as_mut().poll(&mut Context::from_waker(&waker)));
            if let Poll::Ready(letter) = polled {
                let over = std::mem::replace(&mut *by, By::Nobody);
                drop(by);
                drop(over);
                return Some(letter);
            }
            if self.state.compare_exchange(POLLED, IDLE, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                return None;
            }
        }
    }

    /// Has the runtime go on with it.
    pub(super) fn hand_over(&self, runtime: &Handle) {
        let mut by = self.by();
        match std::mem::replace(&mut *by, By::Nobody) {
            By::Loop(coming) => {
                let mailbox = self.mailbox.clone();
                let task = runtime.spawn(async move { mailbox.post(coming.await) });
                *by = By::Runtime(task.abort_handle());
            }
            other => *by = other,
        }
    }

    /// Nobody wants it any more.
    pub(crate) fn stop(&self) {
        let before = std::mem::replace(&mut *self.by(), By::Nobody);
        match before {
            By::Nobody => return,
            By::Runtime(task) => task.abort(),
            By::Loop(coming) => {
                // What is dropped may leave tasks behind that give something back.
                let _entered = self.mailbox.shared.runtime.enter();
                drop(coming);
            }
        }
        self.mailbox.contents().carried.remove(&self.number);
    }

    fn by(&self) -> MutexGuard<'_, By> {
        self.by.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        let by = self.by.get_mut().unwrap_or_else(PoisonError::into_inner);
        // In a forked child it is the parent's, whose question goes on.
        if self.process != std::process::id() {
            std::mem::forget(std::mem::replace(by, By::Nobody));
        }
    }
}

impl Wake for Carried {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.swap(WOKEN, Ordering::SeqCst) == IDLE {
            self.mailbox.woken(self.clone());
        }
    }
}

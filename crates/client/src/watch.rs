//! Who watches the sockets that a future waits for.
//!
//! That is the runtime, in a thread of its own. A program that has an event loop can have futures polled in that loop's thread
//! and watch their sockets there: an answer then wakes the thread that waits for it, and no other before it. Tasks and timers
//! stay the runtime's.

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::task::Waker;

/// What a socket is waited for to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ready {
    /// There is something to read, or the other side is gone.
    Read,
    /// There is room to write.
    Write,
}

/// Watches sockets in place of the runtime.
pub trait Watch: fmt::Debug + Send + Sync {
    /// Wakes once when the socket is ready for this, or for what was asked before and has not come; at once where it is
    /// already.
    fn watch(&self, socket: BorrowedFd<'_>, ready: Ready, waker: &Waker) -> io::Result<()>;

    /// Whether it already waits until the socket is ready for this, and that has not come; then it wakes this one.
    fn still_waits(&self, socket: BorrowedFd<'_>, ready: Ready, waker: &Waker) -> bool;

    /// The socket is about to be closed, or watched by somebody else.
    fn forget(&self, socket: BorrowedFd<'_>);
}

thread_local! {
    static WATCHING: RefCell<Option<Arc<dyn Watch>>> = const { RefCell::new(None) };
}

/// Polls something whose sockets are watched by this one while it waits. It may be polled later by another, or by the runtime.
pub fn watched_by<T>(watch: Arc<dyn Watch>, poll: impl FnOnce() -> T) -> T {
    let _before = Before(WATCHING.replace(Some(watch)));
    poll()
}

/// Who watches for what is polled in this thread now; `None` where the runtime does.
pub(crate) fn watching() -> Option<Arc<dyn Watch>> {
    WATCHING.with_borrow(Clone::clone)
}

/// Who watched before, and does again, also after a panic.
struct Before(Option<Arc<dyn Watch>>);

impl Drop for Before {
    fn drop(&mut self) {
        WATCHING.set(self.0.take());
    }
}

//! Things with a file descriptor of their own, as the runtime wants them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Something with a file descriptor that is open, and the same, as long as it lives: nothing in this crate that is put here
/// ever changes its own.
#[derive(Debug)]
pub(super) struct ByFd<T>(pub T);

impl<T: AsFd> ByFd<T> {
    /// Has the runtime watch it.
    #[allow(unsafe_code, reason = "the runtime wants to be told that the descriptor stays open")]
    pub fn register(self, interest: Interest) -> io::Result<AsyncFd<Self>> {
        // SAFETY: what is inside owns its file descriptor, and keeps it until it is dropped.
        unsafe { AsyncFd::register_with_interest(self, interest) }.map_err(io::Error::from)
    }
}

impl<T: AsFd> AsRawFd for ByFd<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

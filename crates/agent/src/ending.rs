//! Waiting for the end of a process by its pidfd.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::unix::AsyncFd;

/// A process whose end is waited for.
pub(crate) struct Ending(AsyncFd<OwnedFd>);

impl Ending {
    /// Of the process behind this pidfd.
    #[allow(
        unsafe_code,
        reason = "registering asks for a descriptor that stays open, which only its owner can promise"
    )]
    pub fn of(pidfd: OwnedFd) -> io::Result<Self> {
        // SAFETY: the descriptor is owned by what is registered, and closed with it.
        unsafe { AsyncFd::register(pidfd) }.map(Self).map_err(io::Error::from)
    }

    /// Comes back when the process has ended.
    pub async fn wait(&self) {
        // An error means that it cannot be waited for, which the kernel says of nothing that lives.
        let _ended = self.0.readable().await;
    }
}

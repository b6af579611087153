//! A connection's socket, shared: HTTP reads and writes it while others may ask the kernel about its peer.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

/// An accepted socket.
#[derive(Debug)]
pub(super) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Calls the same method of whichever socket it is.
macro_rules! either {
    ($socket:expr, $stream:ident => $call:expr) => {
        match $socket {
            Socket::Tcp($stream) => $call,
            Socket::Unix($stream) => $call,
        }
    };
}

impl Socket {
    /// Whether the peer closed its sending side, even if there is still something to read before the end.
    pub fn peer_has_closed(&self) -> bool {
        self.shows(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
    }

    /// Whether there is something to read, or the end.
    pub fn has_unread(&self) -> bool {
        self.shows(PollFlags::IN)
    }

    /// Makes closing throw away what was not delivered.
    pub fn reset_on_close(&self) {
        let _ = rustix::net::sockopt::set_socket_linger(self, Some(Duration::ZERO));
    }

    fn shows(&self, flags: PollFlags) -> bool {
        let mut ask = [PollFd::new(self, flags)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut ask, Some(&at_once)).is_ok() && ask[0].revents().intersects(flags)
    }

    /// Reads what is there. A read that does not fill the buffer has emptied the socket, which is noted at once: it
    /// saves the second system call that would only say so.
    fn try_read(&self, buf: &mut ReadBuf<'_>) -> io::Result<()> {
        let room = buf.remaining();
        let mut got = 0;
        let emptied = || io::Error::from(io::ErrorKind::WouldBlock);
        let outcome = either!(self, stream => stream.try_io(Interest::READABLE, || {
            got = stream.try_read_buf(buf)?;
            if got > 0 && got < room { Err(emptied()) } else { Ok(()) }
        }));
        if got > 0 { Ok(()) } else { outcome }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        either!(self, stream => stream.as_fd())
    }
}

/// One holder of a socket; what HTTP and TLS read and write.
#[derive(Debug, Clone)]
pub(super) struct Shared(pub Arc<Socket>);

impl AsyncRead for Shared {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(either!(&*self.0, stream => stream.poll_read_ready(cx)))?;
            match self.0.try_read(buf) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                outcome => return Poll::Ready(outcome),
            }
        }
    }
}

impl Shared {
    fn poll_write_with(
        &self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(&Socket) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(either!(&*self.0, stream => stream.poll_write_ready(cx)))?;
            match write(&self.0) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                outcome => return Poll::Ready(outcome),
            }
        }
    }
}

impl AsyncWrite for Shared {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |socket| either!(socket, stream => stream.try_write(bytes)))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |socket| either!(socket, stream => stream.try_write_vectored(slices)))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(match rustix::net::shutdown(&*self.0, rustix::net::Shutdown::Write) {
            Err(error) if error != rustix::io::Errno::NOTCONN => Err(error.into()),
            _ => Ok(()),
        })
    }
}

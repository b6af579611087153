//! A connected socket that is watched by whoever polls it: the runtime, or a thread that watches for itself.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd as _, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustix::io::read;
use rustix::net::{SendAncillaryBuffer, SendFlags, Shutdown, sendmsg, shutdown};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::watch::{Ready, Watch, watching};

/// A connection to an agent. Nothing watches it while nobody polls it.
#[derive(Debug)]
pub(super) struct Stream {
    watched: Watched,
    socket: Arc<OwnedFd>,
    /// The last read left nothing behind.
    is_drained: bool,
}

/// Who watches it, as far as it was ever waited for.
#[derive(Debug)]
enum Watched {
    ByNobody,
    ByRuntime(AsyncFd<Arc<OwnedFd>>),
    By(Arc<dyn Watch>, Arc<OwnedFd>),
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Self::By(watch, socket) = self {
            watch.forget(socket.as_fd());
        }
    }
}

impl Stream {
    /// Over TCP, without waiting for more to send.
    pub fn tcp(stream: tokio::net::TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self::new(stream.into_std()?.into()))
    }

    pub fn unix(stream: tokio::net::UnixStream) -> io::Result<Self> {
        Ok(Self::new(stream.into_std()?.into()))
    }

    fn new(socket: OwnedFd) -> Self {
        Self { watched: Watched::ByNobody, socket: Arc::new(socket), is_drained: false }
    }

    /// The socket itself.
    pub fn socket(&self) -> Arc<OwnedFd> {
        self.socket.clone()
    }

    /// Reads or writes up to so many bytes as soon as the socket is ready for it.
    fn poll_io(
        &mut self,
        cx: &mut Context<'_>,
        ready: Ready,
        room: usize,
        mut act: impl FnMut(&OwnedFd) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        match (watching(), &self.watched) {
            (None, Watched::ByRuntime(_)) => return self.poll_by_runtime(cx, ready, room, act),
            (Some(watch), Watched::By(by, socket))
                if Arc::ptr_eq(by, &watch) && watch.still_waits(socket.as_fd(), ready, cx.waker()) =>
            {
                return Poll::Pending;
            }
            _ => {}
        }
        let is_drained = ready == Ready::Read && std::mem::take(&mut self.is_drained);
        if !is_drained {
            match act(&self.socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => {
                    self.is_drained = ready == Ready::Read && done.as_ref().is_ok_and(|done| is_short(*done, room));
                    return Poll::Ready(done);
                }
            }
        }
        match watching() {
            Some(watch) => self.wait_by(watch, ready, cx),
            None => self.poll_by_runtime(cx, ready, room, act),
        }
    }

    fn wait_by(&mut self, watch: Arc<dyn Watch>, ready: Ready, cx: &Context<'_>) -> Poll<io::Result<usize>> {
        if !matches!(&self.watched, Watched::By(by, _) if Arc::ptr_eq(by, &watch)) {
            // Whoever watched before is told first.
            self.watched = Watched::ByNobody;
            self.watched = Watched::By(watch.clone(), self.socket.clone());
        }
        match watch.watch(self.socket.as_fd(), ready, cx.waker()) {
            Ok(()) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    fn poll_by_runtime(
        &mut self,
        cx: &mut Context<'_>,
        ready: Ready,
        room: usize,
        mut act: impl FnMut(&OwnedFd) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        if !matches!(self.watched, Watched::ByRuntime(_)) {
            self.watched = Watched::ByNobody;
            self.watched = Watched::ByRuntime(at_runtime(self.socket.clone())?);
        }
        let Watched::ByRuntime(runtime) = &self.watched else { return Poll::Pending };
        loop {
            let mut guard = ready!(match ready {
                Ready::Read => runtime.poll_read_ready(cx),
                Ready::Write => runtime.poll_write_ready(cx),
            })?;
            if let Ok(done) = guard.try_io(|_| act(&self.socket)) {
                // Trying again would find nothing; what comes from now on is told anew.
                if done.as_ref().is_ok_and(|done| is_short(*done, room)) {
                    guard.clear_ready();
                }
                return Poll::Ready(done);
            }
        }
    }
}

/// Whether so little came or went that there is no more for now.
fn is_short(done: usize, room: usize) -> bool {
    0 < done && done < room
}

#[allow(unsafe_code, reason = "tokio asks for a promise that the number goes on to mean this socket")]
fn at_runtime(socket: Arc<OwnedFd>) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: what is registered owns the socket with us, so it stays open, under its number, for as long as that lives.
    Ok(unsafe { AsyncFd::register(socket) }?)
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let room = into.remaining();
        let read = |socket: &OwnedFd| Ok(read(socket, into.initialize_unfilled())?);
        let came = ready!(self.poll_io(cx, Ready::Read, room, read))?;
        into.advance(came);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        // Whoever has hung up is told by an error, not by a signal that ends the program.
        let send = |socket: &OwnedFd| sendmsg(socket, parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL);
        let room = parts.iter().map(|part| part.len()).sum();
        self.poll_io(cx, Ready::Write, room, |socket| Ok(send(socket)?))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(shutdown(&self.socket, Shutdown::Write)?))
    }
}

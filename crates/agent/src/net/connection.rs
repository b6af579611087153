//! One connection, from the first byte to the last: handshake, requests, end.
//!
//! The future ends when the client leaves, when the loop orders it, or, once the agent stops, after the request in
//! progress. Whenever it ends, the handler that was running is dropped with it.

use std::convert::Infallible;
use std::error::Error;
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tower::{Service, ServiceExt};

use super::peer::Peer;
use super::watch::{AnswerBody, Order, Phase, RequestBody, Watch, Watched};
use super::{Limits, REFUSAL_BYTES, REFUSAL_TIME};

/// First byte of every TLS handshake.
const TLS_HANDSHAKE: u8 = 0x16;

/// Everything that serving one connection needs.
pub(super) struct Seat<S> {
    pub socket: Arc<Socket>,
    pub peer: Peer,
    pub watch: Arc<Watch>,
    pub service: S,
    pub http: http1::Builder,
}

/// Configures HTTP under these limits, without timeouts: the watch keeps them.
pub(super) fn http(limits: &Limits) -> http1::Builder {
    let mut http = http1::Builder::new();
    http.header_read_timeout(None)
        .max_header_size(limits.header_bytes)
        .max_buf_size(limits.buffer_bytes)
        // A client that closes its sending side counts as gone: a waiter or holder must be noticed at once.
        .half_close(false);
    http
}

/// Serves plain HTTP.
pub(super) async fn plain<S, B>(seat: Seat<S>)
where
    S: Service<Request<RequestBody>, Response = Response<B>, Error = Infallible> + Clone,
    B: Body + Unpin + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    speak(Shared(seat.socket.clone()), seat).await;
}

/// Shakes hands, then serves HTTP.
pub(super) async fn tls<S, B>(seat: Seat<S>, config: Arc<ServerConfig>)
where
    S: Service<Request<RequestBody>, Response = Response<B>, Error = Infallible> + Clone,
    B: Body + Unpin + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let hands = handshake(seat.socket.clone(), config);
    if let Some(Some(stream)) = until_ordered(&seat.watch, hands).await {
        speak(stream, seat).await;
    }
}

async fn handshake(socket: Arc<Socket>, config: Arc<ServerConfig>) -> Option<TlsStream<Shared>> {
    let mut first = [0];
    if let Socket::Tcp(stream) = &*socket
        && stream.peek(&mut first).await.ok()? == 0
    {
        return None;
    }
    if first[0] != TLS_HANDSHAKE && first[0].is_ascii_alphabetic() {
        refuse(socket, Refusal::PlainHttp).await;
        return None;
    }
    match TlsAcceptor::from(config).accept(Shared(socket)).await {
        Ok(stream) => Some(stream),
        Err(error) => {
            tracing::debug!(%error, "TLS handshake failed");
            None
        }
    }
}

/// Runs `work` until it is done or the connection is ordered to end.
async fn until_ordered<T>(watch: &Watch, work: impl Future<Output = T>) -> Option<T> {
    let mut work = std::pin::pin!(work);
    poll_fn(|cx| match watch.poll_order(cx) {
        Order::Go => work.as_mut().poll(cx).map(Some),
        Order::Finish | Order::Close | Order::TooSlow => Poll::Ready(None),
    })
    .await
}

async fn speak<I, S, B>(stream: I, seat: Seat<S>)
where
    I: AsyncRead + AsyncWrite + Unpin,
    S: Service<Request<RequestBody>, Response = Response<B>, Error = Infallible> + Clone,
    B: Body + Unpin + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let Seat { socket, peer, watch, service, http } = seat;
    let io = TokioIo::new(Watched { stream, watch: watch.clone() });
    let noted = watch.clone();
    let answer = move |request: Request<Incoming>| {
        let watch = noted.clone();
        watch.enter(Phase::Handling);
        let mut request = request.map(|body| RequestBody::new(body, watch.clone()));
        request.extensions_mut().insert(peer.clone());
        let answer = service.clone().oneshot(request);
        async move {
            let answer = answer.await?;
            watch.enter(Phase::Answering);
            Ok::<_, Infallible>(answer.map(|body| AnswerBody::new(body, watch)))
        }
    };
    let mut connection = http.serve_connection(io, service_fn(answer));
    let mut finishing = false;
    let ended = poll_fn(|cx| {
        match watch.poll_order(cx) {
            Order::Finish if !finishing => {
                finishing = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
            Order::Go | Order::Finish => {}
            order @ (Order::Close | Order::TooSlow) => return Poll::Ready(Err(order)),
        }
        Pin::new(&mut connection).poll(cx).map(Ok)
    })
    .await;
    match ended {
        Ok(outcome) => {
            if let Err(error) = &outcome {
                tracing::debug!(%error, "connection ended early");
            }
            drop(connection);
            // An answer was given while the client was still sending.
            if socket.has_unread() && !socket.peer_has_closed() {
                linger(socket).await;
            }
        }
        Err(Order::TooSlow) if !watch.is_writing() => {
            let mut stream = connection.into_parts().io.into_inner().stream;
            say(&mut stream, Refusal::TooSlow).await;
            linger(socket).await;
        }
        // Bytes the client does not take would stay in the kernel for minutes: throw them away.
        Err(_) if watch.is_writing() => socket.reset_on_close(),
        Err(_) => {}
    }
}

/// Reason why a client gets only a short answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// As many connections as allowed are open.
    TooMany,
    /// As many as allowed are open from this address.
    TooManyFromAddress,
    /// It did not send its request in time.
    TooSlow,
    /// It speaks http where https is spoken.
    PlainHttp,
}

impl Refusal {
    fn text(self) -> String {
        let (status, why) = match self {
            Self::TooMany => ("503 Service Unavailable", "too many connections: try again later"),
            Self::TooManyFromAddress => {
                ("503 Service Unavailable", "too many connections from your address: close some, or use fewer")
            }
            Self::TooSlow => ("408 Request Timeout", "the request did not arrive in time"),
            Self::PlainHttp => ("400 Bad Request", "this port speaks https: use https:// instead of http://"),
        };
        let length = why.len() + 1;
        format!(
            "HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n\
             content-length: {length}\r\n\r\n{why}\n"
        )
    }
}

/// Tells a client the reason over its plain socket, and waits a moment until it has read that.
pub(super) async fn refuse(socket: Arc<Socket>, refusal: Refusal) {
    say(&mut Shared(socket.clone()), refusal).await;
    linger(socket).await;
}

/// Writes the answer and closes the sending side.
async fn say(stream: &mut (impl AsyncWrite + Unpin), refusal: Refusal) {
    let text = refusal.text();
    let _ = timeout(REFUSAL_TIME, async {
        stream.write_all(text.as_bytes()).await?;
        stream.flush().await?;
        stream.shutdown().await
    })
    .await;
}

/// Reads the rest that the client sends. Closing a socket with unread bytes resets the connection, and a reset client
/// may never see the answer that was sent to it.
async fn linger(socket: Arc<Socket>) {
    let mut shared = Shared(socket);
    let _ = timeout(REFUSAL_TIME, async {
        let mut waste = vec![0; 4096];
        let mut left = REFUSAL_BYTES;
        while left > 0 {
            match shared.read(&mut waste).await {
                Ok(0) | Err(_) => return,
                Ok(bytes) => left = left.saturating_sub(bytes),
            }
        }
    })
    .await;
}

/// An accepted socket.
#[derive(Debug)]
pub(super) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Calls the same method of either kind of socket.
macro_rules! either {
    ($socket:expr, $stream:ident => $call:expr) => {
        match $socket {
            Socket::Tcp($stream) => $call,
            Socket::Unix($stream) => $call,
        }
    };
}

impl Socket {
    /// Returns whether the peer closed its sending side, even if there is still something to read before the end.
    pub fn peer_has_closed(&self) -> bool {
        self.shows(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
    }

    /// Returns whether there is something to read, or the end.
    pub fn has_unread(&self) -> bool {
        self.shows(PollFlags::IN)
    }

    /// Makes closing throw away the bytes that were not delivered.
    pub fn reset_on_close(&self) {
        let _ = rustix::net::sockopt::set_socket_linger(self, Some(Duration::ZERO));
    }

    fn shows(&self, flags: PollFlags) -> bool {
        let mut ask = [PollFd::new(self, flags)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut ask, Some(&at_once)).is_ok() && ask[0].revents().intersects(flags)
    }

    /// Reads the bytes that are there. A read that does not fill the buffer has emptied the socket, which is noted at
    /// once: it saves the second system call that would only say so.
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

/// One holder of a socket, shared: HTTP and TLS read and write it while others ask the kernel about its peer.
#[derive(Debug, Clone)]
struct Shared(Arc<Socket>);

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

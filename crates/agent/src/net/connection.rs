//! One connection, from the first byte to the last: handshake, requests, end.
//!
//! The future ends when the client leaves, when the loop orders it, or after the request in progress once the agent
//! stops. A running handler is dropped with it.

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

use super::deadlines::{ConnectionOrder, DeadlineTracker, IncomingBody, RequestPhase, ResponseBody, TrackedStream};
use super::peer::Peer;
use super::{NetLimits, REFUSAL_BYTES, REFUSAL_TIME};

/// First byte of every TLS handshake.
const TLS_HANDSHAKE: u8 = 0x16;

/// Everything that serves one connection.
pub(super) struct ConnectionSpec<S> {
    pub socket: Arc<ClientSocket>,
    pub peer: Peer,
    pub tracker: Arc<DeadlineTracker>,
    pub service: S,
    pub http: http1::Builder,
}

/// Configures HTTP under these limits, without timeouts: the deadline tracker enforces them.
pub(super) fn http_builder(limits: &NetLimits) -> http1::Builder {
    let mut http = http1::Builder::new();
    http.header_read_timeout(None)
        .max_header_size(limits.header_bytes)
        .max_buf_size(limits.buffer_bytes)
        // A client that closes its sending side counts as gone: the end of a waiter or holder must be noticed at once.
        .half_close(false);
    http
}

/// Serves plain HTTP.
pub(super) async fn serve_plain<S, B>(spec: ConnectionSpec<S>)
where
    S: Service<Request<IncomingBody>, Response = Response<B>, Error = Infallible> + Clone,
    B: Body + Unpin + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    serve_http(SharedSocket(spec.socket.clone()), spec).await;
}

/// Performs the TLS handshake, then serves HTTP.
pub(super) async fn serve_tls<S, B>(spec: ConnectionSpec<S>, config: Arc<ServerConfig>)
where
    S: Service<Request<IncomingBody>, Response = Response<B>, Error = Infallible> + Clone,
    B: Body + Unpin + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let handshake = handshake(spec.socket.clone(), config);
    if let Some(Some(stream)) = until_ordered(&spec.tracker, handshake).await {
        serve_http(stream, spec).await;
    }
}

async fn handshake(socket: Arc<ClientSocket>, config: Arc<ServerConfig>) -> Option<TlsStream<SharedSocket>> {
    let mut first = [0];
    if let ClientSocket::Tcp(stream) = &*socket
        && stream.peek(&mut first).await.ok()? == 0
    {
        return None;
    }
    if first[0] != TLS_HANDSHAKE && first[0].is_ascii_alphabetic() {
        refuse(socket, ConnectionRefusal::PlainHttp).await;
        return None;
    }
    match TlsAcceptor::from(config).accept(SharedSocket(socket)).await {
        Ok(stream) => Some(stream),
        Err(error) => {
            tracing::debug!(%error, "TLS handshake failed");
            None
        }
    }
}

/// Runs `work` until it is done or the connection is ordered to end.
async fn until_ordered<T>(tracker: &DeadlineTracker, work: impl Future<Output = T>) -> Option<T> {
    let mut work = std::pin::pin!(work);
    poll_fn(|cx| match tracker.poll_order(cx) {
        ConnectionOrder::Go => work.as_mut().poll(cx).map(Some),
        ConnectionOrder::Finish | ConnectionOrder::Close | ConnectionOrder::TooSlow => Poll::Ready(None),
    })
    .await
}

async fn serve_http<I, S, B>(stream: I, spec: ConnectionSpec<S>)
where
    I: AsyncRead + AsyncWrite + Unpin,
    S: Service<Request<IncomingBody>, Response = Response<B>, Error = Infallible> + Clone,
    B: Body + Unpin + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let ConnectionSpec { socket, peer, tracker, service, http } = spec;
    let io = TokioIo::new(TrackedStream { stream, tracker: tracker.clone() });
    let shared_tracker = tracker.clone();
    let respond = move |request: Request<Incoming>| {
        let tracker = shared_tracker.clone();
        tracker.enter(RequestPhase::Handling);
        let mut request = request.map(|body| IncomingBody::new(body, tracker.clone()));
        request.extensions_mut().insert(peer.clone());
        let response = service.clone().oneshot(request);
        async move {
            let response = response.await?;
            tracker.enter(RequestPhase::Responding);
            Ok::<_, Infallible>(response.map(|body| ResponseBody::new(body, tracker)))
        }
    };
    let mut connection = http.serve_connection(io, service_fn(respond));
    let mut finishing = false;
    let ended = poll_fn(|cx| {
        match tracker.poll_order(cx) {
            ConnectionOrder::Finish if !finishing => {
                finishing = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
            ConnectionOrder::Go | ConnectionOrder::Finish => {}
            order @ (ConnectionOrder::Close | ConnectionOrder::TooSlow) => return Poll::Ready(Err(order)),
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
            // The response was complete while the client was still sending.
            if socket.has_unread() && !socket.peer_has_closed() {
                drain_unread(socket).await;
            }
        }
        Err(ConnectionOrder::TooSlow) if !tracker.is_writing() => {
            let mut stream = connection.into_parts().io.into_inner().stream;
            write_refusal(&mut stream, ConnectionRefusal::TooSlow).await;
            drain_unread(socket).await;
        }
        // Bytes that the client does not accept would stay in the kernel for minutes: discard them.
        Err(_) if tracker.is_writing() => socket.reset_on_close(),
        Err(_) => {}
    }
}

/// Reason why a connection gets only a short response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionRefusal {
    /// The limit of open connections is reached.
    TooMany,
    /// The limit of open connections from this address is reached.
    TooManyFromAddress,
    /// The request did not arrive in time.
    TooSlow,
    /// The client uses http on a port for https.
    PlainHttp,
}

impl ConnectionRefusal {
    fn text(self) -> String {
        let (status, why) = match self {
            Self::TooMany => ("503 Service Unavailable", "too many connections: try again later"),
            Self::TooManyFromAddress => {
                ("503 Service Unavailable", "too many connections from your address: close some, or use fewer")
            }
            Self::TooSlow => ("408 Request Timeout", "the request did not arrive in time: send it faster"),
            Self::PlainHttp => ("400 Bad Request", "this port speaks https: use https:// instead of http://"),
        };
        let length = why.len() + 1;
        format!(
            "HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n\
             content-length: {length}\r\n\r\n{why}\n"
        )
    }
}

/// Writes the reason to a plain socket, and gives the client a moment to read it.
pub(super) async fn refuse(socket: Arc<ClientSocket>, refusal: ConnectionRefusal) {
    write_refusal(&mut SharedSocket(socket.clone()), refusal).await;
    drain_unread(socket).await;
}

/// Writes the short response and closes the sending side.
async fn write_refusal(stream: &mut (impl AsyncWrite + Unpin), refusal: ConnectionRefusal) {
    let text = refusal.text();
    let _ = timeout(REFUSAL_TIME, async {
        stream.write_all(text.as_bytes()).await?;
        stream.flush().await?;
        stream.shutdown().await
    })
    .await;
}

/// Reads the rest that the client sends. Closing a socket with unread bytes resets the connection, and after a reset the
/// client may lose the response.
async fn drain_unread(socket: Arc<ClientSocket>) {
    let mut shared = SharedSocket(socket);
    let _ = timeout(REFUSAL_TIME, async {
        let mut discarded = vec![0; 4096];
        let mut left = REFUSAL_BYTES;
        while left > 0 {
            match shared.read(&mut discarded).await {
                Ok(0) | Err(_) => return,
                Ok(bytes) => left = left.saturating_sub(bytes),
            }
        }
    })
    .await;
}

/// An accepted socket.
#[derive(Debug)]
pub(super) enum ClientSocket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Calls the same method on a socket of either type.
macro_rules! either {
    ($socket:expr, $stream:ident => $call:expr) => {
        match $socket {
            ClientSocket::Tcp($stream) => $call,
            ClientSocket::Unix($stream) => $call,
        }
    };
}

impl ClientSocket {
    /// Returns whether the peer closed its sending side, even if unread bytes remain.
    pub(super) fn peer_has_closed(&self) -> bool {
        self.shows(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
    }

    /// Returns whether a read would return bytes or the end.
    pub(super) fn has_unread(&self) -> bool {
        self.shows(PollFlags::IN)
    }

    /// Makes closing discard the bytes that were not delivered.
    pub(super) fn reset_on_close(&self) {
        let _ = rustix::net::sockopt::set_socket_linger(self, Some(Duration::ZERO));
    }

    fn shows(&self, flags: PollFlags) -> bool {
        let mut polled = [PollFd::new(self, flags)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&at_once)).is_ok() && polled[0].revents().intersects(flags)
    }

    /// Reads the available bytes. A read that does not fill the buffer has emptied the socket; recording that at once saves
    /// a second system call.
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

impl AsFd for ClientSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        either!(self, stream => stream.as_fd())
    }
}

/// A shared socket: HTTP and TLS read and write it while other code queries its peer from the kernel.
#[derive(Debug, Clone)]
struct SharedSocket(Arc<ClientSocket>);

impl AsyncRead for SharedSocket {
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

impl SharedSocket {
    fn poll_write_with(
        &self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(&ClientSocket) -> io::Result<usize>,
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

impl AsyncWrite for SharedSocket {
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

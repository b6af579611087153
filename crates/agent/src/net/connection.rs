//! One connection, from the first byte to the last: handshake, requests, end.
//!
//! The future ends when the client leaves, when the loop orders it, or, once the agent stops, after the request in
//! progress. Whenever it ends, the handler that was running is dropped with it.

use std::convert::Infallible;
use std::error::Error;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tower::{Service, ServiceExt};

use super::bodies::{AnswerBody, RequestBody};
use super::limits::Limits;
use super::peer::Peer;
use super::refuse::{Refusal, linger, refuse, say};
use super::socket::{Shared, Socket};
use super::watch::{Order, Phase, Watch, Watched};

/// First byte of every TLS handshake.
const TLS_HANDSHAKE: u8 = 0x16;

/// What a connection needs to be served.
pub(super) struct Seat<S> {
    pub socket: Arc<Socket>,
    pub peer: Peer,
    pub watch: Arc<Watch>,
    pub service: S,
    pub http: http1::Builder,
}

/// How HTTP is spoken under these limits. Timeouts are not its business: the watch keeps them.
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

//! Plain HTTP to an agent on this machine: no proxy, no encryption, no redirects. These requests are the most frequent
//! and the fastest, so the overhead of the client counts. Connections are pooled and have no tasks of their own: the
//! task or thread that sends a request also drives its connection.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::Fuse;
use http::header::{CONTENT_TYPE, HOST, HeaderMap, HeaderValue};
use http::{Request, Uri};
use http_body_util::Full;
use hyper::client::conn::http1::{self, SendRequest, handshake};
use hyper_util::rt::TokioIo;
use reqwest::Url;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, timeout_at};

use crate::Endpoint;
use crate::limits::{IDLE_CONNECTION_LIFETIME, MAX_IDLE_CONNECTIONS};
use crate::transport::{ExchangeFuture, HttpRequest, HttpResponse, Transport, TransportError, read_response};

/// Transport to one agent on this machine.
pub(crate) struct LocalTransport {
    address: LocalAddress,
    /// Address of the agent; routes follow its path.
    base: Url,
    /// Headers of every request.
    headers: HeaderMap,
    connect: Duration,
    idle: Mutex<Vec<(PooledConnection, Instant)>>,
}

enum LocalAddress {
    Tcp(String, u16),
    Unix(PathBuf),
}

impl fmt::Debug for LocalTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").field("base", &self.base.as_str()).finish_non_exhaustive()
    }
}

impl Transport for LocalTransport {
    fn exchange(&self, request: HttpRequest) -> ExchangeFuture<'_> {
        Box::pin(self.send_request(request))
    }
}

impl LocalTransport {
    /// Creates the transport if the endpoint is on this machine and not encrypted.
    pub(crate) fn for_endpoint(endpoint: &Endpoint, mut headers: HeaderMap, connect: Duration) -> Option<Self> {
        if !endpoint.is_local() || endpoint.is_encrypted() {
            return None;
        }
        let base: Url = endpoint.address("").parse().ok()?;
        let (host, port) = (base.host_str()?, base.port_or_known_default()?);
        let address = match endpoint.socket() {
            Some(path) => LocalAddress::Unix(path.to_owned()),
            None => LocalAddress::Tcp(host.trim_start_matches('[').trim_end_matches(']').to_owned(), port),
        };
        let named = base.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        headers.insert(HOST, HeaderValue::from_str(&named).ok()?);
        Some(Self { address, base, headers, connect, idle: Mutex::default() })
    }

    async fn send_request(&self, request: HttpRequest) -> Result<HttpResponse, TransportError> {
        let until = deadline_after(request.timeout);
        let request = self.build_request(request)?;
        timeout_at(until, self.send(request, until)).await.unwrap_or(Err(TransportError::TimedOut))
    }

    fn build_request(&self, request: HttpRequest) -> Result<Request<FullBody>, TransportError> {
        let mut outgoing = Request::new(Full::new(request.body.clone().unwrap_or_default()));
        *outgoing.uri_mut() = self.request_target(&request)?;
        *outgoing.method_mut() = request.method;
        let headers = outgoing.headers_mut();
        headers.clone_from(&self.headers);
        if request.body.is_some() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        headers.extend(request.headers);
        Ok(outgoing)
    }

    /// Returns the path and query of a request.
    fn request_target(&self, request: &HttpRequest) -> Result<Uri, TransportError> {
        let prefix = self.base.path().trim_end_matches('/');
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'/' | b'-' | b'_');
        let target = if request.query.is_empty() && request.route.bytes().all(is_plain) {
            format!("{prefix}{}", request.route)
        } else {
            let mut url = self.base.clone();
            url.set_path(&format!("{prefix}{}", request.route));
            if !request.query.is_empty() {
                url.query_pairs_mut().extend_pairs(&request.query);
            }
            url.query().map_or_else(|| url.path().to_owned(), |query| format!("{}?{query}", url.path()))
        };
        target.parse().map_err(|error: http::uri::InvalidUri| TransportError::NotSent(error.into()))
    }

    /// Sends a request over an idle connection, or else over a new one.
    async fn send(&self, mut request: Request<FullBody>, until: Instant) -> Result<HttpResponse, TransportError> {
        loop {
            let (mut connection, is_new) = match self.take_idle().await {
                Some(connection) => (connection, false),
                None => (self.connect(until).await?, true),
            };
            match connection.send_request(request).await {
                Ok(response) => {
                    self.return_idle(connection);
                    return Ok(response);
                }
                // The connection was closed while idle, and no byte was sent.
                Err(ExchangeFailure::Unsent(unsent, _)) if !is_new => request = *unsent,
                Err(ExchangeFailure::Unsent(_, error)) => return Err(TransportError::NotSent(error.into())),
                Err(ExchangeFailure::Sent(error)) => return Err(error),
            }
        }
    }

    async fn connect(&self, until: Instant) -> Result<PooledConnection, TransportError> {
        let connect = async {
            let stream: Box<dyn ByteStream> = match &self.address {
                LocalAddress::Tcp(host, port) => {
                    let stream = TcpStream::connect((host.as_str(), *port)).await?;
                    stream.set_nodelay(true)?;
                    Box::new(stream)
                }
                LocalAddress::Unix(path) => Box::new(UnixStream::connect(path).await?),
            };
            let socket = stream.as_fd().try_clone_to_owned()?;
            let (sender, driver) = handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
            io::Result::Ok(PooledConnection { sender, driver: driver.fuse(), socket })
        };
        let until = until.min(deadline_after(self.connect));
        let connected = timeout_at(until, connect).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        connected.map_err(|error| TransportError::NotSent(error.into()))
    }

    /// Takes an idle connection that is still open.
    async fn take_idle(&self) -> Option<PooledConnection> {
        loop {
            let (mut connection, since) = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
            if since.elapsed() < IDLE_CONNECTION_LIFETIME && connection.is_open().await {
                return Some(connection);
            }
        }
    }

    fn return_idle(&self, connection: PooledConnection) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE_CONNECTIONS {
            idle.push((connection, Instant::now()));
        }
    }
}

type FullBody = Full<Bytes>;
type ConnectionDriver = Fuse<http1::Connection<TokioIo<Box<dyn ByteStream>>, FullBody>>;

trait ByteStream: AsyncRead + AsyncWrite + AsFd + Send + Unpin {}

impl ByteStream for TcpStream {}
impl ByteStream for UnixStream {}

/// A connection without a request in progress.
struct PooledConnection {
    sender: SendRequest<FullBody>,
    /// Writes requests and reads responses while it is polled. Dropped at its end, which wakes the waiting request.
    driver: ConnectionDriver,
    /// Second descriptor of the socket, to check whether the peer has closed it.
    socket: OwnedFd,
}

/// Reason for a missing response.
enum ExchangeFailure {
    /// No byte was sent; the request can be sent again.
    Unsent(Box<Request<FullBody>>, hyper::Error),
    Sent(TransportError),
}

impl PooledConnection {
    /// Whether the connection can be used: no unexpected bytes have arrived and the peer has not closed it.
    async fn is_open(&mut self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let is_quiet = matches!(recv(&self.socket, &mut [0_u8; 1], flags), Err(Errno::WOULDBLOCK | Errno::INTR));
        is_quiet && drive(&mut self.driver, async { self.sender.ready().await.is_ok() }).await
    }

    /// Sends a request and reads the whole response. Dropping the future half way drops the connection as well.
    async fn send_request(&mut self, request: Request<FullBody>) -> Result<HttpResponse, ExchangeFailure> {
        let exchange = async {
            match self.sender.try_send_request(request).await {
                Ok(response) => {
                    let broken = |error: hyper::Error| TransportError::Broken(error.into());
                    read_response(response, broken).await.map_err(ExchangeFailure::Sent)
                }
                Err(mut failed) => Err(match failed.take_message() {
                    Some(unsent) => ExchangeFailure::Unsent(Box::new(unsent), failed.into_error()),
                    None => ExchangeFailure::Sent(TransportError::Broken(failed.into_error().into())),
                }),
            }
        };
        drive(&mut self.driver, exchange).await
    }
}

/// Polls the connection together with the exchange, which progresses only while the connection does.
async fn drive<T>(driver: &mut ConnectionDriver, exchange: impl Future<Output = T>) -> T {
    let mut exchange = pin!(exchange);
    poll_fn(|cx| {
        // The first poll sends at once what the exchange wants to send; the second one sees what has arrived.
        if let Poll::Ready(done) = exchange.as_mut().poll(cx) {
            return Poll::Ready(done);
        }
        // The waiting exchange receives the reason for the end of the connection.
        let _ = driver.poll_unpin(cx);
        exchange.as_mut().poll(cx)
    })
    .await
}

/// Returns the instant after a duration, or in a year if the clock cannot represent it.
fn deadline_after(time: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 86_400);
    let now = Instant::now();
    now.checked_add(time).unwrap_or(now + YEAR)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::task::{Context, Waker};

    use http::Method;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::sync::oneshot;

    use super::*;

    fn build_request(route: &str, query: &[(&'static str, &str)]) -> HttpRequest {
        HttpRequest {
            method: Method::GET,
            route: route.into(),
            query: query.iter().map(|(name, value)| (*name, (*value).into())).collect(),
            headers: HeaderMap::new(),
            body: None,
            timeout: Duration::from_secs(20),
        }
    }

    fn local_transport(address: &str) -> LocalTransport {
        LocalTransport::for_endpoint(&address.parse().unwrap(), HeaderMap::new(), Duration::from_secs(5)).unwrap()
    }

    #[test]
    fn only_local_unencrypted_endpoints_use_this_transport() {
        for (address, is_reached) in [
            ("http://127.0.0.1:8000", true),
            ("http://[::1]:8000/gpus/", true),
            ("http://localhost", true),
            ("unix:/run/gpupool/socket", true),
            ("https://127.0.0.1:8000", false),
            ("http://gpu7:8000", false),
        ] {
            let local_transport =
                LocalTransport::for_endpoint(&address.parse().unwrap(), HeaderMap::new(), Duration::ZERO);
            assert_eq!(local_transport.is_some(), is_reached, "{address}");
        }
    }

    #[test]
    fn routes_follow_the_path_of_the_address_and_are_escaped() {
        let local_transport = local_transport("http://[::1]:8000/gpus/");
        assert_eq!(local_transport.headers[HOST], "[::1]:8000");
        for (route, query, target) in [
            ("/v1/leases/7", &[][..], "/gpus/v1/leases/7"),
            ("/v1/tokens/a b?c", &[], "/gpus/v1/tokens/a%20b%3Fc"),
            ("/v1/pool", &[("owner", "a&b=ü"), ("limit", "3")], "/gpus/v1/pool?owner=a%26b%3D%C3%BC&limit=3"),
        ] {
            assert_eq!(local_transport.request_target(&build_request(route, query)).unwrap(), target);
        }
    }

    /// Serves a number of requests on one connection, then closes it.
    async fn serve_requests(listener: &TcpListener, count: usize) {
        let (mut stream, _) = listener.accept().await.unwrap();
        for _ in 0..count {
            serve_one(&mut stream).await;
        }
    }

    async fn serve_one(stream: &mut TcpStream) {
        let mut received = Vec::new();
        while !received.ends_with(b"\r\n\r\n") {
            assert_ne!(stream.read_buf(&mut received).await.unwrap(), 0, "the client closed it");
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
    }

    #[tokio::test]
    async fn a_connection_is_reused_until_it_is_closed_and_then_replaced() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let local_transport = local_transport(&format!("http://{}", listener.local_addr().unwrap()));
        let (closes, closed) = oneshot::channel();
        let requests = async {
            for timeout in [Duration::from_secs(20), Duration::MAX] {
                let exchange = local_transport.send_request(HttpRequest { timeout, ..build_request("/", &[]) }).await;
                assert_eq!(exchange.unwrap().body, "{}");
            }
            closed.await.unwrap();
            assert_eq!(local_transport.send_request(build_request("/", &[])).await.unwrap().status, 200);
        };
        let responses = async {
            serve_requests(&listener, 2).await;
            closes.send(()).unwrap();
            serve_requests(&listener, 1).await;
        };
        tokio::join!(requests, responses);
    }

    #[tokio::test]
    async fn a_request_is_sent_at_its_first_poll_and_can_move_to_another_task() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let local_transport = Arc::new(local_transport(&format!("http://{}", listener.local_addr().unwrap())));
        let accepted = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            serve_one(&mut stream).await;
            stream
        };
        let (exchange, mut stream) = tokio::join!(local_transport.send_request(build_request("/", &[])), accepted);
        assert_eq!(exchange.unwrap().body, "{}");
        let sender = local_transport.clone();
        let mut exchange = Box::pin(async move { sender.send_request(build_request("/", &[])).await });
        assert!(exchange.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        serve_one(&mut stream).await;
        assert_eq!(tokio::spawn(exchange).await.unwrap().unwrap().body, "{}");
        assert_eq!(local_transport.idle.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn a_connection_closed_while_idle_is_not_reused() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let local_transport = local_transport(&format!("http://{}", listener.local_addr().unwrap()));
        for _ in 0..2 {
            let (exchange, ()) =
                tokio::join!(local_transport.send_request(build_request("/", &[])), serve_requests(&listener, 1));
            assert_eq!(exchange.unwrap().status, 200, "over a new connection each time");
        }
    }

    #[tokio::test]
    async fn an_error_tells_whether_the_request_can_have_arrived() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let local_transport = local_transport(&format!("http://{}", listener.local_addr().unwrap()));
        let hung_up = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.read_exact(&mut [0; 1]).await.unwrap();
        };
        let (exchange, ()) = tokio::join!(local_transport.send_request(build_request("/", &[])), hung_up);
        assert!(matches!(exchange, Err(TransportError::Broken(_))), "{exchange:?}");
        let exchange = local_transport
            .send_request(HttpRequest { timeout: Duration::from_millis(50), ..build_request("/", &[]) })
            .await;
        assert!(matches!(exchange, Err(TransportError::TimedOut)), "{exchange:?}");
        drop(listener);
        let exchange = local_transport.send_request(build_request("/", &[])).await;
        assert!(matches!(exchange, Err(TransportError::NotSent(_))), "{exchange:?}");
    }
}

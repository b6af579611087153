//! Plain HTTP to an agent on this machine, with nothing in between: no proxy, no encryption, no redirects. Such questions
//! are the most and the fastest answered, so what it costs to ask counts. Connections are kept open and used again; they have
//! no tasks of their own: the task or thread that asks over one also drives it.

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
use crate::limits::{IDLE_CONNECTIONS, IDLE_TIME};
use crate::transport::{ExchangeFuture, HttpRequest, HttpResponse, Transport, TransportError, read};

/// The way to one agent on this machine.
pub(crate) struct Wire {
    place: Place,
    /// Where it is, as an address; routes come after its path.
    base: Url,
    /// Sent with every question.
    headers: HeaderMap,
    connect: Duration,
    idle: Mutex<Vec<(Connection, Instant)>>,
}

enum Place {
    Tcp(String, u16),
    Unix(PathBuf),
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").field("base", &self.base.as_str()).finish_non_exhaustive()
    }
}

impl Transport for Wire {
    fn exchange(&self, question: HttpRequest) -> ExchangeFuture<'_> {
        Box::pin(self.ask(question))
    }
}

impl Wire {
    /// The way to an endpoint, where it is one on this machine and not encrypted.
    pub(crate) fn to(endpoint: &Endpoint, mut headers: HeaderMap, connect: Duration) -> Option<Self> {
        if !endpoint.is_local() || endpoint.is_encrypted() {
            return None;
        }
        let base: Url = endpoint.address("").parse().ok()?;
        let (host, port) = (base.host_str()?, base.port_or_known_default()?);
        let place = match endpoint.socket() {
            Some(path) => Place::Unix(path.to_owned()),
            None => Place::Tcp(host.trim_start_matches('[').trim_end_matches(']').to_owned(), port),
        };
        let named = base.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        headers.insert(HOST, HeaderValue::from_str(&named).ok()?);
        Some(Self { place, base, headers, connect, idle: Mutex::default() })
    }

    async fn ask(&self, question: HttpRequest) -> Result<HttpResponse, TransportError> {
        let until = in_time(question.timeout);
        let request = self.request(question)?;
        timeout_at(until, self.send(request, until)).await.unwrap_or(Err(TransportError::Late))
    }

    fn request(&self, question: HttpRequest) -> Result<Request<Body>, TransportError> {
        let mut request = Request::new(Full::new(question.body.clone().unwrap_or_default()));
        *request.uri_mut() = self.target(&question)?;
        *request.method_mut() = question.method;
        let headers = request.headers_mut();
        headers.clone_from(&self.headers);
        if question.body.is_some() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        headers.extend(question.headers);
        Ok(request)
    }

    /// The path and query of a question.
    fn target(&self, question: &HttpRequest) -> Result<Uri, TransportError> {
        let prefix = self.base.path().trim_end_matches('/');
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'/' | b'-' | b'_');
        let target = if question.query.is_empty() && question.route.bytes().all(is_plain) {
            format!("{prefix}{}", question.route)
        } else {
            let mut url = self.base.clone();
            url.set_path(&format!("{prefix}{}", question.route));
            if !question.query.is_empty() {
                url.query_pairs_mut().extend_pairs(&question.query);
            }
            url.query().map_or_else(|| url.path().to_owned(), |query| format!("{}?{query}", url.path()))
        };
        target.parse().map_err(|error: http::uri::InvalidUri| TransportError::NotSent(error.into()))
    }

    /// Asks over a connection that is open, or else over a new one.
    async fn send(&self, mut request: Request<Body>, until: Instant) -> Result<HttpResponse, TransportError> {
        loop {
            let (mut connection, is_new) = match self.open_one().await {
                Some(connection) => (connection, false),
                None => (self.connect(until).await?, true),
            };
            match connection.ask(request).await {
                Ok(answer) => {
                    self.put_back(connection);
                    return Ok(answer);
                }
                // It was closed while it lay idle, and nothing went out.
                Err(Failed::Unsent(unsent, _)) if !is_new => request = *unsent,
                Err(Failed::Unsent(_, error)) => return Err(TransportError::NotSent(error.into())),
                Err(Failed::Sent(fault)) => return Err(fault),
            }
        }
    }

    async fn connect(&self, until: Instant) -> Result<Connection, TransportError> {
        let connect = async {
            let stream: Box<dyn Stream> = match &self.place {
                Place::Tcp(host, port) => {
                    let stream = TcpStream::connect((host.as_str(), *port)).await?;
                    stream.set_nodelay(true)?;
                    Box::new(stream)
                }
                Place::Unix(path) => Box::new(UnixStream::connect(path).await?),
            };
            let socket = stream.as_fd().try_clone_to_owned()?;
            let (sender, speech) = handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
            io::Result::Ok(Connection { sender, speech: speech.fuse(), socket })
        };
        let until = until.min(in_time(self.connect));
        let connected = timeout_at(until, connect).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        connected.map_err(|error| TransportError::NotSent(error.into()))
    }

    /// A connection that is open and free, as far as is known.
    async fn open_one(&self) -> Option<Connection> {
        loop {
            let (mut connection, since) = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
            if since.elapsed() < IDLE_TIME && connection.is_open().await {
                return Some(connection);
            }
        }
    }

    fn put_back(&self, connection: Connection) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_CONNECTIONS {
            idle.push((connection, Instant::now()));
        }
    }
}

type Body = Full<Bytes>;
type Speech = Fuse<http1::Connection<TokioIo<Box<dyn Stream>>, Body>>;

trait Stream: AsyncRead + AsyncWrite + AsFd + Send + Unpin {}

impl Stream for TcpStream {}
impl Stream for UnixStream {}

/// A connection on which nothing is under way.
struct Connection {
    sender: SendRequest<Body>,
    /// Writes questions and reads answers, only while it is polled; dropped when it is over, which tells those who wait.
    speech: Speech,
    /// Another descriptor of its socket, to look whether the other side has closed it.
    socket: OwnedFd,
}

/// Why there is no answer.
enum Failed {
    /// Nothing went out, and this can be sent again.
    Unsent(Box<Request<Body>>, hyper::Error),
    Sent(TransportError),
}

impl Connection {
    /// Whether it can be asked over: nothing came that was not asked for, the end least of all.
    async fn is_open(&mut self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let is_quiet = matches!(recv(&self.socket, &mut [0_u8; 1], flags), Err(Errno::WOULDBLOCK | Errno::INTR));
        is_quiet && driven(&mut self.speech, async { self.sender.ready().await.is_ok() }).await
    }

    /// Asks, and reads the whole answer. Dropped half way, it drops the connection as well.
    async fn ask(&mut self, request: Request<Body>) -> Result<HttpResponse, Failed> {
        let asked = async {
            match self.sender.try_send_request(request).await {
                Ok(response) => {
                    let broken = |error: hyper::Error| TransportError::Broken(error.into());
                    read(response, broken).await.map_err(Failed::Sent)
                }
                Err(mut failed) => Err(match failed.take_message() {
                    Some(unsent) => Failed::Unsent(Box::new(unsent), failed.into_error()),
                    None => Failed::Sent(TransportError::Broken(failed.into_error().into())),
                }),
            }
        };
        driven(&mut self.speech, asked).await
    }
}

/// Polls both: what is asked for moves only while the connection does.
async fn driven<T>(speech: &mut Speech, asked: impl Future<Output = T>) -> T {
    let mut asked = pin!(asked);
    poll_fn(|cx| {
        // Asked first, what it wants to send goes out at once; asked again, it has what came.
        if let Poll::Ready(done) = asked.as_mut().poll(cx) {
            return Poll::Ready(done);
        }
        // How it ended is told to the question that waits for an answer.
        let _ = speech.poll_unpin(cx);
        asked.as_mut().poll(cx)
    })
    .await
}

/// After so long, or in a year where that is later than clocks can tell.
fn in_time(time: Duration) -> Instant {
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

    fn question(route: &str, query: &[(&'static str, &str)]) -> HttpRequest {
        HttpRequest {
            method: Method::GET,
            route: route.into(),
            query: query.iter().map(|(name, value)| (*name, (*value).into())).collect(),
            headers: HeaderMap::new(),
            body: None,
            timeout: Duration::from_secs(20),
        }
    }

    fn wire(address: &str) -> Wire {
        Wire::to(&address.parse().unwrap(), HeaderMap::new(), Duration::from_secs(5)).unwrap()
    }

    #[test]
    fn only_what_is_on_this_machine_and_not_encrypted_is_reached_so() {
        for (address, is_reached) in [
            ("http://127.0.0.1:8000", true),
            ("http://[::1]:8000/gpus/", true),
            ("http://localhost", true),
            ("unix:/run/gpupool/socket", true),
            ("https://127.0.0.1:8000", false),
            ("http://gpu7:8000", false),
        ] {
            let wire = Wire::to(&address.parse().unwrap(), HeaderMap::new(), Duration::ZERO);
            assert_eq!(wire.is_some(), is_reached, "{address}");
        }
    }

    #[test]
    fn routes_come_after_the_path_of_the_address_and_odd_letters_are_escaped() {
        let wire = wire("http://[::1]:8000/gpus/");
        assert_eq!(wire.headers[HOST], "[::1]:8000");
        for (route, query, target) in [
            ("/v1/leases/7", &[][..], "/gpus/v1/leases/7"),
            ("/v1/tokens/a b?c", &[], "/gpus/v1/tokens/a%20b%3Fc"),
            ("/v1/pool", &[("owner", "a&b=ü"), ("limit", "3")], "/gpus/v1/pool?owner=a%26b%3D%C3%BC&limit=3"),
        ] {
            assert_eq!(wire.target(&question(route, query)).unwrap(), target);
        }
    }

    /// Answers so many questions on one connection, then closes it.
    async fn answer(listener: &TcpListener, questions: usize) {
        let (mut stream, _) = listener.accept().await.unwrap();
        for _ in 0..questions {
            answer_one(&mut stream).await;
        }
    }

    async fn answer_one(stream: &mut TcpStream) {
        let mut heard = Vec::new();
        while !heard.ends_with(b"\r\n\r\n") {
            assert_ne!(stream.read_buf(&mut heard).await.unwrap(), 0, "the client closed it");
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
    }

    #[tokio::test]
    async fn a_connection_is_used_again_until_it_is_closed_and_then_another_is_made() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let wire = wire(&format!("http://{}", listener.local_addr().unwrap()));
        let (closes, closed) = oneshot::channel();
        let asks = async {
            for timeout in [Duration::from_secs(20), Duration::MAX] {
                let asked = wire.ask(HttpRequest { timeout, ..question("/", &[]) }).await;
                assert_eq!(asked.unwrap().body, "{}");
            }
            closed.await.unwrap();
            assert_eq!(wire.ask(question("/", &[])).await.unwrap().status, 200);
        };
        let answers = async {
            answer(&listener, 2).await;
            closes.send(()).unwrap();
            answer(&listener, 1).await;
        };
        tokio::join!(asks, answers);
    }

    #[tokio::test]
    async fn a_question_goes_out_when_it_is_first_polled_and_another_task_can_go_on_with_it() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let wire = Arc::new(wire(&format!("http://{}", listener.local_addr().unwrap())));
        let accepted = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            answer_one(&mut stream).await;
            stream
        };
        let (asked, mut stream) = tokio::join!(wire.ask(question("/", &[])), accepted);
        assert_eq!(asked.unwrap().body, "{}");
        let asker = wire.clone();
        let mut asked = Box::pin(async move { asker.ask(question("/", &[])).await });
        assert!(asked.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        answer_one(&mut stream).await;
        assert_eq!(tokio::spawn(asked).await.unwrap().unwrap().body, "{}");
        assert_eq!(wire.idle.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn a_connection_that_was_closed_while_nobody_watched_is_not_asked_over() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let wire = wire(&format!("http://{}", listener.local_addr().unwrap()));
        for _ in 0..2 {
            let (asked, ()) = tokio::join!(wire.ask(question("/", &[])), answer(&listener, 1));
            assert_eq!(asked.unwrap().status, 200, "over a new connection each time");
        }
    }

    #[tokio::test]
    async fn a_fault_says_whether_the_question_can_have_arrived() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let wire = wire(&format!("http://{}", listener.local_addr().unwrap()));
        let hung_up = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.read_exact(&mut [0; 1]).await.unwrap();
        };
        let (asked, ()) = tokio::join!(wire.ask(question("/", &[])), hung_up);
        assert!(matches!(asked, Err(TransportError::Broken(_))), "{asked:?}");
        let asked = wire.ask(HttpRequest { timeout: Duration::from_millis(50), ..question("/", &[]) }).await;
        assert!(matches!(asked, Err(TransportError::Late)), "{asked:?}");
        drop(listener);
        let asked = wire.ask(question("/", &[])).await;
        assert!(matches!(asked, Err(TransportError::NotSent(_))), "{asked:?}");
    }
}

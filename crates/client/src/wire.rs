//! Plain HTTP to an agent on this machine, with nothing in between: no proxy, no encryption, no redirects. Such questions
//! are the most and the fastest answered, so what it costs to ask counts. Connections are kept open and used again.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_TYPE, HOST, HeaderMap, HeaderValue};
use http::{Request, Response, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use reqwest::Url;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, timeout_at};

use crate::Endpoint;
use crate::limits::{ANSWER_BYTES, IDLE_CONNECTIONS, IDLE_TIME};
use crate::transport::{Answer, Exchanged, Fault, Question, Transport};

type Sender = SendRequest<Full<Bytes>>;

/// The way to one agent on this machine.
pub(crate) struct Wire {
    place: Place,
    /// Where it is, as an address; routes come after its path.
    base: Url,
    /// Sent with every question.
    headers: HeaderMap,
    connect: Duration,
    idle: Mutex<Vec<(Sender, Instant)>>,
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

impl Wire {
    /// The way to an endpoint, where it is one on this machine and not encrypted.
    pub fn to(endpoint: &Endpoint, mut headers: HeaderMap, connect: Duration) -> Option<Self> {
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

    async fn ask(&self, question: Question) -> Result<Answer, Fault> {
        let until = in_time(question.timeout);
        let request = self.request(question)?;
        let asked = async {
            let (sender, response) = self.send(request, until).await?;
            let answer = read(response).await?;
            self.put_back(sender);
            Ok(answer)
        };
        timeout_at(until, asked).await.unwrap_or(Err(Fault::Late))
    }

    fn request(&self, question: Question) -> Result<Request<Full<Bytes>>, Fault> {
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
    fn target(&self, question: &Question) -> Result<Uri, Fault> {
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
        target.parse().map_err(|error: http::uri::InvalidUri| Fault::NotSent(error.into()))
    }

    /// Sends over a connection that is open, or else over a new one.
    async fn send(
        &self,
        mut request: Request<Full<Bytes>>,
        until: Instant,
    ) -> Result<(Sender, Response<Incoming>), Fault> {
        loop {
            let (mut sender, is_new) = match self.open_one().await {
                Some(sender) => (sender, false),
                None => (self.connect(until).await?, true),
            };
            match sender.try_send_request(request).await {
                Ok(response) => return Ok((sender, response)),
                Err(mut failed) => match failed.take_message() {
                    // It was closed while it lay idle, and nothing went out.
                    Some(unsent) if !is_new => request = unsent,
                    Some(_) => return Err(Fault::NotSent(failed.into_error().into())),
                    None => return Err(Fault::Broken(failed.into_error().into())),
                },
            }
        }
    }

    async fn connect(&self, until: Instant) -> Result<Sender, Fault> {
        let connect = async {
            match &self.place {
                Place::Tcp(host, port) => {
                    let stream = TcpStream::connect((host.as_str(), *port)).await?;
                    stream.set_nodelay(true)?;
                    speak(stream).await
                }
                Place::Unix(path) => speak(UnixStream::connect(path).await?).await,
            }
        };
        let until = until.min(in_time(self.connect));
        let connected = timeout_at(until, connect).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        connected.map_err(|error| Fault::NotSent(error.into()))
    }

    /// A connection that is open and free, as far as is known.
    async fn open_one(&self) -> Option<Sender> {
        loop {
            let (mut sender, since) = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
            if since.elapsed() < IDLE_TIME && sender.ready().await.is_ok() {
                return Some(sender);
            }
        }
    }

    fn put_back(&self, sender: Sender) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if !sender.is_closed() && idle.len() < IDLE_CONNECTIONS {
            idle.push((sender, Instant::now()));
        }
    }
}

impl Transport for Wire {
    fn exchange(&self, question: Question) -> Exchanged<'_> {
        Box::pin(self.ask(question))
    }
}

/// After so long, or in a year where that is later than clocks can tell.
fn in_time(time: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 86_400);
    let now = Instant::now();
    now.checked_add(time).unwrap_or(now + YEAR)
}

/// Speaks HTTP over a stream, in a task of its own, until whoever sends over it is gone.
async fn speak(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> io::Result<Sender> {
    let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    // How it ended is told to whoever waits for an answer.
    tokio::spawn(async move { drop(connection.await) });
    Ok(sender)
}

async fn read(response: Response<Incoming>) -> Result<Answer, Fault> {
    let (head, mut incoming) = response.into_parts();
    let mut body = BytesMut::new();
    while let Some(frame) = incoming.frame().await {
        let Ok(chunk) = frame.map_err(|error| Fault::Broken(error.into()))?.into_data() else { continue };
        if body.len() + chunk.len() > ANSWER_BYTES {
            return Err(Fault::TooLarge(head.status));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Answer { status: head.status, headers: head.headers, body: body.freeze() })
}

#[cfg(test)]
mod tests {
    use http::Method;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    fn question(route: &str, query: &[(&'static str, &str)]) -> Question {
        Question {
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
        let mut heard = Vec::new();
        for _ in 0..questions {
            while !heard.ends_with(b"\r\n\r\n") {
                assert_ne!(stream.read_buf(&mut heard).await.unwrap(), 0, "the client closed it");
            }
            heard.clear();
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_connection_is_used_again_until_it_is_closed_and_then_another_is_made() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let wire = wire(&format!("http://{}", listener.local_addr().unwrap()));
        let asks = async {
            for timeout in [Duration::from_secs(20), Duration::MAX] {
                let asked = wire.ask(Question { timeout, ..question("/", &[]) }).await;
                assert_eq!(asked.unwrap().body, "{}");
            }
            while wire.idle.lock().unwrap().iter().any(|(sender, _)| !sender.is_closed()) {
                tokio::task::yield_now().await;
            }
            assert_eq!(wire.ask(question("/", &[])).await.unwrap().status, 200);
        };
        let answers = async {
            answer(&listener, 2).await;
            answer(&listener, 1).await;
        };
        tokio::join!(asks, answers);
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
        assert!(matches!(asked, Err(Fault::Broken(_))), "{asked:?}");
        let asked = wire.ask(Question { timeout: Duration::from_millis(50), ..question("/", &[]) }).await;
        assert!(matches!(asked, Err(Fault::Late)), "{asked:?}");
        drop(listener);
        let asked = wire.ask(question("/", &[])).await;
        assert!(matches!(asked, Err(Fault::NotSent(_))), "{asked:?}");
    }
}

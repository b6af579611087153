//! Plain HTTP to an agent on this machine, with nothing in between: no proxy, no encryption, no redirects. Such questions
//! are the most and the fastest answered, so what it costs to ask counts. Connections are kept open and used again; they have
//! no tasks of their own: whoever asks over one also drives it.

mod connection;
mod stream;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, HeaderMap, HeaderValue};
use http::{Request, Uri};
use http_body_util::Full;
use reqwest::Url;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, timeout_at};

use crate::Endpoint;
use crate::limits::{IDLE_CONNECTIONS, IDLE_TIME};
use crate::transport::{Answer, Exchanged, Fault, Question, Transport};

use connection::{Connection, Failed};
use stream::Stream;

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
        timeout_at(until, self.send(request, until)).await.unwrap_or(Err(Fault::Late))
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

    /// Asks over a connection that is open, or else over a new one.
    async fn send(&self, mut request: Request<Full<Bytes>>, until: Instant) -> Result<Answer, Fault> {
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
                Err(Failed::Unsent(_, error)) => return Err(Fault::NotSent(error.into())),
                Err(Failed::Sent(fault)) => return Err(fault),
            }
        }
    }

    async fn connect(&self, until: Instant) -> Result<Connection, Fault> {
        let connect = async {
            let stream = match &self.place {
                Place::Tcp(host, port) => Stream::tcp(TcpStream::connect((host.as_str(), *port)).await?),
                Place::Unix(path) => Stream::unix(UnixStream::connect(path).await?),
            };
            Connection::over(stream?).await
        };
        let until = until.min(in_time(self.connect));
        let connected = timeout_at(until, connect).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        connected.map_err(|error| Fault::NotSent(error.into()))
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

#[cfg(test)]
mod tests;

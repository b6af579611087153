//! A server that answers as a test wants it to, bytes and all: on a real socket, over real connections.

#![allow(dead_code, reason = "each story uses its part")]

use std::sync::Arc;
use std::time::Duration;

use gpupool_api::lease::{LeaseBody, LeaseState};
use gpupool_client::{AgentClient, Endpoint};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// No story takes this long; one that does has failed.
const DEADLINE: Duration = Duration::from_secs(60);

/// A question as it arrived.
#[derive(Debug, Clone, Default)]
pub struct Asked {
    /// Method and route, as in `GET /v1/pool`.
    pub what: String,
    pub head: String,
    pub body: String,
}

impl Asked {
    pub fn header(&self, name: &str) -> Option<&str> {
        let line = self.head.lines().find(|line| line.to_ascii_lowercase().starts_with(&format!("{name}:")))?;
        line.split_once(':').map(|(_, value)| value.trim())
    }
}

/// What to do about it.
pub enum Reply {
    /// These bytes, and on to the next question.
    Send(String),
    /// These bytes, then the connection is closed.
    ThenClose(String),
    /// These bytes, then nothing until the client hangs up.
    ThenSilence(String),
    /// The first bytes, then the others again and again until the client hangs up.
    Endlessly(String, String),
}

type Answer = Arc<dyn Fn(usize, &Asked) -> Reply + Send + Sync>;

pub struct Server {
    pub endpoint: Endpoint,
    client: AgentClient,
    seen: watch::Receiver<Vec<Asked>>,
    hung_up: tokio::sync::Mutex<mpsc::UnboundedReceiver<String>>,
    task: JoinHandle<()>,
}

impl Server {
    /// A server on a free port; `answer` is given the number of the question, from 0, and the question.
    pub async fn start(answer: impl Fn(usize, &Asked) -> Reply + Send + Sync + 'static) -> Self {
        let listener = Arc::new(TcpListener::bind("127.0.0.1:0").await.unwrap());
        let endpoint = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let accept = move || {
            let listener = listener.clone();
            async move { listener.accept().await.unwrap().0 }
        };
        Self::serve(endpoint, Arc::new(answer), accept)
    }

    /// The same on a Unix socket.
    pub async fn start_unix(
        path: &std::path::Path,
        answer: impl Fn(usize, &Asked) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = Arc::new(UnixListener::bind(path).unwrap());
        let accept = move || {
            let listener = listener.clone();
            async move { listener.accept().await.unwrap().0 }
        };
        Self::serve(Endpoint::unix(path).unwrap(), Arc::new(answer), accept)
    }

    /// The same over TLS, as localhost, with a certificate that only the returned PEM vouches for.
    pub async fn start_tls(answer: impl Fn(usize, &Asked) -> Reply + Send + Sync + 'static) -> (Self, String) {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let key = made.signing_key.serialize_der().try_into().unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config =
            rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let config = config.with_no_client_auth().with_single_cert(vec![made.cert.der().clone()], key).unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let listener = Arc::new(TcpListener::bind("127.0.0.1:0").await.unwrap());
        let endpoint = format!("https://localhost:{}", listener.local_addr().unwrap().port()).parse().unwrap();
        let accept = move || {
            let (listener, acceptor) = (listener.clone(), acceptor.clone());
            async move {
                loop {
                    let stream = listener.accept().await.unwrap().0;
                    if let Ok(stream) = acceptor.accept(stream).await {
                        return stream;
                    }
                }
            }
        };
        (Self::serve(endpoint, Arc::new(answer), accept), made.cert.pem())
    }

    fn serve<S, F>(endpoint: Endpoint, answer: Answer, accept: impl Fn() -> F + Send + 'static) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        F: Future<Output = S> + Send,
    {
        let (seen_here, seen) = watch::channel(Vec::new());
        let (tell, hung_up) = mpsc::unbounded_channel();
        let seen_here = Arc::new(seen_here);
        let task = tokio::spawn(async move {
            loop {
                let stream = accept().await;
                tokio::spawn(talk(stream, answer.clone(), seen_here.clone(), tell.clone()));
            }
        });
        let client = AgentClient::new(endpoint.clone()).unwrap();
        Self { endpoint, client, seen, hung_up: tokio::sync::Mutex::new(hung_up), task }
    }

    pub fn client(&self) -> &AgentClient {
        &self.client
    }

    /// What was asked so far.
    pub fn seen(&self) -> Vec<Asked> {
        self.seen.borrow().clone()
    }

    /// Waits until a question that starts so was asked so many times.
    pub async fn asked(&self, what: &str, times: usize) {
        let mut seen = self.seen.clone();
        let enough = |seen: &Vec<Asked>| seen.iter().filter(|asked| asked.what.starts_with(what)).count() >= times;
        in_time(&format!("{what} to be asked {times} times"), seen.wait_for(enough)).await.unwrap();
    }

    /// Waits until a client hung up on a silent answer, and says on which.
    pub async fn hung_up(&self) -> String {
        let mut hung_up = self.hung_up.lock().await;
        in_time("a client to hang up", hung_up.recv()).await.unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn talk<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    answer: Answer,
    seen: Arc<watch::Sender<Vec<Asked>>>,
    hung_up: mpsc::UnboundedSender<String>,
) {
    while let Some(asked) = read(&mut stream).await {
        let mut number = 0;
        seen.send_modify(|seen| {
            number = seen.len();
            seen.push(asked.clone());
        });
        match answer(number, &asked) {
            Reply::Send(bytes) => stream.write_all(bytes.as_bytes()).await.unwrap_or(()),
            Reply::ThenClose(bytes) => {
                let _ = stream.write_all(bytes.as_bytes()).await;
                return;
            }
            Reply::ThenSilence(bytes) => {
                let _ = stream.write_all(bytes.as_bytes()).await;
                let _ = stream.read(&mut [0; 64]).await;
                let _ = hung_up.send(asked.what);
                return;
            }
            Reply::Endlessly(first, bytes) => {
                let _ = stream.write_all(first.as_bytes()).await;
                while stream.write_all(bytes.as_bytes()).await.is_ok() {}
                return;
            }
        }
    }
}

async fn read<S: AsyncRead + Unpin>(stream: &mut S) -> Option<Asked> {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        bytes.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(bytes).ok()?;
    let what = head.lines().next()?.rsplit_once(' ')?.0.to_owned();
    let mut asked = Asked { what, head, body: String::new() };
    let length = asked.header("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.ok()?;
    asked.body = String::from_utf8(body).ok()?;
    Some(asked)
}

/// An answer with a body.
pub fn answer(status: &str, kind: &str, more_headers: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n{more_headers}\r\n{body}")
}

pub fn json(status: &str, body: &impl serde::Serialize) -> Reply {
    Reply::Send(answer(status, "application/json", "", &serde_json::to_string(body).unwrap()))
}

pub fn problem_with(status: u16, code: &str, more_headers: &str) -> Reply {
    let body = serde_json::json!({
        "type": "about:blank", "title": "x", "status": status, "code": code, "detail": format!("it is {code}"),
    });
    Reply::Send(answer(&format!("{status} X"), "application/problem+json", more_headers, &body.to_string()))
}

pub fn problem(status: u16, code: &str) -> Reply {
    problem_with(status, code, "")
}

/// A stream of chunks that goes on.
pub fn stream(kind: &str, chunks: &[&str]) -> String {
    let mut text = format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n");
    for chunk in chunks {
        text.push_str(&format!("{:x}\r\n{chunk}\r\n", chunk.len()));
    }
    text
}

pub fn lease(id: u64, state: LeaseState) -> LeaseBody {
    LeaseBody {
        id,
        state,
        owner: "alice".into(),
        worker_id: None,
        request: Default::default(),
        devices: Vec::new(),
        env: Default::default(),
        token: Some(40 + id).filter(|_| matches!(state, LeaseState::Active | LeaseState::Offered)),
        queue_position: Some(1).filter(|_| state == LeaseState::Queued),
        reason: Some("because".into()).filter(|_| state != LeaseState::Active),
        cause: Some("ttl_passed".into()).filter(|_| state.is_ended()),
        created_at: "2026-01-31T08:00:00Z".into(),
        granted_at: None,
        expires_at: None,
        revoke_at: None,
        ended_at: None,
        ttl_secs: 1.0,
        priority: 0,
        holder: None,
        draining: false,
        labels: Default::default(),
    }
}

/// Waits, and fails with what it waited for.
pub async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future).await.unwrap_or_else(|_| panic!("waited {DEADLINE:?} for {what}"))
}

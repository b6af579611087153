//! A server with scripted raw responses, on a real socket and over real connections.

#![allow(dead_code, reason = "each story uses its part")]

use std::sync::Arc;
use std::time::Duration;

use gpupool_api::lease::{LeaseBody, LeaseState};
use gpupool_client::{AgentClient, Endpoint};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// Time limit of every wait in a test.
const DEADLINE: Duration = Duration::from_secs(60);

/// A request as received.
#[derive(Debug, Clone, Default)]
pub struct ReceivedRequest {
    /// Method and target, as in `GET /v1/pool`.
    pub target: String,
    pub head: String,
    pub body: String,
}

impl ReceivedRequest {
    pub fn header(&self, name: &str) -> Option<&str> {
        let line = self.head.lines().find(|line| line.to_ascii_lowercase().starts_with(&format!("{name}:")))?;
        line.split_once(':').map(|(_, value)| value.trim())
    }
}

/// Reaction to a request.
pub enum ScriptedReply {
    /// Sends these bytes and reads the next request.
    Send(String),
    /// Sends these bytes and closes the connection.
    ThenClose(String),
    /// Sends these bytes, then waits until the client closes the connection.
    ThenSilence(String),
    /// Sends the first bytes, then repeats the others until the client closes the connection.
    Endlessly(String, String),
}

type ReplyScript = Arc<dyn Fn(usize, &ReceivedRequest) -> ScriptedReply + Send + Sync>;

pub struct ScriptedServer {
    pub endpoint: Endpoint,
    client: AgentClient,
    received: watch::Receiver<Vec<ReceivedRequest>>,
    hangups: tokio::sync::Mutex<mpsc::UnboundedReceiver<String>>,
    task: JoinHandle<()>,
}

impl ScriptedServer {
    /// Starts a server on a free port; `script` gets the number of the request, from 0, and the request.
    pub async fn start(script: impl Fn(usize, &ReceivedRequest) -> ScriptedReply + Send + Sync + 'static) -> Self {
        let listener = Arc::new(TcpListener::bind("127.0.0.1:0").await.unwrap());
        let endpoint = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let accept = move || {
            let listener = listener.clone();
            async move { listener.accept().await.unwrap().0 }
        };
        Self::serve(endpoint, Arc::new(script), accept)
    }

    /// Same on a Unix socket.
    pub async fn start_unix(
        path: &std::path::Path,
        script: impl Fn(usize, &ReceivedRequest) -> ScriptedReply + Send + Sync + 'static,
    ) -> Self {
        let listener = Arc::new(UnixListener::bind(path).unwrap());
        let accept = move || {
            let listener = listener.clone();
            async move { listener.accept().await.unwrap().0 }
        };
        Self::serve(Endpoint::unix(path).unwrap(), Arc::new(script), accept)
    }

    /// Same over TLS, as localhost, with a certificate that only the returned PEM vouches for.
    pub async fn start_tls(
        script: impl Fn(usize, &ReceivedRequest) -> ScriptedReply + Send + Sync + 'static,
    ) -> (Self, String) {
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
        (Self::serve(endpoint, Arc::new(script), accept), made.cert.pem())
    }

    fn serve<S, F>(endpoint: Endpoint, script: ReplyScript, accept: impl Fn() -> F + Send + 'static) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        F: Future<Output = S> + Send,
    {
        let (received_sender, received) = watch::channel(Vec::new());
        let (hangup_sender, hangups) = mpsc::unbounded_channel();
        let received_sender = Arc::new(received_sender);
        let task = tokio::spawn(async move {
            loop {
                let stream = accept().await;
                tokio::spawn(serve_connection(stream, script.clone(), received_sender.clone(), hangup_sender.clone()));
            }
        });
        let client = AgentClient::new(endpoint.clone()).unwrap();
        Self { endpoint, client, received, hangups: tokio::sync::Mutex::new(hangups), task }
    }

    pub fn client(&self) -> &AgentClient {
        &self.client
    }

    /// Requests received so far.
    pub fn received(&self) -> Vec<ReceivedRequest> {
        self.received.borrow().clone()
    }

    /// Waits for a number of requests whose target starts with a text.
    pub async fn wait_for_request(&self, target: &str, times: usize) {
        let mut received = self.received.clone();
        let enough = |received: &Vec<ReceivedRequest>| {
            received.iter().filter(|request| request.target.starts_with(target)).count() >= times
        };
        within_deadline(&format!("{target} to be asked {times} times"), received.wait_for(enough)).await.unwrap();
    }

    /// Waits until a client closes a silent connection and returns the target of its request.
    pub async fn wait_for_hangup(&self) -> String {
        let mut hangups = self.hangups.lock().await;
        within_deadline("a client to hang up", hangups.recv()).await.unwrap()
    }
}

impl Drop for ScriptedServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve_connection<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    script: ReplyScript,
    received: Arc<watch::Sender<Vec<ReceivedRequest>>>,
    hangups: mpsc::UnboundedSender<String>,
) {
    while let Some(request) = read_request(&mut stream).await {
        let mut number = 0;
        received.send_modify(|received| {
            number = received.len();
            received.push(request.clone());
        });
        match script(number, &request) {
            ScriptedReply::Send(bytes) => stream.write_all(bytes.as_bytes()).await.unwrap_or(()),
            ScriptedReply::ThenClose(bytes) => {
                let _ = stream.write_all(bytes.as_bytes()).await;
                return;
            }
            ScriptedReply::ThenSilence(bytes) => {
                let _ = stream.write_all(bytes.as_bytes()).await;
                let _ = stream.read(&mut [0; 64]).await;
                let _ = hangups.send(request.target);
                return;
            }
            ScriptedReply::Endlessly(first, bytes) => {
                let _ = stream.write_all(first.as_bytes()).await;
                while stream.write_all(bytes.as_bytes()).await.is_ok() {}
                return;
            }
        }
    }
}

async fn read_request<S: AsyncRead + Unpin>(stream: &mut S) -> Option<ReceivedRequest> {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        bytes.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(bytes).ok()?;
    let target = head.lines().next()?.rsplit_once(' ')?.0.to_owned();
    let mut request = ReceivedRequest { target, head, body: String::new() };
    let length = request.header("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.ok()?;
    request.body = String::from_utf8(body).ok()?;
    Some(request)
}

/// A response with a body.
pub fn response(status: &str, kind: &str, more_headers: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n{more_headers}\r\n{body}")
}

pub fn json_reply(status: &str, body: &impl serde::Serialize) -> ScriptedReply {
    ScriptedReply::Send(response(status, "application/json", "", &serde_json::to_string(body).unwrap()))
}

pub fn problem_with_headers(status: u16, code: &str, more_headers: &str) -> ScriptedReply {
    let body = serde_json::json!({
        "type": "about:blank", "title": "x", "status": status, "code": code, "detail": format!("it is {code}"),
    });
    ScriptedReply::Send(response(&format!("{status} X"), "application/problem+json", more_headers, &body.to_string()))
}

pub fn problem_reply(status: u16, code: &str) -> ScriptedReply {
    problem_with_headers(status, code, "")
}

/// The beginning of a chunked response.
pub fn chunked_response(kind: &str, chunks: &[&str]) -> String {
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
        queue_priority: None,
        holder: None,
        draining: false,
        labels: Default::default(),
    }
}

/// Waits, and names the expected event if the time is up.
pub async fn within_deadline<T>(target: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future).await.unwrap_or_else(|_| panic!("waited {DEADLINE:?} for {target}"))
}

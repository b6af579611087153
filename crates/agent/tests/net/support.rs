//! Starts real listeners for a test and talks to them byte by byte.

#![allow(dead_code, reason = "each test file uses its part")]

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::{get, post};
use gpupool_agent::internals::net::{ListenSpec, NetLimits, NetListeners, Peer, ServeOutcome, Shutdown, TcpBind};
use http::Request;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Long enough for any machine; only a hang reaches it.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Fails with a sentence instead of hanging.
pub async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.unwrap_or_else(|_| panic!("waited {PATIENCE:?} in vain: {what}"))
}

/// A message of a handler to the test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandlerEvent {
    /// A request for `/wait` is being handled.
    Waiting,
    /// The request was cancelled or got its response.
    WaitEnded,
}

/// Listeners that are being served.
pub struct ServedListeners {
    pub addresses: Vec<SocketAddr>,
    pub shutdown: Shutdown,
    pub events: mpsc::UnboundedReceiver<HandlerEvent>,
    task: JoinHandle<ServeOutcome>,
}

pub fn localhost() -> TcpBind {
    TcpBind { host: "127.0.0.1".to_owned(), port: 0 }
}

/// Listens on loopback under these limits.
pub async fn serve_limited(limits: NetLimits) -> ServedListeners {
    serve(ListenSpec { tcp: vec![localhost()], limits, ..ListenSpec::default() }).await
}

/// Serves the routes of these tests.
pub async fn serve(bind: ListenSpec) -> ServedListeners {
    let net = NetListeners::bind(bind).await.unwrap();
    let addresses = net.addresses();
    let shutdown = Shutdown::new();
    let (sender, events) = mpsc::unbounded_channel();
    let task = tokio::spawn(net.serve(routes(sender, shutdown.clone()), shutdown.clone()));
    ServedListeners { addresses, shutdown, events, task }
}

impl ServedListeners {
    pub fn address(&self) -> SocketAddr {
        self.addresses[0]
    }

    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address()).await.unwrap()
    }

    pub async fn event(&mut self) -> HandlerEvent {
        soon("an event of a handler", self.events.recv()).await.unwrap()
    }

    /// Begins shutdown and waits for the end.
    pub async fn stop(self) -> ServeOutcome {
        self.shutdown.begin();
        soon("the listeners to end", self.task).await.unwrap()
    }
}

/// Sends a message when it is dropped.
struct EndNotifier(mpsc::UnboundedSender<HandlerEvent>);

impl Drop for EndNotifier {
    fn drop(&mut self) {
        let _ = self.0.send(HandlerEvent::WaitEnded);
    }
}

fn routes(sender: mpsc::UnboundedSender<HandlerEvent>, shutdown: Shutdown) -> Router {
    let wait = {
        let sender = sender.clone();
        move |until: Shutdown| {
            let _ = sender.send(HandlerEvent::Waiting);
            let ending = EndNotifier(sender.clone());
            async move {
                until.begun().await;
                drop(ending);
                "stopping"
            }
        }
    };
    let stubborn = wait.clone();
    Router::new()
        .route("/hello", get(|| async { "hello" }))
        .route("/echo", post(|body: String| async move { body }))
        .route("/panic", get(|| async { panicking() }))
        .route("/wait", get(move || wait(shutdown)))
        .route("/stubborn", get(move || stubborn(Shutdown::new())))
        .route("/who", get(who))
        .route("/endless", get(|| async { Body::from_stream(endless()) }))
}

fn panicking() -> &'static str {
    panic!("on purpose: the test requests it")
}

async fn who(request: Request<Body>) -> String {
    let peer = request.extensions().get::<Peer>().cloned().unwrap();
    let process = peer.process().map(|process| (process.pid, process.start_ticks));
    format!("uid {:?} credentials {:?} process {:?}", peer.uid(), peer.credentials(), process)
}

fn endless() -> impl futures_util::Stream<Item = Result<Vec<u8>, Infallible>> {
    futures_util::stream::repeat_with(|| Ok(vec![b'x'; 65_536]))
}

/// Sends these bytes and reads until the other side closes.
pub async fn exchange(mut stream: TcpStream, bytes: &[u8]) -> String {
    soon("the request to be sent", stream.write_all(bytes)).await.unwrap();
    read_to_end(&mut stream).await
}

/// Returns the bytes that arrive until the other side closes. A reset counts as a close.
pub async fn read_to_end(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut response = Vec::new();
    let _ = soon("the connection to be closed", stream.read_to_end(&mut response)).await;
    String::from_utf8(response).unwrap()
}

/// Reads until this text has arrived.
pub async fn read_until(stream: &mut (impl AsyncRead + Unpin), text: &str) -> String {
    let mut response = String::new();
    while !response.contains(text) {
        let mut bytes = [0; 4096];
        let length = soon(text, stream.read(&mut bytes)).await.unwrap();
        assert!(length > 0, "closed before {text:?} came; there was {response:?}");
        response.push_str(std::str::from_utf8(&bytes[..length]).unwrap());
    }
    response
}

pub fn get_request(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: test\r\n\r\n")
}

pub fn last_request(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n")
}

/// First line of a response without its protocol.
pub fn status(response: &str) -> &str {
    response.lines().next().and_then(|line| line.strip_prefix("HTTP/1.1 ")).unwrap_or(response)
}

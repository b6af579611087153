//! A network path to an agent with faults on demand, over real connections.
//!
//! A change of mode takes effect at once, also for open connections and pending responses. Ends with the proxy.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Behaviour of the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxyMode {
    /// Forwards everything.
    Good,
    /// Forwards everything with this delay for each piece.
    Slow(Duration),
    /// Discards everything.
    Silent,
    /// Resets every connection.
    Reset,
    /// Responds to everything with this status and nothing else.
    Status(u16),
    /// Responds to everything with bytes that are not HTTP.
    Garbage,
    /// Forwards requests and half of each response.
    HalfAnswers,
    /// Forwards statistics, and responds to `/v1` like a server without these routes.
    StatisticsOnly,
}

/// A path to one agent.
#[derive(Debug)]
pub struct FaultProxy {
    address: String,
    mode: watch::Sender<ProxyMode>,
    task: JoinHandle<()>,
}

impl FaultProxy {
    /// Starts a good path to `port` of this machine.
    pub async fn start(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = format!("http://{}", listener.local_addr().expect("the address of the listener"));
        let mode = watch::Sender::new(ProxyMode::Good);
        let current_mode = mode.subscribe();
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(forward_connection(client, port, current_mode.clone()));
            }
        });
        Self { address, mode, task }
    }

    /// Returns the address of the proxy.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Sets the mode from now on.
    pub fn set_mode(&self, mode: ProxyMode) {
        self.mode.send_replace(mode);
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn forward_connection(client: TcpStream, port: u16, mut mode: watch::Receiver<ProxyMode>) {
    let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else {
        reset_connection(client);
        return;
    };
    let began = *mode.borrow_and_update();
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let outcome = {
        let requests = forward_requests(&mut from_client, &mut to_server, mode.clone());
        let responses = forward_responses(&mut from_server, &mut to_client, mode.clone());
        let mode_change = async {
            // An open connection does not survive a change to `Reset`.
            let turned = mode.wait_for(|now| *now != began && matches!(now, ProxyMode::Reset)).await.is_ok();
            if !turned {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            reply = requests => reply,
            () = responses => None,
            () = mode_change => Some(ProxyReply::Break),
        }
    };
    match outcome {
        None => {}
        Some(ProxyReply::Response(bytes)) => {
            let _ = to_client.write_all(&bytes).await;
            // Read to the end: closing with unread bytes would reset the connection before the client reads the
            // response.
            let _ = tokio::time::timeout(Duration::from_secs(1), from_client.read(&mut [0; 1024])).await;
        }
        Some(ProxyReply::Nothing) => while matches!(from_client.read(&mut [0; 4096]).await, Ok(n) if n > 0) {},
        Some(ProxyReply::Break) => {
            if let Ok(client) = from_client.reunite(to_client) {
                reset_connection(client);
            }
        }
    }
}

/// Reply of the proxy in place of the server.
enum ProxyReply {
    Response(Vec<u8>),
    Nothing,
    Break,
}

async fn forward_requests(
    from: &mut OwnedReadHalf,
    to: &mut OwnedWriteHalf,
    mode: watch::Receiver<ProxyMode>,
) -> Option<ProxyReply> {
    let mut bytes = vec![0; 64 * 1024];
    loop {
        let read = from.read(&mut bytes).await.ok().filter(|read| *read > 0)?;
        let now = *mode.borrow();
        match now {
            ProxyMode::Good | ProxyMode::HalfAnswers => {}
            ProxyMode::Slow(by) => tokio::time::sleep(by).await,
            ProxyMode::Silent => return Some(ProxyReply::Nothing),
            ProxyMode::Reset => return Some(ProxyReply::Break),
            ProxyMode::Status(status) => return Some(ProxyReply::Response(http_response(status, ""))),
            ProxyMode::Garbage => return Some(ProxyReply::Response(b"\x16\x03\x01 is this yours?\r\n\r\n".to_vec())),
            ProxyMode::StatisticsOnly if bytes[..read].split(|byte| *byte == b' ').nth(1).is_some_and(is_v1) => {
                return Some(ProxyReply::Response(http_response(404, r#"{"detail":"Not Found"}"#)));
            }
            ProxyMode::StatisticsOnly => {}
        }
        to.write_all(&bytes[..read]).await.ok()?;
    }
}

async fn forward_responses(from: &mut OwnedReadHalf, to: &mut OwnedWriteHalf, mode: watch::Receiver<ProxyMode>) {
    let mut bytes = vec![0; 64 * 1024];
    loop {
        let Some(read) = from.read(&mut bytes).await.ok().filter(|read| *read > 0) else { return };
        let now = *mode.borrow();
        match now {
            ProxyMode::Slow(by) => tokio::time::sleep(by).await,
            ProxyMode::HalfAnswers => {
                let _ = to.write_all(&bytes[..read / 2]).await;
                return;
            }
            // Discarded; the client keeps waiting.
            ProxyMode::Silent => std::future::pending().await,
            _ => {}
        }
        if to.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
}

fn is_v1(route: &[u8]) -> bool {
    route.starts_with(b"/v1")
}

fn http_response(status: u16, body: &str) -> Vec<u8> {
    let length = body.len();
    let head = format!("HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n");
    format!("{head}connection: close\r\n\r\n{body}").into_bytes()
}

fn reset_connection(client: TcpStream) {
    // A connection closed without lingering is reset.
    let _ = client.set_zero_linger();
    drop(client);
}

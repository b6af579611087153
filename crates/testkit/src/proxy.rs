//! A network path to an agent that goes wrong on demand: real connections, real bytes, faults switched on and off.
//!
//! What is switched takes hold at once, also of connections that are open and of answers that are waited for. Ends with the
//! proxy.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What the path does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxyMode {
    /// Lets everything through.
    Good,
    /// Lets everything through, each piece so much later.
    Slow(Duration),
    /// Swallows everything.
    Silent,
    /// Breaks every connection.
    Reset,
    /// Answers everything with this status and no more.
    Status(u16),
    /// Answers everything with what is not HTTP.
    Garbage,
    /// Lets questions through, and half of each answer.
    HalfAnswers,
    /// Lets statistics through, and says of `/v1` what a server says that has no such routes.
    StatisticsOnly,
}

/// A path to one agent.
#[derive(Debug)]
pub struct FaultProxy {
    address: String,
    path: watch::Sender<ProxyMode>,
    task: JoinHandle<()>,
}

impl FaultProxy {
    /// A good path to `port` of this machine.
    pub async fn start(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = format!("http://{}", listener.local_addr().expect("a port that listens has an address"));
        let path = watch::Sender::new(ProxyMode::Good);
        let told = path.subscribe();
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, port, told.clone()));
            }
        });
        Self { address, path, task }
    }

    /// Where it listens.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Makes the path so, from now on.
    pub fn set_mode(&self, path: ProxyMode) {
        self.path.send_replace(path);
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(client: TcpStream, port: u16, mut path: watch::Receiver<ProxyMode>) {
    let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else {
        reset(client);
        return;
    };
    let began = *path.borrow_and_update();
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let is_over = {
        let there = questions(&mut from_client, &mut to_server, path.clone());
        let back = answers(&mut from_server, &mut to_client, path.clone());
        let turned = async {
            // An open connection does not survive a path that turns bad.
            let turned = path.wait_for(|now| *now != began && matches!(now, ProxyMode::Reset)).await.is_ok();
            if !turned {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            said = there => said,
            () = back => None,
            () = turned => Some(Said::Break),
        }
    };
    match is_over {
        None => {}
        Some(Said::Answer(bytes)) => {
            let _ = to_client.write_all(&bytes).await;
            // Read to the end: closing with bytes unread would break the connection before the answer is read.
            let _ = tokio::time::timeout(Duration::from_secs(1), from_client.read(&mut [0; 1024])).await;
        }
        Some(Said::Nothing) => while matches!(from_client.read(&mut [0; 4096]).await, Ok(n) if n > 0) {},
        Some(Said::Break) => {
            if let Ok(client) = from_client.reunite(to_client) {
                reset(client);
            }
        }
    }
}

/// What the path says in place of the server.
enum Said {
    Answer(Vec<u8>),
    Nothing,
    Break,
}

async fn questions(
    from: &mut OwnedReadHalf,
    to: &mut OwnedWriteHalf,
    path: watch::Receiver<ProxyMode>,
) -> Option<Said> {
    let mut bytes = vec![0; 64 * 1024];
    loop {
        let read = from.read(&mut bytes).await.ok().filter(|read| *read > 0)?;
        let now = *path.borrow();
        match now {
            ProxyMode::Good | ProxyMode::HalfAnswers => {}
            ProxyMode::Slow(by) => tokio::time::sleep(by).await,
            ProxyMode::Silent => return Some(Said::Nothing),
            ProxyMode::Reset => return Some(Said::Break),
            ProxyMode::Status(status) => return Some(Said::Answer(answer(status, ""))),
            ProxyMode::Garbage => return Some(Said::Answer(b"\x16\x03\x01 is this yours?\r\n\r\n".to_vec())),
            ProxyMode::StatisticsOnly if bytes[..read].split(|byte| *byte == b' ').nth(1).is_some_and(is_v1) => {
                return Some(Said::Answer(answer(404, r#"{"detail":"Not Found"}"#)));
            }
            ProxyMode::StatisticsOnly => {}
        }
        to.write_all(&bytes[..read]).await.ok()?;
    }
}

async fn answers(from: &mut OwnedReadHalf, to: &mut OwnedWriteHalf, path: watch::Receiver<ProxyMode>) {
    let mut bytes = vec![0; 64 * 1024];
    loop {
        let Some(read) = from.read(&mut bytes).await.ok().filter(|read| *read > 0) else { return };
        let now = *path.borrow();
        match now {
            ProxyMode::Slow(by) => tokio::time::sleep(by).await,
            ProxyMode::HalfAnswers => {
                let _ = to.write_all(&bytes[..read / 2]).await;
                return;
            }
            // Swallowed, and the one who asked goes on waiting.
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

fn answer(status: u16, body: &str) -> Vec<u8> {
    let length = body.len();
    let head = format!("HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n");
    format!("{head}connection: close\r\n\r\n{body}").into_bytes()
}

fn reset(client: TcpStream) {
    // Closed without lingering, a connection is reset.
    let _ = client.set_zero_linger();
    drop(client);
}

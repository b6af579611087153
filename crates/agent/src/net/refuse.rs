//! Short answers written without HTTP machinery, to clients that get nothing else.

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::limits::{REFUSAL_BYTES, REFUSAL_TIME};
use super::socket::{Shared, Socket};

/// Why a client gets only a short answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// As many connections as allowed are open.
    TooMany,
    /// As many as allowed are open from this address.
    TooManyFromAddress,
    /// It did not send its request in time.
    TooSlow,
    /// It speaks http where https is spoken.
    PlainHttp,
}

impl Refusal {
    fn text(self) -> String {
        let (status, why) = match self {
            Self::TooMany => ("503 Service Unavailable", "too many connections: try again later"),
            Self::TooManyFromAddress => {
                ("503 Service Unavailable", "too many connections from your address: close some, or use fewer")
            }
            Self::TooSlow => ("408 Request Timeout", "the request did not arrive in time"),
            Self::PlainHttp => ("400 Bad Request", "this port speaks https: use https:// instead of http://"),
        };
        let length = why.len() + 1;
        format!(
            "HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n\
             content-length: {length}\r\n\r\n{why}\n"
        )
    }
}

/// Tells a client why, over its plain socket, and waits a moment until it has read that.
pub(super) async fn refuse(socket: Arc<Socket>, refusal: Refusal) {
    say(&mut Shared(socket.clone()), refusal).await;
    linger(socket).await;
}

/// Writes the answer and closes the sending side.
pub(super) async fn say(stream: &mut (impl AsyncWrite + Unpin), refusal: Refusal) {
    let text = refusal.text();
    let _ = timeout(REFUSAL_TIME, async {
        stream.write_all(text.as_bytes()).await?;
        stream.flush().await?;
        stream.shutdown().await
    })
    .await;
}

/// Reads what the client still sends. Closing a socket with unread bytes resets the connection, and a reset client
/// may never see the answer that was sent to it.
pub(super) async fn linger(socket: Arc<Socket>) {
    let mut shared = Shared(socket);
    let _ = timeout(REFUSAL_TIME, async {
        let mut waste = vec![0; 4096];
        let mut left = REFUSAL_BYTES;
        while left > 0 {
            match shared.read(&mut waste).await {
                Ok(0) | Err(_) => return,
                Ok(bytes) => left = left.saturating_sub(bytes),
            }
        }
    })
    .await;
}

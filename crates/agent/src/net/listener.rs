//! The open listeners and what they accept.

use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustls::ServerConfig;
use tokio::net::{TcpListener, UnixListener, UnixStream};

use super::peer::{Credentials, Peer, Transport};
use super::socket::Socket;
use super::socket_file::SocketFile;
use super::tls::Tls;

/// One open listener.
#[derive(Debug)]
pub(super) enum Listener {
    Tcp { listener: TcpListener, address: SocketAddr, tls: Option<Tls> },
    Unix { listener: UnixListener, file: SocketFile },
}

/// A connection nobody has read from yet.
#[derive(Debug)]
pub(super) struct Accepted {
    pub socket: Arc<Socket>,
    pub peer: Peer,
    /// What to shake hands with, if it is to be https.
    pub tls: Option<Arc<ServerConfig>>,
}

impl Listener {
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp { address, .. } => Some(*address),
            Self::Unix { .. } => None,
        }
    }

    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Tcp { .. } => None,
            Self::Unix { file, .. } => Some(&file.path),
        }
    }

    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<Accepted>> {
        Poll::Ready(match self {
            Self::Tcp { listener, tls, .. } => {
                let (stream, remote) = ready!(listener.poll_accept(cx))?;
                let local = stream.local_addr()?;
                let socket = Arc::new(Socket::Tcp(stream));
                let peer = Peer::tcp(&socket, remote, local, tls.is_some());
                Ok(Accepted { socket, peer, tls: tls.as_ref().map(Tls::config) })
            }
            Self::Unix { listener, .. } => {
                let (stream, _) = ready!(listener.poll_accept(cx))?;
                let credentials = credentials(&stream);
                let socket = Arc::new(Socket::Unix(stream));
                let peer = Peer::unix(&socket, credentials);
                Ok(Accepted { socket, peer, tls: None })
            }
        })
    }
}

/// The next connection of any listener; `turn` moves on, so that a busy listener does not starve the others.
pub(super) async fn accept_any(listeners: &[Listener], turn: &mut usize) -> io::Result<Accepted> {
    poll_fn(|cx| {
        for step in 0..listeners.len() {
            let at = (*turn + step) % listeners.len();
            if let Poll::Ready(accepted) = listeners[at].poll_accept(cx) {
                *turn = at + 1;
                return Poll::Ready(accepted);
            }
        }
        Poll::Pending
    })
    .await
}

impl Accepted {
    /// The network address this connection counts for; IPv6 clients own a whole /64.
    pub fn counted_address(&self) -> Option<IpAddr> {
        let Transport::Tcp { remote, loopback: false, .. } = self.peer.transport() else { return None };
        Some(match remote.ip() {
            IpAddr::V4(ip) => ip.into(),
            IpAddr::V6(ip) => {
                let [a, b, c, d, ..] = ip.segments();
                Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
            }
        })
    }
}

fn credentials(stream: &UnixStream) -> Option<Credentials> {
    let found = stream.peer_cred().ok()?;
    let pid = found.pid().and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid != 0);
    Some(Credentials { pid, uid: found.uid(), gid: found.gid() })
}

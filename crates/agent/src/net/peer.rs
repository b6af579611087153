//! Where a request came from and who sent it.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};

use super::local_user;
use super::process::{self, NoProcess, PeerProcess, Start};
use super::socket::Socket;

/// The other end of a connection; in the extensions of every request. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Peer(Arc<Facts>);

#[derive(Debug)]
struct Facts {
    transport: Transport,
    credentials: Option<Credentials>,
    /// Of a Unix peer, where only this tells it from a later process of the same pid.
    start: Option<Start>,
    socket: Weak<Socket>,
    /// The answer of the kernel, once asked for.
    user: OnceLock<User>,
}

/// Whose the other end is, as far as the kernel says.
#[derive(Debug, Clone, Copy)]
enum User {
    Known(u32),
    /// It was closed before the kernel was asked.
    Gone,
    Unknown,
}

/// How a peer is connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// Over TCP.
    Tcp {
        /// The peer's address (IPv4 if it speaks IPv4).
        remote: SocketAddr,
        /// The address it connected to.
        local: SocketAddr,
        /// Whether both addresses are of the loopback interface.
        loopback: bool,
        /// Whether it speaks https.
        tls: bool,
    },
    /// Over the Unix socket.
    Unix,
}

/// Who connected to the Unix socket, as the kernel says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// The process that connected, in our pid namespace; `None` if it cannot be seen from there.
    pub pid: Option<u32>,
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

impl Peer {
    pub(super) fn tcp(socket: &Arc<Socket>, remote: SocketAddr, local: SocketAddr, tls: bool) -> Self {
        let (remote, local) = (plain(remote), plain(local));
        let loopback = remote.ip().is_loopback() && local.ip().is_loopback();
        Self::new(socket, Transport::Tcp { remote, local, loopback, tls }, None)
    }

    pub(super) fn unix(socket: &Arc<Socket>, credentials: Option<Credentials>) -> Self {
        Self::new(socket, Transport::Unix, credentials)
    }

    fn new(socket: &Arc<Socket>, transport: Transport, credentials: Option<Credentials>) -> Self {
        let start = credentials.and_then(|credentials| process::start_to_remember(&credentials));
        let socket = Arc::downgrade(socket);
        Self(Arc::new(Facts { transport, credentials, start, socket, user: OnceLock::new() }))
    }

    /// How it is connected.
    pub fn transport(&self) -> Transport {
        self.0.transport
    }

    /// Whether it is on this machine: the Unix socket or loopback.
    pub fn is_local(&self) -> bool {
        matches!(self.0.transport, Transport::Unix | Transport::Tcp { loopback: true, .. })
    }

    /// Who connected to the Unix socket; `None` over TCP.
    pub fn credentials(&self) -> Option<Credentials> {
        self.0.credentials
    }

    /// The user at the other end, if it is on this machine and the kernel knows.
    ///
    /// Over loopback TCP the kernel is asked at the first call (some microseconds, never blocking), and the answer is
    /// kept for the connection. `None` means unknown: treat such a client as a stranger.
    pub fn uid(&self) -> Option<u32> {
        match self.user() {
            User::Known(uid) => Some(uid),
            User::Gone | User::Unknown => None,
        }
    }

    /// Whether it left before it could be told whose it was.
    pub fn is_gone(&self) -> bool {
        matches!(self.user(), User::Gone)
    }

    fn user(&self) -> User {
        match self.0.transport {
            Transport::Unix => self.0.credentials.map_or(User::Unknown, |credentials| User::Known(credentials.uid)),
            Transport::Tcp { loopback: false, .. } => User::Unknown,
            Transport::Tcp { remote, local, .. } => {
                *self.0.user.get_or_init(|| match local_user::of_connection(remote, local) {
                    Ok(Some(uid)) => User::Known(uid),
                    Ok(None) => User::Gone,
                    Err(error) => {
                        tracing::warn!(%remote, %error, "cannot ask the kernel whose connection this is");
                        User::Unknown
                    }
                })
            }
        }
    }

    /// The process that connected to the Unix socket, as a fresh handle that no other process can slip into.
    pub fn process(&self) -> Result<PeerProcess, NoProcess> {
        let credentials = self.0.credentials.ok_or(NoProcess::NotUnix)?;
        let socket = self.0.socket.upgrade().ok_or(NoProcess::Gone)?;
        process::of_peer(&socket, &credentials, self.0.start)
    }
}

fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

//! The listeners of the agent: TCP (plain or TLS) and a Unix socket, speaking HTTP/1.1.
//!
//! [`Net::bind`] opens the sockets, [`Net::serve`] answers on them until [`Shutdown`] begins and the last
//! connection ended. One loop (`server`) owns the listeners and every connection task; there is no other task.
//! Each request carries the [`Peer`] it came from in its extensions. Dropping the `serve` future ends everything.
//!
//! A connection never waits without an end: the loop looks over all connections about once a second (`watch`) and
//! closes those that are slower than [`Limits`] allows, so that a waiting connection needs no timer of its own.
//!
//! A client that closes its connection, or only its sending side, counts as gone: its request is cancelled.

mod bodies;
mod connection;
mod error;
pub mod limits;
mod listener;
mod local_user;
mod peer;
mod process;
mod refuse;
mod registry;
mod server;
mod shutdown;
mod socket;
mod socket_file;
mod tcp;
mod tls;
mod watch;

use std::net::SocketAddr;
use std::path::Path;

pub use bodies::{AnswerBody, RequestBody};
pub use error::{NetError, TlsError};
pub use limits::Limits;
pub use peer::{Credentials, Peer, Transport};
pub use process::{NoProcess, PeerProcess};
pub use server::Ended;
pub use shutdown::Shutdown;
pub use socket_file::UnixBind;
pub use tcp::TcpBind;
pub use tls::Tls;

use listener::Listener;

/// What to listen on.
#[derive(Debug, Default)]
pub struct Bind {
    /// TCP addresses; may be empty.
    pub tcp: Vec<TcpBind>,
    /// The Unix socket, if any.
    pub unix: Option<UnixBind>,
    /// With it every TCP address speaks https, without it http. The Unix socket is always plain.
    pub tls: Option<Tls>,
    /// How much and how long clients may ask for.
    pub limits: Limits,
}

/// Sockets that are open and not yet served.
#[derive(Debug)]
pub struct Net {
    listeners: Vec<Listener>,
    limits: Limits,
}

impl Net {
    /// Opens all sockets, or none. Must be called within a tokio runtime.
    pub async fn bind(bind: Bind) -> Result<Self, NetError> {
        let limits = bind.limits.checked()?;
        let mut listeners = Vec::new();
        for (address, listener) in tcp::bind_all(&bind.tcp).await? {
            listeners.push(Listener::Tcp { listener, address, tls: bind.tls.clone() });
        }
        if let Some(unix) = &bind.unix {
            let (listener, file) = socket_file::bind(unix)?;
            listeners.push(Listener::Unix { listener, file });
        }
        if listeners.is_empty() {
            return Err(NetError::Nothing);
        }
        Ok(Self { listeners, limits })
    }

    /// The TCP addresses really bound (a port 0 became a number).
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.listeners.iter().filter_map(Listener::address).collect()
    }

    /// The path of the Unix socket.
    pub fn unix_path(&self) -> Option<&Path> {
        self.listeners.iter().find_map(Listener::path)
    }
}

/// Lets this process open as many files as its hard limit allows, and says how many that are.
///
/// Every connection is an open file, and the usual soft limit is 1024. Children inherit the higher limit.
pub fn raise_open_files() -> u64 {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    let before = limit.current;
    limit.current = limit.maximum;
    let now = if setrlimit(Resource::Nofile, limit).is_ok() { limit.maximum } else { before };
    now.unwrap_or(u64::MAX)
}

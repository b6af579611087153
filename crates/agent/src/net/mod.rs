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

mod connection;
mod listen;
mod peer;
mod process;
mod server;
mod tls;
mod watch;

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Resource, getrlimit, setrlimit};

pub use listen::{NetError, TcpBind, UnixBind};
pub use peer::{Credentials, Peer, Transport};
pub use process::{NoProcess, PeerProcess};
pub use server::{Ended, Shutdown};
pub use tls::{Tls, TlsError};
pub use watch::RequestBody;

use listen::Listener;

// Every fixed bound of the listeners; what a caller may choose is in `Limits`.

/// Connections waiting in the kernel to be accepted, per listener.
const BACKLOG: u32 = 4096;
/// Open files kept back for everything that is not a connection.
const FILES_KEPT_BACK: u64 = 256;
/// Clients that read "too many connections" at the same time; more are closed without an answer.
const REFUSALS_AT_ONCE: usize = 64;
/// Time for a refused client to read the reason.
const REFUSAL_TIME: Duration = Duration::from_secs(1);
/// Bytes that a refused client may still send while it reads the reason.
const REFUSAL_BYTES: usize = 256 << 10;
/// Pause after the first failed accept; doubled with every further one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// Longest pause after failed accepts.
const ACCEPT_PAUSE_MOST: Duration = Duration::from_secs(1);
/// Time between two looks over all connections; shorter only if a limit is.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Least time between two looks over all connections.
const LOOK_EVERY_LEAST: Duration = Duration::from_millis(10);
/// Silence after which the kernel asks a TCP peer whether it is still there.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
/// Time between two such questions.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
/// Unanswered questions after which the peer counts as gone.
const KEEPALIVE_COUNT: u32 = 3;
/// Largest certificate or key file.
const PEM_BYTES: u64 = 1 << 20;
/// Addresses one host name may stand for.
const ADDRESSES_PER_NAME: usize = 16;
/// Tries to find one port that is free for every address of a host.
const PORT_TRIES: usize = 16;
/// Answer of the kernel about one socket.
const DIAG_BYTES: usize = 4096;
/// The smallest buffer that the HTTP library accepts.
const BUFFER_LEAST: usize = 8 << 10;

/// Sockets to open, and the limits to serve them under.
#[derive(Debug, Default)]
pub struct Bind {
    /// TCP addresses; may be empty.
    pub tcp: Vec<TcpBind>,
    /// The Unix socket, if any.
    pub unix: Option<UnixBind>,
    /// With it every TCP address speaks https, without it http. The Unix socket is always plain.
    pub tls: Option<Tls>,
    /// Bounds on what clients may ask for and on the time they may take.
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
        for (address, listener) in listen::bind_tcp(&bind.tcp).await? {
            listeners.push(Listener::Tcp { listener, address, tls: bind.tls.clone() });
        }
        if let Some(unix) = &bind.unix {
            let (listener, file) = listen::bind_unix(unix)?;
            listeners.push(Listener::Unix { listener, file });
        }
        if listeners.is_empty() {
            return Err(NetError::Nothing);
        }
        Ok(Self { listeners, limits })
    }

    /// Returns the TCP addresses really bound (a port 0 became a number).
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.listeners.iter().filter_map(Listener::address).collect()
    }

    /// Returns the path of the Unix socket.
    pub fn unix_path(&self) -> Option<&Path> {
        self.listeners.iter().find_map(Listener::path)
    }
}

/// Lets this process open as many files as its hard limit allows, and returns that number.
///
/// Every connection is an open file, and the usual soft limit is 1024. Children inherit the higher limit.
pub fn raise_open_files() -> u64 {
    let mut limit = getrlimit(Resource::Nofile);
    let before = limit.current;
    limit.current = limit.maximum;
    let now = if setrlimit(Resource::Nofile, limit).is_ok() { limit.maximum } else { before };
    now.unwrap_or(u64::MAX)
}

/// Bounds on what clients may ask for and on the time they may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Open connections; a further client is told 503 and closed. Lowered to what the open-file limit allows.
    pub connections: usize,
    /// Open connections from one network address (one /64 for IPv6). Loopback and Unix clients are not counted.
    pub connections_per_address: usize,
    /// Bytes of a request's first line and headers; 431 above. There may be at most 100 headers.
    pub header_bytes: usize,
    /// Bytes buffered per connection and direction.
    pub buffer_bytes: usize,
    /// Time to send the TLS handshake, and time to send the headers once begun; 408 after.
    pub header_time: Duration,
    /// Time to send the body once a handler waits for it; 408 after.
    pub body_time: Duration,
    /// Time between two requests on a connection.
    pub idle_time: Duration,
    /// Time in which a client must take at least something of an answer; streams may last, each write may not.
    pub write_time: Duration,
    /// Time that requests in progress get once shutdown has begun.
    pub shutdown_grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 16_384,
            connections_per_address: 1_024,
            header_bytes: 16 << 10,
            buffer_bytes: 64 << 10,
            header_time: Duration::from_secs(10),
            body_time: Duration::from_secs(20),
            idle_time: Duration::from_secs(75),
            write_time: Duration::from_secs(30),
            shutdown_grace: Duration::from_secs(10),
        }
    }
}

impl Limits {
    /// Refuses limits that leave no room for a single client, and lowers the connections to what the process can open.
    fn checked(mut self) -> Result<Self, NetError> {
        let refuse = |field, value: usize, least| Err(NetError::Limit { field, value, least });
        if self.connections == 0 {
            return refuse("connections", 0, 1);
        }
        if self.connections_per_address == 0 {
            return refuse("connections_per_address", 0, 1);
        }
        if self.header_bytes < BUFFER_LEAST {
            return refuse("header_bytes", self.header_bytes, BUFFER_LEAST);
        }
        if self.buffer_bytes < self.header_bytes {
            return refuse("buffer_bytes", self.buffer_bytes, self.header_bytes);
        }
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let possible = usize::try_from(files.saturating_sub(FILES_KEPT_BACK)).unwrap_or(usize::MAX).max(1);
        if possible < self.connections {
            tracing::warn!(
                asked = self.connections,
                possible,
                files,
                "fewer connections than asked for: raise the open-file limit"
            );
            self.connections = possible;
        }
        Ok(self)
    }

    /// Returns the time between two looks over the connections, so that no limit is overrun by much.
    fn look_every(&self) -> Duration {
        let shortest = self.header_time.min(self.body_time).min(self.idle_time).min(self.write_time);
        (shortest / 4).clamp(LOOK_EVERY_LEAST, LOOK_EVERY)
    }
}

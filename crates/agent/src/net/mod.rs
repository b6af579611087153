//! The listeners of the agent: TCP (plain or TLS) and a Unix socket, with HTTP/1.1.
//!
//! [`NetListeners::bind`] opens the sockets. [`NetListeners::serve`] serves them until [`Shutdown`] begins and the last
//! connection has ended. One loop (`server`) owns the listeners and every connection task; there is no other task. Each
//! request carries its [`Peer`] in its extensions. Dropping the `serve` future ends everything.
//!
//! Every wait has a limit: the loop checks all connections about once a second (`deadlines`) and closes those that are
//! slower than [`NetLimits`] allows, so that a waiting connection needs no timer of its own.
//!
//! A client that closes its connection, or only its sending side, counts as gone: its request is cancelled.

mod connection;
mod deadlines;
mod listeners;
mod peer;
mod peer_process;
mod server;
mod tls;

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Resource, getrlimit, setrlimit};

pub use deadlines::IncomingBody;
pub use listeners::{NetError, TcpBind, UnixBind};
pub use peer::{Peer, PeerCredentials, PeerTransport};
pub use peer_process::{PeerProcess, PeerProcessError};
pub use server::{ServeOutcome, Shutdown};
pub use tls::{Tls, TlsError};

use listeners::OpenListener;

// The fixed bounds of the listeners. The others are in `NetLimits`.

/// Connections waiting in the kernel to be accepted, per listener.
const BACKLOG: u32 = 4096;
/// Open files reserved for everything but connections.
const RESERVED_FILES: u64 = 256;
/// Connections that are refused with a response at the same time. Others are closed without one.
const MAX_REFUSALS: usize = 64;
/// Time for a refused client to read the reason.
const REFUSAL_TIME: Duration = Duration::from_secs(1);
/// Bytes that a refused client may still send while it reads the reason.
const REFUSAL_BYTES: usize = 256 << 10;
/// Pause after the first failed accept; doubled with every further one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// Longest pause after failed accepts.
const ACCEPT_PAUSE_MAX: Duration = Duration::from_secs(1);
/// Time between two checks of all connections; shorter only if a limit is.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest time between two checks of all connections.
const CHECK_INTERVAL_MIN: Duration = Duration::from_millis(10);
/// Silence after which the kernel probes a TCP peer.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
/// Time between two probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Unanswered probes after which the peer counts as gone.
const KEEPALIVE_COUNT: u32 = 3;
/// Largest certificate or key file.
const PEM_BYTES: u64 = 1 << 20;
/// Largest number of addresses of one host name.
const ADDRESSES_PER_NAME: usize = 16;
/// Attempts to find one port that is free for every address of a host.
const PORT_TRIES: usize = 16;
/// Buffer for the kernel's reply about one socket.
const DIAG_BYTES: usize = 4096;
/// The smallest buffer that the HTTP library accepts.
const MIN_BUFFER_BYTES: usize = 8 << 10;

/// Sockets to open, and the limits to serve them under.
#[derive(Debug, Default)]
pub struct ListenSpec {
    /// TCP addresses; may be empty.
    pub tcp: Vec<TcpBind>,
    /// The Unix socket, if any.
    pub unix: Option<UnixBind>,
    /// The certificate of the TCP listeners, which then use https. The Unix socket is always plain.
    pub tls: Option<Tls>,
    /// Bounds on the size and time of requests.
    pub limits: NetLimits,
}

/// Listening sockets that are open and not yet served.
#[derive(Debug)]
pub struct NetListeners {
    listeners: Vec<OpenListener>,
    limits: NetLimits,
}

impl NetListeners {
    /// Opens all sockets, or none. Must be called within a tokio runtime.
    pub async fn bind(bind: ListenSpec) -> Result<Self, NetError> {
        let limits = bind.limits.checked()?;
        let mut listeners = Vec::new();
        for (address, listener) in listeners::bind_tcp(&bind.tcp).await? {
            listeners.push(OpenListener::Tcp { listener, address, tls: bind.tls.clone() });
        }
        if let Some(unix) = &bind.unix {
            let (listener, file) = listeners::bind_unix(unix)?;
            listeners.push(OpenListener::Unix { listener, file });
        }
        if listeners.is_empty() {
            return Err(NetError::Nothing);
        }
        Ok(Self { listeners, limits })
    }

    /// Returns the bound TCP addresses; a port 0 has become the chosen port.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.listeners.iter().filter_map(OpenListener::address).collect()
    }

    /// Returns the path of the Unix socket.
    pub fn unix_path(&self) -> Option<&Path> {
        self.listeners.iter().find_map(OpenListener::path)
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

/// Bounds on the size and time of requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetLimits {
    /// Open connections; further connections get 503. Lowered to fit the open-file limit.
    pub connections: usize,
    /// Open connections from one network address (one /64 for IPv6). Loopback and Unix clients are not counted.
    pub connections_per_address: usize,
    /// Bytes of a request's first line and headers; 431 above. There may be at most 100 headers.
    pub header_bytes: usize,
    /// Bytes buffered per connection and direction.
    pub buffer_bytes: usize,
    /// Time to send the TLS handshake, and time to send the headers once begun; 408 afterwards.
    pub header_time: Duration,
    /// Time to send the body once a handler waits for it; 408 afterwards.
    pub body_time: Duration,
    /// Time between two requests on a connection.
    pub idle_time: Duration,
    /// Time in which a client must accept at least one byte of a response. Streams may last, a single write may not.
    pub write_time: Duration,
    /// Time that requests in progress get once shutdown has begun.
    pub shutdown_grace: Duration,
}

impl Default for NetLimits {
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

impl NetLimits {
    /// Refuses limits that leave no room for a single client, and lowers the connections to fit the open-file limit.
    fn checked(mut self) -> Result<Self, NetError> {
        let refuse = |field, value: usize, least| Err(NetError::Limit { field, value, least });
        if self.connections == 0 {
            return refuse("connections", 0, 1);
        }
        if self.connections_per_address == 0 {
            return refuse("connections_per_address", 0, 1);
        }
        if self.header_bytes < MIN_BUFFER_BYTES {
            return refuse("header_bytes", self.header_bytes, MIN_BUFFER_BYTES);
        }
        if self.buffer_bytes < self.header_bytes {
            return refuse("buffer_bytes", self.buffer_bytes, self.header_bytes);
        }
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let possible = usize::try_from(files.saturating_sub(RESERVED_FILES)).unwrap_or(usize::MAX).max(1);
        if possible < self.connections {
            tracing::warn!(
                configured = self.connections,
                possible,
                files,
                "the open-file limit allows fewer connections than limits.connections; raise it (LimitNOFILE=, ulimit -n)"
            );
            self.connections = possible;
        }
        Ok(self)
    }

    /// Returns the time between two checks of the connections, so that no limit is exceeded by much.
    fn check_interval(&self) -> Duration {
        let shortest = self.header_time.min(self.body_time).min(self.idle_time).min(self.write_time);
        (shortest / 4).clamp(CHECK_INTERVAL_MIN, CHECK_INTERVAL)
    }
}

//! Every bound of the listeners, in one place.

use std::time::Duration;

use super::error::NetError;

/// Connections waiting in the kernel to be accepted, per listener.
pub(super) const BACKLOG: u32 = 4096;
/// Open files kept back for everything that is not a connection.
pub(super) const FILES_KEPT_BACK: u64 = 256;
/// Clients that are being told "too many connections" at the same time; more are closed without a word.
pub(super) const REFUSALS_AT_ONCE: usize = 64;
/// How long a refused client may take to read why.
pub(super) const REFUSAL_TIME: Duration = Duration::from_secs(1);
/// What a refused client may still send while it is told why.
pub(super) const REFUSAL_BYTES: usize = 256 << 10;
/// Pause after the first failed accept; doubled with every further one.
pub(super) const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// Longest pause after failed accepts.
pub(super) const ACCEPT_PAUSE_MOST: Duration = Duration::from_secs(1);
/// Between two looks over all connections; shorter only if a limit is.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Between two looks over all connections, however short the limits are.
pub(super) const LOOK_EVERY_LEAST: Duration = Duration::from_millis(10);
/// Silence after which the kernel asks a TCP peer whether it is still there.
pub(super) const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
/// Between two such questions.
pub(super) const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
/// Unanswered questions after which the peer counts as gone.
pub(super) const KEEPALIVE_COUNT: u32 = 3;
/// Largest certificate or key file.
pub(super) const PEM_BYTES: u64 = 1 << 20;
/// Addresses one host name may stand for.
pub(super) const ADDRESSES_PER_NAME: usize = 16;
/// Tries to find one port that is free for every address of a host.
pub(super) const PORT_TRIES: usize = 16;
/// Answer of the kernel about one socket.
pub(super) const DIAG_BYTES: usize = 4096;
/// The smallest buffer the HTTP library accepts; less than this cannot be asked for.
const BUFFER_LEAST: usize = 8 << 10;

/// How much and how long clients may ask for.
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
    /// Refuses limits nobody could be served under, and lowers the connections to what the process can open.
    pub(super) fn checked(mut self) -> Result<Self, NetError> {
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
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
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

    /// How often to look over the connections, so that no limit is overrun by much.
    pub(super) fn look_every(&self) -> Duration {
        let shortest = self.header_time.min(self.body_time).min(self.idle_time).min(self.write_time);
        (shortest / 4).clamp(LOOK_EVERY_LEAST, LOOK_EVERY)
    }
}

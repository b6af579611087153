//! The loop that accepts and owns all connections, closes slow ones, and ends them when the agent stops.

use std::collections::HashMap;
use std::convert::Infallible;
use std::error::Error;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Body;
use hyper::server::conn::http1;
use tokio::sync::watch;
use tokio::task::{Id, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until, timeout};
use tower::Service;

use super::connection::{self, ConnectionRefusal, ConnectionSpec, refuse};
use super::deadlines::{CoarseClock, ConnectionOrder, DeadlineTracker, IncomingBody};
use super::listeners::{AcceptedConnection, accept_any};
use super::{ACCEPT_PAUSE, ACCEPT_PAUSE_MAX, MAX_REFUSALS, NetLimits, NetListeners};

/// Signal to listeners and long requests that the agent is stopping. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Shutdown(Arc<watch::Sender<bool>>);

impl Shutdown {
    /// Returns a shutdown that has not begun.
    pub fn new() -> Self {
        Self(Arc::new(tokio::sync::watch::Sender::new(false)))
    }

    /// Begins the shutdown; further calls have no effect.
    pub fn begin(&self) {
        self.0.send_replace(true);
    }

    /// Returns whether the shutdown has begun.
    pub fn has_begun(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits until the shutdown begins. Long polls then return early, and streams end.
    pub async fn begun(&self) {
        // The sender lives as long as `self`, so the wait cannot fail.
        let _ = self.0.subscribe().wait_for(|begun| *begun).await;
    }
}

impl Default for Shutdown {
    fn default() -> Self {
        Self::new()
    }
}

/// Outcome of serving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServeOutcome {
    /// Connections whose request had not finished when the grace was over.
    pub cut_off: usize,
}

impl NetListeners {
    /// Serves until shutdown begins, lets requests in progress finish, and returns when every connection has ended.
    ///
    /// Handlers of long requests should observe the same [`Shutdown`]; requests that still run after the grace are cut off.
    /// The file of the Unix socket is removed as soon as the listeners close.
    pub async fn serve<S, B>(self, service: S, shutdown: Shutdown) -> ServeOutcome
    where
        S: Service<Request<IncomingBody>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send,
        B: Body + Send + Unpin + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let Self { listeners, limits } = self;
        let grace = limits.shutdown_grace;
        let http = connection::http_builder(&limits);
        let mut connections = ConnectionRegistry::new(limits);
        let mut check = interval_at(Instant::now() + connections.check_interval, connections.check_interval);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut backoff = AcceptBackoff::default();
        let mut turn = 0;
        let mut begun = std::pin::pin!(shutdown.begun());
        loop {
            let any_open = !connections.is_empty();
            tokio::select! {
                biased;
                () = &mut begun => break,
                () = connections.ended(), if any_open => {}
                _ = check.tick(), if any_open => connections.close_slow(),
                () = backoff.over(), if backoff.until.is_some() => backoff.until = None,
                accepted = accept_any(&listeners, &mut turn), if backoff.until.is_none() => match accepted {
                    Err(error) => backoff.after(&error),
                    Ok(accepted) => {
                        backoff.length = None;
                        connections.admit(accepted, service.clone(), http.clone());
                    }
                },
            }
        }
        drop(listeners);
        connections.finish_all();
        let finished = async {
            while !connections.is_empty() {
                tokio::select! {
                    () = connections.ended() => {}
                    _ = check.tick() => connections.close_slow(),
                }
            }
        };
        let _ = timeout(grace, finished).await;
        let cut_off = connections.serving();
        connections.close_all().await;
        ServeOutcome { cut_off }
    }
}

/// Pauses between failed accepts, so that the loop does not spin without file descriptors or memory.
#[derive(Debug, Default)]
struct AcceptBackoff {
    length: Option<Duration>,
    until: Option<Instant>,
}

impl AcceptBackoff {
    fn after(&mut self, error: &io::Error) {
        if is_client_error(error) {
            return;
        }
        let length = self.length.map_or(ACCEPT_PAUSE, |last| (last * 2).min(ACCEPT_PAUSE_MAX));
        if self.length.is_none() {
            tracing::warn!(%error, "cannot accept connections; retrying");
        }
        self.length = Some(length);
        self.until = Some(Instant::now() + length);
    }

    async fn over(&self) {
        if let Some(until) = self.until {
            sleep_until(until).await;
        }
    }
}

/// Returns whether the error concerns only the connection that was being accepted.
fn is_client_error(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, NotConnected};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted | NotConnected)
}

/// The open connections. Dropping it ends them all.
struct ConnectionRegistry {
    limits: NetLimits,
    check_interval: Duration,
    clock: Arc<CoarseClock>,
    tasks: JoinSet<()>,
    serving: HashMap<Id, ServedConnection>,
    per_address: HashMap<IpAddr, usize>,
}

struct ServedConnection {
    tracker: Arc<DeadlineTracker>,
    address: Option<IpAddr>,
}

impl ConnectionRegistry {
    fn new(limits: NetLimits) -> Self {
        Self {
            check_interval: limits.check_interval(),
            limits,
            clock: Arc::new(CoarseClock::new()),
            tasks: JoinSet::new(),
            serving: HashMap::new(),
            per_address: HashMap::new(),
        }
    }

    fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Returns the number of connections that are served, without those that are refused.
    fn serving(&self) -> usize {
        self.serving.len()
    }

    /// Serves a connection if there is room, or else refuses it with a response.
    ///
    /// A connection over the limit does not wait in the kernel: the client gets the reason at once and may use another
    /// server, whereas a silent wait looks like a dead agent.
    fn admit<S, B>(&mut self, accepted: AcceptedConnection, service: S, http: http1::Builder)
    where
        S: Service<Request<IncomingBody>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send,
        B: Body + Send + Unpin + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let address = accepted.counted_address();
        if let Some(refusal) = self.refusal(address) {
            return self.refuse(accepted, refusal);
        }
        if self.is_empty() {
            // The clock did not advance while there were no connections.
            self.clock.advance();
        }
        let AcceptedConnection { socket, peer, tls } = accepted;
        let tracker = Arc::new(DeadlineTracker::new(self.clock.clone(), &socket));
        let spec = ConnectionSpec { socket, peer, tracker: tracker.clone(), service, http };
        // Two task types, so that a plain connection does not take the memory of a TLS connection.
        let task = match tls {
            Some(config) => self.tasks.spawn(connection::serve_tls(spec, config)),
            None => self.tasks.spawn(connection::serve_plain(spec)),
        };
        if let Some(address) = address {
            *self.per_address.entry(address).or_default() += 1;
        }
        self.serving.insert(task.id(), ServedConnection { tracker, address });
    }

    /// Waits for the next connection to end. Never returns without connections.
    async fn ended(&mut self) {
        let (id, panicked) = match self.tasks.join_next_with_id().await {
            None => return std::future::pending().await,
            Some(Ok((id, ()))) => (id, None),
            Some(Err(error)) => (error.id(), error.is_panic().then_some(error)),
        };
        if let Some(error) = panicked {
            tracing::error!(%error, "a request handler panicked; its connection is closed");
        }
        let Some(address) = self.serving.remove(&id).and_then(|serving| serving.address) else { return };
        if let Some(count) = self.per_address.get_mut(&address) {
            *count -= 1;
            if *count == 0 {
                self.per_address.remove(&address);
            }
        }
    }

    /// Ends the connections that are slower than allowed.
    fn close_slow(&self) {
        let now = self.clock.advance();
        for ServedConnection { tracker, .. } in self.serving.values() {
            match tracker.order_due(now, self.check_interval, &self.limits) {
                ConnectionOrder::Go => {}
                order => tracker.order(order),
            }
        }
    }

    /// Orders every connection to close after its current request.
    fn finish_all(&self) {
        for ServedConnection { tracker, .. } in self.serving.values() {
            tracker.order(ConnectionOrder::Finish);
        }
    }

    /// Closes every connection and waits until all tasks ended.
    async fn close_all(&mut self) {
        self.tasks.shutdown().await;
        self.serving.clear();
        self.per_address.clear();
    }

    fn refusal(&self, address: Option<IpAddr>) -> Option<ConnectionRefusal> {
        if self.serving.len() >= self.limits.connections {
            return Some(ConnectionRefusal::TooMany);
        }
        let from_there = address.and_then(|address| self.per_address.get(&address)).copied().unwrap_or(0);
        (from_there >= self.limits.connections_per_address).then_some(ConnectionRefusal::TooManyFromAddress)
    }

    fn refuse(&mut self, accepted: AcceptedConnection, refusal: ConnectionRefusal) {
        tracing::debug!(peer = ?accepted.peer.transport(), ?refusal, "connection refused");
        let refusing = self.tasks.len() - self.serving.len();
        // A handshake for a refusal alone would cost too much.
        if accepted.tls.is_none() && refusing < MAX_REFUSALS {
            self.tasks.spawn(refuse(accepted.socket, refusal));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_without_free_files_and_a_client_error_causes_none() {
        let mut backoff = AcceptBackoff::default();
        backoff.after(&io::ErrorKind::ConnectionAborted.into());
        assert_eq!(backoff.until, None);
        let out_of_files = io::Error::from_raw_os_error(libc::EMFILE);
        let mut lengths = Vec::new();
        for _ in 0..10 {
            backoff.after(&out_of_files);
            lengths.extend(backoff.length);
            assert!(backoff.until.is_some());
        }
        assert_eq!(lengths[0], ACCEPT_PAUSE);
        assert!(lengths.is_sorted(), "{lengths:?}");
        assert_eq!(lengths.last(), Some(&ACCEPT_PAUSE_MAX));
    }
}

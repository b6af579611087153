//! The one loop: accepts, owns the connections, looks over them, and ends them when the agent stops.

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

use super::connection::{self, Refusal, Seat, refuse};
use super::listen::{Accepted, accept_any};
use super::watch::{Clock, Order, RequestBody, Watch};
use super::{ACCEPT_PAUSE, ACCEPT_PAUSE_MOST, Limits, Net, REFUSALS_AT_ONCE};

/// Tells the listeners and the handlers of long requests that the agent is stopping. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Shutdown(Arc<watch::Sender<bool>>);

impl Shutdown {
    /// Returns a shutdown that has not begun.
    pub fn new() -> Self {
        Self(Arc::new(tokio::sync::watch::Sender::new(false)))
    }

    /// Begins it; further calls change nothing.
    pub fn begin(&self) {
        self.0.send_replace(true);
    }

    /// Returns whether it has begun.
    pub fn has_begun(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits until it begins; a long poll answers early then, a stream ends.
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
pub struct Ended {
    /// Connections whose request had not finished when the grace was over.
    pub cut_off: usize,
}

impl Net {
    /// Serves until shutdown begins, lets requests in progress finish, and returns when every connection has ended.
    ///
    /// Handlers of long requests should watch the same [`Shutdown`]; what still runs after the grace is cut off. The
    /// Unix socket's file is removed as soon as nothing is accepted any more.
    pub async fn serve<S, B>(self, service: S, shutdown: Shutdown) -> Ended
    where
        S: Service<Request<RequestBody>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send,
        B: Body + Send + Unpin + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let Self { listeners, limits } = self;
        let grace = limits.shutdown_grace;
        let http = connection::http(&limits);
        let mut connections = Registry::new(limits);
        let mut look = interval_at(Instant::now() + connections.look_every, connections.look_every);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut pause = Pause::default();
        let mut turn = 0;
        let mut begun = std::pin::pin!(shutdown.begun());
        loop {
            let any_open = !connections.is_empty();
            tokio::select! {
                biased;
                () = &mut begun => break,
                () = connections.ended(), if any_open => {}
                _ = look.tick(), if any_open => connections.look(),
                () = pause.over(), if pause.until.is_some() => pause.until = None,
                accepted = accept_any(&listeners, &mut turn), if pause.until.is_none() => match accepted {
                    Err(error) => pause.after(&error),
                    Ok(accepted) => {
                        pause.length = None;
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
                    _ = look.tick() => connections.look(),
                }
            }
        };
        let _ = timeout(grace, finished).await;
        let cut_off = connections.serving();
        connections.close_all().await;
        Ended { cut_off }
    }
}

/// Keeps the loop from spinning when connections cannot be accepted (no file descriptors or memory left).
#[derive(Debug, Default)]
struct Pause {
    length: Option<Duration>,
    until: Option<Instant>,
}

impl Pause {
    fn after(&mut self, error: &io::Error) {
        if is_the_clients(error) {
            return;
        }
        let length = self.length.map_or(ACCEPT_PAUSE, |last| (last * 2).min(ACCEPT_PAUSE_MOST));
        if self.length.is_none() {
            tracing::warn!(%error, "cannot accept connections; trying again in a moment");
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

/// Returns whether the error belongs to the one connection to accept; the next one may be fine.
fn is_the_clients(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, NotConnected};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted | NotConnected)
}

/// The open connections. Dropping it ends them all.
struct Registry {
    limits: Limits,
    look_every: Duration,
    clock: Arc<Clock>,
    tasks: JoinSet<()>,
    serving: HashMap<Id, Serving>,
    per_address: HashMap<IpAddr, usize>,
}

struct Serving {
    watch: Arc<Watch>,
    address: Option<IpAddr>,
}

impl Registry {
    fn new(limits: Limits) -> Self {
        Self {
            look_every: limits.look_every(),
            limits,
            clock: Arc::new(Clock::new()),
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

    /// Serves a connection if there is room, else tells the client that there is none.
    ///
    /// A client over the limit is accepted and told so, not left waiting in the kernel: it learns the reason at once
    /// and may try elsewhere. A silent wait looks like a dead agent.
    fn admit<S, B>(&mut self, accepted: Accepted, service: S, http: http1::Builder)
    where
        S: Service<Request<RequestBody>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
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
            // The clock stood still while there was nothing to look at.
            self.clock.advance();
        }
        let Accepted { socket, peer, tls } = accepted;
        let watch = Arc::new(Watch::new(self.clock.clone(), &socket));
        let seat = Seat { socket, peer, watch: watch.clone(), service, http };
        // Two kinds of task: a plain connection must not take the room of a TLS one.
        let task = match tls {
            Some(config) => self.tasks.spawn(connection::tls(seat, config)),
            None => self.tasks.spawn(connection::plain(seat)),
        };
        if let Some(address) = address {
            *self.per_address.entry(address).or_default() += 1;
        }
        self.serving.insert(task.id(), Serving { watch, address });
    }

    /// Waits for the next connection to end. Does not return while there is none.
    async fn ended(&mut self) {
        let (id, panicked) = match self.tasks.join_next_with_id().await {
            None => return std::future::pending().await,
            Some(Ok((id, ()))) => (id, None),
            Some(Err(error)) => (error.id(), error.is_panic().then_some(error)),
        };
        if let Some(error) = panicked {
            tracing::error!(%error, "a request's handler panicked; its connection is closed");
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
    fn look(&self) {
        let now = self.clock.advance();
        for Serving { watch, .. } in self.serving.values() {
            match watch.judge(now, self.look_every, &self.limits) {
                Order::Go => {}
                order => watch.order(order),
            }
        }
    }

    /// Tells every connection to finish what it does, then close.
    fn finish_all(&self) {
        for Serving { watch, .. } in self.serving.values() {
            watch.order(Order::Finish);
        }
    }

    /// Closes every connection and waits until all tasks ended.
    async fn close_all(&mut self) {
        self.tasks.shutdown().await;
        self.serving.clear();
        self.per_address.clear();
    }

    fn refusal(&self, address: Option<IpAddr>) -> Option<Refusal> {
        if self.serving.len() >= self.limits.connections {
            return Some(Refusal::TooMany);
        }
        let from_there = address.and_then(|address| self.per_address.get(&address)).copied().unwrap_or(0);
        (from_there >= self.limits.connections_per_address).then_some(Refusal::TooManyFromAddress)
    }

    fn refuse(&mut self, accepted: Accepted, refusal: Refusal) {
        tracing::debug!(peer = ?accepted.peer.transport(), ?refusal, "connection refused");
        let refusing = self.tasks.len() - self.serving.len();
        // A handshake only to say no would cost more than it tells.
        if accepted.tls.is_none() && refusing < REFUSALS_AT_ONCE {
            self.tasks.spawn(refuse(accepted.socket, refusal));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_free_files_the_pauses_grow_to_a_bound_and_a_client_that_gave_up_costs_none() {
        let mut pause = Pause::default();
        pause.after(&io::ErrorKind::ConnectionAborted.into());
        assert_eq!(pause.until, None);
        let out_of_files = io::Error::from_raw_os_error(libc::EMFILE);
        let mut lengths = Vec::new();
        for _ in 0..10 {
            pause.after(&out_of_files);
            lengths.extend(pause.length);
            assert!(pause.until.is_some());
        }
        assert_eq!(lengths[0], ACCEPT_PAUSE);
        assert!(lengths.is_sorted(), "{lengths:?}");
        assert_eq!(lengths.last(), Some(&ACCEPT_PAUSE_MOST));
    }
}

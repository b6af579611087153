//! All open connections: owns their tasks, counts them, looks over them.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{Id, JoinSet};

use super::limits::{Limits, REFUSALS_AT_ONCE};
use super::listener::Accepted;
use super::refuse::{Refusal, refuse};
use super::watch::{Clock, Order, Watch};

/// The open connections. Dropping it ends them all.
pub(super) struct Registry {
    limits: Limits,
    pub look_every: Duration,
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
    pub fn new(limits: Limits) -> Self {
        Self {
            look_every: limits.look_every(),
            limits,
            clock: Arc::new(Clock::new()),
            tasks: JoinSet::new(),
            serving: HashMap::new(),
            per_address: HashMap::new(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Connections that are being served.
    pub fn serving(&self) -> usize {
        self.serving.len()
    }

    /// Serves a connection if there is room, else tells the client that there is none.
    ///
    /// A client over the limit is accepted and told so, not left waiting in the kernel: it learns at once what is the
    /// matter and may try elsewhere, where a silent wait looks like a dead agent.
    pub fn admit<F>(&mut self, accepted: Accepted, connection: impl FnOnce(Accepted, Arc<Watch>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let address = accepted.counted_address();
        if let Some(refusal) = self.refusal(address) {
            return self.refuse(accepted, refusal);
        }
        if self.is_empty() {
            // Nobody looked while there was nothing to look at.
            self.clock.advance();
        }
        let watch = Arc::new(Watch::new(self.clock.clone(), &accepted.socket));
        let task = self.tasks.spawn(connection(accepted, watch.clone()));
        if let Some(address) = address {
            *self.per_address.entry(address).or_default() += 1;
        }
        self.serving.insert(task.id(), Serving { watch, address });
    }

    /// Waits for the next connection to end. Does not return while there is none.
    pub async fn ended(&mut self) {
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
    pub fn look(&self) {
        let now = self.clock.advance();
        for Serving { watch, .. } in self.serving.values() {
            match watch.judge(now, self.look_every, &self.limits) {
                Order::Go => {}
                order => watch.order(order),
            }
        }
    }

    /// Tells every connection to finish what it does, then close.
    pub fn finish_all(&self) {
        for Serving { watch, .. } in self.serving.values() {
            watch.order(Order::Finish);
        }
    }

    /// Closes every connection and waits until all tasks ended.
    pub async fn close_all(&mut self) {
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

//! A client of one or many endpoints: it chooses where to ask, waits everywhere at once, and keeps what it was granted.
//!
//! A request on its way: [`Client::request`] → `direct` (asks in the order `balance` gives) or, where nobody has room, `seek`
//! (a place in each endpoint's queue) → [`HeldLease`]. Meanwhile `recovery` watches each endpoint (`place`), whose breaker says
//! whether it is asked at all; for a server that only has statistics the client decides itself, in `books`.

mod balance;
mod books;
mod builder;
mod direct;
mod lease;
mod place;
mod recovery;
mod running;
mod seek;
mod status;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use gpupool_api::RequestBody;
use tokio::time::{Instant, timeout, timeout_at};

pub use balance::ObservedGpu;
pub use builder::ClientBuilder;
pub use gpupool_config::Balancing;
pub use lease::HeldLease;
pub use recovery::{
    CircuitBreakerStats, DegradationLevel, DegradationStatus, EndpointHealthSummary, PoolHealth, RecoveryStatus,
};
pub use status::{
    DetailedMetrics, EndpointDetail, EndpointInfo, EndpointMetrics, FrequentUpdates, GlobalGpu, GpuAssignment,
    LeaseAuthority, LoadBalancerStats, PoolStatus, PoolSummary, StatusUpdate, StatusUpdateStream, UsageThresholds,
};

use direct::{Asked, Wanted};
use place::{Stray, give_back, is_fault};
use running::{Core, Running, Turn, locked};
use seek::Sought;

use crate::limits::{START_GRACE, STOP_PATIENCE};
use crate::{AgentClient, ClientError};

/// Asks one or many endpoints for GPUs. Cheap to clone; clones are the same client. Tasks in the background end when it is
/// stopped, or when its last clone is dropped.
#[derive(Debug, Clone)]
pub struct Client {
    outer: Arc<Outer>,
}

#[derive(Debug)]
struct Outer {
    core: Arc<Core>,
    running: Mutex<Option<Arc<Running>>>,
}

impl Drop for Outer {
    fn drop(&mut self) {
        if let Some(running) = locked(&self.running).take() {
            running.stop();
        }
    }
}

impl Client {
    /// A client to be set up; nothing is taken from the environment.
    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }

    /// A client as the environment and the configuration file have it.
    pub fn from_environment() -> Result<Self, ClientError> {
        ClientBuilder::from_environment()?.build()
    }

    fn new(core: Core) -> Self {
        Self { outer: Arc::new(Outer { core: Arc::new(core), running: Mutex::new(None) }) }
    }

    /// Looks for the endpoints, and begins to watch them. Comes back when all were found or failed, and soon after the first
    /// was found; where none answers, the client runs degraded and goes on looking.
    pub async fn start(&self) -> Result<(), ClientError> {
        let core = &self.outer.core;
        let mut weather = core.weather.follow();
        let before: Vec<u64> = core.places.iter().map(|place| place.known().looks).collect();
        {
            let mut running = locked(&self.outer.running);
            if running.is_some() {
                return Err(ClientError::AlreadyStarted);
            }
            *running = Some(Running::start(core));
        }
        let is_looked_at = |number: usize| core.places[number].known().looks > before[number];
        let latest = Instant::now() + core.settings.endpoint_timeout;
        let mut until = latest;
        loop {
            if (0..core.places.len()).all(is_looked_at) {
                return Ok(());
            }
            if core.is_any_usable() {
                until = until.min(Instant::now() + START_GRACE);
            }
            if timeout_at(until, weather.changed()).await.is_err() {
                return Ok(());
            }
        }
    }

    /// Gives back everything that is held, tells those who wait, and ends all tasks. The client can be started again.
    pub async fn stop(&self) {
        let Some(running) = locked(&self.outer.running).take() else { return };
        running.stop();
        let held: Vec<_> = std::mem::take(&mut *running.live()).into_values().collect();
        // In tasks of their own: what takes longer goes on, and what fails is remembered for the next start.
        for live in held {
            give_back(&running.runtime, &running.places()[live.place], Stray::Lease(live.lease));
        }
        let _ = timeout(STOP_PATIENCE, self.outer.core.returns.none()).await;
    }

    /// Whether it was started.
    pub fn is_started(&self) -> bool {
        locked(&self.outer.running).is_some()
    }

    /// Whether it was told of several endpoints.
    pub fn is_multi_endpoint_mode(&self) -> bool {
        self.outer.core.settings.is_multi_endpoint
    }

    /// Asks for GPUs, and waits until they are granted: at the endpoint the strategy chooses, or at all of them at once where
    /// none has room. `wait_limit_secs` says how long at most, else the client's own limit; `queue: false` does not wait.
    ///
    /// Requests that wait are in the order of these calls, not of the first polls of their futures. Dropping the future takes
    /// the request back from every server, in the background.
    pub fn request(&self, body: RequestBody) -> impl Future<Output = Result<HeldLease, ClientError>> + Send + use<> {
        let (client, turn) = (self.clone(), self.outer.core.turns.take());
        async move { client.ask(turn, body).await }
    }

    async fn ask(&self, turn: Turn, body: RequestBody) -> Result<HeldLease, ClientError> {
        let running = self.running("requesting GPU")?;
        let core = &self.outer.core;
        let _under_way = core.returns.begin();
        core.counts.requests.fetch_add(1, Ordering::Relaxed);
        locked(&core.budget).earn();
        let wanted = Wanted::new(body, &core.settings, core.places.len())?;
        let sought = self.sought(&running, &wanted, turn).await;
        let lease = sought.and_then(|won| HeldLease::new(&running, &wanted, won));
        if let Err(error) = &lease {
            core.counts.failed.fetch_add(1, Ordering::Relaxed);
            tracing::info!(worker_id = %wanted.worker_id, %error, "no GPU assigned");
        }
        lease
    }

    async fn sought(&self, running: &Arc<Running>, wanted: &Wanted, turn: Turn) -> Sought {
        // Whoever comes while others wait does not try to be served before them.
        if running.waiting() == 0 {
            let asked = timeout_at(wanted.deadline, direct::ask_in_turn(running, wanted)).await;
            match asked.map_err(|_| wanted.too_long())? {
                Asked::Granted(won) => return Ok(won),
                Asked::Failed(error) => return Err(error),
                Asked::Full(error) if !wanted.queues => return Err(error.unwrap_or_else(no_room)),
                Asked::Full(_) => {}
            }
        } else if !wanted.queues {
            return Err(no_room());
        }
        let _ = timeout_at(wanted.deadline, turn.comes()).await;
        seek::seek(running, wanted.clone(), turn).await
    }

    /// What happens from now on.
    pub fn updates(&self) -> StatusUpdateStream {
        self.outer.core.telling.follow(Some(self.enable_frequent_updates()))
    }

    /// The same without statistics, assignments and releases: those are told only while somebody else wants everything.
    pub fn infrequent_updates(&self) -> StatusUpdateStream {
        self.outer.core.telling.follow(None)
    }

    /// Has everything told to all who follow, while it lives.
    pub fn enable_frequent_updates(&self) -> FrequentUpdates {
        self.outer.core.telling.frequent_updates()
    }

    /// The client of one endpoint, by its id, its host and port, or its address: for calls that are about that server alone.
    pub fn endpoint(&self, endpoint_id: &str) -> Option<&AgentClient> {
        self.outer.core.place_called(endpoint_id).map(|place| &place.agent)
    }

    /// Gives back a lease by its number on an endpoint: for holders that kept nothing but names. Twice is harmless.
    pub async fn release(&self, endpoint_id: &str, lease: u64) -> Result<(), ClientError> {
        let running = self.running("releasing GPU")?;
        let Some(place) = running.core.place_called(endpoint_id) else {
            return Err(ClientError::NeverGranted { what: format!("lease {lease} of endpoint {endpoint_id:?}") });
        };
        match place.release(lease).await {
            Err(error) if is_fault(&error) => {
                give_back(&running.runtime, place, Stray::Lease(lease));
                Err(error)
            }
            outcome => outcome.map(|_| ()),
        }
    }

    fn running(&self, doing: &'static str) -> Result<Arc<Running>, ClientError> {
        locked(&self.outer.running).clone().ok_or(ClientError::NotStarted { doing })
    }
}

/// What is said where nobody has room, and nobody was asked because of it.
fn no_room() -> ClientError {
    ClientError::refused(409, "no_capacity", "no endpoint has room for it now, and it does not wait".into())
}

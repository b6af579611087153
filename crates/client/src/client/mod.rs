//! Client of one or many endpoints: chooses an endpoint, waits at all of them, and holds what was granted.
//!
//! Path of a request: [`Client::request`] → `direct_request` (in the order of `load_balancer`) or, without capacity,
//! `wait_everywhere` (a place in each `endpoint_queue`) → [`HeldLease`]. Meanwhile `endpoint_poller` polls each
//! endpoint (`endpoint_state`), whose `circuit_breaker` decides whether requests are sent. For a server that only serves
//! statistics the client decides itself, in `client_accounting`.

mod arrival_order;
mod builder;
mod change_notifier;
mod circuit_breaker;
mod client_accounting;
mod direct_request;
mod endpoint_poller;
mod endpoint_queue;
mod endpoint_state;
mod held_lease;
mod load_balancer;
mod orphaned_grants;
mod recovery;
mod running_client;
mod status;
mod wait_everywhere;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use gpupool_api::RequestBody;
use tokio::time::{Instant, timeout, timeout_at};

pub use builder::ClientBuilder;
pub use gpupool_config::Balancing;
pub use held_lease::HeldLease;
pub use load_balancer::ObservedGpu;
pub use recovery::{
    CircuitBreakerStats, DegradationLevel, DegradationStatus, EndpointHealthSummary, PoolHealth, RecoveryStatus,
};
pub use status::{
    DetailedMetrics, EndpointDetail, EndpointInfo, EndpointMetrics, FrequentUpdates, GlobalGpu, GpuAssignment,
    LeaseAuthority, LoadBalancerStats, PoolStatus, PoolSummary, StatusUpdate, StatusUpdateStream, UsageThresholds,
};

use arrival_order::ArrivalTicket;
use direct_request::{DirectOutcome, PreparedRequest};
use endpoint_state::is_fault;
use orphaned_grants::{OrphanedGrant, release_in_background};
use running_client::{ClientCore, RunningClient, lock_unpoisoned};
use wait_everywhere::GrantResult;

use crate::limits::{START_GRACE_PERIOD, STOP_TIME_LIMIT};
use crate::{AgentClient, ClientError};

/// Client of one or many endpoints. Cheap to clone; clones are the same client. Background tasks end when the client is
/// stopped or its last clone is dropped.
#[derive(Debug, Clone)]
pub struct Client {
    handle: Arc<ClientHandle>,
}

#[derive(Debug)]
struct ClientHandle {
    core: Arc<ClientCore>,
    running: Mutex<Option<Arc<RunningClient>>>,
}

impl Drop for ClientHandle {
    fn drop(&mut self) {
        if let Some(running) = lock_unpoisoned(&self.running).take() {
            running.stop();
        }
    }
}

impl Client {
    /// Returns a builder that reads nothing from the environment.
    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }

    /// Creates a client from the environment and the configuration file.
    pub fn from_environment() -> Result<Self, ClientError> {
        ClientBuilder::from_environment()?.build()
    }

    fn new(core: ClientCore) -> Self {
        Self { handle: Arc::new(ClientHandle { core: Arc::new(core), running: Mutex::new(None) }) }
    }

    /// Starts to poll the endpoints. Returns when all have responded or failed, or soon after the first response.
    /// Without a response the client starts degraded and keeps polling.
    pub async fn start(&self) -> Result<(), ClientError> {
        let core = &self.handle.core;
        let mut availability = core.availability.observe();
        let polls_before: Vec<u64> = core.endpoints.iter().map(|endpoint| endpoint.lock_record().polls).collect();
        {
            let mut running = lock_unpoisoned(&self.handle.running);
            if running.is_some() {
                return Err(ClientError::AlreadyStarted);
            }
            *running = Some(RunningClient::start(core));
        }
        let is_polled = |index: usize| core.endpoints[index].lock_record().polls > polls_before[index];
        let latest = Instant::now() + core.settings.endpoint_timeout;
        let mut until = latest;
        loop {
            if (0..core.endpoints.len()).all(is_polled) {
                return Ok(());
            }
            if core.is_any_usable() {
                until = until.min(Instant::now() + START_GRACE_PERIOD);
            }
            if timeout_at(until, availability.changed()).await.is_err() {
                return Ok(());
            }
        }
    }

    /// Releases all leases, fails waiting requests and ends all tasks. The client can be started again.
    pub async fn stop(&self) {
        let Some(running) = lock_unpoisoned(&self.handle.running).take() else { return };
        running.stop();
        let assignments: Vec<_> = std::mem::take(&mut *running.assignments()).into_values().collect();
        // In separate tasks: slow releases continue, and failed ones are remembered for the next start.
        for assignment in assignments {
            let endpoint = &running.endpoints()[assignment.endpoint];
            release_in_background(&running.runtime, endpoint, OrphanedGrant::Lease(assignment.lease));
        }
        let _ = timeout(STOP_TIME_LIMIT, self.handle.core.pending_work.wait_until_idle()).await;
    }

    /// Whether the client is started.
    pub fn is_started(&self) -> bool {
        lock_unpoisoned(&self.handle.running).is_some()
    }

    /// Whether several endpoints were configured.
    pub fn is_multi_endpoint_mode(&self) -> bool {
        self.handle.core.settings.is_multi_endpoint
    }

    /// Requests GPUs and waits until they are granted: at the endpoint chosen by the strategy, or at all of them if
    /// none has capacity. `wait_limit_secs` limits the wait, else the client's own limit; `queue: false` does not wait.
    ///
    /// Waiting requests are ordered by these calls, not by the first polls of their futures. Dropping the future
    /// cancels the request at every server, in the background.
    pub fn request(&self, body: RequestBody) -> impl Future<Output = Result<HeldLease, ClientError>> + Send + use<> {
        let (client, ticket) = (self.clone(), self.handle.core.arrival_order.issue_ticket());
        async move { client.request_in_order(ticket, body).await }
    }

    async fn request_in_order(&self, ticket: ArrivalTicket, body: RequestBody) -> Result<HeldLease, ClientError> {
        let running = self.require_running("requesting GPU")?;
        let core = &self.handle.core;
        let _pending_work = core.pending_work.begin();
        core.counters.requests.fetch_add(1, Ordering::Relaxed);
        lock_unpoisoned(&core.retry_budget).earn();
        let prepared = PreparedRequest::new(body, &core.settings, core.endpoints.len())?;
        let granted = self.find_grant(&running, &prepared, ticket).await;
        let lease = granted.and_then(|grant| HeldLease::new(&running, &prepared, grant));
        if let Err(error) = &lease {
            core.counters.failed.fetch_add(1, Ordering::Relaxed);
            tracing::info!(worker_id = %prepared.worker_id, %error, "no GPU assigned");
        }
        lease
    }

    async fn find_grant(
        &self,
        running: &Arc<RunningClient>,
        prepared: &PreparedRequest,
        ticket: ArrivalTicket,
    ) -> GrantResult {
        // A new request does not try to overtake waiting ones.
        if running.waiting_count() == 0 {
            let direct = timeout_at(prepared.deadline, direct_request::request_directly(running, prepared)).await;
            match direct.map_err(|_| prepared.timeout_error())? {
                DirectOutcome::Granted(grant) => return Ok(grant),
                DirectOutcome::Failed(error) => return Err(error),
                DirectOutcome::NoCapacity(error) if !prepared.may_queue => {
                    return Err(error.unwrap_or_else(no_capacity_error));
                }
                DirectOutcome::NoCapacity(_) => {}
            }
        } else if !prepared.may_queue {
            return Err(no_capacity_error());
        }
        let _ = timeout_at(prepared.deadline, ticket.wait_turn()).await;
        wait_everywhere::wait_everywhere(running, prepared.clone(), ticket).await
    }

    /// Subscribes to all status updates from now on.
    pub fn updates(&self) -> StatusUpdateStream {
        self.handle.core.publisher.subscribe(Some(self.enable_frequent_updates()))
    }

    /// Same as [`Self::updates`] without statistics, assignments and releases, unless another subscriber enables them.
    pub fn infrequent_updates(&self) -> StatusUpdateStream {
        self.handle.core.publisher.subscribe(None)
    }

    /// Enables frequent updates for all subscribers while the returned value lives.
    pub fn enable_frequent_updates(&self) -> FrequentUpdates {
        self.handle.core.publisher.frequent_updates()
    }

    /// Returns the client of one endpoint, given by its id, its host and port, or its address, for calls to that server
    /// alone.
    pub fn endpoint(&self, endpoint_id: &str) -> Option<&AgentClient> {
        self.handle.core.find_endpoint(endpoint_id).map(|endpoint| &endpoint.agent)
    }

    /// Releases a lease by its number on an endpoint, for callers that stored only these names. Idempotent.
    pub async fn release(&self, endpoint_id: &str, lease: u64) -> Result<(), ClientError> {
        let running = self.require_running("releasing GPU")?;
        let Some(endpoint) = running.core.find_endpoint(endpoint_id) else {
            return Err(ClientError::NeverGranted { what: format!("lease {lease} of endpoint {endpoint_id:?}") });
        };
        match endpoint.release(lease).await {
            Err(error) if is_fault(&error) => {
                release_in_background(&running.runtime, endpoint, OrphanedGrant::Lease(lease));
                Err(error)
            }
            outcome => outcome.map(|_| ()),
        }
    }

    fn require_running(&self, doing: &'static str) -> Result<Arc<RunningClient>, ClientError> {
        lock_unpoisoned(&self.handle.running).clone().ok_or(ClientError::NotStarted { doing })
    }
}

/// Returns the refusal of a request that may not wait, if no endpoint was tried.
fn no_capacity_error() -> ClientError {
    ClientError::refused(409, "no_capacity", "no endpoint has capacity now, and the request must not wait".into())
}

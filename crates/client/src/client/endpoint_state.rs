//! State of one endpoint: the side that decides there, its latest snapshot, and its availability.
//!
//! The record lies behind a lock, because status calls are synchronous and read it; the lock is never held across an
//! await. The authority is detected once: if the server decides, the client never starts accounting of its own.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use gpupool_api::RequestBody;
use gpupool_api::lease::{FollowResponse, LeaseBody};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::change_notifier::{ChangeNotifier, PendingWork};
use super::circuit_breaker::{BreakerChange, CircuitBreaker};
use super::client_accounting::ClientAccounting;
use super::load_balancer::{EndpointCandidate, GpuRequirements, GpuSnapshot, ObservedGpu};
use super::orphaned_grants::OrphanedGrant;
use crate::limits::{MAX_ORPHANED_GRANTS, SLOW_POLL_THRESHOLD};
use crate::{AgentClient, ClientError, IdempotencyKey, random};

/// Side that decides which lease gets which GPU.
#[derive(Debug, Clone)]
pub(super) enum EndpointAuthority {
    /// The server.
    Agent,
    /// This client, because the server only serves statistics.
    Client(Arc<ClientAccounting>),
}

#[derive(Debug)]
pub(super) struct EndpointState {
    /// Position among the client's endpoints.
    pub index: usize,
    /// Id of the endpoint.
    pub id: String,
    /// Client of the endpoint, without retries: this client does its own.
    pub agent: AgentClient,
    record: Mutex<EndpointRecord>,
    /// Notified when an endpoint of the client becomes available or unavailable, or was polled.
    availability: Arc<ChangeNotifier>,
    /// Releases in progress.
    pub pending_work: Arc<PendingWork>,
    /// Requests an immediate poll.
    pub poll_now: Notify,
}

/// Mutable record of an endpoint.
#[derive(Debug, Default)]
pub(super) struct EndpointRecord {
    pub breaker: CircuitBreaker,
    pub authority: Option<EndpointAuthority>,
    pub snapshot: Option<GpuSnapshot>,
    /// Exponentially weighted response time.
    pub response_time: Option<Duration>,
    /// Start of the poll in progress.
    pub poll_started: Option<Instant>,
    /// Time of the last response, on both clocks.
    pub last_response: Option<(Instant, SystemTime)>,
    /// Last error since the last success.
    pub last_error: Option<String>,
    /// Status of the last `/health` response.
    pub health: Option<String>,
    /// Direct requests in progress.
    pub in_flight: usize,
    /// Number of requests sent there, and of those granted.
    pub requests: u64,
    pub granted: u64,
    /// Number of finished polls, successful or not.
    pub polls: u64,
    /// Grants that are to be released when the endpoint responds again.
    pub orphans: VecDeque<OrphanedGrant>,
}

impl EndpointState {
    pub(super) fn new(
        index: usize,
        id: String,
        agent: AgentClient,
        availability: Arc<ChangeNotifier>,
        pending_work: Arc<PendingWork>,
    ) -> Self {
        Self { index, id, agent, record: Mutex::default(), availability, pending_work, poll_now: Notify::new() }
    }

    pub(super) fn lock_record(&self) -> MutexGuard<'_, EndpointRecord> {
        // No code panics while it holds the lock; the record would still be usable.
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether requests can be sent now.
    pub(super) fn is_usable(&self) -> bool {
        self.lock_record().is_usable()
    }

    /// Notifies observers of a change.
    pub(super) fn announce_change(&self) {
        self.availability.notify();
    }

    /// Returns the endpoint as a candidate for a request; `None` without capacity or while unavailable.
    pub(super) fn candidate(&self, requirements: &GpuRequirements<'_>, now: Instant) -> Option<EndpointCandidate> {
        let record = self.lock_record();
        let snapshot = record.snapshot.as_ref().filter(|_| record.is_usable())?;
        let available = snapshot.count_matching_gpus(requirements).saturating_sub(record.in_flight);
        (available >= requirements.gpus()).then(|| EndpointCandidate {
            endpoint: self.index,
            total: snapshot.gpus.len(),
            available,
            response_time: record.response_time.unwrap_or_default(),
            traffic_share: record.breaker.traffic_share(now),
            is_suspect: record.is_suspect(now),
        })
    }

    /// Returns the reason for the unavailability.
    pub(super) fn failure_summary(&self) -> String {
        let record = self.lock_record();
        match (&record.last_error, record.breaker.next_probe()) {
            (Some(error), Some(at)) => {
                let probe_in = at.saturating_duration_since(Instant::now()).as_secs();
                format!("{error}; next attempt in {probe_in} s")
            }
            (Some(error), None) => error.clone(),
            (None, _) => "no response yet".into(),
        }
    }

    pub(super) async fn request(&self, body: &RequestBody, key: &IdempotencyKey) -> Result<LeaseBody, ClientError> {
        self.lock_record().requests += 1;
        match self.authority() {
            Some(EndpointAuthority::Client(accounting)) => accounting.request(body, key),
            _ => self.record_outcome_of(self.agent.request_as(body, key)).await,
        }
    }

    pub(super) async fn follow_leases(&self, leases: &[u64], wait: Duration) -> Result<FollowResponse, ClientError> {
        match self.authority() {
            Some(EndpointAuthority::Client(accounting)) => Ok(accounting.follow_leases(leases, wait).await),
            _ => {
                let outcome = self.agent.follow_leases(leases, wait).await;
                // The wait is no measure of the response time.
                self.record_outcome(None, outcome.as_ref().err());
                outcome
            }
        }
    }

    pub(super) async fn confirm(&self, lease: u64, token: u64) -> Result<LeaseBody, ClientError> {
        match self.authority() {
            Some(EndpointAuthority::Client(accounting)) => accounting.confirm(lease, token),
            _ => self.record_outcome_of(self.agent.confirm(lease, token)).await,
        }
    }

    pub(super) async fn renew(&self, lease: u64, token: u64) -> Result<LeaseBody, ClientError> {
        self.record_outcome_of(self.agent.renew(lease, token)).await
    }

    pub(super) async fn release(&self, lease: u64) -> Result<Option<LeaseBody>, ClientError> {
        match self.authority() {
            Some(EndpointAuthority::Client(accounting)) => Ok(accounting.release(lease)),
            _ => self.record_outcome_of(self.agent.release(lease)).await,
        }
    }

    pub(super) fn authority(&self) -> Option<EndpointAuthority> {
        self.lock_record().authority.clone()
    }

    /// Whether this client decides there.
    pub(super) fn has_client_accounting(&self) -> bool {
        matches!(self.authority(), Some(EndpointAuthority::Client(_)))
    }

    /// Remembers a grant that is to be released when the endpoint responds again.
    pub(super) fn remember_orphan(&self, orphan: OrphanedGrant) {
        let mut record = self.lock_record();
        if record.orphans.len() >= MAX_ORPHANED_GRANTS {
            // The oldest one has most likely expired.
            record.orphans.pop_front();
        }
        record.orphans.push_back(orphan);
    }

    /// Adjusts counters and snapshot for a lease granted to, or no longer held by, this client.
    pub(super) fn record_assignment(&self, lease: &LeaseBody, is_granted: bool) {
        let mut record = self.lock_record();
        record.granted += u64::from(is_granted);
        if let Some(snapshot) = &mut record.snapshot {
            for device in &lease.devices {
                snapshot.adjust_promises(device.gpu_id, device.fraction, device.memory_mib.unwrap_or(0), is_granted);
            }
        }
    }

    /// Returns the GPUs of the latest snapshot.
    pub(super) fn gpus(&self) -> Vec<ObservedGpu> {
        self.lock_record().snapshot.as_ref().map(|snapshot| snapshot.gpus.clone()).unwrap_or_default()
    }

    async fn record_outcome_of<T>(&self, call: impl Future<Output = Result<T, ClientError>>) -> Result<T, ClientError> {
        let began = Instant::now();
        let outcome = call.await;
        self.record_outcome(Some(began), outcome.as_ref().err());
        outcome
    }

    /// Records the outcome of a call; a refusal counts as a success.
    pub(super) fn record_outcome(&self, began: Option<Instant>, error: Option<&ClientError>) {
        let now = Instant::now();
        let fault = error.filter(|error| is_fault(error));
        let mut record = self.lock_record();
        let change = match fault {
            Some(error) => {
                record.last_error = Some(error.to_string());
                record.breaker.record_failure(now, random::random_fraction())
            }
            None => {
                record.last_error = None;
                record.last_response = Some((now, SystemTime::now()));
                if let Some(began) = began {
                    record.record_response_time(now.duration_since(began));
                }
                record.breaker.record_success(now)
            }
        };
        let authority = record.authority.clone();
        drop(record);
        match change {
            BreakerChange::None => return,
            BreakerChange::Opened => {
                tracing::warn!(endpoint_id = self.id, error = ?fault.map(ToString::to_string), "circuit breaker opened");
                if let Some(EndpointAuthority::Client(accounting)) = authority {
                    accounting.suspend_grants();
                }
                // The poller waits until the next probe.
                self.poll_now.notify_one();
            }
            BreakerChange::Closed => {
                tracing::info!(endpoint_id = self.id, "circuit breaker closed")
            }
        }
        self.announce_change();
    }
}

impl EndpointRecord {
    pub(super) fn is_usable(&self) -> bool {
        self.authority.is_some() && self.breaker.is_closed()
    }

    /// Whether the endpoint failed last or is slow to respond: tried only if no other endpoint is left.
    fn is_suspect(&self, now: Instant) -> bool {
        let is_late = self.poll_started.is_some_and(|since| now.duration_since(since) > SLOW_POLL_THRESHOLD);
        is_late || self.breaker.consecutive_failures > 0
    }

    fn record_response_time(&mut self, elapsed: Duration) {
        self.response_time = Some(match self.response_time {
            Some(before) => before.mul_f64(0.8) + elapsed.mul_f64(0.2),
            None => elapsed,
        });
    }
}

/// Whether an error is a fault of the endpoint; any other error is a regular response.
pub(super) fn is_fault(error: &ClientError) -> bool {
    match error {
        ClientError::Unreachable { .. } | ClientError::Timeout { .. } => true,
        ClientError::Problem(problem) => problem.status >= 500,
        // A page or a truncated body in place of a response is a fault; a clear refusal by another kind of server (401,
        // 404) is not.
        ClientError::NotAnAgent { status, .. } => !(400..500).contains(status),
        _ => false,
    }
}

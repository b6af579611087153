//! Direct requests: prepares a request and tries the endpoints one by one for an immediate grant.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::lease::{LeaseBody, LeaseState};
use gpupool_core::Request;
use tokio::time::{Instant, timeout};

use super::builder::ClientSettings;
use super::endpoint_state::{EndpointState, is_fault};
use super::load_balancer::GpuRequirements;
use super::orphaned_grants::{OrphanedGrant, release_in_background};
use super::running_client::{RunningClient, lock_unpoisoned};
use super::status::StatusUpdate;
use super::wait_everywhere::{EndpointGrant, refusal_relevance};
use crate::limits::{DIRECT_REQUEST_TIMEOUT, MAX_RETRY_BUDGET, MAX_ROUND_PAUSE, MIN_ROUND_PAUSE, REQUESTS_PER_RETRY};
use crate::random::Backoff;
use crate::{ClientError, IdempotencyKey, random};

/// A request with all defaults filled in.
#[derive(Debug, Clone)]
pub(super) struct PreparedRequest {
    /// Body as it is sent to agents.
    pub body: Arc<RequestBody>,
    pub worker_id: Arc<str>,
    pub requested_at: Instant,
    pub deadline: Instant,
    /// Whether the request may wait in a queue.
    pub may_queue: bool,
    is_blocked: bool,
}

impl PreparedRequest {
    /// Fills in the client's settings and refuses what no server would accept.
    pub(super) fn new(mut body: RequestBody, settings: &ClientSettings, endpoints: usize) -> Result<Self, ClientError> {
        body.memory_threshold.get_or_insert(settings.memory_threshold);
        body.utilization_threshold.get_or_insert(settings.utilization_threshold);
        let worker_id = body.worker_id.get_or_insert_with(new_worker_id).clone();
        let requested_at = Instant::now();
        let limit = body.wait_limit_secs.take().map_or(Ok(settings.worker_timeout), |secs| {
            Duration::try_from_secs_f64(secs).map_err(|_| {
                ClientError::invalid("wait_limit_secs", &secs.to_string(), "a number of seconds that is not negative")
            })
        })?;
        let may_queue = body.queue.take().unwrap_or(true);
        if body.max_duration_secs.is_none() {
            body.max_duration_secs = settings.stale_age.map(|age| age.as_secs_f64());
        }
        body.wait_secs = None;
        body.hedged = endpoints > 1;
        Request::try_from(body.clone())
            .map_err(|error| ClientError::invalid(error.field, &error.value, error.allowed))?;
        // An instant cannot represent every limit; a year exceeds any real wait.
        let deadline = requested_at.checked_add(limit).unwrap_or(requested_at + Duration::from_secs(86_400 * 365));
        Ok(Self { body: Arc::new(body), worker_id, requested_at, deadline, may_queue, is_blocked: false })
    }

    /// Returns the same request for an immediate, active grant or none.
    pub(super) fn immediate_body(&self) -> Arc<RequestBody> {
        Arc::new(RequestBody { queue: Some(false), hedged: false, ..(*self.body).clone() })
    }

    pub(super) fn timeout_error(&self) -> ClientError {
        ClientError::WaitedTooLong { worker_id: self.worker_id.to_string(), after: self.deadline - self.requested_at }
    }

    /// Marks the request as waiting and reports that once.
    pub(super) fn mark_blocked(&mut self, running: &RunningClient, endpoint: usize) {
        if std::mem::replace(&mut self.is_blocked, true) {
            return;
        }
        let endpoint_id = running.endpoints()[endpoint].id.clone();
        tracing::info!(worker_id = %self.worker_id, endpoint_id, "worker blocked: waiting for a GPU");
        running.publish(StatusUpdate::Blocked { worker_id: self.worker_id.to_string() });
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked
    }
}

/// Returns a name that is unique within this process.
fn new_worker_id() -> Arc<str> {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    format!("worker-{}-{number}", std::process::id()).into()
}

// A direct request takes one call if the first endpoint can grant it. If it is dropped half way, a possible grant is
// requested again under its key and released.

/// Outcome of a direct request.
pub(super) enum DirectOutcome {
    Granted(EndpointGrant),
    /// No endpoint has capacity now; the request may wait.
    NoCapacity(Option<ClientError>),
    /// No endpoint will ever grant the request, or none is available.
    Failed(ClientError),
}

/// Tries endpoints in the order of the strategy. After a fault the next endpoint follows, and after the last one
/// another round.
pub(super) async fn request_directly(running: &Arc<RunningClient>, prepared: &PreparedRequest) -> DirectOutcome {
    let mut backoff = Backoff::with_bounds(MIN_ROUND_PAUSE, MAX_ROUND_PAUSE);
    let body = prepared.immediate_body();
    let mut rounds = 0;
    loop {
        let last_error = match try_endpoints(running, &body).await {
            Ok(outcome) => return outcome,
            Err(error) => error,
        };
        rounds += 1;
        let may_retry = rounds <= running.core.settings.max_retries && running.core.is_any_usable();
        if !may_retry || !lock_unpoisoned(&running.core.retry_budget).spend() {
            return DirectOutcome::Failed(last_error);
        }
        tokio::time::sleep(backoff.next_pause()).await;
    }
}

/// Tries each endpoint once. An error means that every endpoint with capacity failed.
async fn try_endpoints(running: &Arc<RunningClient>, body: &Arc<RequestBody>) -> Result<DirectOutcome, ClientError> {
    let order = match choose_order(running, body) {
        Some(order) if order.is_empty() => return Ok(DirectOutcome::NoCapacity(None)),
        Some(order) => order,
        None => return Ok(DirectOutcome::Failed(running.unavailable_error())),
    };
    let (mut no_capacity, mut refusal, mut fault) = (None, None, None);
    for (position, index) in order.iter().enumerate() {
        let endpoint = &running.endpoints()[*index];
        let is_last = position + 1 == order.len();
        let since = Instant::now();
        match try_endpoint(running, endpoint, body, is_last).await {
            Ok(lease) => {
                if position > 0 {
                    lock_unpoisoned(&running.core.balancer).charge_instead(order[0], *index);
                }
                let grant =
                    EndpointGrant { endpoint: endpoint.clone(), lease: Box::new(lease), since, was_blocked: false };
                return Ok(DirectOutcome::Granted(grant));
            }
            Err(error) if error.code() == Some("no_capacity") => {
                // The snapshot showed capacity: poll again. With a single agent the snapshot was not consulted.
                if running.endpoints().len() > 1 || endpoint.has_client_accounting() {
                    endpoint.poll_now.notify_one();
                }
                no_capacity = Some(error);
            }
            Err(error) if is_fault(&error) || error.is_transient() => fault = Some(error),
            Err(error) => refusal = [refusal, Some(error)].into_iter().flatten().max_by_key(refusal_relevance),
        }
    }
    match (no_capacity, refusal, fault) {
        (Some(no_capacity), ..) => Ok(DirectOutcome::NoCapacity(Some(no_capacity))),
        // Other endpoints may grant the request later: the request waits for them.
        (None, Some(_), _) if order.len() < running.endpoints().len() => Ok(DirectOutcome::NoCapacity(None)),
        (None, Some(refusal), _) => Ok(DirectOutcome::Failed(refusal)),
        (None, None, Some(fault)) => Err(fault),
        (None, None, None) => Ok(DirectOutcome::NoCapacity(None)),
    }
}

/// Returns the order of endpoints to try; `None` if none is available.
fn choose_order(running: &RunningClient, body: &RequestBody) -> Option<Vec<usize>> {
    if let [only] = running.endpoints() {
        // A single endpoint knows its capacity best.
        return only.is_usable().then(|| vec![0]);
    }
    let (needs, now) = (GpuRequirements::for_request(body), Instant::now());
    let candidates: Vec<_> = running.endpoints().iter().filter_map(|state| state.candidate(&needs, now)).collect();
    if candidates.is_empty() {
        return running.core.is_any_usable().then(Vec::new);
    }
    Some(lock_unpoisoned(&running.core.balancer).order(candidates, random::random_fraction))
}

async fn try_endpoint(
    running: &RunningClient,
    endpoint: &Arc<EndpointState>,
    body: &Arc<RequestBody>,
    is_last: bool,
) -> Result<LeaseBody, ClientError> {
    let key = IdempotencyKey::random();
    endpoint.lock_record().in_flight += 1;
    let mut in_flight = InFlightRequest { running, endpoint, body, key: &key, is_settled: false };
    let response = endpoint.request(body, &key);
    let outcome = if is_last {
        response.await
    } else {
        // An endpoint that hangs is skipped if another one can grant the request.
        timeout(DIRECT_REQUEST_TIMEOUT, response)
            .await
            .unwrap_or_else(|_| Err(endpoint.agent.timeout(DIRECT_REQUEST_TIMEOUT)))
    };
    match outcome {
        Ok(lease) if lease.state == LeaseState::Active => {
            in_flight.is_settled = true;
            Ok(lease)
        }
        // The grant has already ended, or the server ignores `queue: false`.
        Ok(lease) => Err(ClientError::Ended(Box::new(lease))),
        Err(error) => {
            in_flight.is_settled = !is_fault(&error);
            if matches!(&error, ClientError::Timeout { after, .. } if *after == DIRECT_REQUEST_TIMEOUT) {
                endpoint.record_outcome(None, Some(&error));
            }
            Err(error)
        }
    }
}

/// A request whose outcome is unknown: unless settled, a possible grant is released on drop.
struct InFlightRequest<'a> {
    running: &'a RunningClient,
    endpoint: &'a Arc<EndpointState>,
    body: &'a Arc<RequestBody>,
    key: &'a IdempotencyKey,
    /// Whether the outcome is known.
    is_settled: bool,
}

impl Drop for InFlightRequest<'_> {
    fn drop(&mut self) {
        let mut record = self.endpoint.lock_record();
        record.in_flight = record.in_flight.saturating_sub(1);
        drop(record);
        if !self.is_settled {
            let orphan = OrphanedGrant::Unanswered(self.body.clone(), self.key.clone());
            release_in_background(&self.running.runtime, self.endpoint, orphan);
        }
    }
}

/// Budget of retries, as a fraction of the requests, so that failing servers do not get more requests than healthy
/// ones.
#[derive(Debug)]
pub(super) struct RetryBudget {
    credit: u32,
}

impl RetryBudget {
    pub(super) fn new() -> Self {
        Self { credit: MAX_RETRY_BUDGET * REQUESTS_PER_RETRY }
    }

    /// Adds a part of a retry for a new request.
    pub(super) fn earn(&mut self) {
        self.credit = (self.credit + 1).min(MAX_RETRY_BUDGET * REQUESTS_PER_RETRY);
    }

    /// Spends one retry if the budget allows it.
    pub(super) fn spend(&mut self) -> bool {
        let credit = self.credit.checked_sub(REQUESTS_PER_RETRY);
        self.credit = credit.unwrap_or(self.credit);
        credit.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_retry_budget_is_a_fraction_of_the_requests() {
        let mut retry_budget = RetryBudget::new();
        let at_once = (0..1_000).filter(|_| retry_budget.spend()).count();
        assert_eq!(at_once, MAX_RETRY_BUDGET as usize);
        (0..100).for_each(|_| retry_budget.earn());
        let earned = (0..1_000).filter(|_| retry_budget.spend()).count();
        assert_eq!(earned, 100 / REQUESTS_PER_RETRY as usize);
    }
}

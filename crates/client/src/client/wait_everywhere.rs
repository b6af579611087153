//! Waiting at every endpoint at once, such that at most one lease ever becomes active.
//!
//! The request has a place in each endpoint's queue. A grant arrives as an offer, which has no effect until it is
//! confirmed. One confirmation is in progress at a time, and its outcome is known before the next one is sent. The
//! request then leaves the other queues, so that their offers go to the next waiters. The task ends with its request:
//! granted, refused or cancelled.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use gpupool_api::lease::{LeaseBody, LeaseState};
use gpupool_core::limits::OFFER_LIFETIME;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

use super::arrival_order::ArrivalTicket;
use super::change_notifier::PendingWorkGuard;
use super::direct_request::PreparedRequest;
use super::endpoint_queue::{EVENTS_PER_ENDPOINT, EndpointWaiter, QueueCommand, WaiterEvent, WaiterEventKind};
use super::endpoint_state::{EndpointState, is_fault};
use super::orphaned_grants::{OrphanedGrant, release_in_background};
use super::running_client::{RunningClient, WaitPermit, sleep_until_some};
use crate::ClientError;
use crate::limits::{AGENT_AWAY_LIMIT, CONFIRM_TIMEOUT, MAX_CLOCK_SLOWDOWN};
use crate::random::Backoff;

/// A grant and its endpoint.
#[derive(Debug)]
pub(super) struct EndpointGrant {
    pub endpoint: Arc<EndpointState>,
    pub lease: Box<LeaseBody>,
    /// Earliest start of the lease: its first ttl counts from here.
    pub since: Instant,
    /// Whether the request was reported as waiting.
    pub was_blocked: bool,
}

pub(super) type GrantResult = Result<EndpointGrant, ClientError>;

/// Waits in a task of its own, so that the caller can cancel at any instant.
pub(super) async fn wait_everywhere(
    running: &Arc<RunningClient>,
    prepared: PreparedRequest,
    ticket: ArrivalTicket,
) -> GrantResult {
    let (result_sender, result_receiver) = oneshot::channel();
    let (deadline, too_long) = (prepared.deadline, prepared.timeout_error());
    let stopped_error = ClientError::NotStarted { doing: "requesting GPU" };
    let mut stopping = running.observe_stop();
    let wait_permit = tokio::select! {
        biased;
        wait_permit = running.acquire_wait_permit() => wait_permit,
        () = stopping.changed() => return Err(stopped_error),
        () = tokio::time::sleep_until(deadline) => return Err(too_long),
    };
    let hedged_wait = HedgedWait::enter_queues(running.clone(), prepared, wait_permit);
    // The request is queued: later ones may enter.
    drop(ticket);
    // Ends with the request: `HedgedWait::run` notices that the receiver is gone.
    running.runtime.spawn(async move { hedged_wait.run(result_sender).await });
    // The task may be waiting for the outcome of a confirmation; the caller need not.
    tokio::select! {
        biased;
        granted = result_receiver => granted.unwrap_or(Err(stopped_error)),
        () = stopping.changed() => Err(stopped_error),
        () = tokio::time::sleep_until(deadline) => Err(too_long),
    }
}

struct HedgedWait {
    running: Arc<RunningClient>,
    prepared: PreparedRequest,
    id: u64,
    events: mpsc::Receiver<WaiterEvent>,
    wait_permit: WaitPermit,
    refusals: BTreeMap<usize, ClientError>,
    /// Offers that arrived during a confirmation.
    offers: VecDeque<(usize, LeaseBody, Instant)>,
    /// Instant since which no endpoint is available.
    unavailable_since: Option<Instant>,
    /// Held until the request has left every queue.
    _pending_work: PendingWorkGuard,
}

impl HedgedWait {
    fn enter_queues(running: Arc<RunningClient>, prepared: PreparedRequest, wait_permit: WaitPermit) -> Self {
        // Capacity for every possible event: an endpoint queue never blocks on a waiter.
        let (event_sender, events) = mpsc::channel(EVENTS_PER_ENDPOINT * running.endpoints().len().max(1));
        // Entered under one lock, so that two requests have the same order in every queue.
        let waiter = |id| EndpointWaiter {
            id,
            body: prepared.body.clone(),
            event_sender: event_sender.clone(),
            _wait_permit: wait_permit.clone(),
        };
        let id = running.enter_queues(waiter);
        let _pending_work = running.core.pending_work.begin();
        let (refusals, offers) = (BTreeMap::new(), VecDeque::new());
        Self { running, prepared, id, events, wait_permit, refusals, offers, unavailable_since: None, _pending_work }
    }

    async fn run(mut self, mut result_sender: oneshot::Sender<GrantResult>) {
        let mut availability = self.running.core.availability.observe();
        let mut stopping = self.running.observe_stop();
        let granted = loop {
            if let Some((endpoint, lease, since)) = self.offers.pop_front() {
                let claimed = tokio::select! {
                    biased;
                    // The lease of a confirmation in progress is released when the request leaves the queue.
                    () = result_sender.closed() => return,
                    claimed = self.claim_offer(endpoint, lease, since) => claimed,
                };
                match claimed {
                    Some(grant) => break Ok(grant),
                    None => continue,
                }
            }
            availability.mark_seen();
            self.unavailable_since =
                if self.has_candidate() { None } else { self.unavailable_since.or_else(|| Some(Instant::now())) };
            let give_up_at = self.unavailable_since.map(|since| since + AGENT_AWAY_LIMIT);
            tokio::select! {
                biased;
                () = result_sender.closed() => return,
                () = stopping.changed() => break Err(ClientError::NotStarted { doing: "requesting GPU" }),
                event = self.events.recv() => match event {
                    Some(event) => self.handle_event(event),
                    None => break Err(ClientError::NotStarted { doing: "requesting GPU" }),
                },
                () = tokio::time::sleep_until(self.prepared.deadline) => break Err(self.prepared.timeout_error()),
                () = sleep_until_some(give_up_at) => break Err(self.running.unavailable_error()),
                () = availability.changed() => {}
            }
            if self.refusals.len() == self.running.endpoints().len() {
                break Err(self.most_relevant_refusal());
            }
        };
        let winner = granted.as_ref().ok().map(|grant| grant.endpoint.index);
        self.running.leave_queues(self.id, winner, &self.wait_permit);
        if let Err(Ok(grant)) = result_sender.send(granted) {
            release_in_background(&self.running.runtime, &grant.endpoint, OrphanedGrant::Lease(grant.lease.id));
        }
    }

    fn handle_event(&mut self, WaiterEvent { endpoint, kind }: WaiterEvent) {
        match kind {
            WaiterEventKind::Waiting => self.prepared.mark_blocked(&self.running, endpoint),
            WaiterEventKind::Granted(lease, since) => self.offers.push_back((endpoint, *lease, since)),
            WaiterEventKind::Refused(error) => {
                self.refusals.insert(endpoint, error);
            }
        }
    }

    /// Confirms an offer. Returns only when the offer is certainly confirmed or certainly gone.
    async fn claim_offer(&mut self, index: usize, offered: LeaseBody, since: Instant) -> Option<EndpointGrant> {
        let endpoint = self.running.endpoints()[index].clone();
        let Some(token) = offered.token else { return self.requeue(index) };
        let ttl = Duration::try_from_secs_f64(offered.ttl_secs).unwrap_or(AGENT_AWAY_LIMIT);
        let is_offer = offered.state == LeaseState::Offered;
        if !is_offer && (endpoint.has_client_accounting() || since.elapsed() < ttl / 3) {
            return Some(self.granted_by(endpoint, offered, since));
        }
        let began = Instant::now();
        let mut backoff = Backoff::default();
        let settled_at = began + offer_expiry_bound(ttl);
        loop {
            let sent = Instant::now();
            let confirmed = match is_offer {
                true => timeout(CONFIRM_TIMEOUT, endpoint.confirm(offered.id, token)).await,
                // Active for longer than a third of its ttl: only a renewal shows whether it still is.
                false => timeout(CONFIRM_TIMEOUT, endpoint.renew(offered.id, token)).await,
            };
            match confirmed {
                Ok(Ok(lease)) if lease.state == LeaseState::Active => {
                    // If the confirmation was sent again, the first one may have succeeded.
                    return Some(self.granted_by(endpoint, lease, if is_offer { began } else { sent }));
                }
                Ok(Ok(lease)) if lease.state.is_ended() => break,
                Ok(Err(error)) if error.is_lease_lost() => {
                    tracing::debug!(endpoint_id = endpoint.id, %error, "an offer could not be confirmed");
                    break;
                }
                _ if Instant::now() >= settled_at => {
                    release_in_background(&self.running.runtime, &endpoint, OrphanedGrant::Lease(offered.id));
                    break;
                }
                _ => backoff.pause_until(settled_at).await,
            }
        }
        self.requeue(index)
    }

    fn requeue(&self, index: usize) -> Option<EndpointGrant> {
        self.running.send_command(index, QueueCommand::Requeue(self.id));
        None
    }

    fn granted_by(&self, endpoint: Arc<EndpointState>, lease: LeaseBody, since: Instant) -> EndpointGrant {
        EndpointGrant { endpoint, lease: Box::new(lease), since, was_blocked: self.prepared.is_blocked() }
    }

    /// Whether any available endpoint has not refused the request.
    fn has_candidate(&self) -> bool {
        let endpoints = self.running.endpoints().iter();
        endpoints.filter(|endpoint| !self.refusals.contains_key(&endpoint.index)).any(|endpoint| endpoint.is_usable())
    }

    /// Returns the most relevant refusal: preferably one about the request itself.
    fn most_relevant_refusal(&mut self) -> ClientError {
        let refusals = std::mem::take(&mut self.refusals);
        refusals.into_values().max_by_key(refusal_relevance).unwrap_or_else(|| self.running.unavailable_error())
    }
}

impl Drop for HedgedWait {
    fn drop(&mut self) {
        // The request was cancelled, or the runtime is ending: then the queue tasks end too, and the servers drop
        // requests that are not followed.
        self.running.leave_queues(self.id, None, &self.wait_permit);
    }
}

/// Returns the time after which an offer is over regardless of the outcome of its confirmation: the confirmation may
/// arrive until the offer expires, and the lease then lives for its ttl, by a clock that may be slower than this one.
fn offer_expiry_bound(ttl: Duration) -> Duration {
    (Duration::from_millis(OFFER_LIFETIME.0) + ttl).mul_f64(MAX_CLOCK_SLOWDOWN)
}

/// Returns the relevance of a refusal to the request.
pub(super) fn refusal_relevance(error: &ClientError) -> u8 {
    match error.code() {
        Some("invalid" | "unsatisfiable" | "policy") => 3,
        Some(_) => 2,
        None if is_fault(error) => 0,
        None => 1,
    }
}

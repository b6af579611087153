//! A lease slot: requests a lease, waits in the queue, binds the lease to this process, and starts over if it is lost.
//!
//! One task per slot. It ends when the manager stops, after releasing its lease, or when the agent refuses the request
//! permanently.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex};

use gpupool_api::RequestBody;
use gpupool_api::lease::{AttachBody, LeaseBody, RevocationAction};
use gpupool_client::limits::{LOCAL_RELEASE_PATIENCE, WAIT_POLL_INTERVAL};
use gpupool_client::local::{LeaseBinding, LeaseNotice, LocalAgent};
use gpupool_client::{ClientError, IdempotencyKey, LeaseGuard, WaitOptions, WaitProgress};
use gpupool_confine::lock;
use tokio::sync::watch;
use tokio::time::Instant;

use super::events::GpuEventSender;
use super::{GpuEvent, GrantedLease};
use crate::limits::{AGENT_RETRY_PAUSE, SHORT_LEASE};

/// Causes for which the agent drops a request that was not renewed in time.
const LAPSED_REQUEST_CAUSES: [&str; 3] = ["abandoned", "offer_lapsed", "ttl_passed"];

/// One lease slot.
pub(super) struct LeaseSlot {
    pub number: usize,
    pub agent: LocalAgent,
    pub body: RequestBody,
    pub registry: LeaseRegistry,
    /// Closed when everything must be released.
    pub stop: watch::Receiver<()>,
}

/// Result of a step.
enum SlotStep<T> {
    Continue(T),
    /// The lease must be requested again.
    Retry,
    /// The slot ends; holds a lease that could not be released.
    Stop(Option<u64>),
}

impl LeaseSlot {
    /// Runs the slot until the manager stops. Returns a lease that could not be released because the agent is away.
    pub(super) async fn run(mut self) -> Option<u64> {
        loop {
            let requested_at = Instant::now();
            let next = match self.request_lease().await {
                SlotStep::Continue(guard) => self.hold_lease(guard).await,
                SlotStep::Retry => SlotStep::Retry,
                SlotStep::Stop(unreleased) => SlotStep::Stop(unreleased),
            };
            if let SlotStep::Stop(unreleased) = next {
                return unreleased;
            }
            if requested_at.elapsed() < SHORT_LEASE && self.pause_before_retry().await.is_none() {
                return None;
            }
        }
    }

    /// Requests a lease and waits for the grant.
    async fn request_lease(&mut self) -> SlotStep<LeaseGuard> {
        let key = IdempotencyKey::random();
        let mut last_text = String::new();
        loop {
            let (client, registry, slot) = (self.agent.client().clone(), &self.registry, self.number);
            let options = WaitOptions { key: Some(key.clone()), refresh: WAIT_POLL_INTERVAL };
            let mut waits = |text: String| {
                if text != last_text {
                    last_text.clone_from(&text);
                    registry.send_event(GpuEvent::Waiting { slot, text });
                }
            };
            let progress = |progress: WaitProgress| waits(progress.to_string());
            let waiting = client.wait_until_granted(self.body.clone(), options, progress);
            let error = tokio::select! {
                biased;
                () = wait_for_stop(&mut self.stop) => {
                    client.cancel_request(&self.body, &key).await;
                    return SlotStep::Stop(None);
                }
                granted = waiting => match granted {
                    Ok(guard) => return SlotStep::Continue(guard),
                    Err(error) => error,
                },
            };
            if !error.is_transient() {
                return self.handle_refusal(&error);
            }
            waits(error.to_string());
            if self.pause_before_retry().await.is_none() {
                client.cancel_request(&self.body, &key).await;
                return SlotStep::Stop(None);
            }
        }
    }

    fn handle_refusal<T>(&self, error: &ClientError) -> SlotStep<T> {
        if let ClientError::Ended(lease) = error
            && lease.cause.as_deref().is_some_and(|cause| LAPSED_REQUEST_CAUSES.contains(&cause))
        {
            return SlotStep::Retry;
        }
        self.registry.send_event(GpuEvent::Refused { slot: self.number, why: error.to_string() });
        SlotStep::Stop(None)
    }

    /// Holds the lease until it is lost or the manager stops.
    async fn hold_lease(&mut self, guard: LeaseGuard) -> SlotStep<()> {
        let lease = guard.lease();
        let mut binding = match self.bind_lease(&guard, &lease).await {
            SlotStep::Continue(binding) => binding,
            SlotStep::Retry => return SlotStep::Retry,
            SlotStep::Stop(_) => {
                guard.detach();
                return SlotStep::Stop(self.release_lease(lease.id).await);
            }
        };
        guard.detach();
        let (id, is_bound_to_process) = (lease.id, binding.is_bound_to_process());
        self.registry.record_grant(HeldGrant { granted: GrantedLease::new(self.number, lease), is_bound_to_process });
        let lost = tokio::select! {
            biased;
            () = wait_for_stop(&mut self.stop) => None,
            why = binding.wait_until_lost(|notice| self.registry.record_notice(self.number, notice)) => Some(why),
        };
        match lost {
            Some(why) => {
                self.registry.record_loss(self.number, why);
                SlotStep::Retry
            }
            None => {
                self.registry.forget_grant(self.number);
                SlotStep::Stop(self.release_lease(id).await)
            }
        }
    }

    /// Binds the lease to this process. The guard renews it meanwhile.
    async fn bind_lease(&mut self, guard: &LeaseGuard, lease: &LeaseBody) -> SlotStep<LeaseBinding> {
        // A revoked lease must end its workers only, because this process holds other leases, too.
        let body = AttachBody { on_revocation: RevocationAction::EndJobs, ..AttachBody::default() };
        loop {
            let error = tokio::select! {
                biased;
                () = wait_for_stop(&mut self.stop) => return SlotStep::Stop(None),
                tied = self.agent.bind_lease(lease, body.clone()) => match tied {
                    Ok((binding, _)) => return SlotStep::Continue(binding),
                    Err(error) => error,
                },
            };
            if error.is_lease_lost() || guard.loss().is_some() {
                return SlotStep::Retry;
            }
            if !error.is_transient() {
                self.registry.send_event(GpuEvent::Refused { slot: self.number, why: error.to_string() });
                return SlotStep::Stop(None);
            }
            if self.pause_before_retry().await.is_none() {
                return SlotStep::Stop(None);
            }
        }
    }

    /// Releases the lease. Returns its id if the agent is away.
    async fn release_lease(&self, lease: u64) -> Option<u64> {
        let error = self.agent.client().release_within(lease, LOCAL_RELEASE_PATIENCE).await.err()?;
        self.registry.send_event(GpuEvent::Note(format!(
            "lease {lease} could not be released ({error}); it ends with this process"
        )));
        error.is_transient().then_some(lease)
    }

    /// Pauses before a retry. Returns `None` if the manager stops.
    async fn pause_before_retry(&mut self) -> Option<()> {
        tokio::select! {
            biased;
            () = wait_for_stop(&mut self.stop) => None,
            () = tokio::time::sleep(AGENT_RETRY_PAUSE) => Some(()),
        }
    }
}

/// Waits until the manager stops.
pub(super) async fn wait_for_stop(stop: &mut watch::Receiver<()>) {
    // The channel carries no message; it closes.
    let _ = stop.changed().await;
}

// Shared state of all slots of a run: held leases, and the event sender.

/// Registry of held leases. A lock instead of messages, because it is held only briefly and all slots are tasks of one
/// thread.
#[derive(Clone)]
pub(super) struct LeaseRegistry(Arc<Mutex<RegistryState>>);

struct RegistryState {
    events: GpuEventSender,
    held: Vec<Option<HeldGrant>>,
    /// Slots that cannot reach the agent.
    away: BTreeSet<usize>,
}

/// A lease that is held now.
#[derive(Debug, Clone)]
pub(super) struct HeldGrant {
    pub granted: GrantedLease,
    /// Whether the agent watches this process.
    pub is_bound_to_process: bool,
}

impl LeaseRegistry {
    pub(super) fn new(slots: usize, events: GpuEventSender) -> Self {
        Self(Arc::new(Mutex::new(RegistryState { events, held: vec![None; slots], away: BTreeSet::new() })))
    }

    /// Returns the held leases by slot.
    pub(super) fn held(&self) -> Vec<Option<HeldGrant>> {
        lock(&self.0).held.clone()
    }

    pub(super) fn send_event(&self, event: GpuEvent) {
        lock(&self.0).events.send(event);
    }

    pub(super) fn record_grant(&self, held: HeldGrant) {
        let (slot, granted) = (held.granted.slot, held.granted.clone());
        let mut state = lock(&self.0);
        state.held[slot] = Some(held);
        state.events.send(GpuEvent::Granted(granted));
    }

    pub(super) fn record_loss(&self, slot: usize, why: String) {
        // The agent that reported the loss is reachable.
        self.record_notice(slot, LeaseNotice::AgentReturned);
        let mut state = lock(&self.0);
        state.held[slot] = None;
        state.events.send(GpuEvent::Lost { slot, why });
    }

    /// Removes the grant before its release, so that no worker starts on it.
    pub(super) fn forget_grant(&self, slot: usize) {
        lock(&self.0).held[slot] = None;
    }

    /// Sends a notice about a lease, and only once if all slots receive it.
    pub(super) fn record_notice(&self, slot: usize, notice: LeaseNotice) {
        let mut state = lock(&self.0);
        let text = match notice {
            LeaseNotice::AgentAway(error) => {
                let is_first = state.away.is_empty();
                state.away.insert(slot);
                is_first.then(|| format!("the agent is away; work continues ({error})"))
            }
            LeaseNotice::AgentReturned => {
                let was_away = state.away.remove(&slot);
                (was_away && state.away.is_empty()).then(|| "the agent is back".into())
            }
            LeaseNotice::RevocationAnnounced(reason) => {
                let gpus = state.held[slot].as_ref().map(|held| join_gpu_ids(&held.granted)).unwrap_or_default();
                let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
                Some(format!("GPU {gpus} will be revoked soon{reason}"))
            }
        };
        if let Some(text) = text {
            state.events.send(GpuEvent::Note(text));
        }
    }
}

impl fmt::Debug for LeaseRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Board").finish_non_exhaustive()
    }
}

fn join_gpu_ids(granted: &GrantedLease) -> String {
    granted.gpu_ids().iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::super::events::gpu_event_channel;
    use super::*;

    #[test]
    fn an_absent_agent_is_reported_once_for_all_slots() {
        let (events, mut received) = gpu_event_channel();
        let registry = LeaseRegistry::new(3, events);
        for slot in 0..3 {
            registry.record_notice(slot, LeaseNotice::AgentAway(format!("try {slot}")));
        }
        for slot in 0..3 {
            registry.record_notice(slot, LeaseNotice::AgentReturned);
        }
        registry.record_notice(1, LeaseNotice::AgentReturned);
        drop(registry);
        let received: Vec<GpuEvent> = std::iter::from_fn(|| received.blocking_next()).collect();
        let note = |text: &str| GpuEvent::Note(text.into());
        assert_eq!(received, [note("the agent is away; work continues (try 0)"), note("the agent is back")]);
    }
}

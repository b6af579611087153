//! A held lease, renewed in the background until it is released, dropped or lost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use gpupool_api::lease::{LeaseBody, LeaseDevice, LeaseState};

use super::client_accounting::ClientAccounting;
use super::direct_request::PreparedRequest;
use super::endpoint_state::{EndpointAuthority, EndpointState};
use super::orphaned_grants::{OrphanedGrant, release_in_background};
use super::running_client::{ActiveAssignment, RunningClient};
use super::status::StatusUpdate;
use super::wait_everywhere::EndpointGrant;
use crate::agent::ended_loss;
use crate::{AgentClient, ClientError, LeaseGuard, LeaseLost};

/// Assigned GPUs. Dropping it releases them in the background: if the process ends right afterwards, await
/// [`HeldLease::release`] instead. A copy in a forked child releases nothing.
#[derive(Debug)]
#[must_use = "dropping it releases the lease"]
pub struct HeldLease {
    context: AssignmentContext,
    body: Arc<LeaseBody>,
    /// Taken out at the release.
    backing: Option<LeaseBacking>,
    creator_pid: u32,
}

/// Identity of an assignment within the client.
#[derive(Debug, Clone)]
struct AssignmentContext {
    running: Arc<RunningClient>,
    endpoint: Arc<EndpointState>,
    number: u64,
    worker_id: Arc<str>,
    assigned_at: SystemTime,
}

#[derive(Debug)]
enum LeaseBacking {
    Agent(LeaseGuard),
    Accounting(Arc<ClientAccounting>),
}

impl HeldLease {
    pub(super) fn new(
        running: &Arc<RunningClient>,
        prepared: &PreparedRequest,
        grant: EndpointGrant,
    ) -> Result<Self, ClientError> {
        let EndpointGrant { endpoint, lease: body, since, was_blocked } = grant;
        let context = AssignmentContext {
            running: running.clone(),
            number: running.core.counters.last_assignment.fetch_add(1, Ordering::Relaxed) + 1,
            worker_id: prepared.worker_id.clone(),
            assigned_at: SystemTime::now(),
            endpoint: endpoint.clone(),
        };
        let backing = match endpoint.authority() {
            Some(EndpointAuthority::Client(accounting)) => {
                observe_expiry(&context, &body, accounting.clone());
                LeaseBacking::Accounting(accounting)
            }
            _ => {
                let context = context.clone();
                let on_lost = move |lease: &LeaseBody, lost: &LeaseLost| context.record_lost(lease, lost);
                LeaseBacking::Agent(endpoint.agent.guard_lease_since((*body).clone(), since, on_lost)?)
            }
        };
        context.record_granted(&body, was_blocked);
        Ok(Self { context, body: Arc::from(body), backing: Some(backing), creator_pid: std::process::id() })
    }

    /// Returns the number of the lease on its endpoint.
    pub fn id(&self) -> u64 {
        self.body.id
    }

    /// Returns the id of the worker that holds the lease.
    pub fn worker_id(&self) -> &str {
        &self.context.worker_id
    }

    /// Returns the id of the endpoint that granted the lease.
    pub fn endpoint_id(&self) -> &str {
        &self.context.endpoint.id
    }

    /// Returns the number of the first GPU on that endpoint.
    pub fn gpu_id(&self) -> Option<u32> {
        self.body.devices.first().map(|device| device.gpu_id)
    }

    /// Returns the global id of the first GPU: `endpoint_id:gpu_id`.
    pub fn global_gpu_id(&self) -> Option<String> {
        self.gpu_id().map(|gpu_id| format!("{}:{gpu_id}", self.context.endpoint.id))
    }

    /// Returns the devices of the lease.
    pub fn devices(&self) -> &[LeaseDevice] {
        &self.body.devices
    }

    /// Returns the environment of the job; `None` for a variable that must not be set.
    pub fn env(&self) -> &BTreeMap<String, Option<String>> {
        &self.body.env
    }

    /// Returns the fencing token, which grows with every grant of the endpoint.
    pub fn token(&self) -> Option<u64> {
        self.body.token
    }

    /// Returns the time of the assignment.
    pub fn assigned_at(&self) -> SystemTime {
        self.context.assigned_at
    }

    /// Returns the lease as it was granted.
    pub fn granted(&self) -> &Arc<LeaseBody> {
        &self.body
    }

    /// Waits until the lease is lost and returns the reason. Its GPUs may then belong to another lease.
    pub async fn wait_until_lost(&self) -> LeaseLost {
        match &self.backing {
            Some(LeaseBacking::Agent(guard)) => guard.wait_until_lost().await,
            Some(LeaseBacking::Accounting(accounting)) => {
                ended_loss(accounting.wait_until_ended(self.body.id).await.unwrap_or_else(|| (*self.body).clone()))
            }
            None => std::future::pending().await,
        }
    }

    /// Checks that the lease is still held, as far as is known here.
    pub fn check_held(&self) -> Result<(), ClientError> {
        let lost = match &self.backing {
            Some(LeaseBacking::Agent(guard)) => guard.loss(),
            Some(LeaseBacking::Accounting(accounting)) => {
                accounting.lease(self.body.id).filter(|lease| lease.state.is_ended()).map(ended_loss)
            }
            None => None,
        };
        lost.map_or(Ok(()), |lost| Err(self.stale_error(lost)))
    }

    /// Releases the lease and waits for the confirmation. An error if the lease was lost before. If the future is
    /// dropped, the release continues in the background.
    pub async fn release(mut self) -> Result<(), ClientError> {
        self.check_held()?;
        match self.backing.take() {
            Some(LeaseBacking::Agent(guard)) => {
                // Counted before the wait: a future dropped half way still releases the lease.
                self.context.record_released(&self.body);
                let mut pending = PendingRelease { context: &self.context, lease: self.body.id, is_done: false };
                let released = guard.release().await;
                pending.is_done = released.is_ok();
                self.context.endpoint.record_outcome(None, released.as_ref().err());
                match released? {
                    // The lease had ended before the client knew.
                    Some(lease) if lease.state.is_ended() && lease.state != LeaseState::Released => {
                        Err(self.stale_error(ended_loss(lease)))
                    }
                    _ => Ok(()),
                }
            }
            Some(LeaseBacking::Accounting(accounting)) => {
                accounting.release(self.body.id);
                self.context.record_released(&self.body);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Converts into the guard that renews the lease and the client of its endpoint; this client no longer tracks it.
    /// Returns itself if this client does the accounting.
    #[expect(clippy::result_large_err, reason = "the lease is returned, and is no error")]
    pub fn into_guard(mut self) -> Result<(AgentClient, LeaseGuard), Self> {
        match self.backing.take() {
            Some(LeaseBacking::Agent(guard)) => {
                self.context.running.assignments().remove(&self.context.number);
                Ok((self.context.endpoint.agent.clone(), guard))
            }
            backing => {
                self.backing = backing;
                Err(self)
            }
        }
    }

    fn stale_error(&self, lost: LeaseLost) -> ClientError {
        ClientError::Stale { worker_id: self.context.worker_id.to_string(), lost }
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        // A copy in a forked child must not release the lease.
        if self.creator_pid != std::process::id() {
            return;
        }
        match self.backing.take() {
            Some(LeaseBacking::Agent(guard)) => {
                let is_over = matches!(guard.loss(), Some(LeaseLost::Ended { .. } | LeaseLost::Stale { .. }));
                let _ = PendingRelease { context: &self.context, lease: self.body.id, is_done: is_over };
                guard.detach();
            }
            Some(LeaseBacking::Accounting(accounting)) => drop(accounting.release(self.body.id)),
            None => return,
        }
        self.context.record_released(&self.body);
    }
}

/// A release in progress: unless it is done, the lease is remembered until its endpoint has released it.
struct PendingRelease<'a> {
    context: &'a AssignmentContext,
    lease: u64,
    is_done: bool,
}

impl Drop for PendingRelease<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            let AssignmentContext { running, endpoint, .. } = self.context;
            release_in_background(&running.runtime, endpoint, OrphanedGrant::Lease(self.lease));
        }
    }
}

impl AssignmentContext {
    fn record_granted(&self, body: &LeaseBody, was_blocked: bool) {
        let counters = &self.running.core.counters;
        counters.granted.fetch_add(1, Ordering::Relaxed);
        let assignment = ActiveAssignment {
            endpoint: self.endpoint.index,
            lease: body.id,
            devices: body.devices.clone(),
            worker_id: self.worker_id.clone(),
            assigned_at: self.assigned_at,
        };
        self.running.assignments().insert(self.number, assignment);
        self.endpoint.record_assignment(body, true);
        if was_blocked {
            self.running.publish(StatusUpdate::Unblocked { worker_id: self.worker_id.to_string() });
        }
        if self.running.core.publisher.wants_frequent_updates() {
            let (worker_id, endpoint_id, gpu_ids) = self.event_fields(body);
            self.running.publish(StatusUpdate::Assigned { worker_id, endpoint_id, gpu_ids });
        }
        tracing::info!(
            worker_id = %self.worker_id, endpoint_id = self.endpoint.id, lease = body.id,
            gpu_ids = ?GpuIdList(body), unblocked = was_blocked, "GPU assigned"
        );
    }

    fn record_released(&self, body: &LeaseBody) {
        if self.running.assignments().remove(&self.number).is_none() {
            return;
        }
        self.endpoint.record_assignment(body, false);
        if self.running.core.publisher.wants_frequent_updates() {
            let (worker_id, endpoint_id, gpu_ids) = self.event_fields(body);
            self.running.publish(StatusUpdate::Released { worker_id, endpoint_id, gpu_ids });
        }
        tracing::info!(
            worker_id = %self.worker_id, endpoint_id = self.endpoint.id, lease = body.id,
            gpu_ids = ?GpuIdList(body), "GPU released"
        );
    }

    fn record_lost(&self, body: &LeaseBody, lost: &LeaseLost) {
        if self.running.assignments().remove(&self.number).is_none() {
            return;
        }
        self.endpoint.record_assignment(body, false);
        let (worker_id, endpoint_id, _) = self.event_fields(body);
        tracing::warn!(worker_id, endpoint_id, lease = body.id, %lost, "GPU lost");
        self.running.publish(StatusUpdate::Lost { worker_id, endpoint_id, reason: lost.to_string() });
    }

    fn event_fields(&self, body: &LeaseBody) -> (String, String, Vec<u32>) {
        let gpu_ids = body.devices.iter().map(|device| device.gpu_id).collect();
        (self.worker_id.to_string(), self.endpoint.id.clone(), gpu_ids)
    }
}

/// GPU ids of a lease, formatted only if the log line is written.
struct GpuIdList<'a>(&'a LeaseBody);

impl std::fmt::Debug for GpuIdList<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.devices.iter().map(|device| device.gpu_id)).finish()
    }
}

/// Reports the expiry of a lease of client-side accounting, which only ends on its own after its maximum duration.
fn observe_expiry(context: &AssignmentContext, body: &LeaseBody, accounting: Arc<ClientAccounting>) {
    let (context, body) = (context.clone(), body.clone());
    let runtime = context.running.runtime.clone();
    let mut stopping = context.running.observe_stop();
    // Ends with the lease, or when the client stops.
    runtime.spawn(async move {
        tokio::select! {
            biased;
            ended = accounting.wait_until_ended(body.id) => {
                context.record_lost(&body, &ended_loss(ended.unwrap_or_else(|| body.clone())));
            }
            () = stopping.changed() => {}
        }
    });
}

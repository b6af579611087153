//! The thread that keeps the GPUs of a run, and how others talk to it.
//!
//! It ends once everything is given back; where the agent is away, a while after that was tried for the last time.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use gpupool_api::RequestBody;
use gpupool_api::lease::{AttachBody, AttachResponse, RevocationAction};
use gpupool_api::pool::{DeviceBody, DeviceList};
use gpupool_client::local::LocalAgent;
use tokio::runtime::{Builder, Handle};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::events::gpu_event_channel;
use super::lease_slot::{HeldGrant, LeaseRegistry, LeaseSlot, wait_for_stop};
use super::{GpuError, GpuEventReceiver, GpuRequest, GrantedLease};
use crate::limits::{AGENT_REPLY_TIMEOUT, BACKGROUND_RELEASE_TIME};
use crate::plan::WorkerSlot;
use crate::{AttachDenied, WorkerId};

/// Keeps the GPUs of a run. Stopped or dropped it gives everything back; end the workers before. Where the agent is away that is
/// waited for five seconds, and then goes on in the background. A copy in a forked child gives nothing back.
#[derive(Debug)]
#[must_use = "dropping it gives everything back"]
pub struct GpuLeaseManager {
    /// Once this is dropped, the thread gives everything back and ends.
    stop: Option<watch::Sender<()>>,
    agent: LocalAgent,
    registry: LeaseRegistry,
    /// Of the thread.
    runtime: Handle,
    /// Ends when the thread has done what can be waited for. In a lock only so that it can be shared.
    done: Mutex<Receiver<()>>,
    creator_pid: u32,
}

impl GpuLeaseManager {
    /// Asks the agent for what is wished. What becomes of it from then on is read from the second value.
    pub fn start(agent: LocalAgent, request: GpuRequest) -> Result<(Self, GpuEventReceiver), GpuError> {
        let request_bodies = request.request_bodies()?;
        let (events, reader) = gpu_event_channel();
        let registry = LeaseRegistry::new(request_bodies.len(), events);
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (stop, stopping) = watch::channel(());
        let (is_done, done) = sync_channel(0);
        let manager = Self {
            stop: Some(stop),
            agent: agent.clone(),
            registry: registry.clone(),
            runtime: runtime.handle().clone(),
            done: Mutex::new(done),
            creator_pid: std::process::id(),
        };
        let run = move || {
            let left = runtime.block_on(hold_leases(&agent, request_bodies, registry, stopping));
            drop(is_done);
            runtime.block_on(release_in_background(&agent, left));
            // Nothing is left to be done; a look-up of a name that hangs holds nobody up.
            runtime.shutdown_background();
        };
        // Ends when everything is given back, or was tried to be for a while; whoever drops the keeper waits for the first.
        thread::Builder::new().name("gpupool-gpus".into()).spawn(run)?;
        Ok((manager, reader))
    }

    /// Tells the agent that a process, a descendant of ours whose program does not run yet, belongs to the lease; its
    /// descendants then do, too. A lease can have any number of them.
    ///
    /// Says in which control group it is now, where the agent can make one: moved out of it, the process is known by its
    /// environment only. `None` where the agent cannot see processes of ours.
    pub fn attach_process(&self, granted: &GrantedLease, pid: u32) -> Result<Option<AttachResponse>, GpuError> {
        let (agent, registry, slot, lease) = (self.agent.clone(), self.registry.clone(), granted.slot, granted.lease);
        self.run_on_thread(async move { attach_to_lease(&agent, &registry, slot, lease, pid).await })
    }

    /// Where a worker works that is started on what was granted. The place does not keep the GPUs: whoever has the keeper does.
    pub fn worker_slot(self: &Arc<Self>, worker: WorkerId, granted: &GrantedLease) -> WorkerSlot {
        let (manager, granted) = (Arc::downgrade(self), granted.clone());
        WorkerSlot {
            gpu_ids: granted.gpu_ids(),
            environment: granted.env.clone(),
            attach: Some(Arc::new(move |pid| {
                let released = || AttachDenied::SlotRevoked("the GPUs are being given back".into());
                let attached = manager.upgrade().ok_or_else(released)?.attach_process(&granted, pid);
                let attached = attached.map_err(|error| match error {
                    GpuError::NotHeld { .. } => AttachDenied::SlotRevoked(error.to_string()),
                    _ => AttachDenied::TryLater(error.to_string()),
                })?;
                Ok(attached.is_some_and(|attached| attached.cgroup.is_some()))
            })),
            ..WorkerSlot::new(worker)
        }
    }

    /// GPU memory that processes use on the devices of all places, as the agent read it last; it reads every second, unless
    /// it was told otherwise.
    pub fn read_gpu_memory(&self) -> Result<GpuMemoryUsage, GpuError> {
        let (agent, registry) = (self.agent.clone(), self.registry.clone());
        self.run_on_thread(async move { read_memory_usage(&agent, &registry).await })
    }

    /// Gives everything back, and waits until the agent has it.
    pub fn release_all(self) {}

    /// Has the thread do something, and waits for what comes of it.
    fn run_on_thread<T: Send + 'static>(
        &self,
        operation: impl Future<Output = Result<T, GpuError>> + Send + 'static,
    ) -> Result<T, GpuError> {
        let (reply, reply_receiver) = sync_channel(1);
        // Ends within the patience, or with the runtime of the thread.
        self.runtime.spawn(async move {
            let in_time = tokio::time::timeout(AGENT_REPLY_TIMEOUT, operation).await;
            // The caller may have gone.
            let _ = reply.send(in_time.unwrap_or(Err(GpuError::Silent)));
        });
        reply_receiver.recv().unwrap_or(Err(GpuError::Stopped))
    }
}

impl Drop for GpuLeaseManager {
    fn drop(&mut self) {
        if self.creator_pid != std::process::id() {
            // A forked child has no such thread, and what it held is its parent's. Waking the copy of a channel could wait for
            // ever for a lock that was held at the fork.
            std::mem::forget(self.stop.take());
            return;
        }
        drop(self.stop.take());
        // Nothing is ever sent: it ends when the other end is gone.
        let _ = self.done.get_mut().unwrap_or_else(PoisonError::into_inner).recv();
    }
}

/// Keeps all places until they are to be given back; then says which leases could not be.
async fn hold_leases(
    agent: &LocalAgent,
    request_bodies: Vec<RequestBody>,
    registry: LeaseRegistry,
    mut stop: watch::Receiver<()>,
) -> Vec<u64> {
    let mut slots = JoinSet::new();
    for (number, body) in request_bodies.into_iter().enumerate() {
        let slot = LeaseSlot { number, agent: agent.clone(), body, registry: registry.clone(), stop: stop.clone() };
        slots.spawn(slot.run());
    }
    wait_for_stop(&mut stop).await;
    let mut left = Vec::new();
    while let Some(ended) = slots.join_next().await {
        left.extend(ended.ok().flatten());
    }
    left
}

/// A process that lives on would keep what it did not give back.
async fn release_in_background(agent: &LocalAgent, leases: Vec<u64>) {
    let until = Instant::now() + BACKGROUND_RELEASE_TIME;
    for lease in leases {
        let left = until.saturating_duration_since(Instant::now());
        // Where even this fails, it ends with the process.
        let _ = agent.client().release_within(lease, left).await;
    }
}

async fn attach_to_lease(
    agent: &LocalAgent,
    registry: &LeaseRegistry,
    slot: usize,
    lease: u64,
    pid: u32,
) -> Result<Option<AttachResponse>, GpuError> {
    let held = registry.held().into_iter().nth(slot).flatten().filter(|held| held.granted.lease == lease);
    let held = held.ok_or(GpuError::NotHeld { lease })?;
    if !held.is_bound_to_process {
        return Ok(None);
    }
    let body = AttachBody {
        token: held.granted.token,
        job_pid: Some(pid),
        on_revocation: RevocationAction::EndJobs,
        ..AttachBody::default()
    };
    match agent.client().attach(lease, &body).await {
        Err(error) if error.is_lease_lost() => Err(GpuError::NotHeld { lease }),
        outcome => Ok(Some(outcome?)),
    }
}

async fn read_memory_usage(agent: &LocalAgent, registry: &LeaseRegistry) -> Result<GpuMemoryUsage, GpuError> {
    let devices = agent.client().devices().await?;
    // One that was asked over its socket and cannot see our process has other numbers for processes.
    let sees_our_process = |held: &HeldGrant| held.is_bound_to_process || !agent.sees_our_process();
    Ok(GpuMemoryUsage::new(&registry.held(), &devices, sees_our_process))
}

// How much GPU memory processes use, as the agent sees it.

/// What processes used on the devices of each place, at one time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuMemoryUsage {
    slots: Vec<Option<SlotMemoryUsage>>,
}

/// Who is on the devices of one place.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct SlotMemoryUsage {
    /// Bytes by process; `None` for one that is there and does not tell.
    used: HashMap<u32, Option<u64>>,
    /// Whether nobody else can be there.
    is_complete: bool,
}

impl GpuMemoryUsage {
    /// What the devices of held leases tell; `sees_us` is whether the agent knows processes by the numbers we know them by.
    pub(super) fn new(
        held: &[Option<HeldGrant>],
        devices: &DeviceList,
        sees_our_process: impl Fn(&HeldGrant) -> bool,
    ) -> Self {
        let of = |held: &Option<HeldGrant>| {
            let held = held.as_ref().filter(|held| sees_our_process(held))?;
            let ids = held.granted.gpu_ids();
            let own: Vec<&DeviceBody> = devices.devices.iter().filter(|device| ids.contains(&device.gpu_id)).collect();
            let is_current = own.len() == ids.len() && own.iter().all(|device| !device.stale);
            is_current.then(|| SlotMemoryUsage::of(&own))
        };
        Self { slots: held.iter().map(of).collect() }
    }

    /// Bytes these processes use together on the devices of a place; `None` where that is not told. Where only some of them
    /// are told, it is at least so much.
    pub fn used_by(&self, slot: usize, pids: &[u32]) -> Option<u64> {
        let seen = self.slots.get(slot)?.as_ref()?;
        let there = pids.iter().filter_map(|pid| seen.used.get(pid));
        let known: Vec<u64> = there.clone().flatten().copied().collect();
        let is_known = !known.is_empty() || (there.count() == 0 && seen.is_complete);
        is_known.then(|| known.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes)))
    }
}

impl SlotMemoryUsage {
    fn of(devices: &[&DeviceBody]) -> Self {
        let mut used: HashMap<u32, Option<u64>> = HashMap::new();
        for process in devices.iter().flat_map(|device| &device.processes) {
            let bytes = process.memory_mib.map(|mib| mib.saturating_mul(1 << 20));
            let sum = used.entry(process.pid).or_insert(None);
            *sum = match (*sum, bytes) {
                (Some(before), Some(more)) => Some(before.saturating_add(more)),
                (before, more) => before.or(more),
            };
        }
        Self { used, is_complete: devices.iter().all(|device| device.processes_complete) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keeper_can_be_shared_by_threads() {
        fn is_shared<T: Send + Sync>() {}
        is_shared::<GpuLeaseManager>();
    }

    fn memory(is_complete: bool) -> GpuMemoryUsage {
        let used = HashMap::from([(1, Some(100)), (2, Some(20)), (3, None)]);
        GpuMemoryUsage { slots: vec![Some(SlotMemoryUsage { used, is_complete }), None] }
    }

    #[test]
    fn what_is_told_is_summed_and_what_is_not_is_no_number() {
        let all = memory(true);
        assert_eq!(all.used_by(0, &[1, 2, 9]), Some(120));
        assert_eq!(all.used_by(0, &[9]), Some(0), "all that are there are told of, and it is none of them");
        assert_eq!(all.used_by(0, &[3]), None, "it is there and does not tell");
        assert_eq!(all.used_by(0, &[1, 3]), Some(100));
        assert_eq!((all.used_by(1, &[1]), all.used_by(7, &[1])), (None, None));
        let some = memory(false);
        assert_eq!((some.used_by(0, &[1]), some.used_by(0, &[9])), (Some(100), None));
    }
}

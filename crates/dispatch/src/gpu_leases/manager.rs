//! The thread that holds the GPU leases of a run, and its interface for other threads.
//!
//! It ends when every lease is released, or after the last release attempt if the agent is away.

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

/// Manager of a run's GPU leases. Stopping or dropping it releases every lease; end the workers first. If the agent is
/// away, the release waits five seconds and continues in the background. A copy in a forked child releases nothing.
#[derive(Debug)]
#[must_use = "dropping it releases every lease"]
pub struct GpuLeaseManager {
    /// Dropping it makes the thread release every lease and end.
    stop: Option<watch::Sender<()>>,
    agent: LocalAgent,
    registry: LeaseRegistry,
    /// Runtime of the thread.
    runtime: Handle,
    /// Closed when the thread has released what it can. The lock only makes it `Sync`.
    done: Mutex<Receiver<()>>,
    creator_pid: u32,
}

impl GpuLeaseManager {
    /// Requests leases from the agent. Their events are read from the receiver.
    pub fn start(agent: LocalAgent, request: GpuRequest) -> Result<(Self, GpuEventReceiver), GpuError> {
        let bodies = request.request_bodies()?;
        let (events, reader) = gpu_event_channel();
        let registry = LeaseRegistry::new(bodies.len(), events);
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
            let unreleased = runtime.block_on(hold_leases(&agent, bodies, registry, stopping));
            drop(is_done);
            runtime.block_on(release_in_background(&agent, unreleased));
            // Does not wait for a name lookup that hangs.
            runtime.shutdown_background();
        };
        // Ends when every lease is released, or after attempts in the background; a drop of the manager waits for the
        // former.
        thread::Builder::new().name("gpupool-gpus".into()).spawn(run)?;
        Ok((manager, reader))
    }

    /// Attaches a process, a descendant of this one whose program does not run yet, and its future descendants to the
    /// lease. A lease can have any number of processes.
    ///
    /// Returns the process's control group, if the agent created one; moved out of it, the process is recognized only
    /// by its environment. Returns `None` if the agent cannot see processes of this host.
    pub fn attach_process(&self, granted: &GrantedLease, pid: u32) -> Result<Option<AttachResponse>, GpuError> {
        let (agent, registry, slot, lease) = (self.agent.clone(), self.registry.clone(), granted.slot, granted.lease);
        self.run_on_thread(async move { attach_to_lease(&agent, &registry, slot, lease, pid).await })
    }

    /// Creates a worker slot on a granted lease. The slot does not hold the lease; the manager does.
    pub fn worker_slot(self: &Arc<Self>, worker: WorkerId, granted: &GrantedLease) -> WorkerSlot {
        let (manager, granted) = (Arc::downgrade(self), granted.clone());
        WorkerSlot {
            gpu_ids: granted.gpu_ids(),
            environment: granted.env.clone(),
            attach: Some(Arc::new(move |pid| {
                let released = || AttachDenied::SlotRevoked("the GPU leases are being released".into());
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

    /// Returns the GPU memory that processes use on the devices of all slots, from the agent's last sample (every
    /// second by default).
    pub fn read_gpu_memory(&self) -> Result<GpuMemoryUsage, GpuError> {
        let (agent, registry) = (self.agent.clone(), self.registry.clone());
        self.run_on_thread(async move { read_memory_usage(&agent, &registry).await })
    }

    /// Releases every lease and waits until the agent has confirmed.
    pub fn release_all(self) {}

    /// Runs an operation on the manager's thread and waits for its result.
    fn run_on_thread<T: Send + 'static>(
        &self,
        operation: impl Future<Output = Result<T, GpuError>> + Send + 'static,
    ) -> Result<T, GpuError> {
        let (reply, reply_receiver) = sync_channel(1);
        // Ends within the time limit, or with the thread's runtime.
        self.runtime.spawn(async move {
            let in_time = tokio::time::timeout(AGENT_REPLY_TIMEOUT, operation).await;
            // The caller may have stopped waiting.
            let _ = reply.send(in_time.unwrap_or(Err(GpuError::Silent)));
        });
        reply_receiver.recv().unwrap_or(Err(GpuError::Stopped))
    }
}

impl Drop for GpuLeaseManager {
    fn drop(&mut self) {
        if self.creator_pid != std::process::id() {
            // A forked child has no manager thread, and the leases are its parent's. Waking the copied channel could
            // block on a lock that was held at the fork.
            std::mem::forget(self.stop.take());
            return;
        }
        drop(self.stop.take());
        // The channel carries no message; it closes.
        let _ = self.done.get_mut().unwrap_or_else(PoisonError::into_inner).recv();
    }
}

/// Runs all slots until the manager stops. Returns the leases that could not be released.
async fn hold_leases(
    agent: &LocalAgent,
    bodies: Vec<RequestBody>,
    registry: LeaseRegistry,
    mut stop: watch::Receiver<()>,
) -> Vec<u64> {
    let mut slots = JoinSet::new();
    for (number, body) in bodies.into_iter().enumerate() {
        let slot = LeaseSlot { number, agent: agent.clone(), body, registry: registry.clone(), stop: stop.clone() };
        slots.spawn(slot.run());
    }
    wait_for_stop(&mut stop).await;
    let mut unreleased = Vec::new();
    while let Some(ended) = slots.join_next().await {
        unreleased.extend(ended.ok().flatten());
    }
    unreleased
}

/// Releases leases that this process would otherwise keep, if it continues.
async fn release_in_background(agent: &LocalAgent, leases: Vec<u64>) {
    let until = Instant::now() + BACKGROUND_RELEASE_TIME;
    for lease in leases {
        let remaining = until.saturating_duration_since(Instant::now());
        // If this fails, too, the lease ends with the process.
        let _ = agent.client().release_within(lease, remaining).await;
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
    // An agent behind a socket that cannot see this process uses other pids.
    let is_visible = |held: &HeldGrant| held.is_bound_to_process || !agent.sees_our_process();
    Ok(GpuMemoryUsage::new(&registry.held(), &devices, is_visible))
}

// GPU memory of processes, as sampled by the agent.

/// GPU memory that processes use on the devices of each slot, at one time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuMemoryUsage {
    slots: Vec<Option<SlotMemoryUsage>>,
}

/// GPU memory by process on the devices of one slot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct SlotMemoryUsage {
    /// Bytes by process; `None` if the device does not report them.
    used: HashMap<u32, Option<u64>>,
    /// Whether the list of processes is complete.
    is_complete: bool,
}

impl GpuMemoryUsage {
    /// Reads the usage on the devices of held leases. `is_visible` is whether the agent uses the same pids.
    pub(super) fn new(
        held: &[Option<HeldGrant>],
        devices: &DeviceList,
        is_visible: impl Fn(&HeldGrant) -> bool,
    ) -> Self {
        let of = |held: &Option<HeldGrant>| {
            let held = held.as_ref().filter(|held| is_visible(held))?;
            let ids = held.granted.gpu_ids();
            let leased: Vec<&DeviceBody> =
                devices.devices.iter().filter(|device| ids.contains(&device.gpu_id)).collect();
            let is_current = leased.len() == ids.len() && leased.iter().all(|device| !device.stale);
            is_current.then(|| SlotMemoryUsage::of(&leased))
        };
        Self { slots: held.iter().map(of).collect() }
    }

    /// Returns the bytes that these processes use together on the devices of a slot; `None` if unknown. A lower bound
    /// if only some of them are known.
    pub fn used_by(&self, slot: usize, pids: &[u32]) -> Option<u64> {
        let usage = self.slots.get(slot)?.as_ref()?;
        let listed = pids.iter().filter_map(|pid| usage.used.get(pid));
        let known: Vec<u64> = listed.clone().flatten().copied().collect();
        let is_known = !known.is_empty() || (listed.count() == 0 && usage.is_complete);
        is_known.then(|| known.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes)))
    }
}

impl SlotMemoryUsage {
    fn of(devices: &[&DeviceBody]) -> Self {
        let mut used: HashMap<u32, Option<u64>> = HashMap::new();
        let mut is_complete = devices.iter().all(|device| device.processes_complete);
        for process in devices.iter().flat_map(|device| &device.processes) {
            let Some(pid) = process.pid else {
                is_complete = false;
                continue;
            };
            let bytes = process.memory_mib.map(|mib| mib.saturating_mul(1 << 20));
            let sum = used.entry(pid).or_insert(None);
            *sum = match (*sum, bytes) {
                (Some(before), Some(more)) => Some(before.saturating_add(more)),
                (before, more) => before.or(more),
            };
        }
        Self { used, is_complete }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manager_can_be_shared_by_threads() {
        fn is_shared<T: Send + Sync>() {}
        is_shared::<GpuLeaseManager>();
    }

    fn memory(is_complete: bool) -> GpuMemoryUsage {
        let used = HashMap::from([(1, Some(100)), (2, Some(20)), (3, None)]);
        GpuMemoryUsage { slots: vec![Some(SlotMemoryUsage { used, is_complete }), None] }
    }

    #[test]
    fn known_numbers_are_summed_and_unknown_ones_are_none() {
        let all = memory(true);
        assert_eq!(all.used_by(0, &[1, 2, 9]), Some(120));
        assert_eq!(all.used_by(0, &[9]), Some(0), "the list is complete without this process");
        assert_eq!(all.used_by(0, &[3]), None, "the process is listed without a number");
        assert_eq!(all.used_by(0, &[1, 3]), Some(100));
        assert_eq!((all.used_by(1, &[1]), all.used_by(7, &[1])), (None, None));
        let some = memory(false);
        assert_eq!((some.used_by(0, &[1]), some.used_by(0, &[9])), (Some(100), None));
    }
}

//! The leased GPUs of a run. Each GPU is requested separately, so work starts on the first one that is granted. A
//! thread starts workers on granted GPUs and withdraws them from lost ones; it ends when the GPUs are released on drop.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, anyhow};
use gpupool_client::local::LocalAgent;
use gpupool_confine::bounds::BoundExceeded;
use gpupool_confine::process::ProcFs;
use gpupool_dispatch::gpu_leases::{GpuError, GpuEvent, GpuEventReceiver, GpuLeaseManager, GpuRequest, GrantedLease};
use gpupool_dispatch::{WorkerId, WorkerSlot};

use super::arguments::MapArgs;
use super::progress::PeriodicThread;
use super::run_stopper::StopReason;
use super::{MapContext, worker_slot};
use crate::endpoint_args::block_on;
use crate::output::UsageError;
use crate::request_args::RequestArgs;

/// Interval between two checks of the GPU memory of workers, the agent's default refresh interval.
const GPU_MEMORY_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// GPUs to request, and the agent to request them from.
#[derive(Debug)]
pub(super) struct GpuPlan {
    agent: LocalAgent,
    request: GpuRequest,
    slots: usize,
    workers_each: u32,
    /// GPU memory limit of a worker in bytes.
    memory_limit: Option<u64>,
}

impl GpuPlan {
    /// Finds the agent without requesting anything.
    pub fn find(map: &MapArgs) -> anyhow::Result<Self> {
        let mut body = RequestArgs { gpus: None, gpu_ids: Vec::new(), ..map.request_args.clone() }.body()?;
        body.worker_id.get_or_insert_with(|| "map".into());
        let gpu_ids = map.request_args.gpu_ids.clone();
        let leases = map.request_args.gpus.map_or(usize::from(gpu_ids.is_empty()), usize::from);
        let slots = gpu_ids.len().max(leases);
        let agent = block_on(map.endpoint_args.local_agent("`gpupool map` starts its workers"));
        let agent = agent.map_err(|error| match error.is::<UsageError>() {
            true => error,
            false => anyhow!("{error:#}; to run without GPUs: --gpus 0"),
        })?;
        let memory_limit = map.gpu_memory_limit.map(|mib| mib << 20);
        let request = GpuRequest { body, leases, gpu_ids };
        Ok(Self { agent, request, slots, workers_each: map.jobs.unwrap_or(1), memory_limit })
    }
}

/// GPUs of a run. Drop it after the workers have ended.
#[derive(Debug)]
pub(super) struct MapGpus {
    memory_limit: Option<PeriodicThread>,
    lease_manager: Option<Arc<GpuLeaseManager>>,
    thread: Option<JoinHandle<()>>,
}

impl MapGpus {
    pub fn start(plan: GpuPlan, context: MapContext) -> anyhow::Result<Self> {
        let GpuPlan { agent, request, slots, workers_each, memory_limit } = plan;
        let (lease_manager, events) = GpuLeaseManager::start(agent, request).map_err(|error| match error {
            GpuError::Request { .. } => UsageError::new(error).into(),
            other => anyhow::Error::from(other),
        })?;
        let lease_manager = Arc::new(lease_manager);
        let limit = memory_limit.map(|allowed| GpuMemoryLimit {
            lease_manager: Arc::downgrade(&lease_manager),
            context: context.clone(),
            workers_each,
            allowed,
        });
        let memory_limit = limit.map(GpuMemoryLimit::start).transpose()?;
        let manager = GpuWorkerManager {
            lease_manager: Arc::downgrade(&lease_manager),
            each: workers_each,
            context,
            slots: vec![GpuSlotState::Requested; slots],
        };
        let thread = std::thread::Builder::new().name("gpupool-workers".into()).spawn(move || manager.run(events));
        let thread = thread.context("cannot start a thread to manage the GPUs")?;
        Ok(Self { memory_limit, lease_manager: Some(lease_manager), thread: Some(thread) })
    }
}

impl Drop for MapGpus {
    fn drop(&mut self) {
        drop(self.memory_limit.take());
        drop(self.lease_manager.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported already.
            let _ = thread.join();
        }
    }
}

/// State of one requested GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GpuSlotState {
    Requested,
    Granted,
    Refused,
}

/// Starts and withdraws workers as GPUs are granted and lost.
#[derive(Debug)]
struct GpuWorkerManager {
    lease_manager: Weak<GpuLeaseManager>,
    each: u32,
    context: MapContext,
    slots: Vec<GpuSlotState>,
}

impl GpuWorkerManager {
    fn run(mut self, mut events: GpuEventReceiver) {
        while let Some(event) = events.blocking_next() {
            match event {
                GpuEvent::Granted(granted) => self.on_granted(&granted),
                GpuEvent::Lost { slot, why } => self.on_lost(slot, &why),
                GpuEvent::Refused { slot, why } => self.on_refused(slot, &why),
                GpuEvent::Waiting { slot, text } => {
                    if self.context.waiting.set_text(slot, Some(text.clone())) && self.context.printer.bars.is_none() {
                        self.context.printer.info(text);
                    }
                }
                GpuEvent::Note(text) => self.context.printer.info(text),
            }
        }
    }

    fn on_granted(&mut self, granted: &GrantedLease) {
        self.set_state(granted.slot, GpuSlotState::Granted);
        let devices = granted.devices.iter().map(|device| format!("GPU {} ({})", device.gpu_id, device.name));
        self.context.printer.info(format_args!("granted: {}", devices.collect::<Vec<_>>().join(", ")));
        // `None` while the GPUs are being released.
        let Some(lease_manager) = self.lease_manager.upgrade() else { return };
        for id in self.worker_ids(granted.slot) {
            let gpu_slot = lease_manager.worker_slot(id, granted);
            let mut slot = worker_slot(id, self.context.hidden_variables);
            slot.environment.extend(gpu_slot.environment);
            self.context.run_handle.add_worker(WorkerSlot { environment: slot.environment, ..gpu_slot });
        }
    }

    fn on_lost(&mut self, slot: usize, why: &str) {
        self.set_state(slot, GpuSlotState::Requested);
        self.context.printer.warn(format_args!("lost a GPU ({why}); its tasks continue on other workers"));
        for id in self.worker_ids(slot) {
            self.context.run_handle.withdraw_worker(id, why);
        }
    }

    fn on_refused(&mut self, slot: usize, why: &str) {
        self.set_state(slot, GpuSlotState::Refused);
        if self.slots.iter().all(|state| *state == GpuSlotState::Refused) {
            return self.context.stop.now(StopReason::Failed(anyhow!("no GPU was granted: {why}")));
        }
        self.context.printer.warn(format_args!("a GPU was not granted: {why}"));
    }

    fn set_state(&mut self, slot: usize, state: GpuSlotState) {
        if let Some(current) = self.slots.get_mut(slot) {
            *current = state;
        }
        self.context.waiting.set_text(slot, None);
    }

    fn worker_ids(&self, slot: usize) -> impl Iterator<Item = WorkerId> + use<> {
        let first = u32::try_from(slot).unwrap_or(u32::MAX).saturating_mul(self.each);
        (first..first.saturating_add(self.each)).map(WorkerId)
    }
}

/// Enforces the GPU memory limit of workers by polling the agent's readings.
#[derive(Debug)]
struct GpuMemoryLimit {
    lease_manager: Weak<GpuLeaseManager>,
    context: MapContext,
    /// Workers per slot.
    workers_each: u32,
    /// Limit in bytes.
    allowed: u64,
}

impl GpuMemoryLimit {
    /// Starts the polling thread.
    fn start(self) -> anyhow::Result<PeriodicThread> {
        PeriodicThread::start("gpupool-gpu-memory", move |end| {
            let mut was_known = true;
            while !end.wait(GPU_MEMORY_POLL_INTERVAL) {
                let is_known = self.poll();
                if was_known && !is_known {
                    let what = "the agent does not report the GPU memory of workers";
                    self.context.printer.warn(format_args!("{what}; --gpu-memory-limit is not enforced"));
                }
                was_known = is_known;
            }
        })
    }

    /// Reports workers above the limit. Returns whether the memory use of all workers is known.
    fn poll(&self) -> bool {
        let Some(memory) = self.lease_manager.upgrade().and_then(|lease_manager| lease_manager.read_gpu_memory().ok())
        else {
            return false;
        };
        let mut is_known = true;
        for worker in self.context.run_handle.stats().workers {
            let Some(pid) = worker.pid else { continue };
            let tree = ProcFs::system().descendants(pid).unwrap_or_default();
            let pids: Vec<u32> = tree.iter().map(|process| process.pid).chain([pid]).collect();
            let slot = usize::try_from(worker.id.0 / self.workers_each).unwrap_or(usize::MAX);
            match memory.used_by(slot, &pids) {
                None => is_known = false,
                Some(used) if used > self.allowed => {
                    let excess = BoundExceeded::DeviceMemory { used, allowed: self.allowed };
                    self.context.run_handle.report_exceeded_bound(worker.id, pid, excess);
                }
                Some(_) => {}
            }
        }
        is_known
    }
}

//! The GPUs of a run: asked for one by one, so that work begins on the first; workers are started on what is granted, and
//! leave what is lost. The thread that does so ends when the GPUs are given back, which is when this is dropped.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, anyhow};
use gpupool_client::local::LocalAgent;
use gpupool_confine::bounds::BoundExceeded;
use gpupool_confine::process::ProcFs;
use gpupool_dispatch::gpu_leases::{GpuError, GpuEvent, GpuEventReceiver, GpuLeaseManager, GpuRequest, GrantedLease};
use gpupool_dispatch::{WorkerId, WorkerSlot};

use super::arguments::Map;
use super::progress::Ticking;
use super::stop::Reason;
use super::{MapContext, place};
use crate::connect::converse;
use crate::output::WrongUsage;
use crate::wish::Wish;

/// How often it is looked at what workers use of their GPUs; the agent reads no more often unless it was told to.
const GPU_LOOK: Duration = Duration::from_secs(1);

/// What is wanted, and of whom.
#[derive(Debug)]
pub(super) struct Wanted {
    agent: LocalAgent,
    wish: GpuRequest,
    places: usize,
    workers_each: u32,
    /// Most bytes of GPU memory of a worker.
    memory_limit: Option<u64>,
}

impl Wanted {
    /// Finds the agent. Nothing is asked for yet.
    pub fn find(map: &Map) -> anyhow::Result<Self> {
        let mut body = Wish { gpus: None, gpu_ids: Vec::new(), ..map.wish.clone() }.body()?;
        body.worker_id.get_or_insert_with(|| "map".into());
        let gpu_ids = map.wish.gpu_ids.clone();
        let leases = map.wish.gpus.map_or(usize::from(gpu_ids.is_empty()), usize::from);
        let places = gpu_ids.len().max(leases);
        let agent = converse(map.connect.local_agent("`gpupool map` starts its workers"));
        let agent = agent.map_err(|error| match error.is::<WrongUsage>() {
            true => error,
            false => anyhow!("{error:#}; without GPUs: --gpus 0"),
        })?;
        let memory_limit = map.gpu_memory_limit.map(|mib| mib << 20);
        let wish = GpuRequest { body, leases, gpu_ids };
        Ok(Self { agent, wish, places, workers_each: map.jobs.unwrap_or(1), memory_limit })
    }
}

/// GPUs that are held or waited for. Dropped when the workers are gone.
#[derive(Debug)]
pub(super) struct Gpus {
    memory: Option<Ticking>,
    keeper: Option<Arc<GpuLeaseManager>>,
    thread: Option<JoinHandle<()>>,
}

impl Gpus {
    /// Asks for them.
    pub fn start(wanted: Wanted, context: MapContext) -> anyhow::Result<Self> {
        let Wanted { agent, wish, places, workers_each, memory_limit } = wanted;
        let (keeper, news) = GpuLeaseManager::start(agent, wish).map_err(|error| match error {
            GpuError::Request { .. } => WrongUsage::of(error).into(),
            other => anyhow::Error::from(other),
        })?;
        let keeper = Arc::new(keeper);
        let limit = memory_limit.map(|allowed| GpuMemoryLimit {
            keeper: Arc::downgrade(&keeper),
            context: context.clone(),
            workers_each,
            allowed,
        });
        let memory = limit.map(GpuMemoryLimit::keep).transpose()?;
        let workers =
            Workers { keeper: Arc::downgrade(&keeper), each: workers_each, context, held: vec![Held::Asked; places] };
        let thread = std::thread::Builder::new().name("gpupool-workers".into()).spawn(move || workers.follow(news));
        let thread = thread.context("cannot start a thread to follow the GPUs")?;
        Ok(Self { memory, keeper: Some(keeper), thread: Some(thread) })
    }
}

impl Drop for Gpus {
    fn drop(&mut self) {
        drop(self.memory.take());
        drop(self.keeper.take());
        if let Some(thread) = self.thread.take() {
            // A panic of it has told of itself.
            let _ = thread.join();
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    Asked,
    Granted,
    Refused,
}

/// Starts and stops workers as GPUs come and go.
#[derive(Debug)]
struct Workers {
    keeper: Weak<GpuLeaseManager>,
    each: u32,
    context: MapContext,
    held: Vec<Held>,
}

impl Workers {
    fn follow(mut self, mut news: GpuEventReceiver) {
        while let Some(news) = news.blocking_next() {
            match news {
                GpuEvent::Granted(granted) => self.granted(&granted),
                GpuEvent::Lost { slot: place, why } => self.lost(place, &why),
                GpuEvent::Refused { slot: place, why } => self.refused(place, &why),
                GpuEvent::Waiting { slot: place, text } => {
                    if self.context.waiting.set(place, Some(text.clone())) && self.context.voice.bars.is_none() {
                        self.context.voice.note(text);
                    }
                }
                GpuEvent::Note(text) => self.context.voice.note(text),
            }
        }
    }

    fn granted(&mut self, granted: &GrantedLease) {
        self.set(granted.slot, Held::Granted);
        let devices = granted.devices.iter().map(|device| format!("GPU {} ({})", device.gpu_id, device.name));
        self.context.voice.note(format_args!("granted: {}", devices.collect::<Vec<_>>().join(", ")));
        // Else the GPUs are being given back.
        let Some(keeper) = self.keeper.upgrade() else { return };
        for id in self.ids(granted.slot) {
            let on = keeper.worker_slot(id, granted);
            let mut place = place(id);
            place.environment.extend(on.environment);
            self.context.remote.add_worker(WorkerSlot { environment: place.environment, ..on });
        }
    }

    fn lost(&mut self, place: usize, why: &str) {
        self.set(place, Held::Asked);
        self.context.voice.warn(format_args!("a GPU was lost ({why}); its tasks are done elsewhere"));
        for id in self.ids(place) {
            self.context.remote.withdraw_worker(id, why);
        }
    }

    fn refused(&mut self, place: usize, why: &str) {
        self.set(place, Held::Refused);
        if self.held.iter().all(|held| *held == Held::Refused) {
            return self.context.stop.now(Reason::Failed(anyhow!("no GPU was granted: {why}")));
        }
        self.context.voice.warn(format_args!("a GPU was not granted: {why}"));
    }

    fn set(&mut self, place: usize, held: Held) {
        if let Some(one) = self.held.get_mut(place) {
            *one = held;
        }
        self.context.waiting.set(place, None);
    }

    fn ids(&self, place: usize) -> impl Iterator<Item = WorkerId> + use<> {
        let first = u32::try_from(place).unwrap_or(u32::MAX).saturating_mul(self.each);
        (first..first.saturating_add(self.each)).map(WorkerId)
    }
}

/// Holds workers to their GPU memory: by looking, as often as the agent does, at what it says their processes use.
#[derive(Debug)]
struct GpuMemoryLimit {
    keeper: Weak<GpuLeaseManager>,
    context: MapContext,
    /// Workers of each place.
    workers_each: u32,
    /// Bytes.
    allowed: u64,
}

impl GpuMemoryLimit {
    /// Looks from now on.
    fn keep(self) -> anyhow::Result<Ticking> {
        Ticking::start("gpupool-gpu-memory", move |end| {
            let mut was_told = true;
            while !end.within(GPU_LOOK) {
                let is_told = self.look();
                if was_told && !is_told {
                    let what = "the agent does not tell what workers use of their GPUs";
                    self.context.voice.warn(format_args!("{what}: --gpu-memory-limit is not kept"));
                }
                was_told = is_told;
            }
        })
    }

    /// Ends whoever uses too much; `false` where nobody can tell.
    fn look(&self) -> bool {
        let Some(memory) = self.keeper.upgrade().and_then(|keeper| keeper.read_gpu_memory().ok()) else { return false };
        let mut is_told = true;
        for worker in self.context.remote.stats().workers {
            let Some(pid) = worker.pid else { continue };
            let tree = ProcFs::system().descendants(pid).unwrap_or_default();
            let pids: Vec<u32> = tree.iter().map(|process| process.pid).chain([pid]).collect();
            let place = usize::try_from(worker.id.0 / self.workers_each).unwrap_or(usize::MAX);
            match memory.used_by(place, &pids) {
                None => is_told = false,
                Some(used) if used > self.allowed => {
                    let excess = BoundExceeded::DeviceMemory { used, allowed: self.allowed };
                    self.context.remote.report_exceeded_bound(worker.id, pid, excess);
                }
                Some(_) => {}
            }
        }
        is_told
    }
}

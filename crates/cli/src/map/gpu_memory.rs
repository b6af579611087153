//! Holds workers to their GPU memory: by looking, as often as the agent does, at what it says their processes use.

use std::sync::Weak;

use gpupool_confine::bounds::Excess;
use gpupool_confine::process::ProcFs;
use gpupool_dispatch::Remote;
use gpupool_dispatch::gpus::GpuKeeper;

use super::limits::GPU_LOOK;
use super::say::Say;
use super::ticking::Ticking;

/// What workers may use, and who knows what they use.
#[derive(Debug)]
pub(super) struct GpuMemoryLimit {
    pub keeper: Weak<GpuKeeper>,
    pub remote: Remote,
    pub say: Say,
    /// Workers of each place.
    pub workers_each: u32,
    /// Bytes.
    pub allowed: u64,
}

impl GpuMemoryLimit {
    /// Looks from now on.
    pub fn keep(self) -> anyhow::Result<Ticking> {
        Ticking::start("gpupool-gpu-memory", move |over| {
            let mut was_told = true;
            while !over.within(GPU_LOOK) {
                let is_told = self.look();
                if was_told && !is_told {
                    self.say
                        .warn("the agent does not tell what workers use of their GPUs: --gpu-memory-limit is not kept");
                }
                was_told = is_told;
            }
        })
    }

    /// Ends whoever uses too much; `false` where nobody can tell.
    fn look(&self) -> bool {
        let Some(memory) = self.keeper.upgrade().and_then(|keeper| keeper.gpu_memory().ok()) else { return false };
        let mut is_told = true;
        for worker in self.remote.stats().workers {
            let Some(pid) = worker.pid else { continue };
            let tree = ProcFs::here().tree(pid).unwrap_or_default();
            let pids: Vec<u32> = tree.iter().map(|process| process.pid).chain([pid]).collect();
            let place = usize::try_from(worker.id.0 / self.workers_each).unwrap_or(usize::MAX);
            match memory.of(place, &pids) {
                None => is_told = false,
                Some(used) if used > self.allowed => {
                    let excess = Excess::DeviceMemory { used, allowed: self.allowed };
                    self.remote.report_excess(worker.id, pid, excess);
                }
                Some(_) => {}
            }
        }
        is_told
    }
}

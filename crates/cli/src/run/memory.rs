//! Holding a command to its host memory: by the agent's control group, by one of our own, or by looking every second.

use gpupool_api::lease::Attached;
use gpupool_confine::cgroup::{Cgroups, Limits, MemoryGroup};
use gpupool_confine::limits::TREE_MEMORY_INTERVAL;
use gpupool_confine::process::{ProcessHandle, ProcessId, TreeMemory};
use gpupool_confine::spawn::{Job, Prepared, SpawnError};

/// How a command is held to its host memory.
#[derive(Debug)]
pub(super) enum HostMemory {
    /// It is not.
    Free,
    /// By the kernel, in a group of the agent.
    AgentsGroup(Option<MemoryGroup>),
    /// By the kernel, in a group of ours.
    OwnGroup,
    /// By us.
    Watched {
        /// Bytes.
        most: u64,
        /// Why no group does it.
        why: String,
    },
}

impl HostMemory {
    /// Puts a command that does not run yet where it is held as well as possible.
    pub fn arrange(most_mib: Option<u64>, attached: Option<&Attached>, prepared: &mut Prepared) -> Self {
        let most = most_mib.map(|mib| mib.saturating_mul(1 << 20));
        if let Some(attached) = attached.filter(|attached| attached.cgroup.is_some()) {
            return match most {
                None => Self::Free,
                Some(_) if attached.memory_limited => Self::AgentsGroup(MemoryGroup::of(prepared.id().pid)),
                Some(most) => {
                    let why = attached.caveat.clone().unwrap_or_else(|| "the agent cannot limit memory".into());
                    Self::Watched { most, why }
                }
            };
        }
        match (own_group(most, prepared), most) {
            (_, None) => Self::Free,
            (Ok(Limited::ByKernel), Some(_)) => Self::OwnGroup,
            (Ok(Limited::No), Some(most)) => {
                Self::Watched { most, why: "no memory controller can be used here".into() }
            }
            (Err(why), Some(most)) => Self::Watched { most, why },
        }
    }

    /// What is in force, in a sentence, where anything is.
    pub fn describe(&self, most_mib: Option<u64>) -> Option<String> {
        let most = most_mib?;
        match self {
            Self::Free => None,
            Self::AgentsGroup(_) => {
                Some(format!("host memory is limited to {most} MiB by a control group of the agent"))
            }
            Self::OwnGroup => Some(format!("host memory is limited to {most} MiB by a control group of this user")),
            Self::Watched { why, .. } => {
                let every = TREE_MEMORY_INTERVAL.as_secs();
                Some(format!("host memory is limited to {most} MiB by looking every {every} s ({why})"))
            }
        }
    }

    /// Comes back with the bytes in use when they are too many; only where it is us who look.
    pub async fn exceeded(&self, job: u32) -> u64 {
        let Self::Watched { most, .. } = self else { return std::future::pending().await };
        let root = tree_root(job);
        loop {
            let measured = TreeMemory::measure(root).map_or(0, |tree| tree.bytes);
            if measured > *most {
                return measured;
            }
            tokio::time::sleep(TREE_MEMORY_INTERVAL).await;
        }
    }

    /// How many processes the kernel killed for being over the limit.
    pub fn kills(&self, job: &Job) -> u64 {
        match self {
            Self::AgentsGroup(Some(group)) => group.oom_kills().unwrap_or(0),
            Self::OwnGroup => job.oom_kills(),
            _ => 0,
        }
    }
}

enum Limited {
    ByKernel,
    No,
}

/// A group of this user for the command, so that nothing dodges its end; limited where that is possible.
fn own_group(most: Option<u64>, prepared: &mut Prepared) -> Result<Limited, String> {
    let cgroups = Cgroups::detect();
    if !cgroups.can_create() {
        return Err(cgroups.describe());
    }
    let limited = most.filter(|_| cgroups.limits_memory());
    let name = format!("run-{}-{}", prepared.id().pid, prepared.id().started);
    let made = cgroups.create(&name, &Limits { host_memory: limited, pids: None });
    if let Err(error) = made.map_err(SpawnError::from).and_then(|group| prepared.join(group)) {
        if let Ok(Some(group)) = cgroups.open(&name) {
            // Empty, and harmless where it stays.
            let _ = group.remove();
        }
        return Err(error.to_string());
    }
    Ok(if limited.is_some() { Limited::ByKernel } else { Limited::No })
}

/// What the command leaves behind becomes a child of its keeper: all of it is below the command's parent.
fn tree_root(job: u32) -> u32 {
    let id = ProcessId::of(job).ok().flatten();
    let parent = id.and_then(|id| ProcessHandle::open(id).ok().flatten()).and_then(|job| job.parent().ok().flatten());
    parent.filter(|parent| *parent > 1).unwrap_or(job)
}

//! Holding a command to its host memory: by the agent's control group, by one of our own, or by looking.

use gpupool_api::lease::Attached;
use gpupool_confine::bounds::{Bounds, Excess, Held, Means, Watcher};
use gpupool_confine::cgroup::{Cgroups, MemoryGroup};
use gpupool_confine::spawn::{Job, Prepared};
use tokio::sync::oneshot;

/// How a command is held to its host memory.
#[derive(Debug)]
pub(super) enum HostMemory {
    /// It is not.
    Free,
    /// By the kernel, in a group of the agent.
    AgentsGroup(Option<MemoryGroup>),
    /// By us: by the kernel, in a group of ours, or by looking.
    Ours(Box<Watch>),
}

/// Our own watch over a command.
#[derive(Debug)]
pub(super) struct Watch {
    held: Held,
    excess: oneshot::Receiver<Excess>,
    _watcher: Watcher,
}

impl HostMemory {
    /// Puts a command that does not run yet where it is held as well as possible.
    pub fn arrange(
        most_mib: Option<u64>,
        attached: Option<&Attached>,
        prepared: &mut Prepared,
    ) -> std::io::Result<Self> {
        let cgroups = match attached.filter(|attached| attached.cgroup.is_some()) {
            None => Cgroups::detect(),
            Some(_) if most_mib.is_none() => return Ok(Self::Free),
            Some(attached) if attached.memory_limited => {
                return Ok(Self::AgentsGroup(MemoryGroup::of(prepared.id().pid)));
            }
            // It stays in the agent's group, which kills it whole.
            Some(attached) => {
                Cgroups::none(attached.caveat.clone().unwrap_or_else(|| "the agent cannot limit memory".into()))
            }
        };
        let name = format!("run-{}-{}", prepared.id().pid, prepared.id().started);
        let bounds = Bounds { host_memory: most_mib.map(|mib| mib.saturating_mul(1 << 20)), ..Bounds::default() };
        let (tell, excess) = oneshot::channel();
        let watcher = Watcher::start(cgroups)?;
        // Nobody listens once the command has ended.
        let held = watcher.hold(prepared, &name, &bounds, Box::new(move |excess| drop(tell.send(excess))));
        Ok(Self::Ours(Box::new(Watch { held, excess, _watcher: watcher })))
    }

    /// What is in force, in a sentence, where anything is.
    pub fn describe(&self, most_mib: Option<u64>) -> Option<String> {
        let most = most_mib?;
        let how = match self {
            Self::Free => return None,
            Self::AgentsGroup(_) => "by a control group of the agent".to_owned(),
            Self::Ours(watch) => match watch.held.enforcement().host_memory.as_ref()? {
                Means::Kernel(_) => "by a control group of this user".to_owned(),
                by_looking => by_looking.to_string(),
            },
        };
        Some(format!("host memory is limited to {most} MiB {how}"))
    }

    /// Comes back when the command used too much and still runs.
    pub async fn exceeded(&mut self) -> Excess {
        if let Self::Ours(watch) = self
            && let Ok(excess) = (&mut watch.excess).await
        {
            return excess;
        }
        std::future::pending().await
    }

    /// How many processes the kernel killed for being over the limit.
    pub fn kills(&self, job: &Job) -> u64 {
        match self {
            Self::AgentsGroup(Some(group)) => group.oom_kills().unwrap_or(0),
            Self::Ours(_) => job.oom_kills(),
            _ => 0,
        }
    }
}

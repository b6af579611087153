//! Control groups of jobs: one for each lease that has a job, killed as a whole when the lease ends.

use std::path::Path;
use std::time::{Duration, Instant};

use gpupool_confine::cgroup::{CgroupError, CgroupLimits, CgroupManager};
use gpupool_confine::process::{ProcFs, ProcessId};
use gpupool_core::LeaseId;

/// The time that the processes of a killed group may take to exit.
const KILL_PATIENCE: Duration = Duration::from_secs(10);
/// The number of ancestors that are searched to find out whether a job is the caller's own.
const ANCESTORS: usize = 32;
/// The mount points of control groups, the longer path first.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];

/// The control groups of one agent.
pub(crate) struct JobCgroups {
    cgroups: CgroupManager,
    /// Prefix that distinguishes the groups of this agent from those of another one on the same machine.
    prefix: String,
}

/// A job that is about to start, and the control group that is ready for it.
#[derive(Debug, Default)]
pub(crate) struct PreparedJob {
    /// The job, if it is the caller's own child.
    pub job: Option<ProcessId>,
    /// The path of the group; `None` if there is none.
    pub cgroup: Option<String>,
    /// Whether the group was made for this job, rather than for an earlier one of the lease.
    pub is_new: bool,
    /// Whether the group limits the job to the requested memory.
    pub memory_limited: bool,
    /// The reason why there is no group, or no limit.
    pub caveat: Option<String>,
}

impl JobCgroups {
    /// Detects what this machine allows. The state directory identifies the agent.
    pub(crate) fn detect(state_dir: &Path) -> Self {
        Self::new(CgroupManager::detect(), state_dir)
    }

    /// Returns the control groups of the agent with this state directory.
    pub(super) fn new(cgroups: CgroupManager, state_dir: &Path) -> Self {
        // Any stable number will do: two directories with the same number clash only if their lease numbers are equal,
        // too.
        let mut number = 0xcbf2_9ce4_8422_2325_u64;
        for byte in state_dir.as_os_str().as_encoded_bytes() {
            number = (number ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
        Self { cgroups, prefix: format!("{:08x}-lease-", number >> 32) }
    }

    /// Describes in a sentence how jobs are confined here.
    pub(crate) fn describe(&self) -> String {
        self.cgroups.describe()
    }

    /// Makes a control group ready for a job that has not started yet. The job must be the caller's own child.
    pub(crate) fn prepare(
        &self,
        lease: LeaseId,
        pid: u32,
        caller: ProcessId,
        host_memory_mib: Option<u64>,
    ) -> PreparedJob {
        let job = match own_child(pid, caller) {
            Ok(job) => job,
            Err(why) => return PreparedJob { caveat: Some(why), ..PreparedJob::default() },
        };
        let without = |why: String| PreparedJob { job: Some(job), caveat: Some(why), ..PreparedJob::default() };
        if !self.cgroups.can_create() {
            return without(self.cgroups.unavailable_reason().to_owned());
        }
        let name = self.name(lease);
        let memory = host_memory_mib.map(|mib| mib.saturating_mul(1024 * 1024));
        let limited = memory.filter(|_| self.cgroups.limits_memory());
        let (group, is_new) = match self.cgroups.open(&name) {
            Ok(Some(group)) => (Ok(group), false),
            _ => (self.cgroups.create(&name, &CgroupLimits { host_memory: limited, pids: None }), true),
        };
        let group = match group {
            Ok(group) => group,
            Err(error) => return without(error.to_string()),
        };
        let not_limited = memory.is_some() && limited.is_none();
        PreparedJob {
            job: Some(job),
            cgroup: Some(group.path().display().to_string()),
            is_new,
            memory_limited: limited.is_some(),
            caveat: not_limited.then(|| "no memory controller can be used here".into()),
        }
    }

    /// Puts a prepared job into its control group.
    pub(crate) fn add(&self, lease: LeaseId, prepared: &PreparedJob) -> Result<(), CgroupError> {
        let (Some(job), Some(_)) = (prepared.job, &prepared.cgroup) else { return Ok(()) };
        match self.cgroups.open(&self.name(lease))? {
            Some(group) => group.add_process(job),
            None => Err(CgroupError::NotPossible { why: "the group was removed".into() }),
        }
    }

    /// Removes a group that was created for a job and is not needed.
    pub(crate) fn discard(&self, lease: LeaseId, prepared: &PreparedJob) {
        if prepared.is_new
            && let Ok(Some(group)) = self.cgroups.open(&self.name(lease))
        {
            // The group is empty. If it cannot be removed now, it is removed with the lease or at the next start of the
            // agent.
            let _ = group.remove();
        }
    }

    /// Returns the leases of this agent that have groups, including those from before a restart.
    pub(crate) fn leases(&self) -> Vec<LeaseId> {
        let names = self.cgroups.cgroup_names().unwrap_or_default();
        names.iter().filter_map(|name| name.strip_prefix(&self.prefix)?.parse().ok().map(LeaseId)).collect()
    }

    /// Returns the path of the group of a lease.
    pub(crate) fn path(&self, lease: LeaseId) -> Option<String> {
        let group = self.cgroups.open(&self.name(lease)).ok().flatten()?;
        Some(group.path().display().to_string())
    }

    /// Whether anything runs in the group of a lease; `None` if unknown.
    pub(crate) fn is_populated(&self, lease: LeaseId) -> Option<bool> {
        match self.cgroups.open(&self.name(lease)) {
            Ok(Some(group)) => group.is_populated().ok(),
            Ok(None) => Some(false),
            Err(_) => None,
        }
    }

    /// Kills everything in the group of a lease and removes it. Returns whether nothing is left. Blocks.
    pub(crate) fn remove(&self, lease: LeaseId) -> bool {
        let group = match self.cgroups.open(&self.name(lease)) {
            Ok(Some(group)) => group,
            Ok(None) => return true,
            Err(error) => {
                tracing::error!(lease = lease.0, %error, "cannot open the control group of a lease");
                return false;
            }
        };
        let removed = group
            .kill()
            .and_then(|()| group.wait_empty(Instant::now() + KILL_PATIENCE))
            .and_then(|empty| if empty { group.remove().map(|()| true) } else { Ok(false) });
        removed.unwrap_or_else(|error| {
            tracing::error!(lease = lease.0, %error, "cannot kill the control group of a lease");
            false
        })
    }

    /// Returns the prefix of this agent's group names.
    #[cfg(test)]
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    fn name(&self, lease: LeaseId) -> String {
        format!("{}{lease}", self.prefix)
    }
}

/// Returns the path of a group as `/proc/PID/cgroup` shows it.
pub(super) fn path_in_proc(path: &str) -> String {
    MOUNTS.iter().find_map(|mount| path.strip_prefix(mount)).unwrap_or(path).to_owned()
}

/// Returns the process with this number, if it descends from the caller.
fn own_child(pid: u32, caller: ProcessId) -> Result<ProcessId, String> {
    let not_yours = || format!("process {pid} is no child of the caller, process {}", caller.pid);
    let job = ProcessId::of_pid(pid).map_err(|error| error.to_string())?.ok_or_else(not_yours)?;
    let procfs = ProcFs::system();
    let mut at = pid;
    for _ in 0..ANCESTORS {
        let stat = procfs.stat(at).map_err(|error| error.to_string())?.ok_or_else(not_yours)?;
        if stat.parent == caller.pid {
            return Ok(job);
        }
        at = stat.parent;
        if at <= 1 {
            break;
        }
    }
    Err(not_yours())
}

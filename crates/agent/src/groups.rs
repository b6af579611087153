//! Control groups of jobs: one for each lease whose job was put into one, killed whole when the lease is over.

use std::path::Path;
use std::time::{Duration, Instant};

use gpupool_confine::cgroup::{Cgroups, Group, GroupError, Limits};
use gpupool_confine::process::{ProcFs, ProcessId};
use gpupool_core::LeaseId;

/// How long the processes of a killed group may take to go before it is said that they stay.
const KILL_PATIENCE: Duration = Duration::from_secs(10);
/// Ancestors looked at to find out whether a job is the caller's own.
const ANCESTORS: usize = 32;

/// Where jobs of leases run.
pub struct Groups {
    cgroups: Cgroups,
    /// Tells the groups of this agent from those of another on the same machine.
    prefix: String,
}

/// How a job is held.
#[derive(Debug, Default)]
pub struct Confined {
    /// The job, where it is the caller's own.
    pub job: Option<ProcessId>,
    /// The group it is in.
    pub group: Option<String>,
    /// Whether the group holds it to the memory asked for.
    pub memory_limited: bool,
    /// Why there is no group, or no limit.
    pub caveat: Option<String>,
}

impl Groups {
    /// What this machine allows to an agent of this state directory.
    pub fn detect(state_dir: &Path) -> Self {
        // Any stable number will do; two directories with the same one would only have to differ in lease numbers too.
        let mut number = 0xcbf2_9ce4_8422_2325_u64;
        for byte in state_dir.as_os_str().as_encoded_bytes() {
            number = (number ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
        Self { cgroups: Cgroups::detect(), prefix: format!("{:08x}-lease-", number >> 32) }
    }

    /// How jobs are held here, in a sentence.
    pub fn describe(&self) -> String {
        self.cgroups.describe()
    }

    /// Puts a job that has not started yet into a group of its lease. The job must be the caller's own child.
    pub fn take_in(&self, lease: LeaseId, pid: u32, caller: ProcessId, host_memory_mib: Option<u64>) -> Confined {
        let job = match own_child(pid, caller) {
            Ok(job) => job,
            Err(why) => return Confined { caveat: Some(why), ..Confined::default() },
        };
        let without = |why: String| Confined { job: Some(job), caveat: Some(why), ..Confined::default() };
        if !self.cgroups.can_create() {
            return without(self.cgroups.why_not().to_owned());
        }
        let name = self.name(lease);
        let memory = host_memory_mib.map(|mib| mib.saturating_mul(1024 * 1024));
        let limited = memory.filter(|_| self.cgroups.limits_memory());
        // Whoever attaches again adds to the group there is.
        let made = match self.cgroups.open(&name) {
            Ok(Some(group)) => group.add(job).map(|()| group),
            _ => self.make(&name, limited, job),
        };
        let group = match made {
            Ok(group) => group,
            Err(error) => return without(error.to_string()),
        };
        let not_limited = memory.is_some() && limited.is_none();
        Confined {
            job: Some(job),
            group: Some(group.path().display().to_string()),
            memory_limited: limited.is_some(),
            caveat: not_limited.then(|| "no memory controller can be used here".into()),
        }
    }

    /// A new group with this job in it, or nothing.
    fn make(&self, name: &str, host_memory: Option<u64>, job: ProcessId) -> Result<Group, GroupError> {
        let group = self.cgroups.create(name, &Limits { host_memory, pids: None })?;
        match group.add(job) {
            Ok(()) => Ok(group),
            Err(error) => {
                // Nothing is in it: an empty one that stays is removed with the lease.
                let _ = group.remove();
                Err(error)
            }
        }
    }

    /// The leases of this agent that have groups, from before a restart too.
    pub fn leases(&self) -> Vec<LeaseId> {
        let names = self.cgroups.names().unwrap_or_default();
        names.iter().filter_map(|name| name.strip_prefix(&self.prefix)?.parse().ok().map(LeaseId)).collect()
    }

    /// The group of a lease, if it has one.
    pub fn path(&self, lease: LeaseId) -> Option<String> {
        let group = self.cgroups.open(&self.name(lease)).ok().flatten()?;
        Some(group.path().display().to_string())
    }

    /// Whether anything runs in the group of a lease; `None` where that cannot be told.
    pub fn is_populated(&self, lease: LeaseId) -> Option<bool> {
        match self.cgroups.open(&self.name(lease)) {
            Ok(Some(group)) => group.is_populated().ok(),
            Ok(None) => Some(false),
            Err(_) => None,
        }
    }

    /// Kills everything in the group of a lease and removes it; says whether nothing is left. Takes its time.
    pub fn remove(&self, lease: LeaseId) -> bool {
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

    fn name(&self, lease: LeaseId) -> String {
        format!("{}{lease}", self.prefix)
    }
}

/// Where control groups are mounted, the longer place first.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];

/// The path of a group as processes in it are told where they are.
pub fn as_processes_tell(path: &str) -> String {
    MOUNTS.iter().find_map(|mount| path.strip_prefix(mount)).unwrap_or(path).to_owned()
}

/// The process with this number, if it descends from the caller.
fn own_child(pid: u32, caller: ProcessId) -> Result<ProcessId, String> {
    let not_yours = || format!("process {pid} is no child of the caller, process {}", caller.pid);
    let job = ProcessId::of(pid).map_err(|error| error.to_string())?.ok_or_else(not_yours)?;
    let procfs = ProcFs::here();
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

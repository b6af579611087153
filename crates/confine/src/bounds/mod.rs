//! Bounds on jobs: host memory, processes and threads, CPU time, device memory.
//!
//! A [`BoundsWatcher`] puts each job into a cgroup if one can be created, and the kernel enforces the bounds that it
//! can. One thread enforces the others by polling the job's processes, more often the closer the job is to a bound; it
//! calls the caller, which kills the job. [`BoundsEnforcement`] describes the method of each bound for people. A job
//! consists of all processes below its supervisor, orphans included. Polling eight jobs far from their bounds takes 0.2
//! to 0.3 % of a core on a machine with a hundred processes. The thread ends when the watcher is dropped; a job is no
//! longer polled when its [`BoundedJob`] is dropped.

mod job_monitor;
mod watcher;

use std::fmt;
use std::time::Duration;

pub use watcher::{BoundedJob, BoundsWatcher};

pub use crate::cgroup::DeviceMemoryLimit;
use crate::cgroup::{CgroupManager, CgroupVersion, NO_DMEM_CONTROLLER};
use crate::limits::{LONGEST_POLL_INTERVAL, SHORTEST_POLL_INTERVAL, SHORTEST_TREE_POLL_INTERVAL};

/// Bounds of a job; `None` means unbounded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JobBounds {
    /// Bytes of host memory. Memory shared by its processes counts once; swap is not added.
    pub host_memory: Option<u64>,
    /// Processes and threads at one time, as the kernel counts them. The kernel refuses to start more; without a
    /// cgroup, a job that started more exceeds its bound.
    pub processes: Option<u64>,
    /// CPU time of all its processes together, exited ones included.
    pub cpu_time: Option<Duration>,
    /// Device memory, which only the kernel can enforce.
    pub device_memory: Vec<DeviceMemoryLimit>,
}

/// Current usage of a job; `None` if it is unknown or the job has ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct JobUsage {
    /// Bytes of host memory. A cgroup also counts file pages that stay in memory.
    pub host_memory: Option<u64>,
    /// CPU time since the job started, or since the count was restarted.
    pub cpu_time: Option<Duration>,
    /// Processes and threads.
    pub processes: Option<u64>,
}

/// Method that enforces a bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnforcementMethod {
    /// Enforced by the kernel, immediately.
    Kernel(CgroupVersion),
    /// Enforced by polling.
    Polling {
        /// Shortest poll interval, close to the bound.
        shortest: Duration,
        /// Longest poll interval, far from the bound.
        longest: Duration,
        /// Source of the count, or the reason why the kernel does not enforce the bound.
        why: String,
    },
    /// Not enforced.
    Unenforced { why: String },
}

/// Enforcement method of each bound of a job; `None` if there is no such bound.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BoundsEnforcement {
    pub host_memory: Option<EnforcementMethod>,
    pub processes: Option<EnforcementMethod>,
    pub cpu_time: Option<EnforcementMethod>,
    pub device_memory: Option<EnforcementMethod>,
}

impl BoundsEnforcement {
    /// Returns the methods for a job with all bounds, provided that its cgroup can be created.
    pub fn for_cgroups(cgroups: &CgroupManager) -> Self {
        let why = |controller: &str| match cgroups.unavailable_reason() {
            "" => format!("no {controller} controller can be used here"),
            why => why.to_owned(),
        };
        let limited = |by: Option<CgroupVersion>, or: EnforcementMethod| by.map_or(or, EnforcementMethod::Kernel);
        let dmem = EnforcementMethod::Unenforced { why: NO_DMEM_CONTROLLER.to_owned() };
        Self {
            host_memory: Some(limited(
                cgroups.version_with(|hierarchy| hierarchy.memory),
                EnforcementMethod::polling(SHORTEST_POLL_INTERVAL, why("memory")),
            )),
            processes: Some(limited(
                cgroups.version_with(|hierarchy| hierarchy.pids),
                EnforcementMethod::polling(SHORTEST_TREE_POLL_INTERVAL, why("pids")),
            )),
            cpu_time: Some(EnforcementMethod::cpu_time(cgroups.version_with(|hierarchy| hierarchy.cpu))),
            device_memory: Some(limited(cgroups.version_with(|hierarchy| hierarchy.dmem), dmem)),
        }
    }

    /// Keeps only the methods of bounds that are set.
    fn retain_bounds(self, bounds: &JobBounds) -> Self {
        Self {
            host_memory: self.host_memory.filter(|_| bounds.host_memory.is_some()),
            processes: self.processes.filter(|_| bounds.processes.is_some()),
            cpu_time: self.cpu_time.filter(|_| bounds.cpu_time.is_some()),
            device_memory: self.device_memory.filter(|_| !bounds.device_memory.is_empty()),
        }
    }

    /// Lists each bound with its name and method.
    pub fn bounds(&self) -> impl Iterator<Item = (&'static str, &EnforcementMethod)> {
        let all = [
            ("host memory", &self.host_memory),
            ("processes", &self.processes),
            ("CPU time", &self.cpu_time),
            ("GPU memory", &self.device_memory),
        ];
        all.into_iter().filter_map(|(name, method)| method.as_ref().map(|method| (name, method)))
    }

    /// Describes the polled bounds and their intervals.
    pub(crate) fn describe_polling(&self) -> String {
        let text = self.bounds().filter_map(|(name, method)| match method {
            EnforcementMethod::Polling { shortest, longest, .. } => {
                Some(format!("{name} polled every {} to {}", format_interval(*shortest), format_interval(*longest)))
            }
            _ => None,
        });
        text.collect::<Vec<_>>().join(", ")
    }
}

impl EnforcementMethod {
    fn polling(shortest: Duration, why: String) -> Self {
        Self::Polling { shortest, longest: LONGEST_POLL_INTERVAL, why }
    }

    /// Returns the method for CPU time. No kernel limits the CPU time of several processes together; a cgroup counts
    /// it.
    fn cpu_time(counted_by: Option<CgroupVersion>) -> Self {
        match counted_by {
            None => Self::polling(SHORTEST_TREE_POLL_INTERVAL, "summed over its processes".to_owned()),
            Some(version) => Self::polling(SHORTEST_POLL_INTERVAL, format!("counted by {}", version_name(version))),
        }
    }
}

impl fmt::Display for EnforcementMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(version) => write!(f, "by the kernel ({})", version_name(*version)),
            Self::Polling { shortest, longest, why } => {
                write!(f, "by polling every {} to {} ({why})", format_interval(*shortest), format_interval(*longest))
            }
            Self::Unenforced { why } => write!(f, "not enforced ({why})"),
        }
    }
}

/// For example "host memory by the kernel (cgroup v2), CPU time by polling every 10 ms to 1 s (counted by cgroup v2)".
impl fmt::Display for BoundsEnforcement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text: Vec<String> = self.bounds().map(|(name, method)| format!("{name} {method}")).collect();
        f.write_str(if text.is_empty() { "no bounds" } else { "" })?;
        f.write_str(&text.join(", "))
    }
}

fn version_name(version: CgroupVersion) -> &'static str {
    match version {
        CgroupVersion::V1 => "cgroup v1",
        CgroupVersion::V2 => "cgroup v2",
    }
}

fn format_interval(time: Duration) -> String {
    match (time.as_secs(), time.subsec_millis()) {
        (seconds, 0) => format!("{seconds} s"),
        _ => format!("{} ms", time.as_millis()),
    }
}

/// A bound that a job exceeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BoundExceeded {
    /// Bytes of host memory.
    HostMemory {
        /// `None` if the kernel stopped the job at the bound.
        used: Option<u64>,
        allowed: u64,
    },
    /// Processes and threads at one time.
    Processes { used: u64, allowed: u64 },
    /// CPU time.
    CpuTime { used: Duration, allowed: Duration },
    /// Bytes of device memory, as reported by the caller.
    DeviceMemory { used: u64, allowed: u64 },
}

/// For example "it used 612 MiB of host memory; 512 MiB allowed".
impl fmt::Display for BoundExceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostMemory { used: Some(used), allowed } => {
                write!(f, "it used {} of host memory; {} allowed", format_mib(*used), format_mib(*allowed))
            }
            Self::HostMemory { used: None, allowed } => {
                write!(f, "it used more than {} of host memory", format_mib(*allowed))
            }
            Self::Processes { used, allowed } => {
                write!(f, "it had {used} processes and threads; {allowed} allowed")
            }
            Self::DeviceMemory { used, allowed } => {
                write!(f, "it used {} of GPU memory; {} allowed", format_mib(*used), format_mib(*allowed))
            }
            Self::CpuTime { used, allowed } => {
                let (used, allowed) = (used.as_secs_f64(), allowed.as_secs_f64());
                write!(f, "it used {used:.2} s of CPU time; {allowed:.2} s allowed")
            }
        }
    }
}

/// Formats bytes in MiB; less than 1 MiB in bytes.
fn format_mib(bytes: u64) -> String {
    match bytes >> 20 {
        0 => format!("{bytes} bytes"),
        mib => format!("{mib} MiB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_cgroups_every_bound_but_gpu_memory_is_polled() {
        let text = BoundsEnforcement::for_cgroups(&CgroupManager::unavailable("it is a test")).to_string();
        let expected = "host memory by polling every 10 ms to 1 s (it is a test), \
            processes by polling every 50 ms to 1 s (it is a test), \
            CPU time by polling every 50 ms to 1 s (summed over its processes), \
            GPU memory not enforced (no dmem controller of cgroup v2 (kernel 6.14 or newer) can be used here)";
        assert_eq!(text, expected);
        assert_eq!(BoundsEnforcement::default().to_string(), "no bounds");
    }

    #[test]
    fn exceeded_bounds_are_described_in_a_sentence() {
        let memory = |used| BoundExceeded::HostMemory { used, allowed: 512 << 20 };
        assert_eq!(memory(Some(612 << 20)).to_string(), "it used 612 MiB of host memory; 512 MiB allowed");
        assert_eq!(memory(None).to_string(), "it used more than 512 MiB of host memory");
        let small = BoundExceeded::HostMemory { used: Some(5000), allowed: 4096 };
        assert_eq!(small.to_string(), "it used 5000 bytes of host memory; 4096 bytes allowed");
        let processes = BoundExceeded::Processes { used: 30, allowed: 20 };
        assert_eq!(processes.to_string(), "it had 30 processes and threads; 20 allowed");
        let time = BoundExceeded::CpuTime { used: Duration::from_millis(1260), allowed: Duration::from_secs(1) };
        assert_eq!(time.to_string(), "it used 1.26 s of CPU time; 1.00 s allowed");
    }
}

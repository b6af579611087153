//! Holding jobs to bounds: host memory, processes and threads, processor time, memory of devices.
//!
//! A [`BoundsWatcher`] puts each job into a control group, where one can be made, and lets the kernel keep what it can. All else
//! one thread keeps by looking at the job's processes, the more often the closer the job is to a bound; it tells the
//! caller, who kills. Which way each bound is kept is an [`BoundsEnforcement`], to be shown to people. A job is everything
//! below its keeper, so what it orphans is found as well. Looking after eight jobs that are far from their bounds takes
//! 0.2 to 0.3 % of a core on a machine with a hundred processes.
//! The thread ends when the watcher is dropped; a job is no longer looked at when its [`BoundedJob`] is dropped.

mod look;
mod watcher;

use std::fmt;
use std::time::Duration;

pub use watcher::{BoundedJob, BoundsWatcher};

pub use crate::cgroup::DeviceMemoryLimit;
use crate::cgroup::{CgroupManager, CgroupVersion, NO_CONTROLLER};
use crate::limits::{LONGEST_LOOK_PAUSE, SHORTEST_LOOK_PAUSE, SHORTEST_TREE_PAUSE};

/// What a job may use; `None`: as much as it likes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JobBounds {
    /// Bytes of host memory. Memory its processes share is counted once; swap is not given on top.
    pub host_memory: Option<u64>,
    /// Processes and threads at one time, as the kernel counts them. The kernel refuses to make more; where it cannot,
    /// a job that made more is over its bound.
    pub processes: Option<u64>,
    /// Processor time of all its processes together, those that have ended included.
    pub cpu_time: Option<Duration>,
    /// Memory of devices, which only the kernel can keep.
    pub device_memory: Vec<DeviceMemoryLimit>,
}

/// What a job uses at this moment; `None`: cannot be told, or the job has ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct JobUsage {
    /// Bytes of host memory. Where a control group counts it, with files that were read and stay in memory.
    pub host_memory: Option<u64>,
    /// Processor time since it started, or since it was last counted anew.
    pub cpu_time: Option<Duration>,
    /// Processes and threads.
    pub processes: Option<u64>,
}

/// By what a bound is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnforcementMethod {
    /// By the kernel, at that instant.
    Kernel(CgroupVersion),
    /// By looking.
    Polling {
        /// The shortest pause between two looks, close to the bound.
        shortest: Duration,
        /// The longest, far from it.
        longest: Duration,
        /// Who counts, or why the kernel does not do it.
        why: String,
    },
    /// By nothing.
    Unenforced { why: String },
}

/// By what each bound of a job is kept; `None` where there is no bound.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BoundsEnforcement {
    pub host_memory: Option<EnforcementMethod>,
    pub processes: Option<EnforcementMethod>,
    pub cpu_time: Option<EnforcementMethod>,
    pub device_memory: Option<EnforcementMethod>,
}

impl BoundsEnforcement {
    /// What would be in force for a job with all bounds, if no surprise comes when its group is made.
    pub fn for_cgroups(cgroups: &CgroupManager) -> Self {
        let why = |controller: &str| match cgroups.unavailable_reason() {
            "" => format!("no {controller} controller can be used here"),
            why => why.to_owned(),
        };
        let limited = |by: Option<CgroupVersion>, or: EnforcementMethod| by.map_or(or, EnforcementMethod::Kernel);
        let dmem = EnforcementMethod::Unenforced { why: NO_CONTROLLER.to_owned() };
        Self {
            host_memory: Some(limited(
                cgroups.version_with(|place| place.memory),
                EnforcementMethod::looking(SHORTEST_LOOK_PAUSE, why("memory")),
            )),
            processes: Some(limited(
                cgroups.version_with(|place| place.pids),
                EnforcementMethod::looking(SHORTEST_TREE_PAUSE, why("pids")),
            )),
            cpu_time: Some(EnforcementMethod::cpu_time(cgroups.version_with(|place| place.cpu))),
            device_memory: Some(limited(cgroups.version_with(|place| place.dmem), dmem)),
        }
    }

    /// The same for a job with these bounds only.
    fn of_bounds(self, bounds: &JobBounds) -> Self {
        Self {
            host_memory: self.host_memory.filter(|_| bounds.host_memory.is_some()),
            processes: self.processes.filter(|_| bounds.processes.is_some()),
            cpu_time: self.cpu_time.filter(|_| bounds.cpu_time.is_some()),
            device_memory: self.device_memory.filter(|_| !bounds.device_memory.is_empty()),
        }
    }

    /// Each bound there is, by name.
    pub fn bounds(&self) -> impl Iterator<Item = (&'static str, &EnforcementMethod)> {
        let all = [
            ("host memory", &self.host_memory),
            ("processes", &self.processes),
            ("CPU time", &self.cpu_time),
            ("GPU memory", &self.device_memory),
        ];
        all.into_iter().filter_map(|(name, means)| means.as_ref().map(|means| (name, means)))
    }

    /// Only what is looked at, and how often.
    pub(crate) fn looked_at(&self) -> String {
        let told = self.bounds().filter_map(|(name, means)| match means {
            EnforcementMethod::Polling { shortest, longest, .. } => {
                Some(format!("{name} looked at every {} to {}", shown(*shortest), shown(*longest)))
            }
            _ => None,
        });
        told.collect::<Vec<_>>().join(", ")
    }
}

impl EnforcementMethod {
    fn looking(shortest: Duration, why: String) -> Self {
        Self::Polling { shortest, longest: LONGEST_LOOK_PAUSE, why }
    }

    /// No kernel limits the processor time of several processes together; a group counts it.
    fn cpu_time(counted_by: Option<CgroupVersion>) -> Self {
        match counted_by {
            None => Self::looking(SHORTEST_TREE_PAUSE, "added up over its processes".to_owned()),
            Some(version) => Self::looking(SHORTEST_LOOK_PAUSE, format!("counted by {}", generation(version))),
        }
    }
}

impl fmt::Display for EnforcementMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(version) => write!(f, "by the kernel ({})", generation(*version)),
            Self::Polling { shortest, longest, why } => {
                write!(f, "by looking every {} to {} ({why})", shown(*shortest), shown(*longest))
            }
            Self::Unenforced { why } => write!(f, "by nothing ({why})"),
        }
    }
}

/// "host memory by the kernel (cgroup v2), CPU time by looking every 10 ms to 1 s (counted by cgroup v2)".
impl fmt::Display for BoundsEnforcement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let told: Vec<String> = self.bounds().map(|(name, means)| format!("{name} {means}")).collect();
        f.write_str(if told.is_empty() { "no bounds" } else { "" })?;
        f.write_str(&told.join(", "))
    }
}

fn generation(version: CgroupVersion) -> &'static str {
    match version {
        CgroupVersion::V1 => "cgroup v1",
        CgroupVersion::V2 => "cgroup v2",
    }
}

fn shown(time: Duration) -> String {
    match (time.as_secs(), time.subsec_millis()) {
        (seconds, 0) => format!("{seconds} s"),
        _ => format!("{} ms", time.as_millis()),
    }
}

/// A bound that was passed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BoundExceeded {
    /// Bytes of host memory.
    HostMemory {
        /// `None` if the kernel stopped it at the bound.
        used: Option<u64>,
        allowed: u64,
    },
    /// Processes and threads at one time.
    Processes { used: u64, allowed: u64 },
    /// Processor time.
    CpuTime { used: Duration, allowed: Duration },
    /// Bytes of device memory, where somebody who can see them told.
    DeviceMemory { used: u64, allowed: u64 },
}

/// A sentence: "it used 612 MiB of host memory; 512 MiB allowed".
impl fmt::Display for BoundExceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostMemory { used: Some(used), allowed } => {
                write!(f, "it used {} of host memory; {} allowed", mib(*used), mib(*allowed))
            }
            Self::HostMemory { used: None, allowed } => {
                write!(f, "it used more than {} of host memory", mib(*allowed))
            }
            Self::Processes { used, allowed } => {
                write!(f, "it had {used} processes and threads; {allowed} allowed")
            }
            Self::DeviceMemory { used, allowed } => {
                write!(f, "it used {} of GPU memory; {} allowed", mib(*used), mib(*allowed))
            }
            Self::CpuTime { used, allowed } => {
                let (used, allowed) = (used.as_secs_f64(), allowed.as_secs_f64());
                write!(f, "it used {used:.2} s of CPU time; {allowed:.2} s allowed")
            }
        }
    }
}

/// Bytes in MiB, or exactly where they are few or no whole number of them.
fn mib(bytes: u64) -> String {
    match bytes >> 20 {
        0 => format!("{bytes} bytes"),
        mib => format!("{mib} MiB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_groups_all_but_gpu_memory_is_kept_by_looking() {
        let told = BoundsEnforcement::for_cgroups(&CgroupManager::unavailable("it is a test")).to_string();
        let expected = "host memory by looking every 10 ms to 1 s (it is a test), \
            processes by looking every 50 ms to 1 s (it is a test), \
            CPU time by looking every 50 ms to 1 s (added up over its processes), \
            GPU memory by nothing (no dmem controller of cgroup v2 (kernel 6.14 or newer) can be used here)";
        assert_eq!(told, expected);
        assert_eq!(BoundsEnforcement::default().to_string(), "no bounds");
    }

    #[test]
    fn each_is_told_in_a_sentence() {
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

//! How each bound is kept, for people.

use std::fmt;
use std::time::Duration;

use super::bound::Bounds;
use crate::cgroup::{Cgroups, NO_CONTROLLER, Version};
use crate::limits::{LONGEST_LOOK_PAUSE, SHORTEST_LOOK_PAUSE, SHORTEST_TREE_PAUSE};

/// By what a bound is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Means {
    /// By the kernel, at that instant.
    Kernel(Version),
    /// By looking.
    Looking {
        /// The shortest pause between two looks, close to the bound.
        shortest: Duration,
        /// The longest, far from it.
        longest: Duration,
        /// Who counts, or why the kernel does not do it.
        why: String,
    },
    /// By nothing.
    Nothing {
        /// Why.
        why: String,
    },
}

/// By what each bound of a job is kept; `None` where there is no bound.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Enforcement {
    /// Host memory.
    pub host_memory: Option<Means>,
    /// Processes and threads.
    pub processes: Option<Means>,
    /// Processor time.
    pub cpu_time: Option<Means>,
    /// Memory of devices.
    pub device_memory: Option<Means>,
}

impl Enforcement {
    /// What would be in force for a job with all bounds, if no surprise comes when its group is made.
    pub fn of(cgroups: &Cgroups) -> Self {
        let why = |controller: &str| match cgroups.why_not() {
            "" => format!("no {controller} controller can be used here"),
            why => why.to_owned(),
        };
        let limited = |by: Option<Version>, or: Means| by.map_or(or, Means::Kernel);
        let dmem = Means::Nothing { why: NO_CONTROLLER.to_owned() };
        Self {
            host_memory: Some(limited(cgroups.limiting_memory(), Means::memory_by_looking(why("memory")))),
            processes: Some(limited(cgroups.limiting_pids(), Means::by_tree(why("pids")))),
            cpu_time: Some(Means::cpu_time(cgroups.counting_cpu_time())),
            device_memory: Some(limited(cgroups.limiting_device_memory(), dmem)),
        }
    }

    /// The same for a job with these bounds only.
    pub(super) fn of_bounds(self, bounds: &Bounds) -> Self {
        Self {
            host_memory: self.host_memory.filter(|_| bounds.host_memory.is_some()),
            processes: self.processes.filter(|_| bounds.processes.is_some()),
            cpu_time: self.cpu_time.filter(|_| bounds.cpu_time.is_some()),
            device_memory: self.device_memory.filter(|_| !bounds.device_memory.is_empty()),
        }
    }

    /// Each bound there is, by name.
    pub fn bounds(&self) -> impl Iterator<Item = (&'static str, &Means)> {
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
            Means::Looking { shortest, longest, .. } => {
                Some(format!("{name} looked at every {} to {}", Shown(*shortest), Shown(*longest)))
            }
            _ => None,
        });
        told.collect::<Vec<_>>().join(", ")
    }
}

impl Means {
    pub(super) fn memory_by_looking(why: String) -> Self {
        Self::Looking { shortest: SHORTEST_LOOK_PAUSE, longest: LONGEST_LOOK_PAUSE, why }
    }

    pub(super) fn by_tree(why: String) -> Self {
        Self::Looking { shortest: SHORTEST_TREE_PAUSE, longest: LONGEST_LOOK_PAUSE, why }
    }

    /// No kernel limits the processor time of several processes together; a group counts it.
    pub(super) fn cpu_time(counted_by: Option<Version>) -> Self {
        match counted_by {
            None => Self::by_tree("added up over its processes".to_owned()),
            Some(version) => {
                let why = format!("counted by {}", generation(version));
                Self::Looking { shortest: SHORTEST_LOOK_PAUSE, longest: LONGEST_LOOK_PAUSE, why }
            }
        }
    }
}

impl fmt::Display for Means {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(version) => write!(f, "by the kernel ({})", generation(*version)),
            Self::Looking { shortest, longest, why } => {
                write!(f, "by looking every {} to {} ({why})", Shown(*shortest), Shown(*longest))
            }
            Self::Nothing { why } => write!(f, "by nothing ({why})"),
        }
    }
}

/// "host memory by the kernel (cgroup v2), CPU time by looking every 10 ms to 1 s (counted by cgroup v2)".
impl fmt::Display for Enforcement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let told: Vec<String> = self.bounds().map(|(name, means)| format!("{name} {means}")).collect();
        f.write_str(if told.is_empty() { "no bounds" } else { "" })?;
        f.write_str(&told.join(", "))
    }
}

fn generation(version: Version) -> &'static str {
    match version {
        Version::V1 => "cgroup v1",
        Version::V2 => "cgroup v2",
    }
}

struct Shown(Duration);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0.as_secs(), self.0.subsec_millis()) {
            (seconds, 0) => write!(f, "{seconds} s"),
            _ => write!(f, "{} ms", self.0.as_millis()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_groups_all_but_gpu_memory_is_kept_by_looking() {
        let told = Enforcement::of(&Cgroups::none("it is a test")).to_string();
        let expected = "host memory by looking every 10 ms to 1 s (it is a test), \
            processes by looking every 50 ms to 1 s (it is a test), \
            CPU time by looking every 50 ms to 1 s (added up over its processes), \
            GPU memory by nothing (no dmem controller of cgroup v2 (kernel 6.14 or newer) can be used here)";
        assert_eq!(told, expected);
        assert_eq!(Enforcement::default().to_string(), "no bounds");
    }
}

//! What a group uses, as the kernel counts it. Reading only.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::group::{Group, Part};
use super::observe::{kills_file, kills_told};
use super::texts::Version;

/// Reads what a group uses. Goes on existing after the group, and then has nothing to tell.
#[derive(Debug, Clone, Default)]
pub struct Meter {
    memory: Option<PathBuf>,
    kills: Option<PathBuf>,
    pids: Option<PathBuf>,
    cpu: Option<(Version, PathBuf)>,
}

impl Group {
    /// A meter of this group.
    pub fn meter(&self) -> Meter {
        let file = |has: fn(&Part) -> bool, name: fn(Version) -> &'static str| {
            let part = self.part_with(has)?;
            let path = part.path.join(name(part.version));
            path.is_file().then_some((part.version, path))
        };
        let cpu_file = |version| if version == Version::V2 { "cpu.stat" } else { "cpuacct.usage" };
        let memory_file = |version| if version == Version::V2 { "memory.current" } else { "memory.usage_in_bytes" };
        Meter {
            memory: file(|part| part.memory, memory_file).map(|(_, path)| path),
            kills: file(|part| part.memory, kills_file).map(|(_, path)| path),
            pids: file(|part| part.pids, |_| "pids.current").map(|(_, path)| path),
            cpu: file(|part| part.cpu, cpu_file),
        }
    }
}

impl Meter {
    /// Bytes of host memory in use; files that were read and stay in memory are counted too.
    pub fn host_memory(&self) -> Option<u64> {
        number(self.memory.as_deref()?)
    }

    /// How many processes the kernel killed because the group was over its memory limit.
    pub fn oom_kills(&self) -> Option<u64> {
        kills_told(&text(self.kills.as_deref()?)?)
    }

    /// Processes and threads there are now.
    pub fn processes(&self) -> Option<u64> {
        number(self.pids.as_deref()?)
    }

    /// Processor time used by all processes the group ever held.
    pub fn cpu_time(&self) -> Option<Duration> {
        let (version, path) = self.cpu.as_ref()?;
        match version {
            Version::V1 => number(path).map(Duration::from_nanos),
            Version::V2 => usage_told(&text(path)?),
        }
    }

    /// Which generation counts processor time.
    pub fn counts_cpu_time(&self) -> Option<Version> {
        self.cpu.as_ref().map(|(version, _)| *version)
    }
}

fn text(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn number(path: &Path) -> Option<u64> {
    text(path)?.trim().parse().ok()
}

fn usage_told(cpu_stat: &str) -> Option<Duration> {
    let micros = cpu_stat.lines().find_map(|line| line.strip_prefix("usage_usec ")?.trim().parse().ok())?;
    Some(Duration::from_micros(micros))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_read_out_of_the_statistics() {
        let told = usage_told("usage_usec 1500000\nuser_usec 1000000\nsystem_usec 500000\n");
        assert_eq!(told, Some(Duration::from_millis(1500)));
        assert_eq!(usage_told("user_usec 3\n"), None);
        assert_eq!(usage_told("usage_usec -3\n"), None);
    }

    #[test]
    fn a_meter_of_nothing_tells_nothing() {
        let meter = Meter { memory: Some("/nonexistent".into()), ..Meter::default() };
        assert_eq!((meter.host_memory(), meter.processes(), meter.cpu_time()), (None, None, None));
    }
}

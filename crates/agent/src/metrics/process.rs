//! What the agent itself uses, read from the kernel when it is asked for.

use std::fmt;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::process::{Resource, getrlimit};

use super::page::Page;

/// The kernel tells processor time in hundredths of a second, on every machine.
const TICKS_PER_SECOND: f64 = 100.0;

/// What the agent uses; each is `None` where the kernel does not tell.
#[derive(Debug, Default)]
pub(super) struct Process {
    cpu_seconds: Option<f64>,
    resident_bytes: Option<f64>,
    threads: Option<f64>,
    open_files: Option<f64>,
    most_files: Option<f64>,
}

impl Process {
    pub fn look() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        Self {
            cpu_seconds: cpu_seconds(&stat),
            resident_bytes: number_of(&status, "VmRSS:").map(|kib| kib * 1024.0),
            threads: number_of(&status, "Threads:"),
            open_files: open_files(),
            most_files: getrlimit(Resource::Nofile).current.map(|most| most as f64),
        }
    }

    pub fn encode(&self, page: &mut Page<'_>, started: SystemTime) -> fmt::Result {
        let started = started.duration_since(UNIX_EPOCH).map(|since| since.as_secs_f64()).ok();
        page.counter("process_cpu_seconds", "Processor time the agent used", self.cpu_seconds)?;
        page.gauge("process_resident_memory_bytes", "Memory of the agent", self.resident_bytes)?;
        page.gauge("process_threads", "Threads of the agent", self.threads)?;
        page.gauge("process_open_fds", "Files and connections the agent has open", self.open_files)?;
        page.gauge("process_max_fds", "Files and connections the agent may have open", self.most_files)?;
        page.gauge("process_start_time_seconds", "When the agent started, since 1970", started)
    }
}

fn number_of(status: &str, name: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The name in brackets may hold anything, brackets too; what counts comes after the last one.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let (_, after) = stat.rsplit_once(')')?;
    let mut ticks = after.split_whitespace().skip(11).map(str::parse::<f64>);
    let (user, system) = (ticks.next()?.ok()?, ticks.next()?.ok()?);
    Some((user + system) / TICKS_PER_SECOND)
}

/// Newer kernels tell the number as the size of the directory; older ones have it counted.
fn open_files() -> Option<f64> {
    let told = fs::metadata("/proc/self/fd").ok()?.len();
    if told > 0 {
        return Some(told as f64);
    }
    // The listing itself has the directory open.
    Some(fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_found_after_any_name() {
        let stat = "7 (a) b) R 1 1 1 0 -1 0 0 0 0 0 250 50 0 0 20 0 3 0 99 0 0";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(cpu_seconds("nonsense"), None);
    }

    #[test]
    fn this_process_is_told() {
        let process = Process::look();
        assert!(process.resident_bytes > Some(100_000.0), "{process:?}");
        assert!(process.threads >= Some(1.0) && process.open_files >= Some(1.0), "{process:?}");
        assert!(process.cpu_seconds.is_some() && process.most_files >= process.open_files, "{process:?}");
    }
}

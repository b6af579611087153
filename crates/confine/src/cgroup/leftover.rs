//! Groups of programs that were killed before they could remove them.
//!
//! A group of a job is named for the job's process, `run-PID-STARTED` or `worker-PID-STARTED`. Where that process is gone and
//! nobody is in the group, its owner is gone as well, or about to remove it. So such groups are looked at twice, and removed
//! if nothing changed: an owner that lives may still want to read how its job died.

use std::time::Instant;

use super::detect::Cgroups;
use crate::limits::{LEFTOVER_AGE, LEFTOVERS};
use crate::process::{ProcFs, ProcessId};

/// Groups that seemed to be nobody's.
#[derive(Debug)]
pub(crate) struct Leftovers {
    cgroups: Cgroups,
    names: Vec<String>,
    due: Instant,
}

impl Leftovers {
    /// Looks once.
    pub fn look(cgroups: &Cgroups) -> Self {
        let names = cgroups.names().unwrap_or_default();
        let names = names.into_iter().filter(|name| is_nobodys(cgroups, name)).take(LEFTOVERS).collect();
        Self { cgroups: cgroups.clone(), names, due: Instant::now() + LEFTOVER_AGE }
    }

    /// When to look again; never, where there are none.
    pub fn due(&self) -> Option<Instant> {
        (!self.names.is_empty()).then_some(self.due)
    }

    /// Looks again, and removes them.
    pub fn remove(self) {
        for name in self.names.iter().filter(|name| is_nobodys(&self.cgroups, name)) {
            let Ok(Some(group)) = self.cgroups.open(name) else { continue };
            match group.remove() {
                Ok(()) => tracing::debug!(name, "removed the group of a program that was killed"),
                // Somebody else's, or used again: no harm where it stays.
                Err(error) => tracing::debug!(name, %error, "a group that was left stays"),
            }
        }
    }
}

fn is_nobodys(cgroups: &Cgroups, name: &str) -> bool {
    let Some(process) = process_of(name) else { return false };
    // One that cannot be looked up may be there.
    let is_there = ProcFs::here().stat(process.pid).map_or(true, |stat| stat.is_some_and(|stat| stat.id() == process));
    let is_empty =
        || cgroups.open(name).ok().flatten().is_some_and(|group| group.processes().is_ok_and(|all| all.is_empty()));
    !is_there && is_empty()
}

/// The process a group is named for.
fn process_of(name: &str) -> Option<ProcessId> {
    let rest = name.strip_prefix("run-").or_else(|| name.strip_prefix("worker-"))?;
    let (pid, started) = rest.split_once('-')?;
    Some(ProcessId { pid: pid.parse().ok()?, started: started.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_groups_of_jobs_name_a_process() {
        assert_eq!(process_of("run-12-345"), Some(ProcessId { pid: 12, started: 345 }));
        assert_eq!(process_of("worker-7-8"), Some(ProcessId { pid: 7, started: 8 }));
        for name in ["lease-1", "run-12", "run-x-1", "worker-1-2-3", "86910653-lease-1", "test-run-1-2"] {
            assert_eq!(process_of(name), None, "{name}");
        }
    }
}

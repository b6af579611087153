//! What is known to run under each lease: its holder, its control group, and processes last read on devices.
//!
//! A lease that nothing is known to run under gives its devices back in the step in which it ends.

use std::collections::{HashMap, HashSet};

use gpupool_api::lease::IfTaken;
use gpupool_confine::process::ProcessId;
use gpupool_core::LeaseId;

use crate::limits::JOBS_OF_A_LEASE;

/// What runs under a lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tie {
    /// The process that holds it.
    pub process: Option<ProcessId>,
    /// Who is made to end where it is taken back.
    pub if_taken: IfTaken,
    /// Processes that were told to run under it; a restarted agent does not know them any more.
    pub jobs: Vec<ProcessId>,
    /// The control group of its jobs.
    pub group: Option<String>,
    /// The user it belongs to, where the kernel vouches for it.
    pub uid: Option<u32>,
}

impl Tie {
    /// A job runs under it, too. Of too many the oldest, which most likely has ended, is forgotten.
    pub fn add_job(&mut self, job: ProcessId) {
        if self.jobs.contains(&job) {
            return;
        }
        if self.jobs.len() >= JOBS_OF_A_LEASE {
            self.jobs.remove(0);
        }
        self.jobs.push(job);
    }
}

#[derive(Default)]
pub(super) struct Ties {
    by_lease: HashMap<LeaseId, Tie>,
    /// Leases with processes on devices, by the last reading.
    running: HashSet<LeaseId>,
}

impl Ties {
    pub fn of(&self, lease: LeaseId) -> Option<&Tie> {
        self.by_lease.get(&lease)
    }

    pub fn change(&mut self, lease: LeaseId) -> &mut Tie {
        self.by_lease.entry(lease).or_default()
    }

    pub fn forget(&mut self, lease: LeaseId) {
        self.by_lease.remove(&lease);
        self.running.remove(&lease);
    }

    /// Nothing is held to under it any more; what was read on devices stays.
    pub fn untie(&mut self, lease: LeaseId) {
        self.by_lease.remove(&lease);
    }

    pub fn set_running(&mut self, running: HashSet<LeaseId>) {
        self.running = running;
    }

    /// Whether something may still run under it. A holder that gave it back, or is gone, runs nothing that was not seen
    /// on a device or put into a group; one it was taken from may.
    pub fn binds(&self, lease: LeaseId, was_taken: bool) -> bool {
        let tied = |tie: &Tie| tie.group.is_some() || (was_taken && tie.process.is_some());
        self.running.contains(&lease) || self.by_lease.get(&lease).is_some_and(tied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_too_many_jobs_the_oldest_is_forgotten() {
        let mut tie = Tie::default();
        let job = |pid| ProcessId { pid, started: 1 };
        for pid in 0..=1_024 {
            tie.add_job(job(pid));
            tie.add_job(job(pid));
        }
        assert_eq!((tie.jobs.len(), tie.jobs.first(), tie.jobs.last()), (1_024, Some(&job(1)), Some(&job(1_024))));
    }
}

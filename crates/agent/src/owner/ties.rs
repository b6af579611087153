//! What is known to run under each lease: its holder, its control group, and processes last read on devices.
//!
//! A lease that nothing is known to run under gives its devices back in the step in which it ends.

use std::collections::{HashMap, HashSet};

use gpupool_confine::process::ProcessId;
use gpupool_core::LeaseId;

/// What runs under a lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tie {
    /// The process that holds it.
    pub process: Option<ProcessId>,
    /// The control group of its job.
    pub group: Option<String>,
    /// The user it belongs to, where the kernel vouches for it.
    pub uid: Option<u32>,
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

//! The leases that may still occupy their devices when they end.
//!
//! A lease without processes frees its devices in the step in which it ends. For every other lease the node first ends
//! the processes. The authority learns from attachments whether a node watches a process or has a control group for a
//! lease, and from samples which leases have processes on devices.

use std::collections::{HashMap, HashSet};

use gpupool_core::{LeaseId, NodeId};

/// The part of a lease that a node runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct LeaseOccupant {
    has_process: bool,
    has_cgroup: bool,
}

/// Occupants by lease, and leases with processes on devices by node.
#[derive(Debug, Default)]
pub(super) struct Occupancy {
    occupants: HashMap<LeaseId, LeaseOccupant>,
    running: HashMap<NodeId, HashSet<LeaseId>>,
}

impl Occupancy {
    /// Records that a node attached a process or a control group to a lease.
    pub(super) fn attach(&mut self, lease: LeaseId, has_process: bool, has_cgroup: bool) {
        if !has_process && !has_cgroup {
            return;
        }
        let occupant = self.occupants.entry(lease).or_default();
        occupant.has_process |= has_process;
        occupant.has_cgroup |= has_cgroup;
    }

    /// Assumes that a lease from before a restart is occupied, until its node reports otherwise.
    pub(super) fn assume_occupied(&mut self, lease: LeaseId) {
        self.occupants.insert(lease, LeaseOccupant { has_process: true, has_cgroup: true });
    }

    /// Replaces the leases with processes on the devices of a node.
    pub(super) fn set_running(&mut self, node: NodeId, running: HashSet<LeaseId>) {
        self.running.insert(node, running);
    }

    /// Removes the attached process and control group of a lease. Processes that a reading showed on devices stay.
    pub(super) fn drained(&mut self, lease: LeaseId) {
        self.occupants.remove(&lease);
    }

    /// Forgets a lease whose devices are free.
    pub(super) fn forget(&mut self, lease: LeaseId) {
        self.occupants.remove(&lease);
        for running in self.running.values_mut() {
            running.remove(&lease);
        }
    }

    /// Returns the number of nodes with remembered processes.
    #[cfg(test)]
    pub(super) fn nodes(&self) -> usize {
        self.running.len()
    }

    /// Forgets a node that was removed.
    pub(super) fn forget_node(&mut self, node: NodeId) {
        self.running.remove(&node);
    }

    /// Whether a node must be notified when the lease ends.
    pub(super) fn is_attached(&self, lease: LeaseId) -> bool {
        self.occupants.contains_key(&lease)
    }

    /// Whether processes of an ended lease may still run. A holder that is gone or released the lease leaves none,
    /// except those seen on a device or put into a control group. A holder that lost the lease may still run others.
    pub(super) fn occupies(&self, lease: LeaseId, taken_back: bool) -> bool {
        let occupant = self.occupants.get(&lease).copied().unwrap_or_default();
        occupant.has_cgroup
            || (taken_back && occupant.has_process)
            || self.running.values().any(|running| running.contains(&lease))
    }
}

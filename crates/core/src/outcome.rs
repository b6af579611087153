//! Outcome of a command: a reply to the caller, effects for others, and rows to commit.

use std::sync::Arc;

use serde::Serialize;

use crate::ids::{DeviceId, LeaseId, NodeId, Token};
use crate::lease::{EndCause, LeaseHolder, PlacementDecision};
use crate::policy::PolicyViolation;
use crate::request::{FieldError, IsolationLevel};
use crate::row::PoolRow;
use crate::units::{Bytes, MilliCpus, PoolTime, Share};

/// Effects and rows of one or several commands.
#[derive(Debug, Default, PartialEq)]
pub struct ApplyOutcome {
    pub effects: Vec<PoolEffect>,
    /// Rows to commit, in order: a later row about the same entity replaces an earlier one.
    pub rows: Vec<PoolRow>,
}

impl ApplyOutcome {
    /// Empties the outcome and retains its memory.
    pub fn clear(&mut self) {
        self.effects.clear();
        self.rows.clear();
    }
}

/// A change of the pool.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolEffect {
    /// A request waits.
    Queued { lease: LeaseId },
    /// A request got its devices and holds them for a confirmation until `until`.
    Offered { lease: LeaseId, token: Token, until: PoolTime, decision: Arc<PlacementDecision> },
    /// A request got its devices, or its offer was confirmed.
    Granted { lease: LeaseId, token: Token, decision: Arc<PlacementDecision> },
    /// The end of a lease was announced.
    Revoking { lease: LeaseId, at: PoolTime },
    /// A lease ended.
    Ended { lease: LeaseId, cause: EndCause },
    /// A lease ended, but its devices are not free yet: its remaining processes must exit.
    Draining { lease: LeaseId },
    /// The devices of a lease are free.
    Freed { lease: LeaseId },
    /// Processes of an ended lease stayed; the device takes no new work until they are gone.
    Quarantined { device: DeviceId, lease: LeaseId },
    /// A device started or stopped taking new work.
    DeviceOpen {
        device: DeviceId,
        /// Reason; `None` if it takes new work.
        closed: Option<DeviceClosure>,
    },
}

/// Reason why a device takes no new work at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceClosure {
    /// Its node is not reachable.
    NodeLost,
    /// Not seen since the pool was restored.
    NotSeen,
    Lost,
    Unhealthy,
    /// Hotter than 90 °C.
    Hot,
    /// An administrator cordoned it.
    Cordoned,
    /// Processes of an ended lease stayed on it.
    Quarantined,
    /// Another agent of the machine leases it.
    ClaimedElsewhere,
}

/// Reply to the caller of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandReply {
    Done,
    /// The lease of the command; its state is in the pool.
    Lease(LeaseId),
    /// The node, with its devices in the order of the command.
    Node(NodeId, Vec<DeviceId>),
}

/// Reason why a command was denied. No lease and no device changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommandDenied {
    /// A field is outside its limits.
    #[error(transparent)]
    Invalid(#[from] FieldError),
    /// A policy forbids it.
    #[error("policy {policy:?}: {rule}")]
    Policy { policy: Arc<str>, rule: PolicyViolation },
    /// The devices of this pool can never satisfy it.
    #[error("this pool can never satisfy the request: {0}")]
    Unsatisfiable(Unsatisfiable),
    /// No capacity now, and the request does not wait.
    #[error("no capacity now, and the request does not wait")]
    NoCapacity,
    /// The queue is full.
    #[error("the queue is full ({limit} requests wait)")]
    QueueFull { limit: usize },
    /// The lease does not exist or was forgotten.
    #[error("lease {0} does not exist")]
    UnknownLease(LeaseId),
    /// The token belongs to another lease.
    #[error("token {presented} does not belong to lease {lease}")]
    Stale { lease: LeaseId, presented: Token },
    #[error("lease {0} has ended")]
    Ended(LeaseId),
    /// The lease is not granted, or its offer is not confirmed.
    #[error("lease {0} is not granted yet")]
    NotGranted(LeaseId),
    /// Another holder keeps the lease alive.
    #[error("lease {lease} is held by {by}; only its end, or a release of the lease, lets another holder take it")]
    Held { lease: LeaseId, by: LeaseHolder },
    #[error("device {0} does not exist")]
    UnknownDevice(DeviceId),
    #[error("node {0} does not exist")]
    UnknownNode(NodeId),
    #[error("device {device} cannot be forgotten: {why}")]
    DeviceInUse { device: DeviceId, why: InUseReason },
    #[error("node {node} cannot be forgotten: {why}")]
    NodeInUse { node: NodeId, why: InUseReason },
}

/// Reason why a device or a node cannot be forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InUseReason {
    #[error("lease {0} holds it; release or revoke the lease first")]
    Held(LeaseId),
    #[error("lease {0} still drains on it")]
    Draining(LeaseId),
    #[error("it is quarantined because processes of lease {0} stayed")]
    Quarantined(LeaseId),
    #[error("it is present and would be registered again; forget it once it is lost or its node is down")]
    Present,
}

/// Requirement that no device of the pool can satisfy, free or not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unsatisfiable {
    /// The pool has no devices.
    #[error("the pool has no GPUs")]
    NoDevices,
    /// No device matches the selector.
    #[error("no GPU matches the selection")]
    NothingSelected,
    /// No node has this many matching devices.
    #[error("{wanted} GPUs on one node requested; the largest node has {most} that match")]
    TooManyGpus { wanted: u16, most: u16 },
    /// No matching device has this much memory.
    #[error("{wanted} of GPU memory requested; the largest matching GPU has {most}")]
    TooMuchMemory { wanted: Bytes, most: Bytes },
    /// The matching devices do not report their memory.
    #[error("the matching GPUs do not report their memory (unified memory); ask for a fraction instead")]
    MemoryUnknown,
    /// The matching devices are indivisible partitions.
    #[error("the matching GPUs are indivisible parts of {part}; ask for that fraction (1 is a whole GPU)")]
    Indivisible {
        /// Largest partition, as a share of a whole GPU.
        part: Share,
    },
    /// No matching device supports this isolation.
    #[error("no matching GPU supports isolation {0}; none and time-slicing are always possible")]
    Isolation(IsolationLevel),
    /// No node has this many CPUs.
    #[error("{wanted} host CPUs requested; the largest matching node has {most}")]
    TooManyCpus { wanted: MilliCpus, most: MilliCpus },
    /// No node has this much memory.
    #[error("{wanted} of host memory requested; the largest matching node has {most}")]
    TooMuchHostMemory { wanted: Bytes, most: Bytes },
    /// The request alone exceeds the owner's quota.
    #[error("{wanted} GPUs requested; the owner's quota is {quota}")]
    OverQuota { wanted: Share, quota: Share },
    /// Every requirement can be met on some node, but no node meets all of them.
    #[error("no single node has the GPUs, CPUs and memory")]
    NotTogether,
}

//! What comes of a command: an answer to whoever gave it, effects for whoever they concern, and rows to keep.

use std::sync::Arc;

use serde::Serialize;

use crate::ids::{DeviceId, LeaseId, NodeId, Token};
use crate::lease::{EndCause, PlacementDecision};
use crate::policy::PolicyViolation;
use crate::request::{FieldError, IsolationLevel};
use crate::row::PoolRow;
use crate::units::{Bytes, MilliCpus, PoolTime, Share};

/// What comes of one or several commands, besides the answers.
#[derive(Debug, Default, PartialEq)]
pub struct ApplyOutcome {
    pub effects: Vec<PoolEffect>,
    /// What to keep, in order: a later row about the same thing replaces an earlier one.
    pub rows: Vec<PoolRow>,
}

impl ApplyOutcome {
    /// Makes it empty and keeps its space.
    pub fn clear(&mut self) {
        self.effects.clear();
        self.rows.clear();
    }
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolEffect {
    /// A request waits.
    Queued { lease: LeaseId },
    /// A request got its devices, and holds them for a confirmation until `until`.
    Offered { lease: LeaseId, token: Token, until: PoolTime, decision: Arc<PlacementDecision> },
    /// A request got its devices, or its offer was confirmed.
    Granted { lease: LeaseId, token: Token, decision: Arc<PlacementDecision> },
    /// Its end was announced.
    Revoking { lease: LeaseId, at: PoolTime },
    /// It ended.
    Ended { lease: LeaseId, cause: EndCause },
    /// It ended, and its devices are not free yet: whatever of it still runs must go.
    Draining { lease: LeaseId },
    /// What it held is free.
    Freed { lease: LeaseId },
    /// Processes of an ended lease stayed; the device takes no new work until they are gone.
    Quarantined { device: DeviceId, lease: LeaseId },
    /// A device started or stopped taking new work.
    DeviceOpen {
        device: DeviceId,
        /// Why not; `None` where it does.
        closed: Option<DeviceClosure>,
    },
}

/// Why a device takes no new work at all.
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
    /// An administrator stopped it.
    Cordoned,
    /// Processes of an ended lease stayed on it.
    Quarantined,
}

/// The answer to whoever gave a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandReply {
    Done,
    /// About this lease; look at it for its state.
    Lease(LeaseId),
    /// This node, with its devices in the order they were given.
    Node(NodeId, Vec<DeviceId>),
}

/// Why a command was denied. No lease and no device changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommandDenied {
    /// A field is out of its limits.
    #[error(transparent)]
    Invalid(#[from] FieldError),
    /// A policy does not allow it.
    #[error("policy {policy:?}: {rule}")]
    Policy { policy: Arc<str>, rule: PolicyViolation },
    /// These devices can never satisfy it.
    #[error("can never be satisfied here: {0}")]
    Unsatisfiable(Unsatisfiable),
    /// Not now, and the request does not want to wait.
    #[error("no capacity now, and the request does not wait")]
    NoCapacity,
    /// Too many wait already.
    #[error("the queue is full ({limit} requests wait)")]
    QueueFull { limit: usize },
    /// There is no such lease, or it is long over.
    #[error("there is no lease {0}")]
    UnknownLease(LeaseId),
    /// The token is not the lease's.
    #[error("the token of lease {lease} is not {presented}")]
    Stale { lease: LeaseId, presented: Token },
    /// The lease is over.
    #[error("lease {0} has ended")]
    Ended(LeaseId),
    /// The lease is not in a state for that.
    #[error("lease {0} is not granted yet")]
    NotGranted(LeaseId),
    /// There is no such device.
    #[error("there is no device {0}")]
    UnknownDevice(DeviceId),
    /// There is no such node.
    #[error("there is no node {0}")]
    UnknownNode(NodeId),
    /// The device cannot be forgotten.
    #[error("device {device} cannot be forgotten: {why}")]
    DeviceInUse { device: DeviceId, why: InUseReason },
    /// The node cannot be forgotten.
    #[error("node {node} cannot be forgotten: {why}")]
    NodeInUse { node: NodeId, why: InUseReason },
}

/// The reason why a device or a node cannot be forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InUseReason {
    #[error("lease {0} holds it; release or revoke the lease first")]
    Held(LeaseId),
    #[error("lease {0} still drains on it")]
    Draining(LeaseId),
    #[error("it is quarantined because processes of lease {0} stayed")]
    Quarantined(LeaseId),
    #[error("it is there and would be registered again; it can be forgotten once it is lost or its node is down")]
    Present,
}

/// What no device here, free or not, can give.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unsatisfiable {
    /// The pool has no device at all.
    #[error("there are no GPUs")]
    NoDevices,
    /// No device is selected.
    #[error("no GPU matches the selection")]
    NothingSelected,
    /// No node has so many of the selected devices.
    #[error("{wanted} GPUs on one node are asked for, the largest has {most} that match")]
    TooManyGpus { wanted: u16, most: u16 },
    /// No selected device has so much memory.
    #[error("{wanted} of GPU memory are asked for, the largest matching GPU can promise {most}")]
    TooMuchMemory { wanted: Bytes, most: Bytes },
    /// Selected devices do not know their memory.
    #[error("the matching GPUs do not report their memory (unified memory): ask for a fraction instead")]
    MemoryUnknown,
    /// Selected devices are partitions that are only taken as they are.
    #[error("the matching GPUs come only in parts of {part}: ask for that fraction (1 is a whole GPU)")]
    Indivisible {
        /// The largest there are, as a part of a whole GPU.
        part: Share,
    },
    /// No selected device can isolate so.
    #[error("no matching GPU can give isolation {0}; none and time-slicing are always possible")]
    Isolation(IsolationLevel),
    /// No node has so many CPUs.
    #[error("{wanted} host CPUs are asked for, the largest matching node has {most}")]
    TooManyCpus { wanted: MilliCpus, most: MilliCpus },
    /// No node has so much memory.
    #[error("{wanted} of host memory are asked for, the largest matching node has {most}")]
    TooMuchHostMemory { wanted: Bytes, most: Bytes },
    /// More than the owner may ever hold.
    #[error("{wanted} GPUs are asked for, the owner's quota is {quota}")]
    OverQuota { wanted: Share, quota: Share },
    /// Each wish could be met somewhere, all of them nowhere.
    #[error("no node has the GPUs, CPUs and memory together")]
    NotTogether,
}

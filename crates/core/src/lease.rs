//! Leases: the life of a request from its arrival to its end, and the devices it holds.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ids::DeviceId;
use crate::policy::QueuePriority;
use crate::request::PlacementStrategy;
use crate::row::LeaseRow;
use crate::units::{Bytes, PoolTime, Share};

/// State of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = State))]
#[serde(rename_all = "snake_case")]
pub enum LeaseState {
    /// Waiting in the queue.
    Queued,
    /// Granted to a client that also waits elsewhere; held for its confirmation.
    Offered,
    /// Granted and in use.
    Active,
    /// Ended by its owner, or because its process or connection is gone.
    Released,
    /// Ended by a deadline.
    Expired,
    /// Ended by an administrator.
    Revoked,
    /// Ended by a fault.
    Failed,
}

impl LeaseState {
    /// Whether the lease has ended.
    pub const fn is_ended(self) -> bool {
        matches!(self, Self::Released | Self::Expired | Self::Revoked | Self::Failed)
    }

    /// Returns the published name of the state.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Offered => "offered",
            Self::Active => "active",
            Self::Released => "released",
            Self::Expired => "expired",
            Self::Revoked => "revoked",
            Self::Failed => "failed",
        }
    }

    /// Whether the lease holds devices. Devices that drain after the end are not held.
    pub const fn is_granted(self) -> bool {
        matches!(self, Self::Offered | Self::Active)
    }
}

/// Cause of the end of a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndCause {
    /// The owner released it.
    ByOwner,
    /// The process or connection that held it is gone.
    HolderGone,
    /// The heartbeat stopped.
    TtlPassed,
    /// The lease reached its maximum duration.
    MaxDurationPassed,
    /// The request reached its wait limit.
    WaitLimitPassed,
    /// The waiting client stopped following the request.
    Abandoned,
    /// The offer was not confirmed in time.
    OfferLapsed,
    /// An administrator revoked it.
    Revoked,
    /// A fault, with its description.
    Fault(Arc<str>),
}

impl EndCause {
    /// Returns the state in which a lease ends for this cause.
    pub const fn state(&self) -> LeaseState {
        match self {
            Self::ByOwner | Self::HolderGone => LeaseState::Released,
            Self::TtlPassed | Self::MaxDurationPassed | Self::WaitLimitPassed | Self::Abandoned | Self::OfferLapsed => {
                LeaseState::Expired
            }
            Self::Revoked => LeaseState::Revoked,
            Self::Fault(_) => LeaseState::Failed,
        }
    }
}

/// Author and reason of a revocation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocation {
    /// Owner name of the administrator.
    pub by: Arc<str>,
    /// Reason that the administrator gave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<Arc<str>>,
}

impl fmt::Display for Revocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "revoked by an administrator ({})", self.by)?;
        self.reason.as_ref().map_or(Ok(()), |reason| write!(f, ": {reason}"))
    }
}

/// Part of one device that is promised to a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DevicePromise {
    pub device: DeviceId,
    pub share: Share,
    /// Zero if the device's memory is unknown.
    pub memory: Bytes,
}

/// Rules that decided about a request, for the decision log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementDecision {
    /// Policy that applied.
    pub policy: Arc<str>,
    /// Strategy that chose the devices.
    pub strategy: PlacementStrategy,
    /// Reason why it was granted then.
    pub turn: QueueTurn,
}

/// Reason why a request was granted before others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueueTurn {
    /// Placed on arrival.
    OnArrival,
    /// Next in the queue.
    Next,
    /// Passed requests that could not use those devices.
    PassedOthers,
    /// Passed requests that could use those devices, but ends before they can start.
    EndsBeforeOthersStart,
}

/// Process, control group or connection that keeps a lease alive without renewals.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseHolder {
    /// Process of the node: its id and start time, which together never repeat within one boot.
    Process {
        pid: u32,
        /// Start time in clock ticks since boot.
        started: u64,
    },
    /// Process that is not killed when the lease is revoked: it stops the work under the lease itself.
    Supervisor {
        pid: u32,
        /// Start time in clock ticks since boot.
        started: u64,
    },
    /// All processes of a control group.
    Cgroup(Arc<str>),
    Connection,
}

impl LeaseHolder {
    /// Whether another holder may take over from this one without taking the lease away from it: a connection from a
    /// connection, which may be opened again; the same process; and the control group of its jobs from a process.
    pub(crate) fn may_be_followed_by(&self, next: &Self) -> bool {
        use LeaseHolder::{Cgroup, Connection, Process, Supervisor};
        match (self, next) {
            (Connection, Connection) | (Process { .. } | Supervisor { .. }, Cgroup(_)) => true,
            (
                Process { pid, started } | Supervisor { pid, started },
                Process { pid: next_pid, started: next_started } | Supervisor { pid: next_pid, started: next_started },
            ) => (pid, started) == (next_pid, next_started),
            (Cgroup(path), Cgroup(next_path)) => path == next_path,
            _ => false,
        }
    }
}

impl fmt::Display for LeaseHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { pid, .. } | Self::Supervisor { pid, .. } => write!(f, "process {pid}"),
            Self::Cgroup(path) => write!(f, "control group {path}"),
            Self::Connection => f.write_str("a connection"),
        }
    }
}

/// A lease: its committed row, and state that a restart resets.
#[derive(Debug, Clone)]
pub struct Lease {
    /// A lease dereferences to its row.
    row: LeaseRow,
    /// Deadline for the next heartbeat; `None` while it has a holder.
    pub expires_at: Option<PoolTime>,
    pub(crate) followed_at: PoolTime,
    pub(crate) deadline: Option<PoolTime>,
    /// Priority under which it waits, while it does.
    pub(crate) queue_priority: QueuePriority,
}

impl Lease {
    /// Continues a lease from its row with one full ttl and one full wait.
    pub(crate) fn from_row(row: LeaseRow, now: PoolTime) -> Self {
        let expires_at = (row.state == LeaseState::Active).then(|| now.after(row.request.ttl));
        Self { row, expires_at, followed_at: now, deadline: None, queue_priority: QueuePriority::default() }
    }

    pub fn row(&self) -> &LeaseRow {
        &self.row
    }

    /// Returns the end of the longest time in the queue.
    pub(crate) fn wait_end(&self) -> Option<PoolTime> {
        self.request.wait_limit.map(|limit| self.created_at.after(limit))
    }

    /// Returns the latest possible end, by promises only, because heartbeats can extend the ttl forever.
    pub fn certain_end(&self) -> Option<PoolTime> {
        [self.hard_end, self.revoke_at].into_iter().flatten().min()
    }
}

impl Deref for Lease {
    type Target = LeaseRow;

    fn deref(&self) -> &LeaseRow {
        &self.row
    }
}

impl DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut LeaseRow {
        &mut self.row
    }
}

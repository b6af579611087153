//! A lease: a request's life from the asking to the end, and what it holds meanwhile.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ids::DeviceId;
use crate::request::PlacementStrategy;
use crate::row::LeaseRow;
use crate::units::{Bytes, PoolTime, Share};

/// Where a lease is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = State))]
#[serde(rename_all = "snake_case")]
pub enum LeaseState {
    /// Waits its turn.
    Queued,
    /// Granted to an asker that waits elsewhere too; held for its confirmation.
    Offered,
    /// Granted.
    Active,
    /// Ended by its owner, or because its process or connection is gone.
    Released,
    /// Ended by the clock.
    Expired,
    /// Ended by an administrator.
    Revoked,
    /// Ended by a fault.
    Failed,
}

impl LeaseState {
    /// Whether it is over.
    pub const fn is_ended(self) -> bool {
        matches!(self, Self::Released | Self::Expired | Self::Revoked | Self::Failed)
    }

    /// Its published name.
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

    /// Whether it holds devices (what drains after the end is not held).
    pub const fn is_granted(self) -> bool {
        matches!(self, Self::Offered | Self::Active)
    }
}

/// Why a lease ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndCause {
    /// Its owner said so.
    ByOwner,
    /// Its process or connection is gone.
    HolderGone,
    /// Its heartbeat stopped.
    TtlPassed,
    /// It was held as long as it may be.
    MaxDurationPassed,
    /// It waited as long as it wanted to.
    WaitLimitPassed,
    /// It waited and nobody asked for it any more.
    Abandoned,
    /// It was offered and not confirmed in time.
    OfferLapsed,
    /// An administrator took it back.
    Revoked,
    /// A fault; the text says which.
    Fault(Arc<str>),
}

impl EndCause {
    /// The state a lease ends in for this cause.
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

/// What a lease was promised on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DevicePromise {
    pub device: DeviceId,
    pub share: Share,
    /// How much of its memory; zero where the device's memory is unknown.
    pub memory: Bytes,
}

/// Which rule decided about a request: for the decision log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementDecision {
    /// The policy that covered it.
    pub policy: Arc<str>,
    /// The strategy that chose the place.
    pub strategy: PlacementStrategy,
    /// How it came to its turn.
    pub turn: QueueTurn,
}

/// How a granted request came to its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueueTurn {
    /// It found a place as it came.
    OnArrival,
    /// It was next in the queue.
    Next,
    /// It passed requests that could not use those devices.
    PassedOthers,
    /// It passed requests that could, but it ends before they can start.
    EndsBeforeOthersStart,
}

/// Who keeps a lease alive without renewing it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseHolder {
    /// A process of the node: its id and start time, which together never repeat on one boot.
    Process {
        pid: u32,
        /// Start time in clock ticks since boot.
        started: u64,
    },
    /// The same, of one that is not ended where the lease is taken back: it ends what runs under the lease.
    Supervisor {
        pid: u32,
        /// Start time in clock ticks since boot.
        started: u64,
    },
    /// Everything in a cgroup.
    Cgroup(Arc<str>),
    Connection,
}

/// A request's life: what is kept of it, and what a restart starts anew.
#[derive(Debug, Clone)]
pub struct Lease {
    /// What is kept; a lease reads as its row.
    row: LeaseRow,
    /// When its heartbeat runs out; not while it has a holder.
    pub expires_at: Option<PoolTime>,
    pub(crate) followed_at: PoolTime,
    pub(crate) deadline: Option<PoolTime>,
}

impl Lease {
    /// A lease that goes on from its row: one full ttl, one full wait.
    pub(crate) fn from_row(row: LeaseRow, now: PoolTime) -> Self {
        let expires_at = (row.state == LeaseState::Active).then(|| now.after(row.request.ttl));
        Self { row, expires_at, followed_at: now, deadline: None }
    }

    pub fn row(&self) -> &LeaseRow {
        &self.row
    }

    /// Ends at the latest at this time, by a promise that was made and not by a heartbeat that may go on.
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

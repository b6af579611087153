//! Rows that survive a crash, each replacing the earlier one about the same entity.
//!
//! Rows are facts, not commands: an upgraded pool reads earlier decisions and never repeats them. Renewals are not
//! written; after [`crate::Pool::restore`] every lease gets one full ttl.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::device::{CordonState, DeviceFacts, DeviceLink, NodeFacts};
use crate::ids::{DeviceId, GpuId, LeaseId, NodeId, Token};
use crate::lease::{DevicePromise, EndCause, LeaseHolder, LeaseState, PlacementDecision, Revocation};
use crate::policy::Policies;
use crate::request::Request;
use crate::units::PoolTime;
use crate::workload::{TaskClass, Turnover};

/// A row to commit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolRow {
    Node(NodeRow),
    /// Device with its number on its node.
    Device(DeviceRow),
    Lease(LeaseRow),
    /// Lease that the pool no longer needs (history may retain it).
    Forget(LeaseId),
    /// Node that was removed. Its number may go to another node.
    ForgetNode(NodeId),
    /// Device that was removed. Its number may go to another device.
    ForgetDevice(DeviceId),
    /// Numbers that never repeat or go back.
    Counters(PoolCounters),
    Policies(Box<Policies>),
    /// Use of one owner.
    Usage(UsageRow),
    /// Class of the learned workload.
    Workload(WorkloadRow),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeRow {
    pub node: NodeId,
    pub facts: NodeFacts,
    pub links: Vec<DeviceLink>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceRow {
    pub device: DeviceId,
    pub node: NodeId,
    pub gpu_id: GpuId,
    pub facts: Arc<DeviceFacts>,
    pub cordon: CordonState,
}

/// A lease without its heartbeats.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LeaseRow {
    pub id: LeaseId,
    pub request: Arc<Request>,
    /// Idempotency key of the client.
    pub key: Option<Arc<str>>,
    /// State of the lease.
    pub state: LeaseState,
    pub cause: Option<EndCause>,
    pub token: Option<Token>,
    /// Node of its devices, once granted.
    pub node: Option<NodeId>,
    /// Devices that it holds or drains.
    pub promises: Arc<[DevicePromise]>,
    /// Whether its devices are not free yet after the end.
    pub draining: bool,
    /// Whether its devices are quarantined because its processes stayed.
    pub quarantined: bool,
    pub decision: Option<Arc<PlacementDecision>>,
    /// Process, control group or connection that keeps it alive.
    pub holder: Option<LeaseHolder>,
    pub created_at: PoolTime,
    pub granted_at: Option<PoolTime>,
    pub ended_at: Option<PoolTime>,
    /// Time at which a revocation takes effect.
    pub revoke_at: Option<PoolTime>,
    /// Author and reason of the revocation, if they are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revocation: Option<Arc<Revocation>>,
    /// Time at which the maximum duration ends.
    pub hard_end: Option<PoolTime>,
    /// Position in the order of arrival.
    pub seq: u64,
}

impl LeaseRow {
    /// Creates the row of a new request.
    pub(crate) fn new(id: LeaseId, seq: u64, request: Arc<Request>, key: Option<Arc<str>>, now: PoolTime) -> Self {
        Self {
            id,
            request,
            key,
            state: LeaseState::Queued,
            cause: None,
            token: None,
            node: None,
            promises: Arc::from([]),
            draining: false,
            quarantined: false,
            decision: None,
            holder: None,
            created_at: now,
            granted_at: None,
            ended_at: None,
            revoke_at: None,
            revocation: None,
            hard_end: None,
            seq,
        }
    }
}

/// Numbers that never repeat or go back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PoolCounters {
    /// Number of the next lease.
    pub next_lease: u64,
    /// Token of the next grant.
    pub next_token: u64,
    /// Arrival number of the next request.
    pub next_seq: u64,
    /// Device that `round-robin` used last.
    pub last_device: Option<DeviceId>,
    /// Arrivals that the learned workload counted.
    pub workload_arrivals: u64,
    /// Departures per arrival.
    pub turnover: Turnover,
}

/// Use of one owner in one period.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageRow {
    pub owner: Arc<str>,
    /// Number of the period, counted from time zero.
    pub period: u64,
    /// Thousandths of a GPU × milliseconds, up to `settled_at`.
    pub share_millis: u64,
    pub settled_at: PoolTime,
}

/// Class of the learned workload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkloadRow {
    pub class: TaskClass,
    pub seen: u64,
    /// Count when the workload was last adopted.
    pub in_force: u64,
}

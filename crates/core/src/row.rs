//! What survives a crash: rows, each replacing the earlier one about the same thing.
//!
//! Rows are facts, not commands: an upgraded pool reads what was decided and never decides it again. Renewals are not
//! written; after [`crate::Pool::restore`] every lease gets one full ttl.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::device::{CordonState, DeviceFacts, DeviceLink, NodeFacts};
use crate::ids::{DeviceId, GpuId, LeaseId, NodeId, Token};
use crate::lease::{DevicePromise, EndCause, LeaseHolder, LeaseState, PlacementDecision};
use crate::policy::Policies;
use crate::request::Request;
use crate::units::PoolTime;
use crate::workload::{TaskClass, Turnover};

/// One thing to keep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolRow {
    Node(NodeRow),
    /// A device and its small number: the gpu_id map.
    Device(DeviceRow),
    Lease(LeaseRow),
    /// A lease that need not be kept for the pool any more (history may keep it).
    Forget(LeaseId),
    /// A node that is not kept any more. Its number may go to another node.
    ForgetNode(NodeId),
    /// A device that is not kept any more. Its number may go to another device.
    ForgetDevice(DeviceId),
    /// What must never repeat or go back.
    Counters(PoolCounters),
    Policies(Box<Policies>),
    /// What an owner used.
    Usage(UsageRow),
    /// A class of the learned workload.
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

/// A lease, without heartbeats.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LeaseRow {
    pub id: LeaseId,
    pub request: Arc<Request>,
    /// The client's key that makes asking twice harmless.
    pub key: Option<Arc<str>>,
    /// Where it is in its life.
    pub state: LeaseState,
    pub cause: Option<EndCause>,
    pub token: Option<Token>,
    /// The node it is on, once granted.
    pub node: Option<NodeId>,
    /// What it holds, or what still drains of it.
    pub promises: Arc<[DevicePromise]>,
    /// Whether what it held is not free yet.
    pub draining: bool,
    /// Whether its devices were quarantined because its processes stayed.
    pub quarantined: bool,
    pub decision: Option<Arc<PlacementDecision>>,
    /// Who keeps it alive.
    pub holder: Option<LeaseHolder>,
    pub created_at: PoolTime,
    pub granted_at: Option<PoolTime>,
    pub ended_at: Option<PoolTime>,
    /// When a revocation takes effect.
    pub revoke_at: Option<PoolTime>,
    /// When it may be held no longer.
    pub hard_end: Option<PoolTime>,
    /// Its place in the order of arrival.
    pub seq: u64,
}

impl LeaseRow {
    /// A request that was just made, and waits.
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
            hard_end: None,
            seq,
        }
    }
}

/// What must never repeat or go back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PoolCounters {
    /// The next lease's number.
    pub next_lease: u64,
    /// The next grant's token.
    pub next_token: u64,
    /// The next place in the order of arrival.
    pub next_seq: u64,
    /// The device `round-robin` used last.
    pub last_device: Option<DeviceId>,
    /// Arrivals the learned workload has seen.
    pub workload_arrivals: u64,
    /// How many tasks leave for each that comes.
    pub turnover: Turnover,
}

/// What an owner used in a period.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageRow {
    pub owner: Arc<str>,
    /// Which period, counted from time zero.
    pub period: u64,
    /// Thousandths of a GPU × milliseconds, up to `settled_at`.
    pub share_millis: u64,
    pub settled_at: PoolTime,
}

/// A class of the learned workload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkloadRow {
    pub class: TaskClass,
    pub seen: u64,
    /// How many had been seen when the workload was last taken over.
    pub in_force: u64,
}

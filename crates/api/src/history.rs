//! The audit trail and what follows from it.

use serde::{Deserialize, Serialize};

/// The body of `GET /v1/history`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = History))]
pub struct HistoryBody {
    /// Records, in the order they were made.
    pub records: Vec<HistoryRecord>,
    /// Ask for `after=` this to go on; `null` at the end.
    pub next: Option<String>,
}

/// A lease was granted, or ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Record))]
pub struct HistoryRecord {
    /// Which lease.
    pub lease: u64,
    /// `granted` or `ended`.
    pub event: String,
    /// When.
    pub at: String,
    /// Whose it is.
    pub owner: String,
    /// The owner's own name for whoever uses it.
    pub worker_id: Option<String>,
    /// What it holds, or held.
    pub devices: Vec<HistoryDevice>,
    /// Its fencing token, where it was granted.
    pub token: Option<u64>,
    /// Why it ended.
    pub cause: Option<String>,
    /// When it was granted.
    pub granted_at: Option<String>,
    /// When it ended.
    pub ended_at: Option<String>,
}

/// What a lease held on one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = RecordDevice))]
pub struct HistoryDevice {
    /// The name of its node.
    pub node: String,
    /// Its number there.
    pub gpu_id: u32,
    /// Its UUID, or its place on the bus where it has none.
    pub uuid: String,
    /// How much of it.
    pub fraction: f64,
    /// How much of its memory, in MiB.
    pub memory_mib: u64,
}

/// The body of `GET /v1/usage`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Usage))]
pub struct UsageBody {
    /// `owner` or `gpu`.
    pub by: String,
    /// From when.
    pub since: String,
    /// Until when.
    pub until: String,
    /// Who, or which GPU, most first.
    pub lines: Vec<UsageLine>,
}

/// What one owner held, or what was held of one GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct UsageLine {
    /// The owner, or the GPU as `node/gpu_id`.
    pub name: String,
    /// In how many leases.
    pub leases: u64,
    /// Whole GPUs × hours.
    pub gpu_hours: f64,
    /// Memory in GiB × hours.
    pub memory_gib_hours: f64,
}

//! Bodies of `/v1/history` and `/v1/usage`.

use serde::{Deserialize, Serialize};

/// The body of `GET /v1/history`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = History))]
pub struct HistoryBody {
    /// Records, oldest first.
    pub records: Vec<HistoryRecord>,
    /// Value of `after=` for the next page. `null` on the last page.
    pub next: Option<String>,
}

/// Record of a grant or of the end of a lease.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Record))]
pub struct HistoryRecord {
    /// Number of the lease.
    pub lease: u64,
    /// `granted` or `ended`.
    pub event: String,
    /// Time.
    pub at: String,
    /// Owner.
    pub owner: String,
    /// The owner's name for the worker that uses the lease.
    pub worker_id: Option<String>,
    /// Devices that the lease holds or held.
    pub devices: Vec<HistoryDevice>,
    /// Fencing token, if the lease was granted.
    pub token: Option<u64>,
    /// Stable name of the reason for the end.
    pub cause: Option<String>,
    /// Administrator who revoked the lease, and the reason that was given.
    #[serde(default)]
    pub reason: Option<String>,
    /// Time of the grant.
    pub granted_at: Option<String>,
    /// Time of the end.
    pub ended_at: Option<String>,
}

/// Part of one device that a lease held.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = RecordDevice))]
pub struct HistoryDevice {
    /// Name of its node.
    pub node: String,
    /// Number of the device on its node.
    pub gpu_id: u32,
    /// UUID of the device, or its bus address if it has no UUID.
    pub uuid: String,
    /// Leased fraction of the device.
    pub fraction: f64,
    /// Leased memory in MiB.
    pub memory_mib: u64,
}

/// The body of `GET /v1/usage`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Usage))]
pub struct UsageBody {
    /// `owner` or `gpu`.
    pub by: String,
    /// Start of the period.
    pub since: String,
    /// End of the period.
    pub until: String,
    /// Totals by owner or GPU, largest first.
    pub lines: Vec<UsageLine>,
}

/// Total of one owner or one GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct UsageLine {
    /// The owner, or the GPU as `node/gpu_id`.
    pub name: String,
    /// Number of leases.
    pub leases: u64,
    /// GPU-hours, with fractions counted as such.
    pub gpu_hours: f64,
    /// GiB-hours of GPU memory.
    pub memory_gib_hours: f64,
}

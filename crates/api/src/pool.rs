//! The pool as a whole, and its devices with who holds them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The body of `GET /v1/pool`: who decides here, and how things stand.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Pool))]
pub struct PoolBody {
    /// `agent`: this server decides who holds what.
    pub authority: String,
    /// The version of the `/v1` routes.
    pub api_version: String,
    /// The version of the server.
    pub version: String,
    /// Identifies this machine; the same for every agent on it.
    pub node_id: String,
    /// The node's name.
    pub node: String,
    /// Identifies this run of the agent.
    pub run_id: String,
    /// Whether devices are simulated.
    pub simulated: bool,
    /// Devices that are known.
    pub devices: usize,
    /// Devices that take new work.
    pub open_devices: usize,
    /// Devices nothing is promised of, and that take new work.
    pub free_devices: usize,
    /// Shares of devices that are promised, in whole devices.
    pub promised: f64,
    /// Leases that are granted.
    pub active: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// Tokens below this were given out.
    pub next_token: u64,
    /// Host CPUs promised and there.
    pub cpus: PromisedAmount,
    /// Host memory promised and there, in MiB.
    pub host_memory_mib: PromisedAmount,
    /// How leased jobs are confined here, in a sentence.
    pub confinement: String,
    /// When this was so.
    pub timestamp: String,
    /// The last event that this answer includes: `GET /v1/events` with this `Last-Event-ID` continues from here.
    #[serde(default)]
    pub event_id: Option<String>,
    /// Seconds since the authority last confirmed this state; it grows while the disk hangs.
    #[serde(default)]
    pub age_secs: f64,
}

/// How much of something is promised, of how much.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Amount))]
pub struct PromisedAmount {
    /// Promised.
    pub promised: f64,
    /// There.
    pub total: f64,
}

/// The body of `GET /v1/devices`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Devices))]
pub struct DeviceList {
    /// Devices that take work, by number.
    pub devices: Vec<DeviceBody>,
    /// When this was so.
    pub timestamp: String,
    /// The last event that this answer includes: `GET /v1/events` with this `Last-Event-ID` continues from here.
    #[serde(default)]
    pub event_id: Option<String>,
    /// Seconds since the authority last confirmed who holds what; it grows while the disk hangs.
    #[serde(default)]
    pub age_secs: f64,
}

/// A device, what it reads, and who holds it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Device))]
pub struct DeviceBody {
    /// Its number on its node.
    pub gpu_id: u32,
    /// Its node.
    pub node: String,
    /// Its UUID, or its place on the bus where it has none.
    pub uuid: String,
    /// `nvidia`, `amd`, `intel` or `other`.
    pub vendor: String,
    /// Its name.
    pub name: String,
    /// Its memory that can be promised, in MiB; `null` where it has none of its own.
    pub memory_mib: Option<u64>,
    /// Memory in use, in MiB.
    pub memory_used_mib: Option<u64>,
    /// How busy it is.
    pub utilization_percent: Option<f64>,
    /// Temperature of the chip.
    pub temperature_c: Option<i32>,
    /// Power drawn, in watts.
    pub power_w: Option<f64>,
    /// `healthy`, `unhealthy` or `lost`.
    pub health: String,
    /// Why it is not healthy.
    pub health_reason: Option<String>,
    /// Whether an administrator stopped new work on it.
    pub cordoned: bool,
    /// Why it takes no new work: `node_lost`, `not_seen`, `lost`, `unhealthy`, `hot`, `cordoned`, `quarantined`.
    pub closed: Option<String>,
    /// How much of it is promised.
    pub promised: f64,
    /// How much of its memory is promised, in MiB.
    pub promised_memory_mib: u64,
    /// Who holds it, or still drains on it.
    pub leases: Vec<DeviceLease>,
    /// Load that no lease explains.
    pub foreign: Option<ForeignLoadBody>,
    /// Who uses it.
    pub processes: Vec<ProcessBody>,
    /// Whether `processes` is all of them.
    pub processes_complete: bool,
    /// Set where it is a part of a larger device: the vendor's name of the cut.
    pub partition: Option<String>,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// When it was read.
    pub timestamp: Option<String>,
    /// Whether that is too old to be taken for the present.
    pub stale: bool,
}

/// A lease on a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DeviceLease {
    /// Its number.
    pub id: u64,
    /// Whose it is.
    pub owner: String,
    /// The owner's own name for whoever uses it.
    pub worker_id: Option<String>,
    /// How much of the device.
    pub fraction: f64,
    /// How much of its memory, in MiB.
    pub memory_mib: Option<u64>,
    /// Whether it ended and its processes are still there.
    pub draining: bool,
    /// When it was granted.
    pub granted_at: Option<String>,
}

/// Load that no lease explains.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Foreign))]
pub struct ForeignLoadBody {
    /// Memory, in MiB.
    pub memory_mib: Option<u64>,
    /// Utilization in percent.
    pub utilization_percent: Option<f64>,
    /// Processes that run under no lease.
    pub processes: u32,
}

/// A process on a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Process))]
pub struct ProcessBody {
    /// Its number.
    pub pid: u32,
    /// Whose it is.
    pub user: Option<String>,
    /// Its command.
    pub command: Option<String>,
    /// Device memory it uses, in MiB.
    pub memory_mib: Option<u64>,
    /// The lease it runs under; `null` for a squatter, or where that cannot be told.
    pub lease: Option<u64>,
    /// Whether it uses the device without a lease on it.
    pub squatter: bool,
}

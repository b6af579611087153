//! Bodies of `/v1/pool` and `/v1/devices`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The body of `GET /v1/pool`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Pool))]
pub struct PoolBody {
    /// `agent`: this server decides about leases.
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
    /// Number of known devices.
    pub devices: usize,
    /// Number of devices that accept new leases.
    pub open_devices: usize,
    /// Number of devices that accept new leases and have none.
    pub free_devices: usize,
    /// Sum of the promised fractions of devices.
    pub promised: f64,
    /// Number of granted leases.
    pub active: usize,
    /// Number of waiting requests.
    pub waiting: usize,
    /// Next fencing token. All smaller ones may be in use.
    pub next_token: u64,
    /// Host CPUs: promised and total.
    pub cpus: PromisedAmount,
    /// Host memory in MiB: promised and total.
    pub host_memory_mib: PromisedAmount,
    /// Enforcement of job limits on this machine, as a sentence.
    pub confinement: String,
    /// Time of this state.
    pub timestamp: String,
    /// Last event that this state includes. `GET /v1/events` with this `Last-Event-ID` continues without a gap.
    #[serde(default)]
    pub event_id: Option<String>,
    /// Seconds since the authority confirmed this state. The age grows while the disk hangs.
    #[serde(default)]
    pub age_secs: f64,
}

/// Promised part of a host resource.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Amount))]
pub struct PromisedAmount {
    /// Promised amount.
    pub promised: f64,
    /// Amount that the host has.
    pub total: f64,
}

/// The body of `GET /v1/devices`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Devices))]
pub struct DeviceList {
    /// Schedulable devices, by number.
    pub devices: Vec<DeviceBody>,
    /// Time of this state.
    pub timestamp: String,
    /// Last event that this state includes. `GET /v1/events` with this `Last-Event-ID` continues without a gap.
    #[serde(default)]
    pub event_id: Option<String>,
    /// Seconds since the authority confirmed the holders. The age grows while the disk hangs.
    #[serde(default)]
    pub age_secs: f64,
}

/// A device with its readings and leases.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Device))]
pub struct DeviceBody {
    /// Number of the device on its node.
    pub gpu_id: u32,
    /// Name of its node.
    pub node: String,
    /// UUID of the device, or its bus address if it has no UUID.
    pub uuid: String,
    /// `nvidia`, `amd`, `intel` or `other`.
    pub vendor: String,
    /// Product name.
    pub name: String,
    /// Memory that can be leased, in MiB. `null` if the device has no memory of its own.
    pub memory_mib: Option<u64>,
    /// Memory in use, in MiB.
    pub memory_used_mib: Option<u64>,
    /// Utilization in percent.
    pub utilization_percent: Option<f64>,
    /// Temperature of the chip.
    pub temperature_c: Option<i32>,
    /// Power drawn, in watts.
    pub power_w: Option<f64>,
    /// `healthy`, `unhealthy` or `lost`.
    pub health: String,
    /// Reason if the device is not healthy, or the agent that leases it in place of this one.
    pub health_reason: Option<String>,
    /// Whether an administrator cordoned the device.
    pub cordoned: bool,
    /// Reason why the device accepts no new leases: `node_lost`, `not_seen`, `lost`, `unhealthy`, `hot`, `cordoned`,
    /// `quarantined`, `claimed_elsewhere`.
    pub closed: Option<String>,
    /// Promised fraction.
    pub promised: f64,
    /// Promised memory in MiB.
    pub promised_memory_mib: u64,
    /// Leases that hold the device or drain on it.
    pub leases: Vec<DeviceLease>,
    /// Load that no lease explains (foreign load).
    pub foreign: Option<ForeignLoadBody>,
    /// Processes that use the device.
    pub processes: Vec<ProcessBody>,
    /// Whether `processes` is complete.
    pub processes_complete: bool,
    /// Vendor's name of the partition profile, if the device is a partition.
    pub partition: Option<String>,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// Time of the reading.
    pub timestamp: Option<String>,
    /// Whether the reading is too old to be current.
    pub stale: bool,
}

/// A lease on a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DeviceLease {
    /// Number of the lease.
    pub id: u64,
    /// Owner.
    pub owner: String,
    /// The owner's name for the worker that uses the lease.
    pub worker_id: Option<String>,
    /// Leased fraction of the device.
    pub fraction: f64,
    /// Leased memory in MiB.
    pub memory_mib: Option<u64>,
    /// Whether the lease ended and its processes still run.
    pub draining: bool,
    /// Time of the grant.
    pub granted_at: Option<String>,
}

/// Load that no lease explains (foreign load).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Foreign))]
pub struct ForeignLoadBody {
    /// Memory in MiB.
    pub memory_mib: Option<u64>,
    /// Utilization in percent.
    pub utilization_percent: Option<f64>,
    /// Number of processes without a lease.
    pub processes: u32,
}

/// A process on a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Process))]
pub struct ProcessBody {
    /// Process id. `null` if the caller may not see it.
    #[cfg_attr(feature = "schema", schema(required = true))]
    pub pid: Option<u32>,
    /// User of the process.
    pub user: Option<String>,
    /// Command line, or only the name of the program if the caller may not see more.
    pub command: Option<String>,
    /// Used device memory in MiB.
    pub memory_mib: Option<u64>,
    /// Lease of the process. `null` for a squatter and if the lease is unknown.
    pub lease: Option<u64>,
    /// Whether the process uses the device without a lease.
    pub squatter: bool,
}

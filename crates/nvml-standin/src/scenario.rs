//! Scenarios: the data that a stand-in returns.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// NVML's value for the memory of a process if it is unknown.
pub const NOT_AVAILABLE: u64 = u64::MAX;

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NvmlScenario {
    pub driver: String,
    /// Devices, in the library's order.
    pub devices: Vec<StandInDevice>,
    /// Reported number of devices, if it differs from the real one.
    pub count: Option<u32>,
    /// Codes that functions return instead of a result.
    pub errors: BTreeMap<String, u32>,
    /// Functions that do not return while a file exists. They first write a file of that name with `.reached` appended.
    pub hangs: BTreeMap<String, PathBuf>,
    /// Events to deliver, each once.
    pub events: Vec<StandInXidEvent>,
    /// Topology level of two devices (`nvmlGpuTopologyLevel_t`), each pair with the smaller number first.
    pub nearness: Vec<(u32, u32, u32)>,
}

/// A device. `None` means unsupported.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StandInDevice {
    /// UUID: `GPU-…`.
    pub uuid: String,
    pub name: String,
    /// PCI address: `00000000:17:00.0`.
    pub pci: String,
    /// Minor number of its device node.
    pub minor: Option<u32>,
    pub memory: Option<StandInMemory>,
    /// Utilization in percent.
    pub utilization: Option<u32>,
    /// Temperature in °C.
    pub temperature_c: Option<u32>,
    /// Power draw in mW.
    pub power_mw: Option<u32>,
    /// Power limit in mW.
    pub power_limit_mw: Option<u32>,
    pub remapped: Option<RemappedRows>,
    /// Whether retired pages wait for a reset.
    pub retired_pending: Option<bool>,
    /// Whether the device reports Xids.
    pub tells_xids: bool,
    pub compute: Vec<StandInProcess>,
    pub graphics: Vec<StandInProcess>,
    pub links: Vec<NvLink>,
    /// MIG instances, on a device that supports them.
    pub mig: Option<MigLayout>,
    /// Codes that functions return for this device; `*` means every function.
    pub errors: BTreeMap<String, u32>,
}

/// Memory in bytes.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct StandInMemory {
    pub total: u64,
    /// Memory reserved by the driver.
    pub reserved: u64,
    /// Memory used by programs.
    pub used: u64,
}

#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RemappedRows {
    /// Rows remapped after correctable errors.
    pub correctable: u32,
    /// Rows remapped after uncorrectable errors.
    pub uncorrectable: u32,
    /// Whether a remapping waits for a reset.
    pub pending: bool,
    /// Whether a remapping failed.
    pub failed: bool,
}

/// A process on a device.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct StandInProcess {
    pub pid: u32,
    /// Memory in bytes, or [`NOT_AVAILABLE`].
    pub memory: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NvLink {
    /// Whether the link is up.
    pub up: bool,
    /// PCI address of the other end.
    pub remote: String,
    /// Kind of the other end.
    pub end: NvLinkPeer,
}

/// Device at the other end of an NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NvLinkPeer {
    Gpu,
    Switch,
}

/// MIG instances of a device.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MigLayout {
    /// Whether MIG is on.
    pub on: bool,
    /// Instances by slot; `None` is an empty slot.
    pub slots: Vec<Option<StandInMigInstance>>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StandInMigInstance {
    /// UUID: `MIG-…`.
    pub uuid: String,
    /// Profile at the end of the instance's name: `1g.10gb`; empty if the name has none.
    pub profile: String,
    pub gpu_instance: u32,
    pub compute_instance: u32,
    /// Slices of the GPU instance.
    pub gpu_slices: u32,
    /// Slices of the compute instance.
    pub compute_slices: u32,
    pub memory: StandInMemory,
    pub compute: Vec<StandInProcess>,
}

/// A critical error to report.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct StandInXidEvent {
    pub device: u32,
    pub xid: u64,
}

//! What a stand-in answers.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What NVML says for memory of a process it cannot tell.
pub const NOT_AVAILABLE: u64 = u64::MAX;

/// A machine.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NvmlScenario {
    /// Version of the driver.
    pub driver: String,
    /// The devices, in the library's order.
    pub devices: Vec<StandInDevice>,
    /// How many devices are said to be there, where that is not the number of them.
    pub count: Option<u32>,
    /// Codes that functions return instead of an answer.
    pub errors: BTreeMap<String, u32>,
    /// Functions that do not return while a file exists. They write a file of that name and `.reached` first.
    pub hangs: BTreeMap<String, PathBuf>,
    /// Events to be told, each once.
    pub events: Vec<StandInXidEvent>,
    /// How near two devices are (`nvmlGpuTopologyLevel_t`), each pair with the smaller number first.
    pub nearness: Vec<(u32, u32, u32)>,
}

/// A device. What is `None` is not supported.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StandInDevice {
    /// `GPU-…`.
    pub uuid: String,
    /// Model.
    pub name: String,
    /// Place on the bus: `00000000:17:00.0`.
    pub pci: String,
    /// Minor number of its device node.
    pub minor: Option<u32>,
    /// Its memory.
    pub memory: Option<StandInMemory>,
    /// Utilization in percent.
    pub utilization: Option<u32>,
    /// Temperature in °C.
    pub temperature_c: Option<u32>,
    /// Power drawn, in mW.
    pub power_mw: Option<u32>,
    /// Power limit, in mW.
    pub power_limit_mw: Option<u32>,
    /// Remapped rows.
    pub remapped: Option<RemappedRows>,
    /// Whether retired pages wait for a reset.
    pub retired_pending: Option<bool>,
    /// Whether it can tell of Xids.
    pub tells_xids: bool,
    /// Processes that compute.
    pub compute: Vec<StandInProcess>,
    /// Processes that draw.
    pub graphics: Vec<StandInProcess>,
    /// Its NVLinks.
    pub links: Vec<NvLink>,
    /// Set on a device that can be cut into instances.
    pub mig: Option<MigLayout>,
    /// Codes that functions return for this device; `*` is every function.
    pub errors: BTreeMap<String, u32>,
}

/// Memory in bytes.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct StandInMemory {
    /// All of it.
    pub total: u64,
    /// What the driver keeps.
    pub reserved: u64,
    /// What programs use.
    pub used: u64,
}

/// What became of bad rows of memory.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RemappedRows {
    /// Remapped for errors that could be corrected.
    pub correctable: u32,
    /// Remapped for errors that could not.
    pub uncorrectable: u32,
    /// Some wait for a reset.
    pub pending: bool,
    /// Some could not be remapped.
    pub failed: bool,
}

/// A process on a device.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct StandInProcess {
    /// Its number.
    pub pid: u32,
    /// Memory in bytes, or [`NOT_AVAILABLE`].
    pub memory: u64,
}

/// One NVLink.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NvLink {
    /// Whether it is up.
    pub up: bool,
    /// Place of the other end on the bus.
    pub remote: String,
    /// What the other end is.
    pub end: NvLinkPeer,
}

/// What is at the other end of an NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NvLinkPeer {
    /// Another GPU.
    Gpu,
    /// An NVSwitch.
    Switch,
}

/// How a device is cut.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MigLayout {
    /// Whether MIG is on.
    pub on: bool,
    /// The instances by slot; `None` is an empty slot.
    pub slots: Vec<Option<StandInMigInstance>>,
}

/// An instance.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StandInMigInstance {
    /// `MIG-…`.
    pub uuid: String,
    /// The cut, as at the end of the name of the instance: `1g.10gb`; empty where the name does not say.
    pub profile: String,
    /// GPU instance.
    pub gpu_instance: u32,
    /// Compute instance in it.
    pub compute_instance: u32,
    /// Slices of the GPU instance.
    pub gpu_slices: u32,
    /// Slices of the compute instance.
    pub compute_slices: u32,
    /// Its memory.
    pub memory: StandInMemory,
    /// Processes that compute.
    pub compute: Vec<StandInProcess>,
}

/// A critical error that is told.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct StandInXidEvent {
    /// Which device.
    pub device: u32,
    /// Which error.
    pub xid: u64,
}

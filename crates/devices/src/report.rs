//! Devices as JSON, printed by `gpupool devices --json`.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_core::{Bytes, DeviceHealth, GpuId, LinkKind, Vendor};
use serde::Serialize;

use crate::detected_device::{DetectedDevice, DevicePartition, DeviceProcess, ProcessActivity, UsedMemoryScope};
use crate::host_process::HostProcessLookup;
use crate::reported::{MissingReason, Reported};
use crate::source_reading::SourceReading;
use crate::tracker::GpuIdRegistry;

/// All devices, or the error that prevented reading them.
#[derive(Debug, Clone, Serialize)]
pub struct DevicesReport {
    /// Devices by number.
    pub devices: Vec<DeviceReport>,
    pub links: Vec<LinkReport>,
    /// Problems that lost no device.
    pub warnings: Vec<String>,
    /// Error that explains missing devices.
    pub error: Option<ErrorReport>,
}

/// An error: a stable code and a message.
#[derive(Debug, Clone, Serialize)]
pub struct ErrorReport {
    pub code: &'static str,
    /// Problem, subject and next step.
    pub message: String,
}

/// A device. A field without a value is `null` and listed under `unsupported` or `failed`.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceReport {
    /// Number on this node.
    pub gpu_id: GpuId,
    pub vendor: Vendor,
    pub name: Option<Arc<str>>,
    /// Identity given by the vendor.
    pub uuid: Option<Arc<str>>,
    pub pci: Option<String>,
    /// Permanent identity.
    pub identity: String,
    /// Set for a partition of a larger device.
    pub partition: Option<DevicePartition>,
    pub memory_total_mib: Option<u64>,
    /// Memory reserved by the driver.
    pub memory_reserved_mib: Option<u64>,
    /// Memory in use, as counted by the source.
    pub memory_used_mib: Option<u64>,
    /// Whether `memory_used_mib` includes reserved memory; `null` if unknown.
    pub memory_used_includes_reserved: Option<bool>,
    /// Whether the device shares the memory of the host and has none of its own.
    pub unified_memory: bool,
    /// Host memory that the device may also use.
    pub host_memory_total_mib: Option<u64>,
    /// Host memory in use.
    pub host_memory_used_mib: Option<u64>,
    pub utilization_percent: Option<f64>,
    /// Temperature of the chip.
    pub temperature_c: Option<i16>,
    pub power_w: Option<f64>,
    pub power_limit_w: Option<f64>,
    pub driver: Option<Arc<str>>,
    /// Whether MIG is on, also for its instances; `null` for a device without MIG.
    pub mig: Option<bool>,
    /// `healthy`, `unhealthy` or `lost`; `null` if the source does not report it.
    pub health: Option<&'static str>,
    pub health_reason: Option<Arc<str>>,
    /// Whether the device sleeps to save power and was not read.
    pub asleep: bool,
    /// Index in the source's listing.
    pub index: Option<u32>,
    /// Minor number of the device node.
    pub minor: Option<u32>,
    /// Nearest NUMA node.
    pub numa: Option<u32>,
    /// Fields that the device or the source does not support.
    pub unsupported: Vec<&'static str>,
    /// Fields that failed this time, with the source's reason.
    pub failed: BTreeMap<&'static str, MissingReason>,
    /// Processes on the device; complete unless `processes` is listed as missing.
    pub processes: Vec<ProcessReport>,
}

/// A process on a device.
#[derive(Debug, Clone, Serialize)]
pub struct ProcessReport {
    /// Pid in the host's PID namespace.
    pub pid: u32,
    /// Name given by the driver.
    pub name: Option<Arc<str>>,
    /// `compute`, `graphics`, `both`, or `null`.
    pub doing: Option<&'static str>,
    /// Device memory in use.
    pub memory_mib: Option<u64>,
    /// Start time in clock ticks since boot.
    pub start_ticks: Option<u64>,
    /// User id of the process.
    pub uid: Option<u32>,
    pub user: Option<Arc<str>>,
    pub command: Option<Arc<str>>,
    pub cgroup: Option<Arc<str>>,
    /// Reason why the process of this host is unknown.
    pub unattributed: Option<Arc<str>>,
}

/// A link between two devices.
#[derive(Debug, Clone, Serialize)]
pub struct LinkReport {
    pub a: GpuId,
    pub b: GpuId,
    /// `nvlink`, `xgmi`, `pcie_switch`, `pcie_switches`, `host_bridge`, `same_numa`, `cross_numa`.
    pub kind: &'static str,
    /// Number of bonded NVLinks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lanes: Option<u8>,
    /// Number of XGMI hops.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hops: Option<u8>,
}

impl DevicesReport {
    /// Creates the report of a reading, with devices numbered in its order.
    pub fn new(reading: &SourceReading, error: Option<ErrorReport>) -> Self {
        let identities = reading.identities();
        let ids = GpuIdRegistry::default().assign(&identities);
        let device = |((found, identity), &gpu_id): ((&DetectedDevice, &_), &GpuId)| {
            DeviceReport::new(gpu_id, ToString::to_string(identity), found)
        };
        let links = reading.links.iter().filter_map(|link| {
            let (kind, lanes, hops) = link_kind_fields(link.kind);
            Some(LinkReport { a: *ids.get(link.a)?, b: *ids.get(link.b)?, kind, lanes, hops })
        });
        Self {
            devices: reading.devices.iter().zip(&identities).zip(&ids).map(device).collect(),
            links: links.collect(),
            warnings: reading.warnings.clone(),
            error,
        }
    }
}

impl DeviceReport {
    fn new(gpu_id: GpuId, identity: String, found: &DetectedDevice) -> Self {
        let mut missing = MissingFields::default();
        let (health, health_reason) = match &found.health {
            None => (None, None),
            Some(DeviceHealth::Healthy | DeviceHealth::ClaimedElsewhere(_)) => (Some("healthy"), None),
            Some(DeviceHealth::Unhealthy(reason)) => (Some("unhealthy"), Some(reason.clone())),
            Some(DeviceHealth::Lost) => (Some("lost"), None),
        };
        let memory = &found.memory;
        let optional = |reported: &Reported<Bytes>| reported.value().map(|bytes| bytes.as_mib());
        Self {
            gpu_id,
            vendor: found.vendor,
            name: found.name.clone(),
            uuid: found.uuid.clone(),
            pci: found.pci.map(|address| address.to_string()),
            identity,
            partition: found.partition.clone(),
            memory_total_mib: missing.take("memory_total_mib", &memory.total, |bytes| bytes.as_mib()),
            memory_reserved_mib: optional(&memory.reserved),
            memory_used_mib: missing.take("memory_used_mib", &memory.used, |bytes| bytes.as_mib()),
            memory_used_includes_reserved: match memory.used_means {
                UsedMemoryScope::WithReserved => Some(true),
                UsedMemoryScope::WithoutReserved => Some(false),
                UsedMemoryScope::Unknown => None,
            },
            unified_memory: memory.unified,
            host_memory_total_mib: optional(&memory.host_total),
            host_memory_used_mib: optional(&memory.host_used),
            utilization_percent: missing.take("utilization_percent", &found.utilization, |percent| percent.as_number()),
            temperature_c: missing.take("temperature_c", &found.temperature_c, |degrees| *degrees),
            power_w: missing.take("power_w", &found.power, |power| power.as_number()),
            power_limit_w: missing.take("power_limit_w", &found.power_limit, |power| power.as_number()),
            driver: found.driver.clone(),
            mig: found.mig,
            health,
            health_reason,
            asleep: found.asleep,
            index: found.index,
            minor: found.minor,
            numa: found.numa,
            processes: missing
                .take("processes", &found.processes, |list| list.iter().map(ProcessReport::new).collect())
                .unwrap_or_default(),
            unsupported: missing.unsupported,
            failed: missing.failed,
        }
    }
}

/// Collects the names of fields without a value.
#[derive(Default)]
struct MissingFields {
    unsupported: Vec<&'static str>,
    failed: BTreeMap<&'static str, MissingReason>,
}

impl MissingFields {
    fn take<T, U>(&mut self, name: &'static str, reported: &Reported<T>, convert: impl FnOnce(&T) -> U) -> Option<U> {
        match reported {
            Reported::Value(value) => return Some(convert(value)),
            Reported::Unsupported(_) => self.unsupported.push(name),
            Reported::Failed(words) => {
                self.failed.insert(name, words.clone());
            }
        }
        None
    }
}

impl ProcessReport {
    fn new(process: &DeviceProcess) -> Self {
        let (known, unattributed) = match &process.host_lookup {
            HostProcessLookup::NotInspected => (None, None),
            HostProcessLookup::Known(facts) => (Some(facts), None),
            HostProcessLookup::Unattributed(reason) => (None, Some(reason.clone())),
        };
        Self {
            pid: process.pid,
            name: process.name.clone(),
            doing: match process.activity {
                ProcessActivity::Compute => Some("compute"),
                ProcessActivity::Graphics => Some("graphics"),
                ProcessActivity::Both => Some("both"),
                ProcessActivity::Unknown => None,
            },
            memory_mib: process.memory.value().map(|bytes| bytes.as_mib()),
            start_ticks: known.map(|facts| facts.start_ticks),
            uid: known.map(|facts| facts.uid),
            user: known.and_then(|facts| facts.user.clone()),
            command: known.map(|facts| facts.command.clone()),
            cgroup: known.and_then(|facts| facts.cgroup.clone()),
            unattributed,
        }
    }
}

/// Returns the name of a link, its lanes and its hops.
fn link_kind_fields(kind: LinkKind) -> (&'static str, Option<u8>, Option<u8>) {
    match kind {
        LinkKind::NvLink(lanes) => ("nvlink", Some(lanes), None),
        LinkKind::Xgmi(hops) => ("xgmi", None, Some(hops)),
        LinkKind::PcieSwitch => ("pcie_switch", None, None),
        LinkKind::PcieSwitches => ("pcie_switches", None, None),
        LinkKind::HostBridge => ("host_bridge", None, None),
        LinkKind::SameNuma => ("same_numa", None, None),
        LinkKind::CrossNuma => ("cross_numa", None, None),
    }
}

//! Devices as JSON: what `gpupool devices --json` prints.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_core::{Bytes, DeviceHealth, GpuId, LinkKind, Percent, Vendor};
use serde::Serialize;

use crate::attribution::HostProcessLookup;
use crate::detected_device::{
    DetectedDevice, DevicePartition, DeviceProcess, Milliwatts, ProcessActivity, UsedMemoryScope,
};
use crate::reported::{MissingReason, Reported};
use crate::source_reading::SourceReading;
use crate::tracker::GpuIdRegistry;

/// Everything that is known, or the error that kept it from being known.
#[derive(Debug, Clone, Serialize)]
pub struct DevicesReport {
    /// The devices, by number.
    pub devices: Vec<DeviceReport>,
    /// Links between them.
    pub links: Vec<LinkReport>,
    /// What went wrong without losing a device.
    pub warnings: Vec<String>,
    /// Why there is no device to report, where there should be.
    pub error: Option<ErrorReport>,
}

/// An error by a name that never changes, and in words.
#[derive(Debug, Clone, Serialize)]
pub struct ErrorReport {
    pub code: &'static str,
    /// What happened, to what, and what can be done.
    pub message: String,
}

/// One device. A field without a value is `null` and named under `unsupported` or `failed`.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceReport {
    /// Its small number on this node.
    pub gpu_id: GpuId,
    /// Who made it.
    pub vendor: Vendor,
    pub name: Option<Arc<str>>,
    /// The vendor's identity of it.
    pub uuid: Option<Arc<str>>,
    /// Its place on the bus.
    pub pci: Option<String>,
    /// What makes it the same device after a restart.
    pub identity: String,
    /// Set where it is a part of a larger device.
    pub partition: Option<DevicePartition>,
    /// All its memory.
    pub memory_total_mib: Option<u64>,
    /// What the driver keeps of it.
    pub memory_reserved_mib: Option<u64>,
    /// What is in use, as the source counts it.
    pub memory_used_mib: Option<u64>,
    /// Whether that includes what the driver keeps; `null` where the source does not say.
    pub memory_used_includes_reserved: Option<bool>,
    /// Whether it shares the host's memory instead of having its own.
    pub unified_memory: bool,
    /// Host memory it may use besides.
    pub host_memory_total_mib: Option<u64>,
    /// What it uses of that.
    pub host_memory_used_mib: Option<u64>,
    /// How busy it is.
    pub utilization_percent: Option<f64>,
    /// Temperature of the chip.
    pub temperature_c: Option<i16>,
    /// Power drawn.
    pub power_w: Option<f64>,
    /// The most it may draw.
    pub power_limit_w: Option<f64>,
    /// Version of its driver.
    pub driver: Option<Arc<str>>,
    /// Whether it is a GPU cut by MIG or a MIG instance; `null` where it cannot be.
    pub mig: Option<bool>,
    /// `healthy`, `unhealthy`, `lost`; `null` where the source says nothing of it.
    pub health: Option<&'static str>,
    /// Why it is unhealthy.
    pub health_reason: Option<Arc<str>>,
    /// Asleep to save power, and therefore not read.
    pub asleep: bool,
    /// The number its source gives it.
    pub index: Option<u32>,
    /// The minor number of its device node.
    pub minor: Option<u32>,
    /// NUMA node it is nearest to.
    pub numa: Option<u32>,
    /// Fields the device or the source cannot tell.
    pub unsupported: Vec<&'static str>,
    /// Fields that failed this time, with the source's words.
    pub failed: BTreeMap<&'static str, MissingReason>,
    /// Processes on it; complete unless `processes` is among the fields without a value.
    pub processes: Vec<ProcessReport>,
}

/// A process on a device.
#[derive(Debug, Clone, Serialize)]
pub struct ProcessReport {
    /// Its number, in the host's PID namespace.
    pub pid: u32,
    /// The name the driver gives.
    pub name: Option<Arc<str>>,
    /// `compute`, `graphics`, `both`, or `null`.
    pub doing: Option<&'static str>,
    /// Device memory it uses.
    pub memory_mib: Option<u64>,
    /// When it started, in clock ticks since boot.
    pub start_ticks: Option<u64>,
    /// Whose it is.
    pub uid: Option<u32>,
    /// The name of that user.
    pub user: Option<Arc<str>>,
    /// Its command line.
    pub command: Option<Arc<str>>,
    /// Its control group.
    pub cgroup: Option<Arc<str>>,
    /// Why it could not be told which process of this host it is.
    pub unattributed: Option<Arc<str>>,
}

/// A link between two devices.
#[derive(Debug, Clone, Serialize)]
pub struct LinkReport {
    /// One end.
    pub a: GpuId,
    /// The other.
    pub b: GpuId,
    /// `nvlink`, `xgmi`, `pcie_switch`, `pcie_switches`, `host_bridge`, `same_numa`, `cross_numa`.
    pub kind: &'static str,
    /// How many NVLinks are bonded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lanes: Option<u8>,
    /// Over how many XGMI hops.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hops: Option<u8>,
}

impl DevicesReport {
    /// The report of a snapshot, with devices numbered in its order.
    pub fn new(snapshot: &SourceReading, error: Option<ErrorReport>) -> Self {
        let identities = snapshot.identities();
        let ids = GpuIdRegistry::default().assign(&identities);
        let device = |((found, identity), &gpu_id): ((&DetectedDevice, &_), &GpuId)| {
            DeviceReport::new(gpu_id, ToString::to_string(identity), found)
        };
        let links = snapshot.links.iter().filter_map(|link| {
            let (kind, lanes, hops) = link_words(link.kind);
            Some(LinkReport { a: *ids.get(link.a)?, b: *ids.get(link.b)?, kind, lanes, hops })
        });
        Self {
            devices: snapshot.devices.iter().zip(&identities).zip(&ids).map(device).collect(),
            links: links.collect(),
            warnings: snapshot.warnings.clone(),
            error,
        }
    }
}

impl DeviceReport {
    /// The report of one device.
    fn new(gpu_id: GpuId, identity: String, found: &DetectedDevice) -> Self {
        let mut without = Without::default();
        let (health, health_reason) = match &found.health {
            None => (None, None),
            Some(DeviceHealth::Healthy) => (Some("healthy"), None),
            Some(DeviceHealth::Unhealthy(reason)) => (Some("unhealthy"), Some(reason.clone())),
            Some(DeviceHealth::Lost) => (Some("lost"), None),
        };
        let memory = &found.memory;
        let optional = |told: &Reported<Bytes>| told.value().map(|bytes| bytes.as_mib());
        Self {
            gpu_id,
            vendor: found.vendor,
            name: found.name.clone(),
            uuid: found.uuid.clone(),
            pci: found.pci.map(|address| address.to_string()),
            identity,
            partition: found.partition.clone(),
            memory_total_mib: without.or("memory_total_mib", &memory.total, |bytes: &Bytes| bytes.as_mib()),
            memory_reserved_mib: optional(&memory.reserved),
            memory_used_mib: without.or("memory_used_mib", &memory.used, |bytes: &Bytes| bytes.as_mib()),
            memory_used_includes_reserved: match memory.used_means {
                UsedMemoryScope::WithReserved => Some(true),
                UsedMemoryScope::WithoutReserved => Some(false),
                UsedMemoryScope::Unknown => None,
            },
            unified_memory: memory.unified,
            host_memory_total_mib: optional(&memory.host_total),
            host_memory_used_mib: optional(&memory.host_used),
            utilization_percent: without
                .or("utilization_percent", &found.utilization, |percent: &Percent| percent.as_number()),
            temperature_c: without.or("temperature_c", &found.temperature_c, |degrees| *degrees),
            power_w: without.or("power_w", &found.power, |power: &Milliwatts| power.as_number()),
            power_limit_w: without.or("power_limit_w", &found.power_limit, |power: &Milliwatts| power.as_number()),
            driver: found.driver.clone(),
            mig: found.mig,
            health,
            health_reason,
            asleep: found.asleep,
            index: found.index,
            minor: found.minor,
            numa: found.numa,
            processes: without
                .or("processes", &found.processes, |list| list.iter().map(ProcessReport::new).collect())
                .unwrap_or_default(),
            unsupported: without.unsupported,
            failed: without.failed,
        }
    }
}

/// Collects the names of fields that have no value while the others are taken.
#[derive(Default)]
struct Without {
    unsupported: Vec<&'static str>,
    failed: BTreeMap<&'static str, MissingReason>,
}

impl Without {
    fn or<T, U>(&mut self, name: &'static str, told: &Reported<T>, value: impl FnOnce(&T) -> U) -> Option<U> {
        match told {
            Reported::Value(told) => return Some(value(told)),
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

/// The name of a link, with its lanes or hops.
fn link_words(kind: LinkKind) -> (&'static str, Option<u8>, Option<u8>) {
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

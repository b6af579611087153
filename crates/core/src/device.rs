//! Facts of devices and nodes, which change rarely, their health, and the links between devices.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ids::{GpuId, Labels};
use crate::request::{IsolationLevel, named_variants};
use crate::units::{Bytes, MilliCpus, Share};

/// Vendor of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Vendor {
    Nvidia,
    Amd,
    Intel,
    /// Any vendor not listed.
    Other,
}

named_variants!(Vendor, "vendor", Nvidia => "nvidia", Amd => "amd", Intel => "intel", Other => "other");

/// PCI address, parsed to numbers so that all spellings compare equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PciAddress {
    /// May exceed 0xFFFF on some clouds.
    pub domain: u32,
    pub bus: u8,
    pub device: u8,
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

/// Identity of a device across restarts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceIdentity {
    Uuid(Arc<str>),
    /// PCI address and partition, for devices without a UUID.
    Pci {
        address: PciAddress,
        /// Partition number, if the device is split.
        partition: Option<u16>,
    },
}

impl fmt::Display for DeviceIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uuid(uuid) => f.write_str(uuid),
            Self::Pci { address, partition: None } => address.fmt(f),
            Self::Pci { address, partition: Some(partition) } => write!(f, "{address}/{partition}"),
        }
    }
}

/// Total memory of a device and the part that the driver reserves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// Installed memory.
    pub total: Bytes,
    /// Memory that the driver keeps for itself; it is never promised.
    pub reserved: Bytes,
}

impl DeviceMemory {
    /// Returns the memory that can be promised: total − reserved.
    pub const fn capacity(self) -> Bytes {
        self.total.saturating_sub(self.reserved)
    }
}

/// Partition of a larger device (MIG instance, AMD partition).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PartitionFacts {
    /// Device that contains the partition.
    pub parent: DeviceIdentity,
    /// The vendor's profile name: `1g.10gb`, `CPX`.
    pub profile: Arc<str>,
    /// Size as a share of the parent.
    pub of_parent: Share,
}

/// Isolation that a device can enforce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct IsolationSupport {
    /// NVIDIA's Multi-Process Service.
    pub mps: bool,
    /// Whether the device is a MIG instance.
    pub mig: bool,
}

impl IsolationSupport {
    /// Time slicing by the driver only, which every GPU supports.
    pub const BASIC: Self = Self { mps: false, mig: false };

    /// Whether the device supports `isolation`.
    pub const fn supports(self, isolation: IsolationLevel) -> bool {
        match isolation {
            IsolationLevel::None | IsolationLevel::TimeSlicing => true,
            IsolationLevel::Mps => self.mps,
            IsolationLevel::Mig => self.mig,
        }
    }
}

/// Facts about a device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DeviceFacts {
    /// Identity that survives restarts.
    pub identity: DeviceIdentity,
    pub vendor: Vendor,
    /// Model name as the driver reports it.
    pub model: Arc<str>,
    /// Memory; `None` for unified memory, which makes the device schedulable by share only.
    pub memory: Option<DeviceMemory>,
    /// Set for a partition of a larger device.
    pub partition: Option<PartitionFacts>,
    pub isolation: IsolationSupport,
    pub labels: Labels,
}

impl DeviceFacts {
    /// Returns its size as a share of a whole GPU.
    pub fn share_of_gpu(&self) -> Share {
        self.partition.as_ref().map_or(Share::WHOLE, |partition| partition.of_parent)
    }

    /// Whether leases can hold a part of it. AMD partitions are indivisible: SPX is a whole GPU, CPX an eighth.
    pub fn is_divisible(&self) -> bool {
        self.vendor != Vendor::Amd || self.partition.is_none()
    }

    /// Returns the memory that can be promised, if it is known.
    pub fn memory_capacity(&self) -> Option<Bytes> {
        self.memory.map(DeviceMemory::capacity)
    }

    /// Whether `wanted` names this model: the full name, or whole words of it, in any case.
    ///
    /// `H100` matches `NVIDIA H100 80GB HBM3`; `A10` does not match `NVIDIA A100`.
    pub fn is_model(&self, wanted: &str) -> bool {
        model_matches(&self.model, wanted)
    }
}

/// Whether `wanted` names this model; see [`DeviceFacts::is_model`].
pub fn model_matches(model: &str, wanted: &str) -> bool {
    fn words(s: &str) -> Vec<&str> {
        s.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).collect()
    }
    if model.eq_ignore_ascii_case(wanted) {
        return true;
    }
    let wanted = words(wanted);
    let is_wanted = |run: &[&str]| run.iter().zip(&wanted).all(|(word, want)| word.eq_ignore_ascii_case(want));
    !wanted.is_empty() && words(model).windows(wanted.len()).any(is_wanted)
}

/// Health of a device. Separate from readings: a healthy device may be unreadable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceHealth {
    /// Takes new work.
    Healthy,
    /// Takes no new work until it is healthy again; the text is the reason.
    Unhealthy(Arc<str>),
    /// Fell off the bus or vanished; it may return.
    Lost,
    /// Works, but another agent of the machine leases it; the text names that agent.
    ClaimedElsewhere(Arc<str>),
}

/// Administrator's decision about new work on a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CordonState {
    /// Takes new work.
    #[default]
    Open,
    /// Takes no new work; running work continues.
    Cordoned,
}

/// Connection between two devices of a node, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkKind {
    /// NVLink with this number of bonded lanes.
    NvLink(u8),
    /// AMD XGMI over this number of hops.
    Xgmi(u8),
    PcieSwitch,
    /// Several PCIe switches, but no host bridge.
    PcieSwitches,
    /// A PCIe host bridge.
    HostBridge,
    SameNuma,
    /// Different NUMA nodes; also assumed for unknown links.
    CrossNuma,
}

impl LinkKind {
    /// Returns the distance between the two devices; smaller is closer.
    pub const fn distance(self) -> u16 {
        match self {
            Self::NvLink(lanes) => 20 - if lanes > 18 { 18 } else { lanes as u16 },
            Self::Xgmi(hops) => 10 + if hops > 10 { 10 } else { hops as u16 },
            Self::PcieSwitch => 40,
            Self::PcieSwitches => 60,
            Self::HostBridge => 80,
            Self::SameNuma => 100,
            Self::CrossNuma => 200,
        }
    }
}

/// Link between two devices of one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceLink {
    pub a: GpuId,
    pub b: GpuId,
    pub kind: LinkKind,
}

/// Facts about a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFacts {
    /// Name, unique in the pool.
    pub name: Arc<str>,
    /// Host CPUs that can be promised.
    pub cpus: MilliCpus,
    /// Host memory that can be promised.
    pub memory: Bytes,
    /// Free-form labels. Use them for groups of nodes: placement is indexed by the facts that nodes share.
    pub labels: Labels,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_matched_by_whole_words() {
        assert!(model_matches("NVIDIA H100 80GB HBM3", "h100"));
        assert!(model_matches("NVIDIA H100 80GB HBM3", "H100 80GB"));
        assert!(!model_matches("NVIDIA A100-SXM4-40GB", "A10"));
        assert!(model_matches("NVIDIA A100-SXM4-40GB", "a100-sxm4"));
        assert!(!model_matches("V100M16", "V100M32"));
        assert!(!model_matches("V100M16", ""));
    }

    #[test]
    fn links_order_from_near_to_far() {
        let near_to_far = [
            LinkKind::NvLink(18),
            LinkKind::NvLink(4),
            LinkKind::PcieSwitch,
            LinkKind::PcieSwitches,
            LinkKind::HostBridge,
            LinkKind::SameNuma,
            LinkKind::CrossNuma,
        ];
        assert!(near_to_far.is_sorted_by_key(|link| link.distance()));
    }
}

//! What a device and a node *are*: facts that change rarely, health, and the links between devices.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ids::{GpuId, Labels};
use crate::request::{IsolationLevel, named_variants};
use crate::units::{Bytes, MilliCpus, Share};

/// Who made a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Vendor {
    Nvidia,
    Amd,
    Intel,
    /// Anybody else.
    Other,
}

named_variants!(Vendor, "vendor", Nvidia => "nvidia", Amd => "amd", Intel => "intel", Other => "other");

/// A place on the PCI bus, parsed to numbers so that its many spellings compare equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PciAddress {
    /// PCI domain; above 0xFFFF on some clouds.
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

/// What makes a device the same device after a restart.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceIdentity {
    Uuid(Arc<str>),
    /// Where there is none: the PCI address and the partition on it.
    Pci {
        address: PciAddress,
        /// Which partition, where the device is split.
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

/// How much memory a device has, and how much of it the driver keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// All of it.
    pub total: Bytes,
    /// What the driver keeps for itself; not for sale.
    pub reserved: Bytes,
}

impl DeviceMemory {
    /// What can be promised: total − reserved.
    pub const fn capacity(self) -> Bytes {
        self.total.saturating_sub(self.reserved)
    }
}

/// Set for a device that is a part of a larger one (MIG instance, AMD partition).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PartitionFacts {
    /// The device it is a part of.
    pub parent: DeviceIdentity,
    /// The vendor's name of the cut: `1g.10gb`, `CPX`.
    pub profile: Arc<str>,
    /// How much of the parent it is.
    pub of_parent: Share,
}

/// Which kinds of isolation a device can really give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct IsolationSupport {
    /// NVIDIA's Multi-Process Service.
    pub mps: bool,
    /// The device is a MIG instance.
    pub mig: bool,
}

impl IsolationSupport {
    /// Time slicing by the driver, which every GPU does, and nothing more.
    pub const BASIC: Self = Self { mps: false, mig: false };

    /// Whether `isolation` can be given.
    pub const fn supports(self, isolation: IsolationLevel) -> bool {
        match isolation {
            IsolationLevel::None | IsolationLevel::TimeSlicing => true,
            IsolationLevel::Mps => self.mps,
            IsolationLevel::Mig => self.mig,
        }
    }
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DeviceFacts {
    /// What makes it the same device tomorrow.
    pub identity: DeviceIdentity,
    pub vendor: Vendor,
    /// Its name as the driver gives it.
    pub model: Arc<str>,
    /// Its memory; `None` where it has none of its own (unified memory), then it is schedulable by share only.
    pub memory: Option<DeviceMemory>,
    /// Set where it is a part of a larger device.
    pub partition: Option<PartitionFacts>,
    pub isolation: IsolationSupport,
    pub labels: Labels,
}

impl DeviceFacts {
    /// How much of a whole GPU it is.
    pub fn share_of_gpu(&self) -> Share {
        self.partition.as_ref().map_or(Share::WHOLE, |partition| partition.of_parent)
    }

    /// Whether parts of it can be had. AMD's partitions are taken as they are: SPX whole, CPX in eighths.
    pub fn is_divisible(&self) -> bool {
        self.vendor != Vendor::Amd || self.partition.is_none()
    }

    /// What can be promised of its memory, where that is known.
    pub fn memory_capacity(&self) -> Option<Bytes> {
        self.memory.map(DeviceMemory::capacity)
    }

    /// Whether a name a person typed means this model: all of it, or whole words of it, in any case.
    ///
    /// `H100` means `NVIDIA H100 80GB HBM3`; `A10` does not mean `NVIDIA A100`.
    pub fn is_model(&self, wanted: &str) -> bool {
        model_matches(&self.model, wanted)
    }
}

/// Whether a name a person typed means this model: see [`DeviceFacts::is_model`].
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

/// Whether a device can be trusted with new work. Kept apart from readings: a device may be well and unreadable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceHealth {
    /// Takes work.
    Healthy,
    /// Takes no new work until it is healthy again; the text says why.
    Unhealthy(Arc<str>),
    /// Not there any more (fell off the bus, vanished); may come back.
    Lost,
}

/// Whether an administrator lets a device take new work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CordonState {
    /// It does.
    #[default]
    Open,
    /// No new work; what runs goes on.
    Cordoned,
}

/// How two devices of a node are joined, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkKind {
    /// NVLink, with so many lanes bonded.
    NvLink(u8),
    /// AMD's XGMI, over so many hops.
    Xgmi(u8),
    /// One PCIe switch.
    PcieSwitch,
    /// Several PCIe switches, no host bridge.
    PcieSwitches,
    /// A PCIe host bridge.
    HostBridge,
    /// The same NUMA node.
    SameNuma,
    /// Across NUMA nodes; also what is assumed where nothing is known.
    CrossNuma,
}

impl LinkKind {
    /// How far apart it puts two devices; smaller is closer.
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

/// A link between two devices of one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceLink {
    pub a: GpuId,
    pub b: GpuId,
    pub kind: LinkKind,
}

/// What a node is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFacts {
    /// Its name, unique in the pool.
    pub name: Arc<str>,
    /// Host CPUs that can be promised.
    pub cpus: MilliCpus,
    /// Host memory that can be promised.
    pub memory: Bytes,
    /// Free-form labels. Keep them for groups of nodes: placement is indexed by what nodes have in common.
    pub labels: Labels,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_meant_by_whole_words() {
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

//! Layout of simulated devices: identities, PCI addresses, partitions, and shared chips and cards.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use gpupool_core::{Bytes, LinkKind, PciAddress, Share, Vendor};

use crate::address::parse_pci_address;
use crate::detected_device::DevicePartition;
use crate::simulated::models::{GpuFabric, GpuModel, MigProfile};
use crate::simulated::spec::{CardGroup, Partitioning, SimulationSpec};
use crate::source_reading::DetectedLink;

/// Fixed properties of a simulated device.
#[derive(Debug, Clone)]
pub(crate) struct SimulatedHardware {
    pub model: &'static GpuModel,
    pub index: Option<u32>,
    pub minor: u32,
    pub uuid: Arc<str>,
    pub pci: PciAddress,
    pub numa: u32,
    pub partition: Option<DevicePartition>,
    pub mig: Option<bool>,
    pub memory: Option<Bytes>,
    pub reserved: Option<Bytes>,
    pub share_of_gpu: Share,
    /// Number of its GPU, and the positions of all devices on it, including partitions.
    pub gpu: usize,
    pub on_gpu: Range<usize>,
    /// Positions of all devices on its card, which has one power sensor.
    pub on_card: Range<usize>,
    pub fabric: Option<GpuFabric>,
    /// Group of GPUs of its model that its fabric connects.
    pub group: usize,
}

impl SimulatedHardware {
    /// Whether the device is a GPU in MIG mode, which takes no load itself.
    pub(crate) fn is_in_mig_mode(&self) -> bool {
        self.mig == Some(true) && self.partition.is_none()
    }

    pub(crate) fn is_mig_instance(&self) -> bool {
        matches!(self.partition, Some(DevicePartition::Mig { .. }))
    }
}

/// Returns the devices of a description in its order.
pub(crate) fn lay_out_devices(spec: &SimulationSpec) -> Vec<SimulatedHardware> {
    let mut layout = LayoutBuilder {
        node: spec.node().unwrap_or("").as_bytes(),
        seed: spec.seed,
        cards: spec.cards.iter().map(|cards| cards.count).sum(),
        reserved_addresses: spec.cards.iter().filter_map(|cards| cards.pci).collect(),
        counters: LayoutCounters::default(),
        devices: Vec::new(),
    };
    for cards in &spec.cards {
        for _ in 0..cards.count {
            layout.add_card(cards);
        }
    }
    layout.devices
}

struct LayoutBuilder<'a> {
    node: &'a [u8],
    seed: u64,
    /// Total number of cards.
    cards: usize,
    /// Configured PCI addresses, which are not generated again.
    reserved_addresses: BTreeSet<PciAddress>,
    counters: LayoutCounters,
    devices: Vec<SimulatedHardware>,
}

/// Numbers used so far.
#[derive(Default)]
struct LayoutCounters {
    cards: usize,
    gpus: usize,
    indices: u32,
    nvidia_minors: u32,
    amd_minors: u32,
    addresses: u32,
    /// Number of cards and GPUs by model.
    of_model: BTreeMap<&'static str, (u64, usize)>,
}

impl LayoutBuilder<'_> {
    fn add_card(&mut self, cards: &CardGroup) {
        let first = self.devices.len();
        let model = cards.model;
        let (cards_before, _) = *self.counters.of_model.entry(model.key).or_default();
        // Based on the number among cards of the same model, so that other models do not matter.
        let parts: [&[u8]; 3] = [self.node, model.key.as_bytes(), &cards_before.to_le_bytes()];
        let uuid: Arc<str> = match (&cards.uuid, model.vendor) {
            (Some(uuid), _) => uuid.clone(),
            (None, Vendor::Amd) => amd_uuid(self.seed, &parts).into(),
            (None, _) => nvidia_uuid("GPU", self.seed, &parts).into(),
        };
        for _ in 0..model.dies {
            self.add_gpu(cards, &uuid);
        }
        let end = self.devices.len();
        for device in &mut self.devices[first..] {
            device.on_card = first..end;
        }
        self.counters.cards += 1;
        self.counters.of_model.entry(model.key).or_default().0 += 1;
    }

    fn add_gpu(&mut self, cards: &CardGroup, uuid: &Arc<str>) {
        let first = self.devices.len();
        let model = cards.model;
        let (_, gpus_before) = *self.counters.of_model.entry(model.key).or_default();
        let whole = SimulatedHardware {
            model,
            index: None,
            minor: 0,
            uuid: uuid.clone(),
            pci: cards.pci.unwrap_or_else(|| self.next_address()),
            numa: u32::from(self.counters.cards * 2 >= self.cards && self.cards > 1),
            partition: None,
            mig: (!model.mig.is_empty()).then_some(matches!(cards.partitioning, Partitioning::Mig(_))),
            memory: cards.memory,
            reserved: cards.reserved,
            share_of_gpu: Share::WHOLE,
            gpu: self.counters.gpus,
            on_gpu: 0..0,
            on_card: 0..0,
            fabric: cards.fabric,
            group: gpus_before / cards.fabric.map_or(1, |fabric| fabric.group.max(1)),
        };
        match &cards.partitioning {
            Partitioning::Whole => self.push_numbered(whole),
            Partitioning::Amd(mode) => {
                for id in 0..mode.parts {
                    let partition = DevicePartition::Amd { id, mode: Some(mode.name.into()), parts: Some(mode.parts) };
                    let part = |bytes: Bytes| Bytes(bytes.0 / u64::from(mode.parts));
                    self.push_numbered(SimulatedHardware {
                        partition: Some(partition),
                        memory: whole.memory.map(part),
                        reserved: whole.reserved.map(part),
                        share_of_gpu: Share(1000 / u32::from(mode.parts)),
                        ..whole.clone()
                    });
                }
            }
            Partitioning::Mig(profiles) => {
                self.push_numbered(whole);
                self.add_mig_instances(first, profiles);
            }
        }
        let end = self.devices.len();
        for device in &mut self.devices[first..] {
            device.on_gpu = first..end;
        }
        self.counters.gpus += 1;
        self.counters.of_model.entry(model.key).or_default().1 += 1;
    }

    /// Adds a device with its own index and device node.
    fn push_numbered(&mut self, device: SimulatedHardware) {
        let minors = match device.model.vendor {
            Vendor::Amd => &mut self.counters.amd_minors,
            _ => &mut self.counters.nvidia_minors,
        };
        // The minor number of AMD devices is that of the render node.
        let minor = *minors + if device.model.vendor == Vendor::Amd { 128 } else { 0 };
        *minors += 1;
        self.devices.push(SimulatedHardware { index: Some(self.counters.indices), minor, ..device });
        self.counters.indices += 1;
    }

    fn add_mig_instances(&mut self, gpu: usize, profiles: &[&'static MigProfile]) {
        let gpu = self.devices[gpu].clone();
        let slices = gpu.model.compute_slices();
        let mut taken = BTreeSet::new();
        for profile in profiles {
            let from = first_instance_id(slices, profile.compute);
            let instance = (from..).find(|id| taken.insert(*id)).unwrap_or(from);
            let uuid = nvidia_uuid("MIG", self.seed, &[gpu.uuid.as_bytes(), &instance.to_le_bytes()]);
            self.devices.push(SimulatedHardware {
                index: None,
                uuid: uuid.into(),
                partition: Some(DevicePartition::Mig {
                    parent_uuid: Some(gpu.uuid.clone()),
                    gpu_instance: Some(instance),
                    compute_instance: Some(0),
                    profile: Some(profile.name.into()),
                }),
                memory: Bytes::from_mib(profile.memory_mib),
                reserved: Some(Bytes::ZERO),
                share_of_gpu: profile.share_of_gpu(slices),
                ..gpu.clone()
            });
        }
    }

    /// Generates the next PCI address that is not configured.
    fn next_address(&mut self) -> PciAddress {
        loop {
            let number = self.counters.addresses;
            self.counters.addresses += 1;
            let address = PciAddress { domain: number / 60, bus: (4 + number % 60 * 4) as u8, device: 0, function: 0 };
            if !self.reserved_addresses.contains(&address) {
                return address;
            }
        }
    }
}

/// Returns the smallest id that drivers give to a GPU instance of this size.
fn first_instance_id(slices: u32, compute: u32) -> u32 {
    match (slices, compute) {
        (4, 2) => 1,
        (4, 1) => 3,
        (_, 3 | 4) if slices > 4 => 1,
        (_, 2) => 3,
        (_, 1) => 7,
        _ => 0,
    }
}

// Links of simulated devices: by the fabric of their model, or else by PCIe within or across NUMA nodes.

/// Returns the link of each pair of devices. MIG instances have none, because they cannot communicate.
pub(crate) fn link_devices(devices: &[SimulatedHardware]) -> Vec<DetectedLink> {
    let can_be_linked = |&(_, device): &(usize, &SimulatedHardware)| !device.is_mig_instance();
    let ends: Vec<(usize, &SimulatedHardware)> = devices.iter().enumerate().filter(can_be_linked).collect();
    let from = |(place, &(a, one)): (usize, &(usize, &SimulatedHardware))| {
        let rest = ends[place + 1..].iter();
        rest.map(|&(b, other)| DetectedLink { a, b, kind: link_kind(one, other) }).collect::<Vec<_>>()
    };
    ends.iter().enumerate().flat_map(from).collect()
}

fn link_kind(one: &SimulatedHardware, other: &SimulatedHardware) -> LinkKind {
    let share_fabric = one.model == other.model && one.group == other.group && one.fabric == other.fabric;
    match one.fabric {
        Some(fabric) if share_fabric => fabric.link,
        _ if one.numa == other.numa => LinkKind::SameNuma,
        _ => LinkKind::CrossNuma,
    }
}

// Numbers that are equal on every machine and after every restart: UUIDs, pids, and fluctuation.

/// Hashes `parts`: FNV-1a over their bytes, each with its length so that `ab`+`c` differs from `a`+`bc`, then the
/// finish of SplitMix64, because FNV alone gives similar texts similar high bits.
pub(crate) fn hash_parts(seed: u64, parts: &[&[u8]]) -> u64 {
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let mut hash = 0xcbf2_9ce4_8422_2325 ^ finish_hash(seed);
    for part in parts {
        let length = (part.len() as u64).to_le_bytes();
        for byte in part.iter().chain(&length) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(PRIME);
        }
    }
    finish_hash(hash)
}

/// Returns an NVIDIA UUID derived from `parts`: `GPU-…` or `MIG-…`.
pub(crate) fn nvidia_uuid(prefix: &str, seed: u64, parts: &[&[u8]]) -> String {
    let (high, low) = (hash_parts(seed, parts), hash_parts(!seed, parts));
    let groups = (high >> 32, (high >> 16) & 0xffff, high & 0xffff, low >> 48, low & 0xffff_ffff_ffff);
    format!("{prefix}-{:08x}-{:04x}-{:04x}-{:04x}-{:012x}", groups.0, groups.1, groups.2, groups.3, groups.4)
}

/// Returns an AMD unique id derived from `parts`.
pub(crate) fn amd_uuid(seed: u64, parts: &[&[u8]]) -> String {
    format!("GPU-{:016x}", hash_parts(seed, parts))
}

fn finish_hash(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

// Selection of simulated devices.

/// Position of a simulated device among all of its node, including lost and vanished ones; it never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevicePosition(pub usize);

/// Targeted devices. As text: `all`, `place:3`, `3` (index of the source), a UUID, or a PCI address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FaultTarget {
    All,
    /// The device at this position.
    Position(DevicePosition),
    /// The device with this index in the source's listing.
    Index(u32),
    /// All devices with this UUID.
    Uuid(Arc<str>),
    /// All devices with this PCI address.
    Pci(PciAddress),
}

impl FaultTarget {
    pub(crate) fn matches(&self, place: usize, device: &SimulatedHardware) -> bool {
        match self {
            Self::All => true,
            Self::Position(wanted) => wanted.0 == place,
            Self::Index(wanted) => device.index == Some(*wanted),
            Self::Uuid(wanted) => device.uuid.eq_ignore_ascii_case(wanted),
            Self::Pci(wanted) => device.pci == *wanted,
        }
    }
}

impl FromStr for FaultTarget {
    type Err = std::convert::Infallible;

    /// Accepts any text; a missing device is reported on use.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        if text.eq_ignore_ascii_case("all") {
            return Ok(Self::All);
        }
        if let Some(place) = text.strip_prefix("place:").and_then(|place| place.parse().ok()) {
            return Ok(Self::Position(DevicePosition(place)));
        }
        if let Ok(index) = text.parse() {
            return Ok(Self::Index(index));
        }
        Ok(parse_pci_address(text).map_or_else(|| Self::Uuid(text.into()), Self::Pci))
    }
}

impl fmt::Display for FaultTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Position(place) => write!(f, "place:{}", place.0),
            Self::Index(index) => index.fmt(f),
            Self::Uuid(uuid) => f.write_str(uuid),
            Self::Pci(address) => address.fmt(f),
        }
    }
}

/// The target matches no simulated device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no simulated device matches {target}; existing devices: {}", there_are.join(", "))]
pub struct NoSuchDevice {
    pub target: String,
    /// UUIDs of the first few existing devices.
    pub there_are: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_the_same_as_in_earlier_versions() {
        // A pool that ran on simulated devices must find them again after an upgrade.
        assert_eq!(
            nvidia_uuid("GPU", 0, &[b"", b"H100", &0u64.to_le_bytes()]),
            "GPU-5ee05ef4-cd1d-8e22-adf2-48a96d409afd"
        );
        assert_eq!(amd_uuid(7, &[b"node", b"MI300X", &3u64.to_le_bytes()]), "GPU-1f1fbb7844adae04");
    }

    #[test]
    fn the_hash_depends_on_the_borders_of_parts() {
        assert_ne!(hash_parts(0, &[b"ab", b"c"]), hash_parts(0, &[b"a", b"bc"]));
        assert_ne!(hash_parts(0, &[b"a"]), hash_parts(1, &[b"a"]));
    }

    #[test]
    fn a_target_round_trips_through_text() {
        for text in ["all", "place:3", "7", "GPU-0123456789abcdef", "MIG-1-2", "0000:c1:00.0"] {
            assert_eq!(text.parse::<FaultTarget>().unwrap().to_string(), text);
        }
        assert!(matches!("c1:00.0".parse(), Ok(FaultTarget::Pci(_))));
    }
}

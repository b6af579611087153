//! From a description to devices: identities, places on the bus, partitions, and which of them share a chip or a card.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use gpupool_core::{Bytes, LinkKind, PciAddress, Share, Vendor};

use crate::address::parse_pci_address;
use crate::detected_device::DevicePartition;
use crate::simulated::models::{Fabric, MigProfile, Model};
use crate::simulated::spec::{Cards, Cut, SimulationSpec};
use crate::source_reading::DetectedLink;

/// What never changes of a simulated device.
#[derive(Debug, Clone)]
pub(crate) struct Device {
    pub model: &'static Model,
    pub index: Option<u32>,
    pub minor: u32,
    pub uuid: Arc<str>,
    pub pci: PciAddress,
    pub numa: u32,
    pub partition: Option<DevicePartition>,
    pub mig: Option<bool>,
    pub memory: Option<Bytes>,
    pub reserved: Option<Bytes>,
    /// How much of its GPU it is.
    pub share_of_gpu: Share,
    /// Number of its GPU, and the places of all devices on it: itself, and the partitions.
    pub gpu: usize,
    pub on_gpu: Range<usize>,
    /// The places of all devices on its card, which has one power sensor.
    pub on_card: Range<usize>,
    pub fabric: Option<Fabric>,
    /// The group of GPUs of its model that its fabric joins.
    pub group: usize,
}

impl Device {
    /// Whether it is a GPU that is cut by MIG, which takes no work itself.
    pub(crate) fn is_cut_by_mig(&self) -> bool {
        self.mig == Some(true) && self.partition.is_none()
    }

    pub(crate) fn is_mig_instance(&self) -> bool {
        matches!(self.partition, Some(DevicePartition::Mig { .. }))
    }
}

/// Every device of a description, in its order.
pub(crate) fn devices(spec: &SimulationSpec) -> Vec<Device> {
    let mut layout = Layout {
        node: spec.node().unwrap_or("").as_bytes(),
        seed: spec.seed,
        cards: spec.cards.iter().map(|cards| cards.count).sum(),
        given: spec.cards.iter().filter_map(|cards| cards.pci).collect(),
        made: Made::default(),
        devices: Vec::new(),
    };
    for cards in &spec.cards {
        for _ in 0..cards.count {
            layout.card(cards);
        }
    }
    layout.devices
}

struct Layout<'a> {
    node: &'a [u8],
    seed: u64,
    /// Cards in all.
    cards: usize,
    /// Places on the bus that were given, and are not made up again.
    given: BTreeSet<PciAddress>,
    made: Made,
    devices: Vec<Device>,
}

/// What was used so far.
#[derive(Default)]
struct Made {
    cards: usize,
    gpus: usize,
    indices: u32,
    nvidia_minors: u32,
    amd_minors: u32,
    addresses: u32,
    /// Cards and GPUs of each model.
    of_model: BTreeMap<&'static str, (u64, usize)>,
}

impl Layout<'_> {
    fn card(&mut self, cards: &Cards) {
        let first = self.devices.len();
        let model = cards.model;
        let (cards_before, _) = *self.made.of_model.entry(model.key).or_default();
        // By its number among those of its model, so that other models may come and go.
        let parts: [&[u8]; 3] = [self.node, model.key.as_bytes(), &cards_before.to_le_bytes()];
        let uuid: Arc<str> = match (&cards.uuid, model.vendor) {
            (Some(uuid), _) => uuid.clone(),
            (None, Vendor::Amd) => amd_uuid(self.seed, &parts).into(),
            (None, _) => nvidia_uuid("GPU", self.seed, &parts).into(),
        };
        for _ in 0..model.dies {
            self.gpu(cards, &uuid);
        }
        let end = self.devices.len();
        for device in &mut self.devices[first..] {
            device.on_card = first..end;
        }
        self.made.cards += 1;
        self.made.of_model.entry(model.key).or_default().0 += 1;
    }

    fn gpu(&mut self, cards: &Cards, uuid: &Arc<str>) {
        let first = self.devices.len();
        let model = cards.model;
        let (_, gpus_before) = *self.made.of_model.entry(model.key).or_default();
        let whole = Device {
            model,
            index: None,
            minor: 0,
            uuid: uuid.clone(),
            pci: cards.pci.unwrap_or_else(|| self.address()),
            numa: u32::from(self.made.cards * 2 >= self.cards && self.cards > 1),
            partition: None,
            mig: (!model.mig.is_empty()).then_some(matches!(cards.cut, Cut::Mig(_))),
            memory: cards.memory,
            reserved: cards.reserved,
            share_of_gpu: Share::WHOLE,
            gpu: self.made.gpus,
            on_gpu: 0..0,
            on_card: 0..0,
            fabric: cards.fabric,
            group: gpus_before / cards.fabric.map_or(1, |fabric| fabric.group.max(1)),
        };
        match &cards.cut {
            Cut::Whole => self.numbered(whole),
            Cut::Amd(mode) => {
                for id in 0..mode.parts {
                    let partition = DevicePartition::Amd { id, mode: Some(mode.name.into()), parts: Some(mode.parts) };
                    let part = |bytes: Bytes| Bytes(bytes.0 / u64::from(mode.parts));
                    self.numbered(Device {
                        partition: Some(partition),
                        memory: whole.memory.map(part),
                        reserved: whole.reserved.map(part),
                        share_of_gpu: Share(1000 / u32::from(mode.parts)),
                        ..whole.clone()
                    });
                }
            }
            Cut::Mig(profiles) => {
                self.numbered(whole);
                self.mig_instances(first, profiles);
            }
        }
        let end = self.devices.len();
        for device in &mut self.devices[first..] {
            device.on_gpu = first..end;
        }
        self.made.gpus += 1;
        self.made.of_model.entry(model.key).or_default().1 += 1;
    }

    /// Adds a device with a number and a device node of its own.
    fn numbered(&mut self, device: Device) {
        let minors = match device.model.vendor {
            Vendor::Amd => &mut self.made.amd_minors,
            _ => &mut self.made.nvidia_minors,
        };
        // AMD's is that of the render node.
        let minor = *minors + if device.model.vendor == Vendor::Amd { 128 } else { 0 };
        *minors += 1;
        self.devices.push(Device { index: Some(self.made.indices), minor, ..device });
        self.made.indices += 1;
    }

    fn mig_instances(&mut self, gpu: usize, profiles: &[&'static MigProfile]) {
        let gpu = self.devices[gpu].clone();
        let slices = gpu.model.compute_slices();
        let mut taken = BTreeSet::new();
        for profile in profiles {
            let from = first_instance(slices, profile.compute);
            let instance = (from..).find(|id| taken.insert(*id)).unwrap_or(from);
            let uuid = nvidia_uuid("MIG", self.seed, &[gpu.uuid.as_bytes(), &instance.to_le_bytes()]);
            self.devices.push(Device {
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

    /// The next place on the bus that was not given to a device.
    fn address(&mut self) -> PciAddress {
        loop {
            let number = self.made.addresses;
            self.made.addresses += 1;
            let address = PciAddress { domain: number / 60, bus: (4 + number % 60 * 4) as u8, device: 0, function: 0 };
            if !self.given.contains(&address) {
                return address;
            }
        }
    }
}

/// The smallest number drivers give to a GPU instance of this size.
fn first_instance(slices: u32, compute: u32) -> u32 {
    match (slices, compute) {
        (4, 2) => 1,
        (4, 1) => 3,
        (_, 3 | 4) if slices > 4 => 1,
        (_, 2) => 3,
        (_, 1) => 7,
        _ => 0,
    }
}

// How simulated devices are joined: by the fabric of their model, else by PCIe in one NUMA node or across two.

/// The link of each pair of devices. MIG instances have none: they cannot talk to each other.
pub(crate) fn links(devices: &[Device]) -> Vec<DetectedLink> {
    let joinable = |&(_, device): &(usize, &Device)| !device.is_mig_instance();
    let ends: Vec<(usize, &Device)> = devices.iter().enumerate().filter(joinable).collect();
    let from = |(place, &(a, one)): (usize, &(usize, &Device))| {
        let rest = ends[place + 1..].iter();
        rest.map(|&(b, other)| DetectedLink { a, b, kind: kind(one, other) }).collect::<Vec<_>>()
    };
    ends.iter().enumerate().flat_map(from).collect()
}

fn kind(one: &Device, other: &Device) -> LinkKind {
    let akin = one.model == other.model && one.group == other.group && one.fabric == other.fabric;
    match one.fabric {
        Some(fabric) if akin => fabric.link,
        _ if one.numa == other.numa => LinkKind::SameNuma,
        _ => LinkKind::CrossNuma,
    }
}

// Numbers that are the same on every machine and after every restart: UUIDs, made-up pids, and what looks like noise.

/// A number that mixes what `parts` hold: FNV-1a over their bytes, each ended so that `ab`+`c` is not `a`+`bc`, then
/// the finish of SplitMix64, because FNV alone leaves similar texts with similar high bits.
pub(crate) fn mixed(seed: u64, parts: &[&[u8]]) -> u64 {
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let mut hash = 0xcbf2_9ce4_8422_2325 ^ finished(seed);
    for part in parts {
        let length = (part.len() as u64).to_le_bytes();
        for byte in part.iter().chain(&length) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(PRIME);
        }
    }
    finished(hash)
}

/// An NVIDIA UUID for what `parts` name: `GPU-…` or `MIG-…`.
pub(crate) fn nvidia_uuid(prefix: &str, seed: u64, parts: &[&[u8]]) -> String {
    let (high, low) = (mixed(seed, parts), mixed(!seed, parts));
    let groups = (high >> 32, (high >> 16) & 0xffff, high & 0xffff, low >> 48, low & 0xffff_ffff_ffff);
    format!("{prefix}-{:08x}-{:04x}-{:04x}-{:04x}-{:012x}", groups.0, groups.1, groups.2, groups.3, groups.4)
}

/// An AMD unique id for what `parts` name.
pub(crate) fn amd_uuid(seed: u64, parts: &[&[u8]]) -> String {
    format!("GPU-{:016x}", mixed(seed, parts))
}

fn finished(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

// Which simulated devices somebody means.

/// A simulated device's place among all of its node, lost and vanished ones included; it never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevicePosition(pub usize);

/// Which devices are meant. As text: `all`, `place:3`, `3` (the source's number), a UUID, or a PCI address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FaultTarget {
    All,
    /// The one at this place.
    Position(DevicePosition),
    /// The one with this number in the source's listing.
    Index(u32),
    /// Every one that carries this UUID.
    Uuid(Arc<str>),
    /// Every one at this place on the bus.
    Pci(PciAddress),
}

impl FaultTarget {
    pub(crate) fn means(&self, place: usize, device: &Device) -> bool {
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

    /// Any text is a target; whether there is such a device shows when it is used.
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

/// No simulated device is meant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no simulated device is {target}; there are: {}", there_are.join(", "))]
pub struct NoSuchDevice {
    /// What was asked for.
    pub target: String,
    /// UUIDs of those there are, the first few.
    pub there_are: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_stay_what_they_were_in_earlier_versions() {
        // A pool that ran on simulated devices finds them again after an upgrade.
        assert_eq!(
            nvidia_uuid("GPU", 0, &[b"", b"H100", &0u64.to_le_bytes()]),
            "GPU-5ee05ef4-cd1d-8e22-adf2-48a96d409afd"
        );
        assert_eq!(amd_uuid(7, &[b"node", b"MI300X", &3u64.to_le_bytes()]), "GPU-1f1fbb7844adae04");
    }

    #[test]
    fn where_one_part_ends_matters() {
        assert_ne!(mixed(0, &[b"ab", b"c"]), mixed(0, &[b"a", b"bc"]));
        assert_ne!(mixed(0, &[b"a"]), mixed(1, &[b"a"]));
    }

    #[test]
    fn a_target_survives_text() {
        for text in ["all", "place:3", "7", "GPU-0123456789abcdef", "MIG-1-2", "0000:c1:00.0"] {
            assert_eq!(text.parse::<FaultTarget>().unwrap().to_string(), text);
        }
        assert!(matches!("c1:00.0".parse(), Ok(FaultTarget::Pci(_))));
    }
}

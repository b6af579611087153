//! From a description to devices: identities, places on the bus, partitions, and which of them share a chip or a card.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use gpupool_core::device::{PciAddress, Vendor};
use gpupool_core::units::{Bytes, Share};

use super::identity::{amd_uuid, nvidia_uuid};
use super::models::{Fabric, MigProfile, Model};
use super::spec::{Cards, Cut, Spec};
use crate::found::Partition;

/// What never changes of a simulated device.
#[derive(Debug, Clone)]
pub(crate) struct Device {
    pub model: &'static Model,
    pub index: Option<u32>,
    pub minor: u32,
    pub uuid: Arc<str>,
    pub pci: PciAddress,
    pub numa: u32,
    pub partition: Option<Partition>,
    pub mig: Option<bool>,
    pub memory: Option<Bytes>,
    pub reserved: Option<Bytes>,
    /// How much of its GPU it is.
    pub of_gpu: Share,
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
    pub fn is_cut_by_mig(&self) -> bool {
        self.mig == Some(true) && self.partition.is_none()
    }

    pub fn is_mig_instance(&self) -> bool {
        matches!(self.partition, Some(Partition::Mig { .. }))
    }
}

/// Every device of a description, in its order.
pub(crate) fn devices(spec: &Spec) -> Vec<Device> {
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
            of_gpu: Share::WHOLE,
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
                    let partition = Partition::Amd { id, mode: Some(mode.name.into()), parts: Some(mode.parts) };
                    let part = |bytes: Bytes| Bytes(bytes.0 / u64::from(mode.parts));
                    self.numbered(Device {
                        partition: Some(partition),
                        memory: whole.memory.map(part),
                        reserved: whole.reserved.map(part),
                        of_gpu: Share(1000 / u32::from(mode.parts)),
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
                partition: Some(Partition::Mig {
                    parent_uuid: Some(gpu.uuid.clone()),
                    gpu_instance: Some(instance),
                    compute_instance: Some(0),
                    profile: Some(profile.name.into()),
                }),
                memory: Bytes::from_mib(profile.memory_mib),
                reserved: Some(Bytes::ZERO),
                of_gpu: profile.of_gpu(slices),
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

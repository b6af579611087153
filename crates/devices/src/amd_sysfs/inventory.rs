//! The AMD devices of a tree: cards and compute nodes joined, with what stays the same between readings.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_core::device::{PciAddress, Vendor};

use super::card::{self, CardReader};
use super::drm::Card;
use super::kfd::{Node, Topology};
use super::links;
use super::partitions::{self, Part};
use super::processes::{DeviceKey, Processes};
use crate::found::Found;
use crate::snapshot::{FoundLink, Snapshot};
use crate::{amd_names, limits};

/// What is done with cards of other makers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Others {
    /// They are somebody else's.
    LeftOut,
    /// They are listed without readings, or said to be unsupported: a capture has nobody else to tell of them.
    Listed,
}

/// All devices of a tree.
#[derive(Debug)]
pub(crate) struct Inventory {
    devices: Vec<Device>,
    keys: Vec<DeviceKey>,
    links: Vec<FoundLink>,
    warnings: Vec<String>,
    processes: Processes,
    driver_version: Option<Arc<str>>,
}

/// One device, by what is known of it.
#[derive(Debug)]
struct Device {
    card: Option<CardReader>,
    node: Option<Node>,
    /// Its number for ROCm, which numbers what the compute topology has.
    index: Option<u32>,
    /// The processor the node hangs on, where there are several.
    home: Option<u32>,
    part: Option<Part>,
}

impl Inventory {
    /// Joins cards and nodes: by render node, or else by place on the bus. What is left of either is a device too.
    pub fn new(cards: Vec<Card>, topology: Topology, others: Others) -> Self {
        let Topology { gpus, cpus, mut warnings } = topology;
        let mut nodes: BTreeMap<u32, Node> = gpus.into_iter().map(|node| (node.number, node)).collect();
        let mut devices: Vec<Device> = Vec::new();
        for card in cards {
            warnings.extend(warning_of(&card, others));
            let is_listed =
                card.vendor == Some(Vendor::Amd) || card.vendor == Some(Vendor::Nvidia) && others == Others::Listed;
            if is_listed {
                let node = node_of(&card, &nodes).and_then(|number| nodes.remove(&number));
                let mut reader = CardReader::new(card);
                reader.is_captured = others == Others::Listed;
                devices.push(Device { card: Some(reader), node, index: None, home: None, part: None });
            }
        }
        devices.extend(nodes.into_values().map(|node| Device {
            card: None,
            node: Some(node),
            index: None,
            home: None,
            part: None,
        }));
        if devices.len() > limits::DEVICES {
            warnings.push(format!("more than {} devices; the rest is left out", limits::DEVICES));
            devices.truncate(limits::DEVICES);
        }
        for device in devices.iter_mut().filter(|_| cpus.len() > 1) {
            device.home = device.node.as_ref().and_then(|node| links::home(node, &cpus));
        }
        number(&mut devices);
        let placed: Vec<(usize, &Node)> =
            devices.iter().enumerate().filter_map(|(place, device)| Some((place, device.node.as_ref()?))).collect();
        let links = links::links(&placed, &cpus);
        for (place, part) in partitions::parts(&placed) {
            devices[place].part = Some(part);
        }
        let keys = devices.iter().map(Device::key).collect();
        Self { devices, keys, links, warnings, processes: Processes::default(), driver_version: None }
    }

    /// With the version of the driver, and where processes are looked for.
    pub fn with(mut self, driver_version: Option<Arc<str>>, processes: Processes) -> Self {
        self.driver_version = driver_version;
        self.processes = processes;
        self
    }

    /// Whether there is nothing at all.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// Gives back what is remembered of processes, for the next inventory.
    pub fn into_processes(self) -> Processes {
        self.processes
    }

    /// Every device with what it reports now, and whether some files are gone that were there.
    pub fn read(&mut self) -> (Snapshot, bool) {
        let mut snapshot = Snapshot { links: self.links.clone(), ..Snapshot::default() };
        for warning in &self.warnings {
            snapshot.warn(warning.clone());
        }
        let mut stale = false;
        for device in &mut self.devices {
            let (mut found, is_stale) = device.read(&mut snapshot);
            stale |= is_stale;
            if let Some(version) = self.driver_version.as_ref().filter(|_| device.is_of_amdgpu()) {
                found.driver = Some(version.clone());
            }
            snapshot.push(found);
        }
        self.cut(&mut snapshot.devices);
        let (processes, warning) = self.processes.read(&self.keys);
        for (found, processes) in snapshot.devices.iter_mut().zip(processes) {
            if found.vendor == Vendor::Amd {
                found.processes = processes;
            }
        }
        if let Some(warning) = warning {
            snapshot.warn(warning);
        }
        (snapshot, stale)
    }

    /// Gives each part of a cut card what is its own, and what the card measures for all of them.
    fn cut(&self, found: &mut [Found]) {
        for (place, device) in self.devices.iter().enumerate() {
            let Some(part) = device.part else { continue };
            let has_card =
                |&place: &usize| self.devices[place].card.as_ref().is_some_and(|card| card.card.pci.is_some());
            let whole = (0..self.devices.len()).filter(|&other| self.devices[other].is_part_of(part)).find(has_card);
            let mode = whole.and_then(|whole| self.devices[whole].card.as_ref()?.compute_partition());
            let Some(partition) = partitions::partition(part, mode) else { continue };
            found[place].partition = Some(partition);
            match whole {
                Some(whole) if whole == place => partitions::keep_own(&mut found[place], device.node.as_ref()),
                Some(whole) => {
                    let card = found[whole].clone();
                    partitions::take_from_card(&mut found[place], &card);
                }
                None => {}
            }
        }
    }
}

impl Device {
    fn key(&self) -> DeviceKey {
        let card = self.card.as_ref().map(|reader| &reader.card);
        let node = self.node.as_ref();
        DeviceKey {
            gpu_id: node.and_then(|node| node.gpu_id),
            pci: self.pci(),
            minor: card.and_then(|card| card.render_minor).or(node.and_then(|node| node.render_minor)),
        }
    }

    fn pci(&self) -> Option<PciAddress> {
        let card = self.card.as_ref().and_then(|reader| reader.card.pci);
        card.or(self.node.as_ref().and_then(|node| node.pci))
    }

    fn is_part_of(&self, part: Part) -> bool {
        self.part.is_some_and(|own| own.card == part.card)
    }

    fn is_of_amdgpu(&self) -> bool {
        let card = self.card.as_ref().map(|reader| &reader.card);
        card.is_none_or(|card| card.driver.as_deref().is_some_and(|driver| driver.starts_with("amdgpu")))
    }

    fn read(&mut self, snapshot: &mut Snapshot) -> (Found, bool) {
        let (mut found, stale) = match &mut self.card {
            Some(reader) if reader.card.vendor == Some(Vendor::Amd) => reader.read(snapshot),
            Some(reader) => (only_listed(&reader.card), false),
            None => (Found::new(Vendor::Amd), false),
        };
        found.index = self.index;
        if let Some(node) = &self.node {
            complete(&mut found, node, self.home);
        }
        (found, stale)
    }
}

/// Numbers the devices of the compute topology as ROCm does: in the order of its nodes, processors left out.
fn number(devices: &mut [Device]) {
    let mut ordered: Vec<&mut Device> = devices.iter_mut().filter(|device| device.node.is_some()).collect();
    ordered.sort_by_key(|device| device.node.as_ref().map(|node| node.number));
    for (index, device) in (0..).zip(ordered) {
        device.index = Some(index);
    }
}

/// Adds what the compute topology knows and the card does not.
fn complete(found: &mut Found, node: &Node, home: Option<u32>) {
    if found.pci.is_none() {
        found.numa = found.numa.or(home);
    }
    let is_apu = node.device_id.is_some_and(amd_names::is_apu);
    let memory = if is_apu { &mut found.memory.host_total } else { &mut found.memory.total };
    *memory = std::mem::take(memory).or(node.memory.clone());
    found.minor = found.minor.or(node.render_minor);
    found.pci = found.pci.or(node.pci);
    found.uuid = found.uuid.take().or_else(|| node.unique_id.and_then(card::uuid_of));
    if found.name.as_deref().is_none_or(|name| name == card::NAMELESS) {
        found.name = Some(name_of(node).into());
    }
}

fn name_of(node: &Node) -> String {
    let known = node.device_id.and_then(|device| amd_names::known(device, None));
    let by_codename = || node.codename.as_ref().map(|name| format!("AMD {name}"));
    let by_number = || node.device_id.map(|device| amd_names::name(device, None));
    known.or_else(by_codename).or_else(by_number).unwrap_or_else(|| card::NAMELESS.to_owned())
}

/// A card of another maker: where it is, and nothing of how it is.
fn only_listed(card: &Card) -> Found {
    let mut found = Found::new(card.vendor.unwrap_or(Vendor::Other));
    found.index = card.number;
    found.minor = card.render_minor;
    found.pci = card.pci;
    found.driver = card.driver.as_deref().map(Into::into);
    found.numa = card.numa;
    found
}

fn warning_of(card: &Card, others: Others) -> Option<String> {
    let spelled = card.spelled();
    let driver = card.driver.as_deref().unwrap_or("no driver");
    match card.vendor {
        Some(Vendor::Amd) if driver == "radeon" => {
            Some(format!("{spelled} is driven by radeon, the legacy driver, which tells little"))
        }
        Some(Vendor::Intel) if others == Others::Listed => {
            let id = card.device_id.map_or_else(String::new, |device| format!(", 8086:{device:04x}"));
            Some(format!("Intel GPUs are not supported yet: {spelled} ({driver}{id})"))
        }
        _ => None,
    }
}

/// The node of a card among those not matched yet.
fn node_of(card: &Card, nodes: &BTreeMap<u32, Node>) -> Option<u32> {
    if card.vendor != Some(Vendor::Amd) {
        return None;
    }
    let find = |is: &dyn Fn(&Node) -> bool| nodes.values().find(|node| is(node)).map(|node| node.number);
    if let Some(minor) = card.render_minor {
        return find(&|node| node.render_minor == Some(minor));
    }
    let pci = card.pci?;
    find(&|node| node.pci == Some(pci))
}

//! The AMD devices of a tree: cards and compute nodes joined, with what stays the same between readings.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use gpupool_core::Vendor;

use crate::amd_sysfs::card::{self, CardReader};
use crate::amd_sysfs::drm::{self, Card};
use crate::amd_sysfs::kfd::{self, Node, Part, Topology};
use crate::amd_sysfs::processes::{DeviceKey, Processes};
use crate::detected_device::DetectedDevice;
use crate::source::SourceError;
use crate::source_reading::{DetectedLink, SourceReading};
use crate::{amd_names, kernel_file, limits};

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
    links: Vec<DetectedLink>,
    warnings: Vec<String>,
    processes: Processes,
    driver_version: Option<Arc<str>>,
}

/// One device, by what is known of it.
#[derive(Debug, Default)]
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
    pub(super) fn new(cards: Vec<Card>, topology: Topology, others: Others) -> Self {
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
                devices.push(Device { card: Some(reader), node, ..Device::default() });
            }
        }
        devices.extend(nodes.into_values().map(|node| Device { node: Some(node), ..Device::default() }));
        if devices.len() > limits::DEVICES {
            warnings.push(format!("more than {} devices; the rest is left out", limits::DEVICES));
            devices.truncate(limits::DEVICES);
        }
        for device in devices.iter_mut().filter(|_| cpus.len() > 1) {
            device.home = device.node.as_ref().and_then(|node| kfd::home(node, &cpus));
        }
        number(&mut devices);
        let placed: Vec<(usize, &Node)> =
            devices.iter().enumerate().filter_map(|(place, device)| Some((place, device.node.as_ref()?))).collect();
        let links = kfd::links(&placed, &cpus);
        for (place, part) in kfd::parts(&placed) {
            devices[place].part = Some(part);
        }
        let keys = devices.iter().map(Device::key).collect();
        Self { devices, keys, links, warnings, processes: Processes::default(), driver_version: None }
    }

    /// With the version of the driver, and where processes are looked for.
    pub(super) fn with(mut self, driver_version: Option<Arc<str>>, processes: Processes) -> Self {
        self.driver_version = driver_version;
        self.processes = processes;
        self
    }

    /// Whether there is nothing at all.
    pub(super) fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// Gives back what is remembered of processes, for the next inventory.
    pub(super) fn into_processes(self) -> Processes {
        self.processes
    }

    /// Every device with what it reports now, and whether some files are gone that were there.
    pub(super) fn read(&mut self) -> (SourceReading, bool) {
        let mut snapshot = SourceReading { links: self.links.clone(), ..SourceReading::default() };
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
    fn cut(&self, found: &mut [DetectedDevice]) {
        for (place, device) in self.devices.iter().enumerate() {
            let Some(part) = device.part else { continue };
            let has_card =
                |&place: &usize| self.devices[place].card.as_ref().is_some_and(|card| card.card.pci.is_some());
            let is_part = |&other: &usize| self.devices[other].part.is_some_and(|other| other.card == part.card);
            let whole = (0..self.devices.len()).filter(is_part).find(has_card);
            let mode = whole.and_then(|whole| self.devices[whole].card.as_ref()?.compute_partition());
            let Some(partition) = kfd::partition(part, mode) else { continue };
            found[place].partition = Some(partition);
            match whole {
                Some(whole) if whole == place => kfd::keep_own(&mut found[place], device.node.as_ref()),
                Some(whole) => {
                    let card = found[whole].clone();
                    kfd::take_from_card(&mut found[place], &card);
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
            pci: card.and_then(|card| card.pci).or(node.and_then(|node| node.pci)),
            minor: card.and_then(|card| card.render_minor).or(node.and_then(|node| node.render_minor)),
        }
    }

    fn is_of_amdgpu(&self) -> bool {
        let card = self.card.as_ref().map(|reader| &reader.card);
        card.is_none_or(|card| card.driver.as_deref().is_some_and(|driver| driver.starts_with("amdgpu")))
    }

    fn read(&mut self, snapshot: &mut SourceReading) -> (DetectedDevice, bool) {
        let (mut found, stale) = match &mut self.card {
            Some(reader) if reader.card.vendor == Some(Vendor::Amd) => reader.read(snapshot),
            Some(reader) => (reader.card.found(), false),
            None => (DetectedDevice::new(Vendor::Amd), false),
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
fn complete(found: &mut DetectedDevice, node: &Node, home: Option<u32>) {
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

// Captured trees, in the shapes people save them: all of `/sys`, a folder with cards, one card, a compute topology.

/// Folders a capture may be wrapped in.
const WRAPPERS: usize = 4;

/// Whether a folder is, or holds, a captured tree of graphics cards or of a compute topology.
pub(crate) fn looks_like(root: &Path) -> bool {
    captured(root).is_some()
}

/// The devices of a captured tree. Cards of NVIDIA are listed without readings; those of Intel are a warning.
pub(crate) fn read(root: &Path) -> Result<SourceReading, SourceError> {
    let nothing = || SourceError::malformed("sysfs", "no graphics card and no compute node below the folder");
    Ok(captured(root).ok_or_else(nothing)?.read().0)
}

fn captured(root: &Path) -> Option<Inventory> {
    let mut root = root.to_path_buf();
    for _ in 0..WRAPPERS {
        if let Some(inventory) = captured_at(&root) {
            return Some(inventory);
        }
        root = kernel_file::only_subfolder(&root)?;
    }
    None
}

fn captured_at(root: &Path) -> Option<Inventory> {
    let existing = |places: &[&str]| places.iter().map(|place| root.join(place)).find(|path| path.is_dir());
    let cards = cards(root);
    let nodes = NODES.iter().map(|place| root.join(place)).find(|path| kfd::is_nodes(path));
    if cards.is_empty() && nodes.is_none() {
        return None;
    }
    let version = ["sys/module/amdgpu/version", "module/amdgpu/version"]
        .iter()
        .find_map(|place| kernel_file::read_text(&root.join(place)).into_value());
    let compute = existing(&["sys/class/kfd/kfd/proc", "class/kfd/kfd/proc", "kfd/kfd/proc", "kfd/proc"]);
    let processes = Processes::new(compute, existing(&["proc"]));
    let topology = nodes.as_deref().map(kfd::read).unwrap_or_default();
    Some(Inventory::new(cards, topology, Others::Listed).with(version.map(Into::into), processes))
}

/// Where the nodes of a topology may be.
const NODES: [&str; 10] = [
    "sys/class/kfd/kfd/topology/nodes",
    "sys/devices/virtual/kfd/kfd/topology/nodes",
    "class/kfd/kfd/topology/nodes",
    "devices/virtual/kfd/kfd/topology/nodes",
    "kfd/kfd/topology/nodes",
    "kfd/topology/nodes",
    "topology/nodes",
    "nodes",
    "kfd/nodes",
    "",
];

/// The cards of a tree: in the first folder that has entries `cardN`, or else the folder itself as one.
fn cards(root: &Path) -> Vec<Card> {
    let is_card = |card: &Card| card.vendor.is_some();
    for folder in ["sys/class/drm", "class/drm", "drm", ""] {
        let mut cards = drm::cards(&root.join(folder)).unwrap_or_default();
        cards.retain(is_card);
        if !cards.is_empty() {
            return cards;
        }
    }
    let number = root.file_name().and_then(|name| name.to_str()?.strip_prefix("card")?.parse().ok());
    let entry = Card::at(root, number);
    let device = Card::of_device(root.to_path_buf(), None);
    // The folder of any PCI device has the files of one; only a display (class 03) or a part of a card is meant.
    let displays = |card: &Card| {
        let class = kernel_file::read_number::<u32>(&card.device.join("class"));
        is_card(card) && class.value().is_none_or(|class| class >> 16 == 0x03 || class >> 16 == 0x12)
    };
    [entry, device].into_iter().find(displays).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amd_sysfs::tests::Tree;
    use crate::reported::Reported;
    use gpupool_core::Vendor;

    fn addresses(root: &Path) -> Vec<String> {
        assert!(looks_like(root), "{}", root.display());
        read(root).unwrap().devices.iter().map(|device| device.pci.unwrap().to_string()).collect()
    }

    #[test]
    fn a_tree_is_found_whatever_part_of_it_was_saved() {
        let tree = Tree::new();
        tree.amd_card(1, "0000:03:00.0", 0x744c);
        for saved in ["", "..", "class", "class/drm", "class/drm/card1", "class/drm/card1/device"] {
            assert_eq!(addresses(&tree.path(saved)), ["0000:03:00.0"], "{saved}");
        }
        assert!(!looks_like(&tree.path("class/drm/card1/device/power")));
        assert!(read(&tree.path("class/drm/card1/device/power")).is_err());
    }

    #[test]
    fn a_compute_topology_alone_is_a_list_of_devices() {
        let tree = Tree::new();
        tree.kfd_cpu(0);
        tree.kfd_gpu(1, "location_id 768\ndevice_id 29711\nunique_id 171", 5, 0);
        tree.file("class/kfd/kfd/topology/nodes/1/name", "aldebaran\n");
        let kfd = "class/kfd/kfd";
        for saved in ["", "class", kfd, &format!("{kfd}/topology"), &format!("{kfd}/topology/nodes")] {
            assert_eq!(addresses(&tree.path(saved)), ["0000:03:00.0"], "{saved}");
        }
        let device = read(&tree.path("")).unwrap().devices.remove(0);
        assert_eq!(device.name.as_deref(), Some("AMD Instinct MI210"));
        assert_eq!(device.uuid.as_deref(), Some("GPU-00000000000000ab"));
        assert_eq!((device.health, device.memory.total), (None, Reported::ABSENT));
    }

    #[test]
    fn an_unknown_node_is_called_by_the_name_of_its_chip() {
        let tree = Tree::new();
        tree.kfd_gpu(1, "location_id 768\ndevice_id 171", 5, 0);
        assert_eq!(read(&tree.path("")).unwrap().devices[0].name.as_deref(), Some("AMD 0x00ab"));
        tree.file("class/kfd/kfd/topology/nodes/1/name", "vega99\n");
        assert_eq!(read(&tree.path("")).unwrap().devices[0].name.as_deref(), Some("AMD vega99"));
    }

    #[test]
    fn an_apu_has_the_memory_of_the_host() {
        let tree = Tree::new();
        tree.kfd_gpu(1, "location_id 25600\ndevice_id 5567", 5, 30 << 30);
        let device = read(&tree.path("")).unwrap().devices.remove(0);
        assert!(device.memory.total.is_absent());
        assert!(device.memory.host_total.value().is_some());
    }

    #[test]
    fn cards_of_others_are_listed_or_said_to_be_unsupported() {
        let tree = Tree::new();
        let event =
            |driver: &str, id: &str, slot: &str| format!("DRIVER={driver}\nPCI_ID={id}\nPCI_SLOT_NAME={slot}\n");
        tree.file("card0/device/uevent", event("nvidia", "10DE:2704", "0000:09:00.0"));
        tree.file("card1/device/uevent", event("xe", "8086:E20B", "0000:0a:00.0"));
        tree.file("card2/device/uevent", event("ast", "1A03:2000", "0000:0b:00.0"));
        let snapshot = read(&tree.path("")).unwrap();
        let [device] = snapshot.devices.as_slice() else { panic!("{snapshot:?}") };
        assert_eq!((device.vendor, device.driver.as_deref()), (Vendor::Nvidia, Some("nvidia")));
        assert_eq!(device.health, None);
        assert_eq!(snapshot.warnings, ["Intel GPUs are not supported yet: 0000:0a:00.0 (xe, 8086:e20b)"]);
    }

    #[test]
    fn a_legacy_driver_is_said() {
        let tree = Tree::new();
        tree.file("card0/device/uevent", "DRIVER=radeon\nPCI_ID=1002:6818\nPCI_SLOT_NAME=0000:01:00.0\n");
        let snapshot = read(&tree.path("")).unwrap();
        assert_eq!(snapshot.devices.len(), 1);
        assert!(snapshot.warnings[0].contains("legacy"));
    }
}

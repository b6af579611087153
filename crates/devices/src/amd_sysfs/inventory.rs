//! Inventory of the AMD devices in a tree: cards joined with compute nodes, and the facts that stay the same between
//! readings.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use gpupool_core::Vendor;

use crate::amd_sysfs::card::{self, CardReader};
use crate::amd_sysfs::drm::{self, DrmCard};
use crate::amd_sysfs::kfd::{self, CardPart, KfdNode, KfdTopology};
use crate::amd_sysfs::processes::{DeviceKeys, ProcessScanner};
use crate::detected_device::DetectedDevice;
use crate::source::SourceError;
use crate::source_reading::{DetectedLink, SourceReading};
use crate::{amd_names, kernel_file, limits};

/// Treatment of other vendors' cards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OtherVendorCards {
    /// Cards of other vendors belong to other sources.
    LeftOut,
    /// Cards of other vendors are listed without readings, or as unsupported: a capture has no other source.
    Listed,
}

/// All devices of a tree.
#[derive(Debug)]
pub(crate) struct AmdInventory {
    devices: Vec<JoinedDevice>,
    keys: Vec<DeviceKeys>,
    links: Vec<DetectedLink>,
    warnings: Vec<String>,
    scanner: ProcessScanner,
    driver_version: Option<Arc<str>>,
}

/// A device: its card, its compute node, or both.
#[derive(Debug, Default)]
struct JoinedDevice {
    card: Option<CardReader>,
    node: Option<KfdNode>,
    /// ROCm's number of the device: its index in the compute topology.
    index: Option<u32>,
    /// Nearest processor node, if there are several.
    processor_node: Option<u32>,
    part: Option<CardPart>,
}

impl AmdInventory {
    /// Joins cards and nodes by render node, else by PCI address. Each unmatched card or node is a device too.
    pub(super) fn new(cards: Vec<DrmCard>, topology: KfdTopology, other_vendors: OtherVendorCards) -> Self {
        let KfdTopology { gpus, cpus, mut warnings } = topology;
        let mut nodes: BTreeMap<u32, KfdNode> = gpus.into_iter().map(|node| (node.number, node)).collect();
        let mut devices: Vec<JoinedDevice> = Vec::new();
        for card in cards {
            warnings.extend(card_warning(&card, other_vendors));
            let is_listed = card.vendor == Some(Vendor::Amd)
                || card.vendor == Some(Vendor::Nvidia) && other_vendors == OtherVendorCards::Listed;
            if is_listed {
                let node = matching_node(&card, &nodes).and_then(|number| nodes.remove(&number));
                let mut reader = CardReader::new(card);
                reader.is_captured = other_vendors == OtherVendorCards::Listed;
                devices.push(JoinedDevice { card: Some(reader), node, ..JoinedDevice::default() });
            }
        }
        devices.extend(nodes.into_values().map(|node| JoinedDevice { node: Some(node), ..JoinedDevice::default() }));
        if devices.len() > limits::DEVICES {
            warnings.push(format!("more than {} devices; the rest is left out", limits::DEVICES));
            devices.truncate(limits::DEVICES);
        }
        for device in devices.iter_mut().filter(|_| cpus.len() > 1) {
            device.processor_node = device.node.as_ref().and_then(|node| kfd::processor_of(node, &cpus));
        }
        number_devices(&mut devices);
        let gpu_nodes: Vec<(usize, &KfdNode)> =
            devices.iter().enumerate().filter_map(|(index, device)| Some((index, device.node.as_ref()?))).collect();
        let links = kfd::links(&gpu_nodes, &cpus);
        for (index, part) in kfd::card_parts(&gpu_nodes) {
            devices[index].part = Some(part);
        }
        let keys = devices.iter().map(JoinedDevice::key).collect();
        Self { devices, keys, links, warnings, scanner: ProcessScanner::default(), driver_version: None }
    }

    /// Sets the driver version and the process scanner.
    pub(super) fn with_scanner(mut self, driver_version: Option<Arc<str>>, scanner: ProcessScanner) -> Self {
        self.driver_version = driver_version;
        self.scanner = scanner;
        self
    }

    pub(super) fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// Returns the process scanner with its cache, for the next inventory.
    pub(super) fn into_process_scanner(self) -> ProcessScanner {
        self.scanner
    }

    /// Reads every device; the second value is whether a known file is gone.
    pub(super) fn read(&mut self) -> (SourceReading, bool) {
        let mut reading = SourceReading { links: self.links.clone(), ..SourceReading::default() };
        for warning in &self.warnings {
            reading.warn(warning.clone());
        }
        let mut stale = false;
        for device in &mut self.devices {
            let (mut found, is_stale) = device.read(&mut reading);
            stale |= is_stale;
            if let Some(version) = self.driver_version.as_ref().filter(|_| device.uses_amdgpu()) {
                found.driver = Some(version.clone());
            }
            reading.push(found);
        }
        self.apply_partitions(&mut reading.devices);
        let (processes, warning) = self.scanner.read(&self.keys);
        for (found, processes) in reading.devices.iter_mut().zip(processes) {
            if found.vendor == Vendor::Amd {
                found.processes = processes;
            }
        }
        if let Some(warning) = warning {
            reading.warn(warning);
        }
        (reading, stale)
    }

    /// Gives each partition of a card its own values and those that the card measures for all.
    fn apply_partitions(&self, found: &mut [DetectedDevice]) {
        for (index, device) in self.devices.iter().enumerate() {
            let Some(part) = device.part else { continue };
            let has_card =
                |&index: &usize| self.devices[index].card.as_ref().is_some_and(|card| card.card.pci.is_some());
            let is_part = |&other: &usize| self.devices[other].part.is_some_and(|other| other.card == part.card);
            let whole = (0..self.devices.len()).filter(is_part).find(has_card);
            let mode = whole.and_then(|whole| self.devices[whole].card.as_ref()?.compute_partition());
            let Some(partition) = kfd::partition(part, mode) else { continue };
            found[index].partition = Some(partition);
            match whole {
                Some(whole) if whole == index => kfd::keep_own_values(&mut found[index], device.node.as_ref()),
                Some(whole) => {
                    let card = found[whole].clone();
                    kfd::copy_from_card(&mut found[index], &card);
                }
                None => {}
            }
        }
    }
}

impl JoinedDevice {
    fn key(&self) -> DeviceKeys {
        let card = self.card.as_ref().map(|reader| &reader.card);
        let node = self.node.as_ref();
        DeviceKeys {
            gpu_id: node.and_then(|node| node.gpu_id),
            pci: card.and_then(|card| card.pci).or(node.and_then(|node| node.pci)),
            minor: card.and_then(|card| card.render_minor).or(node.and_then(|node| node.render_minor)),
        }
    }

    fn uses_amdgpu(&self) -> bool {
        let card = self.card.as_ref().map(|reader| &reader.card);
        card.is_none_or(|card| card.driver.as_deref().is_some_and(|driver| driver.starts_with("amdgpu")))
    }

    fn read(&mut self, reading: &mut SourceReading) -> (DetectedDevice, bool) {
        let (mut found, stale) = match &mut self.card {
            Some(reader) if reader.card.vendor == Some(Vendor::Amd) => reader.read(reading),
            Some(reader) => (reader.card.to_device(), false),
            None => (DetectedDevice::new(Vendor::Amd), false),
        };
        found.index = self.index;
        if let Some(node) = &self.node {
            complete_from_node(&mut found, node, self.processor_node);
        }
        (found, stale)
    }
}

/// Numbers the devices of the compute topology as ROCm does: in the order of the nodes, without processors.
fn number_devices(devices: &mut [JoinedDevice]) {
    let mut ordered: Vec<&mut JoinedDevice> = devices.iter_mut().filter(|device| device.node.is_some()).collect();
    ordered.sort_by_key(|device| device.node.as_ref().map(|node| node.number));
    for (index, device) in (0..).zip(ordered) {
        device.index = Some(index);
    }
}

/// Adds facts from the compute topology that the card lacks.
fn complete_from_node(found: &mut DetectedDevice, node: &KfdNode, processor_node: Option<u32>) {
    if found.pci.is_none() {
        found.numa = found.numa.or(processor_node);
    }
    let is_apu = node.device_id.is_some_and(amd_names::is_apu);
    let memory = if is_apu { &mut found.memory.host_total } else { &mut found.memory.total };
    *memory = std::mem::take(memory).or(node.memory.clone());
    found.minor = found.minor.or(node.render_minor);
    found.pci = found.pci.or(node.pci);
    found.uuid = found.uuid.take().or_else(|| node.unique_id.and_then(card::uuid_of));
    if found.name.as_deref().is_none_or(|name| name == card::UNKNOWN_CARD_NAME) {
        found.name = Some(node_name(node).into());
    }
}

fn node_name(node: &KfdNode) -> String {
    let known = node.device_id.and_then(|device| amd_names::known_name(device, None));
    let by_codename = || node.codename.as_ref().map(|name| format!("AMD {name}"));
    let by_number = || node.device_id.map(|device| amd_names::device_name(device, None));
    known.or_else(by_codename).or_else(by_number).unwrap_or_else(|| card::UNKNOWN_CARD_NAME.to_owned())
}

fn card_warning(card: &DrmCard, other_vendors: OtherVendorCards) -> Option<String> {
    let label = card.label();
    let driver = card.driver.as_deref().unwrap_or("no driver");
    match card.vendor {
        Some(Vendor::Amd) if driver == "radeon" => {
            Some(format!("{label} uses radeon, the legacy driver, which reports few values"))
        }
        Some(Vendor::Intel) if other_vendors == OtherVendorCards::Listed => {
            let id = card.device_id.map_or_else(String::new, |device| format!(", 8086:{device:04x}"));
            Some(format!("Intel GPUs are not supported yet: {label} ({driver}{id})"))
        }
        _ => None,
    }
}

/// Finds the node of a card among the unmatched ones.
fn matching_node(card: &DrmCard, nodes: &BTreeMap<u32, KfdNode>) -> Option<u32> {
    if card.vendor != Some(Vendor::Amd) {
        return None;
    }
    let find = |is: &dyn Fn(&KfdNode) -> bool| nodes.values().find(|node| is(node)).map(|node| node.number);
    if let Some(minor) = card.render_minor {
        return find(&|node| node.render_minor == Some(minor));
    }
    let pci = card.pci?;
    find(&|node| node.pci == Some(pci))
}

// Captured trees in their usual shapes: all of `/sys`, a folder with cards, one card, a compute topology.

/// Maximum number of folders around a capture.
const MAX_WRAPPERS: usize = 4;

/// Whether a folder is, or contains, a captured tree of graphics cards or of a compute topology.
pub(crate) fn looks_like(root: &Path) -> bool {
    captured_inventory(root).is_some()
}

/// Reads the devices of a captured tree. NVIDIA cards are listed without readings; Intel cards become a warning.
pub(crate) fn read(root: &Path) -> Result<SourceReading, SourceError> {
    let nothing = || SourceError::malformed("sysfs", "no graphics card and no compute node below the folder");
    Ok(captured_inventory(root).ok_or_else(nothing)?.read().0)
}

fn captured_inventory(root: &Path) -> Option<AmdInventory> {
    let mut root = root.to_path_buf();
    for _ in 0..MAX_WRAPPERS {
        if let Some(inventory) = inventory_at(&root) {
            return Some(inventory);
        }
        root = kernel_file::only_subfolder(&root)?;
    }
    None
}

fn inventory_at(root: &Path) -> Option<AmdInventory> {
    let existing = |paths: &[&str]| paths.iter().map(|path| root.join(path)).find(|path| path.is_dir());
    let cards = captured_cards(root);
    let nodes = NODE_FOLDERS.iter().map(|path| root.join(path)).find(|path| kfd::contains_nodes(path));
    if cards.is_empty() && nodes.is_none() {
        return None;
    }
    let version = ["sys/module/amdgpu/version", "module/amdgpu/version"]
        .iter()
        .find_map(|path| kernel_file::read_text(&root.join(path)).into_value());
    let compute = existing(&["sys/class/kfd/kfd/proc", "class/kfd/kfd/proc", "kfd/kfd/proc", "kfd/proc"]);
    let scanner = ProcessScanner::new(compute, existing(&["proc"]));
    let topology = nodes.as_deref().map(kfd::read).unwrap_or_default();
    Some(AmdInventory::new(cards, topology, OtherVendorCards::Listed).with_scanner(version.map(Into::into), scanner))
}

/// Possible paths of the nodes of a topology.
const NODE_FOLDERS: [&str; 10] = [
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

/// Lists the cards of a tree: in the first folder with entries `cardN`, or else the folder itself as one card.
fn captured_cards(root: &Path) -> Vec<DrmCard> {
    let is_card = |card: &DrmCard| card.vendor.is_some();
    for folder in ["sys/class/drm", "class/drm", "drm", ""] {
        let mut cards = drm::cards(&root.join(folder)).unwrap_or_default();
        cards.retain(is_card);
        if !cards.is_empty() {
            return cards;
        }
    }
    let number = root.file_name().and_then(|name| name.to_str()?.strip_prefix("card")?.parse().ok());
    let entry = DrmCard::from_entry(root, number);
    let device = DrmCard::from_device(root.to_path_buf(), None);
    // The folder of any PCI device has these files; only a display (class 03) or an accelerator (class 12) is a card.
    let displays = |card: &DrmCard| {
        let class = kernel_file::read_number::<u32>(&card.device.join("class"));
        is_card(card) && class.value().is_none_or(|class| class >> 16 == 0x03 || class >> 16 == 0x12)
    };
    [entry, device].into_iter().find(displays).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amd_sysfs::tests::SysfsTree;
    use crate::reported::Reported;
    use gpupool_core::Vendor;

    fn addresses(root: &Path) -> Vec<String> {
        assert!(looks_like(root), "{}", root.display());
        read(root).unwrap().devices.iter().map(|device| device.pci.unwrap().to_string()).collect()
    }

    #[test]
    fn any_saved_part_of_a_tree_is_found() {
        let tree = SysfsTree::new();
        tree.amd_card(1, "0000:03:00.0", 0x744c);
        for saved in ["", "..", "class", "class/drm", "class/drm/card1", "class/drm/card1/device"] {
            assert_eq!(addresses(&tree.path(saved)), ["0000:03:00.0"], "{saved}");
        }
        assert!(!looks_like(&tree.path("class/drm/card1/device/power")));
        assert!(read(&tree.path("class/drm/card1/device/power")).is_err());
    }

    #[test]
    fn a_compute_topology_alone_is_a_list_of_devices() {
        let tree = SysfsTree::new();
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
    fn an_unknown_node_has_the_name_of_its_chip() {
        let tree = SysfsTree::new();
        tree.kfd_gpu(1, "location_id 768\ndevice_id 171", 5, 0);
        assert_eq!(read(&tree.path("")).unwrap().devices[0].name.as_deref(), Some("AMD 0x00ab"));
        tree.file("class/kfd/kfd/topology/nodes/1/name", "vega99\n");
        assert_eq!(read(&tree.path("")).unwrap().devices[0].name.as_deref(), Some("AMD vega99"));
    }

    #[test]
    fn an_apu_has_the_memory_of_the_host() {
        let tree = SysfsTree::new();
        tree.kfd_gpu(1, "location_id 25600\ndevice_id 5567", 5, 30 << 30);
        let device = read(&tree.path("")).unwrap().devices.remove(0);
        assert!(device.memory.total.is_absent());
        assert!(device.memory.host_total.value().is_some());
    }

    #[test]
    fn cards_of_other_vendors_are_listed_or_warned_of() {
        let tree = SysfsTree::new();
        let event =
            |driver: &str, id: &str, slot: &str| format!("DRIVER={driver}\nPCI_ID={id}\nPCI_SLOT_NAME={slot}\n");
        tree.file("card0/device/uevent", event("nvidia", "10DE:2704", "0000:09:00.0"));
        tree.file("card1/device/uevent", event("xe", "8086:E20B", "0000:0a:00.0"));
        tree.file("card2/device/uevent", event("ast", "1A03:2000", "0000:0b:00.0"));
        let reading = read(&tree.path("")).unwrap();
        let [device] = reading.devices.as_slice() else { panic!("{reading:?}") };
        assert_eq!((device.vendor, device.driver.as_deref()), (Vendor::Nvidia, Some("nvidia")));
        assert_eq!(device.health, None);
        assert_eq!(reading.warnings, ["Intel GPUs are not supported yet: 0000:0a:00.0 (xe, 8086:e20b)"]);
    }

    #[test]
    fn a_legacy_driver_is_a_warning() {
        let tree = SysfsTree::new();
        tree.file("card0/device/uevent", "DRIVER=radeon\nPCI_ID=1002:6818\nPCI_SLOT_NAME=0000:01:00.0\n");
        let reading = read(&tree.path("")).unwrap();
        assert_eq!(reading.devices.len(), 1);
        assert!(reading.warnings[0].contains("legacy"));
    }
}

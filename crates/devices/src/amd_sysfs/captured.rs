//! Captured trees, in the shapes people save them: all of `/sys`, a folder with cards, one card, a compute topology.

use std::fs;
use std::path::{Path, PathBuf};

use super::drm::{self, Card};
use super::inventory::{Inventory, Others};
use super::kfd;
use super::processes::Processes;
use crate::kernel_file;
use crate::snapshot::Snapshot;
use crate::source::SourceError;

/// Folders a capture may be wrapped in.
const WRAPPERS: usize = 4;

/// Whether a folder is, or holds, a captured tree of graphics cards or of a compute topology.
pub fn looks_like(root: &Path) -> bool {
    Parts::find(root).is_some()
}

/// The devices of a captured tree. Cards of NVIDIA are listed without readings; those of Intel are a warning.
pub fn read(root: &Path) -> Result<Snapshot, SourceError> {
    let Some(parts) = Parts::find(root) else {
        return Err(SourceError::malformed("sysfs", "no graphics card and no compute node below the folder"));
    };
    let topology = parts.nodes.as_deref().map(kfd::read).unwrap_or_default();
    let mut inventory =
        Inventory::new(parts.cards, topology, Others::Listed).with(parts.driver_version, parts.processes);
    Ok(inventory.read().0)
}

/// What a captured tree has.
struct Parts {
    cards: Vec<Card>,
    nodes: Option<PathBuf>,
    driver_version: Option<std::sync::Arc<str>>,
    processes: Processes,
}

impl Parts {
    fn find(root: &Path) -> Option<Self> {
        let mut root = root.to_path_buf();
        for _ in 0..WRAPPERS {
            if let Some(parts) = Self::at(&root) {
                return Some(parts);
            }
            root = only_folder(&root)?;
        }
        None
    }

    fn at(root: &Path) -> Option<Self> {
        let existing = |places: &[&str]| places.iter().map(|place| root.join(place)).find(|path| path.is_dir());
        let cards = cards(root);
        let nodes = NODES.iter().map(|place| root.join(place)).find(|path| kfd::is_nodes(path));
        if cards.is_empty() && nodes.is_none() {
            return None;
        }
        let version = ["sys/module/amdgpu/version", "module/amdgpu/version"]
            .iter()
            .find_map(|place| kernel_file::text(&root.join(place)).value().cloned());
        let compute = existing(&["sys/class/kfd/kfd/proc", "class/kfd/kfd/proc", "kfd/kfd/proc", "kfd/proc"]);
        let processes = Processes::new(compute, existing(&["proc"]));
        Some(Self { cards, nodes, driver_version: version.map(Into::into), processes })
    }
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
        let class = kernel_file::number::<u32>(&card.device.join("class"));
        is_card(card) && class.value().is_none_or(|class| class >> 16 == 0x03 || class >> 16 == 0x12)
    };
    [entry, device].into_iter().find(displays).into_iter().collect()
}

/// The only folder in a folder.
fn only_folder(root: &Path) -> Option<PathBuf> {
    let mut folders = fs::read_dir(root).ok()?.flatten().map(|entry| entry.path()).filter(|path| path.is_dir());
    folders.next().filter(|_| folders.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amd_sysfs::tree::Tree;
    use crate::told::Told;
    use gpupool_core::device::Vendor;

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
        assert_eq!((device.health, device.memory.total), (None, Told::ABSENT));
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

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

//! Compute topology of the kernel's AMD driver: the nodes that are GPUs, their memory and their links.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpupool_core::{Bytes, LinkKind, PciAddress};

use crate::detected_device::{DetectedDevice, DevicePartition};
use crate::reported::Reported;
use crate::source_reading::DetectedLink;
use crate::{address, kernel_file, limits};

/// GPUs and processors in the topology.
#[derive(Debug, Default)]
pub(crate) struct KfdTopology {
    /// GPUs, by node number.
    pub gpus: Vec<KfdNode>,
    /// Node numbers of the processors.
    pub cpus: Vec<u32>,
    pub warnings: Vec<String>,
}

/// A GPU or a partition of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KfdNode {
    pub number: u32,
    /// Id of the GPU in other files of this driver.
    pub gpu_id: Option<u32>,
    pub codename: Option<String>,
    pub device_id: Option<u16>,
    pub pci: Option<PciAddress>,
    /// Partition number from the location.
    pub partition: u16,
    pub render_minor: Option<u32>,
    pub unique_id: Option<u64>,
    /// Number of compute dies.
    pub dies: Option<u64>,
    pub memory: Reported<Bytes>,
    pub links: Vec<KfdLink>,
}

/// A link from one node to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KfdLink {
    pub to: u32,
    /// Whether the link is XGMI between cards; others are PCIe.
    pub is_xgmi: bool,
    /// The driver's measure of distance.
    pub weight: u64,
}

/// Reads the nodes in a folder like `topology/nodes`.
pub(crate) fn read(nodes: &Path) -> KfdTopology {
    let mut topology = KfdTopology::default();
    for (number, folder) in numbered_folders(nodes) {
        match kernel_file::read_text(&folder.join("properties")) {
            Reported::Value(text) => topology.add(number, &folder, &KfdProperties::of(&text)),
            Reported::Unsupported(words) | Reported::Failed(words) => {
                let why = if words.is_empty() { "it has no properties" } else { &words };
                topology.warnings.push(format!("compute node {number} cannot be read: {why}"));
            }
        }
    }
    topology
}

/// Whether a folder contains nodes.
pub(crate) fn contains_nodes(folder: &Path) -> bool {
    let is_node = |(_, node): (u32, PathBuf)| {
        kernel_file::read_text(&node.join("properties")).value().is_some_and(|text| text.contains("simd_count"))
    };
    numbered_folders(folder).into_iter().any(is_node)
}

impl KfdTopology {
    fn add(&mut self, number: u32, folder: &Path, properties: &KfdProperties) {
        let is_gpu = match properties.get("simd_count") {
            Some(count) => count > 0,
            None => properties.get("vendor_id") == Some(0x1002),
        };
        if properties.get("cpu_cores_count").is_some_and(|count| count > 0) {
            self.cpus.push(number);
        }
        if is_gpu {
            self.gpus.push(KfdNode::read(number, folder, properties));
        }
    }
}

impl KfdNode {
    fn read(number: u32, folder: &Path, properties: &KfdProperties) -> Self {
        let small = |key: &str| properties.get(key).and_then(|value| u32::try_from(value).ok());
        let location = small("location_id").filter(|&location| location != 0);
        let (location, partition) = location.map_or((None, 0), |location| {
            let (location, partition) = split_location(location, small("gfx_target_version").unwrap_or(0));
            (Some(location), partition)
        });
        Self {
            number,
            gpu_id: kernel_file::read_number(&folder.join("gpu_id")).value().copied().filter(|&id| id != 0),
            codename: codename(folder),
            device_id: properties.get("device_id").and_then(|id| id.try_into().ok()).filter(|&id| id != 0),
            pci: location.map(|location| address::from_kfd_location(small("domain").unwrap_or(0), location)),
            partition,
            render_minor: small("drm_render_minor").filter(|&minor| minor != 0),
            unique_id: properties.get("unique_id").filter(|&id| id != 0),
            dies: properties.get("num_xcc"),
            memory: memory(folder, properties),
            links: ["io_links", "p2p_links"].into_iter().flat_map(|kind| node_links(&folder.join(kind))).collect(),
        }
    }
}

/// Separates bus, device and function of a location from the partition number.
///
/// Newer drivers store the partition in the four highest bits, older ones in the function, which is 0 on every
/// partitioned card (families gfx940 to gfx950).
const fn split_location(location: u32, gfx_target: u32) -> (u32, u16) {
    let high = location >> 28;
    if high != 0 {
        return (location & 0xffff, high as u16);
    }
    if gfx_target >= 90_400 && gfx_target < 90_600 {
        return (location & 0xfff8, (location & 0x7) as u16);
    }
    (location, 0)
}

/// Returns the driver's name of the chip; newer drivers write the same words for every chip.
fn codename(folder: &Path) -> Option<String> {
    let name = kernel_file::read_text(&folder.join("name")).value().cloned()?;
    (name != "ip discovery").then(|| crate::reported::truncate_text(&name).into_owned())
}

/// Returns the device memory of a node: its frame buffer banks, or the single number of older drivers.
fn memory(folder: &Path, properties: &KfdProperties) -> Reported<Bytes> {
    let banks = numbered_folders(&folder.join("mem_banks"));
    let mut total = 0_u64;
    for (_, bank) in &banks {
        let text = kernel_file::read_text(&bank.join("properties"));
        let bank = KfdProperties::of(text.value().map_or("", String::as_str));
        if matches!(bank.get("heap_type"), Some(1 | 2)) {
            total = total.saturating_add(bank.get("size_in_bytes").unwrap_or(0));
        }
    }
    if total == 0 {
        total = properties.get("local_mem_size").unwrap_or(0);
    }
    let expected = properties.get("mem_banks_count").unwrap_or(0);
    match total {
        0 => Reported::ABSENT,
        _ if !banks.is_empty() && (banks.len() as u64) < expected => {
            Reported::Failed(format!("only {} of {expected} memory banks are listed", banks.len()).into())
        }
        _ => Reported::Value(Bytes(total)),
    }
}

fn node_links(folder: &Path) -> impl Iterator<Item = KfdLink> + use<> {
    numbered_folders(folder).into_iter().filter_map(|(_, link)| {
        let text = kernel_file::read_text(&link.join("properties"));
        let link = KfdProperties::of(text.value()?);
        let is_xgmi = link.get("type")? == 11;
        Some(KfdLink { to: link.get("node_to")?.try_into().ok()?, is_xgmi, weight: link.get("weight").unwrap_or(0) })
    })
}

/// Lists the numeric entries of a folder, in order.
fn numbered_folders(folder: &Path) -> Vec<(u32, PathBuf)> {
    let numbers = kernel_file::numbered_entries(folder, "").unwrap_or_default().into_iter().take(limits::DEVICES);
    numbers.map(|number| (number, folder.join(number.to_string()))).collect()
}

/// Lines with a name and a number.
struct KfdProperties<'a>(BTreeMap<&'a str, u64>);

impl<'a> KfdProperties<'a> {
    fn of(text: &'a str) -> Self {
        let line = |line: &'a str| {
            let (key, value) = line.trim().split_once(char::is_whitespace)?;
            Some((key, value.trim().parse().ok()?))
        };
        Self(text.lines().filter_map(line).collect())
    }

    fn get(&self, key: &str) -> Option<u64> {
        self.0.get(key).copied()
    }
}

// Links between the GPUs of the compute topology.

/// Maximum number of GPUs for which every pair gets a link; beyond, only direct links count.
const MAX_PAIRED_GPUS: usize = 256;

/// Returns the links between GPUs, each given with its index among the devices.
///
/// Direct links are as the driver lists them. The distance of every other pair is that of their processors: the
/// topology does not list the switches between them.
pub(crate) fn links(gpus: &[(usize, &KfdNode)], cpus: &[u32]) -> Vec<DetectedLink> {
    let indices: BTreeMap<u32, usize> = gpus.iter().map(|(index, node)| (node.number, *index)).collect();
    let mut links = Vec::new();
    for (index, node) in gpus {
        for link in node.links.iter().filter(|link| link.is_xgmi) {
            let other = indices.get(&link.to).filter(|other| *other != index);
            links.extend(other.map(|&other| DetectedLink::new(*index, other, LinkKind::Xgmi(hops(link.weight)))));
        }
    }
    let processors: Vec<(usize, u32)> = gpus
        .iter()
        .take(MAX_PAIRED_GPUS)
        .filter_map(|(index, node)| Some((*index, processor_of(node, cpus)?)))
        .collect();
    for (at, (index, processor)) in processors.iter().enumerate() {
        for (other, other_processor) in &processors[at + 1..] {
            let kind = if processor == other_processor { LinkKind::SameNuma } else { LinkKind::CrossNuma };
            links.push(DetectedLink::new(*index, *other, kind));
        }
    }
    DetectedLink::nearest(links)
}

/// Returns the processor node of a GPU: itself if it is one, else the nearest linked one.
pub(crate) fn processor_of(node: &KfdNode, cpus: &[u32]) -> Option<u32> {
    if cpus.contains(&node.number) {
        return Some(node.number);
    }
    node.links.iter().filter(|link| cpus.contains(&link.to)).min_by_key(|link| link.weight).map(|link| link.to)
}

/// Converts a link weight to hops. The driver weighs a hop between cards 15 and one within a card 13; between
/// partitions of two cards it adds up three.
pub(crate) const fn hops(weight: u64) -> u8 {
    match weight.saturating_add(7) / 15 {
        0 => 1,
        hops if hops > 100 => 100,
        hops => hops as u8,
    }
}

// Partitioned cards: their partitions and the values of each.

/// PCI address and unique number of a card.
type CardIdentity = (PciAddress, Option<u64>);

/// Card and partition number of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CardPart {
    pub card: CardIdentity,
    pub id: u16,
    /// Number of partitions of the card; `None` if only this one is visible.
    pub parts: Option<u16>,
    /// Compute dies of this partition.
    dies: Option<u64>,
}

/// Returns the devices that are, or may be, partitions, each given with its index among all devices.
pub(crate) fn card_parts(gpus: &[(usize, &KfdNode)]) -> Vec<(usize, CardPart)> {
    let mut cards: BTreeMap<CardIdentity, Vec<(usize, &KfdNode)>> = BTreeMap::new();
    for (index, node) in gpus {
        if let Some(pci) = node.pci {
            cards.entry((pci, node.unique_id)).or_default().push((*index, node));
        }
    }
    let mut parts = Vec::new();
    for (card, mut members) in cards {
        members.sort_by_key(|(_, node)| (node.partition, node.number));
        let are_distinct = members.windows(2).all(|pair| pair[0].1.partition < pair[1].1.partition);
        let highest = members.iter().map(|(_, node)| node.partition + 1).max().unwrap_or(0);
        let count = (members.len() > 1).then(|| highest.max(members.len() as u16));
        for (order, (index, node)) in members.into_iter().enumerate() {
            let id = if are_distinct { node.partition } else { order as u16 };
            parts.push((index, CardPart { card, id, parts: count, dies: node.dies }));
        }
    }
    parts
}

/// Returns the partition of a device, given the mode of its card; `None` if the device is the whole card.
pub(crate) fn partition(part: CardPart, mode: Option<Arc<str>>) -> Option<DevicePartition> {
    let is_alone = part.parts.is_none() && part.id == 0;
    if is_alone && mode.as_deref().is_none_or(|mode| mode == "SPX") {
        return None;
    }
    let mode = mode.filter(|mode| &**mode != "SPX").or_else(|| mode_by_parts(part).map(Into::into));
    Some(DevicePartition::Amd { id: part.id, mode, parts: part.parts })
}

/// Returns the mode of a card by its partitions. Only the finest mode has partitions of one die, so four of them are
/// not `QPX`.
fn mode_by_parts(part: CardPart) -> Option<&'static str> {
    match (part.dies?, part.parts?) {
        (1, _) => Some("CPX"),
        (2.., 2) => Some("DPX"),
        (2.., 3) => Some("TPX"),
        (2.., 4) => Some("QPX"),
        _ => None,
    }
}

const OF_ALL_PARTS: &str = "the card reports this for all its partitions together";

/// Reduces the readings of a card to those of its first partition: its own memory, and nothing that the others share.
pub(crate) fn keep_own_values(found: &mut DetectedDevice, node: Option<&KfdNode>) {
    found.memory.total = match node.map(|node| &node.memory) {
        Some(own @ Reported::Value(_)) => own.clone(),
        _ => Reported::Unsupported(OF_ALL_PARTS.into()),
    };
    found.memory.used = Reported::Unsupported(OF_ALL_PARTS.into());
    found.utilization = Reported::Unsupported(OF_ALL_PARTS.into());
}

/// Gives another partition the values that its card measures for all; power counts once, with the first partition.
pub(crate) fn copy_from_card(found: &mut DetectedDevice, card: &DetectedDevice) {
    found.temperature_c = card.temperature_c.clone();
    found.memory.used = Reported::Unsupported(OF_ALL_PARTS.into());
    found.utilization = Reported::Unsupported(OF_ALL_PARTS.into());
    found.power = Reported::Unsupported("counted with the first partition".into());
    found.power_limit = Reported::Unsupported("counted with the first partition".into());
    found.health = card.health.clone();
    found.asleep = card.asleep;
    found.uuid = found.uuid.take().or_else(|| card.uuid.clone());
    found.numa = card.numa;
    found.driver = card.driver.clone();
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    use crate::amd_sysfs::kfd;
    use crate::amd_sysfs::tests::SysfsTree;

    fn nodes(tree: &SysfsTree) -> PathBuf {
        tree.path("class/kfd/kfd/topology/nodes")
    }

    #[test]
    fn processors_are_no_gpus() {
        let tree = SysfsTree::new();
        tree.kfd_cpu(0);
        tree.kfd_gpu(1, "location_id 25344\ndomain 1\ndrm_render_minor 128\nunique_id 255", 777, 1 << 34);
        let topology = read(&nodes(&tree));
        assert_eq!(topology.cpus, [0]);
        let [gpu] = topology.gpus.as_slice() else { panic!("{topology:?}") };
        assert_eq!((gpu.gpu_id, gpu.render_minor, gpu.unique_id), (Some(777), Some(128), Some(255)));
        assert_eq!(gpu.pci.unwrap().to_string(), "0001:63:00.0");
        assert_eq!(gpu.memory, Reported::Value(Bytes(1 << 34)));
    }

    #[test]
    fn a_location_may_contain_a_partition_number() {
        assert_eq!(split_location(0x3000_0a00, 0), (0x0a00, 3));
        assert_eq!(split_location(0x0a02, 90_402), (0x0a00, 2));
        assert_eq!(split_location(0x0a02, 90_010), (0x0a02, 0));
    }

    #[test]
    fn a_node_that_cannot_be_read_is_a_warning() {
        let tree = SysfsTree::new();
        tree.kfd_gpu(1, "location_id 256", 5, 0);
        tree.file("class/kfd/kfd/topology/nodes/2/properties", "");
        let topology = read(&nodes(&tree));
        assert_eq!(topology.gpus.len(), 1);
        assert_eq!(topology.warnings, ["compute node 2 cannot be read: empty file"]);
        assert!(topology.gpus[0].memory.is_absent());
    }

    #[test]
    fn memory_with_missing_banks_is_a_failure() {
        let tree = SysfsTree::new();
        tree.kfd_gpu(1, "mem_banks_count 2", 5, 1 << 30);
        assert!(matches!(read(&nodes(&tree)).gpus[0].memory, Reported::Failed(_)));
    }

    proptest! {
        // Each case creates a tree of files.
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn parsing_properties_never_panics(text in "([a-z_]{0,12} ?[0-9]{0,22}\n|location_id [0-9]{1,20}\n|.{0,20})*") {
            let tree = SysfsTree::new();
            tree.file("class/kfd/kfd/topology/nodes/1/properties", format!("simd_count 4\n{text}"));
            tree.file("class/kfd/kfd/topology/nodes/1/mem_banks/0/properties", &text);
            tree.file("class/kfd/kfd/topology/nodes/1/io_links/0/properties", &text);
            let topology = read(&nodes(&tree));
            prop_assert!(topology.gpus.len() <= 1);
        }
    }

    #[test]
    fn the_weight_of_a_link_counts_its_hops() {
        for (weight, expected) in [(13, 1), (15, 1), (30, 2), (41, 3), (45, 3), (0, 1), (u64::MAX >> 1, 100)] {
            assert_eq!(hops(weight), expected, "{weight}");
        }
    }

    #[test]
    fn gpus_without_a_direct_link_are_as_near_as_their_processors() {
        let tree = SysfsTree::new();
        tree.kfd_cpu(0);
        tree.kfd_cpu(1);
        for (gpu, cpu) in [(2, 0), (3, 0), (4, 1)] {
            tree.kfd_gpu(gpu, &format!("location_id {}", gpu * 256), gpu, 1 << 30);
            tree.kfd_link(gpu, "io_links", 0, &format!("type 2\nnode_to {cpu}\nweight 20"));
            tree.kfd_link(gpu, "p2p_links", 0, &format!("type 2\nnode_to {}\nweight 52", 1 - cpu));
        }
        tree.kfd_link(3, "io_links", 1, "type 11\nnode_to 4\nweight 15");
        let topology = kfd::read(&tree.path("class/kfd/kfd/topology/nodes"));
        let gpus: Vec<(usize, &KfdNode)> = topology.gpus.iter().enumerate().collect();
        let kinds: Vec<LinkKind> = links(&gpus, &topology.cpus).iter().map(|link| link.kind).collect();
        assert_eq!(kinds, [LinkKind::SameNuma, LinkKind::CrossNuma, LinkKind::Xgmi(1)]);
    }

    fn part(id: u16, parts: Option<u16>, dies: u64) -> CardPart {
        CardPart { card: (crate::address::from_kfd_location(0, 256), None), id, parts, dies: Some(dies) }
    }

    fn mode(part: CardPart, reported: Option<&str>) -> Option<String> {
        match partition(part, reported.map(Into::into))? {
            DevicePartition::Amd { mode, .. } => mode.map(|mode| mode.to_string()),
            DevicePartition::Mig { .. } => None,
        }
    }

    #[test]
    fn four_partitions_are_qpx_only_with_several_dies_each() {
        assert_eq!(mode(part(1, Some(4), 2), None).as_deref(), Some("QPX"));
        assert_eq!(mode(part(1, Some(4), 1), None).as_deref(), Some("CPX"));
        assert_eq!(mode(part(1, Some(5), 2), None), None);
        assert_eq!(mode(part(1, Some(4), 1), Some("QPX")).as_deref(), Some("QPX"));
    }

    #[test]
    fn an_unpartitioned_card_is_not_a_partition() {
        assert_eq!(partition(part(0, None, 8), None), None);
        assert_eq!(partition(part(0, None, 8), Some("SPX".into())), None);
        let cut = partition(part(0, None, 1), Some("CPX".into()));
        assert_eq!(cut, Some(DevicePartition::Amd { id: 0, mode: Some("CPX".into()), parts: None }));
    }
}

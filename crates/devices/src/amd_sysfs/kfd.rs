//! The compute topology of the kernel's AMD driver: which nodes are GPUs, what memory they have, what joins them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpupool_core::{Bytes, LinkKind, PciAddress};

use crate::detected_device::{DetectedDevice, DevicePartition};
use crate::reported::Reported;
use crate::source_reading::DetectedLink;
use crate::{address, kernel_file, limits};

/// Everything the topology says of GPUs.
#[derive(Debug, Default)]
pub(crate) struct Topology {
    /// The GPUs, by their number.
    pub gpus: Vec<Node>,
    /// The numbers of nodes that are processors.
    pub cpus: Vec<u32>,
    pub warnings: Vec<String>,
}

/// A GPU, or a partition of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub number: u32,
    /// What other files of this driver call it.
    pub gpu_id: Option<u32>,
    pub codename: Option<String>,
    pub device_id: Option<u16>,
    pub pci: Option<PciAddress>,
    /// Which partition its location says it is.
    pub partition: u16,
    pub render_minor: Option<u32>,
    pub unique_id: Option<u64>,
    /// How many compute dies it has.
    pub dies: Option<u64>,
    pub memory: Reported<Bytes>,
    pub links: Vec<NodeLink>,
}

/// A link from a node to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeLink {
    pub to: u32,
    /// Whether it is AMD's own, between cards; others are PCIe.
    pub is_xgmi: bool,
    /// The driver's measure of distance.
    pub weight: u64,
}

/// Reads the nodes in a folder like `topology/nodes`.
pub(crate) fn read(nodes: &Path) -> Topology {
    let mut topology = Topology::default();
    for (number, folder) in numbered(nodes) {
        match kernel_file::read_text(&folder.join("properties")) {
            Reported::Value(text) => topology.add(number, &folder, &Properties::of(&text)),
            Reported::Unsupported(words) | Reported::Failed(words) => {
                let why = if words.is_empty() { "it has no properties" } else { &words };
                topology.warnings.push(format!("compute node {number} cannot be read: {why}"));
            }
        }
    }
    topology
}

/// Whether a folder holds nodes.
pub(crate) fn is_nodes(folder: &Path) -> bool {
    let is_node = |(_, node): (u32, PathBuf)| {
        kernel_file::read_text(&node.join("properties")).value().is_some_and(|text| text.contains("simd_count"))
    };
    numbered(folder).into_iter().any(is_node)
}

impl Topology {
    fn add(&mut self, number: u32, folder: &Path, properties: &Properties) {
        let is_gpu = match properties.get("simd_count") {
            Some(count) => count > 0,
            None => properties.get("vendor_id") == Some(0x1002),
        };
        if properties.get("cpu_cores_count").is_some_and(|count| count > 0) {
            self.cpus.push(number);
        }
        if is_gpu {
            self.gpus.push(Node::read(number, folder, properties));
        }
    }
}

impl Node {
    fn read(number: u32, folder: &Path, properties: &Properties) -> Self {
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

/// Bus, device and function of a location apart from the partition that the driver hides in it.
///
/// Newer drivers keep the partition in the four highest bits, older ones in the function, which is 0 on every such
/// card (those of the families gfx940 to gfx950).
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

/// The driver's name of the chip; newer drivers write the same words for all of them.
fn codename(folder: &Path) -> Option<String> {
    let name = kernel_file::read_text(&folder.join("name")).value().cloned()?;
    (name != "ip discovery").then(|| crate::reported::truncate_text(&name).into_owned())
}

/// The device memory of a node: its banks in frame buffers, or what older drivers give as one number.
fn memory(folder: &Path, properties: &Properties) -> Reported<Bytes> {
    let banks = numbered(&folder.join("mem_banks"));
    let mut total = 0_u64;
    for (_, bank) in &banks {
        let text = kernel_file::read_text(&bank.join("properties"));
        let bank = Properties::of(text.value().map_or("", String::as_str));
        if matches!(bank.get("heap_type"), Some(1 | 2)) {
            total = total.saturating_add(bank.get("size_in_bytes").unwrap_or(0));
        }
    }
    if total == 0 {
        total = properties.get("local_mem_size").unwrap_or(0);
    }
    let promised = properties.get("mem_banks_count").unwrap_or(0);
    match total {
        0 => Reported::ABSENT,
        _ if !banks.is_empty() && (banks.len() as u64) < promised => {
            Reported::Failed(format!("{} of {promised} banks of memory are listed", banks.len()).into())
        }
        _ => Reported::Value(Bytes(total)),
    }
}

fn node_links(folder: &Path) -> impl Iterator<Item = NodeLink> + use<> {
    numbered(folder).into_iter().filter_map(|(_, link)| {
        let text = kernel_file::read_text(&link.join("properties"));
        let link = Properties::of(text.value()?);
        let is_xgmi = link.get("type")? == 11;
        Some(NodeLink { to: link.get("node_to")?.try_into().ok()?, is_xgmi, weight: link.get("weight").unwrap_or(0) })
    })
}

/// The entries of a folder that are numbers, in order.
fn numbered(folder: &Path) -> Vec<(u32, PathBuf)> {
    let numbers = kernel_file::numbered_entries(folder, "").unwrap_or_default().into_iter().take(limits::DEVICES);
    numbers.map(|number| (number, folder.join(number.to_string()))).collect()
}

/// Lines of a name and a number.
struct Properties<'a>(BTreeMap<&'a str, u64>);

impl<'a> Properties<'a> {
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

// How the GPUs of the compute topology are joined.

/// Every pair of more GPUs than these is not looked at; direct links still are.
const MOST_PAIRED: usize = 256;

/// Links between GPUs, each given with its place among the devices.
///
/// Direct ones are as the driver lists them. Every other pair is as near as the processors they hang on: nothing in the
/// topology tells how many switches lie between.
pub(crate) fn links(gpus: &[(usize, &Node)], cpus: &[u32]) -> Vec<DetectedLink> {
    let places: BTreeMap<u32, usize> = gpus.iter().map(|(place, node)| (node.number, *place)).collect();
    let mut links = Vec::new();
    for (place, node) in gpus {
        for link in node.links.iter().filter(|link| link.is_xgmi) {
            let other = places.get(&link.to).filter(|other| *other != place);
            links.extend(other.map(|&other| DetectedLink::new(*place, other, LinkKind::Xgmi(hops(link.weight)))));
        }
    }
    let homes: Vec<(usize, u32)> =
        gpus.iter().take(MOST_PAIRED).filter_map(|(place, node)| Some((*place, home(node, cpus)?))).collect();
    for (at, (place, home)) in homes.iter().enumerate() {
        for (other, other_home) in &homes[at + 1..] {
            let kind = if home == other_home { LinkKind::SameNuma } else { LinkKind::CrossNuma };
            links.push(DetectedLink::new(*place, *other, kind));
        }
    }
    DetectedLink::nearest(links)
}

/// The processor a GPU hangs on: the nearest of those it is linked to, or itself where it is one.
pub(crate) fn home(node: &Node, cpus: &[u32]) -> Option<u32> {
    if cpus.contains(&node.number) {
        return Some(node.number);
    }
    node.links.iter().filter(|link| cpus.contains(&link.to)).min_by_key(|link| link.weight).map(|link| link.to)
}

/// The driver weighs a hop between cards 15 and one within a card 13; between partitions of two cards it adds up three.
pub(crate) const fn hops(weight: u64) -> u8 {
    match weight.saturating_add(7) / 15 {
        0 => 1,
        hops if hops > 100 => 100,
        hops => hops as u8,
    }
}

// Cards that are cut into parts: which parts there are, and what each may say.

/// A card: its place on the bus and its unique number.
type CardKey = (PciAddress, Option<u64>);

/// Which part of which card a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub card: CardKey,
    pub id: u16,
    /// Into how many parts it is cut; `None` where this part alone is to be seen.
    pub parts: Option<u16>,
    /// Compute dies of this part.
    dies: Option<u64>,
}

/// The devices that are, or may be, parts, each given with its place among all devices.
pub(crate) fn parts(gpus: &[(usize, &Node)]) -> Vec<(usize, Part)> {
    let mut cards: BTreeMap<CardKey, Vec<(usize, &Node)>> = BTreeMap::new();
    for (place, node) in gpus {
        if let Some(pci) = node.pci {
            cards.entry((pci, node.unique_id)).or_default().push((*place, node));
        }
    }
    let mut parts = Vec::new();
    for (card, mut members) in cards {
        members.sort_by_key(|(_, node)| (node.partition, node.number));
        let told_apart = members.windows(2).all(|pair| pair[0].1.partition < pair[1].1.partition);
        let highest = members.iter().map(|(_, node)| node.partition + 1).max().unwrap_or(0);
        let count = (members.len() > 1).then(|| highest.max(members.len() as u16));
        for (order, (place, node)) in members.into_iter().enumerate() {
            let id = if told_apart { node.partition } else { order as u16 };
            parts.push((place, Part { card, id, parts: count, dies: node.dies }));
        }
    }
    parts
}

/// The partition a part is, given how its card says it is cut; `None` where it is the whole card.
pub(crate) fn partition(part: Part, mode: Option<Arc<str>>) -> Option<DevicePartition> {
    let is_alone = part.parts.is_none() && part.id == 0;
    if is_alone && mode.as_deref().is_none_or(|mode| mode == "SPX") {
        return None;
    }
    let mode = mode.filter(|mode| &**mode != "SPX").or_else(|| mode_by_parts(part).map(Into::into));
    Some(DevicePartition::Amd { id: part.id, mode, parts: part.parts })
}

/// How a card is cut, by its parts. Only the finest cut leaves parts of one die, so that four of them are not `QPX`.
fn mode_by_parts(part: Part) -> Option<&'static str> {
    match (part.dies?, part.parts?) {
        (1, _) => Some("CPX"),
        (2.., 2) => Some("DPX"),
        (2.., 3) => Some("TPX"),
        (2.., 4) => Some("QPX"),
        _ => None,
    }
}

const OF_ALL_PARTS: &str = "the card tells this of all its partitions together";

/// Makes the readings of a card those of its first part: its own memory, and nothing the other parts have a share in.
pub(crate) fn keep_own(found: &mut DetectedDevice, node: Option<&Node>) {
    found.memory.total = match node.map(|node| &node.memory) {
        Some(own @ Reported::Value(_)) => own.clone(),
        _ => Reported::Unsupported(OF_ALL_PARTS.into()),
    };
    found.memory.used = Reported::Unsupported(OF_ALL_PARTS.into());
    found.utilization = Reported::Unsupported(OF_ALL_PARTS.into());
}

/// Gives another part what its card measures for all; power counts once, with the first part.
pub(crate) fn take_from_card(found: &mut DetectedDevice, card: &DetectedDevice) {
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
    use crate::amd_sysfs::tests::Tree;

    fn nodes(tree: &Tree) -> PathBuf {
        tree.path("class/kfd/kfd/topology/nodes")
    }

    #[test]
    fn processors_are_no_gpus() {
        let tree = Tree::new();
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
    fn a_location_may_hide_a_partition() {
        assert_eq!(split_location(0x3000_0a00, 0), (0x0a00, 3));
        assert_eq!(split_location(0x0a02, 90_402), (0x0a00, 2));
        assert_eq!(split_location(0x0a02, 90_010), (0x0a02, 0));
    }

    #[test]
    fn a_node_that_cannot_be_read_is_a_warning() {
        let tree = Tree::new();
        tree.kfd_gpu(1, "location_id 256", 5, 0);
        tree.file("class/kfd/kfd/topology/nodes/2/properties", "");
        let topology = read(&nodes(&tree));
        assert_eq!(topology.gpus.len(), 1);
        assert_eq!(topology.warnings, ["compute node 2 cannot be read: empty file"]);
        assert!(topology.gpus[0].memory.is_absent());
    }

    #[test]
    fn memory_whose_banks_are_not_all_listed_is_not_told() {
        let tree = Tree::new();
        tree.kfd_gpu(1, "mem_banks_count 2", 5, 1 << 30);
        assert!(matches!(read(&nodes(&tree)).gpus[0].memory, Reported::Failed(_)));
    }

    proptest! {
        // Each case is a tree of files.
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn no_properties_make_it_panic(text in "([a-z_]{0,12} ?[0-9]{0,22}\n|location_id [0-9]{1,20}\n|.{0,20})*") {
            let tree = Tree::new();
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
        let tree = Tree::new();
        tree.kfd_cpu(0);
        tree.kfd_cpu(1);
        for (gpu, cpu) in [(2, 0), (3, 0), (4, 1)] {
            tree.kfd_gpu(gpu, &format!("location_id {}", gpu * 256), gpu, 1 << 30);
            tree.kfd_link(gpu, "io_links", 0, &format!("type 2\nnode_to {cpu}\nweight 20"));
            tree.kfd_link(gpu, "p2p_links", 0, &format!("type 2\nnode_to {}\nweight 52", 1 - cpu));
        }
        tree.kfd_link(3, "io_links", 1, "type 11\nnode_to 4\nweight 15");
        let topology = kfd::read(&tree.path("class/kfd/kfd/topology/nodes"));
        let gpus: Vec<(usize, &Node)> = topology.gpus.iter().enumerate().collect();
        let kinds: Vec<LinkKind> = links(&gpus, &topology.cpus).iter().map(|link| link.kind).collect();
        assert_eq!(kinds, [LinkKind::SameNuma, LinkKind::CrossNuma, LinkKind::Xgmi(1)]);
    }

    fn part(id: u16, parts: Option<u16>, dies: u64) -> Part {
        Part { card: (crate::address::from_kfd_location(0, 256), None), id, parts, dies: Some(dies) }
    }

    fn mode(part: Part, told: Option<&str>) -> Option<String> {
        match partition(part, told.map(Into::into))? {
            DevicePartition::Amd { mode, .. } => mode.map(|mode| mode.to_string()),
            DevicePartition::Mig { .. } => None,
        }
    }

    #[test]
    fn four_parts_are_a_quarter_each_only_where_they_have_several_dies() {
        assert_eq!(mode(part(1, Some(4), 2), None).as_deref(), Some("QPX"));
        assert_eq!(mode(part(1, Some(4), 1), None).as_deref(), Some("CPX"));
        assert_eq!(mode(part(1, Some(5), 2), None), None);
        assert_eq!(mode(part(1, Some(4), 1), Some("QPX")).as_deref(), Some("QPX"));
    }

    #[test]
    fn a_card_that_is_not_cut_is_no_partition() {
        assert_eq!(partition(part(0, None, 8), None), None);
        assert_eq!(partition(part(0, None, 8), Some("SPX".into())), None);
        let cut = partition(part(0, None, 1), Some("CPX".into()));
        assert_eq!(cut, Some(DevicePartition::Amd { id: 0, mode: Some("CPX".into()), parts: None }));
    }
}

//! The compute topology of the kernel's AMD driver: which nodes are GPUs, what memory they have, what joins them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use gpupool_core::device::PciAddress;
use gpupool_core::units::Bytes;

use crate::address;
use crate::kernel_file;
use crate::limits;
use crate::told::Told;

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
    pub memory: Told<Bytes>,
    pub links: Vec<NodeLink>,
}

/// A link from a node to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeLink {
    pub to: u32,
    pub bus: Bus,
    /// The driver's measure of distance.
    pub weight: u64,
}

/// What kind of link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bus {
    Pcie,
    Xgmi,
    Other,
}

/// Reads the nodes in a folder like `topology/nodes`.
pub(crate) fn read(nodes: &Path) -> Topology {
    let mut topology = Topology::default();
    for (number, folder) in numbered(nodes) {
        match kernel_file::text(&folder.join("properties")) {
            Told::Value(text) => topology.add(number, &folder, &Properties::of(&text)),
            Told::Unsupported(words) | Told::Failed(words) => {
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
        kernel_file::text(&node.join("properties")).value().is_some_and(|text| text.contains("simd_count"))
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
            gpu_id: kernel_file::number(&folder.join("gpu_id")).value().copied().filter(|&id| id != 0),
            codename: codename(folder),
            device_id: properties.get("device_id").and_then(|id| id.try_into().ok()).filter(|&id| id != 0),
            pci: location.map(|location| address::from_location(small("domain").unwrap_or(0), location)),
            partition,
            render_minor: small("drm_render_minor").filter(|&minor| minor != 0),
            unique_id: properties.get("unique_id").filter(|&id| id != 0),
            dies: properties.get("num_xcc"),
            memory: memory(folder, properties),
            links: ["io_links", "p2p_links"].into_iter().flat_map(|kind| links(&folder.join(kind))).collect(),
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
    let name = kernel_file::text(&folder.join("name")).value().cloned()?;
    (name != "ip discovery").then(|| crate::told::words(&name).into_owned())
}

/// The device memory of a node: its banks in frame buffers, or what older drivers give as one number.
fn memory(folder: &Path, properties: &Properties) -> Told<Bytes> {
    let banks = numbered(&folder.join("mem_banks"));
    let mut total = 0_u64;
    for (_, bank) in &banks {
        let text = kernel_file::text(&bank.join("properties"));
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
        0 => Told::ABSENT,
        _ if !banks.is_empty() && (banks.len() as u64) < promised => {
            Told::Failed(format!("{} of {promised} banks of memory are listed", banks.len()).into())
        }
        _ => Told::Value(Bytes(total)),
    }
}

fn links(folder: &Path) -> impl Iterator<Item = NodeLink> + use<> {
    numbered(folder).into_iter().filter_map(|(_, link)| {
        let text = kernel_file::text(&link.join("properties"));
        let link = Properties::of(text.value()?);
        let bus = match link.get("type")? {
            2 => Bus::Pcie,
            11 => Bus::Xgmi,
            _ => Bus::Other,
        };
        Some(NodeLink { to: link.get("node_to")?.try_into().ok()?, bus, weight: link.get("weight").unwrap_or(0) })
    })
}

/// The entries of a folder that are numbers, in order.
fn numbered(folder: &Path) -> Vec<(u32, PathBuf)> {
    let number = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.ok()?;
        Some((entry.file_name().to_str()?.parse().ok()?, entry.path()))
    };
    let entries: BTreeMap<u32, PathBuf> =
        fs::read_dir(folder).into_iter().flatten().filter_map(number).take(limits::DEVICES).collect();
    entries.into_iter().collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amd_sysfs::tree::Tree;
    use proptest::prelude::*;

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
        assert_eq!(gpu.memory, Told::Value(Bytes(1 << 34)));
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
        assert!(matches!(read(&nodes(&tree)).gpus[0].memory, Told::Failed(_)));
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
}

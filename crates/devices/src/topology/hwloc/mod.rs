//! hwloc's view of a machine: its XML of versions 1 to 3, and the text that `lstopo` prints.

mod device;
mod lstopo;
mod matrix;

use std::collections::BTreeMap;

use gpupool_core::device::{PciAddress, Vendor};
use gpupool_core::units::Bytes;

use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::told::Told;
use crate::topology::root_tag;
use crate::topology::ways::{self, Stop, Switches};
use crate::xml::{self, Element};
use crate::{address, pci_bus};

use device::{Pci, described, info};

const FORMAT: &str = "hwloc topology";

/// Whether a text is hwloc's XML or what `lstopo` prints.
pub fn looks_like(text: &str) -> bool {
    lstopo::looks_like(text) || (root_tag(text) == Some("topology") && text.contains("<object"))
}

/// The GPUs of a machine, their NUMA nodes and how they are joined.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    let (root, broken) = if lstopo::looks_like(text) {
        (lstopo::tree(text), None)
    } else {
        let document = xml::parse(text);
        (document.root, document.broken)
    };
    if root.name != "topology" {
        let problem = broken.unwrap_or_else(|| format!("<{}> is not <topology>", root.name));
        return Err(SourceError::malformed(FORMAT, problem));
    }
    let mut machine = Machine::default();
    for object in root.children("object") {
        machine.walk(object, &Place::default());
    }
    let mut snapshot = machine.finish(&root);
    if let Some(broken) = broken {
        snapshot.warn(format!("the file is read only in part: {broken}"));
    }
    Ok(snapshot)
}

/// Where in the tree an object is.
#[derive(Debug, Clone, Default)]
struct Place {
    numa: Option<u32>,
    way: Vec<Stop>,
}

/// What an object number of the file stands for, as far as links are concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The device at this place of the snapshot.
    Gpu(usize),
    /// An NVSwitch.
    Switch,
}

/// What was found so far.
#[derive(Default)]
struct Machine {
    snapshot: Snapshot,
    ways: Vec<Vec<Stop>>,
    /// By the numbers that matrices of distances use.
    ends: BTreeMap<u64, End>,
    /// Memory of GPUs that the kernel shows as NUMA nodes.
    gpu_memory: Vec<(PciAddress, Bytes)>,
    stops: u64,
}

impl Machine {
    /// Takes an object and what is in it; the depth of a document is bounded where it is read.
    fn walk(&mut self, object: &Element, place: &Place) {
        let mut inside = place.clone();
        match object.attribute("type").unwrap_or_default() {
            "PCIDev" => return self.take_pci(object, place),
            "Bridge" if object.attribute("bridge_type").is_some_and(|kind| kind.starts_with('0')) => {
                let stop = Stop::HostBridge(self.next_stop());
                inside.way.push(stop);
            }
            "Bridge" => {
                let stop = Stop::Bridge(self.next_stop());
                inside.way.push(stop);
            }
            "NUMANode" if is_gpu_memory(object) => self.take_gpu_memory(object),
            _ => {
                if let Some(numa) = numa_of(object) {
                    inside = Place { numa: Some(numa), way: vec![Stop::Numa(u64::from(numa))] };
                }
            }
        }
        for child in object.children("object") {
            self.walk(child, &inside);
        }
    }

    fn next_stop(&mut self) -> u64 {
        self.stops += 1;
        self.stops
    }

    fn take_gpu_memory(&mut self, object: &Element) {
        let pci = info(object, "PCIBusID").and_then(address::parse);
        let bytes = object.attribute("local_memory").and_then(|bytes| bytes.parse().ok());
        self.gpu_memory.extend(pci.zip(bytes.map(Bytes)));
    }

    fn take_pci(&mut self, object: &Element, place: &Place) {
        let number = |object: &Element| object.attribute("gp_index").and_then(|number| number.parse().ok());
        let pci = Pci::of(object);
        if object.attribute("subtype") == Some("NVSwitch") || pci.is_nvswitch() {
            self.ends.extend(number(object).map(|number: u64| (number, End::Switch)));
            return;
        }
        let Some(vendor) = pci.gpu_maker(object) else { return };
        let mut device = described(object, vendor);
        device.numa = place.numa;
        let Some(at) = pci_bus::list(&mut self.snapshot, device) else { return };
        self.ways.push(place.way.clone());
        for named in object.walk().filter(|inner| inner.name == "object") {
            self.ends.extend(number(named).map(|number: u64| (number, End::Gpu(at))));
        }
    }

    fn finish(mut self, root: &Element) -> Snapshot {
        for device in &mut self.snapshot.devices {
            let own = self.gpu_memory.iter().find(|(pci, _)| device.pci == Some(*pci));
            if let (true, Some((_, bytes))) = (device.memory.total.is_absent(), own) {
                device.memory.total = Told::Value(*bytes);
            }
        }
        let unknown = self.snapshot.devices.iter().filter(|device| device.vendor == Vendor::Other).count();
        if unknown > 0 {
            self.snapshot.warn(format!("the file does not tell who made {unknown} of the GPUs"));
        }
        if self.snapshot.devices.is_empty() {
            self.snapshot.warn("the file names no GPU");
        }
        let fast = matrix::fast_links(root, &self.ends, &mut self.snapshot);
        self.snapshot.links = ways::links(&self.ways, Switches::ByPort, &fast);
        self.snapshot
    }
}

/// The NUMA node an object is or belongs to: itself in version 1, a child of it since version 2.
fn numa_of(object: &Element) -> Option<u32> {
    let is = |object: &Element, kind: &str| object.attribute("type") == Some(kind);
    let caches = object.children("object").filter(|child| is(child, "MemCache"));
    let nodes = object.children("object").chain(caches.flat_map(|cache| cache.children("object")));
    let own = std::iter::once(object).chain(nodes);
    own.filter(|node| is(node, "NUMANode") && !is_gpu_memory(node))
        .find_map(|node| node.attribute("os_index")?.trim().parse().ok())
}

fn is_gpu_memory(node: &Element) -> bool {
    node.attribute("subtype").is_some_and(|subtype| subtype.contains("GPU"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_core::device::LinkKind;
    use proptest::prelude::*;

    const XML: &str = r#"<?xml version="1.0"?><!DOCTYPE topology SYSTEM "hwloc2.dtd"><topology version="2.0">
    <object type="Machine" os_index="0"><object type="Package" os_index="0">
      <object type="NUMANode" os_index="4" local_memory="68556816384"/>
      <object type="NUMANode" os_index="255" subtype="GPUMemory" local_memory="17179869184"><info name="PCIBusID" value="0000:04:00.0"/></object>
      <object type="Bridge" bridge_type="0-1"><object type="Bridge" bridge_type="1-1"><object type="Bridge" bridge_type="1-1">
        <object type="PCIDev" gp_index="10" pci_busid="0000:03:00.0" pci_type="0302 [10de:1db1] [10de:1212] a1">
          <info name="PCIVendor" value="NVIDIA Corporation"/><info name="PCIDevice" value="GV100GL"/>
          <object type="OSDev" gp_index="20" name="cuda1"><info name="GPUModel" value="V100 by CUDA"/><info name="CUDAGlobalMemorySize" value="16515072"/></object>
          <object type="OSDev" gp_index="21" name="nvml0"><info name="GPUModel" value="Tesla V100"/><info name="NVIDIAUUID" value="GPU-1"/></object>
        </object></object><object type="Bridge" bridge_type="1-1">
        <object type="PCIDev" gp_index="11" pci_busid="0000:04:00.0" pci_type="0302 [10de:1db1] [10de:1212] a1">
          <info name="PCIVendor" value="NVIDIA Corporation"/><info name="PCIDevice" value="GV100GL"/></object></object></object>
        <object type="Bridge" bridge_type="1-1"><object type="PCIDev" pci_busid="0000:05:00.0" pci_type="0300 [1a03:2000] [0:0] 41"/>
          <object type="PCIDev" pci_busid="0000:00:02.0" pci_type="0380 [8086:5690] [0:0] 41"/>
          <object type="PCIDev" gp_index="30" subtype="NVSwitch" pci_busid="0000:06:00.0" pci_type="0680 [10de:1ac2] [0:0] a1"/></object></object></object>
      <object type="Package" os_index="1"><object type="NUMANode" os_index="5"/><object type="Bridge" bridge_type="0-1">
        <object type="PCIDev" gp_index="12" pci_busid="0000:81:00.0" pci_type="1200 [1002:74a1] [0:0] 00">
          <object type="OSDev" gp_index="22" name="rsmi0"><info name="AMDUUID" value="0x9b2e"/><info name="RSMIVRAMSize" value="2048KiB"/></object></object>
        <object type="PCIDev" gp_index="13" pci_busid="0000:82:00.0" pci_type="1200 [1002:74a1] [0:0] 00"/></object></object></object>
    <distances2 type="OSDev" nbobjs="2" name="XGMIHops" indexing="gp"><indexes length="1">12 13 </indexes><u64values>0 2 </u64values><u64values>2 0</u64values></distances2>
    <distances2 type="NUMANode" nbobjs="2" name="NVLinkBandwidth" indexing="os"><indexes>10 12</indexes><u64values>0 25000 0 0</u64values></distances2>
    <distances2hetero nbobjs="3" name="NVLinkBandwidth"><indexes>OSDev:21 PCIDev:11 PCIDev:30 </indexes>
      <u64values>0 0 75000 0 0 </u64values><u64values>50000 75000 50000 0</u64values></distances2hetero></topology>"#;

    const TEXT: &str = "Machine (126GB total)\n  Package L#0\n    NUMANode L#0 (P#2 63GB)\n    Core L#0 + PU L#0 (P#0)\n    HostBridge\n      \
        PCIBridge\n        PCI 04:00.0 (3D)\n          CoProc(CUDA) \"cuda1\"\n          GPU(NVML) \"nvml3\"\n      PCI 02:00.0 (VGA)\n  \
        Package L#1\n    NUMANode L#1 (P#3 63GB)\n    HostBridge L#1 (buses=0035:[04-04])\n      \
        PCI L#4 (busid=0035:04:00.0 id=1002:66a1 class=0300(VGA) PCIVendor=\"AMD, Inc.\" PCIDevice=\"Vega 20\")\n        \
        GPU(RSMI) L#3 (GPUModel=\"Vega 20 card\" AMDUUID=18) \"rsmi0\"\n      PCI L#5 (busid=0035:05:00.0 id=0000:0000 class=0300(VGA))\n";

    #[test]
    fn each_gpu_is_found_with_its_node_name_and_memory() {
        assert!(looks_like(XML));
        let snapshot = parse(XML).unwrap();
        let [first, second, amd, last] = snapshot.devices.as_slice() else { panic!("{:?}", snapshot.devices) };
        assert_eq!((first.index, first.numa, first.name.as_deref()), (Some(0), Some(4), Some("Tesla V100")));
        assert_eq!(first.memory.total, Told::Value(Bytes(16_515_072 << 10)));
        assert_eq!(first.uuid.as_deref(), Some("GPU-1"));
        assert_eq!((second.index, second.name.as_deref()), (None, Some("GV100GL")));
        assert_eq!(second.memory.total, Told::Value(Bytes(16 << 30)));
        assert_eq!((amd.vendor, amd.numa, amd.uuid.as_deref()), (Vendor::Amd, Some(5), Some("GPU-0000000000009b2e")));
        assert_eq!((&amd.memory.total, amd.index), (&Told::Value(Bytes(2 << 20)), Some(0)));
        assert!(last.memory.total.is_absent() && last.name.is_none() && last.health.is_none());
        assert_eq!(snapshot.warnings, ["Intel GPUs are not supported yet: 0000:00:02.0"]);
    }

    #[test]
    fn matrices_tell_the_links_that_bridges_do_not() {
        let snapshot = parse(XML).unwrap();
        let kinds: Vec<_> = snapshot.links.iter().map(|link| (link.a, link.b, link.kind)).collect();
        let cross = LinkKind::CrossNuma;
        let expected = [
            (0, 1, LinkKind::NvLink(2)),
            (0, 2, cross),
            (0, 3, cross),
            (1, 2, cross),
            (1, 3, cross),
            (2, 3, LinkKind::Xgmi(2)),
        ];
        assert_eq!(kinds, expected);
        let without = XML.split("<distances2").next().unwrap();
        assert_eq!(parse(without).unwrap().links[0].kind, LinkKind::PcieSwitch);
    }

    #[test]
    fn the_text_of_lstopo_tells_the_same() {
        assert!(looks_like(TEXT));
        let snapshot = parse(TEXT).unwrap();
        let [nvidia, amd, unknown] = snapshot.devices.as_slice() else { panic!("{:?}", snapshot.devices) };
        assert_eq!((nvidia.vendor, nvidia.index, nvidia.numa), (Vendor::Nvidia, Some(3), Some(2)));
        assert_eq!(nvidia.pci, address::parse("04:00.0"));
        assert_eq!((amd.vendor, amd.numa, amd.name.as_deref()), (Vendor::Amd, Some(3), Some("Vega 20 card")));
        assert_eq!(amd.uuid.as_deref(), Some("GPU-0000000000000018"));
        assert_eq!((unknown.vendor, unknown.pci), (Vendor::Other, address::parse("0035:05:00.0")));
        assert_eq!(snapshot.links.last().unwrap().kind, LinkKind::HostBridge);
    }

    #[test]
    fn version_1_puts_devices_into_numa_nodes() {
        let text = r#"<topology><object type="Machine"><object type="NUMANode" os_index="1"><object type="Socket"/>
            <object type="Bridge" bridge_type="0-1"><object type="PCIDev" name="NVIDIA Corporation GK110 [K40]" pci_busid="0000:02:00.0"
            pci_type="0302 [10de:1023] [0:0] a1"><info name="PCIVendor" value="NVIDIA Corporation"/></object></object></object></object></topology>"#;
        let snapshot = parse(text).unwrap();
        assert_eq!(snapshot.devices[0].numa, Some(1));
        assert_eq!(snapshot.devices[0].name.as_deref(), Some("GK110 [K40]"));
    }

    #[test]
    fn what_is_no_topology_is_refused() {
        assert!(!looks_like("<system><object/></system>"));
        assert!(!looks_like("Machine learning is L#1"));
        assert!(parse("<system/>").is_err());
    }

    proptest! {
        #[test]
        fn no_damage_makes_it_panic(xml in any::<bool>(), cut in 0..TEXT.len(), at in 0..TEXT.len(), byte in any::<u8>()) {
            let mut bytes = if xml { XML } else { TEXT }.as_bytes().to_vec();
            let stretch = bytes.len() / TEXT.len();
            bytes[at * stretch] = byte;
            bytes.truncate(cut * stretch);
            let text = String::from_utf8_lossy(&bytes).into_owned();
            looks_like(&text);
            let _ = parse(&text);
        }

        #[test]
        fn no_indents_make_it_overflow(indents in prop::collection::vec(0_usize..3000, 1..400)) {
            let lines = indents.iter().map(|indent| format!("{}Group L#0\n", " ".repeat(*indent)));
            let text = format!("Machine (1GB)\n{}", lines.collect::<String>());
            prop_assert!(parse(&text).unwrap().devices.is_empty());
        }
    }
}

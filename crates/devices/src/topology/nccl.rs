//! The topology files of NCCL and RCCL: what they found of the bus, and the graphs they drew over it.

use std::collections::{BTreeMap, BTreeSet};

use gpupool_core::device::{LinkKind, PciAddress, Vendor};

use crate::address;
use crate::found::Found;
use crate::pci_bus;
use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::topology::root_tag;
use crate::topology::ways::{self, FastLinks, Stop, Switches};
use crate::xml::{self, Element};

const FORMAT: &str = "NCCL topology";

/// Whether a text is a topology or a graph file of NCCL or RCCL.
pub fn looks_like(text: &str) -> bool {
    match root_tag(text) {
        Some("system") => text.contains("<cpu") || text.contains("<pci"),
        Some("graphs") => text.contains("<graph ") || text.contains("<graph>"),
        _ => false,
    }
}

/// The GPUs of a topology file and how they are joined, or the GPUs that a graph file numbers.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    let document = xml::parse(text);
    let mut snapshot = match document.root.name.as_str() {
        "system" => system(&document.root),
        "graphs" => graphs(&document.root),
        "" => return Err(SourceError::malformed(FORMAT, document.broken.unwrap_or_else(|| "no XML".into()))),
        other => return Err(SourceError::malformed(FORMAT, format!("<{other}> is neither <system> nor <graphs>"))),
    };
    if let Some(broken) = document.broken {
        snapshot.warn(format!("the file is read only in part: {broken}"));
    }
    Ok(snapshot)
}

fn system(root: &Element) -> Snapshot {
    let mut bus = Bus::default();
    bus.walk(root, &Place::default());
    if bus.snapshot.devices.is_empty() {
        bus.snapshot.warn("the file names no GPU: only switches, network cards or nothing");
    }
    let fast = bus.fast_links();
    bus.snapshot.links = ways::links(&bus.ways, Switches::AsOne, &fast);
    bus.snapshot
}

/// A graph file knows the GPUs by number only.
fn graphs(root: &Element) -> Snapshot {
    let gpus = root.walk().filter(|element| element.name == "gpu");
    let numbers: BTreeSet<u32> = gpus.filter_map(|gpu| gpu.attribute("dev")?.parse().ok()).collect();
    let over_xgmi = root.walk().any(|graph| graph.attribute("typeintra") == Some("XGMI"));
    let mut snapshot = Snapshot::default();
    for number in numbers {
        let mut device = Found::new(if over_xgmi { Vendor::Amd } else { Vendor::Nvidia });
        device.index = Some(number);
        snapshot.push(device);
    }
    snapshot.warn("a graph file numbers GPUs and tells nothing else of them");
    snapshot
}

/// Where in the tree an element is.
#[derive(Debug, Clone, Default)]
struct Place<'a> {
    /// Set where the file holds several hosts.
    host: Option<&'a str>,
    numa: Option<u32>,
    way: Vec<Stop>,
}

/// What was found so far: each device with its way, its host and its element.
#[derive(Default)]
struct Bus<'a> {
    snapshot: Snapshot,
    ways: Vec<Vec<Stop>>,
    hosts: Vec<Option<&'a str>>,
    gpus: Vec<Option<&'a Element>>,
    stops: u64,
}

impl<'a> Bus<'a> {
    /// Takes an element and what is in it; the depth of a document is bounded where it is read.
    fn walk(&mut self, element: &'a Element, place: &Place<'a>) {
        let mut inside = place.clone();
        match element.name.as_str() {
            "cpu" => {
                inside.host = element.attribute("host_hash");
                inside.numa = element.attribute("numaid").and_then(|id| id.trim().parse().ok());
                inside.way = vec![Stop::HostBridge(self.next_stop())];
            }
            "pci" if element.child("gpu").is_some() => {
                for gpu in element.children("gpu") {
                    self.add(Some(element), Some(gpu), place);
                }
                return;
            }
            "pci" if is_gpu(element) => return self.add(Some(element), None, place),
            "pci" => inside.way.push(Stop::Bridge(self.next_stop())),
            "gpu" => return self.add(None, Some(element), place),
            _ => {}
        }
        for child in &element.children {
            self.walk(child, &inside);
        }
    }

    fn next_stop(&mut self) -> u64 {
        self.stops += 1;
        self.stops
    }

    fn add(&mut self, pci: Option<&'a Element>, gpu: Option<&'a Element>, place: &Place<'a>) {
        let mut device = Found::new(vendor(pci, gpu));
        device.index = gpu.and_then(|gpu| gpu.attribute("dev")?.trim().parse().ok());
        device.name = gpu.and_then(|gpu| architecture(gpu, device.vendor)).map(Into::into);
        device.numa = place.numa;
        if let Some(busid) = pci.and_then(|pci| pci.attribute("busid")) {
            device.pci = address::parse(busid);
            if device.pci.is_none() {
                self.snapshot.warn(format!("a GPU's bus id cannot be read: {:?}", crate::told::words(busid)));
            }
        }
        if self.snapshot.push(device).is_some() {
            self.ways.push(place.way.clone());
            self.hosts.push(place.host);
            self.gpus.push(gpu);
        }
    }

    /// NVLink and XGMI, as the elements in each GPU tell.
    fn fast_links(&mut self) -> FastLinks {
        let key = |place: usize, pci: PciAddress| (self.hosts.get(place).copied().flatten(), pci);
        let devices = self.snapshot.devices.iter().enumerate();
        let places: BTreeMap<_, _> = devices.filter_map(|(at, found)| Some((key(at, found.pci?), at))).collect();
        let mut fast = FastLinks::default();
        let mut to_switch = vec![0; self.gpus.len()];
        let mut warnings = Vec::new();
        for (at, gpu) in self.gpus.iter().enumerate() {
            for link in gpu.iter().flat_map(|gpu| &gpu.children) {
                let count: u32 = link.attribute("count").and_then(|count| count.trim().parse().ok()).unwrap_or(1);
                let class = link.attribute("tclass").unwrap_or_default();
                let target = link.attribute("target").unwrap_or_default();
                let other = address::parse(target).and_then(|pci| places.get(&key(at, pci)));
                match (link.name.as_str(), other) {
                    ("nvlink", _) if class == POWER_BRIDGE => {}
                    ("nvlink", _) if class.starts_with(NVSWITCH) => to_switch[at] = count.saturating_add(to_switch[at]),
                    ("nvlink" | "xgmi", Some(&other)) if other == at => {
                        warnings.push(format!(
                            "{target}: its {} leads to itself, so where it leads is not known",
                            link.name
                        ));
                    }
                    ("nvlink", Some(&other)) => fast.join(at, other, ways::nvlink(count)),
                    ("xgmi", Some(&other)) => fast.join(at, other, LinkKind::Xgmi(1)),
                    ("nvlink" | "xgmi", None) => {
                        let target = crate::told::words(target);
                        warnings.push(format!("{} leads to {target:?}, which the file does not list", link.name));
                    }
                    _ => {}
                }
            }
        }
        fast.join_by_switch(&to_switch);
        warnings.into_iter().for_each(|warning| self.snapshot.warn(warning));
        fast
    }
}

/// PCI class of an NVSwitch.
const NVSWITCH: &str = "0x0680";
/// PCI class by which a POWER processor stands at the end of an NVLink.
const POWER_BRIDGE: &str = "0x068001";

/// The PCI class of an element, without its programming interface.
fn class(pci: &Element) -> Option<u16> {
    let digits = pci.attribute("class")?.trim().strip_prefix("0x")?;
    u16::from_str_radix(digits.get(..4)?, 16).ok()
}

/// The maker that an element's vendor number tells; `Some(None)` where it makes no GPUs.
fn maker(pci: &Element) -> Option<Option<Vendor>> {
    let digits = pci.attribute("vendor")?.trim().strip_prefix("0x")?;
    let number = u16::from_str_radix(digits, 16).ok()?;
    Some(pci_bus::maker(number))
}

/// Whether a PCI element without a `gpu` in it is one by its class; templates of clouds list GPUs so.
fn is_gpu(pci: &Element) -> bool {
    match (class(pci), maker(pci)) {
        (Some(class), None) => pci_bus::is_gpu_class(class),
        (Some(class), Some(Some(maker))) => pci_bus::is_gpu(maker, class),
        (_, Some(None)) | (None, None | Some(Some(_))) => false,
    }
}

/// Who made a GPU: by its vendor number, else by what only one maker's files hold.
fn vendor(pci: Option<&Element>, gpu: Option<&Element>) -> Vendor {
    if let Some(Some(known)) = pci.and_then(maker) {
        return known;
    }
    let amd = gpu.is_some_and(|gpu| gpu.attribute("gcn").is_some() || gpu.child("xgmi").is_some());
    let amd_class = gpu.is_none() && matches!(pci.and_then(class), Some(0x0380 | 0x1200));
    if amd || amd_class { Vendor::Amd } else { Vendor::Nvidia }
}

/// The name of a GPU's architecture, the only name these files have: `sm_80`, `gfx90a`.
fn architecture(gpu: &Element, vendor: Vendor) -> Option<String> {
    match (vendor, gpu.attribute("gcn"), gpu.attribute("sm")) {
        (Vendor::Amd, Some(name), _) if name.starts_with("gfx") => Some(name.chars().take(64).collect()),
        // The number holds the version in decimal digits, so that gfx90a is 900 + 10.
        (Vendor::Amd, Some(number), _) => match number.trim().parse::<u32>().ok()? {
            nine @ 900..=915 => Some(format!("gfx90{:x}", nine - 900)),
            other => Some(format!("gfx{other}")),
        },
        (Vendor::Nvidia, _, Some(sm)) => sm.trim().parse::<u32>().ok().map(|sm| format!("sm_{sm}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::FoundLink;
    use proptest::prelude::*;

    const NVIDIA: &str = r#"<!-- dumped --><system version="1">
      <cpu numaid="0"><pci busid="0000:0a:00.0" class="0x060400">
        <pci busid="0000:0B:00.0" class="0x030200" vendor="0x10de"><gpu dev="1" sm="90" rank="0">
          <nvlink target="0000:0c:00.0" count="4" tclass="0x030200"/>
          <nvlink target="0000:d0:00.0" count="2" tclass="0x068000"/><nvlink target="0000:d1:00.0" count="3" tclass="0x068000"/>
          <nvlink target="0000:e0:00.0" count="3" tclass="0x068001"/></gpu></pci>
        <pci busid="0000:0c:00.0" class="0x030200" vendor="0x10de"><gpu dev="0" sm="90" rank="1"/></pci>
        <pci busid="0000:0e:00.0" class="0x060400"><pci busid="0000:0f:00.0" class="0x030200"/></pci>
        <pci busid="0000:0d:00.0" class="0x030000" vendor="0x1a03"/></pci></cpu>
      <cpu numaid="-1"><pci busid="10000:01:00.0" class="0x030200"><gpu dev="2" sm="90">
          <nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/></gpu></pci></cpu>
    </system>"#;

    const AMD: &str = r#"<system version="2"><cpu numaid="1">
      <pci busid="0000:01:00.0" class="0x120000"><gpu dev="0" sm="304" gcn="gfx942">
        <xgmi target="0000:02:00.0" count="2" tclass="0x120000"/><xgmi target="0000:01:00.0" count="1"/>
        <xgmi target="0000:99:00.0" count="1"/></gpu></pci>
      <pci busid="0000:02:00.0" class="0x120000"><gpu dev="1" sm="104" gcn="910"/></pci>
      <pci busid="0000:03:00.0" class="0x120000"/></cpu></system>"#;

    fn link(a: usize, b: usize, kind: LinkKind) -> FoundLink {
        FoundLink { a, b, kind }
    }

    #[test]
    fn a_topology_tells_places_numa_nodes_and_links() {
        assert!(looks_like(NVIDIA));
        let snapshot = parse(NVIDIA).unwrap();
        let listed: Vec<_> =
            snapshot.devices.iter().map(|gpu| (gpu.index, gpu.numa, gpu.pci.unwrap().to_string())).collect();
        let expected = [
            (Some(1), Some(0), "0000:0b:00.0".to_owned()),
            (Some(0), Some(0), "0000:0c:00.0".to_owned()),
            (None, Some(0), "0000:0f:00.0".to_owned()),
            (Some(2), None, "10000:01:00.0".to_owned()),
        ];
        assert_eq!(listed, expected);
        assert!(snapshot.devices.iter().all(|gpu| gpu.vendor == Vendor::Nvidia && gpu.health.is_none()));
        assert_eq!(snapshot.devices[0].name.as_deref(), Some("sm_90"));
        let expected = [
            link(0, 1, LinkKind::NvLink(4)),
            link(0, 2, LinkKind::PcieSwitches),
            link(0, 3, LinkKind::NvLink(5)),
            link(1, 2, LinkKind::PcieSwitches),
            link(1, 3, LinkKind::CrossNuma),
            link(2, 3, LinkKind::CrossNuma),
        ];
        assert_eq!(snapshot.links, expected);
        assert_eq!(snapshot.warnings, [""; 0]);
    }

    #[test]
    fn xgmi_joins_amd_devices_and_a_link_into_nothing_is_a_warning() {
        let snapshot = parse(AMD).unwrap();
        let names: Vec<_> = snapshot.devices.iter().map(|gpu| (gpu.vendor, gpu.name.as_deref())).collect();
        assert_eq!(names, [(Vendor::Amd, Some("gfx942")), (Vendor::Amd, Some("gfx90a")), (Vendor::Amd, None)]);
        assert_eq!(snapshot.links[0], link(0, 1, LinkKind::Xgmi(1)));
        assert_eq!(snapshot.links[1], link(0, 2, LinkKind::HostBridge));
        assert_eq!(snapshot.warnings.len(), 2, "{:?}", snapshot.warnings);
    }

    #[test]
    fn a_graph_numbers_its_gpus() {
        let text = r#"<graphs version="1"><graph id="0" typeintra="SYS"><channel>
            <gpu dev="2"/><gpu dev="0"/></channel><channel><gpu dev="0"/><gpu dev="x"/></channel></graph></graphs>"#;
        assert!(looks_like(text));
        let numbers: Vec<_> = parse(text).unwrap().devices.iter().map(|gpu| gpu.index).collect();
        assert_eq!(numbers, [Some(0), Some(2)]);
    }

    #[test]
    fn other_xml_is_refused_and_a_file_without_gpus_is_none() {
        assert!(!looks_like("<nvidia_smi_log><gpu/></nvidia_smi_log>"));
        assert!(parse("<topology/>").is_err());
        assert!(parse("").is_err());
        let none = parse(r#"<system><cpu numaid="0"><pci busid="0000:00:16.0"/></cpu></system>"#).unwrap();
        assert!(none.devices.is_empty() && none.warnings.len() == 1);
    }

    proptest! {
        #[test]
        fn no_damage_makes_it_panic(cut in 0..NVIDIA.len(), at in 0..NVIDIA.len(), byte in any::<u8>()) {
            let mut bytes = NVIDIA.as_bytes().to_vec();
            bytes[at] = byte;
            let whole = String::from_utf8_lossy(&bytes).into_owned();
            let part = String::from_utf8_lossy(&bytes[..cut]).into_owned();
            for text in [whole, part] {
                looks_like(&text);
                let _ = parse(&text);
            }
        }
    }
}

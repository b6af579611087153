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

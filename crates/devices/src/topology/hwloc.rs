//! hwloc's view of a machine: its XML of versions 1 to 3, and the text that `lstopo` prints.

use std::collections::BTreeMap;

use gpupool_core::device::{PciAddress, Vendor};
use gpupool_core::units::Bytes;

use crate::address;
use crate::found::Found;
use crate::pci_bus;
use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::told::Told;
use crate::topology::ways::{self, Stop, Switches};
use crate::topology::{lstopo, matrix, root_tag};
use crate::xml::{self, Element};

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
pub(super) enum End {
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
        let Some(at) = self.snapshot.push(device) else { return };
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

/// The numbers of a PCI device: `0302 [10de:1db8] …`.
struct Pci {
    class: Option<u16>,
    vendor: Option<u16>,
}

impl Pci {
    fn of(object: &Element) -> Self {
        let kind = object.attribute("pci_type").unwrap_or_default();
        let hex = |digits: &str| u16::from_str_radix(digits, 16).ok();
        let (class, ids) = kind.split_once('[').unwrap_or((kind, ""));
        Self { class: class.get(..4).and_then(hex), vendor: ids.split(':').next().and_then(hex) }
    }

    fn is_nvswitch(&self) -> bool {
        (self.class, self.vendor) == (Some(0x0680), Some(0x10de))
    }

    /// Who made it, where it is a GPU: by its numbers, or by what programs call it where the file lacks the numbers.
    fn gpu_maker(&self, object: &Element) -> Option<Vendor> {
        let called = software(object).find_map(|(program, _)| program.maker());
        let unnumbered = self.vendor.is_none_or(|vendor| vendor == 0);
        match (self.class, self.vendor.and_then(pci_bus::maker)) {
            (Some(class), Some(maker)) => pci_bus::is_gpu(maker, class).then_some(maker),
            (None, Some(maker)) => software(object).next().map(|_| maker),
            (Some(class), None) if unnumbered && pci_bus::is_gpu_class(class) => {
                // A VGA device of which nothing is known is as likely the one of the management board.
                let nothing = self.vendor.is_none() && class == 0x0300;
                called.or((!nothing).then_some(Vendor::Other))
            }
            (_, None) => called.filter(|_| unnumbered),
        }
    }
}

/// A program interface through which hwloc saw a device, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Program {
    Nvml,
    Rsmi,
    Cuda,
    LevelZero,
    OpenCl,
}

impl Program {
    const ALL: [(&'static str, Self); 5] = [
        ("nvml", Self::Nvml),
        ("rsmi", Self::Rsmi),
        ("cuda", Self::Cuda),
        ("ze", Self::LevelZero),
        ("opencl", Self::OpenCl),
    ];

    /// The program behind the name of an OS device, and the number in it: `nvml3`.
    fn of(name: &str) -> Option<(Self, Option<u32>)> {
        let named = |(prefix, program): &(&str, Self)| {
            let rest = name.strip_prefix(prefix)?;
            rest.starts_with(|c: char| c.is_ascii_digit()).then(|| (*program, rest.parse().ok()))
        };
        Self::ALL.iter().find_map(named)
    }

    const fn maker(self) -> Option<Vendor> {
        match self {
            Self::Nvml | Self::Cuda => Some(Vendor::Nvidia),
            Self::Rsmi => Some(Vendor::Amd),
            Self::LevelZero => Some(Vendor::Intel),
            Self::OpenCl => None,
        }
    }

    /// Where the program tells the device's memory, in KiB.
    const fn memory(self) -> &'static [&'static str] {
        match self {
            Self::Nvml => &[],
            Self::Rsmi => &["RSMIVRAMSize"],
            Self::Cuda => &["CUDAGlobalMemorySize"],
            Self::LevelZero => &["LevelZeroHBMSize", "LevelZeroDDRSize", "LevelZeroMemorySize"],
            Self::OpenCl => &["OpenCLGlobalMemorySize"],
        }
    }
}

/// The OS devices of a PCI device that are programs' views of a GPU, best first.
fn software(object: &Element) -> impl Iterator<Item = (Program, &Element)> {
    let seen = object.children("object").filter(|child| child.attribute("type") == Some("OSDev"));
    let mut seen: Vec<_> = seen.filter_map(|child| Some((Program::of(child.attribute("name")?)?.0, child))).collect();
    seen.sort_by_key(|(program, _)| *program);
    seen.into_iter()
}

/// What an object and the OS devices in it tell of a device.
fn described(object: &Element, vendor: Vendor) -> Found {
    let words = |text: &str| crate::told::words(text.trim()).into();
    let told = |key: &'static str| software(object).find_map(move |(_, seen)| info(seen, key));
    let mut device = Found::new(vendor);
    device.pci = object.attribute("pci_busid").and_then(address::parse);
    device.index = software(object).find_map(|(program, seen)| match program {
        Program::OpenCl => None,
        _ => Program::of(seen.attribute("name")?)?.1,
    });
    device.name = told("GPUModel").or_else(|| bus_name(object)).map(words);
    device.uuid = told("NVIDIAUUID").map(words).or_else(|| amd_uuid(told("AMDUUID")?).map(Into::into));
    let memory = software(object)
        .find_map(|(program, seen)| program.memory().iter().find_map(|key| kibibytes(info(seen, key)?)));
    device.memory.total = memory.map_or(Told::ABSENT, Told::Value);
    device
}

/// The name in the list of PCI devices; version 1 puts the maker before it.
fn bus_name(object: &Element) -> Option<&str> {
    let listed = info(object, "PCIDevice").or_else(|| object.attribute("name"))?;
    let maker = info(object, "PCIVendor").unwrap_or_default();
    Some(listed.strip_prefix(maker).unwrap_or(listed).trim()).filter(|name| !name.is_empty())
}

fn amd_uuid(text: &str) -> Option<String> {
    let digits = text.trim().trim_start_matches("GPU-").trim_start_matches("0x");
    u64::from_str_radix(digits, 16).ok().filter(|&id| id != 0).map(|id| format!("GPU-{id:016x}"))
}

/// The value of an `<info name=… value=…>` in an object.
fn info<'a>(object: &'a Element, name: &str) -> Option<&'a str> {
    let found = object.children("info").find(|info| info.attribute("name") == Some(name))?;
    found.attribute("value").map(str::trim).filter(|value| !value.is_empty())
}

/// Sizes are in KiB; newer versions write the unit behind.
fn kibibytes(text: &str) -> Option<Bytes> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let kibi: u64 = match text.get(digits.len()..)?.trim() {
        "" | "KiB" | "kB" | "KB" => 1,
        "MiB" | "MB" => 1 << 10,
        "GiB" | "GB" => 1 << 20,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(kibi)?.checked_mul(1024).map(Bytes)
}

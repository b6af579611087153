//! What hwloc tells of one PCI device: by its numbers on the bus, and by the programs through which it was seen.

use gpupool_core::device::Vendor;
use gpupool_core::units::Bytes;

use crate::found::Found;
use crate::told::Told;
use crate::xml::Element;
use crate::{address, pci_bus};

/// The numbers of a PCI device: `0302 [10de:1db8] …`.
pub(super) struct Pci {
    class: Option<u16>,
    vendor: Option<u16>,
}

impl Pci {
    pub(super) fn of(object: &Element) -> Self {
        let kind = object.attribute("pci_type").unwrap_or_default();
        let hex = |digits: &str| u16::from_str_radix(digits, 16).ok();
        let (class, ids) = kind.split_once('[').unwrap_or((kind, ""));
        Self { class: class.get(..4).and_then(hex), vendor: ids.split(':').next().and_then(hex) }
    }

    /// Whether it is a switch between GPUs.
    pub(super) fn is_nvswitch(&self) -> bool {
        (self.class, self.vendor) == (Some(0x0680), Some(0x10de))
    }

    /// Who made it, where it is a GPU: by its numbers, or by what programs call it where the file lacks the numbers.
    pub(super) fn gpu_maker(&self, object: &Element) -> Option<Vendor> {
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
pub(super) fn described(object: &Element, vendor: Vendor) -> Found {
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
pub(super) fn info<'a>(object: &'a Element, name: &str) -> Option<&'a str> {
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

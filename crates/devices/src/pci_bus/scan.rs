//! The PCI bus as the kernel lists it in sysfs. Nothing read here wakes a sleeping device.

use std::ffi::OsStr;
use std::fs;
use std::path::{Component, Path};
use std::str::FromStr;
use std::sync::Arc;

use gpupool_core::device::{PciAddress, Vendor};

use crate::found::Found;
use crate::snapshot::Snapshot;
use crate::told::Told;
use crate::topology::ways::{self, FastLinks, Stop, Switches};
use crate::{address, kernel_file, limits, pci_bus};

/// A GPU on the bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PciGpu {
    /// Its place.
    pub pci: PciAddress,
    /// Who made it; [`Vendor::Other`] also where the bus does not tell.
    pub vendor: Vendor,
    /// Its maker's number.
    pub vendor_id: Option<u16>,
    /// Its maker's number for what it is.
    pub device_id: Option<u16>,
    /// The driver bound to it (`nvidia`, `nouveau`, `vfio-pci`, `amdgpu`), or `None`.
    pub driver: Option<Arc<str>>,
    /// NUMA node it is nearest to.
    pub numa: Option<u32>,
    /// Asleep to save power.
    pub asleep: bool,
    pub(crate) way: Vec<Stop>,
}

impl PciGpu {
    /// Whether this driver is bound to it.
    pub(crate) fn is_bound_to(&self, driver: &str) -> bool {
        self.driver.as_deref() == Some(driver)
    }

    /// The numbers of its maker and of what it is: `10de:2330`.
    pub(crate) fn ids(&self) -> String {
        let id = |id: Option<u16>| id.map_or_else(|| "????".to_owned(), |id| format!("{id:04x}"));
        format!("{}:{}", id(self.vendor_id), id(self.device_id))
    }
}

/// The GPUs of a machine by their places on the bus.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PciBus {
    /// In the order of their addresses.
    pub gpus: Vec<PciGpu>,
    /// What could not be read, for people.
    pub warnings: Vec<String>,
}

/// Every GPU and every other display adapter on the bus; `sys` is where sysfs is.
pub(crate) fn scan(sys: &Path) -> Told<PciBus> {
    let entries = match fs::read_dir(sys.join("bus/pci/devices")) {
        Ok(entries) => entries,
        Err(error) => return kernel_file::missing(&error),
    };
    let mut bus = PciBus::default();
    for entry in entries.flatten() {
        let Some(pci) = entry.file_name().to_str().and_then(address::parse) else { continue };
        let place = OnBus { sys, pci, folder: entry.path() };
        let Some(class) = place.number::<u32>("class") else { continue };
        let vendor = place.number("vendor").and_then(pci_bus::maker).unwrap_or(Vendor::Other);
        if !pci_bus::is_gpu(vendor, (class >> 8) as u16) {
            continue;
        }
        if bus.gpus.len() >= limits::DEVICES {
            bus.warnings.push(format!("more than {} GPUs; the rest is left out", limits::DEVICES));
            break;
        }
        bus.gpus.push(place.gpu(vendor));
    }
    bus.gpus.sort_by_key(|gpu| gpu.pci);
    Told::Value(bus)
}

/// Whether the device in this folder of sysfs sleeps to save power, or is about to.
pub(crate) fn is_asleep(folder: &Path) -> bool {
    let status = kernel_file::text(&folder.join("power/runtime_status"));
    status.value().is_some_and(|status| status.starts_with("suspend"))
}

/// The GPU that a driver says is at `pci`, with what the bus tells of it.
pub(super) fn at(sys: &Path, pci: PciAddress, vendor: Vendor) -> PciGpu {
    OnBus { sys, pci, folder: sys.join("bus/pci/devices").join(pci.to_string()) }.gpu(vendor)
}

impl PciBus {
    /// The GPUs of known makers as devices, each with how it is joined to the others.
    pub fn snapshot(&self) -> Snapshot {
        let mut snapshot = Snapshot { warnings: self.warnings.clone(), ..Snapshot::default() };
        let mut ways = Vec::new();
        for gpu in self.gpus.iter().filter(|gpu| gpu.vendor != Vendor::Other) {
            let mut device = Found::new(gpu.vendor);
            device.pci = Some(gpu.pci);
            device.numa = gpu.numa;
            device.asleep = gpu.asleep;
            if pci_bus::list(&mut snapshot, device).is_some() {
                ways.push(gpu.way.clone());
            }
        }
        // A copy of a tree keeps no links between folders, and so no ways; then nothing can be said.
        if ways.iter().flatten().any(|stop| !matches!(stop, Stop::Numa(_))) {
            snapshot.links = ways::links(&ways, Switches::ByPort, &FastLinks::default());
        }
        snapshot
    }
}

/// A device's folder in sysfs.
struct OnBus<'a> {
    sys: &'a Path,
    pci: PciAddress,
    folder: std::path::PathBuf,
}

impl OnBus<'_> {
    fn gpu(&self, vendor: Vendor) -> PciGpu {
        let numa = self.numa();
        PciGpu {
            pci: self.pci,
            vendor,
            vendor_id: self.number("vendor"),
            device_id: self.number("device"),
            driver: self.driver(),
            numa,
            asleep: is_asleep(&self.folder),
            way: self.way(numa),
        }
    }

    fn number<T: FromStr + TryFrom<u64> + Copy>(&self, file: &str) -> Option<T> {
        kernel_file::number(&self.folder.join(file)).value().copied()
    }

    /// The driver by the link to it, or by name where a copy of the tree lost the link.
    fn driver(&self) -> Option<Arc<str>> {
        let link = fs::read_link(self.folder.join("driver")).ok();
        let linked = link.as_deref().and_then(Path::file_name).and_then(OsStr::to_str).map(Into::into);
        linked.or_else(|| {
            let uevent = kernel_file::text(&self.folder.join("uevent"));
            uevent.value()?.lines().find_map(|line| line.strip_prefix("DRIVER=")).map(Into::into)
        })
    }

    /// The NUMA node the kernel tells, or the one whose processors are the device's.
    fn numa(&self) -> Option<u32> {
        if let Some(&node) = kernel_file::number::<i64>(&self.folder.join("numa_node")).value() {
            return node.try_into().ok();
        }
        let near = mask(kernel_file::text(&self.folder.join("local_cpus")).value()?)?;
        let nodes = fs::read_dir(self.sys.join("devices/system/node")).ok()?.flatten();
        let node = |entry: fs::DirEntry| {
            let number: u32 = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let own = mask(kernel_file::text(&entry.path().join("cpumap")).value()?)?;
            (own == near).then_some(number)
        };
        nodes.filter_map(node).min()
    }

    /// The bridges above the device, by the folders it lies in: `devices/pci0000:00/0000:00:03.0/0000:02:00.0`.
    fn way(&self, numa: Option<u32>) -> Vec<Stop> {
        let mut way: Vec<Stop> = numa.map(|node| Stop::Numa(node.into())).into_iter().collect();
        let target = fs::read_link(&self.folder).unwrap_or_default();
        let folders = target.components().filter_map(|part| match part {
            Component::Normal(name) => name.to_str(),
            _ => None,
        });
        for folder in folders {
            let host = folder.strip_prefix("pci").and_then(|place| address::parse(&format!("{place}:00")));
            match (host, address::parse(folder)) {
                (Some(host), _) => way.push(Stop::HostBridge(u64::from(host.domain) << 8 | u64::from(host.bus))),
                (None, Some(bridge)) if bridge != self.pci => way.push(Stop::bridge_at(bridge)),
                _ => {}
            }
        }
        way
    }
}

/// A mask of processors without what does not change it: commas and leading zeros.
fn mask(text: &str) -> Option<String> {
    let digits: String = text.chars().filter(|c| *c != ',').collect();
    let mask = digits.trim_start_matches('0').to_ascii_lowercase();
    (!mask.is_empty()).then_some(mask)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_core::device::LinkKind;
    use std::os::unix::fs::symlink;

    /// A bus of devices: the folder of each below `devices`, and its files.
    fn bus_of(devices: &[(&str, &[(&str, &str)])]) -> tempfile::TempDir {
        let sys = tempfile::tempdir().unwrap();
        let bus = sys.path().join("bus/pci/devices");
        fs::create_dir_all(&bus).unwrap();
        for (place, files) in devices {
            let folder = sys.path().join("devices").join(place);
            fs::create_dir_all(folder.join("power")).unwrap();
            for (name, text) in *files {
                match *name {
                    "driver" => symlink(format!("../../bus/pci/drivers/{text}"), folder.join(name)).unwrap(),
                    _ => fs::write(folder.join(name), text).unwrap(),
                }
            }
            let name = folder.file_name().unwrap();
            symlink(Path::new("../../../devices").join(place), bus.join(name)).unwrap();
        }
        sys
    }

    #[test]
    fn the_bus_lists_gpus_with_their_drivers_whether_or_not_they_have_one() {
        let sys = bus_of(&[
            (
                "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0",
                &[
                    ("vendor", "0x10de\n"),
                    ("device", "0x2236\n"),
                    ("class", "0x030200\n"),
                    ("driver", "vfio-pci"),
                    ("numa_node", "1\n"),
                ],
            ),
            (
                "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0",
                &[
                    ("vendor", "0x10de\n"),
                    ("class", "0x030000\n"),
                    ("power/runtime_status", "suspended\n"),
                    ("numa_node", "1\n"),
                ],
            ),
            (
                "pci0000:c0/0000:c1:00.0",
                &[
                    ("vendor", "0x1002\n"),
                    ("class", "0x120000\n"),
                    ("uevent", "PCI_CLASS=120000\nDRIVER=amdgpu\n"),
                    ("numa_node", "-1\n"),
                ],
            ),
            ("pci0000:00/0000:05:00.0", &[("vendor", "0x1a03\n"), ("class", "0x030000\n"), ("driver", "ast")]),
            ("pci0000:00/0000:06:00.0", &[("vendor", "0x10de\n"), ("class", "0x068000\n")]),
            ("pci0000:00/0000:07:00.0", &[("vendor", "0x8086\n"), ("class", "0x120000\n")]),
            ("pci0000:00/0000:08:00.0", &[("vendor", ""), ("class", "0x030000\n")]),
        ]);
        let bus = scan(sys.path()).into_value().unwrap();
        let listed: Vec<_> =
            bus.gpus.iter().map(|gpu| (gpu.vendor, gpu.driver.as_deref(), gpu.numa, gpu.asleep)).collect();
        let expected = [
            (Vendor::Nvidia, Some("vfio-pci"), Some(1), false),
            (Vendor::Nvidia, None, Some(1), true),
            (Vendor::Other, Some("ast"), None, false),
            (Vendor::Other, None, None, false),
            (Vendor::Amd, Some("amdgpu"), None, false),
        ];
        assert_eq!(listed, expected);
        assert_eq!((bus.gpus[0].ids(), bus.gpus[3].ids()), ("10de:2236".into(), "????:????".into()));
        assert_eq!(bus.snapshot().devices.len(), 3, "only those whose maker is known can be shared");
        let kinds: Vec<_> = bus.snapshot().links.iter().map(|link| link.kind).collect();
        assert_eq!(kinds, [LinkKind::PcieSwitch, LinkKind::CrossNuma, LinkKind::CrossNuma]);
    }

    #[test]
    fn a_bus_that_is_not_there_is_told_from_an_empty_one() {
        assert!(scan(Path::new("/nowhere")).is_absent());
        assert_eq!(scan(bus_of(&[]).path()), Told::Value(PciBus::default()));
    }
}

//! GPUs on the PCI bus, with or without a driver.
//!
//! A GPU that stopped responding is still on the bus, and a GPU that fell off is missing there too: comparing the bus
//! with a driver's list finds devices that vanished silently.

use std::ffi::OsStr;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use gpupool_core::{Bytes, DeviceHealth, LinkKind, PciAddress, Vendor};

use crate::address::parse_pci_address;
use crate::detected_device::DetectedDevice;
use crate::reported::{Reported, truncate_text};
use crate::source::SourceError;
use crate::source_reading::{DetectedLink, SourceReading};
use crate::{kernel_file, limits};

/// Returns the vendor with a PCI vendor id, if it makes GPUs.
pub(crate) const fn vendor_of_id(id: u16) -> Option<Vendor> {
    match id {
        0x10de => Some(Vendor::Nvidia),
        0x1002 => Some(Vendor::Amd),
        0x8086 => Some(Vendor::Intel),
        _ => None,
    }
}

/// Whether a device of this vendor and PCI class (base and subclass: `0x0302`) is a GPU. Processing accelerators count
/// only for NVIDIA and AMD.
pub(crate) const fn is_gpu(vendor: Vendor, class: u16) -> bool {
    match class {
        0x0300 | 0x0301 | 0x0302 | 0x0380 => true,
        0x1200 => matches!(vendor, Vendor::Nvidia | Vendor::Amd),
        _ => false,
    }
}

/// Adds a listed GPU and returns its position; an unsupported GPU becomes a warning instead.
pub(crate) fn push_listed_gpu(reading: &mut SourceReading, device: DetectedDevice) -> Option<usize> {
    if device.vendor == Vendor::Intel {
        let address = device.pci.map(|pci| pci.to_string()).unwrap_or_default();
        reading.warn(format!("Intel GPUs are not supported yet: {address}"));
        return None;
    }
    reading.push(device)
}

// A copy of a machine's `/proc` and `/sys`, read for the GPUs on its bus.

/// Whether a folder, or the only folder in it, has a PCI bus or the procfs files of NVIDIA's driver.
pub(crate) fn looks_like(root: &Path) -> bool {
    base_folder(root).is_some()
}

/// Reads the GPUs of a copied machine: those that NVIDIA's driver lists, and those that only the bus lists.
pub(crate) fn read(root: &Path) -> Result<SourceReading, SourceError> {
    let Some(base) = base_folder(root) else {
        let why = "it has neither proc/driver/nvidia/gpus nor sys/bus/pci/devices".to_owned();
        return Err(SourceError::NotPresent { what: root.display().to_string().into(), why });
    };
    let sys = base.join("sys");
    let listed = nvidia_gpus(&base.join("proc"));
    let mut bus = match scan(&sys) {
        Reported::Value(bus) => bus,
        Reported::Unsupported(_) => PciBus::default(),
        Reported::Failed(words) => PciBus { warnings: vec![format!("the PCI bus: {words}")], ..PciBus::default() },
    };
    // A partial copy may lack the vendor id; the driver's list then shows the vendor.
    for pci in listed.iter().filter_map(|device| device.pci) {
        match bus.gpus.iter_mut().find(|gpu| gpu.pci == pci) {
            Some(gpu) => gpu.vendor = Vendor::Nvidia,
            None => bus.gpus.push(gpu_at(&sys, pci, Vendor::Nvidia)),
        }
    }
    bus.gpus.sort_by_key(|gpu| gpu.pci);
    let mut reading = bus.to_reading();
    reading.merge(SourceReading { devices: listed, ..SourceReading::default() });
    if reading.devices.is_empty() {
        reading.warn("there is no GPU on the bus");
    }
    Ok(reading)
}

/// Returns the folder that contains `proc` and `sys`: this one or the only one in it.
fn base_folder(root: &Path) -> Option<PathBuf> {
    let holds =
        |folder: &Path| folder.join("proc/driver/nvidia/gpus").is_dir() || folder.join("sys/bus/pci/devices").is_dir();
    if holds(root) {
        return Some(root.to_owned());
    }
    kernel_file::only_subfolder(root).filter(|only| holds(only))
}

// The PCI bus in sysfs. No read wakes a sleeping device.

/// A GPU on the bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PciGpu {
    pub pci: PciAddress,
    /// Vendor; [`Vendor::Other`] also if unknown.
    pub vendor: Vendor,
    /// PCI vendor id.
    pub vendor_id: Option<u16>,
    /// PCI device id.
    pub device_id: Option<u16>,
    /// Driver bound to the GPU (`nvidia`, `nouveau`, `vfio-pci`, `amdgpu`).
    pub driver: Option<Arc<str>>,
    /// Nearest NUMA node.
    pub numa: Option<u32>,
    /// Whether the GPU is suspended to save power.
    pub asleep: bool,
    pub(crate) bus_path: Vec<BusPathNode>,
}

impl PciGpu {
    /// Whether this driver is bound to the GPU.
    pub(crate) fn is_bound_to(&self, driver: &str) -> bool {
        self.driver.as_deref() == Some(driver)
    }

    /// Returns vendor and device id: `10de:2330`.
    pub(crate) fn ids(&self) -> String {
        let id = |id: Option<u16>| id.map_or_else(|| "????".to_owned(), |id| format!("{id:04x}"));
        format!("{}:{}", id(self.vendor_id), id(self.device_id))
    }
}

/// The GPUs on the bus of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PciBus {
    /// GPUs in the order of their addresses.
    pub gpus: Vec<PciGpu>,
    /// Read errors, for people.
    pub warnings: Vec<String>,
}

/// Lists every GPU and every other display adapter on the bus; `sys` is the mount point of sysfs.
pub(crate) fn scan(sys: &Path) -> Reported<PciBus> {
    let entries = match fs::read_dir(sys.join("bus/pci/devices")) {
        Ok(entries) => entries,
        Err(error) => return kernel_file::from_io_error(&error),
    };
    let mut bus = PciBus::default();
    for entry in entries.flatten() {
        let Some(pci) = entry.file_name().to_str().and_then(parse_pci_address) else { continue };
        let device = PciDeviceFolder { sys, pci, folder: entry.path() };
        let Some(class) = device.number::<u32>("class") else { continue };
        let vendor = device.number("vendor").and_then(vendor_of_id).unwrap_or(Vendor::Other);
        if !is_gpu(vendor, (class >> 8) as u16) {
            continue;
        }
        if bus.gpus.len() >= limits::DEVICES {
            bus.warnings.push(format!("more than {} GPUs; the rest is left out", limits::DEVICES));
            break;
        }
        bus.gpus.push(device.gpu(vendor));
    }
    bus.gpus.sort_by_key(|gpu| gpu.pci);
    Reported::Value(bus)
}

/// Whether the device in this folder of sysfs is suspended or about to be.
pub(crate) fn is_asleep(folder: &Path) -> bool {
    let status = kernel_file::read_text(&folder.join("power/runtime_status"));
    status.value().is_some_and(|status| status.starts_with("suspend"))
}

/// Returns the driver of the device in this folder of sysfs, from its link, or from `uevent` if a copy lost the link.
pub(crate) fn driver_of(folder: &Path) -> Option<Arc<str>> {
    let link = fs::read_link(folder.join("driver")).ok();
    let linked = link.as_deref().and_then(Path::file_name).and_then(OsStr::to_str).map(Into::into);
    linked.or_else(|| {
        let uevent = kernel_file::read_text(&folder.join("uevent"));
        uevent.value()?.lines().find_map(|line| line.strip_prefix("DRIVER=")).map(|name| name.trim().into())
    })
}

/// Returns the GPU that a driver reports at `pci`, with the facts from the bus.
fn gpu_at(sys: &Path, pci: PciAddress, vendor: Vendor) -> PciGpu {
    PciDeviceFolder { sys, pci, folder: sys.join("bus/pci/devices").join(pci.to_string()) }.gpu(vendor)
}

impl PciBus {
    /// Returns the GPUs of known vendors as devices with their links.
    pub(crate) fn to_reading(&self) -> SourceReading {
        let mut reading = SourceReading { warnings: self.warnings.clone(), ..SourceReading::default() };
        let mut bus_paths = Vec::new();
        for gpu in self.gpus.iter().filter(|gpu| gpu.vendor != Vendor::Other) {
            let mut device = DetectedDevice::new(gpu.vendor);
            device.pci = Some(gpu.pci);
            device.numa = gpu.numa;
            device.asleep = gpu.asleep;
            if push_listed_gpu(&mut reading, device).is_some() {
                bus_paths.push(gpu.bus_path.clone());
            }
        }
        // A copied tree without symbolic links has no bus paths, so links are unknown.
        if bus_paths.iter().flatten().any(|stop| !matches!(stop, BusPathNode::Numa(_))) {
            reading.links = links_of_paths(&bus_paths);
        }
        reading
    }
}

/// A device's folder in sysfs.
struct PciDeviceFolder<'a> {
    sys: &'a Path,
    pci: PciAddress,
    folder: PathBuf,
}

impl PciDeviceFolder<'_> {
    fn gpu(&self, vendor: Vendor) -> PciGpu {
        let numa = self.numa();
        PciGpu {
            pci: self.pci,
            vendor,
            vendor_id: self.number("vendor"),
            device_id: self.number("device"),
            driver: driver_of(&self.folder),
            numa,
            asleep: is_asleep(&self.folder),
            bus_path: self.bus_path(numa),
        }
    }

    fn number<T: FromStr + TryFrom<u64> + Copy>(&self, file: &str) -> Option<T> {
        kernel_file::read_number(&self.folder.join(file)).value().copied()
    }

    /// Returns the NUMA node from the kernel, or the node whose processors are local to the device.
    fn numa(&self) -> Option<u32> {
        if let Some(&node) = kernel_file::read_number::<i64>(&self.folder.join("numa_node")).value() {
            return node.try_into().ok();
        }
        let near = cpu_mask(&self.folder.join("local_cpus"))?;
        let nodes = self.sys.join("devices/system/node");
        let is_near = |number: &u32| cpu_mask(&nodes.join(format!("node{number}/cpumap"))).as_ref() == Some(&near);
        kernel_file::numbered_entries(&nodes, "node").ok()?.into_iter().find(is_near)
    }

    /// Returns the bridges above the device, from its real path: `devices/pci0000:00/0000:00:03.0/0000:02:00.0`.
    fn bus_path(&self, numa: Option<u32>) -> Vec<BusPathNode> {
        let mut bus_path: Vec<BusPathNode> = numa.map(BusPathNode::Numa).into_iter().collect();
        let target = fs::read_link(&self.folder).unwrap_or_default();
        let folders = target.components().filter_map(|part| match part {
            Component::Normal(name) => name.to_str(),
            _ => None,
        });
        for folder in folders {
            let host = folder.strip_prefix("pci").and_then(|bus| parse_pci_address(&format!("{bus}:00")));
            match (host, parse_pci_address(folder)) {
                (Some(host), _) => bus_path.push(BusPathNode::HostBridge(host)),
                (None, Some(bridge)) if bridge != self.pci => bus_path.push(BusPathNode::Bridge(bridge)),
                _ => {}
            }
        }
        bus_path
    }
}

/// Reads a processor mask, without commas and leading zeros.
fn cpu_mask(path: &Path) -> Option<String> {
    let digits = kernel_file::read_text(path).into_value()?.replace(',', "").to_ascii_lowercase();
    Some(digits.trim_start_matches('0').to_owned()).filter(|mask| !mask.is_empty())
}

// Distance between devices, from the point where their paths on the bus diverge.

/// Node on the path from the processor to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BusPathNode {
    Numa(u32),
    /// PCI host bridge, by the first address on its bus.
    HostBridge(PciAddress),
    /// PCI bridge: a switch or one of its ports.
    Bridge(PciAddress),
}

/// Returns the link of each pair of devices.
fn links_of_paths(bus_paths: &[Vec<BusPathNode>]) -> Vec<DetectedLink> {
    let pairs = bus_paths.iter().enumerate().flat_map(|(a, bus_path)| {
        let others = bus_paths.iter().enumerate().skip(a + 1);
        others.map(move |(b, other)| DetectedLink { a, b, kind: link_between(bus_path, other) })
    });
    pairs.collect()
}

/// Returns the link of two bus paths. The kernel lists a switch as the bridge of its upstream port with the bridges of
/// its downstream ports below, so paths that differ only in the last node are in one switch.
fn link_between(one: &[BusPathNode], other: &[BusPathNode]) -> LinkKind {
    let shared = one.iter().zip(other).take_while(|(a, b)| a == b).count();
    let apart = one.len().max(other.len()).saturating_sub(shared);
    match shared.checked_sub(1).and_then(|last| one.get(last)) {
        Some(BusPathNode::Bridge(_)) if apart <= 1 => LinkKind::PcieSwitch,
        Some(BusPathNode::Bridge(_)) => LinkKind::PcieSwitches,
        Some(BusPathNode::HostBridge(_)) => LinkKind::HostBridge,
        Some(BusPathNode::Numa(_)) => LinkKind::SameNuma,
        None => LinkKind::CrossNuma,
    }
}

// Facts from NVIDIA's kernel driver in procfs, without its library.

/// Reads the GPUs under `driver/nvidia/gpus` of procfs, in the order of their addresses.
fn nvidia_gpus(proc: &Path) -> Vec<DetectedDevice> {
    let folders = fs::read_dir(proc.join("driver/nvidia/gpus")).into_iter().flatten().flatten();
    let listed =
        folders.filter_map(|entry| Some((entry.file_name().to_str().and_then(parse_pci_address)?, entry.path())));
    let mut listed: Vec<_> = listed.take(limits::DEVICES).collect();
    listed.sort();
    let version = nvidia_driver_version(proc);
    let gpu = |(pci, folder): (PciAddress, PathBuf)| {
        let mut device = DetectedDevice::new(Vendor::Nvidia);
        device.pci = Some(pci);
        device.driver = version.value().map(|version| version.as_str().into());
        let text = |file: &str| kernel_file::read_text(&folder.join(file)).value().cloned().unwrap_or_default();
        parse_information(&mut device, &text("information"));
        parse_memory(&mut device, &text("numa_status"));
        device.asleep = field(&text("power"), "Video Memory") == Some("Off");
        device
    };
    listed.into_iter().map(gpu).collect()
}

/// Reads the version of the loaded driver from `driver/nvidia/version` of procfs.
pub(crate) fn nvidia_driver_version(proc: &Path) -> Reported<String> {
    kernel_file::read_text(&proc.join("driver/nvidia/version")).and_then(|text| {
        let version = version_in(text.lines().next().unwrap_or_default());
        version.map_or_else(|| Reported::Failed(truncate_text(&text)), |version| Reported::Value(version.to_owned()))
    })
}

/// Returns the version in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 …`.
pub(crate) fn version_in(line: &str) -> Option<&str> {
    let (_, after) = line.split_once("Kernel Module")?;
    let is_version = |word: &&str| {
        word.contains('.') && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    after.split_whitespace().find(is_version)
}

/// Reads model, UUID and minor number. A GPU that the driver has not started yet has question marks as UUID.
fn parse_information(device: &mut DetectedDevice, text: &str) {
    let shared = |text: &str| truncate_text(text).into();
    device.name = field(text, "Model").filter(|model| *model != "Unknown").map(shared);
    device.uuid = field(text, "GPU UUID").filter(|uuid| uuid.starts_with("GPU-") && !uuid.contains('?')).map(shared);
    device.minor = field(text, "Device Minor").and_then(|minor| minor.parse().ok());
    device.pci = field(text, "Bus Location").and_then(parse_pci_address).or(device.pci);
    if field(text, "GPU Excluded") == Some("Yes") {
        device.health = Some(DeviceHealth::Unhealthy("excluded from use by a driver setting".into()));
    }
}

/// Reads the memory size in hexadecimal bytes, which the driver reports if the processor can address the GPU's memory.
fn parse_memory(device: &mut DetectedDevice, text: &str) {
    if let Some(size) = field(text, "Size").filter(|size| !size.is_empty()) {
        let digits = size.trim_start_matches("0x");
        let bytes = u64::from_str_radix(digits, 16).ok().filter(|&bytes| bytes > 0);
        device.memory.total =
            bytes.map_or_else(|| Reported::Failed(truncate_text(size)), |bytes| Reported::Value(Bytes(bytes)));
    }
}

/// Returns the value of a line `Key:   value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.trim_start().strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    use BusPathNode::Numa;

    /// Returns the host bridge of a bus.
    fn host(bus: u8) -> BusPathNode {
        BusPathNode::HostBridge(parse_pci_address(&format!("{bus:02x}:00.0")).unwrap())
    }

    /// Returns a bridge on a bus.
    fn bridge(bus: u8) -> BusPathNode {
        BusPathNode::Bridge(parse_pci_address(&format!("{bus:02x}:00.0")).unwrap())
    }

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_copied_machine_lists_gpus_of_the_driver_and_of_the_bus() {
        let root = tempfile::tempdir().unwrap();
        let file = |path: &str, text: &str| write(root.path(), &format!("copy/{path}"), text);
        let gpu = |place: &str, name: &str, text: &str| file(&format!("proc/driver/nvidia/gpus/{place}/{name}"), text);
        file(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19\nGCC version: 12.3.0\n",
        );
        gpu(
            "0000:07:00.0",
            "information",
            "Model: \t\t NVIDIA A100\nGPU UUID: \t GPU-abc\nBus Location: \t 0000:07:00.0\nDevice Minor: \t 3\nGPU Excluded:\t Yes\n",
        );
        gpu("0000:07:00.0", "power", "Runtime D3 status:          Enabled\nVideo Memory:               Off\n");
        gpu("0000:08:00.0", "information", "Model: Unknown\nGPU UUID: GPU-????????-????-????-????-????????????\n");
        gpu(
            "0000:08:00.0",
            "numa_status",
            "Node:      255\nStatus:    online\nAddress:   40000000000\nSize:      3f0000000\n",
        );
        file("sys/bus/pci/devices/0000:08:00.0/local_cpus", "0000,000000F0\n");
        file("sys/devices/system/node/node3/cpumap", "000000f0\n");
        file("sys/devices/system/node/node4/cpumap", "00000000\n");
        file("sys/bus/pci/devices/0000:0b:00.0/class", "0x030200\n");
        file("sys/bus/pci/devices/0000:0b:00.0/vendor", "0x10de\n");
        assert!(looks_like(root.path()));
        let reading = read(root.path()).unwrap();
        let [first, second, unlisted] = reading.devices.as_slice() else { panic!("{:?}", reading.devices) };
        assert_eq!(
            (first.name.as_deref(), first.uuid.as_deref(), first.minor),
            (Some("NVIDIA A100"), Some("GPU-abc"), Some(3))
        );
        assert_eq!(first.driver.as_deref(), Some("535.129.03"));
        assert!(first.asleep && matches!(first.health, Some(DeviceHealth::Unhealthy(_))));
        assert_eq!((&second.name, &second.uuid, second.numa), (&None, &None, Some(3)));
        assert_eq!(second.memory.total, Reported::Value(Bytes(0x3_f000_0000)));
        assert_eq!((unlisted.pci, unlisted.driver.as_deref()), (parse_pci_address("0000:0b:00.0"), None));
    }

    #[test]
    fn a_folder_without_a_bus_is_absent() {
        let root = tempfile::tempdir().unwrap();
        assert!(!looks_like(root.path()));
        assert_eq!(read(root.path()).unwrap_err().code(), "not_here");
    }

    /// Creates a bus of devices: the folder of each below `devices`, and its files.
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
        assert_eq!(bus.to_reading().devices.len(), 3, "only those whose maker is known can be shared");
        let kinds: Vec<_> = bus.to_reading().links.iter().map(|link| link.kind).collect();
        assert_eq!(kinds, [LinkKind::PcieSwitch, LinkKind::CrossNuma, LinkKind::CrossNuma]);
    }

    #[test]
    fn an_absent_bus_differs_from_an_empty_one() {
        assert!(scan(Path::new("/nowhere")).is_absent());
        assert_eq!(scan(bus_of(&[]).path()), Reported::Value(PciBus::default()));
    }

    #[test]
    fn the_last_shared_node_of_two_paths_is_their_distance() {
        let bus_path = [Numa(0), host(1), bridge(2), bridge(3)];
        let with = |other: &[BusPathNode]| link_between(&bus_path, other);
        assert_eq!(with(&[Numa(0), host(1), bridge(2), bridge(4)]), LinkKind::PcieSwitch);
        assert_eq!(with(&[Numa(0), host(1), bridge(2), bridge(4), bridge(5)]), LinkKind::PcieSwitches);
        assert_eq!(with(&[Numa(0), host(1), bridge(9)]), LinkKind::HostBridge);
        assert_eq!(with(&[Numa(0), host(7), bridge(2)]), LinkKind::SameNuma);
        assert_eq!(with(&[Numa(1), host(1)]), LinkKind::CrossNuma);
        assert_eq!(with(&[]), LinkKind::CrossNuma);
    }

    #[test]
    fn the_version_of_either_kernel_module_is_found() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024";
        let open =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (root@b)\nGCC 12.3.0";
        assert_eq!(version_in(closed), Some("535.183.01"));
        assert_eq!(version_in(open), Some("570.86.15"));
        assert_eq!(version_in("GCC version: 12.3.0"), None);
    }
}

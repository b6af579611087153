//! A copy of a machine's `/proc` and `/sys`, read for the GPUs on its bus.

use std::fs;
use std::path::{Path, PathBuf};

use gpupool_core::device::Vendor;

use crate::pci_bus::{PciBus, nvidia_proc, scan};
use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::told::Told;

/// Whether a folder, or the only folder in it, holds a bus or what NVIDIA's driver tells in procfs.
pub fn looks_like(root: &Path) -> bool {
    base(root).is_some()
}

/// The GPUs of a copied machine: those NVIDIA's driver lists, and those that only the bus knows.
pub fn read(root: &Path) -> Result<Snapshot, SourceError> {
    let Some(base) = base(root) else {
        let why = "no proc/driver/nvidia/gpus and no sys/bus/pci/devices in it".to_owned();
        return Err(SourceError::NotHere { what: root.display().to_string().into(), why });
    };
    let sys = base.join("sys");
    let listed = nvidia_proc::gpus(&base.join("proc"));
    let mut bus = match scan::scan(&sys) {
        Told::Value(bus) => bus,
        Told::Unsupported(_) => PciBus::default(),
        Told::Failed(words) => PciBus { warnings: vec![format!("the PCI bus: {words}")], ..PciBus::default() },
    };
    // A tree that was cut down may lack the vendor by which the bus knows a GPU; the driver knows better.
    for pci in listed.iter().filter_map(|device| device.pci) {
        match bus.gpus.iter_mut().find(|gpu| gpu.pci == pci) {
            Some(gpu) => gpu.vendor = Vendor::Nvidia,
            None => bus.gpus.push(scan::at(&sys, pci, Vendor::Nvidia)),
        }
    }
    bus.gpus.sort_by_key(|gpu| gpu.pci);
    let mut snapshot = bus.snapshot();
    snapshot.merge(Snapshot { devices: listed, ..Snapshot::default() });
    if snapshot.devices.is_empty() {
        snapshot.warn("there is no GPU on the bus");
    }
    Ok(snapshot)
}

/// The folder with `proc` and `sys` in it: this one or the only one in it.
fn base(root: &Path) -> Option<PathBuf> {
    let holds =
        |folder: &Path| folder.join("proc/driver/nvidia/gpus").is_dir() || folder.join("sys/bus/pci/devices").is_dir();
    if holds(root) {
        return Some(root.to_owned());
    }
    let mut folders = fs::read_dir(root).ok()?.flatten().map(|entry| entry.path()).filter(|path| path.is_dir());
    let only = folders.next().filter(|_| folders.next().is_none())?;
    holds(&only).then_some(only)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address;
    use gpupool_core::device::Health;
    use gpupool_core::units::Bytes;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_copied_machine_tells_its_gpus_by_driver_and_by_bus() {
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
        let snapshot = read(root.path()).unwrap();
        let [first, second, unlisted] = snapshot.devices.as_slice() else { panic!("{:?}", snapshot.devices) };
        assert_eq!(
            (first.name.as_deref(), first.uuid.as_deref(), first.minor),
            (Some("NVIDIA A100"), Some("GPU-abc"), Some(3))
        );
        assert_eq!(first.driver.as_deref(), Some("535.129.03"));
        assert!(first.asleep && matches!(first.health, Some(Health::Unhealthy(_))));
        assert_eq!((&second.name, &second.uuid, second.numa), (&None, &None, Some(3)));
        assert_eq!(second.memory.total, Told::Value(Bytes(0x3_f000_0000)));
        assert_eq!((unlisted.pci, unlisted.driver.as_deref()), (address::parse("0000:0b:00.0"), None));
    }

    #[test]
    fn a_folder_without_a_bus_is_not_here() {
        let root = tempfile::tempdir().unwrap();
        assert!(!looks_like(root.path()));
        assert_eq!(read(root.path()).unwrap_err().code(), "not_here");
    }
}

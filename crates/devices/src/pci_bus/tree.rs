//! A copy of a machine's `/proc` and `/sys`, read for the GPUs on its bus.

use std::fs;
use std::path::{Path, PathBuf};

use gpupool_core::device::Vendor;

use crate::pci_bus::{PciBus, nvidia_proc, scan};
use crate::snapshot::Snapshot;
use crate::source::SourceError;

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
    let mut bus = if sys.join("bus/pci/devices").is_dir() { scan::scan(&sys) } else { PciBus::default() };
    // A tree that was cut down may lack the vendor by which the bus knows a GPU; the driver knows better.
    for pci in listed.iter().filter_map(|device| device.pci) {
        if bus.gpus.iter().all(|gpu| gpu.pci != pci) {
            bus.gpus.push(scan::at(&sys, pci, Vendor::Nvidia));
        }
    }
    bus.gpus.sort_by_key(|gpu| gpu.pci);
    let mut snapshot = bus.snapshot();
    snapshot.merge(Snapshot { devices: listed, ..Snapshot::default() });
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

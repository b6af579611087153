//! The GPUs on the PCI bus, whether or not a driver knows them.
//!
//! A GPU that fell silent is still on the bus, and one that fell off it is missing there too: comparing the bus with
//! what a driver lists finds devices that vanished without a word.

use gpupool_core::device::Vendor;

use crate::found::Found;
use crate::snapshot::Snapshot;

pub mod lspci;
pub(crate) mod nvidia_proc;
mod scan;
pub mod tree;

pub use scan::PciGpu;
pub(crate) use scan::{PciBus, is_asleep, scan};

/// The maker behind a PCI vendor number, where it makes GPUs.
pub(crate) const fn maker(vendor: u16) -> Option<Vendor> {
    match vendor {
        0x10de => Some(Vendor::Nvidia),
        0x1002 => Some(Vendor::Amd),
        0x8086 => Some(Vendor::Intel),
        _ => None,
    }
}

/// Whether a PCI class (base and sub class: `0x0302`) may be that of a GPU.
pub(crate) const fn is_gpu_class(class: u16) -> bool {
    matches!(class, 0x0300 | 0x0301 | 0x0302 | 0x0380 | 0x1200)
}

/// Whether a device of this maker and PCI class is a GPU. Processing accelerators of others than NVIDIA and AMD are not.
pub(crate) const fn is_gpu(maker: Vendor, class: u16) -> bool {
    is_gpu_class(class) && (matches!(maker, Vendor::Nvidia | Vendor::Amd) || class != 0x1200)
}

/// Adds a GPU that some listing names and says at which place; one that cannot be handed out is a warning instead.
pub(crate) fn list(snapshot: &mut Snapshot, device: Found) -> Option<usize> {
    if device.vendor == Vendor::Intel {
        let place = device.pci.map(|pci| pci.to_string()).unwrap_or_default();
        snapshot.warn(format!("Intel GPUs are not supported yet: {place}"));
        return None;
    }
    snapshot.push(device)
}

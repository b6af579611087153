//! The GPUs on the PCI bus, whether or not a driver knows them.

use std::path::Path;

use gpupool_core::device::{PciAddress, Vendor};

use crate::doctor::evidence::names_in;
use crate::told::Told;
use crate::{address, kernel_file, limits};

/// A display adapter or accelerator on the PCI bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PciGpu {
    /// Its place.
    pub address: PciAddress,
    /// Who made it.
    pub vendor: Vendor,
    /// The number of its vendor.
    pub vendor_id: u32,
    /// The number its vendor gave it.
    pub device_id: u32,
    /// What kind of device it is: `0x030000` is a display adapter.
    pub class: u32,
    /// The driver bound to it, where one is.
    pub driver: Option<String>,
    /// Whether it is `active` or `suspended`.
    pub runtime_status: Told<String>,
}

impl PciGpu {
    /// Whether it sleeps to save power.
    pub fn is_asleep(&self) -> bool {
        self.runtime_status.value().is_some_and(|status| status.starts_with("suspend"))
    }

    /// Whether this driver is bound to it.
    pub fn is_bound_to(&self, driver: &str) -> bool {
        self.driver.as_deref() == Some(driver)
    }
}

/// The GPUs of the bus, in the order of their addresses.
pub(crate) fn gpus(sys: &Path) -> Told<Vec<PciGpu>> {
    let devices = sys.join("bus/pci/devices");
    match names_in(&devices) {
        Ok(names) => {
            let gpu = |name: &String| gpu(&devices.join(name), address::parse(name)?);
            let mut gpus: Vec<PciGpu> = names.iter().filter_map(gpu).take(limits::DEVICES).collect();
            gpus.sort_by_key(|gpu| gpu.address);
            Told::Value(gpus)
        }
        Err(error) => kernel_file::missing(&error),
    }
}

fn gpu(folder: &Path, address: PciAddress) -> Option<PciGpu> {
    let number = |file: &str| kernel_file::number::<u32>(&folder.join(file)).value().copied();
    let class = number("class")?;
    let vendor_id = number("vendor").unwrap_or(0);
    let vendor = vendor(vendor_id);
    if !is_gpu(class, vendor) {
        return None;
    }
    Some(PciGpu {
        address,
        vendor,
        vendor_id,
        device_id: number("device").unwrap_or(0),
        class,
        driver: driver(folder),
        runtime_status: kernel_file::text(&folder.join("power/runtime_status")),
    })
}

/// Display adapters of any maker; processing accelerators (AMD Instinct) only of those who make GPUs.
fn is_gpu(class: u32, vendor: Vendor) -> bool {
    const DISPLAY: u32 = 0x03;
    const ACCELERATOR: u32 = 0x12;
    match class >> 16 {
        DISPLAY => true,
        ACCELERATOR => vendor != Vendor::Other,
        _ => false,
    }
}

pub(super) const fn vendor(id: u32) -> Vendor {
    match id {
        0x10de => Vendor::Nvidia,
        0x1002 => Vendor::Amd,
        0x8086 => Vendor::Intel,
        _ => Vendor::Other,
    }
}

/// The bound driver: where the link points, or what `uevent` says in a copied tree that has no links.
fn driver(folder: &Path) -> Option<String> {
    if let Ok(target) = std::fs::read_link(folder.join("driver")) {
        return Some(target.file_name()?.to_str()?.to_owned());
    }
    let uevent = kernel_file::text(&folder.join("uevent"));
    uevent.value()?.lines().find_map(|line| line.strip_prefix("DRIVER=")).map(str::to_owned)
}

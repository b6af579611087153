//! Whether all NVIDIA devices sleep to save power. Opening the library would wake them, and keep them awake.

use std::path::Path;

use gpupool_core::device::{PciAddress, Vendor};

use crate::found::Found;
use crate::snapshot::Snapshot;
use crate::{address, kernel_file};

const NVIDIA: u32 = 0x10de;
/// VGA controllers and 3D controllers.
const DISPLAY_CLASSES: [u32; 2] = [0x0300, 0x0302];

/// The devices by their places on the bus, where there are any and all of them sleep.
pub(super) fn devices(sys: &Path) -> Option<Snapshot> {
    let mut places = Vec::new();
    for entry in std::fs::read_dir(sys.join("bus/pci/devices")).ok()?.flatten() {
        let folder = entry.path();
        let Some(place) = gpu(&folder) else { continue };
        if kernel_file::text(&folder.join("power/runtime_status")).value().map(String::as_str) != Some("suspended") {
            return None;
        }
        places.push(place);
    }
    places.sort_unstable();
    let device = |pci| Found { pci: Some(pci), asleep: true, ..Found::new(Vendor::Nvidia) };
    let devices: Vec<Found> = places.into_iter().map(device).collect();
    (!devices.is_empty()).then(|| Snapshot { devices, ..Snapshot::default() })
}

/// The place of a GPU of NVIDIA's; other functions of the card (sound, USB) are none.
fn gpu(folder: &Path) -> Option<PciAddress> {
    let number = |name: &str| kernel_file::number::<u32>(&folder.join(name)).value().copied();
    let is_gpu = number("vendor")? == NVIDIA && DISPLAY_CLASSES.contains(&(number("class")? >> 8));
    if is_gpu { address::parse(folder.file_name()?.to_str()?) } else { None }
}

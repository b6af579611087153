//! Which graphics cards the kernel has: the entries `cardN` of `class/drm`, and what their bus knows of them.
//!
//! Everything here is kept by the kernel's PCI code and does not wake a sleeping card.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpupool_core::{PciAddress, Vendor};

use crate::address::parse_pci_address;
use crate::detected_device::DetectedDevice;
use crate::{kernel_file, limits, pci_bus};

/// A graphics card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Card {
    /// The number in `cardN`; not a number of a GPU.
    pub number: Option<u32>,
    /// The folder of the device itself.
    pub device: PathBuf,
    pub vendor: Option<Vendor>,
    /// PCI ids.
    pub device_id: Option<u16>,
    pub revision: Option<u8>,
    pub driver: Option<Arc<str>>,
    pub pci: Option<PciAddress>,
    /// The minor number of its `renderD…` node.
    pub render_minor: Option<u32>,
    pub numa: Option<u32>,
}

/// The cards in a folder like `class/drm`, by their numbers; where only render nodes were kept, the cards of these.
pub(crate) fn cards(folder: &Path) -> io::Result<Vec<Card>> {
    let entry = |name: String, number| Card::at(&folder.join(name), number);
    let numbers = card_numbers(folder)?;
    if !numbers.is_empty() {
        return Ok(numbers.into_iter().map(|number| entry(format!("card{number}"), Some(number))).collect());
    }
    let of_node = |minor| Card { render_minor: Some(minor), ..entry(format!("renderD{minor}"), None) };
    Ok(kernel_file::numbered_entries(folder, "renderD")?.into_iter().take(limits::DEVICES).map(of_node).collect())
}

/// The numbers of the entries `cardN` of a folder, in order; connectors such as `card1-DP-1` are none.
pub(crate) fn card_numbers(folder: &Path) -> io::Result<Vec<u32>> {
    let mut numbers = kernel_file::numbered_entries(folder, "card")?;
    numbers.truncate(limits::DEVICES);
    Ok(numbers)
}

impl Card {
    /// The card whose entry is `folder`.
    pub(super) fn at(folder: &Path, number: Option<u32>) -> Self {
        Self::of_device(folder.join("device"), number)
    }

    /// The card whose device has this folder.
    pub(super) fn of_device(device: PathBuf, number: Option<u32>) -> Self {
        let uevent = Uevent::read(&device.join("uevent"));
        let target = fs::read_link(&device).ok();
        let target_name = target.as_deref().and_then(|target| target.file_name()?.to_str());
        let hex = |file: &str| kernel_file::read_number::<u16>(&device.join(file)).value().copied();
        let vendor_id = hex("vendor").or(uevent.ids.map(|(vendor, _)| vendor));
        let device_id = hex("device").or(uevent.ids.map(|(_, device)| device));
        // A partition of a card is a device of its own without a place on the bus.
        let is_partition = uevent.is_partition || target_name.is_some_and(|name| name.starts_with(XCP));
        Self {
            number,
            vendor: if is_partition {
                Some(Vendor::Amd)
            } else {
                vendor_id.map(|id| pci_bus::maker(id).unwrap_or(Vendor::Other))
            },
            device_id,
            revision: hex("revision").and_then(|revision| revision.try_into().ok()),
            driver: pci_bus::driver_of(&device),
            pci: uevent.slot.or_else(|| parse_pci_address(target_name.filter(|name| name.contains(':'))?)),
            render_minor: kernel_file::numbered_entries(&device.join("drm"), "renderD")
                .ok()
                .and_then(|minors| minors.first().copied()),
            numa: kernel_file::read_number(&device.join("numa_node")).value().copied(),
            device,
        }
    }

    /// The device, with what its bus knows: where it is, and nothing of how it is.
    pub(super) fn found(&self) -> DetectedDevice {
        DetectedDevice {
            minor: self.render_minor,
            pci: self.pci,
            driver: self.driver.clone(),
            numa: self.numa,
            ..DetectedDevice::new(self.vendor.unwrap_or(Vendor::Other))
        }
    }

    /// How people find it: its address, or its entry where it has none.
    pub(super) fn spelled(&self) -> String {
        match (self.pci, self.number) {
            (Some(pci), _) => pci.to_string(),
            (None, Some(number)) => format!("card{number}"),
            (None, None) => "the card".to_owned(),
        }
    }
}

/// How the devices of partitions are named by their driver.
const XCP: &str = "amdgpu_xcp";

/// What the event file of a PCI device says.
#[derive(Debug, Default)]
struct Uevent {
    ids: Option<(u16, u16)>,
    slot: Option<PciAddress>,
    /// Set for a partition of a card.
    is_partition: bool,
}

impl Uevent {
    fn read(path: &Path) -> Self {
        let text = kernel_file::read_text(path);
        let text = text.value().map_or("", String::as_str);
        let find = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        let ids = |ids: &str| {
            let (vendor, device) = ids.trim().split_once(':')?;
            Some((u16::from_str_radix(vendor, 16).ok()?, u16::from_str_radix(device, 16).ok()?))
        };
        Self {
            ids: find("PCI_ID").and_then(ids),
            slot: find("PCI_SLOT_NAME").and_then(parse_pci_address),
            is_partition: find("MODALIAS").is_some_and(|alias| alias.trim_start_matches("platform:").starts_with(XCP)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amd_sysfs::tests::Tree;

    #[test]
    fn connectors_and_render_nodes_are_no_cards() {
        let tree = Tree::new();
        for entry in ["card2", "card10", "card2-DP-1", "card2-HDMI-A-1", "renderD128", "version", "cardinal"] {
            tree.folder(&format!("class/drm/{entry}"));
        }
        assert_eq!(card_numbers(&tree.path("class/drm")).unwrap(), [2, 10]);
    }

    #[test]
    fn render_nodes_stand_for_cards_where_there_are_no_others() {
        let tree = Tree::new();
        for (minor, slot) in [(129, "0000:0a:00.0"), (128, "0000:03:00.0")] {
            let event = format!("DRIVER=amdgpu\nPCI_ID=1002:744C\nPCI_SLOT_NAME={slot}\n");
            tree.file(&format!("class/drm/renderD{minor}/device/uevent"), event);
        }
        let found = cards(&tree.path("class/drm")).unwrap();
        let seen: Vec<_> = found.iter().map(|card| (card.render_minor, card.spelled())).collect();
        assert_eq!(seen, [(Some(128), "0000:03:00.0".to_owned()), (Some(129), "0000:0a:00.0".to_owned())]);
    }

    #[test]
    fn a_card_is_known_by_its_files_or_by_its_event_file_alone() {
        let tree = Tree::new();
        tree.amd_card(1, "0000:0b:00.0", 0x73bf);
        let by_files = &cards(&tree.path("class/drm")).unwrap()[0];
        assert_eq!((by_files.vendor, by_files.device_id), (Some(Vendor::Amd), Some(0x73bf)));
        assert_eq!((by_files.render_minor, by_files.numa), (Some(129), None));

        for file in ["vendor", "device", "numa_node"] {
            tree.remove(&format!("class/drm/card1/device/{file}"));
        }
        let by_event = &cards(&tree.path("class/drm")).unwrap()[0];
        assert_eq!((by_event.vendor, by_event.device_id), (Some(Vendor::Amd), Some(0x73bf)));
        assert_eq!(by_event.driver.as_deref(), Some("amdgpu"));
        assert_eq!(by_event.spelled(), "0000:0b:00.0");
    }

    #[test]
    fn links_tell_what_files_do_not() {
        let tree = Tree::new();
        tree.file("devices/pci0000:00/0000:00:03.1/0000:2f:00.0/vendor", "0x1002");
        tree.link("devices/pci0000:00/0000:00:03.1/0000:2f:00.0/driver", "../../../../bus/pci/drivers/amdgpu");
        tree.link("class/drm/card0/device", "../../../devices/pci0000:00/0000:00:03.1/0000:2f:00.0");
        let card = &cards(&tree.path("class/drm")).unwrap()[0];
        assert_eq!(card.spelled(), "0000:2f:00.0");
        assert_eq!(card.driver.as_deref(), Some("amdgpu"));
    }

    #[test]
    fn a_partition_is_a_card_of_amd_without_an_address() {
        let tree = Tree::new();
        tree.file("devices/platform/amdgpu_xcp_3/uevent", "");
        tree.link("class/drm/card7/device", "../../../devices/platform/amdgpu_xcp_3");
        tree.file("class/drm/card8/device/uevent", "MODALIAS=platform:amdgpu_xcp_4\n");
        for card in &cards(&tree.path("class/drm")).unwrap() {
            assert_eq!((card.vendor, card.pci), (Some(Vendor::Amd), None));
            assert!(["card7", "card8"].contains(&card.spelled().as_str()));
        }
    }
}

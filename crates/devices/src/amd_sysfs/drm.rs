//! Graphics cards of the kernel: the entries `cardN` of `class/drm` and their bus facts.
//!
//! The kernel's PCI code serves all these files, so reading them does not wake a sleeping card.

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
pub(crate) struct DrmCard {
    /// Number in `cardN`; not the number of a GPU.
    pub number: Option<u32>,
    /// Folder of the device.
    pub device: PathBuf,
    pub vendor: Option<Vendor>,
    /// PCI device id.
    pub device_id: Option<u16>,
    pub revision: Option<u8>,
    pub driver: Option<Arc<str>>,
    pub pci: Option<PciAddress>,
    /// Minor number of the `renderD…` node.
    pub render_minor: Option<u32>,
    pub numa: Option<u32>,
}

/// Lists the cards in a folder like `class/drm`, by number; without any, the cards of its render nodes.
pub(crate) fn cards(folder: &Path) -> io::Result<Vec<DrmCard>> {
    let entry = |name: String, number| DrmCard::from_entry(&folder.join(name), number);
    let numbers = card_numbers(folder)?;
    if !numbers.is_empty() {
        return Ok(numbers.into_iter().map(|number| entry(format!("card{number}"), Some(number))).collect());
    }
    let of_node = |minor| DrmCard { render_minor: Some(minor), ..entry(format!("renderD{minor}"), None) };
    Ok(kernel_file::numbered_entries(folder, "renderD")?.into_iter().take(limits::DEVICES).map(of_node).collect())
}

/// Lists the numbers of the entries `cardN` in a folder, in order; connectors such as `card1-DP-1` do not count.
pub(crate) fn card_numbers(folder: &Path) -> io::Result<Vec<u32>> {
    let mut numbers = kernel_file::numbered_entries(folder, "card")?;
    numbers.truncate(limits::DEVICES);
    Ok(numbers)
}

impl DrmCard {
    /// Reads the card whose entry is `folder`.
    pub(super) fn from_entry(folder: &Path, number: Option<u32>) -> Self {
        Self::from_device(folder.join("device"), number)
    }

    /// Reads the card whose device has this folder.
    pub(super) fn from_device(device: PathBuf, number: Option<u32>) -> Self {
        let uevent = PciUevent::read(&device.join("uevent"));
        let target = fs::read_link(&device).ok();
        let target_name = target.as_deref().and_then(|target| target.file_name()?.to_str());
        let hex = |file: &str| kernel_file::read_number::<u16>(&device.join(file)).value().copied();
        let vendor_id = hex("vendor").or(uevent.ids.map(|(vendor, _)| vendor));
        let device_id = hex("device").or(uevent.ids.map(|(_, device)| device));
        // A partition of a card is a device without a PCI address.
        let is_partition = uevent.is_partition || target_name.is_some_and(|name| name.starts_with(XCP_PREFIX));
        Self {
            number,
            vendor: if is_partition {
                Some(Vendor::Amd)
            } else {
                vendor_id.map(|id| pci_bus::vendor_of_id(id).unwrap_or(Vendor::Other))
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

    /// Returns the device with its bus facts and without readings.
    pub(super) fn to_device(&self) -> DetectedDevice {
        DetectedDevice {
            minor: self.render_minor,
            pci: self.pci,
            driver: self.driver.clone(),
            numa: self.numa,
            ..DetectedDevice::new(self.vendor.unwrap_or(Vendor::Other))
        }
    }

    /// Returns the address of the card, or the name of its entry if it has none.
    pub(super) fn label(&self) -> String {
        match (self.pci, self.number) {
            (Some(pci), _) => pci.to_string(),
            (None, Some(number)) => format!("card{number}"),
            (None, None) => "the card".to_owned(),
        }
    }
}

/// Prefix of the driver's names for the devices of partitions.
const XCP_PREFIX: &str = "amdgpu_xcp";

/// Content of the `uevent` file of a PCI device.
#[derive(Debug, Default)]
struct PciUevent {
    ids: Option<(u16, u16)>,
    slot: Option<PciAddress>,
    /// Whether the device is a partition of a card.
    is_partition: bool,
}

impl PciUevent {
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
            is_partition: find("MODALIAS")
                .is_some_and(|alias| alias.trim_start_matches("platform:").starts_with(XCP_PREFIX)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amd_sysfs::tests::SysfsTree;

    #[test]
    fn connectors_and_render_nodes_are_not_cards() {
        let tree = SysfsTree::new();
        for entry in ["card2", "card10", "card2-DP-1", "card2-HDMI-A-1", "renderD128", "version", "cardinal"] {
            tree.folder(&format!("class/drm/{entry}"));
        }
        assert_eq!(card_numbers(&tree.path("class/drm")).unwrap(), [2, 10]);
    }

    #[test]
    fn render_nodes_stand_for_cards_where_there_are_no_others() {
        let tree = SysfsTree::new();
        for (minor, slot) in [(129, "0000:0a:00.0"), (128, "0000:03:00.0")] {
            let event = format!("DRIVER=amdgpu\nPCI_ID=1002:744C\nPCI_SLOT_NAME={slot}\n");
            tree.file(&format!("class/drm/renderD{minor}/device/uevent"), event);
        }
        let found = cards(&tree.path("class/drm")).unwrap();
        let seen: Vec<_> = found.iter().map(|card| (card.render_minor, card.label())).collect();
        assert_eq!(seen, [(Some(128), "0000:03:00.0".to_owned()), (Some(129), "0000:0a:00.0".to_owned())]);
    }

    #[test]
    fn a_card_is_identified_by_its_files_or_by_uevent_alone() {
        let tree = SysfsTree::new();
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
        assert_eq!(by_event.label(), "0000:0b:00.0");
    }

    #[test]
    fn links_replace_missing_files() {
        let tree = SysfsTree::new();
        tree.file("devices/pci0000:00/0000:00:03.1/0000:2f:00.0/vendor", "0x1002");
        tree.link("devices/pci0000:00/0000:00:03.1/0000:2f:00.0/driver", "../../../../bus/pci/drivers/amdgpu");
        tree.link("class/drm/card0/device", "../../../devices/pci0000:00/0000:00:03.1/0000:2f:00.0");
        let card = &cards(&tree.path("class/drm")).unwrap()[0];
        assert_eq!(card.label(), "0000:2f:00.0");
        assert_eq!(card.driver.as_deref(), Some("amdgpu"));
    }

    #[test]
    fn a_partition_is_a_card_of_amd_without_an_address() {
        let tree = SysfsTree::new();
        tree.file("devices/platform/amdgpu_xcp_3/uevent", "");
        tree.link("class/drm/card7/device", "../../../devices/platform/amdgpu_xcp_3");
        tree.file("class/drm/card8/device/uevent", "MODALIAS=platform:amdgpu_xcp_4\n");
        for card in &cards(&tree.path("class/drm")).unwrap() {
            assert_eq!((card.vendor, card.pci), (Some(Vendor::Amd), None));
            assert!(["card7", "card8"].contains(&card.label().as_str()));
        }
    }
}

//! What a log says, counted per device.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_core::device::{PciAddress, Vendor};

use crate::found::{Found, worse};
use crate::kernel_log::line::{Event, What};
use crate::kernel_log::trouble::Trouble;
use crate::pci_bus;
use crate::snapshot::Snapshot;
use crate::told::{Told, words};

/// What a log says went wrong, and how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Said {
    /// With which device; `None` where it was said of none in particular.
    pub pci: Option<PciAddress>,
    /// What went wrong.
    pub trouble: Trouble,
    /// How often.
    pub count: u64,
}

/// Everything a log said so far.
#[derive(Debug, Default)]
pub(super) struct Log {
    /// In the order in which the log first names them.
    devices: Vec<Device>,
    places: BTreeMap<PciAddress, usize>,
    /// What was said of no device in particular, or of switches.
    apart: BTreeMap<Trouble, u64>,
    driver: Option<Arc<str>>,
    mismatch: Option<Arc<str>>,
    /// The NVIDIA GPU named last: some messages take several lines and name it only in the first.
    last_nvidia: Option<PciAddress>,
}

/// A device and what happened to it.
#[derive(Debug)]
struct Device {
    found: Found,
    counts: BTreeMap<Trouble, u64>,
}

impl Log {
    pub(super) fn add(&mut self, event: &Event<'_>) {
        let trouble = match event.what {
            What::Booted => return self.forget_health(),
            What::DriverLoaded(version) => return self.driver = Some(version.into()),
            What::VersionMismatch => return self.mismatch = Some(words(event.text).into()),
            What::Trouble(switch @ Trouble::SwitchError { .. }) => return self.count_apart(switch),
            What::Trouble(trouble) => Some(trouble),
            What::Named | What::Uuid(_) | What::Memory(_) => None,
        };
        let continues = trouble == Some(Trouble::FellOffTheBus) && event.vendor == Vendor::Nvidia;
        match (event.pci.or(self.last_nvidia.filter(|_| continues)), trouble) {
            (Some(pci), trouble) => self.add_to(pci, event, trouble),
            (None, Some(trouble)) => self.count_apart(trouble),
            (None, None) => {}
        }
    }

    fn count_apart(&mut self, trouble: Trouble) {
        *self.apart.entry(trouble).or_default() += 1;
    }

    fn add_to(&mut self, pci: PciAddress, event: &Event<'_>, trouble: Option<Trouble>) {
        if event.vendor == Vendor::Nvidia {
            self.last_nvidia = Some(pci);
        }
        let at = *self.places.entry(pci).or_insert_with(|| {
            let mut found = Found::new(event.vendor);
            found.pci = Some(pci);
            self.devices.push(Device { found, counts: BTreeMap::new() });
            self.devices.len() - 1
        });
        let Some(device) = self.devices.get_mut(at) else { return };
        match event.what {
            What::Uuid(uuid) => device.found.uuid = Some(uuid.into()),
            What::Memory(bytes) => device.found.memory.total = Told::Value(bytes),
            _ => {}
        }
        if let Some(trouble) = trouble {
            *device.counts.entry(trouble).or_default() += 1;
            device.found.health = worse(device.found.health.take(), Some(trouble.health()));
        }
    }

    /// What was wrong before a boot need not be wrong after it; it stays in the counts.
    fn forget_health(&mut self) {
        for device in &mut self.devices {
            device.found.health = None;
        }
    }

    /// What went wrong, device by device, last what was said of none.
    pub(super) fn troubles(&self) -> Vec<Said> {
        let devices = self.devices.iter().map(|device| (device.found.pci, &device.counts));
        let all = devices.chain([(None, &self.apart)]);
        all.flat_map(|(pci, counts)| counts.iter().map(move |(&trouble, &count)| Said { pci, trouble, count }))
            .collect()
    }

    pub(super) fn snapshot(self) -> Snapshot {
        let mut snapshot = Snapshot::default();
        if let Some(mismatch) = self.mismatch {
            snapshot.warn(format!("a program's NVIDIA library is of another version than the driver: {mismatch}"));
        }
        for (trouble, count) in self.apart {
            snapshot.warn(trouble.sentence(count));
        }
        for mut device in self.devices {
            for (trouble, count) in device.counts {
                if let Some(pci) = device.found.pci {
                    snapshot.warn(format!("{pci}: {}", trouble.sentence(count)));
                }
            }
            if device.found.vendor == Vendor::Nvidia {
                device.found.driver = self.driver.clone();
            }
            pci_bus::list(&mut snapshot, device.found);
        }
        if snapshot.devices.is_empty() {
            snapshot.warn("the log names no GPU");
        }
        snapshot
    }
}

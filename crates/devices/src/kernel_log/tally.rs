//! What a log says, counted per device and judged.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_core::device::{Health, PciAddress, Vendor};

use crate::found::{Found, worse};
use crate::kernel_log::line::{Event, What};
use crate::nvml::xid::{self, Severity};
use crate::pci_bus;
use crate::snapshot::Snapshot;
use crate::told::{Told, words};

/// Everything a log said so far.
#[derive(Debug, Default)]
pub(super) struct Log {
    /// In the order in which the log first names them.
    devices: Vec<Device>,
    places: BTreeMap<PciAddress, usize>,
    /// What was said of no device in particular, or of switches.
    apart: BTreeMap<Kind, u64>,
    driver: Option<Arc<str>>,
    mismatch: Option<Arc<str>>,
    /// The NVIDIA GPU named last: some messages take several lines and name it only in the first.
    last_nvidia: Option<PciAddress>,
}

/// A device and what happened to it.
#[derive(Debug)]
struct Device {
    found: Found,
    counts: BTreeMap<Kind, u64>,
}

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Xid(u32),
    Switch { number: u32, fatal: bool },
    FellOffTheBus,
    StartFailed,
    RingTimeout,
    ResetBegun,
    ResetSucceeded,
    ResetFailed,
    Uncorrectable,
}

impl Log {
    pub(super) fn add(&mut self, event: &Event<'_>) {
        let kind = match event.what {
            What::Booted => return self.forget_health(),
            What::DriverLoaded(version) => return self.driver = Some(version.into()),
            What::VersionMismatch => return self.mismatch = Some(words(event.text).into()),
            What::Named | What::Uuid(_) | What::Memory(_) => None,
            What::Xid { number, .. } => Some(Kind::Xid(number)),
            What::SwitchError { number, fatal } => return self.count_apart(Kind::Switch { number, fatal }),
            What::FellOffTheBus => Some(Kind::FellOffTheBus),
            What::StartFailed => Some(Kind::StartFailed),
            What::RingTimeout => Some(Kind::RingTimeout),
            What::ResetBegun => Some(Kind::ResetBegun),
            What::ResetSucceeded => Some(Kind::ResetSucceeded),
            What::ResetFailed => Some(Kind::ResetFailed),
            What::Uncorrectable => Some(Kind::Uncorrectable),
        };
        let continued =
            (event.what == What::FellOffTheBus && event.vendor == Vendor::Nvidia).then_some(self.last_nvidia);
        match (event.pci.or(continued.flatten()), kind) {
            (Some(pci), kind) => self.add_to(pci, event, kind),
            (None, Some(kind)) => self.count_apart(kind),
            (None, None) => {}
        }
    }

    fn count_apart(&mut self, kind: Kind) {
        *self.apart.entry(kind).or_default() += 1;
    }

    fn add_to(&mut self, pci: PciAddress, event: &Event<'_>, kind: Option<Kind>) {
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
        if let Some(kind) = kind {
            *device.counts.entry(kind).or_default() += 1;
            device.found.health = worse(device.found.health.take(), Some(kind.health()));
        }
    }

    /// What was wrong before a boot need not be wrong after it; it stays in the counts.
    fn forget_health(&mut self) {
        for device in &mut self.devices {
            device.found.health = None;
        }
    }

    pub(super) fn snapshot(self) -> Snapshot {
        let mut snapshot = Snapshot::default();
        if let Some(mismatch) = self.mismatch {
            snapshot.warn(format!("a program's NVIDIA library is of another version than the driver: {mismatch}"));
        }
        for (kind, count) in self.apart {
            snapshot.warn(kind.sentence(count));
        }
        for mut device in self.devices {
            for (kind, count) in device.counts {
                if let Some(pci) = device.found.pci {
                    snapshot.warn(format!("{pci}: {}", kind.sentence(count)));
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

impl Kind {
    fn health(self) -> Health {
        match (self, self.severity()) {
            (Self::FellOffTheBus | Self::Xid(79), _) => Health::Lost,
            (_, Severity::Unhealthy) => Health::Unhealthy(format!("{}: {}", self.name(), self.meaning()).into()),
            (_, Severity::Application | Severity::Warn) => Health::Healthy,
        }
    }

    fn severity(self) -> Severity {
        match self {
            Self::Xid(number) => xid::judge(number).severity,
            Self::RingTimeout | Self::ResetBegun | Self::ResetSucceeded | Self::Switch { fatal: false, .. } => {
                Severity::Warn
            }
            Self::FellOffTheBus
            | Self::StartFailed
            | Self::ResetFailed
            | Self::Uncorrectable
            | Self::Switch { fatal: true, .. } => Severity::Unhealthy,
        }
    }

    /// `Xid 13 ×629: …; the GPU is fine`.
    fn sentence(self, count: u64) -> String {
        let advice = match (self, self.severity()) {
            (_, Severity::Application) => "the GPU is fine",
            (Self::Xid(number), _) => xid::judge(number).remedy,
            _ => "",
        };
        let joint = if advice.is_empty() { "" } else { "; " };
        format!("{} ×{count}: {}{joint}{advice}", self.name(), self.meaning())
    }

    fn name(self) -> String {
        match self {
            Self::Xid(number) => format!("Xid {number}"),
            Self::Switch { number, .. } => format!("NVSwitch SXid {number}"),
            Self::FellOffTheBus => "off the bus".into(),
            Self::StartFailed => "start failed".into(),
            Self::RingTimeout => "ring timeout".into(),
            Self::ResetBegun => "reset begun".into(),
            Self::ResetSucceeded => "reset succeeded".into(),
            Self::ResetFailed => "reset failed".into(),
            Self::Uncorrectable => "uncorrectable error".into(),
        }
    }

    fn meaning(self) -> &'static str {
        match self {
            Self::Xid(number) => xid::judge(number).meaning,
            Self::Switch { fatal: true, .. } => "a fatal error of a switch between the GPUs",
            Self::Switch { fatal: false, .. } => "an error that a switch between the GPUs got over",
            Self::FellOffTheBus => "the GPU no longer answers on the bus",
            Self::StartFailed => "the driver could not start the GPU",
            Self::RingTimeout => "a job hung on the GPU",
            Self::ResetBegun => "the driver reset the GPU",
            Self::ResetSucceeded => "the GPU came back from a reset",
            Self::ResetFailed => "the GPU did not come back from a reset",
            Self::Uncorrectable => "memory or logic of the GPU went wrong beyond repair",
        }
    }
}

//! What simulated devices report at a moment, in the words of their drivers.

use std::borrow::Cow;

use gpupool_core::{Bytes, DeviceHealth, Percent, Vendor};

use super::faults::{DeviceField, RowRemapState, SimulatedFault};
use super::layout::Device;
use super::physics::{MemoryInUse, SimulatedMachine};
use crate::detected_device::{
    DetectedDevice, DevicePartition, DeviceProcess, MemoryReading, Milliwatts, ProcessActivity, UsedMemoryScope,
};
use crate::reported::{MissingReason, Reported};
use crate::source::SourceError;
use crate::source_reading::SourceReading;

const NVIDIA_DRIVER: &str = "580.65.06";
const AMD_DRIVER: &str = "6.12.12";
/// How a driver says that it cannot tell a field.
const CANNOT: MissingReason = Cow::Borrowed("[N/A]");
/// How a driver says that it fails to tell a field.
const FAILED: MissingReason = Cow::Borrowed("[Unknown Error]");

impl SimulatedMachine {
    /// Everything the devices report now.
    pub fn reading(&self) -> Result<SourceReading, SourceError> {
        if self.states.iter().any(|state| state.faults.contains(&SimulatedFault::Mismatch)) {
            let said = "Failed to initialize: Driver/library version mismatch (simulated)";
            return Err(SourceError::VersionMismatch(said.into()));
        }
        let mut snapshot = SourceReading::default();
        let mut shown = Vec::with_capacity(self.devices.len());
        for place in 0..self.devices.len() {
            let faults: Vec<&SimulatedFault> = self.faults_of(place).collect();
            let vanished = faults.contains(&&SimulatedFault::Vanish);
            if let Some(warning) = remapped_rows(&self.devices[place], &faults).filter(|_| !vanished) {
                snapshot.warn(warning);
            }
            shown.push(if vanished { None } else { snapshot.push(self.found(place, &faults)) });
        }
        // Each pair is there once already, so they are not looked for.
        snapshot.links = self.links.iter().filter_map(|link| link.moved(&shown)).collect();
        Ok(snapshot)
    }

    /// All devices as if nothing were wrong, with what never changes only.
    pub(super) fn whole(&self) -> SourceReading {
        SourceReading { devices: self.devices.iter().map(identified).collect(), ..SourceReading::default() }
    }

    /// What is wrong with a device: its own faults, and those of its whole GPU that are on another part of it.
    pub(super) fn faults_of(&self, place: usize) -> impl Iterator<Item = &SimulatedFault> {
        let on_gpu = self.devices[place].on_gpu.clone();
        let of_others = on_gpu.filter(move |other| *other != place).flat_map(|other| &self.states[other].faults);
        self.states[place].faults.iter().chain(of_others.filter(|fault| fault.of_whole_gpu()))
    }

    fn found(&self, place: usize, faults: &[&SimulatedFault]) -> DetectedDevice {
        let device = &self.devices[place];
        let mut found = identified(device);
        if faults.contains(&&SimulatedFault::Lost) {
            take_away(&mut found, &DeviceField::ALL, &Reported::Failed("GPU is lost".into()));
            found.health = Some(DeviceHealth::Lost);
            return found;
        }
        self.read_memory(place, &mut found);
        self.read_sensors(place, &mut found);
        found.health = Some(DeviceHealth::Healthy);
        for fault in faults {
            apply(fault, &mut found);
        }
        found
    }

    fn read_memory(&self, place: usize, found: &mut DetectedDevice) {
        let device = &self.devices[place];
        let capacity = device.memory.map(|total| total.saturating_sub(device.reserved.unwrap_or_default()));
        let most = capacity.unwrap_or(Bytes(u64::MAX)).saturating_sub(idle_memory(device));
        let in_use = self.memory(place, most);
        found.processes = Reported::Value(self.processes(place, &in_use));
        let Some(total) = device.memory else {
            found.memory.unified = true;
            take_away(found, &[DeviceField::Memory], &Reported::Unsupported(CANNOT));
            return;
        };
        let used = if device.is_cut_by_mig() { self.used_by_instances(device) } else { in_use.all };
        let used = used.saturating_add(idle_memory(device)).min(capacity.unwrap_or(total));
        found.memory = MemoryReading {
            total: Reported::Value(total),
            reserved: device.reserved.map_or(Reported::ABSENT, Reported::Value),
            used: Reported::Value(used),
            used_means: if device.reserved.is_some() {
                UsedMemoryScope::WithoutReserved
            } else {
                UsedMemoryScope::Unknown
            },
            ..MemoryReading::default()
        };
    }

    fn used_by_instances(&self, gpu: &Device) -> Bytes {
        let used = |place: usize| self.memory(place, self.devices[place].memory.unwrap_or_default()).all;
        gpu.on_gpu.clone().map(used).fold(Bytes::ZERO, Bytes::saturating_add)
    }

    fn processes(&self, place: usize, in_use: &MemoryInUse) -> Vec<DeviceProcess> {
        let state = &self.states[place];
        let process = |pid, name: &str, memory: &Bytes| DeviceProcess {
            pid,
            name: Some(name.into()),
            activity: ProcessActivity::Compute,
            memory: Reported::Value(*memory),
            ..DeviceProcess::default()
        };
        let squatters = state.faults.iter().filter_map(|fault| match fault {
            SimulatedFault::Squatter { pid, .. } => Some(*pid),
            _ => None,
        });
        let squatters = squatters.zip(&in_use.squatters).map(|(pid, memory)| process(pid, "squatter", memory));
        let loads = state.running.iter().zip(&in_use.loads);
        let loads = loads
            .map(|(running, memory)| process(running.pid, running.load.name.as_deref().unwrap_or("simulated"), memory));
        squatters.chain(loads).take(crate::limits::PROCESSES).collect()
    }

    fn read_sensors(&self, place: usize, found: &mut DetectedDevice) {
        let device = &self.devices[place];
        // No driver tells it of a GPU that is cut by MIG, nor of its parts.
        found.utilization = match device.mig {
            Some(true) => Reported::Unsupported(CANNOT),
            _ => Reported::Value(whole_percents(self.busy(place))),
        };
        found.temperature_c = Reported::Value(self.celsius(device).round() as i16);
        if let Some(words) = without_power_sensor(place, device) {
            take_away(found, &[DeviceField::Power, DeviceField::PowerLimit], &Reported::Unsupported(words));
            return;
        }
        let (idle, limit) = device.model.watts;
        let busy = u64::from(self.busy_of_card(device).0);
        // Watts times thousandths of a percent: a hundred of them are a thousandth of a watt.
        found.power = Reported::Value(Milliwatts(u64::from(idle) * 1000 + u64::from(limit - idle) * busy / 100));
        found.power_limit = match device.memory {
            Some(_) => Reported::Value(Milliwatts(u64::from(limit) * 1000)),
            // A chip that shares its memory shares its power, too.
            None => Reported::Unsupported(CANNOT),
        };
    }
}

/// The device with what never changes.
fn identified(device: &Device) -> DetectedDevice {
    let amd = device.model.vendor == Vendor::Amd;
    DetectedDevice {
        index: device.index,
        minor: Some(device.minor),
        name: Some(device.model.name.into()),
        uuid: Some(device.uuid.clone()),
        pci: Some(device.pci),
        partition: device.partition.clone(),
        mig: device.mig,
        driver: Some(if amd { AMD_DRIVER } else { NVIDIA_DRIVER }.into()),
        numa: Some(device.numa),
        ..DetectedDevice::new(device.model.vendor)
    }
}

/// Memory a driver shows as used with nobody there.
fn idle_memory(device: &Device) -> Bytes {
    let mib = if device.model.vendor == Vendor::Amd && device.partition.is_none() { 10 } else { 1 };
    Bytes::from_mib(mib).unwrap_or_default()
}

/// Why a device tells no power: another on its card has the sensor.
fn without_power_sensor(place: usize, device: &Device) -> Option<MissingReason> {
    match &device.partition {
        _ if place == device.on_card.start => None,
        None => Some("N/A (Secondary die)".into()),
        Some(DevicePartition::Mig { .. } | DevicePartition::Amd { .. }) => Some(CANNOT),
    }
}

/// Drivers tell whole percents.
fn whole_percents(busy: Percent) -> Percent {
    Percent((busy.0 + 500) / 1000 * 1000)
}

fn apply(fault: &SimulatedFault, found: &mut DetectedDevice) {
    match fault {
        SimulatedFault::Hot { temperature_c } => found.temperature_c = Reported::Value(*temperature_c),
        SimulatedFault::Ecc { uncorrectable, remap } => {
            let then = match remap {
                RowRemapState::Done => return,
                RowRemapState::RemapPending => "row remapping pending: the GPU needs a reset",
                RowRemapState::RemapFailed => "row remapping failed: the GPU needs replacement",
            };
            let why = format!("{uncorrectable} uncorrectable memory errors, {then}");
            found.health = Some(DeviceHealth::Unhealthy(why.into()));
        }
        SimulatedFault::NotAvailable { fields } => take_away(found, fields, &Reported::Unsupported(CANNOT)),
        SimulatedFault::FailedField { fields } => take_away(found, fields, &Reported::Failed(FAILED)),
        SimulatedFault::StuckUtilization if found.utilization.value().is_some() => {
            found.utilization = Reported::Value(Percent::FULL);
        }
        // These are no matter of single fields, or happened before.
        SimulatedFault::StuckUtilization
        | SimulatedFault::Squatter { .. }
        | SimulatedFault::Slow { .. }
        | SimulatedFault::HungDriver { .. } => {}
        SimulatedFault::Lost | SimulatedFault::Vanish | SimulatedFault::Mismatch => {}
    }
}

/// Takes the values of fields away.
fn take_away(found: &mut DetectedDevice, fields: &[DeviceField], why: &Reported<()>) {
    fn no_value<T>(why: &Reported<()>) -> Reported<T> {
        why.clone().and_then(|()| Reported::ABSENT)
    }
    for field in fields {
        match field {
            DeviceField::Memory => {
                found.memory.total = no_value(why);
                found.memory.reserved = no_value(why);
                found.memory.used = no_value(why);
            }
            DeviceField::Utilization => found.utilization = no_value(why),
            DeviceField::Temperature => found.temperature_c = no_value(why),
            DeviceField::Power => found.power = no_value(why),
            DeviceField::PowerLimit => found.power_limit = no_value(why),
            DeviceField::Processes => found.processes = no_value(why),
        }
    }
}

/// Errors that are dealt with make no device unhealthy, and are told.
fn remapped_rows(device: &Device, faults: &[&SimulatedFault]) -> Option<String> {
    let count = faults.iter().find_map(|fault| match fault {
        SimulatedFault::Ecc { uncorrectable, remap: RowRemapState::Done } => Some(uncorrectable),
        _ => None,
    })?;
    Some(format!("{}: {count} uncorrectable memory errors, rows remapped", device.uuid))
}

//! Values that simulated devices report, in the style of their drivers.

use std::borrow::Cow;

use gpupool_core::{Bytes, DeviceHealth, Percent, Vendor};

use super::faults::{DeviceField, RowRemapState, SimulatedFault};
use super::layout::SimulatedHardware;
use super::physics::{MemoryInUse, SimulatedMachine};
use crate::detected_device::{
    DetectedDevice, DevicePartition, DeviceProcess, MemoryReading, Milliwatts, ProcessActivity, UsedMemoryScope,
};
use crate::reported::{MissingReason, Reported};
use crate::source::SourceError;
use crate::source_reading::SourceReading;

const NVIDIA_DRIVER: &str = "580.65.06";
const AMD_DRIVER: &str = "6.12.12";
/// A driver's text for an unsupported field.
const NOT_AVAILABLE: MissingReason = Cow::Borrowed("[N/A]");
/// A driver's text for a failed field.
const UNKNOWN_ERROR: MissingReason = Cow::Borrowed("[Unknown Error]");

impl SimulatedMachine {
    /// Returns the current values of all devices.
    pub fn reading(&self) -> Result<SourceReading, SourceError> {
        if self.states.iter().any(|state| state.faults.contains(&SimulatedFault::Mismatch)) {
            let message = "Failed to initialize: Driver/library version mismatch (simulated)";
            return Err(SourceError::VersionMismatch(message.into()));
        }
        let mut reading = SourceReading::default();
        let mut positions = Vec::with_capacity(self.devices.len());
        for place in 0..self.devices.len() {
            let faults: Vec<&SimulatedFault> = self.faults_of(place).collect();
            let vanished = faults.contains(&&SimulatedFault::Vanish);
            if let Some(warning) = remapped_rows_warning(&self.devices[place], &faults).filter(|_| !vanished) {
                reading.warn(warning);
            }
            positions.push(if vanished { None } else { reading.push(self.read_device(place, &faults)) });
        }
        // Each pair occurs once already, so `join` is not needed.
        reading.links = self.links.iter().filter_map(|link| link.map_positions(&positions)).collect();
        Ok(reading)
    }

    /// Returns all devices without faults and values, with their identity only.
    pub(super) fn identity_reading(&self) -> SourceReading {
        SourceReading { devices: self.devices.iter().map(identity_of).collect(), ..SourceReading::default() }
    }

    /// Returns the faults of a device: its own, and the faults of its whole GPU that are stored on another partition.
    pub(super) fn faults_of(&self, place: usize) -> impl Iterator<Item = &SimulatedFault> {
        let on_gpu = self.devices[place].on_gpu.clone();
        let of_others = on_gpu.filter(move |other| *other != place).flat_map(|other| &self.states[other].faults);
        self.states[place].faults.iter().chain(of_others.filter(|fault| fault.affects_whole_gpu()))
    }

    fn read_device(&self, place: usize, faults: &[&SimulatedFault]) -> DetectedDevice {
        let device = &self.devices[place];
        let mut found = identity_of(device);
        if faults.contains(&&SimulatedFault::Lost) {
            clear_fields(&mut found, &DeviceField::ALL, &Reported::Failed("GPU is lost".into()));
            found.health = Some(DeviceHealth::Lost);
            return found;
        }
        self.read_memory(place, &mut found);
        self.read_sensors(place, &mut found);
        found.health = Some(DeviceHealth::Healthy);
        for fault in faults {
            apply_fault(fault, &mut found);
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
            clear_fields(found, &[DeviceField::Memory], &Reported::Unsupported(NOT_AVAILABLE));
            return;
        };
        let used = if device.is_in_mig_mode() { self.memory_used_by_instances(device) } else { in_use.all };
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

    fn memory_used_by_instances(&self, gpu: &SimulatedHardware) -> Bytes {
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
        // Drivers report no utilization in MIG mode.
        found.utilization = match device.mig {
            Some(true) => Reported::Unsupported(NOT_AVAILABLE),
            _ => Reported::Value(round_to_percent(self.busy(place))),
        };
        found.temperature_c = Reported::Value(self.celsius(device).round() as i16);
        if let Some(words) = missing_power_reason(place, device) {
            clear_fields(found, &[DeviceField::Power, DeviceField::PowerLimit], &Reported::Unsupported(words));
            return;
        }
        let (idle, limit) = device.model.watts;
        let busy = u64::from(self.busy_of_card(device).0);
        // Watts times thousandths of a percent; divided by 100 they are milliwatts.
        found.power = Reported::Value(Milliwatts(u64::from(idle) * 1000 + u64::from(limit - idle) * busy / 100));
        found.power_limit = match device.memory {
            Some(_) => Reported::Value(Milliwatts(u64::from(limit) * 1000)),
            // A chip that shares memory with the host also shares its power limit.
            None => Reported::Unsupported(NOT_AVAILABLE),
        };
    }
}

/// Returns the constant facts of a device.
fn identity_of(device: &SimulatedHardware) -> DetectedDevice {
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

/// Returns the memory that a driver reports as used on an idle device.
fn idle_memory(device: &SimulatedHardware) -> Bytes {
    let mib = if device.model.vendor == Vendor::Amd && device.partition.is_none() { 10 } else { 1 };
    Bytes::from_mib(mib).unwrap_or_default()
}

/// Returns the reason why a device reports no power: another device of its card has the sensor.
fn missing_power_reason(place: usize, device: &SimulatedHardware) -> Option<MissingReason> {
    match &device.partition {
        _ if place == device.on_card.start => None,
        None => Some("N/A (Secondary die)".into()),
        Some(DevicePartition::Mig { .. } | DevicePartition::Amd { .. }) => Some(NOT_AVAILABLE),
    }
}

/// Rounds to whole percents, as drivers report them.
fn round_to_percent(busy: Percent) -> Percent {
    Percent((busy.0 + 500) / 1000 * 1000)
}

fn apply_fault(fault: &SimulatedFault, found: &mut DetectedDevice) {
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
        SimulatedFault::NotAvailable { fields } => clear_fields(found, fields, &Reported::Unsupported(NOT_AVAILABLE)),
        SimulatedFault::FailedField { fields } => clear_fields(found, fields, &Reported::Failed(UNKNOWN_ERROR)),
        SimulatedFault::StuckUtilization if found.utilization.value().is_some() => {
            found.utilization = Reported::Value(Percent::FULL);
        }
        // These faults concern no single field, or were handled before.
        SimulatedFault::StuckUtilization
        | SimulatedFault::Squatter { .. }
        | SimulatedFault::Slow { .. }
        | SimulatedFault::HungDriver { .. } => {}
        SimulatedFault::Lost | SimulatedFault::Vanish | SimulatedFault::Mismatch => {}
    }
}

/// Removes the values of fields.
fn clear_fields(found: &mut DetectedDevice, fields: &[DeviceField], why: &Reported<()>) {
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

/// Returns a warning about remapped rows, which leave the device healthy.
fn remapped_rows_warning(device: &SimulatedHardware, faults: &[&SimulatedFault]) -> Option<String> {
    let count = faults.iter().find_map(|fault| match fault {
        SimulatedFault::Ecc { uncorrectable, remap: RowRemapState::Done } => Some(uncorrectable),
        _ => None,
    })?;
    Some(format!("{}: {count} uncorrectable memory errors, rows remapped", device.uuid))
}

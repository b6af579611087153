//! State of simulated devices, and the effect of load, time and faults on it.
//!
//! Values depend only on the time and on the times of changes, never on the number of readings: loads store their
//! start, and every curve is computed from it.

use std::sync::Arc;
use std::time::Duration;

use gpupool_core::{Bytes, Percent, Share, Vendor};

use crate::limits;
use crate::simulated::faults::{FaultError, SimulatedFault};
use crate::simulated::layout::{self, DevicePosition, FaultTarget, NoSuchDevice, SimulatedHardware, hash_parts};
use crate::simulated::spec::{SimTiming, SimulationSpec};
use crate::source_reading::DetectedLink;

/// Simulated devices and their state. The caller supplies the time.
#[derive(Debug, Clone)]
pub struct SimulatedMachine {
    seed: u64,
    pub(super) timing: SimTiming,
    pub(super) now: Duration,
    pub(super) devices: Vec<SimulatedHardware>,
    pub(super) links: Vec<DetectedLink>,
    pub(super) states: Vec<DeviceActivity>,
    /// Chip temperature of each GPU.
    temperatures: Vec<ChipTemperature>,
}

/// Loads and faults of one device.
#[derive(Debug, Clone, Default)]
pub(super) struct DeviceActivity {
    /// Loads in order of arrival.
    pub running: Vec<RunningLoad>,
    pub draining: Vec<DrainingMemory>,
    pub faults: Vec<SimulatedFault>,
}

/// A fault and its device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFault {
    /// Position of the device.
    pub place: DevicePosition,
    pub uuid: std::sync::Arc<str>,
    pub fault: SimulatedFault,
}

/// Reason why a fault was not injected or cleared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// The target matches no device.
    #[error(transparent)]
    NoSuchDevice(#[from] NoSuchDevice),
    /// The fault is invalid.
    #[error(transparent)]
    Fault(#[from] FaultError),
}

/// Reason why a device takes no load.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The target matches no device.
    #[error(transparent)]
    NoSuchDevice(#[from] NoSuchDevice),
    /// The GPU is in MIG mode; only its instances take load.
    #[error("{0} is in MIG mode; only its instances take load")]
    CutByMig(String),
    /// The device has too many loads.
    #[error("{uuid} already has the maximum of {most} loads")]
    TooMany {
        uuid: String,
        /// Maximum number of loads.
        most: usize,
    },
}

impl SimulatedMachine {
    /// Creates the described devices, idle and at time zero.
    pub fn new(spec: &SimulationSpec) -> Self {
        let devices = layout::lay_out_devices(spec);
        let gpus = devices.last().map_or(0, |device| device.gpu + 1);
        let mut machine = Self {
            seed: spec.seed,
            timing: spec.timing.clone(),
            now: Duration::ZERO,
            links: layout::link_devices(&devices),
            states: vec![DeviceActivity::default(); devices.len()],
            temperatures: vec![ChipTemperature::steady(0.0); gpus],
            devices,
        };
        let mut place = 0;
        for cards in &spec.cards {
            for _ in 0..cards.device_count() {
                let faults = cards.faults.iter().filter(|fault| machine.accepts_fault(place, fault));
                machine.states[place].faults = faults.cloned().collect();
                place += 1;
            }
        }
        for gpu in 0..gpus {
            machine.temperatures[gpu] = ChipTemperature::steady(machine.steady_celsius(gpu));
        }
        machine
    }

    /// Advances to a time; an earlier time has no effect.
    pub(super) fn advance(&mut self, to: Duration) {
        self.now = self.now.max(to);
        let (now, timing) = (self.now, &self.timing);
        for state in &mut self.states {
            state.draining.retain(|draining| !draining.memory_at(now, timing).is_zero());
        }
    }

    /// Sets the load of `holder` on a device.
    pub(super) fn set_load(
        &mut self,
        place: DevicePosition,
        holder: u64,
        load: SimulatedLoad,
    ) -> Result<(), LoadError> {
        let device = self.devices.get(place.0).ok_or_else(|| self.no_such_device(&FaultTarget::Position(place)))?;
        if device.is_in_mig_mode() {
            return Err(LoadError::CutByMig(device.uuid.to_string()));
        }
        let (now, timing, vendor) = (self.now, &self.timing, device.model.vendor);
        let state = &mut self.states[place.0];
        let full = state.running.len() >= limits::PROCESSES;
        match state.running.iter_mut().find(|running| running.holder == holder) {
            Some(running) if running.load == load => {}
            Some(running) => *running = running.with_load(load, vendor, now, timing),
            None if full => {
                return Err(LoadError::TooMany { uuid: device.uuid.to_string(), most: limits::PROCESSES });
            }
            None => {
                let parts: [&[u8]; 3] = [device.uuid.as_bytes(), &place.0.to_le_bytes(), &holder.to_le_bytes()];
                let salt = hash_parts(self.seed, &parts);
                state.running.push(RunningLoad::begin(holder, load, salt, vendor, now, timing));
            }
        }
        self.update_temperature(place.0);
        Ok(())
    }

    /// Removes the load of `holder` from a device, if any: it stops at once, and its memory is freed soon after.
    pub(super) fn clear_load(&mut self, place: DevicePosition, holder: u64) {
        let Some(state) = self.states.get_mut(place.0) else { return };
        let Some(found) = state.running.iter().position(|running| running.holder == holder) else { return };
        let ended = state.running.remove(found);
        if state.draining.len() < limits::PROCESSES {
            state.draining.push(ended.into_draining(self.now, &self.timing));
        }
        self.update_temperature(place.0);
    }

    /// Injects a fault, and returns the number of targeted devices.
    pub fn inject_fault(&mut self, target: &FaultTarget, fault: &SimulatedFault) -> Result<usize, ControlError> {
        fault.check()?;
        let places = self.target_positions(target)?;
        for &place in &places {
            if !self.accepts_fault(place, fault) {
                continue;
            }
            let faults = &mut self.states[place].faults;
            faults.retain(|other| !fault.replaces(other));
            if faults.len() < limits::PROCESSES {
                faults.push(fault.clone());
            }
            self.update_temperature(place);
        }
        Ok(places.len())
    }

    /// Clears all faults of devices, or those of one kind, and returns their number.
    pub(super) fn clear_faults(&mut self, target: &FaultTarget, kind: Option<&str>) -> Result<usize, ControlError> {
        kind.map_or(Ok(()), SimulatedFault::check_kind)?;
        let mut cleared = 0;
        for place in self.target_positions(target)? {
            let faults = &mut self.states[place].faults;
            let before = faults.len();
            faults.retain(|fault| kind.is_some_and(|kind| fault.kind() != kind));
            cleared += before - faults.len();
            self.update_temperature(place);
        }
        Ok(cleared)
    }

    pub(super) fn faults(&self) -> Vec<DeviceFault> {
        let of = |(place, state): (usize, &DeviceActivity)| {
            let uuid = self.devices[place].uuid.clone();
            let to_fault = |fault: &SimulatedFault| DeviceFault {
                place: DevicePosition(place),
                uuid: uuid.clone(),
                fault: fault.clone(),
            };
            state.faults.iter().map(to_fault).collect::<Vec<_>>()
        };
        self.states.iter().enumerate().flat_map(of).collect()
    }

    /// Returns the true utilization of a device.
    pub(super) fn busy(&self, place: usize) -> Percent {
        let state = &self.states[place];
        let loads = state.running.iter().map(|running| running.busy_at(self.now, &self.timing));
        capped_sum(loads.chain(squatter_utilization(state)))
    }

    /// Returns the utilization of a card.
    pub(super) fn busy_of_card(&self, device: &SimulatedHardware) -> Percent {
        let places = device.on_card.clone();
        let sum = self.weighted_sum(places, |place| self.busy(place));
        Percent((sum / u64::from(device.model.dies.max(1))).min(Percent::FULL.0.into()) as u32)
    }

    /// Returns the chip temperature of a device.
    pub(super) fn celsius(&self, device: &SimulatedHardware) -> f64 {
        self.temperatures[device.gpu].at(self.now, self.timing.temperature)
    }

    /// Returns the memory in use by each load; together never more than `most`.
    pub(super) fn memory(&self, place: usize, most: Bytes) -> MemoryInUse {
        let state = &self.states[place];
        let mut left = most;
        let mut take = |wanted: Bytes| {
            let taken = wanted.min(left);
            left -= taken;
            taken
        };
        let squatter = |fault: &SimulatedFault| match fault {
            SimulatedFault::Squatter { memory_mib, .. } => {
                Some(Bytes::from_mib(*memory_mib).unwrap_or(Bytes(u64::MAX)))
            }
            _ => None,
        };
        let squatters = state.faults.iter().filter_map(squatter).map(&mut take).collect();
        for draining in &state.draining {
            take(draining.memory_at(self.now, &self.timing));
        }
        let loads = state.running.iter().map(|running| take(running.memory_at(self.now, &self.timing))).collect();
        MemoryInUse { squatters, loads, all: most - left }
    }

    pub(super) fn no_such_device(&self, target: &FaultTarget) -> NoSuchDevice {
        let there_are = self.devices.iter().take(8).map(|device| device.uuid.to_string()).collect();
        NoSuchDevice { target: target.to_string(), there_are }
    }

    fn target_positions(&self, target: &FaultTarget) -> Result<Vec<usize>, NoSuchDevice> {
        let is_target = |place: &usize| target.matches(*place, &self.devices[*place]);
        let places: Vec<usize> = (0..self.devices.len()).filter(is_target).collect();
        if places.is_empty() { Err(self.no_such_device(target)) } else { Ok(places) }
    }

    /// Whether a device accepts a fault: a GPU in MIG mode takes no squatters, only its instances do.
    fn accepts_fault(&self, place: usize, fault: &SimulatedFault) -> bool {
        !(matches!(fault, SimulatedFault::Squatter { .. }) && self.devices[place].is_in_mig_mode())
    }

    fn update_temperature(&mut self, place: usize) {
        let gpu = self.devices[place].gpu;
        let celsius = self.steady_celsius(gpu);
        self.temperatures[gpu].set_target(celsius, self.now, self.timing.temperature);
    }

    /// Returns the temperature that a GPU approaches: between idle and full load, as its power.
    fn steady_celsius(&self, gpu: usize) -> f64 {
        let Some(device) = self.devices.iter().find(|device| device.gpu == gpu) else { return 0.0 };
        let (idle, hot) = device.model.celsius;
        let busy = self.weighted_sum(device.on_gpu.clone(), |place| {
            let state = &self.states[place];
            capped_sum(state.running.iter().map(RunningLoad::steady_utilization).chain(squatter_utilization(state)))
        });
        // The slots of a machine are not cooled equally well.
        let slot = hash_parts(self.seed, &[device.uuid.as_bytes(), b"slot"]) % 4;
        let part = busy.min(Percent::FULL.0.into()) as f64 / f64::from(Percent::FULL.0);
        f64::from(idle) + slot as f64 + f64::from(hot - idle) * part
    }

    /// Returns the sum over devices, weighted by their share of the GPU.
    fn weighted_sum(&self, places: std::ops::Range<usize>, busy: impl Fn(usize) -> Percent) -> u64 {
        places.map(|place| u64::from(busy(place).0) * u64::from(self.devices[place].share_of_gpu.0) / 1000).sum()
    }
}

/// Memory in use on a device.
pub(super) struct MemoryInUse {
    /// Memory of each squatter, in the order of the faults.
    pub squatters: Vec<Bytes>,
    /// Memory of each load, in order of arrival.
    pub loads: Vec<Bytes>,
    /// All memory in use, including memory that is not freed yet.
    pub all: Bytes,
}

fn squatter_utilization(state: &DeviceActivity) -> impl Iterator<Item = Percent> {
    state.faults.iter().map(|fault| match fault {
        SimulatedFault::Squatter { utilization, .. } => Percent(u32::from(*utilization) * 1000),
        _ => Percent(0),
    })
}

fn capped_sum(parts: impl Iterator<Item = Percent>) -> Percent {
    let sum = parts.map(|part| u64::from(part.0)).sum::<u64>();
    Percent(sum.min(Percent::FULL.0.into()) as u32)
}

// Load on a device, and its usage at any time.

/// Load on a simulated device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SimulatedLoad {
    /// Share of the device or partition that the load may use.
    pub share: Share,
    /// Memory that the load may use; it uses most of it, and at least the driver's minimum per process.
    pub memory: Bytes,
    /// Pid of the process; generated if `None`.
    pub pid: Option<u32>,
    pub name: Option<Arc<str>>,
}

/// A load since its start or last change.
#[derive(Debug, Clone)]
pub(crate) struct RunningLoad {
    pub holder: u64,
    pub load: SimulatedLoad,
    pub pid: u32,
    /// Seed of the load's fluctuation.
    salt: u64,
    since: Duration,
    memory: (Bytes, Bytes),
    busy: (Percent, Percent),
}

/// Memory of an ended load until the driver has freed it.
#[derive(Debug, Clone)]
pub(crate) struct DrainingMemory {
    since: Duration,
    memory: Bytes,
}

impl RunningLoad {
    pub(super) fn begin(
        holder: u64,
        load: SimulatedLoad,
        salt: u64,
        vendor: Vendor,
        now: Duration,
        timing: &SimTiming,
    ) -> Self {
        let generated_pid = 100_000 + (hash_parts(salt, &[b"pid"]) % 4_000_000) as u32;
        let context = context_memory(vendor);
        let running = Self {
            holder,
            pid: load.pid.unwrap_or(generated_pid),
            load: SimulatedLoad::default(),
            salt,
            since: now,
            memory: (context, context),
            busy: (Percent(0), Percent(0)),
        };
        running.with_load(load, vendor, now, timing)
    }

    /// Returns the same holder with another load, which continues from the current usage.
    pub(super) fn with_load(&self, load: SimulatedLoad, vendor: Vendor, now: Duration, timing: &SimTiming) -> Self {
        // Programs leave a few percent of their promised memory unused.
        let fill = Share(880 + (hash_parts(self.salt, &[b"fill"]) % 100) as u32);
        Self {
            since: now,
            memory: (self.memory_at(now, timing), load.memory.part(fill).max(context_memory(vendor))),
            busy: (self.steady_part(now, timing), Percent::of_share(load.share.min(Share::WHOLE))),
            pid: load.pid.unwrap_or(self.pid),
            load,
            ..*self
        }
    }

    pub(super) fn into_draining(self, now: Duration, timing: &SimTiming) -> DrainingMemory {
        DrainingMemory { since: now, memory: self.memory_at(now, timing) }
    }

    /// Returns the memory in use, including the driver's memory for the process.
    pub(super) fn memory_at(&self, now: Duration, timing: &SimTiming) -> Bytes {
        let (from, to) = self.memory;
        Bytes(interpolate(from.0, to.0, now.saturating_sub(self.since), timing.memory_ramp))
    }

    /// Returns the utilization at a time: the share, less up to a tenth that varies each second.
    pub(super) fn busy_at(&self, now: Duration, timing: &SimTiming) -> Percent {
        let second = now.as_secs().to_le_bytes();
        let waver = 900 + hash_parts(self.salt, &[b"waver", &second]) % 101;
        Percent((u64::from(self.steady_part(now, timing).0) * waver / 1000) as u32)
    }

    /// Returns the long-term utilization.
    pub(super) fn steady_utilization(&self) -> Percent {
        self.busy.1
    }

    fn steady_part(&self, now: Duration, timing: &SimTiming) -> Percent {
        let (from, to) = self.busy;
        let part = interpolate(from.0.into(), to.0.into(), now.saturating_sub(self.since), timing.utilization_ramp);
        Percent(part as u32)
    }
}

impl DrainingMemory {
    pub(super) fn memory_at(&self, now: Duration, timing: &SimTiming) -> Bytes {
        Bytes(interpolate(self.memory.0, 0, now.saturating_sub(self.since), timing.memory_drain))
    }
}

/// Returns the driver's memory for each process.
fn context_memory(vendor: Vendor) -> Bytes {
    let mib = if vendor == Vendor::Amd { 280 } else { 416 };
    Bytes::from_mib(mib).unwrap_or_default()
}

/// Interpolates linearly between `from` and `to`, exactly.
fn interpolate(from: u64, to: u64, passed: Duration, whole: Duration) -> u64 {
    if passed >= whole {
        return to;
    }
    // Never zero, because it exceeds `passed` before rounding. Microseconds keep the products small.
    let (passed, whole) = (passed.as_micros(), whole.as_micros().max(1));
    let way = u128::from(from.abs_diff(to)) * passed / whole;
    let way = u64::try_from(way).unwrap_or(u64::MAX);
    if from < to { from.saturating_add(way).min(to) } else { from.saturating_sub(way).max(to) }
}

// Temperature of a chip, which approaches its target exponentially, so that any time can be computed directly.

#[derive(Debug, Clone)]
pub(crate) struct ChipTemperature {
    since: Duration,
    from_c: f64,
    to_c: f64,
}

impl ChipTemperature {
    pub(super) fn steady(celsius: f64) -> Self {
        Self { since: Duration::ZERO, from_c: celsius, to_c: celsius }
    }

    /// Returns the temperature at `now` for a time constant.
    pub(super) fn at(&self, now: Duration, constant: Duration) -> f64 {
        if constant.is_zero() {
            return self.to_c;
        }
        let passed = now.saturating_sub(self.since).as_secs_f64() / constant.as_secs_f64();
        self.to_c + (self.from_c - self.to_c) * (-passed).exp()
    }

    /// Changes the target at `now`. An unchanged target has no effect, so repeated calls are harmless.
    pub(super) fn set_target(&mut self, celsius: f64, now: Duration, constant: Duration) {
        if self.to_c != celsius {
            *self = Self { since: now, from_c: self.at(now, constant), to_c: celsius };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn interpolation_is_linear() {
        let secs = Duration::from_secs;
        assert_eq!(interpolate(100, 200, secs(1), secs(2)), 150);
        assert_eq!(interpolate(200, 100, secs(1), secs(2)), 150);
        assert_eq!(interpolate(200, 100, secs(3), secs(2)), 100);
        assert_eq!(interpolate(200, 100, secs(0), secs(0)), 100);
    }

    proptest! {
        #[test]
        fn interpolation_stays_in_range_and_is_monotonic(from: u64, to: u64, a: u32, b: u32, whole: u32) {
            let at = |millis: u32| interpolate(from, to, Duration::from_millis(millis.into()), Duration::from_millis(whole.into()));
            let (early, late) = (at(a.min(b)), at(a.max(b)));
            prop_assert!((from.min(to)..=from.max(to)).contains(&early));
            prop_assert!(early.abs_diff(to) >= late.abs_diff(to));
        }
    }
}

//! The state of simulated devices, and what work, time and faults do to it.
//!
//! What a device reports depends on the time and on what changed when, never on how often anybody looked: loads keep
//! the moment they began, and every curve is told from there.

use std::sync::Arc;
use std::time::Duration;

use gpupool_core::{Bytes, Percent, Share, Vendor};

use crate::limits;
use crate::simulated::faults::{FaultError, SimulatedFault};
use crate::simulated::layout::{self, Device, DevicePosition, FaultTarget, NoSuchDevice, mixed};
use crate::simulated::spec::{SimulationSpec, Timing};
use crate::source_reading::DetectedLink;

/// Simulated devices with what is on them. Time is what it is told.
#[derive(Debug, Clone)]
pub struct SimulatedMachine {
    seed: u64,
    pub(super) timing: Timing,
    pub(super) now: Duration,
    pub(super) devices: Vec<Device>,
    pub(super) links: Vec<DetectedLink>,
    pub(super) states: Vec<State>,
    /// Of each GPU.
    heats: Vec<Heat>,
}

/// What is on one device.
#[derive(Debug, Clone, Default)]
pub(super) struct State {
    /// In the order they came.
    pub running: Vec<Running>,
    pub draining: Vec<Draining>,
    pub faults: Vec<SimulatedFault>,
}

/// A fault and the device it is on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFault {
    /// Place of the device.
    pub place: DevicePosition,
    /// Its UUID.
    pub uuid: std::sync::Arc<str>,
    /// What is wrong with it.
    pub fault: SimulatedFault,
}

/// Why a fault is not set or cleared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// There is no such device.
    #[error(transparent)]
    NoSuchDevice(#[from] NoSuchDevice),
    /// There is no such fault.
    #[error(transparent)]
    Fault(#[from] FaultError),
}

/// Why a device takes no load.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// There is no such device.
    #[error(transparent)]
    NoSuchDevice(#[from] NoSuchDevice),
    /// It is cut by MIG: only its instances take work.
    #[error("{0} is cut by MIG; only its instances take work")]
    CutByMig(String),
    /// Too many are on it.
    #[error("{uuid} has {most} loads, and takes no more")]
    TooMany {
        /// Which device.
        uuid: String,
        /// How many it takes.
        most: usize,
    },
}

impl SimulatedMachine {
    /// The devices of a description, idle since long, at time zero.
    pub fn new(spec: &SimulationSpec) -> Self {
        let devices = layout::devices(spec);
        let gpus = devices.last().map_or(0, |device| device.gpu + 1);
        let mut world = Self {
            seed: spec.seed,
            timing: spec.timing.clone(),
            now: Duration::ZERO,
            links: layout::links(&devices),
            states: vec![State::default(); devices.len()],
            heats: vec![Heat::steady(0.0); gpus],
            devices,
        };
        let mut place = 0;
        for cards in &spec.cards {
            for _ in 0..cards.device_count() {
                let faults = cards.faults.iter().filter(|fault| world.takes(place, fault));
                world.states[place].faults = faults.cloned().collect();
                place += 1;
            }
        }
        for gpu in 0..gpus {
            world.heats[gpu] = Heat::steady(world.steady_celsius(gpu));
        }
        world
    }

    /// Goes on to a time; a time that has passed already changes nothing.
    pub(super) fn advance(&mut self, to: Duration) {
        self.now = self.now.max(to);
        let (now, timing) = (self.now, &self.timing);
        for state in &mut self.states {
            state.draining.retain(|draining| !draining.memory_at(now, timing).is_zero());
        }
    }

    /// Puts work of `holder` on a device, or changes the work it has there.
    pub(super) fn set_load(
        &mut self,
        place: DevicePosition,
        holder: u64,
        load: SimulatedLoad,
    ) -> Result<(), LoadError> {
        let device = self.devices.get(place.0).ok_or_else(|| self.missing(&FaultTarget::Position(place)))?;
        if device.is_cut_by_mig() {
            return Err(LoadError::CutByMig(device.uuid.to_string()));
        }
        let (now, timing, vendor) = (self.now, &self.timing, device.model.vendor);
        let state = &mut self.states[place.0];
        let full = state.running.len() >= limits::PROCESSES;
        match state.running.iter_mut().find(|running| running.holder == holder) {
            Some(running) if running.load == load => {}
            Some(running) => *running = running.changed(load, vendor, now, timing),
            None if full => {
                return Err(LoadError::TooMany { uuid: device.uuid.to_string(), most: limits::PROCESSES });
            }
            None => {
                let salt = mixed(self.seed, &[device.uuid.as_bytes(), &place.0.to_le_bytes(), &holder.to_le_bytes()]);
                state.running.push(Running::begin(holder, load, salt, vendor, now, timing));
            }
        }
        self.turn_heat(place.0);
        Ok(())
    }

    /// Takes the work of `holder` off a device, if it has any there: it stops at once, its memory is freed soon after.
    pub(super) fn clear_load(&mut self, place: DevicePosition, holder: u64) {
        let Some(state) = self.states.get_mut(place.0) else { return };
        let Some(found) = state.running.iter().position(|running| running.holder == holder) else { return };
        let gone = state.running.remove(found);
        if state.draining.len() < limits::PROCESSES {
            state.draining.push(gone.drained(self.now, &self.timing));
        }
        self.turn_heat(place.0);
    }

    /// Lets something go wrong with devices, and says with how many.
    pub fn inject_fault(&mut self, target: &FaultTarget, fault: &SimulatedFault) -> Result<usize, ControlError> {
        fault.check()?;
        let places = self.meant(target)?;
        for &place in &places {
            if !self.takes(place, fault) {
                continue;
            }
            let faults = &mut self.states[place].faults;
            faults.retain(|other| !fault.replaces(other));
            if faults.len() < limits::PROCESSES {
                faults.push(fault.clone());
            }
            self.turn_heat(place);
        }
        Ok(places.len())
    }

    /// Makes devices well again, or takes away one kind of fault, and says how many faults that were.
    pub(super) fn clear_faults(&mut self, target: &FaultTarget, kind: Option<&str>) -> Result<usize, ControlError> {
        kind.map_or(Ok(()), SimulatedFault::check_kind)?;
        let mut cleared = 0;
        for place in self.meant(target)? {
            let faults = &mut self.states[place].faults;
            let before = faults.len();
            faults.retain(|fault| kind.is_some_and(|kind| fault.kind() != kind));
            cleared += before - faults.len();
            self.turn_heat(place);
        }
        Ok(cleared)
    }

    /// Everything that is wrong now.
    pub(super) fn faults(&self) -> Vec<DeviceFault> {
        let of = |(place, state): (usize, &State)| {
            let uuid = self.devices[place].uuid.clone();
            let told = |fault: &SimulatedFault| DeviceFault {
                place: DevicePosition(place),
                uuid: uuid.clone(),
                fault: fault.clone(),
            };
            state.faults.iter().map(told).collect::<Vec<_>>()
        };
        self.states.iter().enumerate().flat_map(of).collect()
    }

    /// How busy a device is, as a counter that never lies would say.
    pub(super) fn busy(&self, place: usize) -> Percent {
        let state = &self.states[place];
        let loads = state.running.iter().map(|running| running.busy_at(self.now, &self.timing));
        whole_at_most(loads.chain(squatting(state)))
    }

    /// How busy the devices of a card are together, as a part of the card.
    pub(super) fn busy_of_card(&self, device: &Device) -> Percent {
        let places = device.on_card.clone();
        let sum = self.weighted(places, |place| self.busy(place));
        Percent((sum / u64::from(device.model.dies.max(1))).min(Percent::FULL.0.into()) as u32)
    }

    /// How warm the chip of a device is.
    pub(super) fn celsius(&self, device: &Device) -> f64 {
        self.heats[device.gpu].at(self.now, self.timing.temperature)
    }

    /// What of memory is in use, load by load; together never more than `most`.
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

    pub(super) fn missing(&self, target: &FaultTarget) -> NoSuchDevice {
        let there_are = self.devices.iter().take(8).map(|device| device.uuid.to_string()).collect();
        NoSuchDevice { target: target.to_string(), there_are }
    }

    fn meant(&self, target: &FaultTarget) -> Result<Vec<usize>, NoSuchDevice> {
        let means = |place: &usize| target.means(*place, &self.devices[*place]);
        let places: Vec<usize> = (0..self.devices.len()).filter(means).collect();
        if places.is_empty() { Err(self.missing(target)) } else { Ok(places) }
    }

    /// Nobody squats on a GPU that is cut by MIG: only its instances take work.
    fn takes(&self, place: usize, fault: &SimulatedFault) -> bool {
        !(matches!(fault, SimulatedFault::Squatter { .. }) && self.devices[place].is_cut_by_mig())
    }

    fn turn_heat(&mut self, place: usize) {
        let gpu = self.devices[place].gpu;
        let celsius = self.steady_celsius(gpu);
        self.heats[gpu].turn(celsius, self.now, self.timing.temperature);
    }

    /// How warm a GPU gets with what is on it: as its power, between idle and full load.
    fn steady_celsius(&self, gpu: usize) -> f64 {
        let Some(device) = self.devices.iter().find(|device| device.gpu == gpu) else { return 0.0 };
        let (idle, hot) = device.model.celsius;
        let busy = self.weighted(device.on_gpu.clone(), |place| {
            let state = &self.states[place];
            whole_at_most(state.running.iter().map(Running::steady).chain(squatting(state)))
        });
        // Slots of a machine are not equally well cooled.
        let slot = mixed(self.seed, &[device.uuid.as_bytes(), b"slot"]) % 4;
        let part = busy.min(Percent::FULL.0.into()) as f64 / f64::from(Percent::FULL.0);
        f64::from(idle) + slot as f64 + f64::from(hot - idle) * part
    }

    /// The sum over devices, each by how much of its GPU it is.
    fn weighted(&self, places: std::ops::Range<usize>, busy: impl Fn(usize) -> Percent) -> u64 {
        places.map(|place| u64::from(busy(place).0) * u64::from(self.devices[place].share_of_gpu.0) / 1000).sum()
    }
}

/// Memory in use on a device.
pub(super) struct MemoryInUse {
    /// Of each squatter, in the order of the faults.
    pub squatters: Vec<Bytes>,
    /// Of each load, in their order.
    pub loads: Vec<Bytes>,
    /// All of it, with what is not freed yet.
    pub all: Bytes,
}

fn squatting(state: &State) -> impl Iterator<Item = Percent> {
    state.faults.iter().map(|fault| match fault {
        SimulatedFault::Squatter { utilization, .. } => Percent(u32::from(*utilization) * 1000),
        _ => Percent(0),
    })
}

fn whole_at_most(parts: impl Iterator<Item = Percent>) -> Percent {
    let sum = parts.map(|part| u64::from(part.0)).sum::<u64>();
    Percent(sum.min(Percent::FULL.0.into()) as u32)
}

// Work on one device, and what it uses at any moment.

/// Work that somebody does on a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SimulatedLoad {
    /// How much of the device (of the partition, where it is one) it may use.
    pub share: Share,
    /// How much memory it may use; it uses most of it, and never less than a driver needs for a process.
    pub memory: Bytes,
    /// Its process; made up where there is none.
    pub pid: Option<u32>,
    /// The name of its process.
    pub name: Option<Arc<str>>,
}

/// A load since it began or last changed.
#[derive(Debug, Clone)]
pub(crate) struct Running {
    pub holder: u64,
    pub load: SimulatedLoad,
    pub pid: u32,
    /// Differs between loads, so that not all of them waver alike.
    salt: u64,
    since: Duration,
    memory: (Bytes, Bytes),
    busy: (Percent, Percent),
}

/// Memory of a load that is gone, until the driver has freed it.
#[derive(Debug, Clone)]
pub(crate) struct Draining {
    since: Duration,
    memory: Bytes,
}

impl Running {
    pub(super) fn begin(
        holder: u64,
        load: SimulatedLoad,
        salt: u64,
        vendor: Vendor,
        now: Duration,
        timing: &Timing,
    ) -> Self {
        let made_up = 100_000 + (mixed(salt, &[b"pid"]) % 4_000_000) as u32;
        let context = context(vendor);
        let running = Self {
            holder,
            pid: load.pid.unwrap_or(made_up),
            load: SimulatedLoad::default(),
            salt,
            since: now,
            memory: (context, context),
            busy: (Percent(0), Percent(0)),
        };
        running.changed(load, vendor, now, timing)
    }

    /// The same holder with another load: it goes on from what it uses now.
    pub(super) fn changed(&self, load: SimulatedLoad, vendor: Vendor, now: Duration, timing: &Timing) -> Self {
        // Programs leave a few percent of what they were promised unused.
        let fill = Share(880 + (mixed(self.salt, &[b"fill"]) % 100) as u32);
        Self {
            since: now,
            memory: (self.memory_at(now, timing), load.memory.part(fill).max(context(vendor))),
            busy: (self.steady_part(now, timing), Percent::of_share(load.share.min(Share::WHOLE))),
            pid: load.pid.unwrap_or(self.pid),
            load,
            ..*self
        }
    }

    pub(super) fn drained(&self, now: Duration, timing: &Timing) -> Draining {
        Draining { since: now, memory: self.memory_at(now, timing) }
    }

    /// Memory it uses, the driver's part for its process included.
    pub(super) fn memory_at(&self, now: Duration, timing: &Timing) -> Bytes {
        let (from, to) = self.memory;
        Bytes(between(from.0, to.0, now.saturating_sub(self.since), timing.memory_ramp))
    }

    /// How busy it keeps the device: its share, less a tenth at most, differently each second.
    pub(super) fn busy_at(&self, now: Duration, timing: &Timing) -> Percent {
        let second = now.as_secs().to_le_bytes();
        let waver = 900 + mixed(self.salt, &[b"waver", &second]) % 101;
        Percent((u64::from(self.steady_part(now, timing).0) * waver / 1000) as u32)
    }

    /// How busy it keeps the device in the long run.
    pub(super) fn steady(&self) -> Percent {
        self.busy.1
    }

    fn steady_part(&self, now: Duration, timing: &Timing) -> Percent {
        let (from, to) = self.busy;
        let part = between(from.0.into(), to.0.into(), now.saturating_sub(self.since), timing.utilization_ramp);
        Percent(part as u32)
    }
}

impl Draining {
    pub(super) fn memory_at(&self, now: Duration, timing: &Timing) -> Bytes {
        Bytes(between(self.memory.0, 0, now.saturating_sub(self.since), timing.memory_drain))
    }
}

/// Memory a driver needs for each process.
fn context(vendor: Vendor) -> Bytes {
    let mib = if vendor == Vendor::Amd { 280 } else { 416 };
    Bytes::from_mib(mib).unwrap_or_default()
}

/// The way from `from` to `to` that is done when `passed` of `whole` has passed, exactly and evenly.
fn between(from: u64, to: u64, passed: Duration, whole: Duration) -> u64 {
    if passed >= whole {
        return to;
    }
    // Not zero: something smaller was compared with it. Thousandths of milliseconds keep the products small.
    let (passed, whole) = (passed.as_micros(), whole.as_micros().max(1));
    let way = u128::from(from.abs_diff(to)) * passed / whole;
    let way = u64::try_from(way).unwrap_or(u64::MAX);
    if from < to { from.saturating_add(way).min(to) } else { from.saturating_sub(way).max(to) }
}

// How warm a chip is: it nears the temperature of its work exponentially, so any moment can be told without those
// before it.

#[derive(Debug, Clone)]
pub(crate) struct Heat {
    since: Duration,
    from_c: f64,
    to_c: f64,
}

impl Heat {
    pub(super) fn steady(celsius: f64) -> Self {
        Self { since: Duration::ZERO, from_c: celsius, to_c: celsius }
    }

    /// The temperature at `now`, if two thirds of the way take `constant`.
    pub(super) fn at(&self, now: Duration, constant: Duration) -> f64 {
        if constant.is_zero() {
            return self.to_c;
        }
        let passed = now.saturating_sub(self.since).as_secs_f64() / constant.as_secs_f64();
        self.to_c + (self.from_c - self.to_c) * (-passed).exp()
    }

    /// From `now` on it nears `celsius`. Nothing changes where it did so already, so that asking twice is asking once.
    pub(super) fn turn(&mut self, celsius: f64, now: Duration, constant: Duration) {
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
    fn half_of_the_time_is_half_of_the_way() {
        let secs = Duration::from_secs;
        assert_eq!(between(100, 200, secs(1), secs(2)), 150);
        assert_eq!(between(200, 100, secs(1), secs(2)), 150);
        assert_eq!(between(200, 100, secs(3), secs(2)), 100);
        assert_eq!(between(200, 100, secs(0), secs(0)), 100);
    }

    proptest! {
        #[test]
        fn the_way_is_never_left_and_never_turned(from: u64, to: u64, a: u32, b: u32, whole: u32) {
            let at = |millis: u32| between(from, to, Duration::from_millis(millis.into()), Duration::from_millis(whole.into()));
            let (early, late) = (at(a.min(b)), at(a.max(b)));
            prop_assert!((from.min(to)..=from.max(to)).contains(&early));
            prop_assert!(early.abs_diff(to) >= late.abs_diff(to));
        }
    }
}

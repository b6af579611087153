//! Simulated devices: a [`crate::DeviceSource`] like any other.
//!
//! A [`SimulationSpec`] describes the devices (`--simulate 4xH100`, or a TOML file). A [`SimulatedMachine`] is their
//! pure state; time is an argument. [`SimulatedSource`] reads it by a clock. [`SimulationControl`] applies the load of
//! leases and injects faults.

mod faults;
mod layout;
mod models;
mod physics;
mod reading;
mod spec;

pub use faults::{DeviceField, FaultError, RowRemapState, SimulatedFault};
pub use layout::{DevicePosition, FaultTarget, NoSuchDevice};
pub use models::{UnknownModel, model_names};
pub use physics::{ControlError, DeviceFault, LoadError, SimulatedLoad, SimulatedMachine};
pub use spec::{SimulationSpec, SimulationSpecError};

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gpupool_core::DeviceIdentity;

use crate::source::{DeviceSource, SourceError, SourceKind};
use crate::source_reading::SourceReading;

/// Source that reads simulated devices.
#[derive(Debug)]
pub struct SimulatedSource {
    shared: Arc<SharedSimulation>,
}

/// Control of simulated devices: their load and faults. Clones control the same devices.
#[derive(Debug, Clone)]
pub struct SimulationControl {
    shared: Arc<SharedSimulation>,
}

/// Description of a simulated device for its controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimulatedDevice {
    /// Position among all devices.
    pub place: DevicePosition,
    /// Permanent identity.
    pub identity: DeviceIdentity,
    /// Index in the source's listing; MIG instances have none.
    pub index: Option<u32>,
    /// UUID, shared by the partitions of an AMD card.
    pub uuid: Arc<str>,
    pub name: &'static str,
}

/// A lock instead of messages, because a hung driver is a reading that waits inside the source while another thread
/// clears the fault, and because a thread that owns the devices would have to outlive every reading.
struct SharedSimulation {
    state: Mutex<SimulationState>,
    /// Notifies readings that wait for a hung driver that faults changed.
    faults_changed: Condvar,
    /// Notifies that a reading began to wait.
    reading_blocked: Condvar,
}

struct SimulationState {
    machine: SimulatedMachine,
    clock: Box<dyn Fn() -> Duration + Send>,
    blocked: usize,
}

impl SimulatedSource {
    /// Creates the source of the described devices with a clock, and its control.
    pub fn new(spec: &SimulationSpec, clock: impl Fn() -> Duration + Send + 'static) -> (Self, SimulationControl) {
        let state = SimulationState { machine: SimulatedMachine::new(spec), clock: Box::new(clock), blocked: 0 };
        let shared = Arc::new(SharedSimulation {
            state: Mutex::new(state),
            faults_changed: Condvar::new(),
            reading_blocked: Condvar::new(),
        });
        (Self { shared: shared.clone() }, SimulationControl { shared })
    }
}

impl DeviceSource for SimulatedSource {
    fn kind(&self) -> SourceKind {
        SourceKind::Simulated
    }

    fn read(&mut self) -> Result<SourceReading, SourceError> {
        let mut state = self.shared.wait_for_driver()?;
        state.advance_to_now();
        state.machine.reading()
    }
}

impl SimulationControl {
    /// Sets the load of `holder` on a device.
    pub fn set_load(&self, place: DevicePosition, holder: u64, load: SimulatedLoad) -> Result<(), LoadError> {
        self.shared.lock_current().machine.set_load(place, holder, load)
    }

    /// Removes the load of `holder` from a device, if any.
    pub fn clear_load(&self, place: DevicePosition, holder: u64) {
        self.shared.lock_current().machine.clear_load(place, holder);
    }

    /// Injects a fault, and returns the number of targeted devices.
    pub fn inject_fault(&self, target: &FaultTarget, fault: &SimulatedFault) -> Result<usize, ControlError> {
        let count = self.shared.lock_current().machine.inject_fault(target, fault);
        self.shared.faults_changed.notify_all();
        count
    }

    /// Clears all faults of devices, or those of one kind (see [`SimulatedFault::KINDS`]), and returns their number.
    /// Readings that wait for the driver continue.
    pub fn clear_faults(&self, target: &FaultTarget, kind: Option<&str>) -> Result<usize, ControlError> {
        let count = self.shared.lock_current().machine.clear_faults(target, kind);
        self.shared.faults_changed.notify_all();
        count
    }

    pub fn faults(&self) -> Vec<DeviceFault> {
        self.shared.lock_current().machine.faults()
    }

    /// Returns all devices, including vanished ones.
    pub fn devices(&self) -> Vec<SimulatedDevice> {
        self.shared.lock_current().machine.list_devices()
    }

    /// Waits until a hung or slow driver blocks a reading; `false` if none is blocked by then.
    pub fn wait_for_blocked_reading(&self, at_most: Duration) -> bool {
        let none_blocked = |state: &mut SimulationState| state.blocked == 0;
        let waited = self.shared.reading_blocked.wait_timeout_while(self.shared.lock(), at_most, none_blocked);
        waited.unwrap_or_else(PoisonError::into_inner).0.blocked > 0
    }
}

impl SharedSimulation {
    /// Ignores poisoning: a panic at worst leaves wrong values of simulated devices.
    fn lock(&self) -> MutexGuard<'_, SimulationState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_current(&self) -> MutexGuard<'_, SimulationState> {
        let mut state = self.lock();
        state.advance_to_now();
        state
    }

    /// Waits in real time while the driver is hung or slow, because a test's clock stands still meanwhile.
    fn wait_for_driver(&self) -> Result<MutexGuard<'_, SimulationState>, SourceError> {
        let started = Instant::now();
        let mut state = self.lock();
        loop {
            let waited = started.elapsed();
            let (hung, slow) = state.machine.driver_delays();
            let wait = match hung {
                Some(patience) if waited >= patience => {
                    return Err(SourceError::Unresponsive { what: "simulated driver".into(), after: waited });
                }
                Some(patience) => patience - waited,
                None if waited < slow => slow - waited,
                None => return Ok(state),
            };
            state.blocked += 1;
            self.reading_blocked.notify_all();
            let woken = self.faults_changed.wait_timeout(state, wait);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
            state.blocked -= 1;
        }
    }
}

impl SimulationState {
    fn advance_to_now(&mut self) {
        let now = (self.clock)();
        self.machine.advance(now);
    }
}

impl SimulatedMachine {
    /// Returns the time that readings hang, if any, and the time that they take.
    fn driver_delays(&self) -> (Option<Duration>, Duration) {
        let faults = || self.states.iter().flat_map(|state| &state.faults);
        let hung = faults().filter_map(|fault| match fault {
            SimulatedFault::HungDriver { seconds } => Some(Duration::from_secs((*seconds).into())),
            _ => None,
        });
        (hung.max(), faults().map(SimulatedFault::delay).max().unwrap_or_default())
    }

    fn list_devices(&self) -> Vec<SimulatedDevice> {
        let identities = self.identity_reading().identities();
        let device = |(place, identity): (usize, DeviceIdentity)| {
            let device = &self.devices[place];
            let (index, uuid, name) = (device.index, device.uuid.clone(), device.model.name);
            SimulatedDevice { place: DevicePosition(place), identity, index, uuid, name }
        };
        identities.into_iter().enumerate().map(device).collect()
    }
}

impl fmt::Debug for SharedSimulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

/// A clock that advances only on demand, for tests. Clones share the time.
#[derive(Debug, Clone, Default)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    pub fn advance(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| Some(now.saturating_add(nanos)));
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::SeqCst))
    }

    /// Returns the clock as a function for [`SimulatedSource`].
    pub fn ticking(&self) -> impl Fn() -> Duration + Send + 'static {
        let clock = self.clone();
        move || clock.now()
    }
}

/// Returns a clock of real time that starts at zero.
pub fn monotonic_clock() -> impl Fn() -> Duration + Send + 'static {
    let start = Instant::now();
    move || start.elapsed()
}

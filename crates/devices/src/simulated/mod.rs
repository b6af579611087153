//! Devices that do not exist and behave as if they did: a [`crate::DeviceSource`] like any other.
//!
//! A [`SimulationSpec`] says which devices there are (`--simulate 4xH100`, or a TOML file). A [`SimulatedMachine`] is their state: pure,
//! time is an argument. [`SimulatedSource`] is the source that reads it by a clock, and [`SimulationControl`] the handle by
//! which an agent puts the load of its leases on them and a person makes them fail.

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

/// Devices that do not exist, as a source like any other.
#[derive(Debug)]
pub struct SimulatedSource {
    shared: Arc<Shared>,
}

/// Puts load on simulated devices and makes them fail. Its clones control the same devices.
#[derive(Debug, Clone)]
pub struct SimulationControl {
    shared: Arc<Shared>,
}

/// A simulated device, as it is known to whoever controls it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimulatedDevice {
    /// Where it is among all of them.
    pub place: DevicePosition,
    /// What makes it the same device after a restart.
    pub identity: DeviceIdentity,
    /// The number the source gives it; MIG instances have none.
    pub index: Option<u32>,
    /// Its UUID, which parts of one AMD card share.
    pub uuid: Arc<str>,
    pub name: &'static str,
}

/// A lock rather than messages, because a hung driver is a reading that waits inside the source while somebody else
/// clears the fault, and because a thread that would own the devices would have to outlive every reading.
struct Shared {
    state: Mutex<State>,
    /// Faults changed: whoever waits for a hung driver looks again.
    faults_changed: Condvar,
    /// A reading began to wait.
    reading_blocked: Condvar,
}

struct State {
    world: SimulatedMachine,
    clock: Box<dyn Fn() -> Duration + Send>,
    blocked: usize,
}

impl SimulatedSource {
    /// The devices of a description by the time of a clock, and the handle that controls them.
    pub fn new(spec: &SimulationSpec, clock: impl Fn() -> Duration + Send + 'static) -> (Self, SimulationControl) {
        let state = State { world: SimulatedMachine::new(spec), clock: Box::new(clock), blocked: 0 };
        let shared = Arc::new(Shared {
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
        let mut state = self.shared.once_driver_answers()?;
        state.catch_up();
        state.world.reading()
    }
}

impl SimulationControl {
    /// Puts work of `holder` on a device, or changes the work it has there.
    pub fn set_load(&self, place: DevicePosition, holder: u64, load: SimulatedLoad) -> Result<(), LoadError> {
        self.shared.now().world.set_load(place, holder, load)
    }

    /// Takes the work of `holder` off a device, if it has any there.
    pub fn clear_load(&self, place: DevicePosition, holder: u64) {
        self.shared.now().world.clear_load(place, holder);
    }

    /// Lets something go wrong with devices, and says with how many.
    pub fn inject_fault(&self, target: &FaultTarget, fault: &SimulatedFault) -> Result<usize, ControlError> {
        let done = self.shared.now().world.inject_fault(target, fault);
        self.shared.faults_changed.notify_all();
        done
    }

    /// Makes devices well again, or takes away one kind of fault (see [`SimulatedFault::KINDS`]), and says how many faults that
    /// were. Readings that wait for the driver go on.
    pub fn clear_faults(&self, target: &FaultTarget, kind: Option<&str>) -> Result<usize, ControlError> {
        let done = self.shared.now().world.clear_faults(target, kind);
        self.shared.faults_changed.notify_all();
        done
    }

    /// Everything that is wrong now.
    pub fn faults(&self) -> Vec<DeviceFault> {
        self.shared.now().world.faults()
    }

    /// All devices, vanished ones too.
    pub fn devices(&self) -> Vec<SimulatedDevice> {
        self.shared.now().world.identified()
    }

    /// Waits until a reading is blocked by a driver that is hung or slow; `false` if none is by then.
    pub fn wait_for_blocked_reading(&self, at_most: Duration) -> bool {
        let none_blocked = |state: &mut State| state.blocked == 0;
        let waited = self.shared.reading_blocked.wait_timeout_while(self.shared.lock(), at_most, none_blocked);
        waited.unwrap_or_else(PoisonError::into_inner).0.blocked > 0
    }
}

impl Shared {
    /// A panic elsewhere leaves readings that are wrong at worst, of devices that do not exist.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        state.catch_up();
        state
    }

    /// Waits while the driver is hung or slow, in real time: a clock of a test stands still meanwhile.
    fn once_driver_answers(&self) -> Result<MutexGuard<'_, State>, SourceError> {
        let asked = Instant::now();
        let mut state = self.lock();
        loop {
            let waited = asked.elapsed();
            let (hung, slow) = state.world.holds_up();
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

impl State {
    fn catch_up(&mut self) {
        let now = (self.clock)();
        self.world.advance(now);
    }
}

impl SimulatedMachine {
    /// For how long readings hang, if they do, and how long they take.
    fn holds_up(&self) -> (Option<Duration>, Duration) {
        let faults = || self.states.iter().flat_map(|state| &state.faults);
        let hung = faults().filter_map(|fault| match fault {
            SimulatedFault::HungDriver { seconds } => Some(Duration::from_secs((*seconds).into())),
            _ => None,
        });
        (hung.max(), faults().map(SimulatedFault::slowness).max().unwrap_or_default())
    }

    fn identified(&self) -> Vec<SimulatedDevice> {
        let identities = self.whole().identities();
        let device = |(place, identity): (usize, DeviceIdentity)| {
            let device = &self.devices[place];
            let (index, uuid, name) = (device.index, device.uuid.clone(), device.model.name);
            SimulatedDevice { place: DevicePosition(place), identity, index, uuid, name }
        };
        identities.into_iter().enumerate().map(device).collect()
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

/// A clock that goes on only when told to, for tests. Its clones show the same time.
#[derive(Debug, Clone, Default)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// Lets so much time pass.
    pub fn advance(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| Some(now.saturating_add(nanos)));
    }

    /// The time it shows.
    fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::SeqCst))
    }

    /// The clock as [`SimulatedSource`] takes it.
    pub fn ticking(&self) -> impl Fn() -> Duration + Send + 'static {
        let clock = self.clone();
        move || clock.now()
    }
}

/// A clock that shows real time, from zero now.
pub fn monotonic_clock() -> impl Fn() -> Duration + Send + 'static {
    let start = Instant::now();
    move || start.elapsed()
}

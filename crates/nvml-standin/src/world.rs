//! The machine behind the functions: the scenario as it is now, and which device a handle means.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvml_wrapper_sys::bindings as nvml;

use crate::scenario::{NvmlScenario, StandInDevice, StandInMigInstance, StandInXidEvent};

/// A code of the library other than success.
pub type Code = u32;

#[derive(Default)]
struct State {
    text: String,
    scenario: Arc<NvmlScenario>,
    initialised: u32,
    events: VecDeque<StandInXidEvent>,
    registered: Vec<u32>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// Starts the library.
pub fn initialise(folder: Option<PathBuf>) {
    read_again(folder);
    with(|state| state.initialised += 1);
}

/// Ends it.
pub fn shut_down() -> Result<(), Code> {
    with(|state| {
        let left = state.initialised.checked_sub(1).ok_or(nvml::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED)?;
        state.initialised = left;
        Ok(())
    })
}

/// Reads the scenario again, where it changed.
pub fn read_again(folder: Option<PathBuf>) {
    let Some(text) = folder.and_then(|folder| std::fs::read_to_string(folder.join("scenario.json")).ok()) else {
        return;
    };
    with(|state| {
        if state.text == text {
            return;
        }
        match serde_json::from_str::<NvmlScenario>(&text) {
            Ok(scenario) => {
                state.events = scenario.events.iter().copied().collect();
                state.scenario = Arc::new(scenario);
                state.text = text;
            }
            Err(error) => eprintln!("nvml stand-in: scenario.json: {error}"),
        }
    });
}

/// The scenario, unless the library was not started or the scenario has another answer for this function.
pub fn scenario(function: &str) -> Result<Arc<NvmlScenario>, Code> {
    let (scenario, initialised) = with(|state| (state.scenario.clone(), state.initialised));
    if let Some(file) = scenario.hangs.get(function) {
        let _ = std::fs::write(file.with_added_extension("reached"), function);
        while file.exists() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    if let Some(&code) = scenario.errors.get(function) {
        return Err(code);
    }
    if initialised == 0 { Err(nvml::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED) } else { Ok(scenario) }
}

/// Tells of these kinds of events of a device from now on.
pub fn register(device: u32) {
    with(|state| state.registered.push(device));
}

/// Forgets whose events are wanted.
pub fn unregister_all() {
    with(|state| state.registered.clear());
}

/// The next event of a device that is registered.
pub fn next_event() -> Option<StandInXidEvent> {
    with(|state| {
        let place = state.events.iter().position(|event| state.registered.contains(&event.device))?;
        state.events.remove(place)
    })
}

/// What a handle means: the number of a device, and the slot of an instance on it.
#[derive(Debug, Clone, Copy)]
pub struct Handle {
    pub device: u32,
    pub slot: Option<u32>,
}

impl Handle {
    /// The handle as the caller keeps it: never null, never followed.
    pub fn to_raw(self) -> nvml::nvmlDevice_t {
        let number = (self.device as usize + 1) << 8 | self.slot.map_or(0, |slot| slot as usize + 1);
        std::ptr::without_provenance_mut(number)
    }

    /// What a raw handle means, if it is one of ours.
    pub fn from_raw(raw: nvml::nvmlDevice_t) -> Option<Self> {
        let number = raw.addr();
        let device = u32::try_from((number >> 8).checked_sub(1)?).ok()?;
        Some(Self { device, slot: (number as u32 & 0xff).checked_sub(1) })
    }

    /// The device, and the instance on it.
    pub fn find<'a>(self, function: &str, scenario: &'a NvmlScenario) -> Result<Target<'a>, Code> {
        let device =
            scenario.devices.get(self.device as usize).ok_or(nvml::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT)?;
        if let Some(&code) = device.errors.get(function).or_else(|| device.errors.get("*")) {
            return Err(code);
        }
        let instance = match self.slot {
            None => None,
            Some(slot) => {
                let slots = device.mig.as_ref().filter(|mig| mig.on).map_or(&[][..], |mig| &mig.slots);
                let instance = slots.get(slot as usize).and_then(Option::as_ref);
                Some(instance.ok_or(nvml::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT)?)
            }
        };
        Ok(Target { handle: self, device, instance })
    }
}

/// A device that was asked for something.
pub struct Target<'a> {
    pub handle: Handle,
    pub device: &'a StandInDevice,
    pub instance: Option<&'a StandInMigInstance>,
}

fn with<T>(f: impl FnOnce(&mut State) -> T) -> T {
    let mut guard: MutexGuard<'_, Option<State>> = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    f(guard.get_or_insert_default())
}

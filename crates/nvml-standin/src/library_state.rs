//! State of the library: the current scenario, and the device of a handle.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvml_wrapper_sys::bindings as nvml;

use crate::scenario::{NvmlScenario, StandInDevice, StandInMigInstance, StandInXidEvent};

/// NVML return code other than success.
pub type NvmlReturn = u32;

#[derive(Default)]
struct LibraryState {
    text: String,
    scenario: Arc<NvmlScenario>,
    initialised: u32,
    events: VecDeque<StandInXidEvent>,
    registered: Vec<u32>,
}

static STATE: Mutex<Option<LibraryState>> = Mutex::new(None);

/// Initializes the library.
pub fn initialize(folder: Option<PathBuf>) {
    reload_scenario(folder);
    with_state(|state| state.initialised += 1);
}

/// Shuts the library down.
pub fn shutdown() -> Result<(), NvmlReturn> {
    with_state(|state| {
        let left = state.initialised.checked_sub(1).ok_or(nvml::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED)?;
        state.initialised = left;
        Ok(())
    })
}

/// Reloads the scenario if its file changed.
pub fn reload_scenario(folder: Option<PathBuf>) {
    let Some(text) = folder.and_then(|folder| std::fs::read_to_string(folder.join("scenario.json")).ok()) else {
        return;
    };
    with_state(|state| {
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

/// Returns the scenario; an error if the library is not initialized or the scenario has an error for this function.
pub fn scenario(function: &str) -> Result<Arc<NvmlScenario>, NvmlReturn> {
    let (scenario, initialised) = with_state(|state| (state.scenario.clone(), state.initialised));
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

/// Registers a device for events.
pub fn register_events(device: u32) {
    with_state(|state| state.registered.push(device));
}

/// Unregisters all devices.
pub fn unregister_all() {
    with_state(|state| state.registered.clear());
}

/// Returns the next event of a registered device.
pub fn next_event() -> Option<StandInXidEvent> {
    with_state(|state| {
        let place = state.events.iter().position(|event| state.registered.contains(&event.device))?;
        state.events.remove(place)
    })
}

/// Decoded handle: device index and MIG instance slot.
#[derive(Debug, Clone, Copy)]
pub struct StandInHandle {
    pub device: u32,
    pub slot: Option<u32>,
}

impl StandInHandle {
    /// Encodes the handle as a pointer that is never null and never dereferenced.
    pub fn to_raw(self) -> nvml::nvmlDevice_t {
        let number = (self.device as usize + 1) << 8 | self.slot.map_or(0, |slot| slot as usize + 1);
        std::ptr::without_provenance_mut(number)
    }

    /// Decodes a raw handle, if it is one of ours.
    pub fn from_raw(raw: nvml::nvmlDevice_t) -> Option<Self> {
        let number = raw.addr();
        let device = u32::try_from((number >> 8).checked_sub(1)?).ok()?;
        Some(Self { device, slot: (number as u32 & 0xff).checked_sub(1) })
    }

    /// Returns the device and the instance on it.
    pub fn find<'a>(self, function: &str, scenario: &'a NvmlScenario) -> Result<HandleTarget<'a>, NvmlReturn> {
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
        Ok(HandleTarget { handle: self, device, instance })
    }
}

/// A device, or an instance on it, that a function queries.
pub struct HandleTarget<'a> {
    pub handle: StandInHandle,
    pub device: &'a StandInDevice,
    pub instance: Option<&'a StandInMigInstance>,
}

fn with_state<T>(f: impl FnOnce(&mut LibraryState) -> T) -> T {
    let mut guard: MutexGuard<'_, Option<LibraryState>> = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    f(guard.get_or_insert_default())
}

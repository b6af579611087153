//! The edge to the C library: every unsafe call is here and gives an [`Answer`].
//!
//! Which functions the library has is found out once, when it is loaded. A function it has not is answered with
//! [`Code::FUNCTION_NOT_FOUND`] without a call.

#![allow(unsafe_code, reason = "calls into NVIDIA's C library")]

use std::ffi::{OsStr, c_char, c_uint, c_ulonglong};

use nvml_wrapper::Nvml as Wrapper;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as nvml;
use nvml_wrapper_sys::bindings::{NvmlLib, nvmlDevice_t, nvmlReturn_t};

use crate::reported::Reported;
use crate::source::SourceError;

/// A device of the library, good until the library is closed or the device is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Handle(nvmlDevice_t);

// SAFETY: NVML may be called from any thread, and a handle is only ever passed back to it.
unsafe impl Send for Handle {}

/// A set of events of the library.
#[derive(Debug, Clone, Copy)]
pub(super) struct EventSet(nvml::nvmlEventSet_t);

// SAFETY: as for a handle.
unsafe impl Send for EventSet {}

/// Memory as the newest function the library has told it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MemoryInfo {
    pub total: u64,
    /// What the driver keeps; `None` where it is part of `used`.
    pub reserved: Option<u64>,
    pub used: u64,
}

/// What became of bad rows of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Remapped {
    pub pending: bool,
    pub failed: bool,
}

/// The size of a MIG instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slices {
    pub gpu: u32,
    pub compute: u32,
    pub memory_mib: u64,
}

/// An event: a device reported an Xid.
#[derive(Debug, Clone, Copy)]
pub(super) struct XidEvent {
    pub device: Handle,
    pub xid: u64,
}

/// The library, loaded and initialised.
pub(super) struct Library {
    wrapper: Wrapper,
}

type NumberCall<T> = unsafe extern "C" fn(nvmlDevice_t, *mut T) -> nvmlReturn_t;
type TextCall = unsafe extern "C" fn(nvmlDevice_t, *mut c_char, c_uint) -> nvmlReturn_t;
type LinkCall<T> = unsafe extern "C" fn(nvmlDevice_t, c_uint, *mut T) -> nvmlReturn_t;

impl Library {
    /// Loads the library of this name or path, and initialises it.
    pub(super) fn open(path: &OsStr) -> Result<Self, SourceError> {
        let missing = |why: String| SourceError::NotPresent { what: path.display().to_string().into(), why };
        match Wrapper::builder().lib_path(path).init() {
            Ok(wrapper) => Ok(Self { wrapper }),
            Err(NvmlError::LibloadingError(error)) => Err(missing(error.to_string())),
            Err(NvmlError::FailedToLoadSymbol(why)) => Err(missing(why)),
            Err(error) => Err(Code::from(error).failure("initialising NVML")),
        }
    }

    pub(super) fn functions(&self) -> &NvmlLib {
        self.wrapper.lib()
    }

    pub(super) fn driver_version(&self) -> Answer<String> {
        Ok(self.wrapper.sys_driver_version()?)
    }

    pub(super) fn device_count(&self) -> Answer<u32> {
        Ok(self.wrapper.device_count()?)
    }

    pub(super) fn device(&self, index: u32) -> Answer<Handle> {
        let call = present(&self.functions().nvmlDeviceGetHandleByIndex_v2)?;
        // SAFETY: the function writes a handle.
        out(std::ptr::null_mut(), |device| unsafe { call(index, device) }).map(Handle)
    }

    pub(super) fn uuid(&self, device: Handle) -> Answer<String> {
        text(&self.functions().nvmlDeviceGetUUID, device)
    }

    pub(super) fn name(&self, device: Handle) -> Answer<String> {
        text(&self.functions().nvmlDeviceGetName, device)
    }

    pub(super) fn minor(&self, device: Handle) -> Answer<u32> {
        number(&self.functions().nvmlDeviceGetMinorNumber, device)
    }

    /// Its place on the bus, as text.
    pub(super) fn pci(&self, device: Handle) -> Answer<String> {
        let functions = self.functions();
        let call = functions.nvmlDeviceGetPciInfo_v3.as_ref().or(functions.nvmlDeviceGetPciInfo_v2.as_ref());
        let call = call.map_err(|_| Code::FUNCTION_NOT_FOUND)?;
        // SAFETY: the function writes the struct.
        out(no_pci(), |info| unsafe { call(device.0, info) }).map(|info| spelled(&info))
    }

    pub(super) fn memory(&self, device: Handle) -> Answer<MemoryInfo> {
        match self.newer_memory(device) {
            Err(code) if code.wants_other_function() => {}
            answer => return answer,
        }
        let call = present(&self.functions().nvmlDeviceGetMemoryInfo)?;
        let empty = nvml::nvmlMemory_t { total: 0, free: 0, used: 0 };
        // SAFETY: the function writes the struct.
        let info = out(empty, |info| unsafe { call(device.0, info) })?;
        Ok(MemoryInfo { total: info.total, reserved: None, used: info.used })
    }

    fn newer_memory(&self, device: Handle) -> Answer<MemoryInfo> {
        let call = present(&self.functions().nvmlDeviceGetMemoryInfo_v2)?;
        let version = (size_of::<nvml::nvmlMemory_v2_t>() | 2 << 24) as c_uint;
        let empty = nvml::nvmlMemory_v2_t { version, total: 0, reserved: 0, free: 0, used: 0 };
        // SAFETY: the function writes the struct of the version that is named in it.
        let info = out(empty, |info| unsafe { call(device.0, info) })?;
        Ok(MemoryInfo { total: info.total, reserved: Some(info.reserved), used: info.used })
    }

    /// In percent.
    pub(super) fn utilization(&self, device: Handle) -> Answer<u32> {
        let call = present(&self.functions().nvmlDeviceGetUtilizationRates)?;
        let empty = nvml::nvmlUtilization_t { gpu: 0, memory: 0 };
        // SAFETY: the function writes the struct.
        out(empty, |rates| unsafe { call(device.0, rates) }).map(|rates| rates.gpu)
    }

    /// In °C, from the function newer drivers want to do without, or else from the one they have instead.
    pub(super) fn temperature(&self, device: Handle) -> Answer<i32> {
        let sensor = nvml::nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU;
        let older = present(&self.functions().nvmlDeviceGetTemperature)
            // SAFETY: the function writes a number.
            .and_then(|call| out(0, |celsius| unsafe { call(device.0, sensor, celsius) }));
        match older {
            Err(code) if code.wants_other_function() => {}
            answer => return answer.map(|celsius| celsius.try_into().unwrap_or(i32::MAX)),
        }
        let call = present(&self.functions().nvmlDeviceGetTemperatureV)?;
        let version = (size_of::<nvml::nvmlTemperature_t>() | 1 << 24) as c_uint;
        let empty = nvml::nvmlTemperature_t { version, sensorType: sensor, temperature: 0 };
        // SAFETY: the function writes the struct of the version that is named in it.
        out(empty, |info| unsafe { call(device.0, info) }).map(|info| info.temperature)
    }

    /// In mW.
    pub(super) fn power(&self, device: Handle) -> Answer<u32> {
        number(&self.functions().nvmlDeviceGetPowerUsage, device)
    }

    /// In mW: what is set, or where nothing can be set, what holds.
    pub(super) fn power_limit(&self, device: Handle) -> Answer<u32> {
        let set = number(&self.functions().nvmlDeviceGetPowerManagementLimit, device);
        set.or_else(|code| number(&self.functions().nvmlDeviceGetEnforcedPowerLimit, device).map_err(|_| code))
    }

    pub(super) fn remapped_rows(&self, device: Handle) -> Answer<Remapped> {
        let call = present(&self.functions().nvmlDeviceGetRemappedRows)?;
        let (mut correctable, mut uncorrectable, mut pending, mut failed) = (0, 0, 0, 0);
        // SAFETY: the function writes four numbers.
        Code::check(unsafe { call(device.0, &mut correctable, &mut uncorrectable, &mut pending, &mut failed) })?;
        Ok(Remapped { pending: pending != 0, failed: failed != 0 })
    }

    pub(super) fn retired_pages_pending(&self, device: Handle) -> Answer<bool> {
        Ok(number(&self.functions().nvmlDeviceGetRetiredPagesPendingStatus, device)? != 0)
    }

    /// Whether MIG is on.
    pub(super) fn mig_mode(&self, device: Handle) -> Answer<bool> {
        let call = present(&self.functions().nvmlDeviceGetMigMode)?;
        let mut pending = 0;
        // SAFETY: the function writes two numbers.
        out(0, |current| unsafe { call(device.0, current, &mut pending) }).map(|current| current != 0)
    }

    /// How many instances there could be; there may be fewer, with holes between them.
    pub(super) fn mig_slots(&self, device: Handle) -> Answer<u32> {
        number(&self.functions().nvmlDeviceGetMaxMigDeviceCount, device)
    }

    pub(super) fn mig_instance(&self, device: Handle, slot: u32) -> Answer<Handle> {
        let empty = std::ptr::null_mut();
        numbered(&self.functions().nvmlDeviceGetMigDeviceHandleByIndex, device, slot, empty).map(Handle)
    }

    pub(super) fn gpu_instance(&self, instance: Handle) -> Answer<u32> {
        number(&self.functions().nvmlDeviceGetGpuInstanceId, instance)
    }

    pub(super) fn compute_instance(&self, instance: Handle) -> Answer<u32> {
        number(&self.functions().nvmlDeviceGetComputeInstanceId, instance)
    }

    pub(super) fn slices(&self, instance: Handle) -> Answer<Slices> {
        let call = present(&self.functions().nvmlDeviceGetAttributes_v2)?;
        // SAFETY: all zeroes is a valid value of this plain struct, which the function writes.
        let empty: nvml::nvmlDeviceAttributes_t = unsafe { std::mem::zeroed() };
        let info = out(empty, |info| unsafe { call(instance.0, info) })?;
        Ok(Slices {
            gpu: info.gpuInstanceSliceCount,
            compute: info.computeInstanceSliceCount,
            memory_mib: info.memorySizeMB,
        })
    }

    /// How near two devices are, as NVML counts it.
    pub(super) fn common_ancestor(&self, one: Handle, other: Handle) -> Answer<u32> {
        let call = present(&self.functions().nvmlDeviceGetTopologyCommonAncestor)?;
        // SAFETY: the function writes a number.
        out(0, |level| unsafe { call(one.0, other.0, level) })
    }

    pub(super) fn nvlink_up(&self, device: Handle, link: u32) -> Answer<bool> {
        Ok(numbered(&self.functions().nvmlDeviceGetNvLinkState, device, link, 0)? != 0)
    }

    pub(super) fn nvlink_ends_at_switch(&self, device: Handle, link: u32) -> Answer<bool> {
        let kind = numbered(&self.functions().nvmlDeviceGetNvLinkRemoteDeviceType, device, link, 0)?;
        Ok(kind == nvml::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH)
    }

    /// The place on the bus of the other end, as text.
    pub(super) fn nvlink_remote(&self, device: Handle, link: u32) -> Answer<String> {
        let functions = self.functions();
        let newer = numbered(&functions.nvmlDeviceGetNvLinkRemotePciInfo_v2, device, link, no_pci());
        let info = match newer {
            Err(code) if code.wants_other_function() => {
                numbered(&functions.nvmlDeviceGetNvLinkRemotePciInfo, device, link, no_pci())
            }
            answer => answer,
        };
        info.map(|info| spelled(&info))
    }

    pub(super) fn new_event_set(&self) -> Answer<EventSet> {
        let call = present(&self.functions().nvmlEventSetCreate)?;
        // SAFETY: the function writes a handle.
        out(std::ptr::null_mut(), |set| unsafe { call(set) }).map(EventSet)
    }

    /// Has Xids of a device told through a set, where the device can.
    pub(super) fn register_xids(&self, device: Handle, set: EventSet) -> Answer<()> {
        let xids = c_ulonglong::from(nvml::nvmlEventTypeXidCriticalError);
        let call = present(&self.functions().nvmlDeviceGetSupportedEventTypes)?;
        // SAFETY: the function writes a number.
        let supported = out(0, |types| unsafe { call(device.0, types) })?;
        if supported & xids == 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let call = present(&self.functions().nvmlDeviceRegisterEvents)?;
        // SAFETY: both handles are of this library.
        Code::check(unsafe { call(device.0, xids, set.0) })
    }

    /// The next event, without waiting for one.
    pub(super) fn next_event(&self, set: EventSet) -> Answer<Option<XidEvent>> {
        let functions = self.functions();
        let call = functions.nvmlEventSetWait_v2.as_ref().or(functions.nvmlEventSetWait.as_ref());
        let call = call.map_err(|_| Code::FUNCTION_NOT_FOUND)?;
        // SAFETY: all zeroes is a valid value of this plain struct, which the function writes.
        let empty: nvml::nvmlEventData_t = unsafe { std::mem::zeroed() };
        match out(empty, |event| unsafe { call(set.0, event, 0) }) {
            Ok(event) => Ok(Some(XidEvent { device: Handle(event.device), xid: event.eventData })),
            Err(Code::TIMEOUT) => Ok(None),
            Err(code) => Err(code),
        }
    }

    pub(super) fn free_event_set(&self, set: EventSet) {
        if let Ok(call) = &self.functions().nvmlEventSetFree {
            // SAFETY: the set is of this library, and its owner lets go of it.
            unsafe { call(set.0) };
        }
    }
}

/// Calls a function that lists the processes of a device; an entry is at most four words.
///
/// Gives how many entries were written, or with the error how many there are.
pub(super) fn list<T>(
    call: unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut T) -> nvmlReturn_t,
    device: Handle,
    room: &mut [[u64; 4]],
) -> Result<u32, (Code, u32)> {
    debug_assert!(size_of::<T>() <= size_of::<[u64; 4]>() && align_of::<T>() <= align_of::<u64>());
    let mut count = c_uint::try_from(room.len()).unwrap_or(c_uint::MAX);
    // SAFETY: an entry is at most four words, so that there is room for as many as are announced.
    let code = unsafe { call(device.0, &mut count, room.as_mut_ptr().cast()) };
    Code::check(code).map(|()| count).map_err(|code| (code, count))
}

fn present<F, E>(function: &Result<F, E>) -> Answer<&F> {
    function.as_ref().map_err(|_| Code::FUNCTION_NOT_FOUND)
}

fn out<T>(empty: T, call: impl FnOnce(&mut T) -> nvmlReturn_t) -> Answer<T> {
    let mut place = empty;
    Code::check(call(&mut place)).map(|()| place)
}

fn number<T: Default, E>(function: &Result<NumberCall<T>, E>, device: Handle) -> Answer<T> {
    let call = present(function)?;
    // SAFETY: the function writes a number.
    out(T::default(), |value| unsafe { call(device.0, value) })
}

fn numbered<T, E>(function: &Result<LinkCall<T>, E>, device: Handle, which: u32, empty: T) -> Answer<T> {
    let call = present(function)?;
    // SAFETY: the function writes what its type says.
    out(empty, |value| unsafe { call(device.0, which, value) })
}

fn text<E>(function: &Result<TextCall, E>, device: Handle) -> Answer<String> {
    /// The most NVML needs for a name or a UUID.
    const ROOM: usize = 96;
    let call = present(function)?;
    let mut buffer: [c_char; ROOM] = [0; ROOM];
    // SAFETY: the function writes at most as many bytes as it is told there are.
    Code::check(unsafe { call(device.0, buffer.as_mut_ptr(), ROOM as c_uint) })?;
    Ok(until_nul(&buffer))
}

fn until_nul(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().take_while(|byte| **byte != 0).map(|byte| *byte as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn no_pci() -> nvml::nvmlPciInfo_t {
    // SAFETY: all zeroes is a valid value of this plain struct.
    unsafe { std::mem::zeroed() }
}

fn spelled(info: &nvml::nvmlPciInfo_t) -> String {
    let text = until_nul(&info.busId);
    if text.is_empty() { until_nul(&info.busIdLegacy) } else { text }
}

// What the library answers instead of a value, sorted by what it is about: a field, a device, or the driver.

/// An answer of the library.
pub(super) type Answer<T> = Result<T, Code>;

/// A return code other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Code(pub u32);

/// What a code speaks against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Against {
    /// This one field.
    Field,
    /// The device needs a reset, or a hand.
    Device,
    /// The device is not there any more.
    Presence,
    /// The driver as a whole: nothing is known of any device.
    Driver,
}

impl Code {
    pub(super) const UNINITIALIZED: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
    pub(super) const INVALID_ARGUMENT: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
    pub(super) const NOT_SUPPORTED: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED);
    pub(super) const NO_PERMISSION: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION);
    pub(super) const NOT_FOUND: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_NOT_FOUND);
    pub(super) const TOO_SMALL: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
    pub(super) const NO_POWER: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_POWER);
    pub(super) const DRIVER_NOT_LOADED: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED);
    pub(super) const TIMEOUT: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_TIMEOUT);
    pub(super) const IRQ: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_IRQ_ISSUE);
    pub(super) const FUNCTION_NOT_FOUND: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND);
    pub(super) const LOST: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST);
    pub(super) const RESET_REQUIRED: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED);
    pub(super) const MISMATCH: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH);
    pub(super) const VERSION_OF_ARGUMENT: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    pub(super) const DEPRECATED: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_DEPRECATED);
    pub(super) const UNKNOWN: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_UNKNOWN);

    /// A return code as an answer.
    pub(super) fn check(code: nvml::nvmlReturn_t) -> Answer<()> {
        if code == nvml::nvmlReturn_enum_NVML_SUCCESS { Ok(()) } else { Err(Self(code)) }
    }

    /// What it speaks against when one field of a device was asked for.
    pub(super) fn against(self) -> Against {
        match self {
            Self::RESET_REQUIRED => Against::Device,
            Self::LOST => Against::Presence,
            Self::UNINITIALIZED | Self::DRIVER_NOT_LOADED | Self::MISMATCH => Against::Driver,
            _ => Against::Field,
        }
    }

    /// What it speaks against when the handle of a device was asked for, where an error nobody can name is the device's.
    pub(super) fn against_at_opening(self) -> Against {
        match self {
            Self::UNKNOWN | Self::IRQ | Self::NO_POWER => Against::Device,
            _ => self.against(),
        }
    }

    /// Whether another version of the function may do.
    pub(super) fn wants_other_function(self) -> bool {
        matches!(self, Self::FUNCTION_NOT_FOUND | Self::VERSION_OF_ARGUMENT | Self::DEPRECATED)
    }

    /// What happened, in words.
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::UNINITIALIZED => "NVML is not initialised",
            Self::INVALID_ARGUMENT => "NVML does not take this question for this device",
            Self::NOT_SUPPORTED => "not supported",
            Self::NO_PERMISSION => "no permission",
            Self::NOT_FOUND => "not found",
            Self::TOO_SMALL => "there is more than fits",
            Self::NO_POWER => "the power cables are not attached",
            Self::DRIVER_NOT_LOADED => "the NVIDIA driver is not loaded",
            Self::TIMEOUT => "timed out",
            Self::IRQ => "the kernel sees an interrupt problem with the device",
            Self::FUNCTION_NOT_FOUND => "this driver has no such function",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_CORRUPTED_INFOROM) => "the device's stored settings are damaged",
            Self::LOST => "the GPU is lost",
            Self::RESET_REQUIRED => "the GPU requires a reset",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_OPERATING_SYSTEM) => "blocked by the operating system",
            Self::MISMATCH => "driver/library version mismatch",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_IN_USE) => "the GPU is in use",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_MEMORY) => "out of memory",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_NO_DATA) => "no data",
            Self::VERSION_OF_ARGUMENT => "this driver has another version of the function",
            Self::DEPRECATED => "deprecated",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_NOT_READY) => "not ready",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_GPU_NOT_FOUND) => "no GPU found",
            Self::UNKNOWN => "unknown error",
            _ => "an error gpupool does not know",
        }
    }

    /// A field that has no value.
    pub(super) fn told<T>(self) -> Reported<T> {
        match self {
            Self::NOT_SUPPORTED
            | Self::FUNCTION_NOT_FOUND
            | Self::INVALID_ARGUMENT
            | Self::VERSION_OF_ARGUMENT
            | Self::DEPRECATED => Reported::Unsupported(self.words().into()),
            _ => Reported::Failed(self.words().into()),
        }
    }

    /// The failure of the whole source; `doing` is what was tried.
    pub(super) fn failure(self, doing: &str) -> SourceError {
        let text = format!("{doing}: {} (NVML code {})", self.words(), self.0);
        match self {
            Self::DRIVER_NOT_LOADED => SourceError::DriverNotLoaded(text),
            Self::MISMATCH => SourceError::VersionMismatch(text),
            Self::NO_PERMISSION => SourceError::NoPermission(text),
            _ => SourceError::Driver(text),
        }
    }
}

impl From<NvmlError> for Code {
    fn from(error: NvmlError) -> Self {
        match error {
            NvmlError::FailedToLoadSymbol(_) => Self::FUNCTION_NOT_FOUND,
            other => Self(other.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_about_a_field_a_device_or_the_driver() {
        assert_eq!(Code::NOT_SUPPORTED.against(), Against::Field);
        assert_eq!(Code::UNKNOWN.against(), Against::Field);
        assert_eq!(Code::UNKNOWN.against_at_opening(), Against::Device);
        assert_eq!(Code::LOST.against(), Against::Presence);
        assert_eq!(Code::MISMATCH.against(), Against::Driver);
        assert!(matches!(Code::NO_PERMISSION.told::<u8>(), Reported::Failed(_)));
        assert!(matches!(Code::INVALID_ARGUMENT.told::<u8>(), Reported::Unsupported(_)));
        assert!(matches!(Code::MISMATCH.failure("x"), SourceError::VersionMismatch(_)));
    }
}

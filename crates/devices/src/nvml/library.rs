//! Boundary to the C library: all unsafe calls are here and return an [`NvmlResult`].
//!
//! The available functions are determined once, when the library is loaded. A missing function returns
//! [`NvmlCode::FUNCTION_NOT_FOUND`] without a call.

#![allow(unsafe_code, reason = "calls into NVIDIA's C library")]

use std::ffi::{OsStr, c_char, c_uint, c_ulonglong};

use nvml_wrapper::Nvml as NvmlWrapper;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as nvml;
use nvml_wrapper_sys::bindings::{NvmlLib, nvmlDevice_t, nvmlReturn_t};

use crate::reported::Reported;
use crate::source::SourceError;

/// Handle of a device, valid until the library is closed or the device is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DeviceHandle(nvmlDevice_t);

// SAFETY: NVML may be called from any thread, and a handle is only ever passed back to it.
unsafe impl Send for DeviceHandle {}

/// Handle of an event set.
#[derive(Debug, Clone, Copy)]
pub(super) struct NvmlEventSet(nvml::nvmlEventSet_t);

// SAFETY: as for a handle.
unsafe impl Send for NvmlEventSet {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NvmlMemory {
    pub total: u64,
    /// Memory reserved by the driver; `None` if it is part of `used`.
    pub reserved: Option<u64>,
    pub used: u64,
}

/// State of the remapping of bad memory rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RemappedRowFlags {
    pub pending: bool,
    pub failed: bool,
}

/// Size of a MIG instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MigSlices {
    pub gpu: u32,
    pub compute: u32,
    pub memory_mib: u64,
}

/// Event that reports an Xid of a device.
#[derive(Debug, Clone, Copy)]
pub(super) struct XidEvent {
    pub device: DeviceHandle,
    pub xid: u64,
}

/// The loaded and initialised library.
pub(super) struct NvmlLibrary {
    wrapper: NvmlWrapper,
}

type NumberCall<T> = unsafe extern "C" fn(nvmlDevice_t, *mut T) -> nvmlReturn_t;
type TextCall = unsafe extern "C" fn(nvmlDevice_t, *mut c_char, c_uint) -> nvmlReturn_t;
type LinkCall<T> = unsafe extern "C" fn(nvmlDevice_t, c_uint, *mut T) -> nvmlReturn_t;

impl NvmlLibrary {
    /// Loads and initialises the library of this name or path.
    pub(super) fn open(path: &OsStr) -> Result<Self, SourceError> {
        let missing = |why: String| SourceError::NotPresent { what: path.display().to_string().into(), why };
        match NvmlWrapper::builder().lib_path(path).init() {
            Ok(wrapper) => Ok(Self { wrapper }),
            Err(NvmlError::LibloadingError(error)) => Err(missing(error.to_string())),
            Err(NvmlError::FailedToLoadSymbol(why)) => Err(missing(why)),
            Err(error) => Err(NvmlCode::from(error).source_error("initialising NVML")),
        }
    }

    pub(super) fn functions(&self) -> &NvmlLib {
        self.wrapper.lib()
    }

    pub(super) fn driver_version(&self) -> NvmlResult<String> {
        Ok(self.wrapper.sys_driver_version()?)
    }

    pub(super) fn device_count(&self) -> NvmlResult<u32> {
        Ok(self.wrapper.device_count()?)
    }

    pub(super) fn device(&self, index: u32) -> NvmlResult<DeviceHandle> {
        let call = available(&self.functions().nvmlDeviceGetHandleByIndex_v2)?;
        // SAFETY: the function writes a handle.
        read_output(std::ptr::null_mut(), |device| unsafe { call(index, device) }).map(DeviceHandle)
    }

    pub(super) fn uuid(&self, device: DeviceHandle) -> NvmlResult<String> {
        query_text(&self.functions().nvmlDeviceGetUUID, device)
    }

    pub(super) fn name(&self, device: DeviceHandle) -> NvmlResult<String> {
        query_text(&self.functions().nvmlDeviceGetName, device)
    }

    pub(super) fn minor(&self, device: DeviceHandle) -> NvmlResult<u32> {
        query_number(&self.functions().nvmlDeviceGetMinorNumber, device)
    }

    /// Returns the PCI address as text.
    pub(super) fn pci(&self, device: DeviceHandle) -> NvmlResult<String> {
        let functions = self.functions();
        let call = functions.nvmlDeviceGetPciInfo_v3.as_ref().or(functions.nvmlDeviceGetPciInfo_v2.as_ref());
        let call = call.map_err(|_| NvmlCode::FUNCTION_NOT_FOUND)?;
        // SAFETY: the function writes the struct.
        read_output(empty_pci_info(), |info| unsafe { call(device.0, info) }).map(|info| pci_text(&info))
    }

    pub(super) fn memory(&self, device: DeviceHandle) -> NvmlResult<NvmlMemory> {
        match self.memory_v2(device) {
            Err(code) if code.is_replaceable() => {}
            result => return result,
        }
        let call = available(&self.functions().nvmlDeviceGetMemoryInfo)?;
        let empty = nvml::nvmlMemory_t { total: 0, free: 0, used: 0 };
        // SAFETY: the function writes the struct.
        let info = read_output(empty, |info| unsafe { call(device.0, info) })?;
        Ok(NvmlMemory { total: info.total, reserved: None, used: info.used })
    }

    fn memory_v2(&self, device: DeviceHandle) -> NvmlResult<NvmlMemory> {
        let call = available(&self.functions().nvmlDeviceGetMemoryInfo_v2)?;
        let version = (size_of::<nvml::nvmlMemory_v2_t>() | 2 << 24) as c_uint;
        let empty = nvml::nvmlMemory_v2_t { version, total: 0, reserved: 0, free: 0, used: 0 };
        // SAFETY: the function writes the struct of the version that is named in it.
        let info = read_output(empty, |info| unsafe { call(device.0, info) })?;
        Ok(NvmlMemory { total: info.total, reserved: Some(info.reserved), used: info.used })
    }

    /// Returns the utilization in percent.
    pub(super) fn utilization(&self, device: DeviceHandle) -> NvmlResult<u32> {
        let call = available(&self.functions().nvmlDeviceGetUtilizationRates)?;
        let empty = nvml::nvmlUtilization_t { gpu: 0, memory: 0 };
        // SAFETY: the function writes the struct.
        read_output(empty, |rates| unsafe { call(device.0, rates) }).map(|rates| rates.gpu)
    }

    /// Returns the temperature in °C, by the older function or, if that is missing, by the newer one.
    pub(super) fn temperature(&self, device: DeviceHandle) -> NvmlResult<i32> {
        let sensor = nvml::nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU;
        let older = available(&self.functions().nvmlDeviceGetTemperature)
            // SAFETY: the function writes a number.
            .and_then(|call| read_output(0, |celsius| unsafe { call(device.0, sensor, celsius) }));
        match older {
            Err(code) if code.is_replaceable() => {}
            result => return result.map(|celsius| celsius.try_into().unwrap_or(i32::MAX)),
        }
        let call = available(&self.functions().nvmlDeviceGetTemperatureV)?;
        let version = (size_of::<nvml::nvmlTemperature_t>() | 1 << 24) as c_uint;
        let empty = nvml::nvmlTemperature_t { version, sensorType: sensor, temperature: 0 };
        // SAFETY: the function writes the struct of the version that is named in it.
        read_output(empty, |info| unsafe { call(device.0, info) }).map(|info| info.temperature)
    }

    /// Returns the power in mW.
    pub(super) fn power(&self, device: DeviceHandle) -> NvmlResult<u32> {
        query_number(&self.functions().nvmlDeviceGetPowerUsage, device)
    }

    /// Returns the power limit in mW: the configured one, or else the enforced one.
    pub(super) fn power_limit(&self, device: DeviceHandle) -> NvmlResult<u32> {
        let set = query_number(&self.functions().nvmlDeviceGetPowerManagementLimit, device);
        set.or_else(|code| query_number(&self.functions().nvmlDeviceGetEnforcedPowerLimit, device).map_err(|_| code))
    }

    pub(super) fn remapped_rows(&self, device: DeviceHandle) -> NvmlResult<RemappedRowFlags> {
        let call = available(&self.functions().nvmlDeviceGetRemappedRows)?;
        let (mut correctable, mut uncorrectable, mut pending, mut failed) = (0, 0, 0, 0);
        // SAFETY: the function writes four numbers.
        NvmlCode::check(unsafe { call(device.0, &mut correctable, &mut uncorrectable, &mut pending, &mut failed) })?;
        Ok(RemappedRowFlags { pending: pending != 0, failed: failed != 0 })
    }

    pub(super) fn retired_pages_pending(&self, device: DeviceHandle) -> NvmlResult<bool> {
        Ok(query_number(&self.functions().nvmlDeviceGetRetiredPagesPendingStatus, device)? != 0)
    }

    /// Returns whether MIG is on.
    pub(super) fn mig_mode(&self, device: DeviceHandle) -> NvmlResult<bool> {
        let call = available(&self.functions().nvmlDeviceGetMigMode)?;
        let mut pending = 0;
        // SAFETY: the function writes two numbers.
        read_output(0, |current| unsafe { call(device.0, current, &mut pending) }).map(|current| current != 0)
    }

    /// Returns the maximum number of instances; the used slots may have gaps.
    pub(super) fn mig_slots(&self, device: DeviceHandle) -> NvmlResult<u32> {
        query_number(&self.functions().nvmlDeviceGetMaxMigDeviceCount, device)
    }

    pub(super) fn mig_instance(&self, device: DeviceHandle, slot: u32) -> NvmlResult<DeviceHandle> {
        let empty = std::ptr::null_mut();
        query_indexed(&self.functions().nvmlDeviceGetMigDeviceHandleByIndex, device, slot, empty).map(DeviceHandle)
    }

    pub(super) fn gpu_instance(&self, instance: DeviceHandle) -> NvmlResult<u32> {
        query_number(&self.functions().nvmlDeviceGetGpuInstanceId, instance)
    }

    pub(super) fn compute_instance(&self, instance: DeviceHandle) -> NvmlResult<u32> {
        query_number(&self.functions().nvmlDeviceGetComputeInstanceId, instance)
    }

    pub(super) fn slices(&self, instance: DeviceHandle) -> NvmlResult<MigSlices> {
        let call = available(&self.functions().nvmlDeviceGetAttributes_v2)?;
        // SAFETY: all zeroes is a valid value of this plain struct, which the function writes.
        let empty: nvml::nvmlDeviceAttributes_t = unsafe { std::mem::zeroed() };
        let info = read_output(empty, |info| unsafe { call(instance.0, info) })?;
        Ok(MigSlices {
            gpu: info.gpuInstanceSliceCount,
            compute: info.computeInstanceSliceCount,
            memory_mib: info.memorySizeMB,
        })
    }

    /// Returns NVML's topology level of two devices.
    pub(super) fn common_ancestor(&self, one: DeviceHandle, other: DeviceHandle) -> NvmlResult<u32> {
        let call = available(&self.functions().nvmlDeviceGetTopologyCommonAncestor)?;
        // SAFETY: the function writes a number.
        read_output(0, |level| unsafe { call(one.0, other.0, level) })
    }

    pub(super) fn nvlink_up(&self, device: DeviceHandle, link: u32) -> NvmlResult<bool> {
        Ok(query_indexed(&self.functions().nvmlDeviceGetNvLinkState, device, link, 0)? != 0)
    }

    pub(super) fn nvlink_ends_at_switch(&self, device: DeviceHandle, link: u32) -> NvmlResult<bool> {
        let kind = query_indexed(&self.functions().nvmlDeviceGetNvLinkRemoteDeviceType, device, link, 0)?;
        Ok(kind == nvml::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH)
    }

    /// Returns the PCI address of the remote end as text.
    pub(super) fn nvlink_remote(&self, device: DeviceHandle, link: u32) -> NvmlResult<String> {
        let functions = self.functions();
        let newer = query_indexed(&functions.nvmlDeviceGetNvLinkRemotePciInfo_v2, device, link, empty_pci_info());
        let info = match newer {
            Err(code) if code.is_replaceable() => {
                query_indexed(&functions.nvmlDeviceGetNvLinkRemotePciInfo, device, link, empty_pci_info())
            }
            result => result,
        };
        info.map(|info| pci_text(&info))
    }

    pub(super) fn new_event_set(&self) -> NvmlResult<NvmlEventSet> {
        let call = available(&self.functions().nvmlEventSetCreate)?;
        // SAFETY: the function writes a handle.
        read_output(std::ptr::null_mut(), |set| unsafe { call(set) }).map(NvmlEventSet)
    }

    /// Registers an event set for the Xids of a device, if the device supports them.
    pub(super) fn register_xids(&self, device: DeviceHandle, set: NvmlEventSet) -> NvmlResult<()> {
        let xids = c_ulonglong::from(nvml::nvmlEventTypeXidCriticalError);
        let call = available(&self.functions().nvmlDeviceGetSupportedEventTypes)?;
        // SAFETY: the function writes a number.
        let supported = read_output(0, |types| unsafe { call(device.0, types) })?;
        if supported & xids == 0 {
            return Err(NvmlCode::NOT_SUPPORTED);
        }
        let call = available(&self.functions().nvmlDeviceRegisterEvents)?;
        // SAFETY: both handles are of this library.
        NvmlCode::check(unsafe { call(device.0, xids, set.0) })
    }

    /// Returns the next event without waiting.
    pub(super) fn next_event(&self, set: NvmlEventSet) -> NvmlResult<Option<XidEvent>> {
        let functions = self.functions();
        let call = functions.nvmlEventSetWait_v2.as_ref().or(functions.nvmlEventSetWait.as_ref());
        let call = call.map_err(|_| NvmlCode::FUNCTION_NOT_FOUND)?;
        // SAFETY: all zeroes is a valid value of this plain struct, which the function writes.
        let empty: nvml::nvmlEventData_t = unsafe { std::mem::zeroed() };
        match read_output(empty, |event| unsafe { call(set.0, event, 0) }) {
            Ok(event) => Ok(Some(XidEvent { device: DeviceHandle(event.device), xid: event.eventData })),
            Err(NvmlCode::TIMEOUT) => Ok(None),
            Err(code) => Err(code),
        }
    }

    pub(super) fn free_event_set(&self, set: NvmlEventSet) {
        if let Ok(call) = &self.functions().nvmlEventSetFree {
            // SAFETY: the set is of this library, and its owner drops it.
            unsafe { call(set.0) };
        }
    }
}

/// Lists the processes of a device; an entry is at most four words.
///
/// Returns the number of entries written, or with an error the number of entries that exist.
pub(super) fn list_processes<T>(
    call: unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut T) -> nvmlReturn_t,
    device: DeviceHandle,
    buffer: &mut [[u64; 4]],
) -> Result<u32, (NvmlCode, u32)> {
    debug_assert!(size_of::<T>() <= size_of::<[u64; 4]>() && align_of::<T>() <= align_of::<u64>());
    let mut count = c_uint::try_from(buffer.len()).unwrap_or(c_uint::MAX);
    // SAFETY: an entry is at most four words, so that there is room for as many as are announced.
    let code = unsafe { call(device.0, &mut count, buffer.as_mut_ptr().cast()) };
    NvmlCode::check(code).map(|()| count).map_err(|code| (code, count))
}

fn available<F, E>(function: &Result<F, E>) -> NvmlResult<&F> {
    function.as_ref().map_err(|_| NvmlCode::FUNCTION_NOT_FOUND)
}

fn read_output<T>(empty: T, call: impl FnOnce(&mut T) -> nvmlReturn_t) -> NvmlResult<T> {
    let mut place = empty;
    NvmlCode::check(call(&mut place)).map(|()| place)
}

fn query_number<T: Default, E>(function: &Result<NumberCall<T>, E>, device: DeviceHandle) -> NvmlResult<T> {
    let call = available(function)?;
    // SAFETY: the function writes a number.
    read_output(T::default(), |value| unsafe { call(device.0, value) })
}

fn query_indexed<T, E>(function: &Result<LinkCall<T>, E>, device: DeviceHandle, which: u32, empty: T) -> NvmlResult<T> {
    let call = available(function)?;
    // SAFETY: the function writes the struct of its type.
    read_output(empty, |value| unsafe { call(device.0, which, value) })
}

fn query_text<E>(function: &Result<TextCall, E>, device: DeviceHandle) -> NvmlResult<String> {
    /// Maximum length of a name or a UUID in NVML.
    const MAX_BYTES: usize = 96;
    let call = available(function)?;
    let mut buffer: [c_char; MAX_BYTES] = [0; MAX_BYTES];
    // SAFETY: the function writes at most MAX_BYTES bytes.
    NvmlCode::check(unsafe { call(device.0, buffer.as_mut_ptr(), MAX_BYTES as c_uint) })?;
    Ok(text_until_nul(&buffer))
}

fn text_until_nul(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().take_while(|byte| **byte != 0).map(|byte| *byte as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn empty_pci_info() -> nvml::nvmlPciInfo_t {
    // SAFETY: all zeroes is a valid value of this plain struct.
    unsafe { std::mem::zeroed() }
}

fn pci_text(info: &nvml::nvmlPciInfo_t) -> String {
    let text = text_until_nul(&info.busId);
    if text.is_empty() { text_until_nul(&info.busIdLegacy) } else { text }
}

// Return codes by their scope: a field, a device, or the driver.

/// Result of a call into the library.
pub(super) type NvmlResult<T> = Result<T, NvmlCode>;

/// Return code of NVML other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NvmlCode(pub u32);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ErrorScope {
    /// The requested field.
    Field,
    /// The device, which needs a reset or repair.
    Device,
    /// The presence of the device, which is gone.
    Presence,
    /// The driver, and with it all devices.
    Driver,
}

impl NvmlCode {
    pub(super) const UNINITIALIZED: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
    pub(super) const INVALID_ARGUMENT: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
    pub(super) const NOT_SUPPORTED: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED);
    pub(super) const NO_PERMISSION: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION);
    pub(super) const NOT_FOUND: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_NOT_FOUND);
    pub(super) const INSUFFICIENT_SIZE: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
    pub(super) const INSUFFICIENT_POWER: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_POWER);
    pub(super) const DRIVER_NOT_LOADED: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED);
    pub(super) const TIMEOUT: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_TIMEOUT);
    pub(super) const IRQ_ISSUE: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_IRQ_ISSUE);
    pub(super) const FUNCTION_NOT_FOUND: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND);
    pub(super) const LOST: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST);
    pub(super) const RESET_REQUIRED: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED);
    pub(super) const MISMATCH: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH);
    pub(super) const ARGUMENT_VERSION_MISMATCH: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    pub(super) const DEPRECATED: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_DEPRECATED);
    pub(super) const UNKNOWN: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_UNKNOWN);

    /// Converts a return code to a result.
    pub(super) fn check(code: nvml::nvmlReturn_t) -> NvmlResult<()> {
        if code == nvml::nvmlReturn_enum_NVML_SUCCESS { Ok(()) } else { Err(Self(code)) }
    }

    /// Returns the scope of an error from reading a field of a device.
    pub(super) fn scope(self) -> ErrorScope {
        match self {
            Self::RESET_REQUIRED => ErrorScope::Device,
            Self::LOST => ErrorScope::Presence,
            Self::UNINITIALIZED | Self::DRIVER_NOT_LOADED | Self::MISMATCH => ErrorScope::Driver,
            _ => ErrorScope::Field,
        }
    }

    /// Returns the scope of an error from opening a device. Here an unknown error concerns the device.
    pub(super) fn scope_at_opening(self) -> ErrorScope {
        match self {
            Self::UNKNOWN | Self::IRQ_ISSUE | Self::INSUFFICIENT_POWER => ErrorScope::Device,
            _ => self.scope(),
        }
    }

    /// Whether another version of the function may work.
    pub(super) fn is_replaceable(self) -> bool {
        matches!(self, Self::FUNCTION_NOT_FOUND | Self::ARGUMENT_VERSION_MISMATCH | Self::DEPRECATED)
    }

    /// Returns the message of the code.
    pub(super) fn description(self) -> &'static str {
        match self {
            Self::UNINITIALIZED => "NVML is not initialised",
            Self::INVALID_ARGUMENT => "invalid argument for this device",
            Self::NOT_SUPPORTED => "not supported",
            Self::NO_PERMISSION => "no permission",
            Self::NOT_FOUND => "not found",
            Self::INSUFFICIENT_SIZE => "buffer too small",
            Self::INSUFFICIENT_POWER => "the power cables are not attached",
            Self::DRIVER_NOT_LOADED => "the NVIDIA driver is not loaded",
            Self::TIMEOUT => "timed out",
            Self::IRQ_ISSUE => "interrupt problem of the device",
            Self::FUNCTION_NOT_FOUND => "not available in this driver",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_CORRUPTED_INFOROM) => "the infoROM of the device is corrupted",
            Self::LOST => "the GPU is lost",
            Self::RESET_REQUIRED => "the GPU requires a reset",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_OPERATING_SYSTEM) => "blocked by the operating system",
            Self::MISMATCH => "driver/library version mismatch",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_IN_USE) => "the GPU is in use",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_MEMORY) => "out of memory",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_NO_DATA) => "no data",
            Self::ARGUMENT_VERSION_MISMATCH => "incompatible version of the function",
            Self::DEPRECATED => "deprecated",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_NOT_READY) => "not ready",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_GPU_NOT_FOUND) => "no GPU found",
            Self::UNKNOWN => "unknown error",
            _ => "unrecognised error",
        }
    }

    /// Converts the code to a field without a value.
    pub(super) fn to_reported<T>(self) -> Reported<T> {
        match self {
            Self::NOT_SUPPORTED
            | Self::FUNCTION_NOT_FOUND
            | Self::INVALID_ARGUMENT
            | Self::ARGUMENT_VERSION_MISMATCH
            | Self::DEPRECATED => Reported::Unsupported(self.description().into()),
            _ => Reported::Failed(self.description().into()),
        }
    }

    /// Converts the code to an error of the whole source; `doing` is the operation.
    pub(super) fn source_error(self, doing: &str) -> SourceError {
        let text = format!("{doing}: {} (NVML code {})", self.description(), self.0);
        match self {
            Self::DRIVER_NOT_LOADED => SourceError::DriverNotLoaded(text),
            Self::MISMATCH => SourceError::VersionMismatch(text),
            Self::NO_PERMISSION => SourceError::NoPermission(text),
            _ => SourceError::Driver(text),
        }
    }
}

impl From<NvmlError> for NvmlCode {
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
    fn error_codes_have_the_scope_of_a_field_a_device_or_the_driver() {
        assert_eq!(NvmlCode::NOT_SUPPORTED.scope(), ErrorScope::Field);
        assert_eq!(NvmlCode::UNKNOWN.scope(), ErrorScope::Field);
        assert_eq!(NvmlCode::UNKNOWN.scope_at_opening(), ErrorScope::Device);
        assert_eq!(NvmlCode::LOST.scope(), ErrorScope::Presence);
        assert_eq!(NvmlCode::MISMATCH.scope(), ErrorScope::Driver);
        assert!(matches!(NvmlCode::NO_PERMISSION.to_reported::<u8>(), Reported::Failed(_)));
        assert!(matches!(NvmlCode::INVALID_ARGUMENT.to_reported::<u8>(), Reported::Unsupported(_)));
        assert!(matches!(NvmlCode::MISMATCH.source_error("x"), SourceError::VersionMismatch(_)));
    }
}

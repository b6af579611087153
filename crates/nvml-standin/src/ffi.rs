//! The C functions of the library.

#![allow(unsafe_code, reason = "these are C functions: they write through the pointers of their caller")]
#![allow(non_snake_case, missing_docs, reason = "names and meaning are NVIDIA's")]
#![allow(clippy::missing_safety_doc, reason = "each is as safe as NVIDIA's function of that name")]

use std::ffi::{CStr, CString, OsStr, c_char, c_uint, c_ulonglong, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nvml_wrapper_sys::bindings as nvml;
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlDeviceAttributes_t, nvmlEventData_t, nvmlEventSet_t, nvmlMemory_t, nvmlMemory_v2_t,
    nvmlPciInfo_t, nvmlProcessInfo_v1_t, nvmlProcessInfo_v2_t, nvmlTemperature_t, nvmlUtilization_t,
};

use crate::library_state::{self as state, HandleTarget, NvmlReturn, StandInHandle};
use crate::scenario::{NvLink, NvLinkPeer, NvmlScenario, StandInMemory, StandInProcess};

const INVALID: NvmlReturn = nvml::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
const NOT_SUPPORTED: NvmlReturn = nvml::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;
const NOT_FOUND: NvmlReturn = nvml::nvmlReturn_enum_NVML_ERROR_NOT_FOUND;
const TOO_SMALL: NvmlReturn = nvml::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE;

fn to_code(result: Result<(), NvmlReturn>) -> NvmlReturn {
    result.err().unwrap_or(nvml::nvmlReturn_enum_NVML_SUCCESS)
}

/// Runs a query about a device.
fn on_device(
    function: &str,
    raw: nvmlDevice_t,
    answer: impl FnOnce(&HandleTarget<'_>, &NvmlScenario) -> Result<(), NvmlReturn>,
) -> NvmlReturn {
    to_code(state::scenario(function).and_then(|scenario| {
        let handle = StandInHandle::from_raw(raw).ok_or(INVALID)?;
        answer(&handle.find(function, &scenario)?, &scenario)
    }))
}

fn write_out<T>(output: *mut T, value: T) -> Result<(), NvmlReturn> {
    if output.is_null() {
        return Err(INVALID);
    }
    // SAFETY: the caller of an NVML function passes a valid output pointer.
    unsafe { output.write(value) };
    Ok(())
}

fn write_text(output: *mut c_char, length: c_uint, text: &str) -> Result<(), NvmlReturn> {
    let text = CString::new(text).map_err(|_| INVALID)?;
    let bytes = text.as_bytes_with_nul();
    if output.is_null() || bytes.len() > length as usize {
        return Err(TOO_SMALL);
    }
    // SAFETY: the caller guarantees room for `length` bytes, and there are no more.
    unsafe { output.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    Ok(())
}

/// Returns the directory from which this library was loaded.
fn library_folder() -> Option<PathBuf> {
    // SAFETY: all zeroes is a valid `Dl_info`; `dladdr` fills it for the address of a function of this library.
    let name = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let found = libc::dladdr(nvmlInit_v2 as *const c_void, &mut info);
        (found != 0 && !info.dli_fname.is_null()).then(|| CStr::from_ptr(info.dli_fname))?
    };
    Path::new(OsStr::from_bytes(name.to_bytes())).parent().map(Path::to_owned)
}

// Library and machine.

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> NvmlReturn {
    state::initialize(library_folder());
    let answer = to_code(state::scenario("nvmlInit_v2").map(drop));
    if answer != nvml::nvmlReturn_enum_NVML_SUCCESS {
        let _ = state::shutdown();
    }
    answer
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> NvmlReturn {
    nvmlInit_v2()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> NvmlReturn {
    to_code(state::shutdown())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(_result: NvmlReturn) -> *const c_char {
    c"an error of the stand-in".as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) -> NvmlReturn {
    to_code(state::scenario("nvmlSystemGetDriverVersion").and_then(|it| write_text(version, length, &it.driver)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: c_uint) -> NvmlReturn {
    to_code(state::scenario("nvmlSystemGetNVMLVersion").and_then(|it| write_text(version, length, &it.driver)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> NvmlReturn {
    state::reload_scenario(library_folder());
    to_code(state::scenario("nvmlDeviceGetCount_v2").and_then(|it| write_out(count, device_count(&it))))
}

fn device_count(scenario: &NvmlScenario) -> u32 {
    scenario.count.unwrap_or(scenario.devices.len() as u32)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut nvmlDevice_t) -> NvmlReturn {
    const FUNCTION: &str = "nvmlDeviceGetHandleByIndex_v2";
    to_code(state::scenario(FUNCTION).and_then(|scenario| {
        if index >= device_count(&scenario) {
            return Err(INVALID);
        }
        let handle = StandInHandle { device: index, slot: None };
        if (index as usize) < scenario.devices.len() {
            handle.find(FUNCTION, &scenario)?;
        } else {
            return Err(nvml::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION);
        }
        write_out(device, handle.to_raw())
    }))
}

// Identity of a device.

macro_rules! number {
    ($($name:ident: $type:ty = |$target:ident| $value:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(device: nvmlDevice_t, number: *mut $type) -> NvmlReturn {
            on_device(stringify!($name), device, |$target, _| write_out(number, $value.ok_or(NOT_SUPPORTED)?))
        }
    )*};
}

number! {
    nvmlDeviceGetIndex: c_uint = |it| Some(it.handle.device);
    nvmlDeviceGetMinorNumber: c_uint = |it| it.device.minor;
    nvmlDeviceGetPowerUsage: c_uint = |it| it.device.power_mw.filter(|_| it.instance.is_none());
    nvmlDeviceGetPowerManagementLimit: c_uint = |it| it.device.power_limit_mw.filter(|_| it.instance.is_none());
    nvmlDeviceGetEnforcedPowerLimit: c_uint = |it| it.device.power_limit_mw.filter(|_| it.instance.is_none());
    nvmlDeviceGetUtilizationRates: nvmlUtilization_t = |it| {
        it.device.utilization.filter(|_| it.instance.is_none()).map(|gpu| nvmlUtilization_t { gpu, memory: gpu / 2 })
    };
    nvmlDeviceGetMemoryInfo: nvmlMemory_t = |it| memory(it).map(|StandInMemory { total, reserved, used }| nvmlMemory_t {
        total,
        free: total.saturating_sub(used + reserved),
        used: used + reserved,
    });
    nvmlDeviceGetRetiredPagesPendingStatus: c_uint = |it| it.device.retired_pending.map(u32::from);
    nvmlDeviceGetSupportedEventTypes: c_ulonglong = |it| {
        Some(if it.device.tells_xids { u64::from(nvml::nvmlEventTypeXidCriticalError) } else { 0 })
    };
    nvmlDeviceGetMaxMigDeviceCount: c_uint = |it| it.device.mig.as_ref().map(|mig| mig.slots.len() as u32);
    nvmlDeviceIsMigDeviceHandle: c_uint = |it| Some(u32::from(it.instance.is_some()));
    nvmlDeviceGetGpuInstanceId: c_uint = |it| it.instance.map(|instance| instance.gpu_instance);
    nvmlDeviceGetComputeInstanceId: c_uint = |it| it.instance.map(|instance| instance.compute_instance);
    nvmlDeviceGetAttributes_v2: nvmlDeviceAttributes_t = |it| it.instance.map(|instance| nvmlDeviceAttributes_t {
        multiprocessorCount: 16,
        sharedCopyEngineCount: 1,
        sharedDecoderCount: 1,
        sharedEncoderCount: 0,
        sharedJpegCount: 0,
        sharedOfaCount: 0,
        gpuInstanceSliceCount: instance.gpu_slices,
        computeInstanceSliceCount: instance.compute_slices,
        memorySizeMB: instance.memory.total >> 20,
    });
}

fn memory(target: &HandleTarget<'_>) -> Option<StandInMemory> {
    target.instance.map(|instance| instance.memory).or(target.device.memory)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetName(device: nvmlDevice_t, name: *mut c_char, length: c_uint) -> NvmlReturn {
    on_device("nvmlDeviceGetName", device, |it, _| match it.instance {
        Some(instance) if !instance.profile.is_empty() => {
            write_text(name, length, &format!("{} MIG {}", it.device.name, instance.profile))
        }
        _ => write_text(name, length, &it.device.name),
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUUID(device: nvmlDevice_t, uuid: *mut c_char, length: c_uint) -> NvmlReturn {
    on_device("nvmlDeviceGetUUID", device, |it, _| {
        write_text(uuid, length, it.instance.map_or(&it.device.uuid, |instance| &instance.uuid))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPciInfo_v3(device: nvmlDevice_t, pci: *mut nvmlPciInfo_t) -> NvmlReturn {
    on_device("nvmlDeviceGetPciInfo_v3", device, |it, _| write_out(pci, parse_pci_info(&it.device.pci)?))
}

fn parse_pci_info(spelled: &str) -> Result<nvmlPciInfo_t, NvmlReturn> {
    let mut numbers = spelled.split([':', '.']).map(|part| u32::from_str_radix(part, 16).map_err(|_| INVALID));
    let mut next = || numbers.next().unwrap_or(Err(INVALID));
    let (domain, bus, device) = (next()?, next()?, next()?);
    // SAFETY: all zeroes is a valid value of this plain struct.
    let mut info: nvmlPciInfo_t = unsafe { std::mem::zeroed() };
    (info.domain, info.bus, info.device, info.pciDeviceId) = (domain, bus, device, 0x2330_10de);
    let legacy = format!("{domain:04X}:{bus:02X}:{device:02X}.0");
    write_text(info.busIdLegacy.as_mut_ptr(), info.busIdLegacy.len() as c_uint, &legacy)?;
    let name = format!("{domain:08X}:{bus:02X}:{device:02X}.0");
    write_text(info.busId.as_mut_ptr(), info.busId.len() as c_uint, &name)?;
    Ok(info)
}

// Readings of a device.

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, info: *mut nvmlMemory_v2_t) -> NvmlReturn {
    on_device("nvmlDeviceGetMemoryInfo_v2", device, |it, _| {
        // SAFETY: the caller passes such a struct with its version filled in.
        let version = unsafe { (*info).version };
        if version != (size_of::<nvmlMemory_v2_t>() | 2 << 24) as u32 {
            return Err(nvml::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
        }
        let StandInMemory { total, reserved, used } = memory(it).ok_or(NOT_SUPPORTED)?;
        let free = total.saturating_sub(used + reserved);
        write_out(info, nvmlMemory_v2_t { version, total, reserved, free, used })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTemperature(device: nvmlDevice_t, _sensor: c_uint, celsius: *mut c_uint) -> NvmlReturn {
    on_device("nvmlDeviceGetTemperature", device, |it, _| {
        write_out(celsius, it.device.temperature_c.ok_or(NOT_SUPPORTED)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTemperatureV(device: nvmlDevice_t, temperature: *mut nvmlTemperature_t) -> NvmlReturn {
    on_device("nvmlDeviceGetTemperatureV", device, |it, _| {
        let celsius = it.device.temperature_c.ok_or(NOT_SUPPORTED)? as i32;
        let version = (size_of::<nvmlTemperature_t>() | 1 << 24) as u32;
        write_out(temperature, nvmlTemperature_t { version, sensorType: 0, temperature: celsius })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetRemappedRows(
    device: nvmlDevice_t,
    correctable: *mut c_uint,
    uncorrectable: *mut c_uint,
    pending: *mut c_uint,
    failed: *mut c_uint,
) -> NvmlReturn {
    on_device("nvmlDeviceGetRemappedRows", device, |it, _| {
        let rows = it.device.remapped.ok_or(NOT_SUPPORTED)?;
        write_out(correctable, rows.correctable)?;
        write_out(uncorrectable, rows.uncorrectable)?;
        write_out(pending, u32::from(rows.pending))?;
        write_out(failed, u32::from(rows.failed))
    })
}

macro_rules! processes {
    ($($name:ident: $entry:ty, $kind:ident, $make:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(device: nvmlDevice_t, count: *mut c_uint, infos: *mut $entry) -> NvmlReturn {
            on_device(stringify!($name), device, |it, _| write_process_list(count, infos, &$kind(it), $make))
        }
    )*};
}

processes! {
    nvmlDeviceGetComputeRunningProcesses: nvmlProcessInfo_v1_t, compute_processes, process_info_v1;
    nvmlDeviceGetComputeRunningProcesses_v2: nvmlProcessInfo_v2_t, compute_processes, process_info_v2;
    nvmlDeviceGetComputeRunningProcesses_v3: nvmlProcessInfo_v2_t, compute_processes, process_info_v2;
    nvmlDeviceGetGraphicsRunningProcesses: nvmlProcessInfo_v1_t, graphics_processes, process_info_v1;
    nvmlDeviceGetGraphicsRunningProcesses_v2: nvmlProcessInfo_v2_t, graphics_processes, process_info_v2;
    nvmlDeviceGetGraphicsRunningProcesses_v3: nvmlProcessInfo_v2_t, graphics_processes, process_info_v2;
}

/// A process with the MIG instance that it runs on.
type ProcessOnInstance = (StandInProcess, Option<(u32, u32)>);

/// Returns the processes of the queried instance, or of the device with all its instances.
fn compute_processes(target: &HandleTarget<'_>) -> Vec<ProcessOnInstance> {
    let mig = target.device.mig.as_ref().filter(|mig| mig.on);
    let all = mig.into_iter().flat_map(|mig| mig.slots.iter().flatten());
    let queried = all.filter(|instance| target.instance.is_none_or(|target| target.uuid == instance.uuid));
    let on_instances = queried.flat_map(|instance| {
        let place = (instance.gpu_instance, instance.compute_instance);
        instance.compute.iter().map(move |process| (*process, Some(place)))
    });
    let own = target.device.compute.iter().filter(|_| target.instance.is_none()).map(|process| (*process, None));
    own.chain(on_instances).collect()
}

fn graphics_processes(target: &HandleTarget<'_>) -> Vec<ProcessOnInstance> {
    target.device.graphics.iter().filter(|_| target.instance.is_none()).map(|process| (*process, None)).collect()
}

fn process_info_v1((process, _): &ProcessOnInstance) -> nvmlProcessInfo_v1_t {
    nvmlProcessInfo_v1_t { pid: process.pid, usedGpuMemory: process.memory }
}

fn process_info_v2((process, place): &ProcessOnInstance) -> nvmlProcessInfo_v2_t {
    let (gpu, compute) = place.unwrap_or((u32::MAX, u32::MAX));
    nvmlProcessInfo_v2_t {
        pid: process.pid,
        usedGpuMemory: process.memory,
        gpuInstanceId: gpu,
        computeInstanceId: compute,
    }
}

fn write_process_list<T>(
    count: *mut c_uint,
    infos: *mut T,
    all: &[ProcessOnInstance],
    make: impl Fn(&ProcessOnInstance) -> T,
) -> Result<(), NvmlReturn> {
    if count.is_null() {
        return Err(INVALID);
    }
    // SAFETY: the caller passes the number of entries that fit.
    let room = unsafe { *count } as usize;
    write_out(count, all.len() as c_uint)?;
    if all.is_empty() {
        return Ok(());
    }
    if room < all.len() || infos.is_null() {
        return Err(TOO_SMALL);
    }
    for (place, process) in all.iter().enumerate() {
        // SAFETY: there is room for `room` entries, and there are no more.
        unsafe { infos.add(place).write(make(process)) };
    }
    Ok(())
}

// MIG instances, topology and links.

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMigMode(device: nvmlDevice_t, current: *mut c_uint, pending: *mut c_uint) -> NvmlReturn {
    on_device("nvmlDeviceGetMigMode", device, |it, _| {
        let mig = it.device.mig.as_ref().filter(|_| it.instance.is_none()).ok_or(NOT_SUPPORTED)?;
        write_out(current, u32::from(mig.on))?;
        write_out(pending, u32::from(mig.on))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    device: nvmlDevice_t,
    index: c_uint,
    instance: *mut nvmlDevice_t,
) -> NvmlReturn {
    on_device("nvmlDeviceGetMigDeviceHandleByIndex", device, |it, _| {
        let mig = it.device.mig.as_ref().filter(|mig| mig.on).ok_or(NOT_SUPPORTED)?;
        let slot = mig.slots.get(index as usize).ok_or(INVALID)?;
        slot.as_ref().ok_or(NOT_FOUND)?;
        write_out(instance, StandInHandle { device: it.handle.device, slot: Some(index) }.to_raw())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTopologyCommonAncestor(
    one: nvmlDevice_t,
    other: nvmlDevice_t,
    level: *mut c_uint,
) -> NvmlReturn {
    on_device("nvmlDeviceGetTopologyCommonAncestor", one, |it, scenario| {
        let other = StandInHandle::from_raw(other).ok_or(INVALID)?.device;
        let pair = (it.handle.device.min(other), it.handle.device.max(other));
        let known = scenario.nearness.iter().find(|(a, b, _)| (*a, *b) == pair);
        write_out(level, known.map(|(.., level)| *level).ok_or(NOT_SUPPORTED)?)
    })
}

fn find_nvlink<'a>(target: &HandleTarget<'a>, link: c_uint) -> Result<&'a NvLink, NvmlReturn> {
    if target.device.links.is_empty() {
        return Err(NOT_SUPPORTED);
    }
    target.device.links.get(link as usize).ok_or(INVALID)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetNvLinkState(device: nvmlDevice_t, number: c_uint, up: *mut c_uint) -> NvmlReturn {
    on_device("nvmlDeviceGetNvLinkState", device, |it, _| write_out(up, u32::from(find_nvlink(it, number)?.up)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetNvLinkRemoteDeviceType(
    device: nvmlDevice_t,
    number: c_uint,
    kind: *mut c_uint,
) -> NvmlReturn {
    on_device("nvmlDeviceGetNvLinkRemoteDeviceType", device, |it, _| {
        write_out(kind, if find_nvlink(it, number)?.end == NvLinkPeer::Switch { 2 } else { 0 })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
    device: nvmlDevice_t,
    number: c_uint,
    pci: *mut nvmlPciInfo_t,
) -> NvmlReturn {
    on_device("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, |it, _| {
        write_out(pci, parse_pci_info(&find_nvlink(it, number)?.remote)?)
    })
}

// Events. One event set is enough.

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetCreate(set: *mut nvmlEventSet_t) -> NvmlReturn {
    to_code(state::scenario("nvmlEventSetCreate").and_then(|_| write_out(set, std::ptr::without_provenance_mut(1))))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceRegisterEvents(
    device: nvmlDevice_t,
    _types: c_ulonglong,
    _set: nvmlEventSet_t,
) -> NvmlReturn {
    on_device("nvmlDeviceRegisterEvents", device, |it, _| {
        if !it.device.tells_xids {
            return Err(NOT_SUPPORTED);
        }
        state::register_events(it.handle.device);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetWait_v2(
    _set: nvmlEventSet_t,
    data: *mut nvmlEventData_t,
    _timeout: c_uint,
) -> NvmlReturn {
    to_code(state::scenario("nvmlEventSetWait_v2").and_then(|_| {
        let event = state::next_event().ok_or(nvml::nvmlReturn_enum_NVML_ERROR_TIMEOUT)?;
        write_out(
            data,
            nvmlEventData_t {
                device: StandInHandle { device: event.device, slot: None }.to_raw(),
                eventType: u64::from(nvml::nvmlEventTypeXidCriticalError),
                eventData: event.xid,
                gpuInstanceId: u32::MAX,
                computeInstanceId: u32::MAX,
            },
        )
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetFree(_set: nvmlEventSet_t) -> NvmlReturn {
    state::unregister_all();
    nvml::nvmlReturn_enum_NVML_SUCCESS
}

//! The functions of the library, as C sees them.

#![allow(unsafe_code, reason = "these are C functions: they write through the pointers of their caller")]
#![allow(non_snake_case, missing_docs, reason = "the names are NVIDIA's, and so is what they mean")]
#![allow(clippy::missing_safety_doc, reason = "each is as safe as NVIDIA's function of that name")]

use std::ffi::{CStr, CString, OsStr, c_char, c_uint, c_ulonglong, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nvml_wrapper_sys::bindings as nvml;
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlDeviceAttributes_t, nvmlEventData_t, nvmlEventSet_t, nvmlMemory_t, nvmlMemory_v2_t,
    nvmlPciInfo_t, nvmlProcessInfo_v1_t, nvmlProcessInfo_v2_t, nvmlTemperature_t, nvmlUtilization_t,
};

use crate::scenario::{NvLink, NvLinkPeer, NvmlScenario, StandInMemory, StandInProcess};
use crate::world::{self, Code, Handle, Target};

const INVALID: Code = nvml::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
const NOT_SUPPORTED: Code = nvml::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;
const NOT_FOUND: Code = nvml::nvmlReturn_enum_NVML_ERROR_NOT_FOUND;
const TOO_SMALL: Code = nvml::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE;

fn code(answer: Result<(), Code>) -> Code {
    answer.err().unwrap_or(nvml::nvmlReturn_enum_NVML_SUCCESS)
}

/// Answers a question about a device.
fn about(
    function: &str,
    raw: nvmlDevice_t,
    answer: impl FnOnce(&Target<'_>, &NvmlScenario) -> Result<(), Code>,
) -> Code {
    code(world::scenario(function).and_then(|scenario| {
        let handle = Handle::from_raw(raw).ok_or(INVALID)?;
        answer(&handle.find(function, &scenario)?, &scenario)
    }))
}

fn put<T>(place: *mut T, value: T) -> Result<(), Code> {
    if place.is_null() {
        return Err(INVALID);
    }
    // SAFETY: the caller of an NVML function passes a place for its answer.
    unsafe { place.write(value) };
    Ok(())
}

fn put_text(place: *mut c_char, length: c_uint, text: &str) -> Result<(), Code> {
    let text = CString::new(text).map_err(|_| INVALID)?;
    let bytes = text.as_bytes_with_nul();
    if place.is_null() || bytes.len() > length as usize {
        return Err(TOO_SMALL);
    }
    // SAFETY: the caller says that there is room for `length` bytes, and there are no more.
    unsafe { place.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    Ok(())
}

/// The folder this library was loaded from.
fn folder() -> Option<PathBuf> {
    // SAFETY: all zeroes is a valid `Dl_info`; `dladdr` fills it for the address of a function of this library.
    let name = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let found = libc::dladdr(nvmlInit_v2 as *const c_void, &mut info);
        (found != 0 && !info.dli_fname.is_null()).then(|| CStr::from_ptr(info.dli_fname))?
    };
    Path::new(OsStr::from_bytes(name.to_bytes())).parent().map(Path::to_owned)
}

// The library and the machine.

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> Code {
    world::initialise(folder());
    let answer = code(world::scenario("nvmlInit_v2").map(drop));
    if answer != nvml::nvmlReturn_enum_NVML_SUCCESS {
        let _ = world::shut_down();
    }
    answer
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> Code {
    nvmlInit_v2()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> Code {
    code(world::shut_down())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(_result: Code) -> *const c_char {
    c"an error of the stand-in".as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) -> Code {
    code(world::scenario("nvmlSystemGetDriverVersion").and_then(|it| put_text(version, length, &it.driver)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: c_uint) -> Code {
    code(world::scenario("nvmlSystemGetNVMLVersion").and_then(|it| put_text(version, length, &it.driver)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> Code {
    world::read_again(folder());
    code(world::scenario("nvmlDeviceGetCount_v2").and_then(|it| put(count, counted(&it))))
}

fn counted(scenario: &NvmlScenario) -> u32 {
    scenario.count.unwrap_or(scenario.devices.len() as u32)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut nvmlDevice_t) -> Code {
    const NAME: &str = "nvmlDeviceGetHandleByIndex_v2";
    code(world::scenario(NAME).and_then(|scenario| {
        if index >= counted(&scenario) {
            return Err(INVALID);
        }
        let handle = Handle { device: index, slot: None };
        if (index as usize) < scenario.devices.len() {
            handle.find(NAME, &scenario)?;
        } else {
            return Err(nvml::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION);
        }
        put(device, handle.to_raw())
    }))
}

// What a device is.

macro_rules! number {
    ($($name:ident: $type:ty = |$target:ident| $value:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(device: nvmlDevice_t, number: *mut $type) -> Code {
            about(stringify!($name), device, |$target, _| put(number, $value.ok_or(NOT_SUPPORTED)?))
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

fn memory(target: &Target<'_>) -> Option<StandInMemory> {
    target.instance.map(|instance| instance.memory).or(target.device.memory)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetName(device: nvmlDevice_t, name: *mut c_char, length: c_uint) -> Code {
    about("nvmlDeviceGetName", device, |it, _| match it.instance {
        Some(instance) if !instance.profile.is_empty() => {
            put_text(name, length, &format!("{} MIG {}", it.device.name, instance.profile))
        }
        _ => put_text(name, length, &it.device.name),
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUUID(device: nvmlDevice_t, uuid: *mut c_char, length: c_uint) -> Code {
    about("nvmlDeviceGetUUID", device, |it, _| {
        put_text(uuid, length, it.instance.map_or(&it.device.uuid, |instance| &instance.uuid))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPciInfo_v3(device: nvmlDevice_t, pci: *mut nvmlPciInfo_t) -> Code {
    about("nvmlDeviceGetPciInfo_v3", device, |it, _| put(pci, place(&it.device.pci)?))
}

fn place(spelled: &str) -> Result<nvmlPciInfo_t, Code> {
    let mut numbers = spelled.split([':', '.']).map(|part| u32::from_str_radix(part, 16).map_err(|_| INVALID));
    let mut next = || numbers.next().unwrap_or(Err(INVALID));
    let (domain, bus, device) = (next()?, next()?, next()?);
    // SAFETY: all zeroes is a valid value of this plain struct.
    let mut info: nvmlPciInfo_t = unsafe { std::mem::zeroed() };
    (info.domain, info.bus, info.device, info.pciDeviceId) = (domain, bus, device, 0x2330_10de);
    let legacy = format!("{domain:04X}:{bus:02X}:{device:02X}.0");
    put_text(info.busIdLegacy.as_mut_ptr(), info.busIdLegacy.len() as c_uint, &legacy)?;
    let name = format!("{domain:08X}:{bus:02X}:{device:02X}.0");
    put_text(info.busId.as_mut_ptr(), info.busId.len() as c_uint, &name)?;
    Ok(info)
}

// What a device reports.

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, info: *mut nvmlMemory_v2_t) -> Code {
    about("nvmlDeviceGetMemoryInfo_v2", device, |it, _| {
        // SAFETY: the caller passes such a struct with its version filled in.
        let version = unsafe { (*info).version };
        if version != (size_of::<nvmlMemory_v2_t>() | 2 << 24) as u32 {
            return Err(nvml::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
        }
        let StandInMemory { total, reserved, used } = memory(it).ok_or(NOT_SUPPORTED)?;
        let free = total.saturating_sub(used + reserved);
        put(info, nvmlMemory_v2_t { version, total, reserved, free, used })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTemperature(device: nvmlDevice_t, _sensor: c_uint, celsius: *mut c_uint) -> Code {
    about("nvmlDeviceGetTemperature", device, |it, _| put(celsius, it.device.temperature_c.ok_or(NOT_SUPPORTED)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTemperatureV(device: nvmlDevice_t, temperature: *mut nvmlTemperature_t) -> Code {
    about("nvmlDeviceGetTemperatureV", device, |it, _| {
        let celsius = it.device.temperature_c.ok_or(NOT_SUPPORTED)? as i32;
        let version = (size_of::<nvmlTemperature_t>() | 1 << 24) as u32;
        put(temperature, nvmlTemperature_t { version, sensorType: 0, temperature: celsius })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetRemappedRows(
    device: nvmlDevice_t,
    correctable: *mut c_uint,
    uncorrectable: *mut c_uint,
    pending: *mut c_uint,
    failed: *mut c_uint,
) -> Code {
    about("nvmlDeviceGetRemappedRows", device, |it, _| {
        let rows = it.device.remapped.ok_or(NOT_SUPPORTED)?;
        put(correctable, rows.correctable)?;
        put(uncorrectable, rows.uncorrectable)?;
        put(pending, u32::from(rows.pending))?;
        put(failed, u32::from(rows.failed))
    })
}

macro_rules! processes {
    ($($name:ident: $entry:ty, $kind:ident, $make:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(device: nvmlDevice_t, count: *mut c_uint, infos: *mut $entry) -> Code {
            about(stringify!($name), device, |it, _| list(count, infos, &$kind(it), $make))
        }
    )*};
}

processes! {
    nvmlDeviceGetComputeRunningProcesses: nvmlProcessInfo_v1_t, computing, first;
    nvmlDeviceGetComputeRunningProcesses_v2: nvmlProcessInfo_v2_t, computing, second;
    nvmlDeviceGetComputeRunningProcesses_v3: nvmlProcessInfo_v2_t, computing, second;
    nvmlDeviceGetGraphicsRunningProcesses: nvmlProcessInfo_v1_t, drawing, first;
    nvmlDeviceGetGraphicsRunningProcesses_v2: nvmlProcessInfo_v2_t, drawing, second;
    nvmlDeviceGetGraphicsRunningProcesses_v3: nvmlProcessInfo_v2_t, drawing, second;
}

/// A process with the instance it runs on.
type Placed = (StandInProcess, Option<(u32, u32)>);

/// Those of the instance that is asked, or of the device with all its instances.
fn computing(target: &Target<'_>) -> Vec<Placed> {
    let mig = target.device.mig.as_ref().filter(|mig| mig.on);
    let all = mig.into_iter().flat_map(|mig| mig.slots.iter().flatten());
    let asked = all.filter(|instance| target.instance.is_none_or(|asked| asked.uuid == instance.uuid));
    let on_instances = asked.flat_map(|instance| {
        let place = (instance.gpu_instance, instance.compute_instance);
        instance.compute.iter().map(move |process| (*process, Some(place)))
    });
    let own = target.device.compute.iter().filter(|_| target.instance.is_none()).map(|process| (*process, None));
    own.chain(on_instances).collect()
}

fn drawing(target: &Target<'_>) -> Vec<Placed> {
    target.device.graphics.iter().filter(|_| target.instance.is_none()).map(|process| (*process, None)).collect()
}

fn first((process, _): &Placed) -> nvmlProcessInfo_v1_t {
    nvmlProcessInfo_v1_t { pid: process.pid, usedGpuMemory: process.memory }
}

fn second((process, place): &Placed) -> nvmlProcessInfo_v2_t {
    let (gpu, compute) = place.unwrap_or((u32::MAX, u32::MAX));
    nvmlProcessInfo_v2_t {
        pid: process.pid,
        usedGpuMemory: process.memory,
        gpuInstanceId: gpu,
        computeInstanceId: compute,
    }
}

fn list<T>(count: *mut c_uint, infos: *mut T, all: &[Placed], make: impl Fn(&Placed) -> T) -> Result<(), Code> {
    if count.is_null() {
        return Err(INVALID);
    }
    // SAFETY: the caller passes how many entries there is room for.
    let room = unsafe { *count } as usize;
    put(count, all.len() as c_uint)?;
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

// How devices are cut and joined.

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMigMode(device: nvmlDevice_t, current: *mut c_uint, pending: *mut c_uint) -> Code {
    about("nvmlDeviceGetMigMode", device, |it, _| {
        let mig = it.device.mig.as_ref().filter(|_| it.instance.is_none()).ok_or(NOT_SUPPORTED)?;
        put(current, u32::from(mig.on))?;
        put(pending, u32::from(mig.on))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    device: nvmlDevice_t,
    index: c_uint,
    instance: *mut nvmlDevice_t,
) -> Code {
    about("nvmlDeviceGetMigDeviceHandleByIndex", device, |it, _| {
        let mig = it.device.mig.as_ref().filter(|mig| mig.on).ok_or(NOT_SUPPORTED)?;
        let slot = mig.slots.get(index as usize).ok_or(INVALID)?;
        slot.as_ref().ok_or(NOT_FOUND)?;
        put(instance, Handle { device: it.handle.device, slot: Some(index) }.to_raw())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTopologyCommonAncestor(
    one: nvmlDevice_t,
    other: nvmlDevice_t,
    level: *mut c_uint,
) -> Code {
    about("nvmlDeviceGetTopologyCommonAncestor", one, |it, scenario| {
        let other = Handle::from_raw(other).ok_or(INVALID)?.device;
        let pair = (it.handle.device.min(other), it.handle.device.max(other));
        let known = scenario.nearness.iter().find(|(a, b, _)| (*a, *b) == pair);
        put(level, known.map(|(.., level)| *level).ok_or(NOT_SUPPORTED)?)
    })
}

fn link<'a>(target: &Target<'a>, link: c_uint) -> Result<&'a NvLink, Code> {
    if target.device.links.is_empty() {
        return Err(NOT_SUPPORTED);
    }
    target.device.links.get(link as usize).ok_or(INVALID)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetNvLinkState(device: nvmlDevice_t, number: c_uint, up: *mut c_uint) -> Code {
    about("nvmlDeviceGetNvLinkState", device, |it, _| put(up, u32::from(link(it, number)?.up)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetNvLinkRemoteDeviceType(device: nvmlDevice_t, number: c_uint, kind: *mut c_uint) -> Code {
    about("nvmlDeviceGetNvLinkRemoteDeviceType", device, |it, _| {
        put(kind, if link(it, number)?.end == NvLinkPeer::Switch { 2 } else { 0 })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
    device: nvmlDevice_t,
    number: c_uint,
    pci: *mut nvmlPciInfo_t,
) -> Code {
    about("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, |it, _| put(pci, place(&link(it, number)?.remote)?))
}

// Events. There is one set, because nobody needs a second.

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetCreate(set: *mut nvmlEventSet_t) -> Code {
    code(world::scenario("nvmlEventSetCreate").and_then(|_| put(set, std::ptr::without_provenance_mut(1))))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceRegisterEvents(device: nvmlDevice_t, _types: c_ulonglong, _set: nvmlEventSet_t) -> Code {
    about("nvmlDeviceRegisterEvents", device, |it, _| {
        if !it.device.tells_xids {
            return Err(NOT_SUPPORTED);
        }
        world::register(it.handle.device);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetWait_v2(_set: nvmlEventSet_t, data: *mut nvmlEventData_t, _timeout: c_uint) -> Code {
    code(world::scenario("nvmlEventSetWait_v2").and_then(|_| {
        let event = world::next_event().ok_or(nvml::nvmlReturn_enum_NVML_ERROR_TIMEOUT)?;
        put(
            data,
            nvmlEventData_t {
                device: Handle { device: event.device, slot: None }.to_raw(),
                eventType: u64::from(nvml::nvmlEventTypeXidCriticalError),
                eventData: event.xid,
                gpuInstanceId: u32::MAX,
                computeInstanceId: u32::MAX,
            },
        )
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetFree(_set: nvmlEventSet_t) -> Code {
    world::unregister_all();
    nvml::nvmlReturn_enum_NVML_SUCCESS
}

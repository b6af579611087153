//! Facts of a device, read once and kept with its handle, and its current values.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

use gpupool_core::{Bytes, DeviceHealth, LinkKind, PciAddress, Percent, Vendor};
use nvml_wrapper_sys::bindings as nvml;
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlProcessInfo_v1_t, nvmlProcessInfo_v2_t, nvmlReturn_t};

use crate::address::parse_pci_address;
use crate::detected_device::{
    DetectedDevice, DevicePartition, DeviceProcess, MemoryReading, Milliwatts, ProcessActivity, UsedMemoryScope,
};
use crate::nvml::library::{
    DeviceHandle, ErrorScope, MigSlices, NvmlCode, NvmlLibrary, NvmlMemory, NvmlResult, list_processes,
};
use crate::reported::Reported;
use crate::{kernel_file, limits};

pub(super) struct OpenedDevice {
    pub handle: DeviceHandle,
    /// Facts of the device; values are added to a copy.
    pub facts: DetectedDevice,
    pub instances: Vec<MigInstance>,
    pub repair: MemoryRepair,
    pub has_power_limit: bool,
    /// Whether reading its identity or MIG mode failed temporarily.
    pub is_incomplete: bool,
}

/// A MIG instance of an open device.
pub(super) struct MigInstance {
    pub handle: DeviceHandle,
    pub facts: DetectedDevice,
}

/// The way in which a device retires bad memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MemoryRepair {
    /// Spare rows replace bad rows.
    Rows,
    /// Bad pages are no longer used.
    Pages,
    /// Not reported.
    Unknown,
}

impl OpenedDevice {
    /// Opens the device with this index.
    ///
    /// Facts that the device does not report stay unknown.
    pub(super) fn open(library: &NvmlLibrary, index: u32, driver: Option<&Arc<str>>, sys: &Path) -> NvmlResult<Self> {
        let handle = library.device(index)?;
        let mut facts = DetectedDevice::new(Vendor::Nvidia);
        facts.index = Some(index);
        facts.driver = driver.cloned();
        let (uuid, pci, mig) = (library.uuid(handle), library.pci(handle), library.mig_mode(handle));
        let errors = [uuid.as_ref().err(), pci.as_ref().err(), mig.as_ref().err()];
        let is_incomplete = errors.into_iter().flatten().any(is_transient);
        facts.uuid = optional(uuid)?.map(Into::into);
        facts.name = optional(library.name(handle))?.map(Into::into);
        facts.pci = optional(pci)?.and_then(|text| parse_pci_address(&text));
        facts.minor = optional(library.minor(handle))?;
        facts.numa = facts.pci.and_then(|pci| numa_node(sys, pci));
        facts.mig = optional(mig)?;
        let repair = match (library.remapped_rows(handle), library.retired_pages_pending(handle)) {
            (Err(code), Err(_)) if is_unsupported(code) => MemoryRepair::Unknown,
            (Err(code), Ok(_)) if is_unsupported(code) => MemoryRepair::Pages,
            _ => MemoryRepair::Rows,
        };
        let has_power_limit = library.power_limit(handle).err().is_none_or(|code| !is_unsupported(code));
        let instances = if facts.mig == Some(true) { open_instances(library, handle, &facts)? } else { Vec::new() };
        Ok(Self { handle, facts, instances, repair, has_power_limit, is_incomplete })
    }

    /// Whether MIG or its instances changed since the device was opened.
    pub(super) fn has_mig_changed(&self, library: &NvmlLibrary) -> NvmlResult<bool> {
        let Some(on) = self.facts.mig else { return Ok(false) };
        match optional(library.mig_mode(self.handle))? {
            Some(now) if now == on => {}
            Some(_) => return Ok(true),
            None => return Ok(false),
        }
        if !on {
            return Ok(false);
        }
        let mut known = self.instances.iter();
        for (slot, handle) in occupied_slots(library, self.handle)? {
            let uuid = optional(library.uuid(handle))?;
            let same = |instance: &MigInstance| {
                instance.handle == handle
                    && instance.facts.index == Some(slot)
                    && instance.facts.uuid.as_deref() == uuid.as_deref()
            };
            if !known.next().is_some_and(same) {
                return Ok(true);
            }
        }
        Ok(known.next().is_some())
    }
}

fn open_instances(library: &NvmlLibrary, parent: DeviceHandle, of: &DetectedDevice) -> NvmlResult<Vec<MigInstance>> {
    let parent_total = optional(library.memory(parent))?.map(|memory| memory.total);
    let open = |(slot, handle)| {
        let mut facts = of.clone();
        facts.index = Some(slot);
        facts.uuid = optional(library.uuid(handle))?.map(Into::into);
        let name = optional(library.name(handle))?;
        let named = name.as_deref().and_then(|name| name.rsplit_once(" MIG ")).map(|(_, profile)| profile.trim());
        let sized = match (named, parent_total) {
            (None, Some(total)) => optional(library.slices(handle))?.and_then(|slices| profile_name(slices, total)),
            _ => None,
        };
        facts.partition = Some(DevicePartition::Mig {
            parent_uuid: of.uuid.clone(),
            gpu_instance: optional(library.gpu_instance(handle))?,
            compute_instance: optional(library.compute_instance(handle))?,
            profile: named.map(Arc::from).or(sized),
        });
        Ok(MigInstance { handle, facts })
    };
    occupied_slots(library, parent)?.into_iter().map(open).collect()
}

/// Returns the slots with an instance. They may have gaps.
fn occupied_slots(library: &NvmlLibrary, parent: DeviceHandle) -> NvmlResult<Vec<(u32, DeviceHandle)>> {
    let most = optional(library.mig_slots(parent))?.unwrap_or(0);
    let mut slots = Vec::new();
    for slot in 0..most.min(64) {
        if let Some(handle) = optional(library.mig_instance(parent, slot))? {
            slots.push((slot, handle));
        }
    }
    Ok(slots)
}

/// Builds the profile name as the driver does: slices, and the GPU's memory share rounded to eighths.
fn profile_name(slices: MigSlices, parent_total: u64) -> Option<Arc<str>> {
    let total_gb = u128::from(parent_total).div_ceil(1 << 30);
    let eighths = (u128::from(slices.memory_mib) << 20).checked_mul(8)?.div_ceil(u128::from(parent_total).max(1));
    let gb = (eighths * total_gb + 4) / 8;
    let MigSlices { gpu, compute, .. } = slices;
    let shared = if compute == gpu { String::new() } else { format!("{compute}c.") };
    (gpu > 0 && gb > 0).then(|| format!("{shared}{gpu}g.{gb}gb").into())
}

/// Makes a fact optional. Only a lost device or a driver error is passed on, so that a device that needs a reset is
/// still known by its other facts.
fn optional<T>(result: NvmlResult<T>) -> NvmlResult<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(code) if code.scope() <= ErrorScope::Device => Ok(None),
        Err(code) => Err(code),
    }
}

/// Whether a fact may be available later.
fn is_transient(code: &NvmlCode) -> bool {
    !is_unsupported(*code) && *code != NvmlCode::NO_PERMISSION
}

fn is_unsupported(code: NvmlCode) -> bool {
    matches!(code.to_reported::<()>(), Reported::Unsupported(_))
}

/// Returns the kernel's NUMA node of a PCI device; the kernel writes -1 for none.
fn numa_node(sys: &Path, pci: PciAddress) -> Option<u32> {
    kernel_file::read_number(&sys.join(format!("bus/pci/devices/{pci}/numa_node"))).value().copied()
}

// Current values of a device.

/// Reads one device and its instances.
pub(super) struct DeviceReader<'a> {
    pub library: &'a NvmlLibrary,
    pub buffer: &'a mut ProcessBuffer,
    /// Worst error so far.
    pub worst: Option<NvmlCode>,
}

impl DeviceReader<'_> {
    /// Reads the values, and returns the worst error scope. Fails only if the driver as a whole fails.
    pub(super) fn read(mut self, device: &OpenedDevice) -> NvmlResult<(Vec<DetectedDevice>, ErrorScope)> {
        let mut found = Vec::with_capacity(1 + device.instances.len());
        let mut whole = device.facts.clone();
        whole.power_limit = if device.has_power_limit {
            self.field(self.library.power_limit(device.handle)).map(from_milliwatts)
        } else {
            Reported::Unsupported(NvmlCode::NOT_SUPPORTED.description().into())
        };
        self.fill_values(&mut whole, device.handle);
        let no_own_memory = NvmlCode::NOT_SUPPORTED.description();
        whole.memory.unified = matches!(&whole.memory.total, Reported::Unsupported(why) if why == no_own_memory);
        found.push(whole);
        for instance in &device.instances {
            let mut part = instance.facts.clone();
            self.fill_values(&mut part, instance.handle);
            found.push(part);
        }
        let scope = self.worst.map_or(ErrorScope::Field, NvmlCode::scope);
        let health = match (scope, self.worst) {
            (ErrorScope::Driver, Some(code)) => return Err(code),
            (ErrorScope::Presence, Some(code)) => {
                let lost = |facts: DetectedDevice| unreadable_device(facts, code, Some(DeviceHealth::Lost));
                return Ok((found.into_iter().map(lost).collect(), scope));
            }
            (ErrorScope::Device, Some(code)) => DeviceHealth::Unhealthy(code.description().into()),
            _ => memory_health(self.library, device),
        };
        // The health of a GPU applies to all of its instances.
        for part in &mut found {
            part.health = Some(health.clone());
        }
        Ok((found, scope))
    }

    fn fill_values(&mut self, found: &mut DetectedDevice, device: DeviceHandle) {
        let library = self.library;
        found.memory = memory_reading(self.field(library.memory(device)));
        found.utilization =
            checked(self.field(library.utilization(device)), "%", |percent| Percent::from_number(f64::from(percent)));
        found.temperature_c =
            checked(self.field(library.temperature(device)), "°C", |celsius| celsius.try_into().ok());
        found.power = self.field(library.power(device)).map(from_milliwatts);
        let processes = self.buffer.running_processes(library, device);
        found.processes = self.field(processes);
    }

    /// Converts a result to a field, and records the worst error.
    fn field<T>(&mut self, result: NvmlResult<T>) -> Reported<T> {
        if let Err(code) = &result {
            self.worst = self.worst.filter(|worst| worst.scope() >= code.scope()).or(Some(*code));
        }
        result.map_or_else(NvmlCode::to_reported, Reported::Value)
    }
}

/// Returns a device whose values cannot be read.
pub(super) fn unreadable_device(facts: DetectedDevice, code: NvmlCode, health: Option<DeviceHealth>) -> DetectedDevice {
    fn failed<T>(code: NvmlCode) -> Reported<T> {
        Reported::Failed(code.description().into())
    }
    DetectedDevice {
        memory: MemoryReading {
            total: failed(code),
            reserved: failed(code),
            used: failed(code),
            ..MemoryReading::default()
        },
        utilization: failed(code),
        temperature_c: failed(code),
        power: failed(code),
        power_limit: failed(code),
        processes: failed(code),
        health,
        ..facts
    }
}

fn memory_reading(reported: Reported<NvmlMemory>) -> MemoryReading {
    let used_means = match reported.value() {
        Some(NvmlMemory { reserved: Some(_), .. }) => UsedMemoryScope::WithoutReserved,
        Some(NvmlMemory { reserved: None, .. }) => UsedMemoryScope::WithReserved,
        None => UsedMemoryScope::Unknown,
    };
    let reserved = reported.clone().and_then(|info| match info.reserved {
        Some(reserved) => Reported::Value(Bytes(reserved)),
        None => Reported::Unsupported("this driver counts it as used memory".into()),
    });
    MemoryReading {
        total: reported.clone().map(|info| Bytes(info.total)),
        reserved,
        used: reported.map(|info| Bytes(info.used)),
        used_means,
        ..MemoryReading::default()
    }
}

/// Converts a number, rejecting impossible ones.
fn checked<N: Copy + Display, T>(number: Reported<N>, unit: &str, convert: impl FnOnce(N) -> Option<T>) -> Reported<T> {
    let impossible = |number: N| Reported::Failed(Cow::Owned(format!("impossible value: {number} {unit}")));
    number.and_then(|number| convert(number).map_or_else(|| impossible(number), Reported::Value))
}

fn from_milliwatts(milliwatts: u32) -> Milliwatts {
    Milliwatts(u64::from(milliwatts))
}

/// Returns the health by the state of bad memory: repaired errors leave a device healthy.
fn memory_health(library: &NvmlLibrary, device: &OpenedDevice) -> DeviceHealth {
    const RESET: &str = "retirement of bad memory is pending: reset the GPU";
    const REPLACE: &str = "retirement of bad memory failed: replace the GPU";
    let (failed, pending) = match device.repair {
        MemoryRepair::Rows => {
            library.remapped_rows(device.handle).map_or((false, false), |rows| (rows.failed, rows.pending))
        }
        MemoryRepair::Pages => (false, library.retired_pages_pending(device.handle).unwrap_or(false)),
        MemoryRepair::Unknown => (false, false),
    };
    match (failed, pending) {
        (true, _) => DeviceHealth::Unhealthy(REPLACE.into()),
        (false, true) => DeviceHealth::Unhealthy(RESET.into()),
        (false, false) => DeviceHealth::Healthy,
    }
}

// Processes of a device, listed by the newest available function.

/// NVML's value for unknown memory.
const MEMORY_UNKNOWN: u64 = u64::MAX;
/// Marks words that the driver did not write: no pid, size or pair of instances has this value.
const UNWRITTEN: u64 = 0x5aa5_c33c_5aa5_c33c;
const INITIAL_ENTRIES: usize = 64;

/// Buffer for process lists, reused between readings.
pub(super) struct ProcessBuffer(Vec<[u64; 4]>);

impl Default for ProcessBuffer {
    fn default() -> Self {
        Self(vec![[UNWRITTEN; 4]; INITIAL_ENTRIES])
    }
}

impl ProcessBuffer {
    /// Returns all processes of a device. Fails if the list is incomplete.
    fn running_processes(&mut self, library: &NvmlLibrary, device: DeviceHandle) -> NvmlResult<Vec<DeviceProcess>> {
        let functions = library.functions();
        let newest = &functions.nvmlDeviceGetComputeRunningProcesses_v3;
        let newer = &functions.nvmlDeviceGetComputeRunningProcesses_v2;
        let computing = self.list([newest, newer], &functions.nvmlDeviceGetComputeRunningProcesses, device)?;
        let newest = &functions.nvmlDeviceGetGraphicsRunningProcesses_v3;
        let newer = &functions.nvmlDeviceGetGraphicsRunningProcesses_v2;
        let drawing = match self.list([newest, newer], &functions.nvmlDeviceGetGraphicsRunningProcesses, device) {
            // A device without graphics support has no graphics processes.
            Err(code) if is_unsupported(code) => MemoryByPid::new(),
            result => result?,
        };
        Ok(merge_processes(&computing, &drawing))
    }

    /// Calls the first function that the library has and the driver accepts.
    fn list<E>(
        &mut self,
        newer: [&Result<ProcessListCall<nvmlProcessInfo_v2_t>, E>; 2],
        oldest: &Result<ProcessListCall<nvmlProcessInfo_v1_t>, E>,
        device: DeviceHandle,
    ) -> NvmlResult<MemoryByPid> {
        for call in newer.into_iter().flatten() {
            match self.query_entries(*call, device) {
                Err(code) if code.is_replaceable() => {}
                result => return result,
            }
        }
        match oldest {
            Ok(call) => self.query_entries(*call, device),
            Err(_) => Err(NvmlCode::FUNCTION_NOT_FOUND),
        }
    }

    /// Grows the buffer until all entries fit: processes may start meanwhile.
    fn query_entries<T>(&mut self, call: ProcessListCall<T>, device: DeviceHandle) -> NvmlResult<MemoryByPid> {
        loop {
            self.0.fill([UNWRITTEN; 4]);
            match list_processes(call, device, &mut self.0) {
                Ok(count) => return Ok(parse_entries(self.0.as_flattened(), count as usize, size_of::<T>() / 8)),
                Err((NvmlCode::INSUFFICIENT_SIZE, wanted)) if self.0.len() < limits::PROCESSES => {
                    let wanted = (wanted as usize).max(self.0.len()).saturating_mul(2).min(limits::PROCESSES);
                    self.0.resize(wanted, [UNWRITTEN; 4]);
                }
                Err((code, _)) => return Err(code),
            }
        }
    }
}

/// Device memory in use, by pid.
type MemoryByPid = BTreeMap<u32, u64>;

type ProcessListCall<T> = unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut T) -> nvmlReturn_t;

/// Parses `count` entries. The size of an entry is derived from the words that were overwritten, or else is `usual`.
fn parse_entries(words: &[u64], count: usize, usual: usize) -> MemoryByPid {
    let written = words.iter().rposition(|word| *word != UNWRITTEN).map_or(0, |last| last + 1);
    let even = count != 0 && written.is_multiple_of(count) && (2..=4).contains(&(written / count));
    let size = if even { written / count } else { usual.clamp(2, 4) };
    let mut found = MemoryByPid::new();
    for entry in words.chunks_exact(size).take(count) {
        let memory = entry[1];
        // The first half of the word is the pid, the rest is padding.
        let [a, b, c, d, ..] = entry[0].to_ne_bytes();
        let sum = found.entry(u32::from_ne_bytes([a, b, c, d])).or_insert(0);
        // A process on several instances of a device is listed once for each.
        let is_unknown = memory == MEMORY_UNKNOWN || *sum == MEMORY_UNKNOWN;
        *sum = if is_unknown { MEMORY_UNKNOWN } else { sum.saturating_add(memory) };
    }
    found
}

fn merge_processes(computing: &MemoryByPid, drawing: &MemoryByPid) -> Vec<DeviceProcess> {
    let only_drawing = drawing.iter().filter(|(pid, _)| !computing.contains_key(pid));
    let process = |(&pid, &memory): (&u32, &u64)| DeviceProcess {
        pid,
        activity: ProcessActivity::of(computing.contains_key(&pid), drawing.contains_key(&pid)),
        memory: match memory {
            MEMORY_UNKNOWN => Reported::Unsupported("not reported by the driver".into()),
            memory => Reported::Value(Bytes(memory)),
        },
        ..DeviceProcess::default()
    };
    computing.iter().chain(only_drawing).map(process).collect()
}

// Links between devices: NVLinks counted end to end, also through switches, and the PCIe tree.

/// Returns the links between open devices, by their positions.
pub(super) fn links_between(library: &NvmlLibrary, devices: &[OpenedDevice]) -> Vec<(usize, usize, LinkKind)> {
    let ends: Vec<NvLinkEnds> = devices.iter().map(|device| NvLinkEnds::of(library, device, devices)).collect();
    let pairs = (0..devices.len()).flat_map(|a| (a + 1..devices.len()).map(move |b| (a, b)));
    let kind = |(a, b): (usize, usize)| {
        let kind = nvlink_between(&ends, a, b).or_else(|| pcie_link_between(library, &devices[a], &devices[b]))?;
        Some((a, b, kind))
    };
    pairs.filter_map(kind).collect()
}

/// Remote ends of a device's NVLinks.
struct NvLinkEnds {
    /// Number of links to each other device.
    at: Vec<u8>,
    /// Number of links to switches, which connect all devices with such links.
    at_switches: u8,
}

impl NvLinkEnds {
    fn of(library: &NvmlLibrary, device: &OpenedDevice, devices: &[OpenedDevice]) -> Self {
        let mut ends = Self { at: vec![0; devices.len()], at_switches: 0 };
        for link in 0..nvml::NVML_NVLINK_MAX_LINKS {
            if library.nvlink_up(device.handle, link) != Ok(true) {
                continue;
            }
            if library.nvlink_ends_at_switch(device.handle, link) == Ok(true) {
                ends.at_switches += 1;
                continue;
            }
            let remote = library.nvlink_remote(device.handle, link).ok().and_then(|text| parse_pci_address(&text));
            let place = devices.iter().position(|other| remote.is_some() && other.facts.pci == remote);
            if let Some(place) = place {
                ends.at[place] += 1;
            }
        }
        ends
    }
}

fn nvlink_between(ends: &[NvLinkEnds], a: usize, b: usize) -> Option<LinkKind> {
    // Either end may fail to report the remote device.
    let direct = ends[a].at[b].max(ends[b].at[a]);
    let lanes = direct + ends[a].at_switches.min(ends[b].at_switches);
    (lanes > 0).then_some(LinkKind::NvLink(lanes))
}

fn pcie_link_between(library: &NvmlLibrary, one: &OpenedDevice, other: &OpenedDevice) -> Option<LinkKind> {
    match library.common_ancestor(one.handle, other.handle).ok()? {
        nvml::nvmlGpuLevel_enum_NVML_TOPOLOGY_INTERNAL | nvml::nvmlGpuLevel_enum_NVML_TOPOLOGY_SINGLE => {
            Some(LinkKind::PcieSwitch)
        }
        nvml::nvmlGpuLevel_enum_NVML_TOPOLOGY_MULTIPLE => Some(LinkKind::PcieSwitches),
        nvml::nvmlGpuLevel_enum_NVML_TOPOLOGY_HOSTBRIDGE => Some(LinkKind::HostBridge),
        nvml::nvmlGpuLevel_enum_NVML_TOPOLOGY_NODE => Some(LinkKind::SameNuma),
        nvml::nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM => Some(LinkKind::CrossNuma),
        _ => None,
    }
}

// Devices remembered across sessions, with their identities and recorded Xids.

/// All devices that were ever opened.
#[derive(Debug, Default)]
pub(super) struct KnownDevices {
    devices: Vec<KnownDevice>,
    /// Health reasons by Xid, keyed by UUID.
    xid_reasons: BTreeMap<Arc<str>, Arc<str>>,
}

/// Last known facts of a device.
#[derive(Debug)]
pub(super) struct KnownDevice {
    pub facts: DetectedDevice,
    pub instances: Vec<DetectedDevice>,
    /// Whether the device was lost or waited for a reset when last read.
    away: bool,
}

impl KnownDevices {
    /// Updates the facts of an open device, and completes its identity if it is unknown at the moment.
    pub(super) fn update(&mut self, facts: &mut DetectedDevice, instances: Vec<DetectedDevice>) {
        let unidentified = facts.uuid.is_none() && facts.pci.is_none();
        let is_it = |device: &&mut KnownDevice| {
            if unidentified { device.facts.index == facts.index } else { is_same_device(&device.facts, facts) }
        };
        if let Some(device) = self.devices.iter_mut().find(is_it) {
            facts.uuid = facts.uuid.take().or(device.facts.uuid.take());
            facts.name = facts.name.take().or(device.facts.name.take());
            facts.pci = facts.pci.or(device.facts.pci);
            (device.facts, device.instances) = (facts.clone(), instances);
        } else if !unidentified {
            self.devices.push(KnownDevice { facts: facts.clone(), instances, away: false });
        }
    }

    /// Returns the known devices that are not in `present`.
    pub(super) fn missing<'a>(&'a self, present: &'a [&'a DetectedDevice]) -> impl Iterator<Item = &'a KnownDevice> {
        self.devices.iter().filter(|device| !present.iter().any(|facts| is_same_device(&device.facts, facts)))
    }

    /// Records whether a device answers. The Xids of a device that returns are forgotten, because it was reset.
    pub(super) fn note_presence(&mut self, facts: &DetectedDevice, answers: bool) {
        let Some(device) = self.devices.iter_mut().find(|device| is_same_device(&device.facts, facts)) else { return };
        if device.away
            && answers
            && let Some(uuid) = &facts.uuid
        {
            self.xid_reasons.remove(uuid);
        }
        device.away = !answers;
    }

    /// Records the health reason of an Xid.
    pub(super) fn record_xid(&mut self, facts: &DetectedDevice, text: String) {
        if let Some(uuid) = &facts.uuid {
            self.xid_reasons.insert(uuid.clone(), text.into());
        }
    }

    /// Returns the health reason recorded for a device.
    pub(super) fn xid_reason(&self, facts: &DetectedDevice) -> Option<&Arc<str>> {
        self.xid_reasons.get(facts.uuid.as_ref()?)
    }

    pub(super) fn forget_xids(&mut self) {
        self.xid_reasons.clear();
    }
}

/// Whether two devices are the same: by UUID, or by PCI address if one has no UUID.
fn is_same_device(one: &DetectedDevice, other: &DetectedDevice) -> bool {
    match (&one.uuid, &other.uuid) {
        (Some(a), Some(b)) => a == b,
        _ => one.pci.is_some() && one.pci == other.pci,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_without_a_name_gets_the_name_of_the_driver() {
        let h100 = 81_559 << 20;
        let cut = |gpu, compute, memory_mib| profile_name(MigSlices { gpu, compute, memory_mib }, h100);
        assert_eq!(cut(1, 1, 9_856).as_deref(), Some("1g.10gb"));
        assert_eq!(cut(3, 3, 40_320).as_deref(), Some("3g.40gb"));
        assert_eq!(cut(7, 7, 80_640).as_deref(), Some("7g.80gb"));
        assert_eq!(cut(3, 1, 40_320).as_deref(), Some("1c.3g.40gb"));
        assert_eq!(cut(0, 0, 0), None);
    }

    fn pid(pid: u32) -> u64 {
        let [a, b, c, d] = pid.to_ne_bytes();
        u64::from_ne_bytes([a, b, c, d, 0xc3, 0x3c, 0x5a, 0xa5])
    }

    #[test]
    fn the_size_of_process_entries_follows_the_driver() {
        let rest = |words: &[u64]| [words, &[UNWRITTEN; 8]].concat();
        let expected = MemoryByPid::from([(7, 100), (8, 200)]);
        for usual in [2, 3, 4] {
            assert_eq!(parse_entries(&rest(&[pid(7), 100, pid(8), 200]), 2, usual), expected);
            assert_eq!(parse_entries(&rest(&[pid(7), 100, 0, pid(8), 200, 0]), 2, usual), expected);
            assert_eq!(parse_entries(&rest(&[pid(7), 100, 0, 0, pid(8), 200, 0, 0]), 2, usual), expected);
            assert!(parse_entries(&rest(&[]), 0, usual).is_empty());
        }
    }

    #[test]
    fn a_process_that_computes_and_draws_is_one_process() {
        let both =
            merge_processes(&MemoryByPid::from([(7, 100), (9, MEMORY_UNKNOWN)]), &MemoryByPid::from([(7, 90), (8, 5)]));
        let reported: Vec<_> =
            both.iter().map(|process| (process.pid, process.activity, process.memory.value())).collect();
        assert_eq!(
            reported,
            [
                (7, ProcessActivity::Both, Some(&Bytes(100))),
                (9, ProcessActivity::Compute, None),
                (8, ProcessActivity::Graphics, Some(&Bytes(5)))
            ]
        );
    }

    #[test]
    fn memory_of_a_process_on_two_instances_is_summed() {
        let words = [pid(7), 100, 0, pid(7), 50, 1, pid(8), MEMORY_UNKNOWN, 0, pid(8), 1, 1, UNWRITTEN];
        assert_eq!(parse_entries(&words, 4, 3), MemoryByPid::from([(7, 150), (8, MEMORY_UNKNOWN)]));
    }
}

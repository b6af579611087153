//! What a device is: asked once and kept with its handle.

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
use crate::nvml::library::{Against, Answer, Code, Handle, Library, MemoryInfo, Slices, list};
use crate::reported::Reported;
use crate::{kernel_file, limits};

/// A device that could be opened.
pub(super) struct Opened {
    pub handle: Handle,
    /// What it is; readings are added to a copy.
    pub facts: DetectedDevice,
    pub instances: Vec<Instance>,
    pub repair: Repair,
    pub has_power_limit: bool,
    /// Set where it failed to say who it is or how it is cut, though it can.
    pub is_unsure: bool,
}

/// A MIG instance of a device.
pub(super) struct Instance {
    pub handle: Handle,
    pub facts: DetectedDevice,
}

/// How a device deals with bad memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repair {
    /// It puts spare rows in their place.
    Rows,
    /// It puts pages out of use.
    Pages,
    /// It says nothing of it.
    Untold,
}

impl Opened {
    /// Opens the device with this number.
    ///
    /// A fact it does not tell stays unknown.
    pub(super) fn open(library: &Library, index: u32, driver: Option<&Arc<str>>, sys: &Path) -> Answer<Self> {
        let handle = library.device(index)?;
        let mut facts = DetectedDevice::new(Vendor::Nvidia);
        facts.index = Some(index);
        facts.driver = driver.cloned();
        let (uuid, pci, mig) = (library.uuid(handle), library.pci(handle), library.mig_mode(handle));
        let is_unsure = [uuid.as_ref().err(), pci.as_ref().err(), mig.as_ref().err()].into_iter().flatten().any(passes);
        facts.uuid = fact(uuid)?.map(Into::into);
        facts.name = fact(library.name(handle))?.map(Into::into);
        facts.pci = fact(pci)?.and_then(|text| parse_pci_address(&text));
        facts.minor = fact(library.minor(handle))?;
        facts.numa = facts.pci.and_then(|pci| numa(sys, pci));
        facts.mig = fact(mig)?;
        let repair = match (library.remapped_rows(handle), library.retired_pages_pending(handle)) {
            (Err(code), Err(_)) if is_unsupported(code) => Repair::Untold,
            (Err(code), Ok(_)) if is_unsupported(code) => Repair::Pages,
            _ => Repair::Rows,
        };
        let has_power_limit = library.power_limit(handle).err().is_none_or(|code| !is_unsupported(code));
        let instances = if facts.mig == Some(true) { instances(library, handle, &facts)? } else { Vec::new() };
        Ok(Self { handle, facts, instances, repair, has_power_limit, is_unsure })
    }

    /// Whether MIG was switched, or instances were made or taken away, since the device was opened.
    pub(super) fn is_cut_differently(&self, library: &Library) -> Answer<bool> {
        let Some(on) = self.facts.mig else { return Ok(false) };
        match fact(library.mig_mode(self.handle))? {
            Some(now) if now == on => {}
            Some(_) => return Ok(true),
            None => return Ok(false),
        }
        if !on {
            return Ok(false);
        }
        let mut known = self.instances.iter();
        for (slot, handle) in slots(library, self.handle)? {
            let uuid = fact(library.uuid(handle))?;
            let same = |instance: &Instance| {
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

fn instances(library: &Library, parent: Handle, of: &DetectedDevice) -> Answer<Vec<Instance>> {
    let parent_total = fact(library.memory(parent))?.map(|memory| memory.total);
    let open = |(slot, handle)| {
        let mut facts = of.clone();
        facts.index = Some(slot);
        facts.uuid = fact(library.uuid(handle))?.map(Into::into);
        let name = fact(library.name(handle))?;
        let named = name.as_deref().and_then(|name| name.rsplit_once(" MIG ")).map(|(_, profile)| profile.trim());
        let sized = match (named, parent_total) {
            (None, Some(total)) => fact(library.slices(handle))?.and_then(|slices| profile(slices, total)),
            _ => None,
        };
        facts.partition = Some(DevicePartition::Mig {
            parent_uuid: of.uuid.clone(),
            gpu_instance: fact(library.gpu_instance(handle))?,
            compute_instance: fact(library.compute_instance(handle))?,
            profile: named.map(Arc::from).or(sized),
        });
        Ok(Instance { handle, facts })
    };
    slots(library, parent)?.into_iter().map(open).collect()
}

/// The slots with an instance in them. There may be fewer than the most there can be, with holes between.
fn slots(library: &Library, parent: Handle) -> Answer<Vec<(u32, Handle)>> {
    let most = fact(library.mig_slots(parent))?.unwrap_or(0);
    let mut slots = Vec::new();
    for slot in 0..most.min(64) {
        if let Some(handle) = fact(library.mig_instance(parent, slot))? {
            slots.push((slot, handle));
        }
    }
    Ok(slots)
}

/// The name of a cut, as the driver makes it: slices, and the part of the GPU's memory in eighths.
fn profile(slices: Slices, parent_total: u64) -> Option<Arc<str>> {
    let total_gb = u128::from(parent_total).div_ceil(1 << 30);
    let eighths = (u128::from(slices.memory_mib) << 20).checked_mul(8)?.div_ceil(u128::from(parent_total).max(1));
    let gb = (eighths * total_gb + 4) / 8;
    let Slices { gpu, compute, .. } = slices;
    let shared = if compute == gpu { String::new() } else { format!("{compute}c.") };
    (gpu > 0 && gb > 0).then(|| format!("{shared}{gpu}g.{gb}gb").into())
}

/// A fact that may be untold; only that the device is gone or the driver bad goes on, so that a device that needs a
/// reset is known by what it still tells.
fn fact<T>(answer: Answer<T>) -> Answer<Option<T>> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(code) if code.against() <= Against::Device => Ok(None),
        Err(code) => Err(code),
    }
}

/// Whether a fact may be told another time.
fn passes(code: &Code) -> bool {
    !is_unsupported(*code) && *code != Code::NO_PERMISSION
}

fn is_unsupported(code: Code) -> bool {
    matches!(code.told::<()>(), Reported::Unsupported(_))
}

/// The NUMA node the kernel puts a PCI device on; it says -1 for none.
fn numa(sys: &Path, pci: PciAddress) -> Option<u32> {
    kernel_file::read_number(&sys.join(format!("bus/pci/devices/{pci}/numa_node"))).value().copied()
}

// What a device reports now.

/// Reads a device and then its instances, with what the answers speak against at worst; an error only where the driver
/// as a whole is bad.
pub(super) fn read(library: &Library, device: &Opened, room: &mut Room) -> Answer<(Vec<DetectedDevice>, Against)> {
    let mut asked = Asked::default();
    let mut found = Vec::with_capacity(1 + device.instances.len());
    let mut whole = device.facts.clone();
    whole.power_limit = if device.has_power_limit {
        asked.about(library.power_limit(device.handle)).map(watts)
    } else {
        Reported::Unsupported(Code::NOT_SUPPORTED.words().into())
    };
    fill(&mut whole, library, device.handle, room, &mut asked);
    let no_own_memory = Code::NOT_SUPPORTED.words();
    whole.memory.unified = matches!(&whole.memory.total, Reported::Unsupported(words) if words == no_own_memory);
    found.push(whole);
    for instance in &device.instances {
        let mut part = instance.facts.clone();
        fill(&mut part, library, instance.handle, room, &mut asked);
        found.push(part);
    }
    let against = asked.worst.map_or(Against::Field, Code::against);
    let health = match (against, asked.worst) {
        (Against::Driver, Some(code)) => return Err(code),
        (Against::Presence, Some(code)) => {
            let lost = |facts: DetectedDevice| unreadable(facts, code, Some(DeviceHealth::Lost));
            return Ok((found.into_iter().map(lost).collect(), against));
        }
        (Against::Device, Some(code)) => DeviceHealth::Unhealthy(code.words().into()),
        _ => repaired(library, device),
    };
    // What is wrong with a GPU is wrong with every part of it.
    for part in &mut found {
        part.health = Some(health.clone());
    }
    Ok((found, against))
}

/// A device of which only is known what it is.
pub(super) fn unreadable(facts: DetectedDevice, code: Code, health: Option<DeviceHealth>) -> DetectedDevice {
    fn failed<T>(code: Code) -> Reported<T> {
        Reported::Failed(code.words().into())
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

/// The worst answer while a device was asked.
#[derive(Default)]
struct Asked {
    worst: Option<Code>,
}

impl Asked {
    fn about<T>(&mut self, answer: Answer<T>) -> Reported<T> {
        match answer {
            Ok(value) => Reported::Value(value),
            Err(code) => {
                if self.worst.is_none_or(|worst| worst.against() < code.against()) {
                    self.worst = Some(code);
                }
                code.told()
            }
        }
    }
}

fn fill(found: &mut DetectedDevice, library: &Library, device: Handle, room: &mut Room, asked: &mut Asked) {
    found.memory = memory(asked.about(library.memory(device)));
    found.utilization =
        checked(asked.about(library.utilization(device)), "%", |percent| Percent::from_number(f64::from(percent)));
    found.temperature_c = checked(asked.about(library.temperature(device)), "°C", |celsius| celsius.try_into().ok());
    found.power = asked.about(library.power(device)).map(watts);
    found.processes = asked.about(running(library, device, room));
}

fn memory(told: Reported<MemoryInfo>) -> MemoryReading {
    let used_means = match told.value() {
        Some(MemoryInfo { reserved: Some(_), .. }) => UsedMemoryScope::WithoutReserved,
        Some(MemoryInfo { reserved: None, .. }) => UsedMemoryScope::WithReserved,
        None => UsedMemoryScope::Unknown,
    };
    let reserved = told.clone().and_then(|info| match info.reserved {
        Some(reserved) => Reported::Value(Bytes(reserved)),
        None => Reported::Unsupported("this driver counts it as used".into()),
    });
    MemoryReading {
        total: told.clone().map(|info| Bytes(info.total)),
        reserved,
        used: told.map(|info| Bytes(info.used)),
        used_means,
        ..MemoryReading::default()
    }
}

/// A number the library gave, unless it cannot be.
fn checked<N: Copy + Display, T>(told: Reported<N>, unit: &str, sound: impl FnOnce(N) -> Option<T>) -> Reported<T> {
    let cannot_be = |number: N| Reported::Failed(Cow::Owned(format!("{number} {unit} cannot be")));
    told.and_then(|number| sound(number).map_or_else(|| cannot_be(number), Reported::Value))
}

fn watts(milliwatts: u32) -> Milliwatts {
    Milliwatts(u64::from(milliwatts))
}

/// What bad memory says about a device: errors alone say nothing while they were repaired.
fn repaired(library: &Library, device: &Opened) -> DeviceHealth {
    const RESET: &str = "bad memory waits to be put out of use: reset the GPU";
    let bad = match device.repair {
        Repair::Rows => library.remapped_rows(device.handle).ok().and_then(|rows| match (rows.failed, rows.pending) {
            (true, _) => Some("bad memory could not be put out of use: replace the GPU"),
            (false, true) => Some(RESET),
            (false, false) => None,
        }),
        Repair::Pages => library.retired_pages_pending(device.handle).ok().filter(|pending| *pending).map(|_| RESET),
        Repair::Untold => None,
    };
    bad.map_or(DeviceHealth::Healthy, |text| DeviceHealth::Unhealthy(text.into()))
}

// Who runs on a device, from whichever of its functions the library has.

/// What NVML says for memory it cannot tell.
const NOT_AVAILABLE: u64 = u64::MAX;
/// No pid, no size and no pair of instances looks like this.
const MARK: u64 = 0x5aa5_c33c_5aa5_c33c;
const FIRST_ROOM: usize = 64;

/// Room for the lists, kept between readings.
pub(super) struct Room(Vec<[u64; 4]>);

impl Default for Room {
    fn default() -> Self {
        Self(vec![[MARK; 4]; FIRST_ROOM])
    }
}

/// Every process on a device. A value only where the list is complete.
pub(super) fn running(library: &Library, device: Handle, room: &mut Room) -> Answer<Vec<DeviceProcess>> {
    let functions = library.functions();
    let newest = &functions.nvmlDeviceGetComputeRunningProcesses_v3;
    let newer = &functions.nvmlDeviceGetComputeRunningProcesses_v2;
    let computing = listed([newest, newer], &functions.nvmlDeviceGetComputeRunningProcesses, device, room)?;
    let newest = &functions.nvmlDeviceGetGraphicsRunningProcesses_v3;
    let newer = &functions.nvmlDeviceGetGraphicsRunningProcesses_v2;
    let drawing = match listed([newest, newer], &functions.nvmlDeviceGetGraphicsRunningProcesses, device, room) {
        // What cannot draw has no process that does.
        Err(code) if is_unsupported(code) => ByPid::new(),
        answer => answer?,
    };
    Ok(joined(&computing, &drawing))
}

/// Device memory by pid.
type ByPid = BTreeMap<u32, u64>;

type Call<T> = unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut T) -> nvmlReturn_t;

/// What the first function says that the library has and the driver does not refuse.
fn listed<E>(
    newer: [&Result<Call<nvmlProcessInfo_v2_t>, E>; 2],
    oldest: &Result<Call<nvmlProcessInfo_v1_t>, E>,
    device: Handle,
    room: &mut Room,
) -> Answer<ByPid> {
    for call in newer.into_iter().flatten() {
        match entries(*call, device, room) {
            Err(code) if code.wants_other_function() => {}
            answer => return answer,
        }
    }
    match oldest {
        Ok(call) => entries(*call, device, room),
        Err(_) => Err(Code::FUNCTION_NOT_FOUND),
    }
}

/// Asks until everything fits: processes start while they are counted.
fn entries<T>(call: Call<T>, device: Handle, room: &mut Room) -> Answer<ByPid> {
    loop {
        room.0.fill([MARK; 4]);
        match list(call, device, &mut room.0) {
            Ok(count) => return Ok(by_pid(room.0.as_flattened(), count as usize, size_of::<T>() / 8)),
            Err((Code::TOO_SMALL, wanted)) if room.0.len() < limits::PROCESSES => {
                let wanted = (wanted as usize).max(room.0.len()).saturating_mul(2).min(limits::PROCESSES);
                room.0.resize(wanted, [MARK; 4]);
            }
            Err((code, _)) => return Err(code),
        }
    }
}

/// Reads `count` entries; each is as many words as were written over for it, or else `usual`.
fn by_pid(words: &[u64], count: usize, usual: usize) -> ByPid {
    let written = words.iter().rposition(|word| *word != MARK).map_or(0, |last| last + 1);
    let even = count != 0 && written.is_multiple_of(count) && (2..=4).contains(&(written / count));
    let size = if even { written / count } else { usual.clamp(2, 4) };
    let mut found = ByPid::new();
    for entry in words.chunks_exact(size).take(count) {
        let memory = entry[1];
        // The first half of the word is the pid, the rest fills it up.
        let [a, b, c, d, ..] = entry[0].to_ne_bytes();
        let sum = found.entry(u32::from_ne_bytes([a, b, c, d])).or_insert(0);
        // One process on several instances of a device is listed once for each.
        *sum =
            if memory == NOT_AVAILABLE || *sum == NOT_AVAILABLE { NOT_AVAILABLE } else { sum.saturating_add(memory) };
    }
    found
}

fn joined(computing: &ByPid, drawing: &ByPid) -> Vec<DeviceProcess> {
    let only_drawing = drawing.iter().filter(|(pid, _)| !computing.contains_key(pid));
    let process = |(&pid, &memory): (&u32, &u64)| DeviceProcess {
        pid,
        activity: ProcessActivity::of(computing.contains_key(&pid), drawing.contains_key(&pid)),
        memory: match memory {
            NOT_AVAILABLE => Reported::Unsupported("the driver does not tell".into()),
            memory => Reported::Value(Bytes(memory)),
        },
        ..DeviceProcess::default()
    };
    computing.iter().chain(only_drawing).map(process).collect()
}

// What joins the devices: NVLinks counted end to end, through switches too, and the PCIe tree.

/// Links between opened devices, named by their places among them.
pub(super) fn between(library: &Library, devices: &[Opened]) -> Vec<(usize, usize, LinkKind)> {
    let ends: Vec<Ends> = devices.iter().map(|device| Ends::of(library, device, devices)).collect();
    let pairs = (0..devices.len()).flat_map(|a| (a + 1..devices.len()).map(move |b| (a, b)));
    let kind = |(a, b): (usize, usize)| {
        let kind = lanes(&ends, a, b).or_else(|| near(library, &devices[a], &devices[b]))?;
        Some((a, b, kind))
    };
    pairs.filter_map(kind).collect()
}

/// Where the NVLinks of one device end.
struct Ends {
    /// How many end at each of the other devices.
    at: Vec<u8>,
    /// How many end at a switch, which joins them to every other device that has such links.
    at_switches: u8,
}

impl Ends {
    fn of(library: &Library, device: &Opened, devices: &[Opened]) -> Self {
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

fn lanes(ends: &[Ends], a: usize, b: usize) -> Option<LinkKind> {
    // Either end may fail to tell where a link goes.
    let direct = ends[a].at[b].max(ends[b].at[a]);
    let lanes = direct + ends[a].at_switches.min(ends[b].at_switches);
    (lanes > 0).then_some(LinkKind::NvLink(lanes))
}

fn near(library: &Library, one: &Opened, other: &Opened) -> Option<LinkKind> {
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

// What is kept of the devices beyond a session: who they were, and which errors speak against them.

/// Every device that was ever opened.
#[derive(Debug, Default)]
pub(super) struct Remembered {
    devices: Vec<RememberedDevice>,
    /// What Xids said against devices, by UUID.
    judged: BTreeMap<Arc<str>, Arc<str>>,
}

/// A device as it was last seen.
#[derive(Debug)]
pub(super) struct RememberedDevice {
    pub facts: DetectedDevice,
    pub instances: Vec<DetectedDevice>,
    /// Lost, or waiting for a reset, when it was last looked for.
    away: bool,
}

impl Remembered {
    /// Keeps what an opened device is, and tells it who it is where it does not know at the moment.
    pub(super) fn keep(&mut self, facts: &mut DetectedDevice, instances: Vec<DetectedDevice>) {
        let nameless = facts.uuid.is_none() && facts.pci.is_none();
        let is_it = |device: &&mut RememberedDevice| {
            if nameless { device.facts.index == facts.index } else { same(&device.facts, facts) }
        };
        if let Some(device) = self.devices.iter_mut().find(is_it) {
            facts.uuid = facts.uuid.take().or(device.facts.uuid.take());
            facts.name = facts.name.take().or(device.facts.name.take());
            facts.pci = facts.pci.or(device.facts.pci);
            (device.facts, device.instances) = (facts.clone(), instances);
        } else if !nameless {
            self.devices.push(RememberedDevice { facts: facts.clone(), instances, away: false });
        }
    }

    /// The devices that are not among `present`.
    pub(super) fn missing<'a>(
        &'a self,
        present: &'a [&'a DetectedDevice],
    ) -> impl Iterator<Item = &'a RememberedDevice> {
        self.devices.iter().filter(|device| !present.iter().any(|facts| same(&device.facts, facts)))
    }

    /// Notes whether a device answers. What Xids said against one that went and came back is forgotten: to come back
    /// it was reset.
    pub(super) fn note(&mut self, facts: &DetectedDevice, answers: bool) {
        let Some(device) = self.devices.iter_mut().find(|device| same(&device.facts, facts)) else { return };
        if device.away
            && answers
            && let Some(uuid) = &facts.uuid
        {
            self.judged.remove(uuid);
        }
        device.away = !answers;
    }

    /// Notes what an Xid says against a device.
    pub(super) fn judge(&mut self, facts: &DetectedDevice, text: String) {
        if let Some(uuid) = &facts.uuid {
            self.judged.insert(uuid.clone(), text.into());
        }
    }

    /// What Xids said against a device.
    pub(super) fn judgement(&self, facts: &DetectedDevice) -> Option<&Arc<str>> {
        self.judged.get(facts.uuid.as_ref()?)
    }

    /// Forgets what Xids said.
    pub(super) fn forget_judgements(&mut self) {
        self.judged.clear();
    }
}

/// Whether two are one device: by UUID, or where one has none by the place on the bus.
fn same(one: &DetectedDevice, other: &DetectedDevice) -> bool {
    match (&one.uuid, &other.uuid) {
        (Some(a), Some(b)) => a == b,
        _ => one.pci.is_some() && one.pci == other.pci,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_without_a_name_gets_the_name_the_driver_would_give_it() {
        let h100 = 81_559 << 20;
        let cut = |gpu, compute, memory_mib| profile(Slices { gpu, compute, memory_mib }, h100);
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
    fn entries_are_as_large_as_the_driver_writes_them_whatever_the_header_says() {
        let rest = |words: &[u64]| [words, &[MARK; 8]].concat();
        let expected = ByPid::from([(7, 100), (8, 200)]);
        for usual in [2, 3, 4] {
            assert_eq!(by_pid(&rest(&[pid(7), 100, pid(8), 200]), 2, usual), expected);
            assert_eq!(by_pid(&rest(&[pid(7), 100, 0, pid(8), 200, 0]), 2, usual), expected);
            assert_eq!(by_pid(&rest(&[pid(7), 100, 0, 0, pid(8), 200, 0, 0]), 2, usual), expected);
            assert!(by_pid(&rest(&[]), 0, usual).is_empty());
        }
    }

    #[test]
    fn a_process_that_computes_and_draws_is_one_process() {
        let both = joined(&ByPid::from([(7, 100), (9, NOT_AVAILABLE)]), &ByPid::from([(7, 90), (8, 5)]));
        let told: Vec<_> = both.iter().map(|process| (process.pid, process.activity, process.memory.value())).collect();
        assert_eq!(
            told,
            [
                (7, ProcessActivity::Both, Some(&Bytes(100))),
                (9, ProcessActivity::Compute, None),
                (8, ProcessActivity::Graphics, Some(&Bytes(5)))
            ]
        );
    }

    #[test]
    fn a_process_on_two_instances_uses_the_memory_of_both() {
        let words = [pid(7), 100, 0, pid(7), 50, 1, pid(8), NOT_AVAILABLE, 0, pid(8), 1, 1, MARK];
        assert_eq!(by_pid(&words, 4, 3), ByPid::from([(7, 150), (8, NOT_AVAILABLE)]));
    }
}

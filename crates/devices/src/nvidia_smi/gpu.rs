//! The tree of a whole answer, as devices.

use std::sync::Arc;

use gpupool_core::{Bytes, DeviceHealth, Percent, Vendor};

use crate::address::parse_pci_address;
use crate::detected_device::{
    DetectedDevice, DevicePartition, DeviceProcess, MemoryReading, Milliwatts, ProcessActivity, UsedMemoryScope,
};
use crate::nvidia_smi::xml::XmlElement;
use crate::reported::{Reported, truncate_text};
use crate::source_reading::SourceReading;
use crate::{amounts, limits};

/// The devices of a tree; `cut` says why it ends early, where it does.
///
/// The number of a device is its place in the answer unless the answer gives one: the tool lists devices in the order
/// of their numbers. Where it shows fewer than are attached it was asked for some of them, and which cannot be told.
pub(crate) fn snapshot(root: &XmlElement, cut: Option<&str>) -> SourceReading {
    let mut snapshot = SourceReading::default();
    let gpus: Vec<&XmlElement> = root.children("gpu").collect();
    let attached = first_in(root, &[&["attached_gpus"]], count);
    if let Some(cut) = cut {
        snapshot.warn(format!("the answer ends early: {cut}"));
    }
    let differ = attached.is_some_and(|attached| attached as usize != gpus.len());
    if let Some(attached) = attached.filter(|_| differ) {
        snapshot.warn(format!("{attached} GPUs are attached and {} are shown", gpus.len()));
    }
    let driver = first_in(root, &[&["driver_version"]], known_name);
    for (place, element) in gpus.into_iter().enumerate() {
        let mut found = device(element, driver.clone());
        if found.index.is_none() && (!differ || cut.is_some()) {
            found.index = u32::try_from(place).ok();
        }
        if found.pci.is_none() && found.uuid.is_none() {
            snapshot.warn(format!("GPU {place} has neither a PCI address nor a UUID"));
        }
        if let Some(cause) = slowdown(element) {
            snapshot.warn(format!("GPU {place} is slowed down by its hardware: {cause}"));
        }
        let is_same = |known: &DetectedDevice| known.pci == found.pci && known.uuid == found.uuid;
        if found.pci.is_some() && snapshot.devices.iter().any(is_same) {
            snapshot.warn(format!("GPU {place} is listed before; only the first is taken"));
            continue;
        }
        let instances = instances(element, &found);
        for device in std::iter::once(found).chain(instances) {
            if snapshot.push(device).is_none() {
                return snapshot;
            }
        }
    }
    snapshot
}

// One `gpu` element of the tree, as a device.

/// The device; `driver` is the version the head of the answer gives.
pub(crate) fn device(gpu: &XmlElement, driver: Option<Arc<str>>) -> DetectedDevice {
    let mut found = DetectedDevice::new(Vendor::Nvidia);
    found.index = first_in(gpu, &[&["index"]], count);
    found.minor = first_in(gpu, &[&["minor_number"]], count);
    found.name = first_in(gpu, &[&["product_name"]], known_name);
    found.uuid = first_in(gpu, &[&["uuid"], &["gpu_uuid"]], known_name);
    let in_tree = || first_in(gpu, &[&["pci", "pci_bus_id"], &["pci", "bus_id"]], parse_pci_address);
    found.pci = gpu.attribute("id").and_then(parse_pci_address).or_else(in_tree);
    found.mig = first_in(gpu, &[&["mig_mode", "current_mig"], &["mig_mode", "current"]], flag);
    found.driver = first_in(gpu, &[&["driver_version"]], known_name).or(driver);
    found.memory = memory(gpu, found.driver.as_deref());
    found.memory.unified = found.mig != Some(true) && has_no_memory_of_its_own(&found.memory);
    found.utilization = told_in(gpu, &["utilization"], &["gpu_util", "gpu"], percent);
    found.temperature_c = told_in(gpu, &["temperature"], &["gpu_temp", "gpu_current_temp", "gpu"], celsius);
    const POWER: [&str; 2] = ["gpu_power_readings", "power_readings"];
    // The average first: it is what the single number of older drivers is.
    const DRAW: [&str; 4] = ["power_draw", "average_power_draw", "instant_power_draw", "instantaneous_power_draw"];
    found.power = told_in(gpu, &POWER, &DRAW, watts);
    // The limit in force; `power_limit` is what was asked for.
    const LIMIT: [&str; 3] = ["enforced_power_limit", "current_power_limit", "power_limit"];
    found.power_limit = told_in(gpu, &POWER, &LIMIT, watts);
    found.processes = processes(gpu);
    found.health = health(gpu, &found);
    found
}

/// The memory of a GPU or of an instance of it.
pub(crate) fn memory(element: &XmlElement, driver: Option<&str>) -> MemoryReading {
    const SECTIONS: [&str; 3] = ["fb_memory_usage", "shared_fb_memory_usage", "memory_usage"];
    let amount = |field| told_in(element, &SECTIONS, &[field], memory_amount);
    let reserved = amount("reserved");
    let used_means = used_means(&reserved, driver);
    MemoryReading { total: amount("total"), used: amount("used"), reserved, used_means, ..MemoryReading::default() }
}

/// Since version 510 the tool shows what the driver keeps apart from what is used.
fn used_means<T>(reserved: &Reported<T>, driver: Option<&str>) -> UsedMemoryScope {
    if reserved.value().is_some() {
        return UsedMemoryScope::WithoutReserved;
    }
    match driver.and_then(|driver| driver.split('.').next()).and_then(count) {
        Some(major) if major < 510 => UsedMemoryScope::WithReserved,
        Some(_) => UsedMemoryScope::WithoutReserved,
        None => UsedMemoryScope::Unknown,
    }
}

/// Not so for a GPU cut by MIG: what is seen from inside one of its instances leaves out the memory of the whole.
fn has_no_memory_of_its_own(memory: &MemoryReading) -> bool {
    matches!(memory.total, Reported::Unsupported(_)) && !memory.total.is_absent()
}

// The instances a GPU is cut into.

/// The instances of the GPU `parent`, in their order. What is wrong with the GPU is wrong with each of them.
pub(crate) fn instances(element: &XmlElement, parent: &DetectedDevice) -> Vec<DetectedDevice> {
    let listed = element.children("mig_devices").flat_map(|devices| devices.children("mig_device"));
    let is_one =
        |instance: &&XmlElement| ["index", "gpu_instance_id"].iter().any(|field| instance.child(field).is_some());
    listed.chain(element.children("mig_device")).filter(is_one).map(|found| instance(element, found, parent)).collect()
}

fn instance(gpu: &XmlElement, instance: &XmlElement, parent: &DetectedDevice) -> DetectedDevice {
    let number = |field| first_in(instance, &[&[field]], count);
    let gpu_instance = number("gpu_instance_id");
    let compute_instance = number("compute_instance_id");
    let profile = first_in(instance, &[&["profile"], &["name"]], known_name);
    let mut found = DetectedDevice::new(parent.vendor);
    found.index = number("index");
    found.uuid = first_in(instance, &[&["uuid"], &["mig_uuid"]], known_name);
    found.name = parent.name.as_deref().map(|parent| instance_name(parent, profile.as_deref()).into());
    found.pci = parent.pci;
    found.mig = Some(true);
    found.driver = parent.driver.clone();
    found.memory = memory(instance, parent.driver.as_deref());
    found.utilization = told_in(instance, &["utilization"], &["gpu_util", "gpu"], percent);
    if let Some(gpu_instance) = gpu_instance {
        found.processes = processes_in_instance(gpu, gpu_instance, compute_instance);
    }
    found.health = parent.health.clone();
    found.partition =
        Some(DevicePartition::Mig { parent_uuid: parent.uuid.clone(), gpu_instance, compute_instance, profile });
    found
}

/// What the driver calls an instance: the name of the GPU and the profile, as far as that is known.
pub(crate) fn instance_name(parent: &str, profile: Option<&str>) -> String {
    profile.map_or_else(|| parent.to_owned(), |profile| format!("{parent} MIG {profile}"))
}

// The processes on a GPU, in the tree.

/// What the list is called; drivers before 346 know processes that compute only.
pub(crate) const LISTS: [&str; 2] = ["processes", "compute_processes"];

/// Every process on a GPU, those in its instances included.
pub(crate) fn processes(gpu: &XmlElement) -> Reported<Vec<DeviceProcess>> {
    list_processes(gpu, |_| true)
}

/// The processes in one instance; a value only where every process of the GPU says in which instance it is.
pub(crate) fn processes_in_instance(
    gpu: &XmlElement,
    gpu_instance: u32,
    compute_instance: Option<u32>,
) -> Reported<Vec<DeviceProcess>> {
    let instance = |info: &XmlElement| first_in(info, &[&["gpu_instance_id"]], count);
    let all_tell = infos(gpu).all(|info| instance(info).is_some());
    if !all_tell {
        return Reported::ABSENT;
    }
    list_processes(gpu, |info| {
        let compute = first_in(info, &[&["compute_instance_id"]], count);
        let differs = matches!((compute, compute_instance), (Some(a), Some(b)) if a != b);
        instance(info) == Some(gpu_instance) && !differs
    })
}

fn list_processes(gpu: &XmlElement, wanted: impl Fn(&XmlElement) -> bool) -> Reported<Vec<DeviceProcess>> {
    let Some(processes) = LISTS.iter().find_map(|list| gpu.child(list)) else { return Reported::ABSENT };
    let none = processes.text.is_empty() || processes.text.eq_ignore_ascii_case("none");
    if processes.children.is_empty() && !none {
        return Reported::from_cell(&processes.text, |_| None);
    }
    let only_compute = processes.name == LISTS[1];
    let mut list = Vec::new();
    for info in infos(gpu).filter(|info| wanted(info)) {
        match process(info) {
            Some(process) if list.len() < limits::PROCESSES => list.push(DeviceProcess {
                activity: if only_compute { ProcessActivity::Compute } else { process.activity },
                ..process
            }),
            Some(_) => return Reported::Failed(format!("more than {} processes", limits::PROCESSES).into()),
            None => return Reported::Failed("a process without a number".into()),
        }
    }
    Reported::Value(list)
}

fn infos(gpu: &XmlElement) -> impl Iterator<Item = &XmlElement> {
    let lists = LISTS.iter().flat_map(|list| gpu.children(list));
    lists.flat_map(|processes| processes.children("process_info"))
}

fn process(info: &XmlElement) -> Option<DeviceProcess> {
    Some(DeviceProcess {
        pid: first_in(info, &[&["pid"]], count)?,
        name: first_in(info, &[&["process_name"]], known_name),
        activity: activity_of(info.text_of("type").unwrap_or_default()),
        memory: info.text_of("used_memory").map_or(Reported::ABSENT, memory_amount),
        ..DeviceProcess::default()
    })
}

/// What the letters of a process's type say: `C`, `G`, `C+G`, and `M+C` for one that computes through MPS.
fn activity_of(letters: &str) -> ProcessActivity {
    ProcessActivity::of(letters.contains('C'), letters.contains('G'))
}

// What an answer says of a GPU's health.

/// The health of a GPU; `None` where the answer holds neither a reading nor a word on it.
///
/// Errors that were counted do not make a GPU unhealthy: rows were remapped for that. A remapping that failed, and
/// anything that waits for a reset, does.
pub(crate) fn health(gpu: &XmlElement, found: &DetectedDevice) -> Option<DeviceHealth> {
    let unhealthy = |reason: &str| Some(DeviceHealth::Unhealthy(reason.into()));
    if says(gpu, "gpu is lost") {
        return Some(DeviceHealth::Lost);
    }
    let is = |paths: &[&[&str]]| {
        let flags = paths.iter().filter_map(|path| first_in(gpu, &[path], flag));
        flags.reduce(|one, other| one || other)
    };
    let failed = is(&[
        &["remapped_rows", "remapped_row_failure"],
        &["remapped_rows", "remapping_failure_occurred"],
        &["ecc_errors", "unrepairable_memory"],
    ]);
    if failed == Some(true) {
        return unhealthy("row remapping failed; replace the GPU");
    }
    let remap = is(&[&["remapped_rows", "remapped_row_pending"], &["remapped_rows", "pending"]]);
    let retired = is(&[
        &["retired_pages", "pending_retirement"],
        &["retired_pages", "pending_blacklist"],
        &["retired_pages", "pending_page_blacklist"],
        &["retired_pages", "pending"],
    ]);
    let repair = is(&[&["ecc_errors", "channel_repair_pending"], &["ecc_errors", "tpc_repair_pending"]]);
    let reset = is(&[&["gpu_reset_status", "reset_required"]]);
    let waits = [
        (remap, "row remapping is pending; reset the GPU"),
        (retired, "page retirement is pending; reset the GPU"),
        (repair, "a memory repair is pending; reset the GPU"),
        (reset.or(says(gpu, "gpu requires reset").then_some(true)), "the GPU requires a reset"),
    ];
    if let Some((_, reason)) = waits.iter().find(|(waits, _)| *waits == Some(true)) {
        return unhealthy(reason);
    }
    let action = first_in(gpu, &[&["gpu_recovery_action"]], known_name);
    if let Some(action) = &action {
        return unhealthy(&format!("the driver asks for a recovery: {action}"));
    }
    if let Some(words) = unreadable(found) {
        return unhealthy(&format!("the driver cannot read it: {words}"));
    }
    let looked_at = failed.or(remap).or(retired).or(repair).or(reset).is_some();
    (looked_at || found.has_answered() || found.memory.total.value().is_some()).then_some(DeviceHealth::Healthy)
}

/// How its hardware slows a GPU down now, where it does.
///
/// That the clocks are low because nothing runs, or to keep to a limit somebody set, is nothing to tell.
pub(crate) fn slowdown(gpu: &XmlElement) -> Option<&'static str> {
    const CAUSES: [(&str, &str); 3] = [
        ("hw_thermal_slowdown", "it is too hot"),
        ("hw_power_brake_slowdown", "the power supply asks for it"),
        ("hw_slowdown", "heat or power"),
    ];
    let active = |cause: &str| gpu.walk().any(|element| element.name.ends_with(cause) && element.text == "Active");
    CAUSES.into_iter().find(|(cause, _)| active(cause)).map(|(_, words)| words)
}

/// Whether a cell says these words, in brackets or not.
fn says(gpu: &XmlElement, words: &str) -> bool {
    let bare = |text: &str| text.trim_start_matches('[').trim_end_matches(']').len();
    gpu.walk().any(|element| {
        let text = element.text.trim_start_matches('[');
        bare(&element.text) <= words.len() + 1
            && text.get(..words.len()).is_some_and(|start| start.eq_ignore_ascii_case(words))
    })
}

/// The driver's words where it failed on most of what it was asked about the state of a GPU.
///
/// One reading that fails is a broken sensor, and what a user may not see says nothing about the GPU.
fn unreadable(found: &DetectedDevice) -> Option<&str> {
    fn failure<T>(told: &Reported<T>) -> Option<&str> {
        match told {
            Reported::Failed(words) if !words.to_ascii_lowercase().contains("permission") => Some(words),
            _ => None,
        }
    }
    let memory = &found.memory.used;
    let failures = [failure(memory), failure(&found.utilization), failure(&found.temperature_c), failure(&found.power)];
    let values = [
        memory.value().is_some(),
        found.utilization.value().is_some(),
        found.temperature_c.value().is_some(),
        found.power.value().is_some(),
    ];
    let failed = failures.iter().flatten().count();
    let told = values.iter().filter(|told| **told).count();
    failures.into_iter().flatten().next().filter(|_| failed >= 2 && failed > told)
}

// Finding and placing things in the tree that all forms of output are turned into.

/// An element with a text and nothing in it.
pub(crate) fn leaf(name: &str, text: impl Into<String>) -> XmlElement {
    XmlElement { name: name.into(), text: text.into(), ..XmlElement::default() }
}

/// Puts a text at a path below `element`, making the elements on the way where they are not there yet.
pub(crate) fn put(element: &mut XmlElement, path: &[&str], text: &str) {
    match path {
        [] => {}
        [last] => element.children.push(leaf(last, text)),
        [first, rest @ ..] => {
            let known = element.children.iter().position(|child| child.name == *first);
            let place = known.unwrap_or_else(|| {
                element.children.push(leaf(first, ""));
                element.children.len() - 1
            });
            if let Some(child) = element.children.get_mut(place) {
                put(child, rest, text);
            }
        }
    }
}

/// The first of `fields` that has a value, in any of `sections` of `element`, or else the reason why none has.
///
/// Where a section is not there in parts but says in one word why, that word is the reason.
pub(crate) fn told_in<T>(
    element: &XmlElement,
    sections: &[&str],
    fields: &[&str],
    parse: impl Fn(&str) -> Reported<T>,
) -> Reported<T> {
    let found = || element.children.iter().filter(|child| sections.contains(&child.name.as_str()));
    let mut told = Reported::ABSENT;
    for field in fields {
        for child in found().flat_map(|section| section.children(field)) {
            told = told.or(parse(&child.text));
        }
    }
    if told.is_absent()
        && let Some(section) = found().find(|section| section.children.is_empty() && !section.text.is_empty())
    {
        return parse(&section.text);
    }
    told
}

/// The first text at any of these paths below `element` that `parse` makes something of.
pub(crate) fn first_in<T>(element: &XmlElement, paths: &[&[&str]], parse: impl Fn(&str) -> Option<T>) -> Option<T> {
    paths.iter().find_map(|path| match path {
        [field] => element.children(field).find_map(|child| parse(&child.text)),
        [section, field] => {
            element.children(section).flat_map(|section| section.children(field)).find_map(|child| parse(&child.text))
        }
        _ => None,
    })
}

// Numbers with units, as `nvidia-smi` writes them. A number without its unit may be cut off, so it is none.

/// An amount of memory: `81920 MiB`. All ones, in bytes or in the unit, is how the driver says that it cannot tell.
pub(crate) fn memory_amount(text: &str) -> Reported<Bytes> {
    const NOT_TOLD: u64 = u64::MAX - (1 << 20);
    match with_unit(text, |text| amounts::parse_bytes(text, "")) {
        Reported::Value(amount) if amount.0 > NOT_TOLD => Reported::Unsupported(truncate_text(text)),
        Reported::Failed(said) if said.starts_with(&u64::MAX.to_string()) => Reported::Unsupported(said),
        told => told,
    }
}

/// Power: `67.03 W`.
pub(crate) fn watts(text: &str) -> Reported<Milliwatts> {
    with_unit(text, amounts::parse_watts)
}

/// A percentage: `37 %`.
pub(crate) fn percent(text: &str) -> Reported<Percent> {
    with_unit(text, amounts::parse_percent)
}

/// A temperature: `27 C`.
pub(crate) fn celsius(text: &str) -> Reported<i16> {
    with_unit(text, amounts::parse_celsius)
}

fn with_unit<T>(text: &str, parse: impl Fn(&str) -> Option<T>) -> Reported<T> {
    Reported::from_cell(text, |text| parse(text).filter(|_| text.ends_with(|c: char| c.is_alphabetic() || c == '%')))
}

/// A plain number; `None` for every way to say that there is none.
pub(crate) fn count(text: &str) -> Option<u32> {
    text.trim().parse().ok()
}

/// Yes or no; `None` for every way to say that it is not known.
pub(crate) fn flag(text: &str) -> Option<bool> {
    match text.trim().trim_end_matches('*').to_ascii_lowercase().as_str() {
        "yes" | "enabled" | "on" | "true" => Some(true),
        "no" | "disabled" | "off" | "false" => Some(false),
        number => number.parse::<u64>().ok().map(|number| number > 0),
    }
}

/// A name or an identity, where there is one.
pub(crate) fn known_name(text: &str) -> Option<std::sync::Arc<str>> {
    match Reported::from_cell(text, |text| Some(truncate_text(text))) {
        Reported::Value(name) => Some(name.as_ref().into()),
        Reported::Unsupported(_) | Reported::Failed(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(text: &str) -> Reported<u32> {
        Reported::from_cell(text, |text| text.parse().ok())
    }

    #[test]
    fn a_value_is_found_whatever_it_is_called_and_however_often_it_is_there() {
        let mut gpu = XmlElement::default();
        put(&mut gpu, &["old", "x"], "N/A");
        put(&mut gpu, &["new", "x"], "");
        put(&mut gpu, &["new", "y"], "5");
        put(&mut gpu, &["new", "y"], "6");
        assert_eq!(told_in(&gpu, &["old", "new"], &["x"], number), Reported::Unsupported("N/A".into()));
        assert_eq!(told_in(&gpu, &["old", "new"], &["x", "y"], number), Reported::Value(5));
        assert_eq!(told_in(&gpu, &["gone"], &["x"], number), Reported::ABSENT);
        assert_eq!(first_in(&gpu, &[&["gone"], &["new", "y"]], |text| text.parse::<u8>().ok()), Some(5));
    }

    #[test]
    fn a_section_that_is_one_word_gives_the_reason() {
        let mut gpu = XmlElement::default();
        put(&mut gpu, &["remapped_rows"], "N/A");
        assert_eq!(told_in(&gpu, &["remapped_rows"], &["pending"], number), Reported::Unsupported("N/A".into()));
    }

    #[test]
    fn a_number_is_taken_with_its_unit_only() {
        assert_eq!(memory_amount("81920 MiB"), Reported::Value(Bytes(81920 << 20)));
        assert_eq!(memory_amount("2004MB"), Reported::Value(Bytes(2004 << 20)));
        assert_eq!(memory_amount("1.5 GiB"), Reported::Value(Bytes(3 << 29)));
        assert_eq!(watts("67.03 W"), Reported::Value(Milliwatts(67_030)));
        assert_eq!(watts("67030 mW"), Reported::Value(Milliwatts(67_030)));
        assert_eq!(percent("37 %"), Reported::Value(Percent(37_000)));
        assert_eq!(celsius("-2 C"), Reported::Value(-2));
        for cut in ["81920", "81920 M", "", "MiB", "1..2 MiB"] {
            assert_eq!(memory_amount(cut).value(), None, "{cut}");
        }
        assert_eq!(percent("655 %").value(), None);
    }

    #[test]
    fn all_ones_is_no_amount_of_memory() {
        for ones in ["18446744073709551615 B", "17592186044415 MiB", "18446744073709551615 MiB"] {
            assert!(matches!(memory_amount(ones), Reported::Unsupported(_)), "{ones}");
        }
    }

    #[test]
    fn a_flag_is_known_in_all_its_spellings() {
        assert_eq!(["Yes", "Enabled*", "1", "2"].map(flag), [Some(true); 4]);
        assert_eq!(["No", "Disabled", "0"].map(flag), [Some(false); 3]);
        assert_eq!(["N/A", "[N/A]", ""].map(flag), [None; 3]);
    }
}

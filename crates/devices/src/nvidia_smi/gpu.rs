//! Conversion of the tree to devices.

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

/// Returns the devices of a tree; `cut` is the reason why it ends early, if it does.
///
/// The index of a device is its position in the tree unless the tree contains an index: the tool lists devices in index
/// order. If the tree shows fewer devices than are attached, the tool was queried for some of them and the index is
/// unknown.
pub(crate) fn reading_from_tree(root: &XmlElement, cut: Option<&str>) -> SourceReading {
    let mut reading = SourceReading::default();
    let gpus: Vec<&XmlElement> = root.children("gpu").collect();
    let attached = find_first(root, &[&["attached_gpus"]], parse_count);
    if let Some(cut) = cut {
        reading.warn(format!("the output ends early: {cut}"));
    }
    let differ = attached.is_some_and(|attached| attached as usize != gpus.len());
    if let Some(attached) = attached.filter(|_| differ) {
        reading.warn(format!("{attached} GPUs are attached and {} are shown", gpus.len()));
    }
    let driver = find_first(root, &[&["driver_version"]], known_name);
    for (place, element) in gpus.into_iter().enumerate() {
        let mut found = device_from_element(element, driver.clone());
        if found.index.is_none() && (!differ || cut.is_some()) {
            found.index = u32::try_from(place).ok();
        }
        if found.pci.is_none() && found.uuid.is_none() {
            reading.warn(format!("GPU {place} has neither a PCI address nor a UUID"));
        }
        if let Some(cause) = find_slowdown(element) {
            reading.warn(format!("GPU {place} is slowed down by its hardware: {cause}"));
        }
        let is_same = |known: &DetectedDevice| known.pci == found.pci && known.uuid == found.uuid;
        if found.pci.is_some() && reading.devices.iter().any(is_same) {
            reading.warn(format!("GPU {place} is listed twice; only the first entry is used"));
            continue;
        }
        let instances = parse_instances(element, &found);
        for device in std::iter::once(found).chain(instances) {
            if reading.push(device).is_none() {
                return reading;
            }
        }
    }
    reading
}

// Conversion of one `gpu` element to a device.

/// Returns the device; `driver` is the version in the header of the output.
pub(crate) fn device_from_element(gpu: &XmlElement, driver: Option<Arc<str>>) -> DetectedDevice {
    let mut found = DetectedDevice::new(Vendor::Nvidia);
    found.index = find_first(gpu, &[&["index"]], parse_count);
    found.minor = find_first(gpu, &[&["minor_number"]], parse_count);
    found.name = find_first(gpu, &[&["product_name"]], known_name);
    found.uuid = find_first(gpu, &[&["uuid"], &["gpu_uuid"]], known_name);
    let in_tree = || find_first(gpu, &[&["pci", "pci_bus_id"], &["pci", "bus_id"]], parse_pci_address);
    found.pci = gpu.attribute("id").and_then(parse_pci_address).or_else(in_tree);
    found.mig = find_first(gpu, &[&["mig_mode", "current_mig"], &["mig_mode", "current"]], parse_flag);
    found.driver = find_first(gpu, &[&["driver_version"]], known_name).or(driver);
    found.memory = parse_memory(gpu, found.driver.as_deref());
    found.memory.unified = found.mig != Some(true) && lacks_own_memory(&found.memory);
    found.utilization = find_reported(gpu, &["utilization"], &["gpu_util", "gpu"], parse_percent);
    found.temperature_c = find_reported(gpu, &["temperature"], &["gpu_temp", "gpu_current_temp", "gpu"], parse_celsius);
    const POWER: [&str; 2] = ["gpu_power_readings", "power_readings"];
    // The average comes first: older drivers report it as their only number.
    const DRAW: [&str; 4] = ["power_draw", "average_power_draw", "instant_power_draw", "instantaneous_power_draw"];
    found.power = find_reported(gpu, &POWER, &DRAW, parse_watts);
    // The enforced limit; `power_limit` is the requested one.
    const LIMIT: [&str; 3] = ["enforced_power_limit", "current_power_limit", "power_limit"];
    found.power_limit = find_reported(gpu, &POWER, &LIMIT, parse_watts);
    found.processes = parse_processes(gpu);
    found.health = parse_health(gpu, &found);
    found
}

/// Returns the memory of a GPU or of an instance.
pub(crate) fn parse_memory(element: &XmlElement, driver: Option<&str>) -> MemoryReading {
    const SECTIONS: [&str; 3] = ["fb_memory_usage", "shared_fb_memory_usage", "memory_usage"];
    let amount = |field| find_reported(element, &SECTIONS, &[field], parse_memory_amount);
    let reserved = amount("reserved");
    let used_means = used_memory_scope(&reserved, driver);
    MemoryReading { total: amount("total"), used: amount("used"), reserved, used_means, ..MemoryReading::default() }
}

/// Returns whether used memory includes reserved memory. Since version 510 the tool shows the two separately.
fn used_memory_scope<T>(reserved: &Reported<T>, driver: Option<&str>) -> UsedMemoryScope {
    if reserved.value().is_some() {
        return UsedMemoryScope::WithoutReserved;
    }
    match driver.and_then(|driver| driver.split('.').next()).and_then(parse_count) {
        Some(major) if major < 510 => UsedMemoryScope::WithReserved,
        Some(_) => UsedMemoryScope::WithoutReserved,
        None => UsedMemoryScope::Unknown,
    }
}

/// Whether a device has no memory of its own. Wrong for a GPU in MIG mode: inside an instance the tool hides the memory
/// of the GPU.
fn lacks_own_memory(memory: &MemoryReading) -> bool {
    matches!(memory.total, Reported::Unsupported(_)) && !memory.total.is_absent()
}

// MIG instances of a GPU.

/// Returns the instances of the GPU `parent` in their order, with the health of the GPU.
pub(crate) fn parse_instances(element: &XmlElement, parent: &DetectedDevice) -> Vec<DetectedDevice> {
    let holders = element.children("mig_devices").chain([element]);
    let has_id = |one: &&XmlElement| one.child("index").is_some() || one.child("gpu_instance_id").is_some();
    let instances = holders.flat_map(|holder| holder.children("mig_device")).filter(has_id);
    instances.map(|instance| parse_instance(element, instance, parent)).collect()
}

fn parse_instance(gpu: &XmlElement, instance: &XmlElement, parent: &DetectedDevice) -> DetectedDevice {
    let number = |field| find_first(instance, &[&[field]], parse_count);
    let gpu_instance = number("gpu_instance_id");
    let compute_instance = number("compute_instance_id");
    let profile = find_first(instance, &[&["profile"], &["name"]], known_name);
    let mut found = DetectedDevice::new(parent.vendor);
    found.index = number("index");
    found.uuid = find_first(instance, &[&["uuid"], &["mig_uuid"]], known_name);
    found.name = parent.name.as_deref().map(|parent| instance_name(parent, profile.as_deref()).into());
    found.pci = parent.pci;
    found.mig = Some(true);
    found.driver = parent.driver.clone();
    found.memory = parse_memory(instance, parent.driver.as_deref());
    found.utilization = find_reported(instance, &["utilization"], &["gpu_util", "gpu"], parse_percent);
    if let Some(gpu_instance) = gpu_instance {
        found.processes = processes_in_instance(gpu, gpu_instance, compute_instance);
    }
    found.health = parent.health.clone();
    found.partition =
        Some(DevicePartition::Mig { parent_uuid: parent.uuid.clone(), gpu_instance, compute_instance, profile });
    found
}

/// Returns the driver's name of an instance: the name of the GPU and the profile, if known.
pub(crate) fn instance_name(parent: &str, profile: Option<&str>) -> String {
    profile.map_or_else(|| parent.to_owned(), |profile| format!("{parent} MIG {profile}"))
}

// Processes of a GPU.

/// Names of the process list; drivers before 346 report only compute processes.
pub(crate) const LIST_NAMES: [&str; 2] = ["processes", "compute_processes"];

/// Returns all processes of a GPU, including those of its instances.
pub(crate) fn parse_processes(gpu: &XmlElement) -> Reported<Vec<DeviceProcess>> {
    list_processes(gpu, |_| true)
}

/// Returns the processes of one instance; a value only if every process of the GPU reports its instance.
pub(crate) fn processes_in_instance(
    gpu: &XmlElement,
    gpu_instance: u32,
    compute_instance: Option<u32>,
) -> Reported<Vec<DeviceProcess>> {
    let instance = |info: &XmlElement| find_first(info, &[&["gpu_instance_id"]], parse_count);
    let all_tell = process_elements(gpu).all(|info| instance(info).is_some());
    if !all_tell {
        return Reported::ABSENT;
    }
    list_processes(gpu, |info| {
        let compute = find_first(info, &[&["compute_instance_id"]], parse_count);
        let differs = matches!((compute, compute_instance), (Some(a), Some(b)) if a != b);
        instance(info) == Some(gpu_instance) && !differs
    })
}

fn list_processes(gpu: &XmlElement, wanted: impl Fn(&XmlElement) -> bool) -> Reported<Vec<DeviceProcess>> {
    let Some(processes) = LIST_NAMES.iter().find_map(|list| gpu.child(list)) else { return Reported::ABSENT };
    let none = processes.text.is_empty() || processes.text.eq_ignore_ascii_case("none");
    if processes.children.is_empty() && !none {
        return Reported::from_cell(&processes.text, |_| None);
    }
    let only_compute = processes.name == LIST_NAMES[1];
    let mut list = Vec::new();
    for info in process_elements(gpu).filter(|info| wanted(info)) {
        match parse_process(info) {
            Some(process) if list.len() < limits::PROCESSES => list.push(DeviceProcess {
                activity: if only_compute { ProcessActivity::Compute } else { process.activity },
                ..process
            }),
            Some(_) => return Reported::Failed(format!("more than {} processes", limits::PROCESSES).into()),
            None => return Reported::Failed("a process without a pid".into()),
        }
    }
    Reported::Value(list)
}

fn process_elements(gpu: &XmlElement) -> impl Iterator<Item = &XmlElement> {
    let lists = LIST_NAMES.iter().flat_map(|list| gpu.children(list));
    lists.flat_map(|processes| processes.children("process_info"))
}

fn parse_process(info: &XmlElement) -> Option<DeviceProcess> {
    Some(DeviceProcess {
        pid: find_first(info, &[&["pid"]], parse_count)?,
        name: find_first(info, &[&["process_name"]], known_name),
        activity: parse_activity(info.text_of("type").unwrap_or_default()),
        memory: info.text_of("used_memory").map_or(Reported::ABSENT, parse_memory_amount),
        ..DeviceProcess::default()
    })
}

/// Parses the type of a process: `C`, `G`, `C+G`, and `M+C` for computing through MPS.
fn parse_activity(letters: &str) -> ProcessActivity {
    ProcessActivity::of(letters.contains('C'), letters.contains('G'))
}

// Health of a GPU.

/// Returns the health of a GPU; `None` if the tree has neither values nor health fields.
///
/// Counted errors leave a GPU healthy, because their rows were remapped. A failed remapping or a required reset makes
/// it unhealthy.
pub(crate) fn parse_health(gpu: &XmlElement, found: &DetectedDevice) -> Option<DeviceHealth> {
    let unhealthy = |reason: &str| Some(DeviceHealth::Unhealthy(reason.into()));
    if contains_message(gpu, "gpu is lost") {
        return Some(DeviceHealth::Lost);
    }
    let any_flag = |paths: &[&[&str]]| {
        let flags = paths.iter().filter_map(|path| find_first(gpu, &[path], parse_flag));
        flags.reduce(|one, other| one || other)
    };
    let failed = any_flag(&[
        &["remapped_rows", "remapped_row_failure"],
        &["remapped_rows", "remapping_failure_occurred"],
        &["ecc_errors", "unrepairable_memory"],
    ]);
    if failed == Some(true) {
        return unhealthy("row remapping failed; replace the GPU");
    }
    let remap_pending = any_flag(&[&["remapped_rows", "remapped_row_pending"], &["remapped_rows", "pending"]]);
    let retirement_pending = any_flag(&[
        &["retired_pages", "pending_retirement"],
        &["retired_pages", "pending_blacklist"],
        &["retired_pages", "pending_page_blacklist"],
        &["retired_pages", "pending"],
    ]);
    let repair_pending = any_flag(&[&["ecc_errors", "channel_repair_pending"], &["ecc_errors", "tpc_repair_pending"]]);
    let reset_required = any_flag(&[&["gpu_reset_status", "reset_required"]]);
    let pending = [
        (remap_pending, "row remapping is pending; reset the GPU"),
        (retirement_pending, "page retirement is pending; reset the GPU"),
        (repair_pending, "a memory repair is pending; reset the GPU"),
        (reset_required.or(contains_message(gpu, "gpu requires reset").then_some(true)), "the GPU requires a reset"),
    ];
    if let Some((_, reason)) = pending.iter().find(|(pending, _)| *pending == Some(true)) {
        return unhealthy(reason);
    }
    let action = find_first(gpu, &[&["gpu_recovery_action"]], known_name);
    if let Some(action) = &action {
        return unhealthy(&format!("the driver requests a recovery: {action}"));
    }
    if let Some(words) = read_failure(found) {
        return unhealthy(&format!("the driver cannot read the GPU: {words}"));
    }
    let is_judged = failed.or(remap_pending).or(retirement_pending).or(repair_pending).or(reset_required).is_some();
    (is_judged || found.has_answered() || found.memory.total.value().is_some()).then_some(DeviceHealth::Healthy)
}

/// Returns the reason why the hardware slows the GPU down, if it does.
///
/// Low clocks of an idle GPU or because of a configured limit are not reported.
pub(crate) fn find_slowdown(gpu: &XmlElement) -> Option<&'static str> {
    const CAUSES: [(&str, &str); 3] = [
        ("hw_thermal_slowdown", "overheating"),
        ("hw_power_brake_slowdown", "power brake"),
        ("hw_slowdown", "heat or power"),
    ];
    let active = |cause: &str| gpu.walk().any(|element| element.name.ends_with(cause) && element.text == "Active");
    CAUSES.into_iter().find(|(cause, _)| active(cause)).map(|(_, words)| words)
}

/// Whether a cell contains this message, with or without brackets.
fn contains_message(gpu: &XmlElement, words: &str) -> bool {
    let bare = |text: &str| text.trim_start_matches('[').trim_end_matches(']').len();
    gpu.walk().any(|element| {
        let text = element.text.trim_start_matches('[');
        bare(&element.text) <= words.len() + 1
            && text.get(..words.len()).is_some_and(|start| start.eq_ignore_ascii_case(words))
    })
}

/// Returns the driver's message if most values of the GPU failed.
///
/// A single failed value is a broken sensor, and missing permission is no fault of the GPU.
fn read_failure(found: &DetectedDevice) -> Option<&str> {
    fn failure<T>(reported: &Reported<T>) -> Option<&str> {
        match reported {
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
    let answered = values.iter().filter(|answered| **answered).count();
    failures.into_iter().flatten().next().filter(|_| failed >= 2 && failed > answered)
}

// Access to the tree that all formats are converted to.

/// Creates an element with a text and no children.
pub(crate) fn text_element(name: &str, text: impl Into<String>) -> XmlElement {
    XmlElement { name: name.into(), text: text.into(), ..XmlElement::default() }
}

/// Inserts a text at a path below `element`, creating missing elements.
pub(crate) fn insert_text(element: &mut XmlElement, path: &[&str], text: &str) {
    match path {
        [] => {}
        [last] => element.children.push(text_element(last, text)),
        [first, rest @ ..] => {
            let known = element.children.iter().position(|child| child.name == *first);
            let place = known.unwrap_or_else(|| {
                element.children.push(text_element(first, ""));
                element.children.len() - 1
            });
            if let Some(child) = element.children.get_mut(place) {
                insert_text(child, rest, text);
            }
        }
    }
}

/// Returns the first value of `fields` in any of `sections` of `element`, or else the reason why there is none.
///
/// A section with a single word in place of fields gives that word as the reason.
pub(crate) fn find_reported<T>(
    element: &XmlElement,
    sections: &[&str],
    fields: &[&str],
    parse: impl Fn(&str) -> Reported<T>,
) -> Reported<T> {
    let found = || element.children.iter().filter(|child| sections.contains(&child.name.as_str()));
    let mut reported = Reported::ABSENT;
    for field in fields {
        for child in found().flat_map(|section| section.children(field)) {
            reported = reported.or(parse(&child.text));
        }
    }
    if reported.is_absent()
        && let Some(section) = found().find(|section| section.children.is_empty() && !section.text.is_empty())
    {
        return parse(&section.text);
    }
    reported
}

/// Returns the first text at any of these paths that `parse` accepts.
pub(crate) fn find_first<T>(element: &XmlElement, paths: &[&[&str]], parse: impl Fn(&str) -> Option<T>) -> Option<T> {
    paths.iter().find_map(|path| match path {
        [field] => element.children(field).find_map(|child| parse(&child.text)),
        [section, field] => {
            element.children(section).flat_map(|section| section.children(field)).find_map(|child| parse(&child.text))
        }
        _ => None,
    })
}

// Numbers with units, as written by `nvidia-smi`. A number without its unit may be truncated, so it is rejected.

/// Parses an amount of memory: `81920 MiB`. All ones, in bytes or in the unit, mean that the driver reports no value.
pub(crate) fn parse_memory_amount(text: &str) -> Reported<Bytes> {
    const UNKNOWN_FROM: u64 = u64::MAX - (1 << 20);
    match parse_with_unit(text, |text| amounts::parse_bytes(text, "")) {
        Reported::Value(amount) if amount.0 > UNKNOWN_FROM => Reported::Unsupported(truncate_text(text)),
        Reported::Failed(reason) if reason.starts_with(&u64::MAX.to_string()) => Reported::Unsupported(reason),
        other => other,
    }
}

/// Parses power: `67.03 W`.
pub(crate) fn parse_watts(text: &str) -> Reported<Milliwatts> {
    parse_with_unit(text, amounts::parse_watts)
}

/// Parses a percentage: `37 %`.
pub(crate) fn parse_percent(text: &str) -> Reported<Percent> {
    parse_with_unit(text, amounts::parse_percent)
}

/// Parses a temperature: `27 C`.
pub(crate) fn parse_celsius(text: &str) -> Reported<i16> {
    parse_with_unit(text, amounts::parse_celsius)
}

fn parse_with_unit<T>(text: &str, parse: impl Fn(&str) -> Option<T>) -> Reported<T> {
    Reported::from_cell(text, |text| parse(text).filter(|_| text.ends_with(|c: char| c.is_alphabetic() || c == '%')))
}

/// Parses a plain number; `None` for any placeholder.
pub(crate) fn parse_count(text: &str) -> Option<u32> {
    text.trim().parse().ok()
}

/// Parses yes or no; `None` if unknown.
pub(crate) fn parse_flag(text: &str) -> Option<bool> {
    match text.trim().trim_end_matches('*').to_ascii_lowercase().as_str() {
        "yes" | "enabled" | "on" | "true" => Some(true),
        "no" | "disabled" | "off" | "false" => Some(false),
        number => number.parse::<u64>().ok().map(|number| number > 0),
    }
}

/// Parses a name or an identity; `None` for any placeholder.
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
    fn a_value_is_found_under_any_name_and_the_first_counts() {
        let mut gpu = XmlElement::default();
        insert_text(&mut gpu, &["old", "x"], "N/A");
        insert_text(&mut gpu, &["new", "x"], "");
        insert_text(&mut gpu, &["new", "y"], "5");
        insert_text(&mut gpu, &["new", "y"], "6");
        assert_eq!(find_reported(&gpu, &["old", "new"], &["x"], number), Reported::Unsupported("N/A".into()));
        assert_eq!(find_reported(&gpu, &["old", "new"], &["x", "y"], number), Reported::Value(5));
        assert_eq!(find_reported(&gpu, &["gone"], &["x"], number), Reported::ABSENT);
        assert_eq!(find_first(&gpu, &[&["gone"], &["new", "y"]], |text| text.parse::<u8>().ok()), Some(5));
    }

    #[test]
    fn a_section_with_a_single_word_gives_the_reason() {
        let mut gpu = XmlElement::default();
        insert_text(&mut gpu, &["remapped_rows"], "N/A");
        assert_eq!(find_reported(&gpu, &["remapped_rows"], &["pending"], number), Reported::Unsupported("N/A".into()));
    }

    #[test]
    fn a_number_without_its_unit_is_rejected() {
        assert_eq!(parse_memory_amount("81920 MiB"), Reported::Value(Bytes(81920 << 20)));
        assert_eq!(parse_memory_amount("2004MB"), Reported::Value(Bytes(2004 << 20)));
        assert_eq!(parse_memory_amount("1.5 GiB"), Reported::Value(Bytes(3 << 29)));
        assert_eq!(parse_watts("67.03 W"), Reported::Value(Milliwatts(67_030)));
        assert_eq!(parse_watts("67030 mW"), Reported::Value(Milliwatts(67_030)));
        assert_eq!(parse_percent("37 %"), Reported::Value(Percent(37_000)));
        assert_eq!(parse_celsius("-2 C"), Reported::Value(-2));
        for cut in ["81920", "81920 M", "", "MiB", "1..2 MiB"] {
            assert_eq!(parse_memory_amount(cut).value(), None, "{cut}");
        }
        assert_eq!(parse_percent("655 %").value(), None);
    }

    #[test]
    fn all_ones_is_unknown_memory() {
        for ones in ["18446744073709551615 B", "17592186044415 MiB", "18446744073709551615 MiB"] {
            assert!(matches!(parse_memory_amount(ones), Reported::Unsupported(_)), "{ones}");
        }
    }

    #[test]
    fn flags_are_parsed_in_all_spellings() {
        assert_eq!(["Yes", "Enabled*", "1", "2"].map(parse_flag), [Some(true); 4]);
        assert_eq!(["No", "Disabled", "0"].map(parse_flag), [Some(false); 3]);
        assert_eq!(["N/A", "[N/A]", ""].map(parse_flag), [None; 3]);
    }
}

//! `rocm-smi … --json`: an object of cards, each an object of keys and texts.

use std::collections::BTreeMap;

use gpupool_core::{Bytes, Vendor};
use serde_json::Value;

use crate::address::parse_pci_address;
use crate::amd_tools::output;
use crate::amd_tools::values::{self, PciModel, ReportedLink, ReportedPartition, complete_devices};
use crate::detected_device::{DetectedDevice, DeviceProcess, ProcessActivity};
use crate::reported::Reported;
use crate::source::SourceError;
use crate::source_reading::{DetectedLink, SourceReading};
use crate::{amounts, limits};

const FORMAT: &str = "rocm-smi JSON";

/// Whether a text is rocm-smi's JSON or its message without any.
pub(crate) fn looks_like(text: &str) -> bool {
    let is_card = |after: &str| after.starts_with(|first: char| first.is_ascii_digit());
    let cards = text.contains('{') && text.split("\"card").skip(1).take(4).any(is_card);
    let of_machine = text.contains("\"system\"") && text.contains("\"Driver version\"");
    cards || of_machine || text.len() < 1 << 12 && text.contains("No JSON data to report")
}

/// Parses the devices in rocm-smi's JSON.
pub(crate) fn parse(text: &str) -> Result<SourceReading, SourceError> {
    let found = output::find_json(text);
    let mut cards = RocmSmiCards::default();
    for document in &found.documents {
        for (name, value) in document.as_object().into_iter().flatten() {
            add_root_entry(&mut cards, name, value);
        }
    }
    if cards.is_empty() {
        return match found.problem {
            Some(problem) if found.lines.is_empty() => Err(SourceError::malformed(FORMAT, problem)),
            _ if found.lines.is_empty() && !found.documents.is_empty() => Ok(SourceReading::default()),
            _ => output::interpret_without_devices(&found.lines, FORMAT),
        };
    }
    cards.warnings.extend(found.lines);
    cards
        .warnings
        .extend(found.problem.map(|problem| format!("{FORMAT}: devices after the cut are missing: {problem}")));
    Ok(cards.into_reading())
}

/// Adds the fields under one key of the root.
fn add_root_entry(cards: &mut RocmSmiCards, name: &str, value: &Value) {
    let texts = value.as_object().into_iter().flatten().filter_map(|(key, value)| Some((key, values::text_of(value)?)));
    if let Some(card) = name.strip_prefix("card").and_then(|number| number.parse().ok()) {
        cards.add(card);
        texts.for_each(|(key, text)| cards.set(card, key, &text));
        return;
    }
    if name != "system" {
        return;
    }
    for (key, text) in texts {
        match key.strip_prefix("PID").filter(|pid| pid.bytes().all(|byte| byte.is_ascii_digit())) {
            Some(pid) => {
                let (name, numbers) = name_and_numbers(&text);
                cards.processes.add(pid, &[&[name], numbers.as_slice()].concat());
            }
            None => cards.set_system(key, &text),
        }
    }
}

/// Splits `name, devices, memory, …` of a process. A name may contain commas; at most four numbers follow.
pub(crate) fn name_and_numbers(text: &str) -> (&str, Vec<&str>) {
    let is_number = |field: &&str| amounts::parse_count::<u64>(field).is_some() || *field == "UNKNOWN";
    let numbers = text.rsplit(',').map(str::trim).take_while(is_number).take(4);
    let mut numbers: Vec<&str> = numbers.collect();
    if numbers.len() > text.matches(',').count() {
        numbers.pop();
    }
    numbers.reverse();
    let end = text.rmatch_indices(',').nth(numbers.len().saturating_sub(1)).map_or(text.len(), |(at, _)| at);
    (&text[..if numbers.is_empty() { text.len() } else { end }], numbers)
}

// Meaning of rocm-smi's keys.

/// Key of the power limit; other keys with this ending hold the power draw.
const MAX_POWER: &str = "max graphics package power (w)";

type RocmSmiFields = BTreeMap<String, String>;

/// Fields of each card and of the machine. Keys are lowercase, since their case changed between versions.
#[derive(Debug, Default)]
struct RocmSmiCards {
    cards: BTreeMap<u32, RocmSmiFields>,
    system: RocmSmiFields,
    /// Processes on the cards.
    processes: RocmSmiProcesses,
    /// Other output of the tool.
    warnings: Vec<String>,
}

impl RocmSmiCards {
    fn is_empty(&self) -> bool {
        self.cards.is_empty()
    }

    /// Adds a card.
    fn add(&mut self, card: u32) {
        self.fields_of(card);
    }

    /// Returns the fields of a card, for one card more than the limit so that the excess can be reported.
    fn fields_of(&mut self, card: u32) -> Option<&mut RocmSmiFields> {
        let room = self.cards.len() <= limits::DEVICES || self.cards.contains_key(&card);
        room.then(|| self.cards.entry(card).or_default())
    }

    /// Sets one field of a card; an absent value does not replace a known one.
    fn set(&mut self, card: u32, key: &str, value: &str) {
        let Some(fields) = self.fields_of(card) else { return };
        let key = normalize_key(key);
        if values::has_value(value) || !fields.contains_key(&key) {
            fields.insert(key, value.trim().to_owned());
        }
    }

    /// Sets one field of the machine.
    fn set_system(&mut self, key: &str, value: &str) {
        self.system.insert(normalize_key(key), value.trim().to_owned());
    }

    /// Returns the devices, in the order of their numbers.
    fn into_reading(self) -> SourceReading {
        let mut reading = SourceReading::default();
        for warning in self.warnings {
            reading.warn(warning);
        }
        let driver = self.system.get("driver version").and_then(|version| values::driver_version(version));
        let (mut partitions, mut indices) = (Vec::new(), BTreeMap::new());
        for (&number, fields) in &self.cards {
            let mut device = device(number, fields);
            device.driver = driver.clone();
            let Some(index) = reading.push(device) else { break };
            indices.insert(number, index);
            let field = |key: &str| fields.get(key).map(String::as_str);
            partitions.push(ReportedPartition::new(field("partition id"), field("compute partition")));
        }
        reading.join(links(&self.system, &indices));
        complete_devices(&mut reading, &partitions);
        self.processes.assign_to(&mut reading);
        reading
    }
}

fn normalize_key(key: &str) -> String {
    key.trim().trim_end_matches(':').trim_end().to_lowercase()
}

fn device(number: u32, fields: &RocmSmiFields) -> DetectedDevice {
    let field = |key: &str| fields.get(key).map(String::as_str);
    let mut found = DetectedDevice::new(Vendor::Amd);
    found.index = Some(number);
    let names: Vec<&str> = ["device name", "card series", "card model"].into_iter().filter_map(field).collect();
    let others: Vec<&str> = field("card sku").into_iter().collect();
    let id = field("device id").or_else(|| field("gpu id"));
    let model = id.map(|id| PciModel { id, revision: field("device rev") });
    found.name = values::best_name(&names, model, &others);
    found.uuid = field("unique id").and_then(values::unique_id);
    found.pci = field("pci bus").and_then(parse_pci_address);
    let numa = ["(topology) numa node", "(topology) numa affinity"];
    found.numa = numa.into_iter().filter_map(field).find_map(values::numa_node);
    let bytes = |key: &str| first_reported(fields, &[key], |text| amounts::parse_bytes(text, "B"));
    found.memory.total = bytes("vram total memory (b)").without_zero("0 bytes");
    found.memory.used = bytes("vram total used memory (b)");
    found.memory.host_total = bytes("gtt total memory (b)");
    found.memory.host_used = bytes("gtt total used memory (b)");
    found.utilization = first_reported(fields, &["gpu use (%)"], amounts::parse_percent);
    let sensors = [
        "temperature (sensor edge) (c)",
        "temperature (sensor junction) (c)",
        "temperature (sensor hotspot) (c)",
        "temperature (sensor #1) (c)",
        "temperature",
    ];
    found.temperature_c = first_reported(fields, &sensors, amounts::parse_celsius);
    found.power = first_reported(fields, &power_keys(fields), amounts::parse_watts);
    found.power_limit = first_reported(fields, &[MAX_POWER], amounts::parse_watts).without_zero("0 W");
    found
}

/// Returns the keys of a card's power draw, which differ between cards (average, current, socket).
fn power_keys(fields: &RocmSmiFields) -> Vec<&str> {
    let is_power = |key: &&str| key.ends_with("graphics package power (w)") && *key != MAX_POWER;
    fields.keys().map(String::as_str).filter(is_power).chain(["average gpu power"]).collect()
}

/// Returns the first value under one of these keys, or the reason for its absence.
fn first_reported<T>(fields: &RocmSmiFields, names: &[&str], parse: impl Fn(&str) -> Option<T>) -> Reported<T> {
    let texts = names.iter().filter_map(|name| fields.get(*name));
    texts.fold(Reported::ABSENT, |known, text| known.or(Reported::from_cell(text, &parse)))
}

/// Parses the links in keys like `(Topology) Hops between DRM devices 0 and 1`.
fn links(system: &RocmSmiFields, indices: &BTreeMap<u32, usize>) -> Vec<DetectedLink> {
    let mut reported_links: BTreeMap<(u32, u32), ReportedLink> = BTreeMap::new();
    for (key, value) in system {
        let Some((what, pair)) = key.split_once(" between drm devices ") else { continue };
        let Some((a, b)) = pair.split_once(" and ") else { continue };
        let (Ok(a), Ok(b)) = (a.trim().parse(), b.trim().parse()) else { continue };
        let link = reported_links.entry((a, b)).or_default();
        match what.trim_start_matches("(topology)").trim() {
            "weight" => link.weight = amounts::parse_count(value),
            "hops" => link.hops = amounts::parse_count(value),
            "link type" => link.kind = Some(value),
            _ => {}
        }
    }
    let link = |((a, b), link): ((u32, u32), ReportedLink)| {
        Some(DetectedLink::new(*indices.get(&a)?, *indices.get(&b)?, link.to_link_kind()?))
    };
    reported_links.into_iter().filter_map(link).collect()
}

// Processes, which rocm-smi rarely assigns to devices.

/// Processes with the compute driver open and their number of devices, by pid.
#[derive(Debug, Default)]
struct RocmSmiProcesses(BTreeMap<u32, (Option<u64>, DeviceProcess)>);

impl RocmSmiProcesses {
    /// Adds a process from its columns: name, number of devices, total bytes of memory.
    fn add(&mut self, pid: &str, columns: &[&str]) {
        let Ok(pid) = pid.trim().parse::<u32>() else { return };
        if self.0.len() >= limits::PROCESSES {
            return;
        }
        let column = |number: usize| columns.get(number).map_or("", |text| text.trim());
        let name = Some(column(0)).filter(|name| values::has_value(name));
        let process = DeviceProcess {
            pid,
            name: name.map(|name| name.chars().take(limits::TEXT_CHARS).collect::<String>().into()),
            activity: ProcessActivity::Compute,
            memory: Reported::from_cell(column(2), |text| amounts::parse_bytes(text, "B")),
            ..DeviceProcess::default()
        };
        self.0.insert(pid, (amounts::parse_count(column(1)), process));
    }

    /// Assigns the processes to the only device; with several devices the assignment is unknown.
    fn assign_to(self, reading: &mut SourceReading) {
        if self.0.is_empty() {
            return;
        }
        let [device] = &mut reading.devices[..] else { return self.mark_unassigned(reading) };
        let listed = self.0.into_values();
        let used =
            listed.filter(|(devices, process)| *devices != Some(0) || process.memory != Reported::Value(Bytes(0)));
        device.processes = Reported::Value(used.map(|(_, process)| process).collect());
    }

    fn mark_unassigned(&self, reading: &mut SourceReading) {
        for device in &mut reading.devices {
            device.processes = Reported::Unsupported("listed for all devices together".into());
        }
        let pids: Vec<String> = self.0.keys().take(8).map(u32::to_string).collect();
        let more = if self.0.len() > pids.len() { ", …" } else { "" };
        reading.warn(format!("rocm-smi does not say which devices these processes use: {}{more}", pids.join(", ")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detected_device::{DevicePartition, Milliwatts};
    use crate::reported::Reported;
    use gpupool_core::{Bytes, DeviceHealth, LinkKind, Percent};

    const TWO: &str = r#"WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status
        {"card10": {"Card series": "0x1002", "Card model": "0x1002", "Card SKU": "D65209", "PCI Bus": "0000:C6:00.0",
                    "Unique ID": "0x719d230578348e8c", "Average Graphics Package Power (W)": "N/A (Secondary die)",
                    "Temperature (Sensor edge) (C)": "N/A", "Temperature (Sensor junction) (C)": "51.0",
                    "GPU use (%)": "5.2", "(Topology) Numa Affinity": "4294967295"},
         "card2": {"Card Series": "AMD Instinct MI250X", "PCI Bus": "0000:C1:00.0", "Unique ID": "0x719d230578348e8c",
                   "Current Socket Graphics Package Power (W)": "89.0", "Max Graphics Package Power (W)": "560.0",
                   "VRAM Total Memory (B)": "68702699520", "VRAM Total Used Memory (B)": "0", "GPU use (%)": "NaN",
                   "GTT Total Memory (B)": 135048462336, "(Topology) Numa Node": "3", "Compute Partition": "SPX"},
         "system": {"Driver version": "6.7.0", "PID77": "python3, 2, 4096, 0, 0",
                    "(Topology) Link type between DRM devices 2 and 10": "XGMI",
                    "(Topology) Hops between DRM devices 2 and 10": "1",
                    "(Topology) Weight between DRM devices 2 and 10": "15"}}"#;

    #[test]
    fn fields_of_the_machine_alone_are_a_reading_without_devices() {
        let text = r#"{"system": {"Driver version": "6.8.5"}}"#;
        assert!(looks_like(text));
        assert!(parse(text).unwrap().devices.is_empty());
    }

    #[test]
    fn each_card_is_a_device_in_the_order_of_its_number() {
        let reading = parse(TWO).unwrap();
        let [first, second] = reading.devices.as_slice() else { panic!("{reading:?}") };
        assert_eq!((first.index, second.index), (Some(2), Some(10)));
        assert_eq!((first.name.as_deref(), second.name.as_deref()), (Some("AMD Instinct MI250X"), Some("D65209")));
        assert_eq!(first.uuid.as_deref(), Some("GPU-719d230578348e8c"));
        assert_eq!(second.pci.unwrap().to_string(), "0000:c6:00.0");
        assert_eq!(first.driver.as_deref(), Some("6.7.0"));
        assert_eq!((first.numa, second.numa), (Some(3), None));
        assert_eq!(first.memory.total, Reported::Value(Bytes(68_702_699_520)));
        assert_eq!(first.memory.used, Reported::Value(Bytes(0)));
        assert_eq!(first.memory.host_total, Reported::Value(Bytes(135_048_462_336)));
        assert_eq!(first.utilization, Reported::Failed("NaN".into()));
        assert_eq!(second.utilization, Reported::Value(Percent(5200)));
        assert_eq!(second.temperature_c, Reported::Value(51));
        assert_eq!(first.power_limit, Reported::Value(Milliwatts(560_000)));
        assert_eq!(first.health, Some(DeviceHealth::Healthy));
        assert_eq!(first.partition, None);
        assert_eq!(reading.links.len(), 1);
        assert_eq!(reading.links[0].kind, LinkKind::Xgmi(1));
        assert!(reading.warnings[0].contains("low-power"));
    }

    #[test]
    fn the_power_of_a_second_die_stays_unsupported() {
        let reading = parse(TWO).unwrap();
        assert_eq!(reading.devices[0].power, Reported::Value(Milliwatts(89_000)));
        assert_eq!(reading.devices[1].power, Reported::Unsupported("N/A (Secondary die)".into()));
    }

    #[test]
    fn processes_are_assigned_only_to_a_single_device() {
        let two = parse(TWO).unwrap();
        assert!(matches!(two.devices[0].processes, Reported::Unsupported(_)));
        assert!(two.warnings.iter().any(|warning| warning.contains("77")));
        let one =
            parse(r#"{"card0": {"GPU use (%)": "1"}, "system": {"PID77": "my, program, 1, 4096, 0, 0"}}"#).unwrap();
        let processes = one.devices[0].processes.value().unwrap();
        assert_eq!((processes[0].pid, processes[0].name.as_deref()), (77, Some("my, program")));
        assert_eq!(processes[0].memory, Reported::Value(Bytes(4096)));
    }

    #[test]
    fn a_cut_off_document_keeps_the_cards_before_the_cut() {
        let cut = &TWO[..TWO.find("\"Current Socket").unwrap()];
        let reading = parse(cut).unwrap();
        assert_eq!(reading.devices.len(), 1);
        assert!(reading.warnings.iter().any(|warning| warning.contains("cut")));
        assert_eq!(parse("{\"card0\": {\"GPU").unwrap_err().code(), "malformed");
    }

    #[test]
    fn output_without_devices_has_a_reason() {
        assert!(parse("WARNING: No JSON data to report").unwrap().devices.is_empty());
        let none = parse("ERROR:root:Driver not initialized (amdgpu not found in modules)");
        assert_eq!(none.unwrap_err().code(), "driver_not_loaded");
    }

    #[test]
    fn a_partition_mode_makes_partitions() {
        let card = r#"{"Compute Partition": "CPX", "Partition ID": "1", "PCI Bus": "0000:01:00.0"}"#;
        let reading = parse(&format!("{{\"card0\": {card}, \"card1\": {}}}", card.replace("\"1\"", "\"0\""))).unwrap();
        let expected = DevicePartition::Amd { id: 1, mode: Some("CPX".into()), parts: Some(2) };
        assert_eq!(reading.devices[0].partition, Some(expected));
    }

    #[test]
    fn other_json_is_not_recognized() {
        assert!(looks_like(TWO));
        assert!(!looks_like(r#"[{"gpu": 0, "card": "x"}]"#));
    }
}

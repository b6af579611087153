//! `nvidia-smi --query-gpu=… --format=csv`: one row for each GPU, mapped by the header.

use std::collections::{HashMap, HashSet};

use crate::address::parse_pci_address;
use crate::limits;
use crate::nvidia_smi::gpu::{insert_text, text_element};
use crate::nvidia_smi::xml::XmlElement;
use crate::nvidia_smi::{errors, gpu};
use crate::reported::truncate_text;
use crate::source::SourceError;
use crate::source_reading::SourceReading;

/// Name of this format in messages.
pub(super) const NAME: &str = "nvidia-smi --query-gpu";

/// Path of a field in the tree, and its unit if neither header nor cell has one. The tool is queried for the first
/// [`QUERIED_FIELDS`]; the others occur in captured tables.
const FIELD_PATHS: [(&str, &[&str], &str); 29] = [
    ("index", &["index"], ""),
    ("uuid", &["uuid"], ""),
    ("name", &["product_name"], ""),
    ("pci.bus_id", &["pci", "bus_id"], ""),
    ("driver_version", &["driver_version"], ""),
    ("count", &["count"], ""),
    ("mig.mode.current", &["mig_mode", "current"], ""),
    ("memory.total", &["fb_memory_usage", "total"], "MiB"),
    ("memory.reserved", &["fb_memory_usage", "reserved"], "MiB"),
    ("memory.used", &["fb_memory_usage", "used"], "MiB"),
    ("utilization.gpu", &["utilization", "gpu"], "%"),
    ("temperature.gpu", &["temperature", "gpu"], "C"),
    ("power.draw", &["power_readings", "power_draw"], "W"),
    ("power.limit", &["power_readings", "power_limit"], "W"),
    ("enforced.power.limit", &["power_readings", "enforced_power_limit"], "W"),
    ("retired_pages.pending", &["retired_pages", "pending"], ""),
    ("remapped_rows.pending", &["remapped_rows", "pending"], ""),
    ("remapped_rows.failure", &["remapped_rows", "remapping_failure_occurred"], ""),
    ("gpu_recovery_action", &["gpu_recovery_action"], ""),
    ("gpu_name", &["product_name"], ""),
    ("gpu_uuid", &["uuid"], ""),
    ("gpu_bus_id", &["pci", "bus_id"], ""),
    ("power.draw.average", &["power_readings", "average_power_draw"], "W"),
    ("power.draw.instant", &["power_readings", "instant_power_draw"], "W"),
    ("memory.free", &["fb_memory_usage", "free"], "MiB"),
    ("fan.speed", &["fan_speed"], "%"),
    ("pstate", &["performance_state"], ""),
    ("serial", &["serial"], ""),
    ("gpu_serial", &["serial"], ""),
];
const QUERIED_FIELDS: usize = 19;

/// Whether a text is such a table, with or without its header.
pub(crate) fn looks_like(text: &str) -> bool {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let Some(first) = lines.next() else { return false };
    let Some(fields) = parse_header(first) else { return is_row(first) };
    let known = fields.iter().filter(|field| tree_path(field).is_some());
    // Names such as `index` occur in other tables too, so they count only if all fields are known.
    let is_distinctive = |field: &CsvField| field.name.contains(['.', '_']);
    let is_device_table =
        known.clone().any(is_distinctive) || known.count() == fields.len() || lines.next().is_some_and(is_row);
    is_device_table && !fields.iter().any(is_process_field)
}

/// Returns the devices of a table. Of several rows for one device (`-l`), the first counts.
pub(crate) fn parse(text: &str) -> Result<SourceReading, SourceError> {
    errors::parse_with_messages(text, |text| {
        let table = CsvTable::parse(text, NAME, &["name", "gpu_name"])?;
        if !table.fields.iter().any(|field| tree_path(field).is_some()) {
            return Err(SourceError::malformed(NAME, "no known field"));
        }
        let mut root = XmlElement::default();
        let mut seen = HashSet::new();
        let mut repeated = 0;
        for row in &table.rows {
            let cell = |names: &[&str]| table.cell(row, names).unwrap_or_default().to_owned();
            let device = (cell(&["uuid", "gpu_uuid"]), cell(&["pci.bus_id", "gpu_bus_id"]), cell(&["index"]));
            let is_named = device != Default::default();
            if is_named && !seen.insert(device) {
                repeated += 1;
            } else if root.children.len() <= limits::DEVICES {
                root.children.push(element_from_row(&table.fields, row));
            }
        }
        let count = table.rows.first().and_then(|row| table.cell(row, &["count"]));
        insert_text(&mut root, &["attached_gpus"], count.unwrap_or_default());
        let mut reading = gpu::reading_from_tree(&root, None);
        table.warnings.into_iter().for_each(|warning| reading.warn(warning));
        let is_device_list = !table.fields.iter().any(|field| field.name == "retired_pages.address");
        if repeated > 0 && is_device_list {
            reading.warn(format!("ignored {repeated} later rows of the same devices"));
        }
        Ok(reading)
    })
}

fn element_from_row(fields: &[CsvField], row: &[String]) -> XmlElement {
    let mut gpu = text_element("gpu", "");
    for (field, cell) in fields.iter().zip(row) {
        let Some((path, usual)) = tree_path(field) else { continue };
        insert_text(&mut gpu, path, &field.with_unit(cell, usual));
    }
    gpu
}

/// Returns the fields to query from a tool that does not print XML, as far as it supports them.
pub(super) fn queried_fields() -> impl Iterator<Item = &'static str> {
    FIELD_PATHS[..QUERIED_FIELDS].iter().map(|(name, ..)| *name)
}

fn tree_path(field: &CsvField) -> Option<(&'static [&'static str], &'static str)> {
    FIELD_PATHS.iter().find(|(name, _, _)| *name == field.name).map(|(_, path, unit)| (*path, *unit))
}

/// Whether the field belongs to a table of processes.
fn is_process_field(field: &CsvField) -> bool {
    field.name == "pid"
}

/// Whether a line contains a value that only a row about a GPU has: a UUID, an address, a name, or an amount of memory.
fn is_row(line: &str) -> bool {
    let mut cells = line.split(',').map(str::trim);
    let is_about_gpu = |cell: &str| {
        let is_amount = cell.strip_suffix(" MiB").is_some_and(|number| number.parse::<u64>().is_ok());
        let is_name = ["NVIDIA ", "Tesla ", "GeForce ", "Quadro "].iter().any(|brand| cell.starts_with(brand));
        is_amount
            || (is_name && !cell.contains("Corporation"))
            || cell.starts_with("GPU-")
            || (cell.contains('.') && parse_pci_address(cell).is_some())
    };
    line.contains(',') && cells.any(is_about_gpu)
}

// `nvidia-smi --query-compute-apps=… --format=csv`: one row for each compute process.

/// Name of this format in messages.
pub(super) const APPS_NAME: &str = "nvidia-smi --query-compute-apps";

const PROCESS_NAME: [&str; 2] = ["process_name", "name"];

/// Whether a text is such a table.
pub(crate) fn looks_like_apps(text: &str) -> bool {
    let first = text.lines().map(str::trim).find(|line| !line.is_empty());
    let Some(fields) = first.and_then(parse_header) else { return false };
    let has = |name: &str| fields.iter().any(|field| field.name == name);
    // Tables of accounted processes list ended ones.
    has("pid") && !has("max_memory_usage")
}

/// Returns the devices with processes. Without rows there are no devices.
pub(crate) fn parse_apps(text: &str) -> Result<SourceReading, SourceError> {
    errors::parse_with_messages(text, |text| {
        let table = CsvTable::parse(text, APPS_NAME, &PROCESS_NAME)?;
        let mut root = XmlElement::default();
        let mut places: HashMap<[String; 2], usize> = HashMap::new();
        let mut unnamed = 0;
        for row in &table.rows {
            let cell = |names: &[&str]| table.cell(row, names).unwrap_or_default().to_owned();
            let device = [cell(&["gpu_uuid"]), cell(&["gpu_bus_id"])];
            if device.iter().all(String::is_empty) {
                unnamed += 1;
                continue;
            }
            let place = *places.entry(device).or_insert_with_key(|[uuid, address]| {
                root.children.push(gpu_with_processes(uuid, address, &cell(&["gpu_name"])));
                root.children.len() - 1
            });
            let processes = root.children.get_mut(place).and_then(|gpu| gpu.children.last_mut());
            processes.into_iter().for_each(|processes| processes.children.push(process_from_row(&table, row)));
        }
        let mut reading = gpu::reading_from_tree(&root, None);
        // The table is unordered and has only devices with processes.
        reading.devices.iter_mut().for_each(|device| device.index = None);
        if unnamed > 0 {
            reading.warn(format!("the table does not name the GPU of {unnamed} processes; query gpu_uuid too"));
        }
        table.warnings.into_iter().for_each(|warning| reading.warn(warning));
        Ok(reading)
    })
}

/// Creates a GPU whose last child is its process list.
fn gpu_with_processes(uuid: &str, address: &str, name: &str) -> XmlElement {
    let mut gpu = text_element("gpu", "");
    insert_text(&mut gpu, &["uuid"], uuid);
    insert_text(&mut gpu, &["pci", "bus_id"], address);
    insert_text(&mut gpu, &["product_name"], name);
    insert_text(&mut gpu, &["processes"], "");
    gpu
}

fn process_from_row(table: &CsvTable, row: &[String]) -> XmlElement {
    let memory = table.cell_and_field(row, &["used_gpu_memory", "used_memory"]);
    let memory = memory.map(|(cell, field)| field.with_unit(cell, "MiB"));
    let mut info = text_element("process_info", "");
    insert_text(&mut info, &["pid"], table.cell(row, &["pid"]).unwrap_or_default());
    insert_text(&mut info, &["process_name"], table.cell(row, &PROCESS_NAME).unwrap_or_default());
    insert_text(&mut info, &["type"], "C");
    insert_text(&mut info, &["used_memory"], &memory.unwrap_or_default());
    info
}

// Comma-separated rows below a header, as printed by `--format=csv`.

/// A field of the header: `memory.total [MiB]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CsvField {
    /// Name in lower case.
    pub(crate) name: String,
    /// Unit, if the header has one.
    pub(crate) unit: Option<String>,
}

impl CsvField {
    /// Returns a cell with its unit: its own, that of the header, or else `usual`.
    pub(crate) fn with_unit(&self, cell: &str, usual: &str) -> String {
        let unit = self.unit.as_deref().unwrap_or(usual);
        let is_bare = !unit.is_empty() && cell.parse::<f64>().is_ok();
        if is_bare { format!("{cell} {unit}") } else { cell.to_owned() }
    }
}

/// Header and rows of a CSV text.
#[derive(Debug, Default)]
pub(crate) struct CsvTable {
    pub(crate) fields: Vec<CsvField>,
    /// Cells of each row, as many as there are fields, or fewer in a truncated row.
    pub(crate) rows: Vec<Vec<String>>,
    /// Problems of single rows.
    pub(crate) warnings: Vec<String>,
}

impl CsvTable {
    /// Parses a text. Extra commas of a row are part of the field `free_text`.
    pub(crate) fn parse(text: &str, format: &'static str, free_text: &[&str]) -> Result<Self, SourceError> {
        let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let Some(head) = lines.next() else {
            return Err(SourceError::malformed(format, "it is empty"));
        };
        let Some(fields) = parse_header(head) else {
            let problem = "the first line is not a header; print the table with --format=csv, without noheader";
            return Err(SourceError::malformed(format, problem));
        };
        let separator = find_separator(head);
        let free_text = fields.iter().position(|field| free_text.contains(&field.name.as_str()));
        let mut table = Self { fields, ..Self::default() };
        for line in lines.filter(|line| *line != head) {
            let mut cells = split_cells(line, separator);
            let wanted = table.fields.len();
            if let Some(free_text) = free_text.filter(|_| cells.len() > wanted) {
                let surplus = cells.len() - wanted;
                let joined = cells.drain(free_text..=free_text + surplus).collect::<Vec<_>>().join(", ");
                cells.insert(free_text, joined);
            }
            if cells.len() != wanted {
                table.warnings.push(format!("{} cells instead of {wanted}: {}", cells.len(), truncate_text(line)));
                // In a row with too few cells the last one may be truncated.
                cells.truncate(wanted.min(cells.len().saturating_sub(1)));
            }
            table.rows.push(cells);
        }
        table.drop_truncated_number(text);
        table.warnings.truncate(limits::WARNINGS);
        Ok(table)
    }

    /// Drops the last number of the text if it lacks the unit that other rows have: `81` of `81559 MiB`.
    fn drop_truncated_number(&mut self, text: &str) {
        let with_units = self.fields.iter().map(|field| field.unit.is_some()).collect::<Vec<_>>();
        let in_columns = |row: &Vec<String>, is: fn(&str) -> bool| {
            row.iter().zip(&with_units).any(|(cell, has_unit)| *has_unit && is(cell))
        };
        let has_unit = |cell: &str| cell.starts_with(|c: char| c.is_ascii_digit()) && cell.contains(' ');
        let others_have = self.rows.iter().any(|row| in_columns(row, has_unit));
        let Some(last) = self.rows.last_mut().filter(|row| row.len() == with_units.len()) else { return };
        let is_bare = last.last().is_some_and(|cell| cell.parse::<f64>().is_ok()) && with_units.last() == Some(&true);
        if others_have && is_bare && !text.ends_with('\n') {
            let cut = last.pop().unwrap_or_default();
            self.warnings.push(format!("the table ends early: {}", truncate_text(&cut)));
        }
    }

    /// Returns the cell of the first existing field of `names`.
    pub(crate) fn cell<'a>(&self, row: &'a [String], names: &[&str]) -> Option<&'a str> {
        self.cell_and_field(row, names).map(|(cell, _)| cell)
    }

    /// Returns the cell of the first existing field of `names`, and the field.
    pub(crate) fn cell_and_field<'a>(&self, row: &'a [String], names: &[&str]) -> Option<(&'a str, &CsvField)> {
        let place = names.iter().find_map(|name| self.fields.iter().position(|field| field.name == *name))?;
        Some((row.get(place)?, self.fields.get(place)?))
    }
}

/// Parses a header; `None` if a cell is not a field name.
pub(crate) fn parse_header(line: &str) -> Option<Vec<CsvField>> {
    let field = |cell: String| {
        let (name, unit) = match cell.split_once('[') {
            Some((name, unit)) => (name.trim(), Some(unit.trim_end_matches(']').trim().to_owned())),
            None => (cell.as_str(), None),
        };
        let begins = name.starts_with(|c: char| c.is_ascii_alphabetic());
        let is_name = begins && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_'));
        is_name.then(|| CsvField { name: name.to_ascii_lowercase(), unit })
    };
    split_cells(line, find_separator(line)).into_iter().map(field).collect()
}

/// Returns the separator of the cells: a comma, unless a spreadsheet replaced it.
fn find_separator(head: &str) -> char {
    [',', ';', '\t'].into_iter().find(|separator| head.contains(*separator)).unwrap_or(',')
}

/// Splits a line into cells; a quoted cell may contain separators.
fn split_cells(line: &str, separator: char) -> Vec<String> {
    let mut cells = Vec::new();
    let mut rest = line.trim();
    loop {
        let quoted = rest.strip_prefix('"').and_then(|inner| inner.split_once('"'));
        let (cell, after) = match quoted {
            Some((cell, after)) if after.is_empty() || after.trim_start().starts_with(separator) => {
                (cell, after.trim_start().strip_prefix(separator))
            }
            _ => rest.split_once(separator).map_or((rest, None), |(cell, after)| (cell, Some(after))),
        };
        cells.push(cell.trim().to_owned());
        match after {
            Some(after) => rest = after.trim_start_matches(' '),
            None => return cells,
        }
    }
}

// `nvidia-smi --help-query-gpu`: the fields that a driver supports.

/// Returns the names of the fields in all spellings: `"name" or "gpu_name"` is both.
pub(crate) fn parse_help_fields(text: &str) -> Vec<&str> {
    text.lines().filter(|line| line.starts_with('"')).flat_map(quoted_names).collect()
}

/// Returns the quoted words of a line that otherwise contains only `or`.
fn quoted_names(line: &str) -> Vec<&str> {
    let parts: Vec<&str> = line.trim().split('"').collect();
    let between_are_or = parts.iter().step_by(2).all(|between| matches!(between.trim(), "" | "or"));
    if between_are_or { parts.into_iter().skip(1).step_by(2).collect() } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_core::{Bytes, DeviceHealth, Percent};

    use crate::detected_device::{Milliwatts, UsedMemoryScope};
    use crate::reported::Reported;

    const HEAD: &str = "index, uuid, name, pci.bus_id, driver_version, memory.total [MiB], memory.used [MiB], \
                        utilization.gpu [%], temperature.gpu, power.draw [W], enforced.power.limit [W]";

    #[test]
    fn cells_are_mapped_by_the_header_with_and_without_units() {
        let units = "3, GPU-a, NVIDIA A10, 00000000:06:00.0, 550.1, 23028 MiB, 5 MiB, 12 %, 32, 21.70 W, 150.00 W";
        let bare = "3, GPU-a, NVIDIA A10, 00000000:06:00.0, 550.1, 23028, 5, 12, 32, 21.70, 150.00";
        for row in [units, bare] {
            let text = format!("{HEAD}\n{row}\n");
            assert!(looks_like(&text));
            let reading = parse(&text).unwrap();
            let device = &reading.devices[0];
            assert_eq!((device.index, device.uuid.as_deref()), (Some(3), Some("GPU-a")));
            assert_eq!(device.pci.unwrap().to_string(), "0000:06:00.0");
            assert_eq!(device.driver.as_deref(), Some("550.1"));
            assert_eq!(device.memory.total, Reported::Value(Bytes(23028 << 20)));
            assert_eq!(device.memory.used, Reported::Value(Bytes(5 << 20)));
            assert_eq!(device.memory.used_means, UsedMemoryScope::WithoutReserved);
            assert_eq!(device.utilization, Reported::Value(Percent(12_000)));
            assert_eq!(device.temperature_c, Reported::Value(32));
            assert_eq!(device.power, Reported::Value(Milliwatts(21_700)));
            assert_eq!(device.power_limit, Reported::Value(Milliwatts(150_000)));
            assert!(device.processes.is_absent());
            assert_eq!(device.health, Some(DeviceHealth::Healthy));
        }
    }

    #[test]
    fn every_placeholder_without_a_value_is_kept_as_the_reason() {
        let text = format!(
            "{HEAD}\n0, GPU-a, N, 01:00.0, [N/A], [Not Supported], N/A, [Unknown Error], ERR!, \
             [Requested functionality has been deprecated], [Insufficient Permissions]\n\
             1, GPU-b, N, 02:00.0, 1, [Function Not Found], 1 MiB, [new words], , [GPU requires reset], [GPU is lost]\n"
        );
        let reading = parse(&text).unwrap();
        let [first, second] = &reading.devices[..] else { panic!("{reading:?}") };
        assert_eq!(first.memory.total, Reported::Unsupported("[Not Supported]".into()));
        assert_eq!(first.memory.used, Reported::Unsupported("N/A".into()));
        assert_eq!(first.utilization, Reported::Failed("[Unknown Error]".into()));
        assert_eq!(first.temperature_c, Reported::Failed("ERR!".into()));
        assert!(matches!(first.power, Reported::Unsupported(_)));
        assert_eq!(first.power_limit, Reported::Failed("[Insufficient Permissions]".into()));
        assert_eq!(first.driver, None);
        assert!(matches!(second.memory.total, Reported::Unsupported(_)));
        assert_eq!(second.utilization, Reported::Failed("[new words]".into()));
        assert!(second.temperature_c.is_absent());
        assert_eq!(second.health, Some(DeviceHealth::Lost));
        let reset = parse("uuid, power.draw [W]\nGPU-a, [GPU requires reset]\n").unwrap();
        assert!(matches!(&reset.devices[0].health, Some(DeviceHealth::Unhealthy(reason)) if reason.contains("reset")));
    }

    #[test]
    fn a_table_without_its_header_is_recognised_and_refused() {
        let text = "0, GPU-a, NVIDIA A10, 23028 MiB\n";
        assert!(looks_like(text));
        let refused = parse(text).unwrap_err();
        assert!(refused.to_string().contains("noheader"), "{refused}");
        assert!(looks_like("name, uuid\nNVIDIA A10, GPU-a\n"));
        for other in ["", "a, b\n1, 2", "hello", "uuid, pid, used_memory [MiB]\n", "name,price\nx,1\n"] {
            assert!(!looks_like(other), "{other}");
        }
    }

    #[test]
    fn later_samples_of_a_device_are_ignored() {
        let text = "uuid, memory.used [MiB]\nGPU-a, 1 MiB\nGPU-b, 2 MiB\nGPU-a, 3 MiB\nGPU-b, 4 M";
        let reading = parse(text).unwrap();
        assert_eq!(reading.devices.len(), 2);
        assert_eq!(reading.devices[0].memory.used, Reported::Value(Bytes(1 << 20)));
        assert_eq!(reading.warnings.len(), 1);
    }

    #[test]
    fn a_truncated_row_keeps_its_complete_cells() {
        let text = "uuid, name, memory.total [MiB], memory.used [MiB]\nGPU-a, A, 10 MiB, 1 MiB\nGPU-b, B, 2";
        let reading = parse(text).unwrap();
        assert_eq!(reading.devices[1].name.as_deref(), Some("B"));
        assert!(reading.devices[1].memory.total.is_absent());
        assert_eq!(reading.warnings.len(), 1);
    }

    #[test]
    fn processes_are_grouped_by_device() {
        let text = "gpu_bus_id, gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n\
                    00000000:01:00.0, GPU-a, 7, python a, b, 2296 MiB\n\
                    00000000:02:00.0, GPU-a, 8, C:\\x.exe, [N/A]\n\
                    00000000:01:00.0, GPU-a, 9, [Insufficient Permissions], 5\n";
        assert!(looks_like_apps(text));
        assert!(!looks_like(text));
        let reading = parse_apps(text).unwrap();
        let [first, second] = &reading.devices[..] else { panic!("{reading:?}") };
        assert_eq!((first.index, first.health.clone()), (None, None));
        let processes = first.processes.value().unwrap();
        assert_eq!((processes[0].pid, processes[0].name.as_deref()), (7, Some("python a, b")));
        assert_eq!(processes[0].memory, Reported::Value(Bytes(2296 << 20)));
        assert_eq!(
            (processes[1].name.as_deref(), processes[1].memory.clone()),
            (None, Reported::Value(Bytes(5 << 20)))
        );
        assert!(matches!(second.processes.value().unwrap()[0].memory, Reported::Unsupported(_)));
    }

    #[test]
    fn an_empty_process_table_is_valid_but_a_missing_header_is_not() {
        assert_eq!(parse_apps("gpu_uuid, pid, used_memory [MiB]\n"), Ok(SourceReading::default()));
        assert_eq!(parse_apps("GPU-a, 5, 7 MiB").unwrap_err().code(), "malformed");
        assert!(!looks_like_apps("gpu_uuid, pid, max_memory_usage [MiB]\n"));
    }

    #[test]
    fn commas_in_names_are_kept() {
        let text = "pid, process_name, used_memory [MiB]\n1, a, b, c, 5 MiB\n2, \"x, y\", 6 MiB\n3, cut o";
        let table = CsvTable::parse(text, "csv", &["process_name"]).unwrap();
        assert_eq!(table.rows[0], ["1", "a, b, c", "5 MiB"]);
        assert_eq!(table.rows[1], ["2", "x, y", "6 MiB"]);
        assert_eq!(table.rows[2], ["3"]);
        assert_eq!(table.warnings.len(), 1);
        assert_eq!(table.fields[2].unit.as_deref(), Some("MiB"));
        assert_eq!(table.cell(&table.rows[0], &["gone", "pid"]), Some("1"));
    }

    #[test]
    fn a_first_line_of_values_is_not_a_header() {
        for values in ["0, NVIDIA A10, 5 MiB", "GPU-1234, 5", "", "2004, 44", "[N/A], x"] {
            assert_eq!(parse_header(values), None, "{values}");
        }
        assert!(parse_header("index, memory.total [MiB]").is_some());
    }

    #[test]
    fn the_help_lists_every_spelling_of_a_field() {
        let text = "List of valid properties to query for the switch \"--query-gpu=\":\n\n\"timestamp\"\nThe time.\n\n\
                    \"name\" or \"gpu_name\"\nThe \"official\" name.\n\"All On\" mode enables everything.\n";
        assert_eq!(parse_help_fields(text), ["timestamp", "name", "gpu_name"]);
    }
}

//! `nvidia-smi --query-gpu=… --format=csv`: one row for each GPU, mapped by the names in the head.

use std::collections::{HashMap, HashSet};

use crate::address::parse_pci_address;
use crate::limits;
use crate::nvidia_smi::gpu::{leaf, put};
use crate::nvidia_smi::xml::XmlElement;
use crate::nvidia_smi::{errors, gpu};
use crate::reported::truncate_text;
use crate::source::SourceError;
use crate::source_reading::SourceReading;

/// What people call this form.
pub(super) const NAME: &str = "nvidia-smi --query-gpu";

/// Where in the tree a field belongs, and the unit it has where neither its head nor its cell gives one. The first
/// [`ASKED`] are those that the tool is asked for; the others are found in the tables of other people.
const PLACES: [(&str, &[&str], &str); 29] = [
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
const ASKED: usize = 19;

/// Whether a text is such a table, with or without its head.
pub(crate) fn looks_like(text: &str) -> bool {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let Some(first) = lines.next() else { return false };
    let Some(fields) = fields(first) else { return is_row(first) };
    let known = fields.iter().filter(|field| place(field).is_some());
    // Names such as `index` are in other tables too, so they count only where nothing else is there.
    let is_own = |field: &Field| field.name.contains(['.', '_']);
    let tells = known.clone().any(is_own) || known.count() == fields.len() || lines.next().is_some_and(is_row);
    tells && !fields.iter().any(is_of_process)
}

/// The devices of a table. Of several rows for one device (`-l`), the first.
pub(crate) fn parse(text: &str) -> Result<SourceReading, SourceError> {
    errors::around(text, |text| {
        let rows = Rows::parse(text, NAME, &["name", "gpu_name"])?;
        if !rows.fields.iter().any(|field| place(field).is_some()) {
            return Err(SourceError::malformed(NAME, "none of its fields is known"));
        }
        let mut root = XmlElement::default();
        let mut seen = HashSet::new();
        let mut repeated = 0;
        for row in &rows.rows {
            let cell = |names: &[&str]| rows.cell(row, names).unwrap_or_default().to_owned();
            let device = (cell(&["uuid", "gpu_uuid"]), cell(&["pci.bus_id", "gpu_bus_id"]), cell(&["index"]));
            let is_named = device != Default::default();
            if is_named && !seen.insert(device) {
                repeated += 1;
            } else if root.children.len() <= limits::DEVICES {
                root.children.push(gpu_of_row(&rows.fields, row));
            }
        }
        let count = rows.rows.first().and_then(|row| rows.cell(row, &["count"]));
        put(&mut root, &["attached_gpus"], count.unwrap_or_default());
        let mut snapshot = gpu::snapshot(&root, None);
        rows.warnings.into_iter().for_each(|warning| snapshot.warn(warning));
        let is_of_devices = !rows.fields.iter().any(|field| field.name == "retired_pages.address");
        if repeated > 0 && is_of_devices {
            snapshot.warn(format!("{repeated} later rows for the same devices are left out"));
        }
        Ok(snapshot)
    })
}

fn gpu_of_row(fields: &[Field], row: &[String]) -> XmlElement {
    let mut gpu = leaf("gpu", "");
    for (field, cell) in fields.iter().zip(row) {
        let Some((path, usual)) = place(field) else { continue };
        put(&mut gpu, path, &field.with_unit(cell, usual));
    }
    gpu
}

/// The fields to ask for where the tool does not print XML, as far as it knows them.
pub(super) fn asked_fields() -> impl Iterator<Item = &'static str> {
    PLACES[..ASKED].iter().map(|(name, ..)| *name)
}

fn place(field: &Field) -> Option<(&'static [&'static str], &'static str)> {
    PLACES.iter().find(|(name, _, _)| *name == field.name).map(|(_, path, unit)| (*path, *unit))
}

/// Whether the table is one of processes rather than of devices.
fn is_of_process(field: &Field) -> bool {
    field.name == "pid"
}

/// Whether a line holds what only a row about a GPU holds: its UUID, its address, its name, or an amount of memory.
fn is_row(line: &str) -> bool {
    let mut cells = line.split(',').map(str::trim);
    let tells = |cell: &str| {
        let is_amount = cell.strip_suffix(" MiB").is_some_and(|number| number.parse::<u64>().is_ok());
        let is_name = ["NVIDIA ", "Tesla ", "GeForce ", "Quadro "].iter().any(|brand| cell.starts_with(brand));
        is_amount
            || (is_name && !cell.contains("Corporation"))
            || cell.starts_with("GPU-")
            || (cell.contains('.') && parse_pci_address(cell).is_some())
    };
    line.contains(',') && cells.any(tells)
}

// `nvidia-smi --query-compute-apps=… --format=csv`: one row for each process that computes.

/// What people call this form.
pub(super) const APPS: &str = "nvidia-smi --query-compute-apps";

const PROCESS_NAME: [&str; 2] = ["process_name", "name"];

/// Whether a text is such a table.
pub(crate) fn looks_like_apps(text: &str) -> bool {
    let first = text.lines().map(str::trim).find(|line| !line.is_empty());
    let Some(fields) = first.and_then(fields) else { return false };
    let has = |name: &str| fields.iter().any(|field| field.name == name);
    // Processes that are only accounted for have ended.
    has("pid") && !has("max_memory_usage")
}

/// The devices that have processes, with these processes. No row is no device.
pub(crate) fn parse_apps(text: &str) -> Result<SourceReading, SourceError> {
    errors::around(text, |text| {
        let rows = Rows::parse(text, APPS, &PROCESS_NAME)?;
        let mut root = XmlElement::default();
        let mut places: HashMap<[String; 2], usize> = HashMap::new();
        let mut unnamed = 0;
        for row in &rows.rows {
            let cell = |names: &[&str]| rows.cell(row, names).unwrap_or_default().to_owned();
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
            processes.into_iter().for_each(|processes| processes.children.push(process(&rows, row)));
        }
        let mut snapshot = gpu::snapshot(&root, None);
        // They are in no order, and only those with processes are there.
        snapshot.devices.iter_mut().for_each(|device| device.index = None);
        if unnamed > 0 {
            snapshot
                .warn(format!("{unnamed} processes of which the table does not tell the GPU; ask for gpu_uuid too"));
        }
        rows.warnings.into_iter().for_each(|warning| snapshot.warn(warning));
        Ok(snapshot)
    })
}

/// A GPU whose last element is that of its processes.
fn gpu_with_processes(uuid: &str, address: &str, name: &str) -> XmlElement {
    let mut gpu = leaf("gpu", "");
    put(&mut gpu, &["uuid"], uuid);
    put(&mut gpu, &["pci", "bus_id"], address);
    put(&mut gpu, &["product_name"], name);
    put(&mut gpu, &["processes"], "");
    gpu
}

fn process(rows: &Rows, row: &[String]) -> XmlElement {
    let memory = rows.cell_and_field(row, &["used_gpu_memory", "used_memory"]);
    let mut info = leaf("process_info", "");
    put(&mut info, &["pid"], rows.cell(row, &["pid"]).unwrap_or_default());
    put(&mut info, &["process_name"], rows.cell(row, &PROCESS_NAME).unwrap_or_default());
    put(&mut info, &["type"], "C");
    put(&mut info, &["used_memory"], &memory.map_or_else(String::new, |(cell, field)| field.with_unit(cell, "MiB")));
    info
}

// Comma separated rows under a line of field names, as `--format=csv` prints them.

/// A field of the head: `memory.total [MiB]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Field {
    /// Its name, in lower case.
    pub(crate) name: String,
    /// Its unit, where the head gives one.
    pub(crate) unit: Option<String>,
}

impl Field {
    /// A cell of this field with its unit: its own, that of the head, or else the `usual` one.
    pub(crate) fn with_unit(&self, cell: &str, usual: &str) -> String {
        let unit = self.unit.as_deref().unwrap_or(usual);
        let is_bare = !unit.is_empty() && cell.parse::<f64>().is_ok();
        if is_bare { format!("{cell} {unit}") } else { cell.to_owned() }
    }
}

/// The rows of a text and what their cells are.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    pub(crate) fields: Vec<Field>,
    /// The cells of each row, as many as there are fields or, where a row is cut off, fewer.
    pub(crate) rows: Vec<Vec<String>>,
    /// What is wrong with single rows.
    pub(crate) warnings: Vec<String>,
}

impl Rows {
    /// Reads a text; a row that has too many commas has them in the field `free`, which holds any text.
    pub(crate) fn parse(text: &str, format: &'static str, free: &[&str]) -> Result<Self, SourceError> {
        let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let Some(head) = lines.next() else {
            return Err(SourceError::malformed(format, "it is empty"));
        };
        let Some(fields) = fields(head) else {
            let problem = "its first line holds no field names, so its cells cannot be told apart; print it with \
                           --format=csv, without noheader";
            return Err(SourceError::malformed(format, problem));
        };
        let separator = separator(head);
        let free = fields.iter().position(|field| free.contains(&field.name.as_str()));
        let mut rows = Self { fields, ..Self::default() };
        for line in lines.filter(|line| *line != head) {
            let mut cells = cells(line, separator);
            let wanted = rows.fields.len();
            if let Some(free) = free.filter(|_| cells.len() > wanted) {
                let surplus = cells.len() - wanted;
                let joined = cells.drain(free..=free + surplus).collect::<Vec<_>>().join(", ");
                cells.insert(free, joined);
            }
            if cells.len() != wanted {
                rows.warnings.push(format!("{} cells under {wanted} names: {}", cells.len(), truncate_text(line)));
                // The last one of too few may be cut off as well.
                cells.truncate(wanted.min(cells.len().saturating_sub(1)));
            }
            rows.rows.push(cells);
        }
        rows.leave_out_a_cut_number(text);
        rows.warnings.truncate(limits::WARNINGS);
        Ok(rows)
    }

    /// Leaves out the last number of a text that ends in it where it lacks the unit that others have: `81` of `81559 MiB`.
    fn leave_out_a_cut_number(&mut self, text: &str) {
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

    /// The cell of a row under any of these names; the first that there is.
    pub(crate) fn cell<'a>(&self, row: &'a [String], names: &[&str]) -> Option<&'a str> {
        self.cell_and_field(row, names).map(|(cell, _)| cell)
    }

    /// The same with its field.
    pub(crate) fn cell_and_field<'a>(&self, row: &'a [String], names: &[&str]) -> Option<(&'a str, &Field)> {
        let place = names.iter().find_map(|name| self.fields.iter().position(|field| field.name == *name))?;
        Some((row.get(place)?, self.fields.get(place)?))
    }
}

/// The field names of a line, where it holds nothing else.
pub(crate) fn fields(line: &str) -> Option<Vec<Field>> {
    let field = |cell: String| {
        let (name, unit) = match cell.split_once('[') {
            Some((name, unit)) => (name.trim(), Some(unit.trim_end_matches(']').trim().to_owned())),
            None => (cell.as_str(), None),
        };
        let begins = name.starts_with(|c: char| c.is_ascii_alphabetic());
        let is_name = begins && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_'));
        is_name.then(|| Field { name: name.to_ascii_lowercase(), unit })
    };
    cells(line, separator(line)).into_iter().map(field).collect()
}

/// What parts the cells below a head: a comma, unless a spreadsheet made it something else.
fn separator(head: &str) -> char {
    [',', ';', '\t'].into_iter().find(|separator| head.contains(*separator)).unwrap_or(',')
}

/// The cells of a line; one in quotes may hold separators.
fn cells(line: &str, separator: char) -> Vec<String> {
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

// `nvidia-smi --help-query-gpu`: which fields a driver knows.

/// The names of the fields, each in all its spellings: `"name" or "gpu_name"` is both.
pub(crate) fn help_fields(text: &str) -> Vec<&str> {
    text.lines().filter(|line| line.starts_with('"')).flat_map(quoted_names).collect()
}

/// The quoted words of a line that holds nothing else but `or`.
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
    fn cells_are_mapped_by_the_head_with_and_without_units() {
        let units = "3, GPU-a, NVIDIA A10, 00000000:06:00.0, 550.1, 23028 MiB, 5 MiB, 12 %, 32, 21.70 W, 150.00 W";
        let bare = "3, GPU-a, NVIDIA A10, 00000000:06:00.0, 550.1, 23028, 5, 12, 32, 21.70, 150.00";
        for row in [units, bare] {
            let text = format!("{HEAD}\n{row}\n");
            assert!(looks_like(&text));
            let snapshot = parse(&text).unwrap();
            let device = &snapshot.devices[0];
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
    fn every_way_to_have_no_value_is_kept_in_its_words() {
        let text = format!(
            "{HEAD}\n0, GPU-a, N, 01:00.0, [N/A], [Not Supported], N/A, [Unknown Error], ERR!, \
             [Requested functionality has been deprecated], [Insufficient Permissions]\n\
             1, GPU-b, N, 02:00.0, 1, [Function Not Found], 1 MiB, [new words], , [GPU requires reset], [GPU is lost]\n"
        );
        let snapshot = parse(&text).unwrap();
        let [first, second] = &snapshot.devices[..] else { panic!("{snapshot:?}") };
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
    fn a_table_without_its_head_is_known_and_refused() {
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
    fn later_samples_of_a_device_are_left_out() {
        let text = "uuid, memory.used [MiB]\nGPU-a, 1 MiB\nGPU-b, 2 MiB\nGPU-a, 3 MiB\nGPU-b, 4 M";
        let snapshot = parse(text).unwrap();
        assert_eq!(snapshot.devices.len(), 2);
        assert_eq!(snapshot.devices[0].memory.used, Reported::Value(Bytes(1 << 20)));
        assert_eq!(snapshot.warnings.len(), 1);
    }

    #[test]
    fn rows_that_are_cut_off_keep_what_they_have() {
        let text = "uuid, name, memory.total [MiB], memory.used [MiB]\nGPU-a, A, 10 MiB, 1 MiB\nGPU-b, B, 2";
        let snapshot = parse(text).unwrap();
        assert_eq!(snapshot.devices[1].name.as_deref(), Some("B"));
        assert!(snapshot.devices[1].memory.total.is_absent());
        assert_eq!(snapshot.warnings.len(), 1);
    }

    #[test]
    fn processes_are_gathered_by_their_device() {
        let text = "gpu_bus_id, gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n\
                    00000000:01:00.0, GPU-a, 7, python a, b, 2296 MiB\n\
                    00000000:02:00.0, GPU-a, 8, C:\\x.exe, [N/A]\n\
                    00000000:01:00.0, GPU-a, 9, [Insufficient Permissions], 5\n";
        assert!(looks_like_apps(text));
        assert!(!looks_like(text));
        let snapshot = parse_apps(text).unwrap();
        let [first, second] = &snapshot.devices[..] else { panic!("{snapshot:?}") };
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
    fn no_process_is_an_answer_and_no_head_is_none() {
        assert_eq!(parse_apps("gpu_uuid, pid, used_memory [MiB]\n"), Ok(SourceReading::default()));
        assert_eq!(parse_apps("GPU-a, 5, 7 MiB").unwrap_err().code(), "malformed");
        assert!(!looks_like_apps("gpu_uuid, pid, max_memory_usage [MiB]\n"));
    }

    #[test]
    fn commas_in_names_stay_in_them() {
        let text = "pid, process_name, used_memory [MiB]\n1, a, b, c, 5 MiB\n2, \"x, y\", 6 MiB\n3, cut o";
        let rows = Rows::parse(text, "csv", &["process_name"]).unwrap();
        assert_eq!(rows.rows[0], ["1", "a, b, c", "5 MiB"]);
        assert_eq!(rows.rows[1], ["2", "x, y", "6 MiB"]);
        assert_eq!(rows.rows[2], ["3"]);
        assert_eq!(rows.warnings.len(), 1);
        assert_eq!(rows.fields[2].unit.as_deref(), Some("MiB"));
        assert_eq!(rows.cell(&rows.rows[0], &["gone", "pid"]), Some("1"));
    }

    #[test]
    fn a_first_line_of_values_is_no_head() {
        for values in ["0, NVIDIA A10, 5 MiB", "GPU-1234, 5", "", "2004, 44", "[N/A], x"] {
            assert_eq!(fields(values), None, "{values}");
        }
        assert!(fields("index, memory.total [MiB]").is_some());
    }

    #[test]
    fn every_spelling_of_a_field_is_known() {
        let text = "List of valid properties to query for the switch \"--query-gpu=\":\n\n\"timestamp\"\nThe time.\n\n\
                    \"name\" or \"gpu_name\"\nThe \"official\" name.\n\"All On\" mode enables everything.\n";
        assert_eq!(help_fields(text), ["timestamp", "name", "gpu_name"]);
    }
}

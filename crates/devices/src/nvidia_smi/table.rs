//! `nvidia-smi`: the table for people, in the layouts of all versions.

use super::{errors, log, tree};
use crate::address;
use crate::limits;
use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::xml::Element;

/// What people call this form.
pub(super) const NAME: &str = "nvidia-smi";

/// Whether a text is such a table.
pub fn looks_like(text: &str) -> bool {
    text.lines().any(is_head) || text.lines().any(|line| gpu(&cells(line)).is_some())
}

/// The devices of a table; of several in a row (`-l`), the first.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    errors::around(text, |text| {
        let mut table = Table::default();
        for line in text.lines() {
            if is_head(line) && table.has_head {
                break;
            }
            table.read(line);
        }
        let is_table = table.has_head || !table.root.children.is_empty();
        if !is_table {
            return Err(SourceError::malformed(NAME, "it holds neither a head nor a row of a GPU"));
        }
        let cut = match table.processes {
            Processes::Open => Some("the list of processes is cut off"),
            // A rule stands below each row.
            _ if table.ends_in_a_row => Some("the table is cut off"),
            _ => None,
        };
        table.end();
        Ok(log::snapshot(&table.root, cut))
    })
}

fn is_head(line: &str) -> bool {
    line.trim_start().starts_with('|') && line.contains("NVIDIA-SMI ")
}

/// The part of the table a line is in.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Part {
    #[default]
    Gpus,
    Instances,
    Processes,
}

/// How far the list of processes was read.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Processes {
    #[default]
    NotThere,
    Open,
    Complete,
}

#[derive(Debug, Default)]
struct Table {
    has_head: bool,
    part: Part,
    /// The driver, and a `gpu` for each row.
    root: Element,
    /// How many lines of the GPU that is read came before.
    line_of_gpu: usize,
    processes: Processes,
    /// Whether the last line that was read is a row rather than a rule.
    ends_in_a_row: bool,
    /// Whether rows of processes have the numbers of their instances.
    has_instances: bool,
}

impl Table {
    fn read(&mut self, line: &str) {
        let cells = cells(line);
        match line.trim_start().chars().next() {
            Some('|') => self.ends_in_a_row = true,
            Some('+') => self.ends_in_a_row = false,
            _ => {}
        }
        if is_head(line) {
            self.has_head = true;
            let driver = version_after(line, "Driver Version:").or_else(|| version_after(line, "KMD Version:"));
            let driver = driver.or_else(|| version_after(line, "NVIDIA-SMI"));
            tree::put(&mut self.root, &["driver_version"], driver.unwrap_or_default());
        } else if line.contains("MIG devices:") {
            self.part = Part::Instances;
        } else if cells.len() == 1 && (line.contains("Processes:") || line.contains("Compute processes:")) {
            self.part = Part::Processes;
        } else {
            match self.part {
                Part::Gpus => self.read_gpu(&cells),
                Part::Instances => self.read_instance(&cells),
                Part::Processes => self.read_process(line, &cells),
            }
        }
    }

    fn read_gpu(&mut self, cells: &[&str]) {
        if let Some(gpu) = gpu(cells) {
            // One beyond the bound is enough to be warned of.
            if self.root.children.len() <= limits::DEVICES + 1 {
                self.root.children.push(gpu);
            }
            self.line_of_gpu = 1;
            return;
        }
        let Some(gpu) = self.root.children.last_mut().filter(|last| last.name == "gpu") else { return };
        match (self.line_of_gpu, cells) {
            (1, [chip, memory, load]) => {
                put_chip(gpu, chip);
                put_memory(gpu, memory);
                tree::put(gpu, &["utilization", "gpu"], load.split_whitespace().next().unwrap_or_default());
            }
            (2, [_, _, mig]) => tree::put(gpu, &["mig_mode", "current"], mig.trim()),
            _ => return,
        }
        self.line_of_gpu += 1;
    }

    fn read_instance(&mut self, cells: &[&str]) {
        let [numbers, memory, ..] = cells else { return };
        let numbers: Vec<&str> = numbers.split_whitespace().collect();
        let [gpu, gpu_instance, compute_instance, index] = numbers[..] else { return };
        if index.parse::<u32>().is_err() {
            return;
        }
        let mut instance = tree::leaf("mig_device", "");
        tree::put(&mut instance, &["index"], index);
        tree::put(&mut instance, &["gpu_instance_id"], gpu_instance);
        tree::put(&mut instance, &["compute_instance_id"], compute_instance);
        put_memory(&mut instance, memory);
        if let Some(gpu) = self.numbered(gpu) {
            gpu.children.push(instance);
        }
    }

    fn read_process(&mut self, line: &str, cells: &[&str]) {
        let [cell] = cells else {
            // The line of `=` opens the list, that of `-` below it closes it.
            match (line.contains("===="), line.trim_start().starts_with('+'), self.processes) {
                (true, _, Processes::NotThere) => self.processes = Processes::Open,
                (_, true, Processes::Open) => self.processes = Processes::Complete,
                _ => {}
            }
            return;
        };
        if self.processes == Processes::NotThere {
            self.has_instances |= cell.split_whitespace().any(|word| word == "GI");
            return;
        }
        if self.processes == Processes::Open
            && let Some((gpu, process)) = process(cell, self.has_instances)
            && let Some(gpu) = self.numbered(gpu)
        {
            match process {
                Ok(info) => tree_of_processes(gpu).children.push(info),
                Err(reason) => tree_of_processes(gpu).text = reason,
            }
        }
    }

    /// A list that is complete is empty for a GPU that is not in it; one that is cut off is no list.
    fn end(&mut self) {
        let complete = self.processes == Processes::Complete;
        for gpu in self.root.children.iter_mut().filter(|child| child.name == "gpu") {
            if complete {
                tree_of_processes(gpu);
            } else {
                gpu.children.retain(|child| child.name != "processes");
            }
        }
    }

    fn numbered(&mut self, number: &str) -> Option<&mut Element> {
        let mut gpus = self.root.children.iter_mut().filter(|child| child.name == "gpu");
        gpus.find(|gpu| gpu.text_of("index") == Some(number))
    }
}

/// The cells of a line, trimmed: what stands between its bars.
fn cells(line: &str) -> Vec<&str> {
    let Some(inner) = line.trim().strip_prefix('|') else { return Vec::new() };
    let inner = inner.strip_suffix('|').unwrap_or(inner);
    let is_rule = !inner.is_empty() && inner.chars().all(|c| matches!(c, '=' | '-' | '+' | '|'));
    if is_rule { Vec::new() } else { inner.split('|').map(str::trim).collect() }
}

fn version_after<'a>(line: &'a str, label: &str) -> Option<&'a str> {
    line.split_once(label)?.1.split_whitespace().next()
}

/// The first line of a GPU: number, name and persistence mode; address; errors.
fn gpu(cells: &[&str]) -> Option<Element> {
    let [first, second, _] = cells else { return None };
    let address = second.split_whitespace().next().filter(|word| address::parse(word).is_some())?;
    let (index, rest) = first.split_once(char::is_whitespace)?;
    index.parse::<u32>().ok()?;
    // The last word is the persistence mode, or on Windows the driver model; long names leave one blank before it.
    let is_mode = |word: &str| matches!(word, "On" | "Off" | "N/A" | "ERR!" | "WDDM" | "TCC" | "MCDM");
    let name = match rest.trim().rsplit_once(' ') {
        Some((name, last)) if is_mode(last) || name.ends_with(' ') => name,
        _ => rest,
    };
    let mut gpu = tree::leaf("gpu", "");
    gpu.attributes.push(("id".into(), address.into()));
    tree::put(&mut gpu, &["index"], index);
    tree::put(&mut gpu, &["product_name"], name.trim());
    Some(gpu)
}

/// Fan, temperature, performance state and power: `30%   31C    P8   5W /  300W`.
fn put_chip(gpu: &mut Element, cell: &str) {
    let (state, limit) = cell.split_once(" / ").unwrap_or((cell, ""));
    let mut words = state.split_whitespace();
    let temperature = words.nth(1).unwrap_or_default();
    let draw = words.nth(1).unwrap_or_default();
    tree::put(gpu, &["temperature", "gpu"], temperature);
    tree::put(gpu, &["power_readings", "power_draw"], draw);
    tree::put(gpu, &["power_readings", "power_limit"], limit.trim());
}

/// `1MiB /  23028MiB`, or why there is none.
fn put_memory(element: &mut Element, cell: &str) {
    let is_cut = cell.starts_with(|c: char| c.is_ascii_digit());
    let (used, total) = cell.split_once(" / ").unwrap_or((cell, if is_cut { "" } else { cell }));
    tree::put(element, &["fb_memory_usage", "used"], used.trim());
    tree::put(element, &["fb_memory_usage", "total"], total.trim());
}

/// The number of the GPU in a row of processes, and the process, or why the GPU does not tell its processes.
fn process(row: &str, has_instances: bool) -> Option<(&str, Result<Element, String>)> {
    let (gpu, rest) = word(row)?;
    gpu.parse::<u32>().ok()?;
    let (instances, rest) = match has_instances {
        true => {
            let (gpu_instance, rest) = word(rest)?;
            let (compute_instance, rest) = word(rest)?;
            ([gpu_instance, compute_instance], rest)
        }
        false => ([""; 2], rest),
    };
    let Some((pid, rest)) = word(rest).filter(|(pid, _)| pid.parse::<u32>().is_ok()) else {
        // Old cards: `0   Not Supported`.
        return Some((gpu, Err(row.trim_start_matches(gpu).trim().to_owned())));
    };
    let is_kind = |kind: &str| kind.chars().all(|c| matches!(c, 'C' | 'G' | 'M' | '+'));
    let (kind, rest) = word(rest).filter(|(kind, _)| is_kind(kind)).unwrap_or(("", rest));
    let (name, memory) = rest.rsplit_once(char::is_whitespace).unwrap_or((rest, ""));
    let mut info = tree::leaf("process_info", "");
    tree::put(&mut info, &["gpu_instance_id"], instances[0]);
    tree::put(&mut info, &["compute_instance_id"], instances[1]);
    tree::put(&mut info, &["pid"], pid);
    tree::put(&mut info, &["type"], kind);
    tree::put(&mut info, &["process_name"], name.trim());
    tree::put(&mut info, &["used_memory"], memory);
    Some((gpu, Ok(info)))
}

fn word(text: &str) -> Option<(&str, &str)> {
    let text = text.trim_start();
    (!text.is_empty())
        .then(|| text.split_once(char::is_whitespace).map_or((text, ""), |(word, rest)| (word, rest.trim())))
}

/// The list of processes of a GPU, made where it is not there yet.
fn tree_of_processes(gpu: &mut Element) -> &mut Element {
    let place = gpu.children.iter().position(|child| child.name == "processes").unwrap_or_else(|| {
        gpu.children.push(tree::leaf("processes", ""));
        gpu.children.len() - 1
    });
    &mut gpu.children[place]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::found::{Doing, Partition, UsedMeans, Watts};
    use crate::told::Told;
    use gpupool_core::device::Health;
    use gpupool_core::units::{Bytes, Percent};

    const NEW: &str = include_str!("../../tests/fixtures/nvidia_smi/mig.table.txt");
    const OLD: &str = include_str!("../../tests/fixtures/nvidia_smi/old.table.txt");

    #[test]
    fn the_layout_of_three_lines_is_read_with_instances_and_processes() {
        assert!(looks_like(NEW));
        let snapshot = parse(NEW).unwrap();
        assert_eq!(snapshot.warnings, Vec::<String>::new());
        let [unified, parent, instance] = &snapshot.devices[..] else { panic!("{snapshot:?}") };
        assert_eq!(unified.name.as_deref(), Some("NVIDIA GB10"));
        assert_eq!(unified.pci.unwrap().to_string(), "000a:03:00.0");
        assert_eq!(unified.driver.as_deref(), Some("581.10.01"));
        assert!(unified.memory.unified);
        assert_eq!(unified.memory.total, Told::Unsupported("Not Supported".into()));
        assert_eq!(
            (&unified.power, &unified.power_limit),
            (&Told::Value(Watts(13_000)), &Told::Unsupported("N/A".into()))
        );
        assert_eq!((&unified.temperature_c, &unified.utilization), (&Told::Value(47), &Told::Value(Percent(0))));
        assert_eq!((unified.mig, unified.health.clone()), (None, Some(Health::Healthy)));
        let processes = unified.processes.value().unwrap();
        assert_eq!((processes[0].pid, processes[0].doing), (1111, Doing::Graphics));
        assert_eq!(processes[1].name.as_deref(), Some("...gram Files\\My Tool\\My Tool.exe"));
        assert!(matches!(processes[1].memory, Told::Unsupported(_)));
        assert_eq!((parent.index, parent.mig), (Some(1), Some(true)));
        assert_eq!(parent.name.as_deref(), Some("NVIDIA H100 80GB ..."));
        assert_eq!(parent.utilization, Told::Unsupported("N/A".into()));
        assert_eq!(parent.memory.used_means, UsedMeans::WithoutReserved);
        assert_eq!(instance.memory.total, Told::Value(Bytes(20000 << 20)));
        assert_eq!(instance.memory.used, Told::Value(Bytes(21 << 20)));
        assert!(matches!(
            instance.partition,
            Some(Partition::Mig { gpu_instance: Some(3), compute_instance: Some(0), .. })
        ));
        assert_eq!(instance.processes.value().unwrap()[0].pid, 33333);
    }

    #[test]
    fn the_layout_of_two_lines_is_read() {
        let snapshot = parse(OLD).unwrap();
        let [first, second] = &snapshot.devices[..] else { panic!("{snapshot:?}") };
        assert_eq!(first.name.as_deref(), Some("GeForce GTX 1070"));
        assert_eq!(first.memory.total, Told::Value(Bytes(8000 << 20)));
        assert_eq!(first.memory.used_means, UsedMeans::WithReserved);
        assert_eq!(first.power, Told::Value(Watts(41_000)));
        assert_eq!(first.power_limit, Told::Value(Watts(180_000)));
        assert_eq!(first.processes.value().unwrap()[0].memory, Told::Value(Bytes(1024 << 20)));
        assert_eq!(second.temperature_c, Told::Failed("ERR!".into()));
        assert_eq!(second.utilization, Told::Failed("ERR!".into()));
        assert_eq!(second.power_limit, Told::Failed("ERR!".into()));
        assert_eq!(second.processes, Told::Unsupported("Not Supported".into()));
    }

    #[test]
    fn a_list_of_processes_that_is_cut_off_is_no_list() {
        let cut = NEW.find("33333").unwrap();
        let snapshot = parse(&NEW[..cut]).unwrap();
        assert_eq!(snapshot.devices.len(), 3);
        assert!(snapshot.devices.iter().all(|device| device.processes.is_absent()));
        assert_eq!(snapshot.warnings.len(), 1);
    }

    #[test]
    fn of_tables_in_a_row_the_first_is_read() {
        assert_eq!(parse(&format!("{NEW}{OLD}")).unwrap(), parse(NEW).unwrap());
        assert_eq!(parse("+---+").unwrap_err().code(), "malformed");
        assert!(!looks_like("| a | b | c |"));
    }
}

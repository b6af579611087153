//! `nvidia-smi --query-compute-apps=… --format=csv`: one row for each process that computes.
//!
//! Processes that only draw are not in it. On a GPU that is cut into instances the rows carry the UUID of the GPU.

use std::collections::HashMap;

use super::rows::{Rows, fields};
use super::{errors, log, tree};
use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::xml::Element;

/// What people call this form.
pub(super) const NAME: &str = "nvidia-smi --query-compute-apps";

const PROCESS_NAME: [&str; 2] = ["process_name", "name"];

/// Whether a text is such a table.
pub fn looks_like(text: &str) -> bool {
    let first = text.lines().map(str::trim).find(|line| !line.is_empty());
    let Some(fields) = first.and_then(fields) else { return false };
    let has = |name: &str| fields.iter().any(|field| field.name == name);
    // Processes that are only accounted for have ended.
    has("pid") && !has("max_memory_usage")
}

/// The devices that have processes, with these processes. No row is no device.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    errors::around(text, |text| {
        let rows = Rows::parse(text, NAME, &PROCESS_NAME)?;
        let mut root = Element::default();
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
                root.children.push(gpu(uuid, address, &cell(&["gpu_name"])));
                root.children.len() - 1
            });
            let processes = root.children.get_mut(place).and_then(|gpu| gpu.children.last_mut());
            processes.into_iter().for_each(|processes| processes.children.push(process(&rows, row)));
        }
        let mut snapshot = log::snapshot(&root, None);
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
fn gpu(uuid: &str, address: &str, name: &str) -> Element {
    let mut gpu = tree::leaf("gpu", "");
    tree::put(&mut gpu, &["uuid"], uuid);
    tree::put(&mut gpu, &["pci", "bus_id"], address);
    tree::put(&mut gpu, &["product_name"], name);
    tree::put(&mut gpu, &["processes"], "");
    gpu
}

fn process(rows: &Rows, row: &[String]) -> Element {
    let memory = rows.cell_and_field(row, &["used_gpu_memory", "used_memory"]);
    let mut info = tree::leaf("process_info", "");
    tree::put(&mut info, &["pid"], rows.cell(row, &["pid"]).unwrap_or_default());
    tree::put(&mut info, &["process_name"], rows.cell(row, &PROCESS_NAME).unwrap_or_default());
    tree::put(&mut info, &["type"], "C");
    tree::put(
        &mut info,
        &["used_memory"],
        &memory.map_or_else(String::new, |(cell, field)| field.with_unit(cell, "MiB")),
    );
    info
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::told::Told;
    use gpupool_core::units::Bytes;

    #[test]
    fn processes_are_gathered_by_their_device() {
        let text = "gpu_bus_id, gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n\
                    00000000:01:00.0, GPU-a, 7, python a, b, 2296 MiB\n\
                    00000000:02:00.0, GPU-a, 8, C:\\x.exe, [N/A]\n\
                    00000000:01:00.0, GPU-a, 9, [Insufficient Permissions], 5\n";
        assert!(looks_like(text));
        assert!(!super::super::csv::looks_like(text));
        let snapshot = parse(text).unwrap();
        let [first, second] = &snapshot.devices[..] else { panic!("{snapshot:?}") };
        assert_eq!((first.index, first.health.clone()), (None, None));
        let processes = first.processes.value().unwrap();
        assert_eq!((processes[0].pid, processes[0].name.as_deref()), (7, Some("python a, b")));
        assert_eq!(processes[0].memory, Told::Value(Bytes(2296 << 20)));
        assert_eq!((processes[1].name.as_deref(), processes[1].memory.clone()), (None, Told::Value(Bytes(5 << 20))));
        assert!(matches!(second.processes.value().unwrap()[0].memory, Told::Unsupported(_)));
    }

    #[test]
    fn no_process_is_an_answer_and_no_head_is_none() {
        assert_eq!(parse("gpu_uuid, pid, used_memory [MiB]\n"), Ok(Snapshot::default()));
        assert_eq!(parse("GPU-a, 5, 7 MiB").unwrap_err().code(), "malformed");
        assert!(!looks_like("gpu_uuid, pid, max_memory_usage [MiB]\n"));
    }
}

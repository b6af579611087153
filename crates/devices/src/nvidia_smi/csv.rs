//! `nvidia-smi --query-gpu=… --format=csv`: one row for each GPU, mapped by the names in the head.

use std::collections::HashSet;

use super::rows::{Field, Rows, fields};
use super::{errors, log, tree};
use crate::address;
use crate::limits;
use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::xml::Element;

/// What people call this form.
pub(super) const NAME: &str = "nvidia-smi --query-gpu";

/// Where in the tree a field belongs, and the unit it has where neither its head nor its cell gives one.
const PLACES: [(&str, &[&str], &str); 29] = [
    ("index", &["index"], ""),
    ("name", &["product_name"], ""),
    ("gpu_name", &["product_name"], ""),
    ("uuid", &["uuid"], ""),
    ("gpu_uuid", &["uuid"], ""),
    ("pci.bus_id", &["pci", "bus_id"], ""),
    ("gpu_bus_id", &["pci", "bus_id"], ""),
    ("driver_version", &["driver_version"], ""),
    ("mig.mode.current", &["mig_mode", "current"], ""),
    ("memory.total", &["fb_memory_usage", "total"], "MiB"),
    ("memory.reserved", &["fb_memory_usage", "reserved"], "MiB"),
    ("memory.used", &["fb_memory_usage", "used"], "MiB"),
    ("utilization.gpu", &["utilization", "gpu"], "%"),
    ("temperature.gpu", &["temperature", "gpu"], "C"),
    ("power.draw", &["power_readings", "power_draw"], "W"),
    ("power.draw.average", &["power_readings", "average_power_draw"], "W"),
    ("power.draw.instant", &["power_readings", "instant_power_draw"], "W"),
    ("power.limit", &["power_readings", "power_limit"], "W"),
    ("enforced.power.limit", &["power_readings", "enforced_power_limit"], "W"),
    ("retired_pages.pending", &["retired_pages", "pending"], ""),
    ("remapped_rows.pending", &["remapped_rows", "pending"], ""),
    ("remapped_rows.failure", &["remapped_rows", "remapping_failure_occurred"], ""),
    ("gpu_recovery_action", &["gpu_recovery_action"], ""),
    ("memory.free", &["fb_memory_usage", "free"], "MiB"),
    ("count", &["count"], ""),
    ("fan.speed", &["fan_speed"], "%"),
    ("pstate", &["performance_state"], ""),
    ("serial", &["serial"], ""),
    ("gpu_serial", &["serial"], ""),
];

/// Whether a text is such a table, with or without its head.
pub fn looks_like(text: &str) -> bool {
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
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    errors::around(text, |text| {
        let rows = Rows::parse(text, NAME, &["name", "gpu_name"])?;
        if !rows.fields.iter().any(|field| place(field).is_some()) {
            return Err(SourceError::malformed(NAME, "none of its fields is known"));
        }
        let mut root = Element::default();
        let mut seen = HashSet::new();
        let mut repeated = 0;
        for row in &rows.rows {
            let cell = |names: &[&str]| rows.cell(row, names).unwrap_or_default().to_owned();
            let device = (cell(&["uuid", "gpu_uuid"]), cell(&["pci.bus_id", "gpu_bus_id"]), cell(&["index"]));
            let is_named = device != Default::default();
            if is_named && !seen.insert(device) {
                repeated += 1;
            } else if root.children.len() <= limits::DEVICES {
                root.children.push(gpu(&rows.fields, row));
            }
        }
        let count = rows.rows.first().and_then(|row| rows.cell(row, &["count"]));
        tree::put(&mut root, &["attached_gpus"], count.unwrap_or_default());
        let mut snapshot = log::snapshot(&root, None);
        rows.warnings.into_iter().for_each(|warning| snapshot.warn(warning));
        let is_of_devices = !rows.fields.iter().any(|field| field.name == "retired_pages.address");
        if repeated > 0 && is_of_devices {
            snapshot.warn(format!("{repeated} later rows for the same devices are left out"));
        }
        Ok(snapshot)
    })
}

fn gpu(fields: &[Field], row: &[String]) -> Element {
    let mut gpu = tree::leaf("gpu", "");
    for (field, cell) in fields.iter().zip(row) {
        let Some((path, usual)) = place(field) else { continue };
        tree::put(&mut gpu, path, &field.with_unit(cell, usual));
    }
    gpu
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
            || (cell.contains('.') && address::parse(cell).is_some())
    };
    line.contains(',') && cells.any(tells)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::found::{UsedMeans, Watts};
    use crate::told::Told;
    use gpupool_core::device::Health;
    use gpupool_core::units::{Bytes, Percent};

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
            assert_eq!(device.memory.total, Told::Value(Bytes(23028 << 20)));
            assert_eq!(device.memory.used, Told::Value(Bytes(5 << 20)));
            assert_eq!(device.memory.used_means, UsedMeans::WithoutReserved);
            assert_eq!(device.utilization, Told::Value(Percent(12_000)));
            assert_eq!(device.temperature_c, Told::Value(32));
            assert_eq!(device.power, Told::Value(Watts(21_700)));
            assert_eq!(device.power_limit, Told::Value(Watts(150_000)));
            assert!(device.processes.is_absent());
            assert_eq!(device.health, Some(Health::Healthy));
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
        assert_eq!(first.memory.total, Told::Unsupported("[Not Supported]".into()));
        assert_eq!(first.memory.used, Told::Unsupported("N/A".into()));
        assert_eq!(first.utilization, Told::Failed("[Unknown Error]".into()));
        assert_eq!(first.temperature_c, Told::Failed("ERR!".into()));
        assert!(matches!(first.power, Told::Unsupported(_)));
        assert_eq!(first.power_limit, Told::Failed("[Insufficient Permissions]".into()));
        assert_eq!(first.driver, None);
        assert!(matches!(second.memory.total, Told::Unsupported(_)));
        assert_eq!(second.utilization, Told::Failed("[new words]".into()));
        assert!(second.temperature_c.is_absent());
        assert_eq!(second.health, Some(Health::Lost));
        let reset = parse("uuid, power.draw [W]\nGPU-a, [GPU requires reset]\n").unwrap();
        assert!(matches!(&reset.devices[0].health, Some(Health::Unhealthy(reason)) if reason.contains("reset")));
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
        assert_eq!(snapshot.devices[0].memory.used, Told::Value(Bytes(1 << 20)));
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
}

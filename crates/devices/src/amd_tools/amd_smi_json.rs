//! `amd-smi … --json` for all its commands: static, metric, list, process, monitor, topology, xgmi.

use serde_json::Value;

use super::amd_smi_tree::Trees;
use super::json_text;
use super::tool_words;
use crate::snapshot::Snapshot;
use crate::source::SourceError;

const FORMAT: &str = "amd-smi JSON";

/// Whether a text is amd-smi's JSON.
pub fn looks_like(text: &str) -> bool {
    let has = |word: &str| text.contains(word);
    let numbered = has("\"gpu\":") || has("\"gpu\" :");
    let known = ["asic", "bus", "usage", "power", "bdf", "process_list", "link_type", "vram_total", "power_usage"];
    let is_error = text.len() < 1 << 12 && has("\"error\":") && has("\"code\":");
    is_error || has("\"gpu_data\"") || numbered && known.iter().any(|key| has(&format!("\"{key}\"")))
}

/// The devices in amd-smi's JSON. What several answers in one text say of a GPU comes together.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    let (trees, warnings) = trees(text)?;
    let mut snapshot = trees.snapshot();
    warnings.into_iter().for_each(|warning| snapshot.warn(warning));
    Ok(snapshot)
}

/// The trees in amd-smi's JSON, and what it said besides.
pub(crate) fn trees(text: &str) -> Result<(Trees, Vec<String>), SourceError> {
    let found = json_text::find(text);
    let (mut trees, mut lines, mut answered) = (Trees::default(), found.lines, false);
    for document in found.documents {
        match document.get("error").and_then(Value::as_str) {
            Some(error) => lines.push(format!("error: {error}")),
            None => {
                answered |= document.as_array().is_some_and(Vec::is_empty) || document.get("gpu_data").is_some();
                trees.add_document(document);
            }
        }
    }
    if !trees.is_empty() {
        lines.extend(found.problem.map(|problem| format!("{FORMAT}: devices after the cut are missing: {problem}")));
        return Ok((trees, lines));
    }
    match found.problem {
        Some(problem) if lines.is_empty() => Err(SourceError::malformed(FORMAT, problem)),
        None if answered => Ok((trees, lines)),
        _ => tool_words::without_devices(&lines, FORMAT).map(|snapshot| (trees, snapshot.warnings)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::found::{Partition, Watts};
    use crate::told::Told;
    use gpupool_core::device::{Health, LinkKind};
    use gpupool_core::units::{Bytes, Percent};

    const STATIC: &str = r#"$ amd-smi static --json
        {"gpu_data": [{"gpu": 0, "asic": {"market_name": "AMD Instinct MI300X", "asic_serial": "0x7E8F7E20764E2714"},
            "bus": {"bdf": "0000:05:00.0"}, "limit": {"max_power": {"value": 750, "unit": "W"}, "socket_power": "N/A"},
            "driver": {"version": "Linuxversion6.14.0-24-generic(buildd@host)"}, "numa": {"node": 1},
            "vram": {"size": {"value": 196592, "unit": "MB"}}, "partition": {"compute_partition": "SPX"}}],
         "cpu_data": [{"cpu": 0}]}"#;

    const METRIC: &str = r#"[{"gpu": 0, "usage": {"gfx_activity": {"value": 7, "unit": "%"}},
            "power": {"socket_power": {"value": 137, "unit": "W"}}, "ecc": {"total_uncorrectable_count": 2},
            "temperature": {"edge": "N/A", "hotspot": {"value": 41, "unit": "C"}},
            "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 283, "unit": "MB"}}}]"#;

    #[test]
    fn several_answers_about_a_gpu_make_one_device() {
        let snapshot = parse(&format!("{STATIC}\n{METRIC}")).unwrap();
        let [gpu] = snapshot.devices.as_slice() else { panic!("{snapshot:?}") };
        assert_eq!(gpu.name.as_deref(), Some("AMD Instinct MI300X"));
        assert_eq!(gpu.uuid.as_deref(), Some("GPU-7e8f7e20764e2714"));
        assert_eq!(gpu.driver.as_deref(), Some("6.14.0-24-generic"));
        assert_eq!(gpu.numa, Some(1));
        assert_eq!(gpu.memory.total, Told::Value(Bytes(196_592 << 20)));
        assert_eq!(gpu.memory.used, Told::Value(Bytes(283 << 20)));
        assert_eq!(gpu.power, Told::Value(Watts(137_000)));
        assert_eq!(gpu.power_limit, Told::Value(Watts(750_000)));
        assert_eq!(gpu.temperature_c, Told::Value(41));
        assert_eq!(gpu.utilization, Told::Value(Percent(7000)));
        assert_eq!(gpu.partition, None);
        assert_eq!(gpu.health, Some(Health::Healthy));
        assert!(snapshot.warnings[0].contains("2 errors of memory"), "{:?}", snapshot.warnings);
    }

    #[test]
    fn what_only_lists_devices_says_nothing_of_their_health() {
        assert_eq!(parse(STATIC).unwrap().devices[0].health, None);
    }

    #[test]
    fn processes_are_those_of_each_gpu() {
        let text = r#"[{"gpu": 0, "process_list": [{"process_info": {"name": "python3", "pid": 77,
                "memory_usage": {"vram_mem": {"value": 4096, "unit": "B"}}, "mem_usage": {"value": 9, "unit": "B"}}}]},
            {"gpu": 1, "process_list": [{"process_info": "No running processes detected"}]},
            {"gpu": 2, "process_list": [{"process_info": {"name": "x", "pid": "N/A"}}]}, {"gpu": 3}]"#;
        let devices = parse(text).unwrap().devices;
        let first = &devices[0].processes.value().unwrap()[0];
        assert_eq!((first.pid, first.name.as_deref()), (77, Some("python3")));
        assert_eq!(first.memory, Told::Value(Bytes(4096)));
        assert_eq!(devices[1].processes, Told::Value(Vec::new()));
        assert!(matches!(devices[2].processes, Told::Failed(_)));
        assert!(devices[3].processes.is_absent());
    }

    #[test]
    fn both_shapes_of_topology_give_links() {
        let maps = r#"[{"gpu": 0, "hops": {"gpu_0": 0, "gpu_1": 2, "gpu_2": 1},
              "link_type": {"gpu_0": "SELF", "gpu_1": "PCIE", "gpu_2": "XGMI"}}, {"gpu": 1}, {"gpu": 2}]"#;
        let lists = r#"[{"gpu": 0, "bdf": "0000:08:00.0", "links": [
              {"gpu": 1, "bdf": "0000:44:00.0", "link_type": "PCIE", "num_hops": 2},
              {"bdf": "0000:45:00.0", "link_type": "XGMI", "num_hops": 1}]},
            {"gpu": 1, "bdf": "0000:44:00.0"}, {"gpu": 2, "bdf": "0000:45:00.0"}]"#;
        for text in [maps, lists] {
            let snapshot = parse(text).unwrap();
            let kinds: Vec<_> = snapshot.links.iter().map(|link| (link.a, link.b, link.kind)).collect();
            assert_eq!(kinds, [(0, 1, LinkKind::SameNuma), (0, 2, LinkKind::Xgmi(1))], "{text}");
        }
    }

    #[test]
    fn partitions_share_a_place_and_an_id() {
        let part = |gpu: u8, id: u8| {
            format!(
                r#"{{"gpu": {gpu}, "bdf": "0000:05:00.0", "partition_id": {id}, "asic": {{"asic_serial": "0x1"}},
                    "partition": {{"accelerator_partition": "CPX"}}}}"#
            )
        };
        let snapshot = parse(&format!("[{}, {}]", part(0, 0), part(1, 1))).unwrap();
        let expected = Partition::Amd { id: 1, mode: Some("CPX".into()), parts: Some(2) };
        assert_eq!(snapshot.devices[1].partition, Some(expected));
        let spelled: Vec<String> = snapshot.identities().iter().map(ToString::to_string).collect();
        assert_eq!(spelled, ["0000:05:00.0/0", "0000:05:00.0/1"]);
    }

    #[test]
    fn errors_of_the_tool_are_errors() {
        let text = r#"{"error": "AMDSMI_STATUS_DRIVER_NOT_LOADED", "code": -1}"#;
        assert!(looks_like(text));
        let error = parse(text).unwrap_err();
        assert_eq!(error.code(), "driver_not_loaded");
        assert_eq!(parse("[{\"gpu\": 0, \"asic\": {").unwrap_err().code(), "malformed");
        assert!(parse("[]").unwrap().devices.is_empty());
        let cut = parse(r#"[{"gpu": 0, "bdf": "0000:05:00.0"}, {"gpu": 1, "bdf"#).unwrap();
        assert_eq!((cut.devices.len(), cut.warnings.len()), (1, 1));
    }
}

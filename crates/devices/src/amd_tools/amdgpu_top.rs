//! The JSON of amdgpu_top: devices with sensors and the processes on them, and devices left asleep.

use gpupool_core::device::Vendor;
use serde_json::Value;

use super::amd_smi_tree::Tree;
use super::facts;
use super::json_text;
use super::quantity;
use super::rocm_smi_cards::AndNotZero;
use super::settle::settle;
use crate::address;
use crate::found::{Found, Process};
use crate::limits;
use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::told::Told;

const FORMAT: &str = "amdgpu_top JSON";

/// Whether a text is the JSON of amdgpu_top.
pub fn looks_like(text: &str) -> bool {
    let has = |word: &str| text.contains(word);
    text.contains('{') && (has("\"amdgpu_top_version\"") || has("\"Total VRAM\"") && has("\"Sensors\""))
}

/// The devices in the JSON of amdgpu_top; of several readings in a row the last.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    let found = json_text::find(text);
    let list = |document: &Value, key: &str| document.get(key).and_then(Value::as_array).cloned().unwrap_or_default();
    let mut read = None;
    for document in &found.documents {
        let devices = match document {
            Value::Array(devices) => devices.clone(),
            one if one.get("VRAM").is_some() || one.get("Info").is_some() => vec![one.clone()],
            root if root.get("devices").is_some() || root.get("suspended_devices").is_some() => list(root, "devices"),
            _ => continue,
        };
        read = Some((devices, list(document, "suspended_devices")));
    }
    let Some((devices, suspended)) = read.filter(|(a, b)| found.problem.is_none() || !(a.is_empty() && b.is_empty()))
    else {
        let problem = found.problem.unwrap_or_else(|| "no devices are in it".to_owned());
        return Err(SourceError::malformed(FORMAT, problem));
    };
    let mut snapshot = Snapshot::default();
    for (number, tree) in devices.iter().enumerate() {
        let index = u32::try_from(number).ok();
        snapshot.push(Found { index, ..device(Tree(tree)) });
    }
    for tree in &suspended {
        let mut device = Found::new(Vendor::Amd);
        place(&mut device, Tree(tree), "");
        device.asleep = true;
        snapshot.push(device);
    }
    settle(&mut snapshot, &vec![Default::default(); devices.len()]);
    if let Some(problem) = found.problem {
        snapshot.warn(format!("{FORMAT}: devices after the cut are missing: {problem}"));
    }
    Ok(snapshot)
}

/// Its name and where it is, from the fields under `prefix`.
fn place(found: &mut Found, tree: Tree, prefix: &str) {
    let said = |key: &str| tree.first(&[&format!("{prefix}{key}")]);
    let name = said("DeviceName").or_else(|| said("ASIC Name"));
    found.name = found.name.take().or_else(|| facts::best_name(&[name.as_deref()?], None, &[]));
    found.pci = found.pci.or_else(|| said("PCI").or_else(|| said("pci")).and_then(|pci| address::parse(&pci)));
    let minor = said("render").and_then(|render| render.rsplit("renderD").next()?.parse().ok());
    found.minor = found.minor.or(minor);
}

fn device(tree: Tree) -> Found {
    let mut found = Found::new(Vendor::Amd);
    for prefix in ["Info.", "Info.DevicePath.", "DevicePath."] {
        place(&mut found, tree, prefix);
    }
    // Sizes are exact in bytes; what is in use is newest in the other table.
    let bytes = |paths: &[&str]| tree.told(paths, |text| quantity::bytes(text, "B"));
    found.memory.total = bytes(&["Info.VRAM Size", "VRAM.Total VRAM"]).and_not_zero();
    found.memory.used = bytes(&["VRAM.Total VRAM Usage", "Info.VRAM Usage Size"]);
    found.memory.host_total = bytes(&["Info.GTT Size", "VRAM.Total GTT"]);
    found.memory.host_used = bytes(&["VRAM.Total GTT Usage", "Info.GTT Usage Size"]);
    found.utilization = tree.told(&["gpu_activity.GFX"], quantity::percent);
    let sensors = ["Sensors.Edge Temperature", "Sensors.Junction Temperature"];
    found.temperature_c = tree.told(&sensors, quantity::celsius);
    let power = ["Sensors.Average Power", "Sensors.Input Power", "Sensors.GFX Power"];
    found.power = tree.told(&power, quantity::watts);
    found.power_limit = tree.told(&["Info.Power Cap.current", "Info.Power Cap"], quantity::watts).and_not_zero();
    found.processes = processes(tree.0);
    found.asleep = tree.first(&["Sensors.PCI Power State"]).is_some_and(|state| state.starts_with("D3"));
    found
}

/// The processes under `fdinfo`, by their numbers.
fn processes(tree: &Value) -> Told<Vec<Process>> {
    let Some(listed) = tree.get("fdinfo").and_then(Value::as_object) else { return Told::ABSENT };
    let mut found = Vec::new();
    for (pid, info) in listed.iter().take(limits::PROCESSES) {
        let Ok(pid) = pid.parse() else { return Told::Failed("a process without a number".into()) };
        let info = Tree(info);
        let name = info.first(&["name", "usage.name"]);
        found.push(Process {
            pid,
            name: name.map(|name| name.chars().take(limits::WORDS).collect::<String>().into()),
            memory: info.told(&["usage.usage.VRAM", "usage.VRAM"], |text| quantity::bytes(text, "MiB")),
            ..Process::default()
        });
    }
    found.sort_by_key(|process| process.pid);
    Told::Value(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::found::Watts;
    use gpupool_core::device::Health;
    use gpupool_core::units::{Bytes, Percent};

    const SAMPLE: &str = r#"{"devices": [{
        "Info": {"DeviceName": "AMD Radeon Graphics", "PCI": "0000:13:00.0", "VRAM Size": 536870912, "Power Cap": null,
                 "GTT Size": 16360796160, "DevicePath": {"render": "/dev/dri/renderD129"}},
        "VRAM": {"Total VRAM": {"unit": "MiB", "value": 512}, "Total VRAM Usage": {"unit": "MiB", "value": 460}},
        "Sensors": {"Average Power": null, "Input Power": {"unit": "W", "value": 27},
                    "Edge Temperature": {"unit": "C", "value": 43}},
        "gpu_activity": {"GFX": {"unit": "%", "value": 6}},
        "fdinfo": {"1234": {"name": "python3", "usage": {"name": "python3", "usage": {"VRAM": {"unit": "MiB", "value": 9}}}},
                   "77": {"name": "old", "usage": {"VRAM": {"unit": "MiB", "value": 1}}}}}],
      "suspended_devices": [{"DeviceName": "AMD Radeon RX 9060 XT", "pci": "0000:03:00.0", "render": "/dev/dri/renderD128"}],
      "amdgpu_top_version": {"major": 0}}"#;

    #[test]
    fn a_device_is_read_with_its_processes() {
        assert!(looks_like(SAMPLE));
        let snapshot = parse(SAMPLE).unwrap();
        let gpu = &snapshot.devices[0];
        assert_eq!(gpu.name.as_deref(), Some("AMD Radeon Graphics"));
        assert_eq!((gpu.pci.unwrap().to_string().as_str(), gpu.minor), ("0000:13:00.0", Some(129)));
        assert_eq!(gpu.memory.total, Told::Value(Bytes(512 << 20)));
        assert_eq!(gpu.memory.used, Told::Value(Bytes(460 << 20)));
        assert_eq!(gpu.memory.host_total, Told::Value(Bytes(16_360_796_160)));
        assert_eq!(gpu.power, Told::Value(Watts(27_000)));
        assert!(matches!(gpu.power_limit, Told::Unsupported(_)));
        assert_eq!(gpu.temperature_c, Told::Value(43));
        assert_eq!(gpu.utilization, Told::Value(Percent(6000)));
        assert_eq!(gpu.health, Some(Health::Healthy));
        let processes = gpu.processes.value().unwrap();
        assert_eq!(processes.iter().map(|process| process.pid).collect::<Vec<_>>(), [77, 1234]);
        assert_eq!(processes[1].memory, Told::Value(Bytes(9 << 20)));
    }

    #[test]
    fn a_device_left_asleep_is_listed_without_readings() {
        let asleep = &parse(SAMPLE).unwrap().devices[1];
        assert!(asleep.asleep);
        assert_eq!(asleep.name.as_deref(), Some("AMD Radeon RX 9060 XT"));
        assert_eq!((asleep.minor, asleep.health.clone()), (Some(128), None));
    }

    #[test]
    fn a_cut_off_document_keeps_the_devices_before_the_cut() {
        let cut = parse(&SAMPLE[..SAMPLE.find("\"suspended_devices\"").unwrap()]).unwrap();
        assert_eq!((cut.devices.len(), cut.warnings.len()), (1, 1));
        assert_eq!(parse(&SAMPLE[..100]).unwrap_err().code(), "malformed");
    }
}

//! Invariants of every reader for any bytes. Run briefly by `fuzz_formats`, and for long by the targets in `fuzz/`.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::fs;
use std::path::{Component, Path};

use gpupool_core::{DeviceHealth, Percent};
use gpupool_devices::capture::{self, CaptureFormat};
use gpupool_devices::simulated::{FaultTarget, SimulatedFault, SimulatedMachine, SimulationSpec};
use gpupool_devices::{
    DetectedDevice, DevicePartition, DeviceProcess, DevicesReport, Reported, SourceReading, limits, parse_pci_address,
};
use tempfile::TempDir;

/// Returns the names of all targets that read bytes from outside.
pub fn targets() -> Vec<String> {
    let others = ["archive", "fault", "gpu_metrics", "pci_address", "simulated_spec", "simulated_toml"];
    let formats = CaptureFormat::all().map(|format| format.name().replace('-', "_"));
    formats.chain(others.map(str::to_owned)).collect()
}

/// Reads bytes as the target does, and checks the result.
pub fn run(target: &str, bytes: &[u8]) {
    match target {
        "archive" => check_archive(bytes),
        "fault" => check_fault(&String::from_utf8_lossy(bytes)),
        "gpu_metrics" => check_gpu_metrics(bytes),
        "pci_address" => check_pci_address(&String::from_utf8_lossy(bytes)),
        "simulated_spec" => check_simulated(SimulationSpec::parse(&String::from_utf8_lossy(bytes)).ok()),
        "simulated_toml" => check_simulated(SimulationSpec::from_toml(&String::from_utf8_lossy(bytes)).ok()),
        format => check_captured(format.parse().expect("a target that is nothing else is a format"), bytes),
    }
}

fn check_captured(format: CaptureFormat, bytes: &[u8]) {
    if format.is_tree() {
        let folder = plant_tree(bytes);
        format.read_tree(folder.path()).map(|read| read.map(|snapshot| assert_sound(&snapshot)));
        return;
    }
    let text = String::from_utf8_lossy(bytes);
    format.matches(&text);
    let parsed = format.parse(&text);
    assert_eq!(parsed, format.parse(&text), "the same text was read in two ways");
    match parsed.expect("a format that is no tree is one of texts") {
        Ok(snapshot) => assert_sound(&snapshot),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Creates a tree of small files: each begins with a line `== PATH`, and ends where the next begins.
fn plant_tree(bytes: &[u8]) -> TempDir {
    let folder = temporary_folder();
    let mut rest = String::from_utf8_lossy(bytes).into_owned();
    rest.insert(0, '\n');
    for file in rest.split("\n== ").skip(1).take(40) {
        let (path, content) = file.split_once('\n').unwrap_or((file, ""));
        let stays_inside = Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
        if stays_inside && !path.is_empty() && path.len() < 200 && !path.contains('\0') {
            // A file that cannot be created is missing, as it may be on a machine.
            let path = folder.path().join(path);
            let _ = path.parent().map(fs::create_dir_all);
            let _ = fs::write(&path, content);
        }
    }
    folder
}

/// Creates a folder, in memory if possible, because a disk is slow for many small files.
fn temporary_folder() -> TempDir {
    TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a temporary folder")
}

/// Reads the binary table of a card without other sensors.
fn check_gpu_metrics(bytes: &[u8]) {
    let folder =
        plant_tree(b"== sys/class/drm/card0/device/vendor\n0x1002\n== sys/class/drm/card0/device/device\n0x74a1\n");
    fs::write(folder.path().join("sys/class/drm/card0/device/gpu_metrics"), bytes).expect("a file in the tree");
    let snapshot = capture::read_capture(folder.path(), None).expect("a card with any table");
    assert_eq!(snapshot.devices.len(), 1);
    assert_sound(&snapshot);
}

fn check_archive(bytes: &[u8]) {
    let folder = temporary_folder();
    let path = folder.path().join("capture");
    fs::write(&path, fix_checksums(bytes.to_vec())).expect("a temporary file");
    match capture::read_capture(&path, None) {
        Ok(snapshot) => assert_sound(&snapshot),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Corrects the checksum of every header of a tar archive.
fn fix_checksums(mut bytes: Vec<u8>) -> Vec<u8> {
    for header in bytes.chunks_exact_mut(512).filter(|block| &block[257..262] == b"ustar") {
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    }
    bytes
}

fn check_pci_address(text: &str) {
    if let Some(address) = parse_pci_address(text) {
        assert_eq!(parse_pci_address(&address.to_string()), Some(address));
    }
}

fn check_simulated(spec: Option<SimulationSpec>) {
    let Some(spec) = spec else { return };
    let count = spec.device_count();
    assert!((1..=limits::DEVICES).contains(&count), "{count} devices");
    // Checking the links between many devices is slow.
    if count <= 64 {
        let read = SimulatedMachine::new(&spec).reading();
        assert_eq!(read, SimulatedMachine::new(&spec).reading(), "the same devices were simulated in two ways");
        read.iter().for_each(assert_sound);
    }
}

fn check_fault(text: &str) {
    let from_json = serde_json::from_str::<SimulatedFault>(text).ok().filter(|fault| fault.check().is_ok());
    let Some(fault) = text.parse().ok().or(from_json) else { return };
    assert_eq!(fault.to_string().parse().as_ref(), Ok(&fault), "a fault changes on its way through text");
    let json = serde_json::to_string(&fault).expect("a fault is JSON");
    assert_eq!(
        serde_json::from_str::<SimulatedFault>(&json).ok().as_ref(),
        Some(&fault),
        "a fault changes on its way through JSON"
    );

    let mut machine =
        SimulatedMachine::new(&SimulationSpec::parse("2xH100,1xA30/2g.12gb,1xMI300X/CPX").expect("models there are"));
    machine.inject_fault(&FaultTarget::All, &fault).expect("a sound fault of all devices");
    machine.reading().iter().for_each(assert_sound);
}

/// Asserts that a reading is sound.
fn assert_sound(snapshot: &SourceReading) {
    let count = snapshot.devices.len();
    assert_at_most(limits::DEVICES, count, "devices");
    assert_at_most(limits::WARNINGS, snapshot.warnings.len(), "warnings");
    snapshot.warnings.iter().for_each(|warning| assert_short(warning));
    snapshot.devices.iter().for_each(assert_sound_device);

    let identities = snapshot.identities();
    assert_eq!(identities.len(), count);
    assert_eq!(identities.iter().collect::<BTreeSet<_>>().len(), count, "two devices are one: {identities:?}");

    let mut joined = BTreeSet::new();
    for link in &snapshot.links {
        assert!(link.a < link.b && link.b < count, "{link:?} among {count} devices");
        assert!(joined.insert((link.a, link.b)), "{link:?} is there twice");
    }
    serde_json::to_vec(&DevicesReport::new(snapshot, None)).expect("a report is JSON");
}

fn assert_sound_device(device: &DetectedDevice) {
    [&device.name, &device.uuid, &device.driver].into_iter().flatten().for_each(|text| assert_short(text));
    match &device.partition {
        Some(DevicePartition::Mig { parent_uuid, profile, .. }) => {
            [parent_uuid, profile].into_iter().flatten().for_each(|text| assert_short(text));
        }
        Some(DevicePartition::Amd { mode, .. }) => mode.iter().for_each(|text| assert_short(text)),
        None => {}
    }
    if let Some(DeviceHealth::Unhealthy(reason)) = &device.health {
        assert_short(reason);
    }
    let memory = &device.memory;
    for reported in [&memory.total, &memory.reserved, &memory.used, &memory.host_total, &memory.host_used] {
        assert_short_reason(reported);
    }
    assert_short_reason(&device.utilization);
    assert_short_reason(&device.temperature_c);
    assert_short_reason(&device.power);
    assert_short_reason(&device.power_limit);
    assert_short_reason(&device.processes);
    assert!(device.utilization.value().is_none_or(|busy| *busy <= Percent::FULL), "{:?}", device.utilization);

    let processes: &[DeviceProcess] = device.processes.value().map_or(&[], Vec::as_slice);
    assert_at_most(limits::PROCESSES, processes.len(), "processes");
    for process in processes {
        process.name.iter().for_each(|name| assert_short(name));
        assert_short_reason(&process.memory);
    }
}

fn assert_short_reason<T: Debug>(reported: &Reported<T>) {
    if let Reported::Unsupported(reason) | Reported::Failed(reason) = reported {
        assert_short(reason);
    }
}

fn assert_short(text: &str) {
    assert_at_most(limits::TEXT_CHARS, text.chars().count(), "characters");
}

fn assert_at_most(limit: usize, count: usize, of_what: &str) {
    assert!(count <= limit, "{count} {of_what}, more than {limit}");
}

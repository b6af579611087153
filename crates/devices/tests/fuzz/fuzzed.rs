//! What must hold for any bytes at all, whoever reads them. Run briefly by `fuzz_formats`, and for long by the targets
//! in `fuzz/`.

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

/// Everything that reads bytes from outside, by the name of its target.
pub fn targets() -> Vec<String> {
    let others = ["archive", "fault", "gpu_metrics", "pci_address", "simulated_spec", "simulated_toml"];
    let formats = CaptureFormat::all().map(|format| format.name().replace('-', "_"));
    formats.chain(others.map(str::to_owned)).collect()
}

/// Reads bytes as one of the targets does, and looks at what came of it.
pub fn run(target: &str, bytes: &[u8]) {
    match target {
        "archive" => archive(bytes),
        "fault" => fault(&String::from_utf8_lossy(bytes)),
        "gpu_metrics" => gpu_metrics(bytes),
        "pci_address" => pci_address(&String::from_utf8_lossy(bytes)),
        "simulated_spec" => simulated(SimulationSpec::parse(&String::from_utf8_lossy(bytes)).ok()),
        "simulated_toml" => simulated(SimulationSpec::from_toml(&String::from_utf8_lossy(bytes)).ok()),
        format => captured(format.parse().expect("a target that is nothing else is a format"), bytes),
    }
}

fn captured(format: CaptureFormat, bytes: &[u8]) {
    if format.is_tree() {
        let folder = planted(bytes);
        format.read_tree(folder.path()).map(|read| read.map(|snapshot| sound(&snapshot)));
        return;
    }
    let text = String::from_utf8_lossy(bytes);
    format.matches(&text);
    let parsed = format.parse(&text);
    assert_eq!(parsed, format.parse(&text), "the same text was read in two ways");
    match parsed.expect("a format that is no tree is one of texts") {
        Ok(snapshot) => sound(&snapshot),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// A tree of small files: each begins with a line `== PATH`, and ends where the next begins.
fn planted(bytes: &[u8]) -> TempDir {
    let folder = temporary_folder();
    let mut rest = String::from_utf8_lossy(bytes).into_owned();
    rest.insert(0, '\n');
    for file in rest.split("\n== ").skip(1).take(40) {
        let (path, content) = file.split_once('\n').unwrap_or((file, ""));
        let stays_inside = Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
        if stays_inside && !path.is_empty() && path.len() < 200 && !path.contains('\0') {
            // Where a file of that name stands in the way, the tree lacks this one, as it may on a machine.
            let path = folder.path().join(path);
            let _ = path.parent().map(fs::create_dir_all);
            let _ = fs::write(&path, content);
        }
    }
    folder
}

/// A folder in memory where there is one: very many small files are written, and a disk would be waited for.
fn temporary_folder() -> TempDir {
    TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a temporary folder")
}

/// The binary table, of a card that has no other sensors.
fn gpu_metrics(bytes: &[u8]) {
    let folder =
        planted(b"== sys/class/drm/card0/device/vendor\n0x1002\n== sys/class/drm/card0/device/device\n0x74a1\n");
    fs::write(folder.path().join("sys/class/drm/card0/device/gpu_metrics"), bytes).expect("a file in the tree");
    let snapshot = capture::read_capture(folder.path(), None).expect("a card whatever its table holds");
    assert_eq!(snapshot.devices.len(), 1);
    sound(&snapshot);
}

fn archive(bytes: &[u8]) {
    let folder = temporary_folder();
    let path = folder.path().join("capture");
    fs::write(&path, with_checksums(bytes.to_vec())).expect("a temporary file");
    match capture::read_capture(&path, None) {
        Ok(snapshot) => sound(&snapshot),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// A tar archive with the checksum of every header as it should be, which no change to a header leaves.
fn with_checksums(mut bytes: Vec<u8>) -> Vec<u8> {
    for header in bytes.chunks_exact_mut(512).filter(|block| &block[257..262] == b"ustar") {
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    }
    bytes
}

fn pci_address(text: &str) {
    if let Some(address) = parse_pci_address(text) {
        assert_eq!(parse_pci_address(&address.to_string()), Some(address));
    }
}

fn simulated(spec: Option<SimulationSpec>) {
    let Some(spec) = spec else { return };
    let count = spec.device_count();
    assert!((1..=limits::DEVICES).contains(&count), "{count} devices");
    // The links between many devices are too many to be looked at often.
    if count <= 64 {
        let read = SimulatedMachine::new(&spec).reading();
        assert_eq!(read, SimulatedMachine::new(&spec).reading(), "the same devices were simulated in two ways");
        read.iter().for_each(sound);
    }
}

fn fault(text: &str) {
    let from_json = serde_json::from_str::<SimulatedFault>(text).ok().filter(|fault| fault.check().is_ok());
    let Some(fault) = text.parse().ok().or(from_json) else { return };
    assert_eq!(fault.to_string().parse().as_ref(), Ok(&fault), "a fault changes on its way through text");
    let json = serde_json::to_string(&fault).expect("a fault is JSON");
    assert_eq!(
        serde_json::from_str::<SimulatedFault>(&json).ok().as_ref(),
        Some(&fault),
        "a fault changes on its way through JSON"
    );

    let mut world =
        SimulatedMachine::new(&SimulationSpec::parse("2xH100,1xA30/2g.12gb,1xMI300X/CPX").expect("models there are"));
    world.inject_fault(&FaultTarget::All, &fault).expect("a sound fault of all devices");
    world.reading().iter().for_each(sound);
}

/// Looks at everything a source may say.
fn sound(snapshot: &SourceReading) {
    let count = snapshot.devices.len();
    at_most(limits::DEVICES, count, "devices");
    at_most(limits::WARNINGS, snapshot.warnings.len(), "warnings");
    snapshot.warnings.iter().for_each(|warning| short(warning));
    snapshot.devices.iter().for_each(sound_device);

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

fn sound_device(device: &DetectedDevice) {
    [&device.name, &device.uuid, &device.driver].into_iter().flatten().for_each(|text| short(text));
    match &device.partition {
        Some(DevicePartition::Mig { parent_uuid, profile, .. }) => {
            [parent_uuid, profile].into_iter().flatten().for_each(|text| short(text));
        }
        Some(DevicePartition::Amd { mode, .. }) => mode.iter().for_each(|text| short(text)),
        None => {}
    }
    if let Some(DeviceHealth::Unhealthy(reason)) = &device.health {
        short(reason);
    }
    let memory = &device.memory;
    for told in [&memory.total, &memory.reserved, &memory.used, &memory.host_total, &memory.host_used] {
        short_words(told);
    }
    short_words(&device.utilization);
    short_words(&device.temperature_c);
    short_words(&device.power);
    short_words(&device.power_limit);
    short_words(&device.processes);
    assert!(device.utilization.value().is_none_or(|busy| *busy <= Percent::FULL), "{:?}", device.utilization);

    let processes: &[DeviceProcess] = device.processes.value().map_or(&[], Vec::as_slice);
    at_most(limits::PROCESSES, processes.len(), "processes");
    for process in processes {
        process.name.iter().for_each(|name| short(name));
        short_words(&process.memory);
    }
}

fn short_words<T: Debug>(told: &Reported<T>) {
    if let Reported::Unsupported(words) | Reported::Failed(words) = told {
        short(words);
    }
}

fn short(text: &str) {
    at_most(limits::TEXT_CHARS, text.chars().count(), "characters");
}

fn at_most(limit: usize, count: usize, of_what: &str) {
    assert!(count <= limit, "{count} {of_what}, more than {limit}");
}

//! Diagnostic bundles of a machine made of files and fake tools: collected, written, unpacked and compared.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use crate::machine::FakeMachine;
use gpupool_devices::SourcePaths;
use gpupool_devices::doctor::{BundleRequest, DiagnosticBundle, DoctorEvidence, RedactionOptions};
use serde_json::Value;

const UUID: &str = "GPU-6ee2b5b2-1d5a-4a7e-9b3f-0123456789ab";

fn request() -> BundleRequest {
    BundleRequest::new("0.0.0-test", UNIX_EPOCH + Duration::from_secs(1_700_000_000))
}

fn collect(machine: &FakeMachine, request: &BundleRequest) -> DiagnosticBundle {
    DiagnosticBundle::collect(&machine.paths, &gather(&machine.paths), request)
}

fn gather(paths: &SourcePaths) -> DoctorEvidence {
    DoctorEvidence::gather(paths, &|_| None, Vec::new())
}

/// Texts of the files of a bundle.
fn texts(bundle: &DiagnosticBundle) -> BTreeMap<&str, String> {
    bundle.files().map(|(name, bytes)| (name, String::from_utf8_lossy(bytes).into_owned())).collect()
}

/// Reason for a missing file in the manifest.
fn why_missing(bundle: &DiagnosticBundle, name: &str) -> Option<String> {
    let manifest: Value = serde_json::from_str(&texts(bundle)["manifest.json"]).unwrap();
    let missing = manifest["missing"].as_array().unwrap();
    let entry = missing.iter().find(|entry| entry["name"] == name)?;
    Some(entry["why"].as_str().unwrap().to_owned())
}

#[test]
fn a_bundle_unpacks_to_the_collected_files() {
    let machine = FakeMachine::new("tools");
    machine.wake_all();
    let bundle = collect(&machine, &request());
    let path = machine.at("report.tar.gz");
    bundle.write_to(&path).unwrap();
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(File::open(&path).unwrap()));
    let unpacked: BTreeMap<String, Vec<u8>> = archive
        .entries()
        .unwrap()
        .map(|entry| {
            let mut entry = entry.unwrap();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            (entry.path().unwrap().display().to_string(), bytes)
        })
        .collect();
    let collected: BTreeMap<String, Vec<u8>> =
        bundle.files().map(|(name, bytes)| (name.to_owned(), bytes.to_vec())).collect();
    assert_eq!(unpacked, collected);
    for name in [
        "sys/bus/pci/devices/0000:01:00.0/class",
        "sys/class/drm/card0/device/gpu_metrics",
        "sys/class/drm/card0/device/hwmon/hwmon3/temp1_input",
        "sys/class/drm/card0/device/drm/renderD128/dev",
        "sys/class/drm/card1/device/gpu_busy_percent",
        "sys/class/kfd/kfd/topology/nodes/1/properties",
        "proc/driver/nvidia/gpus/0000:01:00.0/information",
        "proc/modules",
    ] {
        assert_eq!(unpacked[name], fs::read(machine.at(name)).unwrap(), "{name}");
    }
    assert!(!unpacked.keys().any(|name| name.contains("card0-DP-1") || name.contains("hostname")));
    assert!(String::from_utf8_lossy(&unpacked["nvidia-smi-q.xml"]).contains(UUID));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600, "only its owner reads it");
    assert!(bundle.write_to(&path).is_err(), "a file that is there is not replaced");
}

#[test]
fn the_doctor_sees_the_same_machine_in_the_unpacked_bundle() {
    let machine = FakeMachine::new("tools");
    let bundle = collect(&machine, &request());
    let elsewhere = tempfile::tempdir().unwrap();
    for (name, bytes) in bundle.files() {
        let path = elsewhere.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    let here = gather(&machine.paths);
    let at = |name: &str| elsewhere.path().join(name);
    let there = gather(&SourcePaths { sys: at("sys"), proc: at("proc"), ..machine.paths.clone() });
    assert_eq!((there.gpus, there.modules, there.nvidia.kernel), (here.gpus, here.modules, here.nvidia.kernel));
    assert_eq!(there.kernel_release, here.kernel_release);
}

#[test]
fn the_manifest_lists_files_and_reasons_for_missing_ones() {
    let machine = FakeMachine::new("tools");
    let bundle = collect(&machine, &request());
    let manifest: Value = serde_json::from_str(&texts(&bundle)["manifest.json"]).unwrap();
    assert_eq!(manifest["gpupool"], "0.0.0-test");
    assert_eq!(manifest["created_unix_secs"], 1_700_000_000);
    assert_eq!(manifest["kernel"], "6.8.0-45-generic");
    assert_eq!(manifest["files"].as_array().unwrap().len(), bundle.files().count() - 1, "all but itself");
    let xml = manifest["files"].as_array().unwrap().iter().find(|file| file["name"] == "nvidia-smi-q.xml").unwrap();
    assert!(xml["source"].as_str().unwrap().ends_with("nvidia-smi -q -x"));
    assert_eq!(why_missing(&bundle, "amd-smi-list.json").as_deref(), Some("the tool is not on the PATH"));
    assert_eq!(why_missing(&bundle, "nvidia-smi-topo.txt").as_deref(), Some("exit code 9"));
    assert_eq!(texts(&bundle)["nvidia-smi-topo.error.txt"], "exit code 9\ncannot see the topology\n");
    let findings: Value = serde_json::from_str(&texts(&bundle)["findings.json"]).unwrap();
    assert!(findings.as_array().unwrap().iter().any(|finding| finding["code"] == "gpu_asleep"));
}

#[test]
fn a_sleeping_device_is_not_read_and_tools_that_would_wake_it_are_not_run() {
    let machine = FakeMachine::new("tools");
    // The kernel queries the device for its link but knows the NUMA node.
    const LINK: &str = "current_link_speed";
    let bus_file = |place: &str, file: &str| format!("sys/bus/pci/devices/{place}/{file}");
    let (awake, sleeping) = ("0000:01:00.0", "0000:c1:00.0");
    for place in [awake, sleeping] {
        machine.write(&bus_file(place, LINK), b"16.0 GT/s PCIe\n");
    }
    let bundle = collect(&machine, &request());
    let files = texts(&bundle);
    assert!(files.contains_key("sys/class/drm/card1/device/power/runtime_status"));
    let read: Vec<&&str> = files.keys().filter(|name| name.starts_with("sys/class/drm/card1/")).collect();
    assert_eq!(read, [&"sys/class/drm/card1/device/power/runtime_status", &"sys/class/drm/card1/device/vendor"]);
    assert!(files.contains_key(&*bus_file(awake, LINK)) && !files.contains_key(&*bus_file(sleeping, LINK)));
    assert!(files.contains_key(&*bus_file(sleeping, "numa_node")));
    assert!(files.contains_key("nvidia-smi-L.txt"), "the sleeping one is not of this vendor");

    machine.write("sys/bus/pci/devices/0000:01:00.0/power/runtime_status", b"suspended\n");
    let asleep = collect(&machine, &request());
    assert!(why_missing(&asleep, "nvidia-smi-L.txt").unwrap().contains("would wake"));
    assert!(!texts(&asleep).contains_key("proc/driver/nvidia/gpus/0000:01:00.0/information"));
    let woken = collect(&machine, &BundleRequest { wake: true, ..request() });
    assert!(texts(&woken).contains_key("nvidia-smi-L.txt"));
}

#[test]
fn names_and_serial_numbers_are_replaced_unless_asked_otherwise() {
    let machine = FakeMachine::new("tools");
    let with = |redact: RedactionOptions| {
        let bundle = collect(&machine, &BundleRequest { redact, ..request() });
        let all: String = texts(&bundle).into_iter().map(|(name, text)| format!("{name}\n{text}\n")).collect();
        all
    };
    let secrets = ["1650522004111", "/home/ada/train", "ada@node-seven"];
    let usual = with(RedactionOptions::default());
    assert!(secrets.iter().all(|secret| !usual.contains(secret)), "{usual}");
    assert!(usual.contains(UUID) && usual.contains("3f7a8c0d11223344"));
    let everything = with(RedactionOptions { identities: true, uuids: true });
    assert!(!everything.contains(UUID) && !everything.contains("3f7a8c0d11223344"));
    assert!(!everything.contains("4574122359298077508"));
    assert_eq!(everything.matches("GPU-00000000-0000-4000-8000-000000000001").count(), 3, "one GPU, three files");
    let nothing = with(RedactionOptions { identities: false, uuids: false });
    assert!(secrets.iter().all(|secret| nothing.contains(secret)));
}

#[test]
fn a_tool_that_hangs_is_recorded_and_does_not_stop_the_bundle() {
    let machine = FakeMachine::new("hanging");
    let bundle = collect(&machine, &BundleRequest { tool_deadline: Duration::from_millis(100), ..request() });
    let files = texts(&bundle);
    assert!(files["nvidia-smi-q.error.txt"].starts_with("driver_unresponsive"), "{}", files["nvidia-smi-q.error.txt"]);
    assert!(!files.contains_key("nvidia-smi-q.xml"));
    assert!(files.contains_key("findings.json") && files.contains_key("proc/modules"));
}

#[test]
fn a_file_that_hangs_is_recorded_and_does_not_stop_the_bundle() {
    let machine = FakeMachine::new("tools");
    let name = "sys/class/drm/card0/device/gpu_busy_percent";
    replace_by_pipe(&machine.at(name));
    let bundle = collect(&machine, &BundleRequest { file_deadline: Duration::from_secs(1), ..request() });
    assert!(why_missing(&bundle, name).unwrap().starts_with("unresponsive"));
    assert!(texts(&bundle).contains_key("sys/class/kfd/kfd/topology/nodes/1/properties"), "read after it");
}

/// Reading a pipe without a writer blocks, as a file of a stuck driver does.
fn replace_by_pipe(path: &Path) {
    fs::remove_file(path).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, path, rustix::fs::Mode::RUSR).unwrap();
}

#[test]
fn files_after_the_deadline_are_missing_with_the_reason() {
    let machine = FakeMachine::new("tools");
    let bundle = collect(&machine, &BundleRequest { deadline: Duration::ZERO, ..request() });
    assert!(why_missing(&bundle, "proc/modules").unwrap().contains("time"));
    assert!(why_missing(&bundle, "nvidia-smi-L.txt").unwrap().contains("time"));
    assert!(texts(&bundle).contains_key("findings.json"));
}

//! Captured trees of whole machines, and kernel logs.

use std::path::Path;
use std::process::Command;

use gpupool_core::{Bytes, DeviceHealth, Vendor};
use gpupool_devices::capture::CaptureFormat;
use gpupool_devices::{DetectedDevice, Reported, SourceReading};
use tempfile::TempDir;

use crate::capture_fixtures::{own_captures, real_captures};
use crate::skipped::skipped;

fn places(snapshot: &SourceReading) -> Vec<String> {
    snapshot.devices.iter().map(|device| device.pci.unwrap().to_string()).collect()
}

fn numa(snapshot: &SourceReading) -> Vec<Option<u32>> {
    snapshot.devices.iter().map(|device| device.numa).collect()
}

/// Unpacks a captured tree of a machine with six GPUs in many PCI domains, if present.
pub fn power9() -> Option<TempDir> {
    let packed = real_captures()?.join("nvidia/hwloc/nvidiagpunumanodes.tar.bz2");
    let folder = tempfile::tempdir().unwrap();
    let unpacked = Command::new("tar").arg("-xjf").arg(packed).arg("-C").arg(folder.path()).status();
    if unpacked.is_ok_and(|status| status.success()) {
        return Some(folder);
    }
    skipped("captured tree of a POWER9 machine", "no tar and bzip2 to unpack it with");
    None
}

#[test]
fn a_copied_tree_lists_its_gpus_with_memory_and_numa_nodes() {
    let sound = |gpu: &DetectedDevice| {
        gpu.vendor == Vendor::Nvidia && gpu.memory.total == Reported::Value(Bytes(16128 << 20)) && gpu.health.is_none()
    };
    let format: CaptureFormat = "pci".parse().unwrap();
    let read = |root: &Path| format.read_tree(root).expect("the tree is recognised").unwrap();
    let own = read(&own_captures().join("nvidia/lact-sysfs/bus"));
    assert_eq!((places(&own), numa(&own)), (vec!["0004:05:00.0".to_owned()], vec![Some(8)]));
    assert!(own.devices.iter().all(sound), "{:?}", own.devices);
    let Some(folder) = power9() else { return };
    let tree = read(folder.path());
    assert!(tree.devices.len() == 6 && tree.devices.iter().all(sound), "{:?}", tree.devices);
    assert_eq!(numa(&tree), [0, 0, 0, 8, 8, 8].map(Some));
}

/// Reads a kernel log, which no other format recognises.
fn log(path: &Path) -> SourceReading {
    let text = String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
    let knows: Vec<_> = CaptureFormat::all().filter(|format| format.matches(&text)).collect();
    assert_eq!(knows.iter().map(|format| format.name()).collect::<Vec<_>>(), ["kernel-log"], "{}", path.display());
    knows[0].parse(&text).unwrap().unwrap()
}

#[test]
fn only_faults_of_programs_leave_a_gpu_healthy() {
    let own = log(&own_captures().join("nvidia/dmesg.log"));
    assert_eq!(places(&own), ["0000:38:00.0", "0000:9b:00.0"]);
    assert_eq!(own.devices[0].health, Some(DeviceHealth::Healthy));
    assert!(own.warnings[0].contains("Xid 13 ×2"), "{:?}", own.warnings);
    assert!(matches!(&own.devices[1].health, Some(DeviceHealth::Unhealthy(why)) if why.contains("119")));
    let Some(captures) = real_captures() else { return };
    let faults = log(&captures.join("nvidia/gpud/dmesg.decode.iso.log.0"));
    assert_eq!(places(&faults), ["0000:38:00.0"]);
    assert_eq!(faults.devices[0].health, Some(DeviceHealth::Healthy));
    assert!(
        faults.warnings[0].contains("Xid 13 ×629") && faults.warnings[1].contains("Xid 43 ×7"),
        "{:?}",
        faults.warnings
    );
    let silent = log(&captures.join("nvidia/gpud/dmesg-with-xid-119.log"));
    assert_eq!(silent.devices[0].uuid.as_deref(), Some("GPU-509665ad-b600-ac93-3616-d754b23d636d"));
    assert!(matches!(&silent.devices[0].health, Some(DeviceHealth::Unhealthy(why)) if why.contains("119")));
}

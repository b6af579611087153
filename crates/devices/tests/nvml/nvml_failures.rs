//! Failures of devices, drivers and libraries.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc;

use crate::nvml_machine::{NvmlMachine, health_reasons, map_devices, nvml_paths};
use gpupool_core::{DeviceHealth, Percent};
use gpupool_devices::{DeviceSource, NvmlSource, Reported, SourceError, SourcePaths};
use nvml_standin::machines::{mig_gpu, server_gpu, server_scenario};
use nvml_standin::{NvmlScenario, RemappedRows, StandInXidEvent};

const UNINITIALIZED: u32 = 1;
const NOT_SUPPORTED: u32 = 3;
const NO_PERMISSION: u32 = 4;
const DRIVER_NOT_LOADED: u32 = 9;
const LOST: u32 = 15;
const RESET_REQUIRED: u32 = 16;
const MISMATCH: u32 = 18;
const UNKNOWN: u32 = 999;
const HANDLE: &str = "nvmlDeviceGetHandleByIndex_v2";

fn fail(errors: &mut BTreeMap<String, u32>, function: &str, code: u32) {
    errors.insert(function.into(), code);
}

#[test]
fn a_lost_gpu_keeps_its_identity_and_the_others_continue() {
    let mut machine = NvmlMachine::new(server_scenario(3));
    let before = machine.read();
    machine.change(|it| it.devices[1].errors = [("*".into(), LOST)].into());
    for _ in 0..40 {
        let snapshot = machine.read();
        assert_eq!(health_reasons(&snapshot), ["", "lost", ""]);
        assert_eq!(snapshot.identities(), before.identities());
        assert!(matches!(snapshot.devices[1].utilization, Reported::Failed(_)));
        assert_eq!(snapshot.devices[2].utilization, Reported::Value(Percent(20_000)));
    }
    machine.change(|it| it.devices[1].errors.clear());
    assert_eq!(machine.read(), before);
}

#[test]
fn a_gpu_that_vanishes_is_reported_lost_until_it_returns() {
    let mut machine = NvmlMachine::new(server_scenario(3));
    let before = machine.read();
    machine.change(|it| drop(it.devices.remove(0)));
    let snapshot = machine.read();
    assert_eq!(health_reasons(&snapshot), ["", "", "lost"]);
    assert_eq!(snapshot.devices[2].uuid, before.devices[0].uuid);
    assert_eq!(snapshot.devices[0].uuid, before.devices[1].uuid);
    assert!(snapshot.warnings[0].contains("is gone"));
    machine.change(|it| it.devices.insert(0, server_gpu(0)));
    assert_eq!(machine.read(), before);
}

#[test]
fn every_instance_of_a_lost_gpu_is_lost() {
    let mut machine = NvmlMachine::new(NvmlScenario { devices: vec![mig_gpu(), server_gpu(1)], ..server_scenario(0) });
    machine.read();
    machine.change(|it| it.devices[0].errors = [("*".into(), LOST)].into());
    for _ in 0..3 {
        assert_eq!(health_reasons(&machine.read()), ["lost", "lost", "lost", "lost", ""]);
    }
}

#[test]
fn added_devices_are_found_even_after_an_empty_reading() {
    let mut machine = NvmlMachine::new(server_scenario(0));
    assert!(machine.read().devices.is_empty());
    machine.change(|it| it.devices = server_scenario(2).devices);
    assert_eq!(machine.read().devices.len(), 2);
    machine.change(|it| it.devices.push(server_gpu(2)));
    assert_eq!(machine.read().devices.len(), 3);
}

#[test]
fn a_gpu_that_needs_a_reset_is_unhealthy_and_still_read() {
    let mut scenario = server_scenario(2);
    fail(&mut scenario.devices[0].errors, "nvmlDeviceGetUtilizationRates", RESET_REQUIRED);
    let snapshot = NvmlMachine::new(scenario).read();
    assert_eq!(health_reasons(&snapshot), ["the GPU requires a reset", ""]);
    assert!(snapshot.devices[0].memory.total.value().is_some());
}

#[test]
fn a_gpu_that_cannot_be_opened_is_unhealthy_and_keeps_its_identity() {
    let mut machine = NvmlMachine::new(server_scenario(2));
    let before = machine.read();
    machine.change(|it| {
        fail(&mut it.devices[1].errors, HANDLE, UNKNOWN);
        fail(&mut it.devices[1].errors, "nvmlDeviceGetPowerUsage", LOST);
    });
    assert_eq!(health_reasons(&machine.read()), ["", "lost"]);
    let snapshot = machine.read();
    assert_eq!(health_reasons(&snapshot), ["", "unknown error"]);
    assert_eq!(snapshot.identities(), before.identities());
}

#[test]
fn an_unknown_error_of_the_whole_library_blames_no_device() {
    let mut machine = NvmlMachine::new(server_scenario(2));
    machine.read();
    machine.change(|it| fail(&mut it.errors, "nvmlDeviceGetCount_v2", UNKNOWN));
    assert!(matches!(machine.nvml.read(), Err(SourceError::Driver(_))));
    machine.change(|it| {
        it.errors.clear();
        for device in &mut it.devices {
            fail(&mut device.errors, HANDLE, UNKNOWN);
        }
    });
    assert!(matches!(machine.nvml.read(), Err(SourceError::Driver(_))));
    machine.change(|it| it.devices = server_scenario(2).devices);
    assert_eq!(health_reasons(&machine.read()), ["", ""]);
}

#[test]
fn counted_devices_that_cannot_be_opened_are_named_by_index() {
    let mut machine = NvmlMachine::new(NvmlScenario { count: Some(4), ..server_scenario(3) });
    machine.change(|it| fail(&mut it.devices[1].errors, HANDLE, NO_PERMISSION));
    let snapshot = machine.read();
    assert_eq!(health_reasons(&snapshot), ["", "unknown", "", "unknown"]);
    assert_eq!(map_devices(&snapshot, |device| device.index), [Some(0), Some(1), Some(2), Some(3)]);
    assert_eq!(map_devices(&snapshot, |device| device.uuid.is_some()), [true, false, true, false]);
    assert_eq!(snapshot.warnings, ["GPU 1 cannot be opened: no permission", "GPU 3 cannot be opened: no permission"]);
}

#[test]
fn a_driver_error_is_classified_by_its_remedy() {
    let failing = |code| {
        let mut scenario = server_scenario(1);
        fail(&mut scenario.errors, "nvmlInit_v2", code);
        NvmlMachine::new(scenario).nvml.read().unwrap_err()
    };
    assert!(matches!(failing(MISMATCH), SourceError::VersionMismatch(_)));
    assert!(matches!(failing(DRIVER_NOT_LOADED), SourceError::DriverNotLoaded(_)));
    assert!(matches!(failing(NO_PERMISSION), SourceError::NoPermission(_)));
    assert!(matches!(failing(UNKNOWN), SourceError::Driver(_)));
}

#[test]
fn a_driver_that_recovers_is_read_again() {
    let mut machine = NvmlMachine::new(server_scenario(2));
    let before = machine.read();
    machine.change(|it| fail(&mut it.errors, "nvmlDeviceGetCount_v2", MISMATCH));
    assert!(matches!(machine.nvml.read(), Err(SourceError::VersionMismatch(_))));
    machine.change(|it| it.errors.clear());
    assert_eq!(machine.read(), before);
    machine.change(|it| fail(&mut it.devices[0].errors, "nvmlDeviceGetMemoryInfo_v2", DRIVER_NOT_LOADED));
    assert!(matches!(machine.nvml.read(), Err(SourceError::DriverNotLoaded(_))));
}

#[test]
fn an_uninitialised_library_is_reopened_only_once_per_reading() {
    let mut machine = NvmlMachine::new(server_scenario(1));
    machine.read();
    machine.change(|it| fail(&mut it.errors, "nvmlDeviceGetCount_v2", UNINITIALIZED));
    assert!(matches!(machine.nvml.read(), Err(SourceError::Driver(_))));
    machine.change(|it| it.errors.clear());
    assert_eq!(machine.read().devices.len(), 1);
}

#[test]
fn a_missing_library_is_reported_as_not_present() {
    let folder = tempfile::tempdir().unwrap();
    let missing = NvmlSource::new(&nvml_paths(folder.path())).read();
    assert!(matches!(missing, Err(SourceError::NotPresent { .. })));
    std::fs::write(folder.path().join("libnvidia-ml.so.1"), "no library").unwrap();
    let broken = NvmlSource::new(&nvml_paths(folder.path())).read();
    assert!(matches!(broken, Err(SourceError::NotPresent { .. })));
    let nameless = SourcePaths { nvml: "libnvidia-ml-missing.so".into(), ..nvml_paths(folder.path()) };
    assert!(
        matches!(NvmlSource::new(&nameless).read(), Err(SourceError::NotPresent { what, .. }) if what.contains("missing"))
    );
}

#[test]
fn an_xid_of_a_device_counts_until_the_device_returns() {
    let mut machine = NvmlMachine::new(server_scenario(2));
    machine.read();
    machine.change(|it| it.events = vec![StandInXidEvent { device: 1, xid: 79 }]);
    for _ in 0..3 {
        let reasons = health_reasons(&machine.read());
        assert_eq!(reasons[0], "");
        assert!(reasons[1].starts_with("Xid 79: "), "{reasons:?}");
    }
    machine.change(|it| it.devices[1].errors = [("*".into(), LOST)].into());
    assert_eq!(health_reasons(&machine.read())[1], "lost");
    machine.change(|it| {
        it.devices[1].errors.clear();
        it.events.clear();
    });
    assert_eq!(health_reasons(&machine.read()), ["", ""]);
}

#[test]
fn releasing_the_library_forgets_xids() {
    let mut machine = NvmlMachine::new(server_scenario(1));
    machine.change(|it| it.events = vec![StandInXidEvent { device: 0, xid: 48 }]);
    assert!(health_reasons(&machine.read())[0].starts_with("Xid 48"));
    machine.change(|it| it.events.clear());
    assert!(health_reasons(&machine.read())[0].starts_with("Xid 48"));
    machine.nvml.release();
    assert_eq!(health_reasons(&machine.read()), [""]);
}

#[test]
fn an_xid_affects_every_instance_of_its_gpu() {
    let mut scenario = NvmlScenario { devices: vec![mig_gpu(), server_gpu(1)], ..server_scenario(0) };
    scenario.events = vec![StandInXidEvent { device: 0, xid: 95 }];
    let reasons = health_reasons(&NvmlMachine::new(scenario).read());
    assert!(reasons[..4].iter().all(|why| why.starts_with("Xid 95")), "{reasons:?}");
    assert_eq!(reasons[4], "");
}

#[test]
fn xids_of_programs_are_ignored_and_uncertain_ones_are_warnings() {
    let mut scenario = server_scenario(1);
    scenario.events = [13, 31, 43, 45, 68, 109, 63, 94].map(|xid| StandInXidEvent { device: 0, xid }).to_vec();
    let snapshot = NvmlMachine::new(scenario).read();
    assert_eq!(health_reasons(&snapshot), [""]);
    assert_eq!(snapshot.warnings.len(), 2);
    assert!(snapshot.warnings[0].contains("Xid 63") && snapshot.warnings[1].contains("Xid 94"));
}

#[test]
fn devices_without_xid_events_are_healthy() {
    let mut scenario = server_scenario(2);
    scenario.devices[0].tells_xids = false;
    fail(&mut scenario.errors, "nvmlEventSetWait_v2", UNKNOWN);
    let snapshot = NvmlMachine::new(scenario).read();
    assert_eq!(health_reasons(&snapshot), ["", ""]);
    assert_eq!(snapshot.warnings, ["cannot read driver events: unknown error"]);
    let mut scenario = server_scenario(1);
    fail(&mut scenario.errors, "nvmlEventSetCreate", NOT_SUPPORTED);
    assert_eq!(health_reasons(&NvmlMachine::new(scenario).read()), [""]);
}

#[test]
fn bad_memory_is_unhealthy_if_its_repair_is_pending_or_failed() {
    let mut machine = NvmlMachine::new(server_scenario(4));
    machine.change(|it| {
        let rows =
            |pending, failed| Some(RemappedRows { uncorrectable: 3, pending, failed, ..RemappedRows::default() });
        it.devices[0].remapped = rows(false, false);
        it.devices[1].remapped = rows(true, false);
        it.devices[2].remapped = rows(true, true);
        (it.devices[3].remapped, it.devices[3].retired_pending) = (None, Some(true));
    });
    let reasons = health_reasons(&machine.read());
    assert_eq!(reasons[0], "");
    assert!(reasons[1].contains("reset") && reasons[3].contains("reset"), "{reasons:?}");
    assert!(reasons[2].contains("replace"), "{reasons:?}");
}

#[test]
fn sleeping_devices_are_not_woken_and_are_read_once_awake() {
    let machine = NvmlMachine::new(server_scenario(1));
    let pci = machine.folder().join("sys/bus/pci/devices");
    let device = |place: &str, class: &str, status: &str| {
        let folder = pci.join(place);
        std::fs::create_dir_all(folder.join("power")).unwrap();
        std::fs::write(folder.join("vendor"), "0x10de\n").unwrap();
        std::fs::write(folder.join("class"), format!("{class}\n")).unwrap();
        std::fs::write(folder.join("power/runtime_status"), format!("{status}\n")).unwrap();
    };
    device("0000:18:00.0", "0x030200", "suspended");
    device("0000:18:00.1", "0x040300", "active");
    let mut machine = machine;
    // Opening the library would return this error.
    machine.change(|it| fail(&mut it.errors, "nvmlInit_v2", UNKNOWN));
    let snapshot = machine.read();
    assert_eq!(map_devices(&snapshot, |it| (it.asleep, it.health.clone(), it.pci.unwrap().bus)), [(true, None, 0x18)]);
    machine.change(|it| it.errors.clear());
    device("0000:18:00.0", "0x030200", "active");
    assert_eq!(
        map_devices(&machine.read(), |it| (it.asleep, it.health.clone())),
        [(false, Some(DeviceHealth::Healthy))]
    );
    // The open library stays open.
    device("0000:18:00.0", "0x030200", "suspended");
    assert!(!machine.read().devices[0].asleep);
}

#[test]
fn a_hanging_call_returns_when_the_driver_answers() {
    let mut machine = NvmlMachine::new(server_scenario(1));
    machine.read();
    let stuck = machine.folder().join("stuck");
    std::fs::write(&stuck, "").unwrap();
    machine.change(|it| it.hangs = [("nvmlDeviceGetPowerUsage".into(), stuck.clone())].into());
    let (sender, answer) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| sender.send(machine.nvml.read()));
        wait_for(&stuck.with_added_extension("reached"));
        assert_eq!(answer.try_recv(), Err(mpsc::TryRecvError::Empty));
        std::fs::remove_file(&stuck).unwrap();
        assert_eq!(answer.recv().unwrap().unwrap().devices.len(), 1);
    });
}

/// Waits for the file by which the stand-in signals that the call hangs.
fn wait_for(file: &Path) {
    while !file.exists() {
        std::thread::yield_now();
    }
}

//! Faults of simulated devices and their effect on readings.

use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::Duration;

use gpupool_core::{DeviceHealth, Percent, Share};
use gpupool_devices::simulated::{
    ControlError, DevicePosition, FaultTarget, ManualClock, SimulatedFault, SimulatedLoad, SimulatedSource,
    SimulationControl, SimulationSpec,
};
use gpupool_devices::{DetectedDevice, DeviceSource, Reported, SourceError, SourceReading};

/// Generous deadline, reached only by a failing test.
const PATIENCE: Duration = Duration::from_secs(60);

fn node(text: &str) -> (SimulatedSource, SimulationControl) {
    SimulatedSource::new(&SimulationSpec::parse(text).unwrap(), ManualClock::default().ticking())
}

fn fault(control: &SimulationControl, target: &str, fault: &str) -> usize {
    control.inject_fault(&target.parse().unwrap(), &fault.parse().unwrap()).unwrap()
}

/// Returns the reading of a node with a fault on its second device, and that device without the fault.
fn with_fault(text: &str) -> (SourceReading, DetectedDevice) {
    let (mut source, control) = node("3xH100");
    let before = source.read().unwrap();
    fault(&control, "1", text);
    let during = source.read().unwrap();
    assert_eq!(control.clear_faults(&FaultTarget::Index(1), None), Ok(1));
    assert_eq!(source.read().unwrap(), before, "cleared, it is as it was");
    assert_eq!((&during.devices[0], during.devices.last()), (&before.devices[0], before.devices.last()));
    (during, before.devices[1].clone())
}

fn only_second(text: &str) -> DetectedDevice {
    with_fault(text).0.devices.swap_remove(1)
}

#[test]
fn a_lost_device_is_listed_without_values() {
    let (during, before) = with_fault("lost");
    let lost = &during.devices[1];
    assert_eq!(lost.health, Some(DeviceHealth::Lost));
    assert_eq!((&lost.uuid, lost.pci, lost.minor), (&before.uuid, before.pci, before.minor));
    assert_eq!(lost.utilization, Reported::Failed("GPU is lost".into()));
    assert!(matches!((&lost.memory.used, &lost.processes), (Reported::Failed(_), Reported::Failed(_))));
}

#[test]
fn a_vanished_device_is_not_listed_and_returns_as_the_same() {
    let (during, before) = with_fault("vanish");
    assert_eq!(during.devices.len(), 2);
    assert!(during.devices.iter().all(|device| device.uuid != before.uuid));
    assert_eq!(during.links.len(), 1, "its links went with it");
    assert_eq!((during.links[0].a, during.links[0].b), (0, 1));
}

#[test]
fn a_hot_device_reports_its_temperature_and_is_healthy() {
    let hot = only_second("hot:97");
    assert_eq!((hot.temperature_c, hot.health), (Reported::Value(97), Some(DeviceHealth::Healthy)));
}

#[test]
fn memory_errors_are_judged_by_the_state_of_their_rows() {
    let (remapped, _) = with_fault("ecc:2");
    assert_eq!(remapped.devices[1].health, Some(DeviceHealth::Healthy));
    assert!(remapped.warnings[0].contains("2 uncorrectable memory errors"), "{:?}", remapped.warnings);
    for (text, words) in [("ecc:2:remap_pending", "needs a reset"), ("ecc:3:remap_failed", "needs replacement")] {
        let Some(DeviceHealth::Unhealthy(why)) = only_second(text).health else { panic!("{text} is healthy") };
        assert!(why.contains(words), "{why}");
    }
}

#[test]
fn fields_can_be_unsupported_or_fail_while_others_work() {
    let without = only_second("not_available:memory+utilization");
    assert_eq!(without.utilization, Reported::Unsupported("[N/A]".into()));
    assert!(matches!(
        (&without.memory.total, &without.memory.used),
        (Reported::Unsupported(_), Reported::Unsupported(_))
    ));
    assert!(without.temperature_c.value().is_some() && without.health == Some(DeviceHealth::Healthy));
    let failed = only_second("failed_field:power+power_limit+temperature+processes");
    assert!(matches!((&failed.power, &failed.power_limit), (Reported::Failed(_), Reported::Failed(_))));
    assert!(matches!((&failed.temperature_c, &failed.processes), (Reported::Failed(_), Reported::Failed(_))));
    assert!(failed.memory.used.value().is_some());
}

#[test]
fn a_stuck_counter_shows_full_utilization_of_an_idle_device() {
    let stuck = only_second("stuck_utilization");
    assert_eq!((stuck.utilization, stuck.processes), (Reported::Value(Percent::FULL), Reported::Value(vec![])));
}

#[test]
fn a_squatter_uses_the_device_beside_leases() {
    let (mut source, control) = node("H100");
    control
        .set_load(DevicePosition(0), 1, SimulatedLoad { share: Share(100), pid: Some(10), ..SimulatedLoad::default() })
        .unwrap();
    fault(&control, "all", "squatter:4242:2048:35");
    fault(&control, "all", "squatter:4243:1024:5");
    fault(&control, "all", "squatter:4242:512:35");
    let device = source.read().unwrap().devices.swap_remove(0);
    let seen: Vec<(u32, u64)> =
        device.processes.value().unwrap().iter().map(|p| (p.pid, p.memory.value().unwrap().as_mib())).collect();
    assert_eq!(seen, [(4243, 1024), (4242, 512), (10, 416)], "another one with the same pid is the same one, changed");
    assert_eq!(device.utilization, Reported::Value(Percent(40_000)));
    assert_eq!(control.clear_faults(&FaultTarget::All, Some("squatter")), Ok(2));
}

#[test]
fn a_version_mismatch_fails_the_whole_source_until_it_is_cleared() {
    let (mut source, control) = node("2xH100");
    fault(&control, "0", "mismatch");
    assert!(matches!(source.read(), Err(SourceError::VersionMismatch(_))));
    control.clear_faults(&FaultTarget::All, None).unwrap();
    assert_eq!(source.read().unwrap().devices.len(), 2);
}

/// Reads on another thread, as a probe does.
fn reading(mut source: SimulatedSource) -> Receiver<Result<SourceReading, SourceError>> {
    let (sender, receiver) = channel();
    thread::spawn(move || sender.send(source.read()));
    receiver
}

#[test]
fn a_hung_driver_blocks_the_reading_until_it_is_cleared() {
    let (source, control) = node("2xH100");
    fault(&control, "1", "hung_driver");
    let answer = reading(source);
    assert!(control.wait_for_blocked_reading(PATIENCE));
    assert_eq!(answer.try_recv(), Err(TryRecvError::Empty));
    // Other control calls work meanwhile.
    fault(&control, "0", "hot:91");
    assert_eq!(control.faults().len(), 2);
    assert!(control.wait_for_blocked_reading(PATIENCE), "another fault is no reason to answer");
    control.clear_faults(&FaultTarget::All, Some("hung_driver")).unwrap();
    let snapshot = answer.recv_timeout(PATIENCE).unwrap().unwrap();
    assert_eq!(snapshot.devices[0].temperature_c, Reported::Value(91));
}

#[test]
fn a_hung_driver_fails_the_reading_in_the_end() {
    let (mut source, control) = node("H100");
    fault(&control, "all", "hung_driver:0");
    assert!(matches!(source.read(), Err(SourceError::Unresponsive { .. })));
    assert!(!control.wait_for_blocked_reading(Duration::ZERO));
}

#[test]
fn a_slow_driver_answers_late_or_when_the_fault_is_cleared() {
    let (source, control) = node("H100");
    fault(&control, "all", "slow:3600000");
    let answer = reading(source);
    assert!(control.wait_for_blocked_reading(PATIENCE));
    control.clear_faults(&FaultTarget::All, None).unwrap();
    assert_eq!(answer.recv_timeout(PATIENCE).unwrap().unwrap().devices.len(), 1);
    let (mut source, control) = node("H100");
    fault(&control, "all", "slow:1");
    assert!(source.read().is_ok());
}

#[test]
fn faults_of_a_gpu_affect_all_its_partitions() {
    let (mut source, control) = node("1xH100/3g.40gb*2,1xMI300X/DPX,1xL4");
    for (target, hit) in [("0", 0..3), ("place:2", 0..3), ("place:4", 3..5)] {
        assert_eq!(fault(&control, target, "ecc:1:remap_failed"), 1);
        let snapshot = source.read().unwrap();
        let sick = |device: &DetectedDevice| matches!(device.health, Some(DeviceHealth::Unhealthy(_)));
        let places: Vec<usize> = (0..6).filter(|place| sick(&snapshot.devices[*place])).collect();
        assert_eq!(places, hit.collect::<Vec<_>>(), "{target}");
        control.clear_faults(&FaultTarget::All, None).unwrap();
    }
    fault(&control, "place:4", "stuck_utilization");
    let busy: Vec<bool> = source
        .read()
        .unwrap()
        .devices
        .iter()
        .map(|device| device.utilization == Reported::Value(Percent::FULL))
        .collect();
    assert_eq!(busy, [false, false, false, false, true, false], "a counter is of one device");
    assert_eq!(fault(&control, "all", "squatter:7:100"), 6);
    assert_eq!(source.read().unwrap().devices[0].processes, Reported::Value(vec![]), "a GPU cut by MIG takes no work");
}

#[test]
fn faults_are_injected_and_cleared_by_any_name_of_a_device() {
    let (mut source, control) = node("2xH100,1xMI250X");
    let device = source.read().unwrap().devices.swap_remove(1);
    let uuid = device.uuid.unwrap();
    for target in ["1", "place:1", &*uuid, &uuid.to_uppercase(), &device.pci.unwrap().to_string()] {
        assert_eq!(fault(&control, target, "lost"), 1, "{target}");
        let listed = control.faults();
        assert_eq!(
            (listed[0].place, &listed[0].uuid, &listed[0].fault),
            (DevicePosition(1), &uuid, &SimulatedFault::Lost)
        );
        assert_eq!(control.clear_faults(&target.parse().unwrap(), Some("hot")), Ok(0));
        assert_eq!(control.clear_faults(&target.parse().unwrap(), Some("lost")), Ok(1));
    }
    assert_eq!(fault(&control, "all", "lost"), 4);
    let devices = control.devices();
    assert_eq!(devices.len(), 4);
    assert_eq!(
        control.clear_faults(&FaultTarget::Uuid(devices[2].uuid.clone()), None),
        Ok(2),
        "two dies carry one UUID"
    );
    let error = control.inject_fault(&FaultTarget::Index(9), &SimulatedFault::Lost).unwrap_err().to_string();
    assert!(error.starts_with("no simulated device matches 9; existing devices: GPU-"), "{error}");
    let unsound = serde_json::from_str(r#"{"fault":"squatter","pid":1,"memory_mib":1,"utilization":200}"#).unwrap();
    for error in
        [control.inject_fault(&FaultTarget::All, &unsound), control.clear_faults(&FaultTarget::All, Some("melted"))]
    {
        assert!(matches!(error, Err(ControlError::Fault(_))), "{error:?}");
    }
}

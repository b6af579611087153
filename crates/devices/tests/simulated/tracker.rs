//! The tracker over readings: devices appear, vanish, fail and return.

use gpupool_core::{Bytes, DeviceHealth, GpuId, Millis, PoolTime, Vendor};
use gpupool_devices::{
    DetectedDevice, DevicePartition, DeviceTracker, Reported, SourceError, SourceKind, SourceReading, TrackedChange,
    parse_pci_address,
};

const SOURCE: SourceKind = SourceKind::Nvml;

fn gpu(number: u32) -> DetectedDevice {
    let mut found = DetectedDevice::new(Vendor::Nvidia);
    found.uuid = Some(format!("GPU-{number}").into());
    found.pci = parse_pci_address(&format!("0000:{number:02x}:00.0"));
    found.memory.total = Reported::Value(Bytes(1000));
    found.health = Some(DeviceHealth::Healthy);
    found
}

fn reading(devices: impl IntoIterator<Item = DetectedDevice>) -> Result<SourceReading, SourceError> {
    Ok(SourceReading { devices: devices.into_iter().collect(), ..SourceReading::default() })
}

/// Creates a tracker that has read these GPUs.
fn after(numbers: &[u32]) -> DeviceTracker {
    let mut tracker = DeviceTracker::default();
    tracker.observe(PoolTime(1000), SOURCE, reading(numbers.iter().map(|&number| gpu(number))));
    tracker
}

#[test]
fn a_device_is_gone_after_two_readings_without_it_and_returns_as_the_same() {
    let mut tracker = after(&[1, 2]);
    assert_eq!(tracker.observe(PoolTime(2000), SOURCE, reading([])), []);
    assert_eq!(tracker.devices()[1].health, DeviceHealth::Healthy);
    let gone = tracker.observe(PoolTime(3000), SOURCE, reading([gpu(1)]));
    assert_eq!(gone, [TrackedChange::Vanished(GpuId(1))]);
    assert_eq!(tracker.devices()[1].health, DeviceHealth::Lost);
    assert_eq!(tracker.devices()[1].identity.to_string(), "GPU-2");
    let back = tracker.observe(PoolTime(4000), SOURCE, reading([gpu(2), gpu(1)]));
    assert_eq!(back, [TrackedChange::Returned(GpuId(1)), TrackedChange::Health(GpuId(1), DeviceHealth::Healthy)]);
}

#[test]
fn a_failing_source_removes_no_device_and_its_readings_age() {
    let mut tracker = after(&[1]);
    let hung = || SourceError::Unresponsive { what: "nvml".into(), after: std::time::Duration::from_secs(5) };
    assert_eq!(tracker.observe(PoolTime(6000), SOURCE, Err(hung())), [TrackedChange::SourceFailed(SOURCE, hung())]);
    assert_eq!(tracker.observe(PoolTime(7000), SOURCE, Err(hung())), [], "said once");
    let device = &tracker.devices()[0];
    assert!(device.is_present);
    assert_eq!(device.read_at, PoolTime(1000));
    assert!(device.is_stale(PoolTime(7000), Millis(1000)));
    assert!(!device.is_stale(PoolTime(4000), Millis(1000)));
    assert_eq!(tracker.source_errors().len(), 1);
    assert_eq!(tracker.observe(PoolTime(8000), SOURCE, reading([gpu(1)])), [TrackedChange::SourceBack(SOURCE)]);
    assert_eq!(tracker.devices()[0].read_at, PoolTime(8000));
}

#[test]
fn a_lost_gpu_known_only_by_its_address_is_recognised() {
    let mut tracker = after(&[1, 2]);
    let mut lost = DetectedDevice::new(Vendor::Nvidia);
    lost.pci = parse_pci_address("00000000:02:00.0");
    lost.health = Some(DeviceHealth::Lost);
    let changes = tracker.observe(PoolTime(2000), SOURCE, reading([gpu(1), lost]));
    assert_eq!(changes, [TrackedChange::Health(GpuId(1), DeviceHealth::Lost)]);
    let device = &tracker.devices()[1];
    assert_eq!((device.identity.to_string(), device.found.uuid.as_deref()), ("GPU-2".to_owned(), Some("GPU-2")));
    assert_eq!(device.found.memory.total, Reported::Value(Bytes(1000)));
}

#[test]
fn a_source_does_not_remove_the_devices_of_another() {
    let mut tracker = after(&[1]);
    let mut card = DetectedDevice::new(Vendor::Amd);
    card.pci = parse_pci_address("0000:c1:00.0");
    assert_eq!(
        tracker.observe(PoolTime(1500), SourceKind::AmdSysfs, reading([card])),
        [TrackedChange::Appeared(GpuId(1))]
    );
    for at in [2000, 3000, 4000] {
        tracker.observe(PoolTime(at), SourceKind::AmdSysfs, reading([]));
    }
    assert_eq!(tracker.devices()[0].health, DeviceHealth::Healthy);
    assert_eq!(tracker.devices()[1].health, DeviceHealth::Lost);
}

#[test]
fn a_fault_of_a_gpu_affects_all_its_instances() {
    let mut parent = gpu(1);
    parent.mig = Some(true);
    parent.health = Some(DeviceHealth::Unhealthy("Xid 48".into()));
    let mut instance = gpu(1);
    instance.uuid = Some("MIG-1".into());
    instance.partition = Some(DevicePartition::Mig {
        parent_uuid: None,
        gpu_instance: Some(1),
        compute_instance: Some(0),
        profile: None,
    });
    let mut tracker = DeviceTracker::default();
    tracker.observe(PoolTime(0), SOURCE, reading([parent, instance, gpu(2)]));
    let health: Vec<DeviceHealth> = tracker.devices().iter().map(|device| device.health.clone()).collect();
    let sick = DeviceHealth::Unhealthy("Xid 48".into());
    assert_eq!(health, [sick.clone(), sick, DeviceHealth::Healthy]);
}

#[test]
fn a_device_keeps_its_identity_when_another_with_its_uuid_goes() {
    let die = |number: u32| {
        let mut found = gpu(number);
        found.uuid = Some("GPU-shared".into());
        found
    };
    let mut tracker = DeviceTracker::default();
    tracker.observe(PoolTime(0), SOURCE, reading([die(1), die(2)]));
    tracker.observe(PoolTime(1000), SOURCE, reading([die(2)]));
    let changes = tracker.observe(PoolTime(2000), SOURCE, reading([die(2)]));
    assert_eq!(changes, [TrackedChange::Vanished(GpuId(0))]);
    assert_eq!(tracker.devices().len(), 2);
}

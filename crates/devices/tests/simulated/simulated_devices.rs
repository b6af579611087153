//! Simulated devices and the effect of loads on their readings.

use std::time::Duration;

use gpupool_core::{Bytes, DeviceHealth, LinkKind, Percent, Share, Vendor};
use gpupool_devices::simulated::{
    DevicePosition, LoadError, ManualClock, SimulatedLoad, SimulatedSource, SimulationControl, SimulationSpec,
};
use gpupool_devices::{
    DetectedDevice, DevicePartition, DeviceSource, Milliwatts, Reported, SourceKind, SourceReading, UsedMemoryScope,
};

struct SimulatedNode {
    source: SimulatedSource,
    control: SimulationControl,
    clock: ManualClock,
}

impl SimulatedNode {
    fn of(text: &str) -> Self {
        let clock = ManualClock::default();
        let (source, control) = SimulatedSource::new(&SimulationSpec::load(text).unwrap(), clock.ticking());
        Self { source, control, clock }
    }

    fn after(&mut self, millis: u64) -> SourceReading {
        self.clock.advance(Duration::from_millis(millis));
        self.source.read().unwrap()
    }

    fn first_after(&mut self, millis: u64) -> DetectedDevice {
        self.after(millis).devices.swap_remove(0)
    }
}

fn gib(gib: u64) -> Bytes {
    Bytes(gib << 30)
}

fn mib(mib: u64) -> Bytes {
    Bytes(mib << 20)
}

fn load(share: u32, memory: Bytes) -> SimulatedLoad {
    SimulatedLoad { share: Share(share), memory, ..SimulatedLoad::default() }
}

fn used(device: &DetectedDevice) -> Bytes {
    *device.memory.used.value().unwrap()
}

fn busy(device: &DetectedDevice) -> f64 {
    device.utilization.value().unwrap().as_number()
}

fn warmth(device: &DetectedDevice) -> i16 {
    *device.temperature_c.value().unwrap()
}

fn pids(device: &DetectedDevice) -> Vec<u32> {
    device.processes.value().unwrap().iter().map(|process| process.pid).collect()
}

fn names(snapshot: &SourceReading) -> Vec<String> {
    snapshot.devices.iter().map(|device| device.name.as_deref().unwrap().to_owned()).collect()
}

fn link_between(snapshot: &SourceReading, a: usize, b: usize) -> Option<LinkKind> {
    snapshot.links.iter().find(|link| (link.a, link.b) == (a, b)).map(|link| link.kind)
}

#[test]
fn an_idle_device_reports_the_values_of_its_driver() {
    let mut node = SimulatedNode::of("H100");
    assert_eq!(node.source.kind(), SourceKind::Simulated);
    let idle = node.first_after(0);
    assert_eq!(idle.name.as_deref(), Some("NVIDIA H100 80GB HBM3"));
    assert_eq!((idle.vendor, idle.index, idle.minor), (Vendor::Nvidia, Some(0), Some(0)));
    assert_eq!((idle.mig, idle.partition.clone()), (Some(false), None));
    assert_eq!(idle.memory.total, Reported::Value(mib(81_559)));
    assert_eq!(idle.memory.reserved, Reported::Value(mib(479)));
    assert_eq!(idle.memory.used_means, UsedMemoryScope::WithoutReserved);
    assert_eq!((used(&idle), busy(&idle)), (mib(1), 0.0));
    assert_eq!(
        (idle.power, idle.power_limit),
        (Reported::Value(Milliwatts(70_000)), Reported::Value(Milliwatts(700_000)))
    );
    assert_eq!(idle.processes, Reported::Value(Vec::new()));
    assert_eq!(idle.health, Some(DeviceHealth::Healthy));
}

#[test]
fn a_load_reaches_its_memory_and_share_gradually() {
    let mut node = SimulatedNode::of("H100");
    node.control.set_load(DevicePosition(0), 1, load(500, gib(40))).unwrap();
    let started = node.first_after(0);
    assert!(used(&started) < gib(1), "only what the driver needs for a process");
    assert_eq!(busy(&started), 0.0);
    let halfway = node.first_after(4_000);
    assert!(used(&started) < used(&halfway) && used(&halfway) < gib(30));
    let full = node.first_after(60_000);
    assert!(used(&full) > gib(34) && used(&full) <= gib(40), "{}", used(&full));
    assert!((45.0..=50.0).contains(&busy(&full)), "{}", busy(&full));
    assert!(warmth(&full) >= warmth(&started) + 15);
    assert!(*full.power.value().unwrap() > Milliwatts(300_000) && *full.power.value().unwrap() <= Milliwatts(385_000));
    assert_eq!(full.processes.value().unwrap()[0].memory, Reported::Value(used(&full) - mib(1)));
}

#[test]
fn an_ended_load_stops_at_once_and_frees_its_memory_soon() {
    let mut node = SimulatedNode::of("H100");
    let before = node.first_after(0);
    node.control.set_load(DevicePosition(0), 1, load(1000, gib(40))).unwrap();
    let hot = node.first_after(120_000);
    node.control.clear_load(DevicePosition(0), 1);
    let ended = node.first_after(0);
    assert_eq!((busy(&ended), pids(&ended), used(&ended)), (0.0, vec![], used(&hot)));
    assert_eq!(warmth(&ended), warmth(&hot), "a chip does not cool at once");
    assert!(used(&node.first_after(250)) < used(&hot));
    assert_eq!(used(&node.first_after(250)), used(&before));
    assert_eq!(node.first_after(300_000), before, "as if nothing had been");
}

#[test]
fn several_loads_share_a_device_with_one_process_each() {
    let mut node = SimulatedNode::of("A10");
    node.control
        .set_load(
            DevicePosition(0),
            7,
            SimulatedLoad { pid: Some(4242), name: Some("train".into()), ..load(300, gib(4)) },
        )
        .unwrap();
    node.control.set_load(DevicePosition(0), 8, load(500, gib(8))).unwrap();
    let both = node.first_after(60_000);
    let processes = both.processes.value().unwrap();
    assert_eq!((processes[0].pid, processes[0].name.as_deref()), (4242, Some("train")));
    assert_ne!(processes[1].pid, 4242);
    let sum: u64 = processes.iter().map(|process| process.memory.value().unwrap().0).sum();
    assert_eq!(Bytes(sum) + mib(1), used(&both));
    assert!((70.0..=80.0).contains(&busy(&both)));
    node.control.clear_load(DevicePosition(0), 8);
    let one = node.first_after(1_000);
    assert_eq!(pids(&one), [4242]);
    assert!((27.0..=30.0).contains(&busy(&one)));
}

#[test]
fn too_many_loads_use_no_more_than_the_device_has() {
    let mut node = SimulatedNode::of("T4");
    for holder in 0..5 {
        node.control.set_load(DevicePosition(0), holder, load(900, gib(10))).unwrap();
    }
    let full = node.first_after(60_000);
    assert_eq!(used(&full), mib(15_360 - 388), "all but what the driver keeps");
    assert_eq!(full.utilization, Reported::Value(Percent::FULL));
}

#[test]
fn a_changed_load_continues_from_its_current_usage() {
    let mut node = SimulatedNode::of("A10");
    node.control.set_load(DevicePosition(0), 1, load(400, gib(8))).unwrap();
    let before = node.first_after(60_000);
    node.control.set_load(DevicePosition(0), 1, load(400, gib(8))).unwrap();
    assert_eq!(used(&node.first_after(0)), used(&before), "the same load again changes nothing");
    node.control.set_load(DevicePosition(0), 1, load(800, gib(16))).unwrap();
    let now = node.first_after(0);
    assert_eq!((used(&now), pids(&now)), (used(&before), pids(&before)));
    let later = node.first_after(60_000);
    assert!(used(&later) > gib(13) && busy(&later) >= 72.0);
}

#[test]
fn mig_instances_follow_their_gpu_and_take_load() {
    let mut node = SimulatedNode::of("1xH100/3g.40gb/2g.20gb/1g.10gb,T4");
    let snapshot = node.after(0);
    assert_eq!(snapshot.devices.len(), 5);
    let (gpu, first) = (&snapshot.devices[0], &snapshot.devices[1]);
    assert_eq!((gpu.mig, gpu.partition.clone(), gpu.pci), (Some(true), None, first.pci));
    assert!(first.uuid.as_deref().unwrap().starts_with("MIG-"));
    let partition = DevicePartition::Mig {
        parent_uuid: gpu.uuid.clone(),
        gpu_instance: Some(1),
        compute_instance: Some(0),
        profile: Some("3g.40gb".into()),
    };
    assert_eq!(first.partition, Some(partition));
    let totals: Vec<u64> =
        snapshot.devices.iter().map(|device| device.memory.total.value().unwrap().as_mib()).collect();
    assert_eq!(totals, [81_559, 40_448, 20_096, 9_984, 15_360]);
    assert_eq!(snapshot.devices[4].index, Some(1), "instances have no number of their own");

    assert!(matches!(node.control.set_load(DevicePosition(0), 1, load(1000, gib(1))), Err(LoadError::CutByMig(_))));
    assert!(matches!(node.control.set_load(DevicePosition(9), 1, load(1000, gib(1))), Err(LoadError::NoSuchDevice(_))));
    node.control.set_load(DevicePosition(3), 1, load(1000, gib(5))).unwrap();
    let loaded = node.after(60_000);
    assert!(loaded.devices[..4].iter().all(|device| matches!(device.utilization, Reported::Unsupported(_))));
    assert!(used(&loaded.devices[3]) > gib(4));
    assert!(used(&loaded.devices[0]) > gib(4), "the GPU's memory is that of its instances");
    assert_eq!((pids(&loaded.devices[0]).len(), pids(&loaded.devices[3]).len()), (0, 1));
    assert!(loaded.devices[0].power.value() > gpu.power.value());
    assert!(matches!(loaded.devices[3].power, Reported::Unsupported(_)));
}

#[test]
fn amd_partitions_are_separate_devices_of_one_card() {
    let mut node = SimulatedNode::of("2xMI300X/CPX");
    let idle = node.after(0);
    assert_eq!(idle.devices.len(), 16);
    assert_eq!(idle.devices[0].uuid, idle.devices[7].uuid);
    assert_ne!(idle.devices[0].uuid, idle.devices[8].uuid);
    assert_eq!((idle.devices[0].minor, idle.devices[9].minor), (Some(128), Some(137)));
    let partition = DevicePartition::Amd { id: 1, mode: Some("CPX".into()), parts: Some(8) };
    assert_eq!(idle.devices[9].partition, Some(partition));
    assert_eq!(idle.devices[9].memory.total, Reported::Value(mib(196_592 / 8)));
    assert_eq!(idle.identities()[9].to_string(), format!("{}/1", idle.devices[9].pci.unwrap()));
    assert_eq!(SimulatedNode::of("MI300X").first_after(0).partition, None);

    node.control.set_load(DevicePosition(9), 1, load(1000, gib(20))).unwrap();
    let loaded = node.after(60_000);
    assert!(busy(&loaded.devices[9]) >= 90.0);
    assert_eq!(busy(&loaded.devices[8]), 0.0);
    assert!(loaded.devices[8].power.value() > idle.devices[8].power.value(), "one sensor for the card");
    assert!(matches!(loaded.devices[9].power, Reported::Unsupported(_)));
    assert!(warmth(&loaded.devices[15]) > warmth(&idle.devices[15]), "one chip for all its parts");
}

#[test]
fn the_two_dies_of_an_mi250x_have_one_power_sensor() {
    let mut node = SimulatedNode::of("MI250X");
    node.control.set_load(DevicePosition(1), 1, load(1000, gib(30))).unwrap();
    let snapshot = node.after(60_000);
    let [first, second] = snapshot.devices.as_slice() else { panic!("two devices") };
    assert_eq!(first.uuid, second.uuid);
    assert_ne!(first.pci, second.pci);
    assert!(*first.power.value().unwrap() > Milliwatts(280_000), "the first tells what the second draws");
    assert_eq!(second.power, Reported::Unsupported("N/A (Secondary die)".into()));
    assert!(warmth(second) > warmth(first) + 10);
    assert_eq!(link_between(&snapshot, 0, 1), Some(LinkKind::Xgmi(1)));
}

#[test]
fn a_device_with_unified_memory_reports_no_memory() {
    let mut node = SimulatedNode::of("GB10");
    node.control.set_load(DevicePosition(0), 1, load(500, gib(30))).unwrap();
    let device = node.first_after(60_000);
    assert!(device.memory.unified);
    let none = (&device.memory.total, &device.memory.used, &device.memory.reserved);
    assert!(matches!(none, (Reported::Unsupported(_), Reported::Unsupported(_), Reported::Unsupported(_))));
    assert!(matches!(device.power_limit, Reported::Unsupported(_)));
    assert!(busy(&device) >= 45.0);
    assert!(device.processes.value().unwrap()[0].memory.value().unwrap() > &gib(25));
}

#[test]
fn devices_are_linked_by_the_fabric_of_their_model_or_by_numa_node() {
    let joined = SimulatedNode::of("2xH100,4xL4,2xMI210").after(0);
    let link = |a, b| link_between(&joined, a, b).unwrap();
    assert_eq!(link(0, 1), LinkKind::NvLink(18));
    assert_eq!((link(0, 2), link(2, 3)), (LinkKind::SameNuma, LinkKind::SameNuma));
    assert_eq!((link(3, 4), link(0, 7)), (LinkKind::CrossNuma, LinkKind::CrossNuma));
    assert_eq!(link(6, 7), LinkKind::Xgmi(1));
    assert_eq!(joined.links.len(), 8 * 7 / 2);
    let numa: Vec<u32> = joined.devices.iter().map(|device| device.numa.unwrap()).collect();
    assert_eq!(numa, [0, 0, 0, 0, 1, 1, 1, 1]);
    let hives = SimulatedNode::of("8xMI210").after(0);
    assert_eq!(link_between(&hives, 2, 3), Some(LinkKind::Xgmi(1)));
    assert_eq!(link_between(&hives, 3, 4), Some(LinkKind::CrossNuma), "an MI210 is joined to three others");
}

#[test]
fn the_example_file_describes_the_documented_node() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/simulated-node.toml");
    assert_eq!(SimulationSpec::load(path).unwrap().node(), Some("sim-1"));
    let mut node = SimulatedNode::of(path);
    let snapshot = node.after(0);
    let names = names(&snapshot);
    let count = |wanted: &str| names.iter().filter(|name| name.contains(wanted)).count();
    assert_eq!((count("H100"), count("A100"), count("MI300X"), count("4090"), count("3090")), (4, 6, 8, 1, 2));
    let own = &snapshot.devices[18];
    assert_eq!(own.uuid.as_deref(), Some("GPU-5ca1ab1e-0000-4000-8000-000000000001"));
    assert_eq!(own.pci.unwrap().to_string(), "0000:e1:00.0");
    assert_eq!(
        (own.memory.total.clone(), own.memory.reserved.clone()),
        (Reported::Value(mib(49_140)), Reported::Value(mib(600)))
    );
    assert_eq!((pids(own), used(own), busy(own)), (vec![4242], mib(2_049), 35.0));
    let hot = &snapshot.devices[20];
    assert_eq!((warmth(hot), &hot.power), (95, &Reported::Unsupported("[N/A]".into())));
    assert_eq!(link_between(&snapshot, 19, 20), Some(LinkKind::SameNuma));
}

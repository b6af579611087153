//! Devices and values that the NVML source reads.

use crate::nvml_machine::{NvmlMachine, health_reasons, map_devices};
use gpupool_core::{Bytes, LinkKind, Percent};
use gpupool_devices::{DetectedLink, DevicePartition, Milliwatts, ProcessActivity, Reported, UsedMemoryScope};
use nvml_standin::machines::{
    FUNCTIONS_SINCE_450, FUNCTIONS_SINCE_510, mig_gpu, server_gpu, server_scenario, unified_memory_scenario,
};
use nvml_standin::{NOT_AVAILABLE, NvLink, NvLinkPeer, NvmlScenario, StandInMemory, StandInProcess};

const MIB: u64 = 1 << 20;

#[test]
fn every_device_is_reported_with_its_values() {
    let mut machine = NvmlMachine::new(server_scenario(8));
    let snapshot = machine.read();
    assert_eq!(snapshot.warnings, Vec::<String>::new());
    assert_eq!(snapshot.devices.len(), 8);
    let sixth = &snapshot.devices[5];
    assert_eq!(sixth.name.as_deref(), Some("NVIDIA H100 80GB HBM3"));
    assert_eq!(sixth.uuid.as_deref(), Some("GPU-5ca1ab1e-0000-4000-8000-000000000005"));
    assert_eq!(sixth.pci.unwrap().to_string(), "0000:68:00.0");
    assert_eq!(sixth.driver.as_deref(), Some("570.42.07"));
    assert_eq!(sixth.memory.total, Reported::Value(Bytes(81_559 * MIB)));
    assert_eq!(sixth.memory.reserved, Reported::Value(Bytes(551 * MIB)));
    assert_eq!(sixth.memory.used, Reported::Value(Bytes(5_120 * MIB)));
    assert_eq!(sixth.memory.used_means, UsedMemoryScope::WithoutReserved);
    assert_eq!(sixth.utilization, Reported::Value(Percent(50_000)));
    assert_eq!(sixth.temperature_c, Reported::Value(35));
    assert_eq!(sixth.power, Reported::Value(Milliwatts(75_125)));
    assert_eq!(sixth.power_limit, Reported::Value(Milliwatts(700_000)));
    assert_eq!(sixth.mig, Some(false));
    assert_eq!(health_reasons(&snapshot), [""; 8]);
}

#[test]
fn index_minor_and_pci_address_are_independent() {
    let mut scenario = server_scenario(4);
    scenario.devices.reverse();
    let snapshot = NvmlMachine::new(scenario).read();
    assert_eq!(map_devices(&snapshot, |device| device.index), [Some(0), Some(1), Some(2), Some(3)]);
    assert_eq!(map_devices(&snapshot, |device| device.minor), [Some(0), Some(1), Some(2), Some(3)]);
    assert_eq!(map_devices(&snapshot, |device| device.pci.unwrap().bus), [0x48, 0x38, 0x28, 0x18]);
    let snapshot = NvmlMachine::new(server_scenario(4)).read();
    assert_eq!(map_devices(&snapshot, |device| device.minor), [Some(3), Some(2), Some(1), Some(0)]);
}

#[test]
fn values_are_read_again_each_time() {
    let mut machine = NvmlMachine::new(server_scenario(1));
    machine.read();
    machine.change(|it| {
        it.devices[0].utilization = Some(101);
        it.devices[0].temperature_c = None;
        it.devices[0].errors.insert("nvmlDeviceGetPowerUsage".into(), 4);
    });
    let snapshot = machine.read();
    let device = &snapshot.devices[0];
    assert_eq!(device.utilization, Reported::Failed("impossible value: 101 %".into()));
    assert_eq!(device.temperature_c, Reported::Unsupported("not supported".into()));
    assert_eq!(device.power, Reported::Failed("no permission".into()));
    assert_eq!(device.power_limit, Reported::Value(Milliwatts(700_000)));
    assert_eq!(health_reasons(&snapshot), [""]);
}

#[test]
fn instances_follow_their_parent_gpu() {
    let mut scenario = server_scenario(2);
    scenario.devices[0] = mig_gpu();
    let mut machine = NvmlMachine::new(scenario);
    machine.change(|it| {
        let mig = it.devices[0].mig.as_mut().unwrap();
        mig.slots[1].as_mut().unwrap().compute = vec![StandInProcess { pid: 77, memory: 5 * MIB }];
    });
    let snapshot = machine.read();
    assert_eq!(snapshot.devices.len(), 5);
    let [whole, first, second, third, other] = &snapshot.devices[..] else { panic!() };
    assert_eq!((whole.mig, &whole.partition), (Some(true), &None));
    assert_eq!(whole.utilization, Reported::Unsupported("not supported".into()));
    assert_eq!(whole.processes.value().unwrap().len(), 1);
    let profile = |device: &gpupool_devices::DetectedDevice| match &device.partition {
        Some(DevicePartition::Mig { parent_uuid, gpu_instance, compute_instance, profile }) => {
            assert_eq!(parent_uuid, &whole.uuid);
            (gpu_instance.unwrap(), compute_instance.unwrap(), profile.as_deref().unwrap().to_owned())
        }
        _ => panic!("{device:?}"),
    };
    assert_eq!(profile(first), (7, 0, "1g.10gb".into()));
    assert_eq!(profile(second), (9, 0, "1g.10gb".into()));
    assert_eq!(profile(third), (2, 0, "2g.20gb".into()));
    assert_eq!(third.uuid.as_deref(), Some("MIG-0dd5ca1e-0000-5000-8000-000000000002"));
    assert_eq!(third.pci, whole.pci);
    assert_eq!(third.memory.total, Reported::Value(Bytes(20_096 * MIB)));
    assert!(!third.memory.unified);
    assert!(matches!(third.utilization, Reported::Unsupported(_)));
    assert_eq!(first.processes, Reported::Value(Vec::new()));
    assert_eq!(second.processes.value().unwrap()[0].pid, 77);
    assert_eq!(other.partition, None);
}

#[test]
fn the_profile_of_an_unnamed_instance_follows_from_its_slices() {
    let mut gpu = mig_gpu();
    gpu.mig.as_mut().unwrap().slots[4].as_mut().unwrap().profile.clear();
    let snapshot = NvmlMachine::new(NvmlScenario { devices: vec![gpu], ..server_scenario(0) }).read();
    assert!(matches!(&snapshot.devices[3].partition,
        Some(DevicePartition::Mig { profile: Some(profile), .. }) if &**profile == "2g.20gb"));
}

#[test]
fn created_and_destroyed_instances_are_noticed() {
    let mut machine = NvmlMachine::new(NvmlScenario { devices: vec![mig_gpu()], ..server_scenario(0) });
    assert_eq!(machine.read().devices.len(), 4);
    machine.change(|it| it.devices[0].mig.as_mut().unwrap().slots[1] = None);
    assert_eq!(machine.read().devices.len(), 3);
    machine.change(|it| it.devices[0].mig.as_mut().unwrap().slots[0].as_mut().unwrap().uuid = "MIG-new".into());
    assert_eq!(machine.read().devices[1].uuid.as_deref(), Some("MIG-new"));
    machine.change(|it| it.devices[0].mig.as_mut().unwrap().on = false);
    let snapshot = machine.read();
    assert_eq!(map_devices(&snapshot, |device| device.mig), [Some(false)]);
}

#[test]
fn an_older_library_is_read_by_its_own_functions_with_the_scope_of_used_memory() {
    let older: Vec<&str> = FUNCTIONS_SINCE_510.to_vec();
    let oldest: Vec<&str> = FUNCTIONS_SINCE_510.into_iter().chain(FUNCTIONS_SINCE_450).collect();
    for missing in [older, oldest] {
        let mut machine = NvmlMachine::without(server_scenario(2), &missing);
        for _ in 0..2 {
            let snapshot = machine.read();
            let device = &snapshot.devices[1];
            assert_eq!(device.memory.used, Reported::Value(Bytes((1_024 + 551) * MIB)));
            assert_eq!(device.memory.used_means, UsedMemoryScope::WithReserved);
            assert!(matches!(device.memory.reserved, Reported::Unsupported(_)));
            let processes = device.processes.value().unwrap();
            assert_eq!((processes[0].pid, &processes[0].memory), (4_001, &Reported::Value(Bytes(1_000 * MIB))));
            assert_eq!(health_reasons(&snapshot), [""; 2]);
        }
    }
}

#[test]
fn a_newer_library_is_read_by_its_replacement_functions() {
    let snapshot = NvmlMachine::without(server_scenario(1), &["nvmlDeviceGetTemperature"]).read();
    assert_eq!(snapshot.devices[0].temperature_c, Reported::Value(30));
}

#[test]
fn a_function_refused_by_the_driver_is_replaced() {
    let mut scenario = server_scenario(1);
    for name in FUNCTIONS_SINCE_510 {
        scenario.errors.insert(name.into(), 13);
    }
    let snapshot = NvmlMachine::new(scenario).read();
    assert_eq!(snapshot.devices[0].memory.used_means, UsedMemoryScope::WithReserved);
    assert_eq!(snapshot.devices[0].processes.value().unwrap().len(), 1);
}

#[test]
fn a_device_without_own_memory_reports_its_other_values() {
    let snapshot = NvmlMachine::new(unified_memory_scenario()).read();
    let device = &snapshot.devices[0];
    assert!(device.memory.unified);
    assert!(matches!(device.memory.total, Reported::Unsupported(_)));
    assert!(matches!(device.memory.used, Reported::Unsupported(_)));
    assert!(matches!(device.power_limit, Reported::Unsupported(_)));
    assert_eq!(device.pci.unwrap().domain, 0xf);
    assert_eq!(device.utilization, Reported::Value(Percent(4_000)));
    assert_eq!(health_reasons(&snapshot), [""]);
}

#[test]
fn a_process_with_unknown_memory_is_listed() {
    let mut machine = NvmlMachine::new(server_scenario(1));
    machine.change(|it| {
        it.devices[0].compute =
            vec![StandInProcess { pid: 9, memory: NOT_AVAILABLE }, StandInProcess { pid: 10, memory: 2 * MIB }];
        it.devices[0].graphics =
            vec![StandInProcess { pid: 10, memory: 2 * MIB }, StandInProcess { pid: 3, memory: MIB }];
    });
    let snapshot = machine.read();
    let reported: Vec<_> =
        snapshot.devices[0].processes.value().unwrap().iter().map(|it| (it.pid, it.activity)).collect();
    assert_eq!(reported, [(9, ProcessActivity::Compute), (10, ProcessActivity::Both), (3, ProcessActivity::Graphics)]);
    assert!(matches!(snapshot.devices[0].processes.value().unwrap()[0].memory, Reported::Unsupported(_)));
}

#[test]
fn a_long_list_of_processes_is_complete() {
    let mut scenario = server_scenario(1);
    scenario.devices[0].compute = (1..=500).map(|pid| StandInProcess { pid, memory: u64::from(pid) }).collect();
    let snapshot = NvmlMachine::new(scenario).read();
    let processes = snapshot.devices[0].processes.value().unwrap();
    assert_eq!(processes.len(), 500);
    assert_eq!(processes[499].memory, Reported::Value(Bytes(500)));
}

#[test]
fn a_refused_process_list_is_not_an_empty_one() {
    let mut scenario = server_scenario(1);
    scenario.devices[0].errors.insert("nvmlDeviceGetGraphicsRunningProcesses_v3".into(), 4);
    assert!(matches!(NvmlMachine::new(scenario).read().devices[0].processes, Reported::Failed(_)));
}

#[test]
fn links_through_switches_connect_every_pair() {
    let mut scenario = server_scenario(3);
    for link in &mut scenario.devices[2].links[12..] {
        link.up = false;
    }
    let links = NvmlMachine::new(scenario).read().links;
    let link = |a, b, lanes| DetectedLink { a, b, kind: LinkKind::NvLink(lanes) };
    assert_eq!(links, [link(0, 1, 18), link(0, 2, 12), link(1, 2, 12)]);
}

#[test]
fn direct_links_connect_their_ends_and_the_bus_all_others() {
    let mut scenario = server_scenario(6);
    for device in &mut scenario.devices {
        device.links.clear();
    }
    let to = |remote: &str| NvLink { up: true, remote: remote.into(), end: NvLinkPeer::Gpu };
    let (first, second) = (scenario.devices[0].pci.clone(), scenario.devices[1].pci.clone());
    scenario.devices[0].links = vec![to(&second), to(&second.to_lowercase()), NvLink { up: false, ..to(&second) }];
    scenario.devices[1].links = vec![to(&first), to(&first)];
    scenario.nearness = vec![(0, 2, 10), (0, 3, 20), (0, 4, 30), (0, 5, 40), (1, 2, 50), (2, 3, 0), (3, 4, 77)];
    let links = NvmlMachine::new(scenario).read().links;
    let link = |a, b, kind| DetectedLink { a, b, kind };
    assert_eq!(
        links,
        [
            link(0, 1, LinkKind::NvLink(2)),
            link(0, 2, LinkKind::PcieSwitch),
            link(0, 3, LinkKind::PcieSwitches),
            link(0, 4, LinkKind::HostBridge),
            link(0, 5, LinkKind::SameNuma),
            link(1, 2, LinkKind::CrossNuma),
            link(2, 3, LinkKind::PcieSwitch),
        ]
    );
}

#[test]
fn links_connect_whole_gpus_but_no_instances() {
    let mut scenario = server_scenario(2);
    scenario.devices[0] = mig_gpu();
    let links = NvmlMachine::new(scenario).read().links;
    assert_eq!(links, [DetectedLink { a: 0, b: 4, kind: LinkKind::NvLink(18) }]);
}

#[test]
fn the_numa_node_comes_from_the_kernel() {
    let mut machine = NvmlMachine::new(server_scenario(2));
    for (place, node) in [("0000:18:00.0", "1\n"), ("0000:28:00.0", "-1\n")] {
        let folder = machine.folder().join("sys/bus/pci/devices").join(place);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("numa_node"), node).unwrap();
    }
    assert_eq!(map_devices(&machine.read(), |device| device.numa), [Some(1), None]);
}

#[test]
fn full_memory_is_reported_exactly() {
    let mut scenario = server_scenario(1);
    let full = StandInMemory { total: 10 * MIB, reserved: MIB, used: 9 * MIB };
    scenario.devices[0] = nvml_standin::StandInDevice { memory: Some(full), ..server_gpu(0) };
    let snapshot = NvmlMachine::new(scenario).read();
    assert_eq!(snapshot.devices[0].memory.used_by_programs(), Reported::Value(Bytes(9 * MIB)));
}

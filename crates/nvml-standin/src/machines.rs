//! Machines to begin with; a test changes what it is about.

use crate::scenario::{Link, LinkEnd, Memory, Mig, MigInstance, Process, Remapped, Scenario, StandIn};

const MIB: u64 = 1 << 20;

/// So many GPUs of a server kind, joined by switches, in the order of the bus but with other minor numbers.
pub fn server(gpus: u32) -> Scenario {
    let pairs = (0..gpus).flat_map(|a| (a + 1..gpus).map(move |b| (a, b)));
    Scenario {
        driver: "570.42.07".into(),
        devices: (0..gpus).map(server_gpu).collect(),
        nearness: pairs.map(|(a, b)| (a, b, if a / 4 == b / 4 { 20 } else { 50 })).collect(),
        ..Scenario::default()
    }
}

/// One GPU of that kind.
pub fn server_gpu(number: u32) -> StandIn {
    let to_switch =
        |link: u32| Link { up: true, remote: format!("00000000:{:02X}:00.0", 0xa0 + link / 5), end: LinkEnd::Switch };
    StandIn {
        uuid: format!("GPU-5ca1ab1e-0000-4000-8000-00000000{number:04x}"),
        name: "NVIDIA H100 80GB HBM3".into(),
        pci: format!("00000000:{:02X}:00.0", 0x18 + 0x10 * number),
        minor: Some(number ^ 3),
        memory: Some(Memory { total: 81_559 * MIB, reserved: 551 * MIB, used: 1_024 * MIB * u64::from(number) }),
        utilization: Some(10 * number),
        temperature_c: Some(30 + number),
        power_mw: Some(70_125 + 1_000 * number),
        power_limit_mw: Some(700_000),
        remapped: Some(Remapped::default()),
        tells_xids: true,
        compute: vec![Process { pid: 4_000 + number, memory: 1_000 * MIB * u64::from(number) }],
        links: (0..18).map(to_switch).collect(),
        mig: Some(Mig { on: false, slots: vec![None; 7] }),
        ..StandIn::default()
    }
}

/// A GPU cut into three instances, with holes between them.
pub fn cut_gpu() -> StandIn {
    let instance = |gpu_instance: u32, slices: u32, mib: u64| MigInstance {
        uuid: format!("MIG-0dd5ca1e-0000-5000-8000-00000000{gpu_instance:04x}"),
        profile: format!("{slices}g.{}gb", slices * 10),
        gpu_instance,
        compute_instance: 0,
        gpu_slices: slices,
        compute_slices: slices,
        memory: Memory { total: mib * MIB, reserved: 15 * MIB, used: 20 * MIB },
        compute: Vec::new(),
    };
    let mut slots = vec![None; 7];
    slots[0] = Some(instance(7, 1, 9_856));
    slots[1] = Some(instance(9, 1, 9_856));
    slots[4] = Some(instance(2, 2, 20_096));
    StandIn { utilization: None, compute: Vec::new(), mig: Some(Mig { on: true, slots }), ..server_gpu(0) }
}

/// A small machine whose GPU has no memory of its own.
pub fn unified() -> Scenario {
    let gpu = StandIn {
        uuid: "GPU-0e1f1ed0-0000-4000-8000-000000000001".into(),
        name: "NVIDIA GB10".into(),
        pci: "0000000F:01:00.0".into(),
        minor: Some(0),
        utilization: Some(4),
        temperature_c: Some(41),
        power_mw: Some(4_310),
        compute: vec![Process { pid: 812, memory: 300 * MIB }],
        ..StandIn::default()
    };
    Scenario { driver: "580.11".into(), devices: vec![gpu], ..Scenario::default() }
}

/// Functions that came with driver 510 and later.
pub const SINCE_510: [&str; 3] = [
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
];

/// Functions that a library of about driver 440 has not, besides those.
pub const SINCE_450: [&str; 9] = [
    "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetGraphicsRunningProcesses_v2",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetAttributes_v2",
    "nvmlEventSetWait_v2",
];

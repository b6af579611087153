//! Example machines, which tests modify.

use crate::scenario::{
    MigLayout, NvLink, NvLinkPeer, NvmlScenario, RemappedRows, StandInDevice, StandInMemory, StandInMigInstance,
    StandInProcess,
};

const MIB: u64 = 1 << 20;

/// Creates a server with this many GPUs, linked by switches, in bus order but with other minor numbers.
pub fn server_scenario(gpus: u32) -> NvmlScenario {
    let pairs = (0..gpus).flat_map(|a| (a + 1..gpus).map(move |b| (a, b)));
    NvmlScenario {
        driver: "570.42.07".into(),
        devices: (0..gpus).map(server_gpu).collect(),
        nearness: pairs.map(|(a, b)| (a, b, if a / 4 == b / 4 { 20 } else { 50 })).collect(),
        ..NvmlScenario::default()
    }
}

/// Creates one GPU of that server.
pub fn server_gpu(number: u32) -> StandInDevice {
    let to_switch = |link: u32| NvLink {
        up: true,
        remote: format!("00000000:{:02X}:00.0", 0xa0 + link / 5),
        end: NvLinkPeer::Switch,
    };
    StandInDevice {
        uuid: format!("GPU-5ca1ab1e-0000-4000-8000-00000000{number:04x}"),
        name: "NVIDIA H100 80GB HBM3".into(),
        pci: format!("00000000:{:02X}:00.0", 0x18 + 0x10 * number),
        minor: Some(number ^ 3),
        memory: Some(StandInMemory { total: 81_559 * MIB, reserved: 551 * MIB, used: 1_024 * MIB * u64::from(number) }),
        utilization: Some(10 * number),
        temperature_c: Some(30 + number),
        power_mw: Some(70_125 + 1_000 * number),
        power_limit_mw: Some(700_000),
        remapped: Some(RemappedRows::default()),
        tells_xids: true,
        compute: vec![StandInProcess { pid: 4_000 + number, memory: 1_000 * MIB * u64::from(number) }],
        links: (0..18).map(to_switch).collect(),
        mig: Some(MigLayout { on: false, slots: vec![None; 7] }),
        ..StandInDevice::default()
    }
}

/// Creates a GPU with three MIG instances and empty slots between them.
pub fn mig_gpu() -> StandInDevice {
    let instance = |gpu_instance: u32, slices: u32, mib: u64| StandInMigInstance {
        uuid: format!("MIG-0dd5ca1e-0000-5000-8000-00000000{gpu_instance:04x}"),
        profile: format!("{slices}g.{}gb", slices * 10),
        gpu_instance,
        compute_instance: 0,
        gpu_slices: slices,
        compute_slices: slices,
        memory: StandInMemory { total: mib * MIB, reserved: 15 * MIB, used: 20 * MIB },
        compute: Vec::new(),
    };
    let mut slots = vec![None; 7];
    slots[0] = Some(instance(7, 1, 9_856));
    slots[1] = Some(instance(9, 1, 9_856));
    slots[4] = Some(instance(2, 2, 20_096));
    StandInDevice { utilization: None, compute: Vec::new(), mig: Some(MigLayout { on: true, slots }), ..server_gpu(0) }
}

/// Creates a small machine whose GPU has no memory of its own.
pub fn unified_memory_scenario() -> NvmlScenario {
    let gpu = StandInDevice {
        uuid: "GPU-0e1f1ed0-0000-4000-8000-000000000001".into(),
        name: "NVIDIA GB10".into(),
        pci: "0000000F:01:00.0".into(),
        minor: Some(0),
        utilization: Some(4),
        temperature_c: Some(41),
        power_mw: Some(4_310),
        compute: vec![StandInProcess { pid: 812, memory: 300 * MIB }],
        ..StandInDevice::default()
    };
    NvmlScenario { driver: "580.11".into(), devices: vec![gpu], ..NvmlScenario::default() }
}

/// Functions added by driver 510 and later.
pub const FUNCTIONS_SINCE_510: [&str; 3] = [
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
];

/// Functions that a library of about driver 440 also lacks.
pub const FUNCTIONS_SINCE_450: [&str; 9] = [
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

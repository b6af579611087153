//! Failures of any function on one GPU leave the readings of other GPUs unchanged.

use crate::nvml_machine::{NvmlMachine, nvml_paths};
use gpupool_core::DeviceHealth;
use gpupool_devices::{DetectedDevice, DeviceSource, NvmlSource, SourceReading};
use nvml_standin::machines::{mig_gpu, server_gpu, server_scenario};
use nvml_standin::{NvmlScenario, StandInDevice, write_scenario};
use proptest::prelude::*;

/// Error codes that do not concern the driver as a whole.
const CODES: [u32; 11] = [2, 3, 4, 6, 11, 13, 15, 16, 26, 28, 999];
const FUNCTIONS: [&str; 18] = [
    "*",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceRegisterEvents",
];

/// Three GPUs, of which the middle one fails.
fn machine() -> NvmlScenario {
    let middle = StandInDevice { uuid: "GPU-of-trouble".into(), pci: "00000000:99:00.0".into(), ..mig_gpu() };
    NvmlScenario { devices: vec![server_gpu(0), middle, server_gpu(2)], ..server_scenario(0) }
}

fn whole(snapshot: &SourceReading, wanted: impl Fn(u32) -> bool) -> Vec<DetectedDevice> {
    let wanted = |device: &&DetectedDevice| device.partition.is_none() && device.index.is_some_and(&wanted);
    snapshot.devices.iter().filter(wanted).cloned().collect()
}

#[test]
fn any_failure_of_one_gpu_leaves_the_others_unchanged() {
    let machine = NvmlMachine::new(machine());
    let change = |scenario: &NvmlScenario| write_scenario(machine.folder(), scenario).unwrap();
    let failure = (prop::sample::select(FUNCTIONS.to_vec()), prop::sample::select(CODES.to_vec()));
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    let failures = prop::collection::vec(failure, 1..6);
    proptest!(config, |(failures in failures, from_the_start in any::<bool>())| {
        let mut world = machine.scenario.clone();
        change(&world);
        let mut nvml = NvmlSource::new(&nvml_paths(machine.folder()));
        let before = nvml.read().unwrap();
        if from_the_start {
            nvml = NvmlSource::new(&nvml_paths(machine.folder()));
        }
        for (function, code) in failures {
            world.devices[1].errors.insert(function.into(), code);
            change(&world);
            for _ in 0..2 {
                let snapshot = nvml.read().unwrap();
                prop_assert_eq!(whole(&snapshot, |index| index != 1), whole(&before, |index| index != 1));
                let bad = whole(&snapshot, |index| index == 1);
                prop_assert_eq!(bad.len(), 1);
                prop_assert!(from_the_start || bad[0].uuid == Some("GPU-of-trouble".into()));
            }
        }
        change(&machine.scenario);
        let after = nvml.read().unwrap();
        prop_assert_eq!(whole(&after, |index| index != 1), whole(&before, |index| index != 1));
        prop_assert!(from_the_start || whole(&after, |_| true).len() == 3);
        prop_assert_eq!(&whole(&after, |index| index == 1)[0].health, &Some(DeviceHealth::Healthy));
    });
}

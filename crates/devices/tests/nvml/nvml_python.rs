//! Third-party programs accept the stand-in as NVIDIA's library.
//!
//! The programs are installed once with pip below cargo's target folder. Without Python or a network the tests are
//! skipped with a message.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use crate::nvml_machine::NvmlMachine;
use nvml_standin::machines::{mig_gpu, server_scenario, unified_memory_scenario};
use nvml_standin::{NvmlScenario, StandInProcess};
use serde_json::Value;

const PACKAGES: [&str; 3] = ["nvidia-ml-py==13.615.71", "gpustat==1.1.1", "nvitop==1.7.2"];

#[test]
fn gpustat_lists_the_devices() {
    let Some(python) = python("gpustat_lists_the_devices") else { return };
    let machine = NvmlMachine::new(server_scenario(8));
    let output = on(&machine, &python.with_file_name("gpustat"), &["--json", "--no-processes"]);
    let listed: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    assert_eq!(listed["driver_version"], "570.42.07");
    let gpus = listed["gpus"].as_array().unwrap();
    assert_eq!(gpus.len(), 8);
    let gpu = &gpus[5];
    assert_eq!(gpu["uuid"], "GPU-5ca1ab1e-0000-4000-8000-000000000005");
    assert_eq!(gpu["name"], "NVIDIA H100 80GB HBM3");
    assert_eq!(gpu["memory.total"], 81_559);
    assert_eq!(gpu["utilization.gpu"], 50);
    assert_eq!(gpu["temperature.gpu"], 35);
    assert_eq!(gpu["power.draw"], 75);
    assert_eq!(gpu["enforced.power.limit"], 700);
}

#[test]
fn gpustat_lists_a_device_without_memory_of_its_own() {
    let Some(python) = python("gpustat_lists_a_device_without_memory_of_its_own") else { return };
    let output = on(
        &NvmlMachine::new(unified_memory_scenario()),
        &python.with_file_name("gpustat"),
        &["--json", "--no-processes"],
    );
    let listed: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    assert_eq!(listed["gpus"][0]["name"], "NVIDIA GB10");
    assert_eq!(listed["gpus"][0]["memory.total"], Value::Null);
}

#[test]
fn nvitop_lists_the_devices_and_their_processes() {
    let Some(python) = python("nvitop_lists_the_devices_and_their_processes") else { return };
    const SCRIPT: &str = "
import json
from nvitop import Device
print(json.dumps([[d.uuid(), d.memory_used(), d.gpu_utilization(), list(d.processes())] for d in Device.all()]))
";
    let mut scenario = server_scenario(2);
    // nvitop asks the kernel about the process, so it must exist.
    scenario.devices[1].compute[0].pid = std::process::id();
    let output = on(&NvmlMachine::new(scenario), &python, &["-c", SCRIPT]);
    let reported: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    assert_eq!(
        reported[1],
        serde_json::json!(["GPU-5ca1ab1e-0000-4000-8000-000000000001", 1_u64 << 30, 10, [std::process::id()]])
    );
}

#[test]
fn nvidias_own_python_binding_reads_what_the_scenario_says() {
    let Some(python) = python("nvidias_own_python_binding_reads_what_the_scenario_says") else { return };
    let mut first = mig_gpu();
    let instance = first.mig.as_mut().unwrap().slots[4].as_mut().unwrap();
    instance.compute = vec![StandInProcess { pid: 41, memory: 6 << 20 }];
    let machine = NvmlMachine::new(NvmlScenario { devices: vec![first], ..server_scenario(0) });
    const SCRIPT: &str = r#"
import json, pynvml as n
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
parts = []
for slot in range(n.nvmlDeviceGetMaxMigDeviceCount(gpu)):
    try:
        part = n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot)
    except n.NVMLError_NotFound:
        continue
    parts.append([slot, n.nvmlDeviceGetUUID(part), n.nvmlDeviceGetName(part), n.nvmlDeviceGetGpuInstanceId(part),
                  n.nvmlDeviceGetAttributes(part).memorySizeMB,
                  [[p.pid, p.usedGpuMemory, p.gpuInstanceId] for p in n.nvmlDeviceGetComputeRunningProcesses(part)]])
memory = n.nvmlDeviceGetMemoryInfo(gpu, version=n.nvmlMemory_v2)
try:
    n.nvmlDeviceGetUtilizationRates(gpu)
    busy = True
except n.NVMLError_NotSupported:
    busy = None
print(json.dumps({
    "driver": n.nvmlSystemGetDriverVersion(), "count": n.nvmlDeviceGetCount(),
    "pci": n.nvmlDeviceGetPciInfo(gpu).busId, "minor": n.nvmlDeviceGetMinorNumber(gpu),
    "mig": n.nvmlDeviceGetMigMode(gpu), "reserved": memory.reserved, "v1": n.nvmlDeviceGetMemoryInfo(gpu).used,
    "rows": n.nvmlDeviceGetRemappedRows(gpu), "link": n.nvmlDeviceGetNvLinkState(gpu, 3), "busy": busy,
    "parts": parts}))
n.nvmlShutdown()
"#;
    let output = on(&machine, &python, &["-c", SCRIPT]);
    let reported: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    assert_eq!(
        reported,
        serde_json::json!({
            "driver": "570.42.07", "count": 1, "pci": "00000000:18:00.0", "minor": 3, "mig": [1, 1],
            "reserved": 551_u64 << 20, "v1": 551_u64 << 20, "rows": [0, 0, 0, 0], "link": 1, "busy": null,
            "parts": [
                [0, "MIG-0dd5ca1e-0000-5000-8000-000000000007", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 7, 9_856, []],
                [1, "MIG-0dd5ca1e-0000-5000-8000-000000000009", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9, 9_856, []],
                [4, "MIG-0dd5ca1e-0000-5000-8000-000000000002", "NVIDIA H100 80GB HBM3 MIG 2g.20gb", 2, 20_096,
                 [[41, 6_u64 << 20, 2]]],
            ],
        })
    );
}

/// Runs a program with the machine's library first in its library path.
fn on(machine: &NvmlMachine, program: &Path, args: &[&str]) -> Output {
    Command::new(program).args(args).env("LD_LIBRARY_PATH", machine.folder()).output().unwrap()
}

/// Returns a Python with the packages, or reports `test` as skipped.
fn python(test: &str) -> Option<PathBuf> {
    static MADE: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    match MADE.get_or_init(make) {
        Ok(python) => Some(python.clone()),
        Err(why) => {
            crate::skipped::skipped(test, why);
            None
        }
    }
}

fn make() -> Result<PathBuf, String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("python");
    let (python, done) = (folder.join("bin/python"), folder.join("complete"));
    if std::fs::read_to_string(&done).is_ok_and(|made| made == PACKAGES.join(" ")) {
        return Ok(python);
    }
    // Removes an incomplete or outdated installation.
    let _ = std::fs::remove_dir_all(&folder);
    run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
    run(Command::new(&python)
        .args(["-m", "pip", "install", "--quiet", "--retries", "1", "--timeout", "20"])
        .args(PACKAGES))?;
    std::fs::write(done, PACKAGES.join(" ")).map_err(|error| error.to_string())?;
    Ok(python)
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let last = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().lines().last().unwrap_or_default().to_owned();
    if output.status.success() { Ok(()) } else { Err(format!("{command:?}: {}", last(&output.stderr))) }
}

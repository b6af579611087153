//! Variants of the output of nvidia-smi by drivers, cards and shells.

use gpupool_core::{Bytes, DeviceHealth};
use gpupool_devices::capture::CaptureFormat;
use gpupool_devices::{Milliwatts, ProcessActivity, Reported, SourceError, SourceReading};

/// Parses a text in its detected format.
fn parsed(text: &str) -> Result<SourceReading, SourceError> {
    CaptureFormat::detect(text).and_then(|format| format.parse(text)).unwrap()
}

fn read(text: &str) -> SourceReading {
    parsed(text).unwrap()
}

fn code(text: &str) -> &'static str {
    parsed(text).unwrap_err().code()
}

fn xml(gpu: &str) -> String {
    format!(
        "<?xml version=\"1.0\" ?><nvidia_smi_log><driver_version>570.1</driver_version><attached_gpus>1</attached_gpus>\
         <gpu id=\"00000009:01:00.0\">{gpu}</gpu></nvidia_smi_log>"
    )
}

#[test]
fn a_gpu_without_any_readable_value_is_unhealthy() {
    let row = |cell: &str| {
        format!(
            "index, memory.used [MiB], temperature.gpu, power.draw [W]\n0, {cell}, {cell}, {cell}\n1, 3 MiB, 5, {cell}\n"
        )
    };
    let failed = read(&row("[Unknown Error]"));
    let why = "the driver cannot read the GPU: [Unknown Error]";
    assert_eq!(failed.devices[0].health, Some(DeviceHealth::Unhealthy(why.into())));
    assert_eq!(failed.devices[1].health, Some(DeviceHealth::Healthy));
    assert_eq!(read(&row("[Insufficient Permissions]")).devices[0].health, None);
}

#[test]
fn hidden_memory_in_mig_mode_is_not_unified_memory() {
    let hidden =
        "<mig_mode><current_mig>Enabled</current_mig></mig_mode><fb_memory_usage><total>N/A</total></fb_memory_usage>";
    let device = &read(&xml(hidden)).devices[0];
    assert_eq!((device.mig, device.memory.unified), (Some(true), false));
}

#[test]
fn power_is_read_of_the_gpu_and_not_of_its_module_or_memory() {
    let power = |section: &str, watts: u32| {
        format!(
            "<{section}><power_draw>{watts}.5 W</power_draw><current_power_limit>{watts} W</current_power_limit></{section}>"
        )
    };
    let gpu = [("module_power_readings", 900), ("gpu_memory_power_readings", 30), ("gpu_power_readings", 80)]
        .map(|(section, watts)| power(section, watts))
        .concat();
    let device = &read(&xml(&gpu)).devices[0];
    assert_eq!(
        (&device.power, &device.power_limit),
        (&Reported::Value(Milliwatts(80_500)), &Reported::Value(Milliwatts(80_000)))
    );
}

#[test]
fn processes_of_old_drivers_are_compute_processes() {
    let process =
        "<process_info><pid>11</pid><process_name>a</process_name><used_memory>85 MB</used_memory></process_info>";
    let old = read(&xml(&format!("<compute_processes>{process}</compute_processes>")));
    let processes = old.devices[0].processes.value().unwrap();
    assert_eq!((processes[0].pid, processes[0].activity), (11, ProcessActivity::Compute));
    assert_eq!(processes[0].memory, Reported::Value(Bytes(85 << 20)));
}

#[test]
fn a_hardware_slowdown_is_a_warning() {
    let clocks = "<clocks_event_reasons><clocks_event_reason_hw_power_brake_slowdown>Active\
                  </clocks_event_reason_hw_power_brake_slowdown></clocks_event_reasons>";
    assert_eq!(read(&xml(clocks)).warnings, ["GPU 0 is slowed down by its hardware: power brake"]);
    assert_eq!(read(&xml(&clocks.replace("Active", "Not Active"))).warnings, Vec::<String>::new());
}

#[test]
fn a_truncated_list_has_no_partial_uuid() {
    let snapshot = read("GPU 0: NVIDIA H100 (UUID: GPU-1)\nGPU 1: NVIDIA H100 (UUID: GPU-2");
    assert_eq!(snapshot.devices[1].uuid, None);
    assert_eq!(snapshot.warnings.len(), 1, "{:?}", snapshot.warnings);
}

#[test]
fn a_truncated_row_has_no_partial_number() {
    let text = "index, memory.used [MiB], memory.total [MiB]\n0, 5 MiB, 81559 MiB\n1, 5 MiB, 815";
    let cut = read(text);
    assert_eq!(cut.devices[1].memory.total.value(), None);
    assert_eq!(cut.warnings.len(), 3, "{:?}", cut.warnings);
    let bare = read("index, memory.used [MiB], memory.total [MiB]\n0, 5, 81559");
    assert_eq!(bare.devices[0].memory.total, Reported::Value(Bytes(81559 << 20)));
}

#[test]
fn separators_of_spreadsheets_are_accepted() {
    for separator in [";", "\t"] {
        let text = "index,name,memory.total [MiB]\n0,Tesla T4,15360 MiB\n".replace(',', separator);
        let snapshot = read(&text);
        assert_eq!(snapshot.devices[0].memory.total, Reported::Value(Bytes(15360 << 20)));
    }
}

#[test]
fn processes_without_a_gpu_add_no_device() {
    let snapshot = read("pid, process_name, used_memory [MiB]\n12, python, 5 MiB\n");
    assert!(snapshot.devices.is_empty());
    assert_eq!(snapshot.warnings.len(), 1);
}

#[test]
fn a_notice_beside_devices_is_a_warning() {
    let list = "GPU 0: A (UUID: GPU-1)\nGPU 1: A (UUID: GPU-2)\n";
    let snapshot = read(&format!("{list}WARNING: infoROM is corrupted at gpu 0000:1A:00.0\n"));
    assert_eq!(snapshot.devices.len(), 2);
    assert_eq!(snapshot.warnings, ["infoROM is corrupted at gpu 0000:1A:00.0"]);
}

#[test]
fn a_missing_tool_is_recognised_in_every_shell() {
    for words in [
        "zsh: command not found: nvidia-smi",
        "-bash: /usr/bin/nvidia-smi: No such file or directory",
        "exec: \"nvidia-smi\": executable file not found in $PATH: unknown",
        "nvidia-smi: error while loading shared libraries: libnvidia-ml.so.1: cannot open shared object file: No such file",
    ] {
        assert_eq!(code(words), "not_here", "{words}");
    }
    for rows in ["0, Tesla T4, 15360, 3, 0\n", "NVIDIA A10, 535.1\n"] {
        assert_eq!(code(rows), "malformed", "{rows}");
    }
}

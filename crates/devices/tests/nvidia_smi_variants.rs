//! What other drivers, cards and shells make of the output of nvidia-smi.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use gpupool_core::device::{Health, LinkKind};
use gpupool_core::units::Bytes;
use gpupool_devices::capture::Format;
use gpupool_devices::found::{Doing, Watts};
use gpupool_devices::{Snapshot, SourceError, Told};

const TABLE: &str = "\
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 470.57.02    Driver Version: 470.57.02    CUDA Version: ERR!     |
|-------------------------------+----------------------+----------------------+
|   0  Tesla V100-SXM2...  On   | 00000000:1A:00.0 Off |                    0 |
| N/A   40C    P0    60W / 300W |      3MiB / 32510MiB |      0%      Default |
|                               |                      |                  N/A |
+-------------------------------+----------------------+----------------------+
|   1  ERR!                ERR! | 00000000:1B:00.0 ERR!|                 ERR! |
|ERR!  ERR! ERR!    ERR! / ERR! |        Unknown Error |    ERR!         ERR! |
|                               |                      |                 ERR! |
+-------------------------------+----------------------+----------------------+
|   2  A100-SXM4-40GB      On   | 00000000:47:00.0 Off |                   On |
| N/A   26C    P0    44W / 400W |                  N/A |     N/A      Default |
|                               |                      |              Enabled |
+-------------------------------+----------------------+----------------------+
";

/// Reads a text in the format it is guessed to have.
fn parsed(text: &str) -> Result<Snapshot, SourceError> {
    Format::guess(text).and_then(|format| format.parse(text)).unwrap()
}

fn read(text: &str) -> Snapshot {
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
fn a_gpu_on_which_every_reading_fails_is_unhealthy_and_the_others_are_not() {
    let snapshot = read(TABLE);
    let [well, broken, cut] = &snapshot.devices[..] else { panic!("{snapshot:?}") };
    assert_eq!((&well.health, &cut.health), (&Some(Health::Healthy), &Some(Health::Healthy)));
    assert_eq!(broken.health, Some(Health::Unhealthy("the driver cannot read it: Unknown Error".into())));
    let row = |cell: &str| {
        format!(
            "index, memory.used [MiB], temperature.gpu, power.draw [W]\n0, {cell}, {cell}, {cell}\n1, 3 MiB, 5, {cell}\n"
        )
    };
    let failed = read(&row("[Unknown Error]"));
    assert!(matches!(failed.devices[0].health, Some(Health::Unhealthy(_))));
    assert_eq!(failed.devices[1].health, Some(Health::Healthy));
    assert_eq!(read(&row("[Insufficient Permissions]")).devices[0].health, None);
}

#[test]
fn a_gpu_cut_by_mig_does_not_share_the_memory_of_the_host_because_it_hides_its_own() {
    let snapshot = read(TABLE);
    assert_eq!((snapshot.devices[2].mig, snapshot.devices[2].memory.unified), (Some(true), false));
}

#[test]
fn a_table_that_is_cut_off_says_so_and_makes_up_no_memory() {
    assert_eq!(read(TABLE).warnings, Vec::<String>::new());
    let cut = read(&TABLE[..TABLE.find("26C").unwrap()]);
    assert_eq!((cut.devices.len(), cut.devices[2].health.clone()), (3, None));
    assert_eq!(cut.warnings, ["the answer ends early: the table is cut off"]);
    let instance = "| MIG devices:    |\n|  2    1   0   0  |   11MiB";
    let cut = read(&format!("{TABLE}{instance}"));
    assert_eq!(cut.devices[3].memory.used, Told::Value(Bytes(11 << 20)));
    assert_eq!(cut.devices[3].memory.total.value(), None);
}

#[test]
fn a_table_and_a_list_of_the_same_gpus_are_one_machine() {
    let list = "GPU 0: Tesla V100-SXM2-32GB (UUID: GPU-77)\nGPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-78)\n\
                \x20 MIG 1g.5gb      Device  0: (UUID: MIG-79)\n";
    for [table, list_head, end] in [
        ["nvidia-smi", "nvidia-smi -L", ""],
        ["$ nvidia-smi", "$ nvidia-smi -L", "$ dmesg\n[ 1.0] text\n"],
        ["+ nvidia-smi", "+ nvidia-smi -L", "+ date\n"],
        ["==> nvidia-smi <==", "==> nvidia-smi -L <==", ""],
        ["[nvidia-smi]", "[nvidia-smi -L]", ""],
        ["me@host:~$ nvidia-smi", "me@host:~$ nvidia-smi -L", "me@host:~$ "],
        ["Output of nvidia-smi:", "Output of nvidia-smi -L:", ""],
    ] {
        let snapshot = read(&format!("{table}\n{TABLE}\n{list_head}\n{list}{end}"));
        let [first, _, _, instance] = &snapshot.devices[..] else { panic!("{table}: {snapshot:#?}") };
        assert_eq!((first.uuid.as_deref(), first.pci.unwrap().bus), (Some("GPU-77"), 0x1a));
        assert_eq!(first.name.as_deref(), Some("Tesla V100-SXM2-32GB"));
        assert_eq!((instance.uuid.as_deref(), instance.pci.unwrap().bus), (Some("MIG-79"), 0x47));
        assert_eq!(snapshot.warnings, Vec::<String>::new(), "{table}");
    }
}

#[test]
fn a_bug_report_tells_gpus_and_the_links_between_them() {
    let rule = "____________________________________________";
    let text = format!(
        "{rule}\n\n/usr/bin/nvidia-smi --query\n\n\n==============NVSMI LOG==============\n\nDriver Version : 560.35.05\n\
         Attached GPUs : 2\nGPU 00000009:01:00.0\n    Product Name : GH200\n    MIG Device\n        None\n    \
         Processes : None\nGPU 00000019:01:00.0\n    Product Name : GH200\n    Processes : None\n\n{rule}\n\n\
         /usr/bin/nvidia-smi topo -m\n\n\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV6\t\t1\nGPU1\tNV6\t X \t0-7\t0\n"
    );
    let snapshot = read(&text);
    assert_eq!(snapshot.devices.iter().map(|device| device.numa).collect::<Vec<_>>(), [Some(1), Some(0)]);
    assert_eq!(snapshot.links[0].kind, LinkKind::NvLink(6));
    assert_eq!(snapshot.warnings, Vec::<String>::new());
}

#[test]
fn power_is_that_of_the_gpu_and_not_of_its_module_or_memory() {
    let power = |section: &str, watts: u32| {
        format!(
            "<{section}><power_draw>{watts}.5 W</power_draw><current_power_limit>{watts} W</current_power_limit></{section}>"
        )
    };
    let gpu = [("module_power_readings", 900), ("gpu_memory_power_readings", 30), ("gpu_power_readings", 80)]
        .map(|(section, watts)| power(section, watts))
        .concat();
    let device = &read(&xml(&gpu)).devices[0];
    assert_eq!((&device.power, &device.power_limit), (&Told::Value(Watts(80_500)), &Told::Value(Watts(80_000))));
}

#[test]
fn the_processes_of_old_drivers_compute() {
    let process =
        "<process_info><pid>11</pid><process_name>a</process_name><used_memory>85 MB</used_memory></process_info>";
    let old = read(&xml(&format!("<compute_processes>{process}</compute_processes>")));
    let processes = old.devices[0].processes.value().unwrap();
    assert_eq!((processes[0].pid, processes[0].doing), (11, Doing::Compute));
    assert_eq!(processes[0].memory, Told::Value(Bytes(85 << 20)));
}

#[test]
fn a_gpu_that_its_hardware_slows_down_is_warned_of() {
    let clocks = "<clocks_event_reasons><clocks_event_reason_hw_power_brake_slowdown>Active\
                  </clocks_event_reason_hw_power_brake_slowdown></clocks_event_reasons>";
    assert_eq!(read(&xml(clocks)).warnings, ["GPU 0 is slowed down by its hardware: the power supply asks for it"]);
    assert_eq!(read(&xml(&clocks.replace("Active", "Not Active"))).warnings, Vec::<String>::new());
}

#[test]
fn a_text_that_ends_inside_its_last_gpu_says_so() {
    let text = "==============NVSMI LOG==============\nAttached GPUs : 1\nGPU 00000000:01:00.0\n    Product Name : A\n    Minor";
    assert_eq!(read(text).warnings, ["the answer ends early: the last GPU has no list of processes"]);
}

#[test]
fn a_list_that_is_cut_off_gives_no_half_uuid() {
    let snapshot = read("GPU 0: NVIDIA H100 (UUID: GPU-1)\nGPU 1: NVIDIA H100 (UUID: GPU-2");
    assert_eq!(snapshot.devices[1].uuid, None);
    assert_eq!(snapshot.warnings.len(), 1, "{:?}", snapshot.warnings);
}

#[test]
fn a_row_that_is_cut_off_gives_no_half_number() {
    let text = "index, memory.used [MiB], memory.total [MiB]\n0, 5 MiB, 81559 MiB\n1, 5 MiB, 815";
    let cut = read(text);
    assert_eq!(cut.devices[1].memory.total.value(), None);
    assert_eq!(cut.warnings.len(), 3, "{:?}", cut.warnings);
    let bare = read("index, memory.used [MiB], memory.total [MiB]\n0, 5, 81559");
    assert_eq!(bare.devices[0].memory.total, Told::Value(Bytes(81559 << 20)));
}

#[test]
fn a_spreadsheet_may_part_cells_in_its_own_way() {
    for separator in [";", "\t"] {
        let text = "index,name,memory.total [MiB]\n0,Tesla T4,15360 MiB\n".replace(',', separator);
        let snapshot = read(&text);
        assert_eq!(snapshot.devices[0].memory.total, Told::Value(Bytes(15360 << 20)));
    }
}

#[test]
fn processes_of_nobody_knows_which_gpu_make_none() {
    let snapshot = read("pid, process_name, used_memory [MiB]\n12, python, 5 MiB\n");
    assert!(snapshot.devices.is_empty());
    assert_eq!(snapshot.warnings.len(), 1);
}

#[test]
fn a_notice_beside_a_table_is_kept() {
    let snapshot = read(&format!("{TABLE}WARNING: infoROM is corrupted at gpu 0000:1A:00.0\n"));
    assert_eq!(snapshot.devices.len(), 3);
    assert_eq!(snapshot.warnings, ["infoROM is corrupted at gpu 0000:1A:00.0"]);
}

#[test]
fn a_tool_that_is_not_there_is_known_in_every_shell() {
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

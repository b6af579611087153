//! `gpupool devices` and `gpupool doctor` on machines made of files.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use nvml_standin::machines::server_scenario;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Machine without GPUs, libraries or tools, to which a test adds files.
struct FileMachine(TempDir);

impl FileMachine {
    fn empty() -> Self {
        let machine = Self(TempDir::new().unwrap());
        for folder in ["sys", "proc", "dev", "etc"] {
            fs::create_dir(machine.path().join(folder)).unwrap();
        }
        machine
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, name: &str, text: &str) -> &Self {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    /// Adds a program that prints a text.
    fn tool(&self, name: &str, prints: &str) -> &Self {
        self.script(name, &format!("cat <<'END'\n{prints}\nEND\n"))
    }

    /// Adds a program. Another process writes it, because a file that a test of this process has open for writing
    /// cannot be run.
    fn script(&self, name: &str, lines: &str) -> &Self {
        let text = format!("{name}.text");
        self.write(&text, &format!("#!/bin/sh\n{lines}"));
        let copied = Command::new("install").args(["-m", "755", &text, name]).current_dir(self.path()).status();
        assert!(copied.unwrap().success());
        self
    }

    /// Adds an AMD card as the kernel shows it.
    fn with_card(&self) -> &Self {
        let card = "sys/class/drm/card1/device";
        self.write(&format!("{card}/vendor"), "0x1002\n")
            .write(&format!("{card}/device"), "0x740f\n")
            .write(&format!("{card}/class"), "0x120000\n")
            .write(&format!("{card}/uevent"), "DRIVER=amdgpu\nPCI_ID=1002:740F\nPCI_SLOT_NAME=0000:c1:00.0\n")
            .write(&format!("{card}/unique_id"), "1234567890abcdef\n")
            .write(&format!("{card}/mem_info_vram_total"), "68702699520\n")
            .write(&format!("{card}/mem_info_vram_used"), "1073741824\n")
            .write(&format!("{card}/gpu_busy_percent"), "42\n")
            .write("sys/module/amdgpu/version", "6.10.5\n")
    }

    fn gpupool(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpupool"));
        command.args(args).env_clear().env("PATH", "/usr/bin:/bin").current_dir(self.path());
        for (name, place) in [("SYS", "sys"), ("PROC", "proc"), ("DEV", "dev"), ("ETC", "etc")] {
            command.env(format!("GPUPOOL_{name}"), self.path().join(place));
        }
        for (name, tool) in
            [("NVML", "nvml.so"), ("NVIDIA_SMI", "nvidia-smi"), ("AMD_SMI", "amd-smi"), ("ROCM_SMI", "rocm-smi")]
        {
            command.env(format!("GPUPOOL_{name}"), self.path().join(tool));
        }
        command
    }
}

fn parsed(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

const CSV: &str = "index, uuid, name, pci.bus_id, memory.total [MiB], memory.used [MiB], utilization.gpu [%], temperature.gpu, power.draw [W], power.limit [W], driver_version
0, GPU-11111111-2222-3333-4444-555555555555, NVIDIA L4, 00000000:01:00.0, 23034 MiB, 512 MiB, [N/A], 41, 16.52 W, 72.00 W, 550.90.07";

#[test]
fn a_machine_without_a_gpu_is_not_an_error() {
    let machine = FileMachine::empty();
    let output = machine.gpupool(&["devices"]);
    assert_eq!((output.status.code(), &*output.stdout), (Some(0), &b"no GPU found\n"[..]));
    let printed = parsed(&machine.gpupool(&["devices", "--json"]));
    assert_eq!(printed, json!({"devices": [], "links": [], "warnings": [], "error": null}));
}

#[test]
fn an_amd_card_is_read_from_the_kernels_files() {
    let machine = FileMachine::empty();
    let output = machine.with_card().gpupool(&["devices", "--json"]);
    assert_eq!(output.status.code(), Some(0));
    let device = &parsed(&output)["devices"][0];
    assert_eq!(device["vendor"], "amd");
    assert_eq!((&device["pci"], &device["uuid"]), (&json!("0000:c1:00.0"), &json!("GPU-1234567890abcdef")));
    assert_eq!((&device["memory_total_mib"], &device["memory_used_mib"]), (&json!(65520), &json!(1024)));
    assert_eq!((&device["utilization_percent"], &device["power_w"]), (&json!(42.0), &json!(null)));
    assert!(device["unsupported"].as_array().unwrap().contains(&json!("power_w")));
}

#[test]
fn nvidia_devices_are_read_through_the_library_under_either_name() {
    for name in ["libnvidia-ml.so.1", "libnvidia-ml.so"] {
        let machine = FileMachine::empty();
        let library = nvml_standin::install_library(machine.path(), &server_scenario(2), &[]).unwrap();
        fs::rename(library, machine.path().join(name)).unwrap();
        let mut command = machine.command(&["devices", "--json"]);
        let output = command.env_remove("GPUPOOL_NVML").env("LD_LIBRARY_PATH", machine.path()).output().unwrap();
        let printed = parsed(&output);
        assert_eq!(printed["devices"].as_array().unwrap().len(), 2, "{name}: {printed}");
        assert_eq!(printed["devices"][1]["memory_total_mib"], 81_559);
        assert_eq!(printed["links"], json!([{"a": 0, "b": 1, "kind": "nvlink", "lanes": 18}]));
        // The machine is made of files and its namespaces are unknown, so processes are not attributed.
        assert_eq!(printed["devices"][1]["processes"][0]["pid"], 4001);
        assert!(printed["devices"][1]["processes"][0]["unattributed"].is_string());
    }
}

#[test]
fn a_tool_replaces_a_missing_library() {
    let machine = FileMachine::empty();
    let fields = CSV.lines().next().unwrap().split(", ").map(|field| field.split(' ').next().unwrap());
    let known: Vec<String> = fields.map(|field| format!("echo '\"{field}\"'")).collect();
    machine.script(
        "nvidia-smi",
        &format!(
            "case \"$*\" in\n*--help-query-gpu*)\n{}\n;;\n*--query-gpu*)\ncat <<'END'\n{CSV}\nEND\n;;\n\
             *) echo 'invalid combination of input arguments'; exit 2;;\nesac\n",
            known.join("\n")
        ),
    );
    let output = machine.gpupool(&["devices", "--json"]);
    let printed = parsed(&output);
    assert_eq!((output.status.code(), &printed["devices"][0]["name"]), (Some(0), &json!("NVIDIA L4")), "{printed}");
    assert_eq!(printed["devices"][0]["unsupported"][0], "utilization_percent");
}

#[test]
fn a_driver_that_fails_is_a_named_error() {
    let machine = FileMachine::empty();
    machine
        .tool("nvidia-smi", "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.90");
    let output = machine.gpupool(&["devices", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(parsed(&output)["error"]["code"], "driver_library_mismatch");
    let words = String::from_utf8(machine.gpupool(&["devices"]).stderr).unwrap();
    assert!(words.starts_with("error: driver_library_mismatch: nvidia-smi"), "{words}");
}

#[test]
fn a_failing_vendor_is_a_warning_beside_the_devices_of_another() {
    let machine = FileMachine::empty();
    machine.with_card().tool("nvidia-smi", "Failed to initialize NVML: Driver/library version mismatch");
    let output = machine.gpupool(&["devices", "--json"]);
    let printed = parsed(&output);
    assert_eq!((output.status.code(), printed["devices"].as_array().unwrap().len()), (Some(0), 1));
    assert!(printed["warnings"][0].as_str().unwrap().contains("different versions"), "{printed}");
}

#[test]
fn one_source_can_be_selected_and_a_wrong_name_lists_the_allowed_ones() {
    let machine = FileMachine::empty();
    machine.with_card();
    let forced = machine.command(&["devices", "--json"]).env("GPUPOOL_BACKEND", "nvidia").output().unwrap();
    assert_eq!(parsed(&forced)["devices"], json!([]));
    let wrong = machine.command(&["devices"]).env("GPUPOOL_BACKEND", "cuda").output().unwrap();
    assert_eq!(wrong.status.code(), Some(1));
    assert!(String::from_utf8(wrong.stderr).unwrap().contains("allowed are auto, nvidia, amd"));
}

#[test]
fn the_format_of_a_capture_is_detected_or_given() {
    let machine = FileMachine::empty();
    machine.write("capture.csv", CSV).with_card();
    let guessed = parsed(&machine.gpupool(&["devices", "--json", "--from", "capture.csv"]));
    assert_eq!(guessed["devices"][0]["power_limit_w"], 72.0);
    for name in ["nvidia-smi-csv", "csv", "nvidia-smi", "auto"] {
        let named = machine.gpupool(&["devices", "--json", "--from", "capture.csv", "--as", name]);
        assert_eq!(parsed(&named), guessed, "{name}");
    }
    let piped = fs::File::open(machine.path().join("capture.csv")).unwrap();
    let piped = machine.command(&["devices", "--json", "--from", "-"]).stdin(piped).output().unwrap();
    assert_eq!(parsed(&piped), guessed);
    let tree = parsed(&machine.gpupool(&["devices", "--json", "--from", ".", "--as", "sysfs"]));
    assert_eq!(tree["devices"][0]["memory_total_mib"], 65520);
    // All files in a folder belong to one machine.
    let both = parsed(&machine.gpupool(&["devices", "--json", "--from", "."]));
    assert_eq!(both["devices"].as_array().unwrap().len(), 2, "{both}");
}

#[test]
fn a_capture_that_cannot_be_read_is_a_named_error() {
    let machine = FileMachine::empty();
    machine.write("empty", "").write("letter", "Dear GPU,\nhow are you?\n").write("broken.tar.gz", "\u{1f}");
    let cases = [
        (vec!["--from", "nowhere"], "unreadable"),
        (vec!["--from", "empty"], "empty"),
        (vec!["--from", "letter"], "unknown_format"),
        (vec!["--from", "letter", "--as", "sysfs"], "other_format"),
        (vec!["--from", "letter", "--as", "nvidia-smi-xml"], "malformed"),
        (vec!["--from", "dev", "--as", "sysfs"], "other_format"),
    ];
    for (args, code) in cases {
        let output = machine.gpupool(&[&["devices", "--json"], &args[..]].concat());
        let printed = parsed(&output);
        assert_eq!((output.status.code(), &printed["error"]["code"]), (Some(1), &json!(code)), "{args:?}: {printed}");
    }
    let wrong = machine.gpupool(&["devices", "--from", "letter", "--as", "poem"]);
    assert_eq!(wrong.status.code(), Some(2), "a format that does not exist is wrong usage");
}

#[test]
fn simulated_devices_are_the_same_every_time() {
    let machine = FileMachine::empty();
    let read = || parsed(&machine.gpupool(&["devices", "--json", "--simulate", "2xMI300X,1xRTX4090"]));
    let (one, other) = (read(), read());
    let vendors: Vec<&str> = one["devices"].as_array().unwrap().iter().map(|d| d["vendor"].as_str().unwrap()).collect();
    assert_eq!(vendors, ["amd", "amd", "nvidia"]);
    for place in 0..3 {
        assert_eq!(one["devices"][place]["uuid"], other["devices"][place]["uuid"]);
    }
    let wrong = machine.gpupool(&["devices", "--simulate", "4xH1000"]);
    assert_eq!(wrong.status.code(), Some(1));
    let words = String::from_utf8(wrong.stderr).unwrap();
    assert!(words.contains("H1000") && words.contains("H100"), "{words}");
}

#[test]
fn doctor_reports_problems_with_remedies() {
    let machine = FileMachine::empty();
    let gpu = "sys/bus/pci/devices/0000:01:00.0";
    machine.write(&format!("{gpu}/vendor"), "0x10de\n").write(&format!("{gpu}/device"), "0x27b8\n");
    machine.write(&format!("{gpu}/class"), "0x030200\n");
    machine.write("dev/kmsg", "4,811,9000,-;NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n");
    let output = machine.gpupool(&["doctor", "--json"]);
    let printed = parsed(&output);
    assert!(printed.to_string().contains("Xid 79"), "{printed}");
    let worst = printed["findings"].as_array().unwrap().iter().find(|finding| finding["severity"] == "error");
    let worst = worst.unwrap_or_else(|| panic!("a GPU without a driver is no error: {printed}"));
    assert_eq!(output.status.code(), Some(1));
    assert!(!worst["remedy"].as_str().unwrap().is_empty() && !worst["evidence"].as_array().unwrap().is_empty());
}

#[test]
fn a_bundle_reads_back_as_the_same_machine() {
    let machine = FileMachine::empty();
    machine.with_card();
    let here = parsed(&machine.gpupool(&["devices", "--json"]));
    let made = machine.gpupool(&["doctor", "--bundle", "report.tar.gz"]);
    assert!(machine.path().join("report.tar.gz").is_file(), "{made:?}");
    let there = parsed(&machine.gpupool(&["devices", "--json", "--from", "report.tar.gz"]));
    for field in ["uuid", "pci", "name", "memory_total_mib", "memory_used_mib", "utilization_percent"] {
        assert_eq!(there["devices"][0][field], here["devices"][0][field], "{field}");
    }
}

//! Secrets of a machine do not get into a bundle.

use std::time::{Duration, UNIX_EPOCH};

use gpupool_devices::doctor::{BundleRequest, DiagnosticBundle, DoctorEvidence, RedactionOptions, SourceResult};
use gpupool_devices::{SourceKind, SourceReading};

use crate::machine::FakeMachine;

const SECRET: &str = "hunter2-s3cr3t";

/// Names and texts of all files of a bundle from a machine full of this secret.
fn bundled(redact: RedactionOptions) -> String {
    let machine = FakeMachine::new("tools");
    machine.wake_all();
    for (name, text) in [
        ("proc/self/environ", format!("AWS_SECRET_ACCESS_KEY={SECRET}\0")),
        ("proc/7/environ", format!("TOKEN={SECRET}\0")),
        ("proc/7/cmdline", format!("train\0--token={SECRET}\0")),
        ("proc/7/comm", SECRET.to_owned()),
        ("proc/cmdline", format!("quiet token={SECRET}\n")),
        ("etc/gpupool.toml", format!("token = \"{SECRET}\"\n")),
        ("etc/passwd", format!("{SECRET}:x:1000:1000::/home/{SECRET}:/bin/sh\n")),
        (
            "dev/kmsg",
            format!(
                "4,1,1,-;NVRM: Xid (PCI:0000:01:00): 31, pid=7, name={SECRET}, Ch 1\n4,2,2,-;{SECRET}: said by a program\n"
            ),
        ),
        ("proc/driver/nvidia/registry", format!("Binary: \"{SECRET}\"\n")),
        ("proc/driver/nvidia/gpus/0000:01:00.0/registry", format!("Binary: \"{SECRET}\"\n")),
        ("sys/class/drm/card0/device/serial_number", format!("{SECRET}\n")),
    ] {
        machine.write(name, text.as_bytes());
    }
    let source = SourceResult { kind: SourceKind::Nvml, result: Ok(SourceReading::default()) };
    let evidence = DoctorEvidence::gather(&machine.paths, &|name| Some(format!("{name}-{SECRET}")), vec![source]);
    let request = BundleRequest { redact, ..BundleRequest::new("test", UNIX_EPOCH + Duration::from_secs(1)) };
    let bundle = DiagnosticBundle::collect(&machine.paths, &evidence, &request);
    bundle.files().map(|(name, bytes)| format!("{name}\n{}\n", String::from_utf8_lossy(bytes))).collect()
}

#[test]
fn secrets_of_the_machine_are_not_in_a_bundle() {
    let all = bundled(RedactionOptions::default());
    assert!(all.contains("kernel_trouble") || all.contains("Xid 31"), "the log was read: {all}");
    // The values of the four variables that hide devices are in the bundle; no other variable is.
    let hiding = ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"];
    let without_hiding = hiding.iter().fold(all, |all, name| all.replace(&format!("{name}-{SECRET}"), ""));
    let leak = without_hiding.lines().find(|line| line.contains(SECRET));
    assert_eq!(leak, None);
}

#[test]
fn a_bundle_names_neither_the_host_nor_a_user() {
    let all = bundled(RedactionOptions::default());
    for name in ["node-seven", "ada@", "/home/"] {
        let leak = all.lines().find(|line| line.contains(name));
        assert_eq!(leak, None, "{name}");
    }
    assert!(bundled(RedactionOptions { identities: false, uuids: false }).contains("ada@node-seven"), "as asked");
}

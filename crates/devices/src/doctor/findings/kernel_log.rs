//! What the kernel's log says went wrong, device by device.

use std::collections::{BTreeMap, BTreeSet};

use gpupool_core::device::PciAddress;

use super::{Finding, Severity};
use crate::doctor::evidence::Evidence;
use crate::kernel_log::Said;
use crate::nvml::xid;

/// The log speaks of trouble with a device.
pub(super) fn trouble(evidence: &Evidence) -> Vec<Finding> {
    let mut devices: BTreeMap<Option<PciAddress>, Vec<&Said>> = BTreeMap::new();
    for said in &evidence.kernel_log {
        devices.entry(said.pci).or_default().push(said);
    }
    devices.into_iter().map(|(pci, said)| finding(pci, &said)).collect()
}

fn finding(pci: Option<PciAddress>, said: &[&Said]) -> Finding {
    let severity = match said.iter().map(|said| said.trouble.severity()).max() {
        Some(xid::Severity::Unhealthy) => Severity::Error,
        Some(xid::Severity::Warn) => Severity::Warning,
        Some(xid::Severity::Application) | None => Severity::Note,
    };
    let summary = match (severity, pci) {
        (Severity::Note, Some(_)) => "Programs failed on a GPU, as the kernel's log tells; the GPU is fine.",
        (Severity::Note, None) => "Programs failed on GPUs, as the kernel's log tells; the GPUs are fine.",
        (_, Some(_)) => "The kernel's log tells of trouble with a GPU.",
        (_, None) => "The kernel's log tells of trouble with GPUs that it does not name.",
    };
    Finding::new("kernel_log_trouble", severity, summary, remedy(said))
        .because(said.iter().map(|said| said.trouble.counted(said.count)))
        .about(pci)
}

/// What to do about each, and what there is to do where nothing speaks against the device.
fn remedy(said: &[&Said]) -> String {
    let advice = said.iter().filter(|said| !said.trouble.remedy().is_empty());
    let lines: BTreeSet<String> =
        advice.map(|said| format!("After {}: {}.", said.trouble.name(), said.trouble.remedy())).collect();
    match lines.is_empty() {
        true => "Nothing for the GPU: look at the programs that ran on it.".to_owned(),
        false => Vec::from_iter(lines).join(" "),
    }
}

#[cfg(test)]
mod tests {
    use super::super::examine;
    use super::super::samples::{amd, codes, nvidia};
    use super::*;

    #[test]
    fn each_device_the_log_accuses_is_named_with_number_meaning_and_remedy() {
        let log = "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.183.01\n\
                   NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus.\n\
                   NVRM: Xid (PCI:0000:01:00): 13, pid=1\nNVRM: Xid (PCI:0000:01:00): 13, pid=1\n\
                   NVRM: Xid (PCI:0000:c1:00): 31, pid=2\n";
        let findings = examine(&nvidia().with_kernel_log(log));
        let [lost, fine] = findings.as_slice() else { panic!("{findings:?}") };
        assert_eq!((lost.severity, &*lost.devices), (Severity::Error, &["0000:01:00.0".to_owned()][..]));
        assert_eq!(lost.evidence.len(), 2);
        assert!(lost.evidence[0].starts_with("Xid 13 ×2: "), "{lost:?}");
        assert!(lost.remedy.starts_with("After Xid 79: reboot"), "{lost:?}");
        assert_eq!((fine.severity, &*fine.devices), (Severity::Note, &["0000:c1:00.0".to_owned()][..]));
        assert!(fine.summary.contains("the GPU is fine"), "{fine:?}");
    }

    #[test]
    fn what_went_wrong_before_the_last_boot_and_what_is_no_trouble_is_not_found() {
        let quiet = "amdgpu: ring gfx uses VM inv eng 0\nusb: probe of 1-1 failed";
        assert_eq!(codes(&amd().with_kernel_log(quiet)), [""; 0]);
        let rebooted = "NVRM: Xid (PCI:0000:01:00): 79\nLinux version 6.8.0 (a@b) (gcc 13) #1\n";
        assert_eq!(codes(&nvidia().with_kernel_log(rebooted)), [""; 0]);
    }
}

//! Whether the bus and the drivers agree on which GPUs there are, compared by numbers and never by spelling.

use std::collections::BTreeSet;

use gpupool_core::device::{PciAddress, Vendor};

use super::{Finding, Severity};
use crate::doctor::evidence::Evidence;
use crate::pci_bus::PciGpu;

/// A driven GPU is on the bus and no source of its vendor lists it.
pub(super) fn not_reported(evidence: &Evidence) -> Vec<Finding> {
    let of_vendor = |(vendor, driver): (Vendor, &str)| {
        let listed = listed(evidence, vendor)?;
        let is_left_out = |gpu: &&PciGpu| gpu.is_bound_to(driver) && !gpu.asleep && !listed.contains(&gpu.pci);
        let left_out: Vec<&PciGpu> = evidence.gpus_of(vendor).filter(is_left_out).collect();
        if left_out.is_empty() {
            return None;
        }
        let (severity, summary, remedy) = if evidence.in_container() {
            (
                Severity::Note,
                "A GPU on the PCI bus was not given to this container.",
                "Nothing, if that is meant. Else start the container with all devices: `--gpus all` for NVIDIA, \
                 `--device=/dev/kfd --device=/dev/dri` for AMD.",
            )
        } else {
            (
                Severity::Error,
                "A GPU on the PCI bus is not among those its driver reports.",
                "It may have fallen off the bus or failed to start: look for it in `dmesg` (NVRM, Xid 79, amdgpu). \
                 Reset or reboot; if it comes back so, check its power, seating and riser.",
            )
        };
        let finding = Finding::new("gpu_not_reported", severity, summary, remedy)
            .because([format!("the sources list {} of {}", listed.len(), evidence.gpus_of(vendor).count())])
            .because(left_out.iter().map(|gpu| format!("{} is bound to {driver} and not listed", gpu.pci)))
            .about(left_out.iter().map(|gpu| gpu.pci));
        Some(finding)
    };
    [(Vendor::Nvidia, "nvidia"), (Vendor::Amd, "amdgpu")].into_iter().filter_map(of_vendor).collect()
}

/// A source lists a GPU that is not on the bus any more.
pub(super) fn not_on_bus(evidence: &Evidence) -> Vec<Finding> {
    // Under WSL devices come from the host of the virtual machine and are on no bus of it.
    let is_wsl = evidence.kernel_release.value().is_some_and(|release| release.to_lowercase().contains("microsoft"));
    let Some(gpus) = evidence.gpus.value().filter(|_| !is_wsl) else { return Vec::new() };
    let on_bus: BTreeSet<PciAddress> = gpus.iter().map(|gpu| gpu.pci).collect();
    let listed = [Vendor::Nvidia, Vendor::Amd].into_iter().filter_map(|vendor| listed(evidence, vendor)).flatten();
    let gone: BTreeSet<PciAddress> = listed.filter(|address| !on_bus.contains(address)).collect();
    if gone.is_empty() {
        return Vec::new();
    }
    let remedy = "It was removed or fell off the bus after the driver started. Give it no work; `echo 1 | sudo tee \
                  /sys/bus/pci/rescan` may bring it back, else reboot.";
    let summary = "The driver lists a GPU that is not on the PCI bus.";
    let finding = Finding::new("gpu_not_on_bus", Severity::Warning, summary, remedy)
        .because(gone.iter().map(|address| format!("{address} is not in /sys/bus/pci/devices")))
        .about(&gone);
    vec![finding]
}

/// A GPU sleeps to save power; it is well.
pub(super) fn asleep(evidence: &Evidence) -> Vec<Finding> {
    let gpus = evidence.gpus.value().into_iter().flatten();
    let sleeping: Vec<&PciGpu> = gpus.filter(|gpu| gpu.asleep).collect();
    if sleeping.is_empty() {
        return Vec::new();
    }
    let remedy = "Nothing: it wakes when it is used, and is not read until then. To keep it awake, write `on` to its \
                  power/control file.";
    let summary = "A GPU is asleep to save power, so it reports nothing now.";
    let finding = Finding::new("gpu_asleep", Severity::Note, summary, remedy)
        .because(sleeping.iter().map(|gpu| format!("{}: power/runtime_status is suspended", gpu.pci)))
        .about(sleeping.iter().map(|gpu| gpu.pci));
    vec![finding]
}

/// There is nothing to share.
pub(super) fn no_gpu(evidence: &Evidence) -> Vec<Finding> {
    let usable = [Vendor::Nvidia, Vendor::Amd].into_iter().any(|vendor| evidence.gpus_of(vendor).next().is_some());
    if usable || !evidence.machine().devices.is_empty() {
        return Vec::new();
    }
    let others = evidence.gpus.value().into_iter().flatten();
    let other = |gpu: &PciGpu| format!("{}: PCI device {}, not supported", gpu.pci, gpu.ids());
    let seen = match &evidence.gpus {
        crate::Told::Value(_) => "no NVIDIA or AMD GPU on the PCI bus".to_owned(),
        _ => "the PCI bus cannot be seen".to_owned(),
    };
    let remedy = "If there should be one: `lspci -nn | grep -i -e vga -e 3d -e accel` shows what the machine sees; in a \
                  virtual machine it must be passed through. To try gpupool without a GPU, simulate some with \
                  `--simulate`.";
    let summary = "There is no GPU on this machine that can be shared.";
    vec![Finding::new("no_gpu", Severity::Note, summary, remedy).because([seen]).because(others.map(other))]
}

/// The addresses the sources of a vendor list; `None` where none answered or one leaves an address out.
fn listed(evidence: &Evidence, vendor: Vendor) -> Option<BTreeSet<PciAddress>> {
    let answers: Vec<_> = evidence.answers_about(vendor).collect();
    if answers.is_empty() {
        return None;
    }
    answers.iter().flat_map(|answer| &answer.devices).map(|device| device.pci).collect()
}

#[cfg(test)]
mod tests {
    use super::super::samples::{amd, codes, contained, device_mut, nvidia};
    use super::super::{Severity, examine};
    use super::*;
    use crate::address;
    use crate::told::Told;

    #[test]
    fn a_gpu_that_vanished_without_a_word_is_found() {
        for mut evidence in [nvidia(), amd()] {
            evidence.sources[0].result.as_mut().unwrap().devices.truncate(1);
            assert_eq!(codes(&evidence), ["gpu_not_reported"]);
            let finding = &examine(&evidence)[0];
            assert_eq!((finding.severity, &*finding.devices), (Severity::Error, &["0000:c1:00.0".to_owned()][..]));
            let inside = contained(evidence);
            assert_eq!(examine(&inside)[0].severity, Severity::Note);
        }
    }

    #[test]
    fn another_spelling_of_an_address_is_the_same_gpu() {
        let mut evidence = nvidia();
        device_mut(&mut evidence, 1).pci = address::parse("00000000:C1:00.0");
        assert_eq!(codes(&evidence), [""; 0]);
    }

    #[test]
    fn devices_without_an_address_accuse_nobody() {
        let mut evidence = nvidia();
        device_mut(&mut evidence, 1).pci = None;
        assert_eq!(codes(&evidence), [""; 0]);
    }

    #[test]
    fn a_gpu_that_left_the_bus_is_found_but_not_under_wsl() {
        let mut evidence = nvidia();
        let Told::Value(gpus) = &mut evidence.gpus else { panic!("the sample has a bus") };
        gpus.truncate(1);
        assert_eq!(codes(&evidence), ["gpu_not_on_bus"]);
        evidence.kernel_release = Told::Value("5.15.167.4-microsoft-standard-WSL2".into());
        assert_eq!(codes(&evidence), [""; 0]);
    }

    #[test]
    fn a_sleeping_gpu_is_noted_and_not_missed() {
        let mut evidence = nvidia();
        let Told::Value(gpus) = &mut evidence.gpus else { panic!("the sample has a bus") };
        gpus[1].asleep = true;
        evidence.sources[0].result.as_mut().unwrap().devices.truncate(1);
        assert_eq!(codes(&evidence), ["gpu_asleep"]);
    }

    #[test]
    fn a_machine_with_only_another_display_adapter_has_no_gpu_to_share() {
        let mut evidence = Evidence::default();
        let aspeed =
            PciGpu { vendor: Vendor::Other, vendor_id: Some(0x1a03), ..nvidia().gpus.value().unwrap()[0].clone() };
        evidence.gpus = Told::Value(vec![aspeed]);
        assert_eq!(codes(&evidence), ["no_gpu"]);
        let finding = &examine(&evidence)[0];
        assert!(finding.remedy.contains("--simulate") && finding.evidence.len() == 2);
    }
}

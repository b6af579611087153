//! Checks of the devices: their own reports, the PCI bus and the kernel's log.

use std::collections::{BTreeMap, BTreeSet};

use gpupool_core::{DeviceHealth, PciAddress, Percent, Vendor};

use crate::detected_device::{DetectedDevice, DevicePartition};
use crate::doctor::evidence::DoctorEvidence;
use crate::doctor::findings::{DoctorFinding, DoctorSeverity};
use crate::kernel_log::FaultCount;
use crate::nvml::xid;
use crate::pci_bus::PciGpu;
use crate::reported::Reported;

/// Temperature near which GPUs throttle.
const HOT_C: i16 = 90;

/// Reports devices that are lost.
pub(super) fn device_lost(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let remedy = "The GPU fell off the bus or stopped responding; other devices are not affected. Wait for their work \
                  to end, then reboot. If it happens again, check power supply, cooling and seating (Xid 79).";
    let finding = DoctorFinding::new("device_lost", DoctorSeverity::Error, "A GPU is lost.", remedy);
    for_devices(evidence, finding, |device| {
        (device.health == Some(DeviceHealth::Lost)).then(|| "the driver reports it as lost".to_owned())
    })
}

/// Reports devices that report themselves unhealthy.
pub(super) fn device_unhealthy(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let remedy = "The GPU gets no new work. Reset it when it is free (`nvidia-smi --gpu-reset -i <number>`, `amd-smi \
                  reset -G -g <number>`) or reboot; replace it if the errors return.";
    let finding = DoctorFinding::new("device_unhealthy", DoctorSeverity::Error, "A GPU is not healthy.", remedy);
    for_devices(evidence, finding, |device| match &device.health {
        Some(DeviceHealth::Unhealthy(why)) => Some(why.to_string()),
        _ => None,
    })
}

/// Reports devices that are about to throttle.
pub(super) fn device_hot(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let remedy = "Check fans, dust and air flow; lower the power limit (`nvidia-smi -pl <watts>`, `amd-smi set \
                  --power-cap <watts>`) until it is cooler.";
    let summary = format!("A GPU is at {HOT_C} °C or more and will slow down.");
    let finding = DoctorFinding::new("device_hot", DoctorSeverity::Warning, summary, remedy);
    for_devices(evidence, finding, |device| {
        let celsius = device.temperature_c.value().filter(|celsius| **celsius >= HOT_C)?;
        Some(format!("it is at {celsius} °C"))
    })
}

/// Reports GPUs with MIG enabled but no instances: the mode survives a reboot, the instances do not.
pub(super) fn mig_without_instances(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let reading = evidence.merged_reading();
    let has_instances = |gpu: &DetectedDevice| {
        reading.devices.iter().any(|device| {
            let Some(DevicePartition::Mig { parent_uuid, .. }) = &device.partition else { return false };
            let by_uuid = parent_uuid.is_some() && *parent_uuid == gpu.uuid;
            by_uuid || device.pci.is_some() && device.pci == gpu.pci
        })
    };
    let remedy = "The GPU cannot run any work. Create instances (`sudo nvidia-smi mig -cgi <profiles> -C`; \
                  nvidia-mig-parted does so at each boot), or turn MIG off: `sudo nvidia-smi -i <number> -mig 0`.";
    let summary = "MIG is on but there are no instances: they are lost at each reboot.";
    let finding = DoctorFinding::new("mig_without_instances", DoctorSeverity::Warning, summary, remedy);
    for_devices(evidence, finding, |device| {
        let bare = device.mig == Some(true) && !device.is_mig_instance() && !has_instances(device);
        bare.then(|| "MIG mode is enabled and it has no instances".to_owned())
    })
}

/// Reports devices that report full utilization without any process.
pub(super) fn utilization_stuck(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    // Outside the host's namespace the process list is empty for another reason.
    if evidence.is_confined() {
        return Vec::new();
    }
    let remedy = "The counter can stick after a program was killed: the load is not real. It clears when a \
                  program uses the GPU and ends, or with a reset. gpupool refuses nothing because of utilization.";
    let summary = "A GPU reports 100 % utilization with no process on it.";
    let finding = DoctorFinding::new("utilization_stuck", DoctorSeverity::Warning, summary, remedy);
    for_devices(evidence, finding, |device| {
        let is_unused = matches!(&device.processes, Reported::Value(processes) if processes.is_empty());
        let is_full = device.utilization.value().is_some_and(|busy| *busy >= Percent::FULL);
        (is_unused && is_full).then(|| "utilization 100 %, no processes".to_owned())
    })
}

/// Reports devices that share the host's memory.
pub(super) fn unified_memory(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let remedy = "No action is needed: gpupool shares such a GPU by time, not by memory.";
    let summary = "A GPU shares the memory of the host and has none of its own.";
    let finding = DoctorFinding::new("unified_memory", DoctorSeverity::Note, summary, remedy);
    for_devices(evidence, finding, |device| device.memory.unified.then(|| "it uses the host's memory".to_owned()))
}

/// Adds every device for which `describe` returns a text to the finding.
fn for_devices(
    evidence: &DoctorEvidence,
    finding: DoctorFinding,
    describe: impl Fn(&DetectedDevice) -> Option<String>,
) -> Vec<DoctorFinding> {
    let reading = evidence.merged_reading();
    let identities = reading.identities();
    let devices = reading.devices.iter().zip(&identities).filter_map(|(device, identity)| {
        let what = describe(device)?;
        // A whole GPU is named by its PCI address, as in other findings; a partition by its own identity.
        let name = match (device.pci, &device.partition) {
            (Some(address), None) => address.to_string(),
            _ => identity.to_string(),
        };
        let model = device.name.as_deref().unwrap_or("unknown model");
        Some((format!("{name} ({model}): {what}"), name))
    });
    let (lines, names): (Vec<String>, Vec<String>) = devices.unzip();
    vec![finding.based_on(lines).about(names)]
}

// Agreement of the bus and the drivers about the GPUs, compared by address and never by spelling.

/// Reports driven GPUs on the bus that no source of their vendor lists.
pub(super) fn gpu_not_reported(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let of_vendor = |(vendor, driver): (Vendor, &str)| {
        let listed = listed_gpus(evidence, vendor)?;
        let is_left_out = |gpu: &&PciGpu| gpu.is_bound_to(driver) && !gpu.asleep && !listed.contains(&gpu.pci);
        let left_out: Vec<&PciGpu> = evidence.gpus_of(vendor).filter(is_left_out).collect();
        left_out.first()?;
        let (severity, summary, remedy) = if evidence.in_container() {
            (
                DoctorSeverity::Note,
                "A GPU on the PCI bus is not available in this container.",
                "No action is needed if this is intended. Otherwise start the container with all devices: `--gpus all` \
                 for NVIDIA, `--device=/dev/kfd --device=/dev/dri` for AMD.",
            )
        } else {
            (
                DoctorSeverity::Error,
                "A GPU on the PCI bus is missing from its driver's list.",
                "The GPU may have fallen off the bus or failed to start: search `dmesg` for NVRM, Xid 79 or amdgpu. \
                 Reset it or reboot; if the problem returns, check its power, seating and riser.",
            )
        };
        let finding = DoctorFinding::new("gpu_not_reported", severity, summary, remedy)
            .based_on([format!("the sources list {} of {} GPUs", listed.len(), evidence.gpus_of(vendor).count())])
            .based_on(left_out.iter().map(|gpu| format!("{} is bound to {driver} but not listed", gpu.pci)))
            .about(left_out.iter().map(|gpu| gpu.pci));
        Some(finding)
    };
    [(Vendor::Nvidia, "nvidia"), (Vendor::Amd, "amdgpu")].into_iter().filter_map(of_vendor).collect()
}

/// Reports listed GPUs that are no longer on the bus.
pub(super) fn gpu_not_on_bus(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    // Under WSL, devices belong to the host of the virtual machine and are on no bus of the guest.
    let is_wsl = evidence.kernel_release.value().is_some_and(|release| release.to_lowercase().contains("microsoft"));
    let Some(gpus) = evidence.gpus.value().filter(|_| !is_wsl) else { return Vec::new() };
    let on_bus: BTreeSet<PciAddress> = gpus.iter().map(|gpu| gpu.pci).collect();
    let listed = [Vendor::Nvidia, Vendor::Amd].into_iter().filter_map(|vendor| listed_gpus(evidence, vendor)).flatten();
    let gone: BTreeSet<PciAddress> = listed.filter(|address| !on_bus.contains(address)).collect();
    let remedy = "The GPU was removed or fell off the bus after the driver started. Do not use it; `echo 1 | sudo tee \
                  /sys/bus/pci/rescan` may restore it, otherwise reboot.";
    let summary = "The driver lists a GPU that is not on the PCI bus.";
    let finding = DoctorFinding::new("gpu_not_on_bus", DoctorSeverity::Warning, summary, remedy)
        .based_on(gone.iter().map(|address| format!("{address} is not in /sys/bus/pci/devices")))
        .about(&gone);
    vec![finding]
}

/// Reports healthy GPUs that are suspended to save power.
pub(super) fn gpu_asleep(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let sleeping = evidence.gpus.value().into_iter().flatten().filter(|gpu| gpu.asleep);
    let remedy = "No action is needed: the GPU wakes when it is used, and is not read until then. To keep it awake, \
                  write `on` to its power/control file.";
    let summary = "A GPU is suspended to save power and reports no values.";
    let finding = DoctorFinding::new("gpu_asleep", DoctorSeverity::Note, summary, remedy)
        .based_on(sleeping.clone().map(|gpu| format!("{}: power/runtime_status is suspended", gpu.pci)))
        .about(sleeping.map(|gpu| gpu.pci));
    vec![finding]
}

/// Reports a machine without a GPU to share.
pub(super) fn no_gpu(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let usable = [Vendor::Nvidia, Vendor::Amd].into_iter().any(|vendor| evidence.gpus_of(vendor).next().is_some());
    if usable || !evidence.merged_reading().devices.is_empty() {
        return Vec::new();
    }
    let others = evidence.gpus.value().into_iter().flatten();
    let other = |gpu: &PciGpu| format!("{}: PCI device {}, not supported", gpu.pci, gpu.ids());
    let seen = match &evidence.gpus {
        crate::Reported::Value(_) => "no NVIDIA or AMD GPU on the PCI bus".to_owned(),
        _ => "the PCI bus cannot be read".to_owned(),
    };
    let remedy = "If you expect a GPU, look for it with `lspci -nn | grep -i -e vga -e 3d -e accel`; in a virtual \
                  machine it must be passed through. To try gpupool without a GPU, simulate some with `--simulate`.";
    let summary = "This machine has no GPU that can be shared.";
    vec![
        DoctorFinding::new("no_gpu", DoctorSeverity::Note, summary, remedy)
            .based_on([seen])
            .based_on(others.map(other)),
    ]
}

/// Returns the addresses that the sources of a vendor list; `None` without a reading or if an address is missing.
fn listed_gpus(evidence: &DoctorEvidence, vendor: Vendor) -> Option<BTreeSet<PciAddress>> {
    let readings: Vec<_> = evidence.readings_of(vendor).collect();
    if readings.is_empty() {
        return None;
    }
    readings.iter().flat_map(|reading| &reading.devices).map(|device| device.pci).collect()
}

// Faults in the kernel's log, by device.

/// Reports devices with faults in the kernel's log.
pub(super) fn kernel_log_faults(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let mut by_device: BTreeMap<Option<PciAddress>, Vec<&FaultCount>> = BTreeMap::new();
    for counted in &evidence.kernel_log {
        by_device.entry(counted.pci).or_default().push(counted);
    }
    by_device.into_iter().map(|(pci, faults)| fault_finding(pci, &faults)).collect()
}

fn fault_finding(pci: Option<PciAddress>, faults: &[&FaultCount]) -> DoctorFinding {
    let severity = match faults.iter().map(|counted| counted.fault.severity()).max() {
        Some(xid::XidSeverity::Unhealthy) => DoctorSeverity::Error,
        Some(xid::XidSeverity::Warn) => DoctorSeverity::Warning,
        Some(xid::XidSeverity::Application) | None => DoctorSeverity::Note,
    };
    let summary = match (severity, pci) {
        (DoctorSeverity::Note, Some(_)) => "The kernel's log shows programs that failed on a GPU; the GPU is fine.",
        (DoctorSeverity::Note, None) => "The kernel's log shows programs that failed on GPUs; the GPUs are fine.",
        (_, Some(_)) => "The kernel's log shows faults of a GPU.",
        (_, None) => "The kernel's log shows faults of GPUs that it does not name.",
    };
    DoctorFinding::new("kernel_log_trouble", severity, summary, fault_remedy(faults))
        .based_on(faults.iter().map(|counted| counted.fault.describe(counted.count)))
        .about(pci)
}

/// Joins the remedies of all faults, or refers to the programs if no fault concerns the device.
fn fault_remedy(faults: &[&FaultCount]) -> String {
    let advice = faults.iter().filter(|counted| !counted.fault.remedy().is_empty());
    let lines: BTreeSet<String> =
        advice.map(|counted| format!("After {}: {}.", counted.fault.name(), counted.fault.remedy())).collect();
    match lines.is_empty() {
        true => "The GPU needs no action: check the programs that ran on it.".to_owned(),
        false => Vec::from_iter(lines).join(" "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::parse_pci_address;
    use crate::detected_device::DeviceProcess;
    use crate::doctor::findings::diagnose;
    use crate::doctor::findings::tests::samples::{amd, codes, contained, device_mut, nvidia};

    #[test]
    fn lost_and_unhealthy_devices_are_named_and_the_others_are_not() {
        let mut evidence = nvidia();
        device_mut(&mut evidence, 1).health = Some(DeviceHealth::Lost);
        assert_eq!(codes(&evidence), ["device_lost"]);
        assert_eq!(diagnose(&evidence)[0].devices, ["0000:c1:00.0"]);
        device_mut(&mut evidence, 1).health = Some(DeviceHealth::Unhealthy("row remap failed".into()));
        assert_eq!(codes(&evidence), ["device_unhealthy"]);
        assert!(diagnose(&evidence)[0].evidence[0].ends_with("row remap failed"));
    }

    #[test]
    fn a_hot_device_is_found() {
        let mut evidence = amd();
        device_mut(&mut evidence, 0).temperature_c = Reported::Value(HOT_C - 1);
        assert_eq!(codes(&evidence), [""; 0]);
        device_mut(&mut evidence, 0).temperature_c = Reported::Value(HOT_C);
        assert_eq!(codes(&evidence), ["device_hot"]);
    }

    #[test]
    fn mig_without_instances_is_found_and_with_instances_is_fine() {
        let mut evidence = nvidia();
        device_mut(&mut evidence, 0).mig = Some(true);
        assert_eq!(codes(&evidence), ["mig_without_instances"]);
        let mut instance = device_mut(&mut evidence, 0).clone();
        instance.uuid = Some("MIG-1".into());
        instance.partition = Some(DevicePartition::Mig {
            parent_uuid: None,
            gpu_instance: Some(1),
            compute_instance: Some(0),
            profile: None,
        });
        evidence.sources[0].result.as_mut().unwrap().devices.insert(1, instance);
        assert_eq!(codes(&evidence), [""; 0]);
    }

    #[test]
    fn full_utilization_is_found_only_without_processes_on_the_host() {
        let mut evidence = nvidia();
        device_mut(&mut evidence, 0).utilization = Reported::Value(Percent::FULL);
        assert_eq!(codes(&evidence), ["utilization_stuck"]);
        assert_eq!(codes(&contained(evidence.clone())), [""; 0]);
        device_mut(&mut evidence, 0).processes = Reported::Value(vec![DeviceProcess::default()]);
        assert_eq!(codes(&evidence), [""; 0]);
        device_mut(&mut evidence, 0).processes = Reported::ABSENT;
        assert_eq!(codes(&evidence), [""; 0]);
    }

    #[test]
    fn unified_memory_is_noted() {
        let mut evidence = nvidia();
        device_mut(&mut evidence, 0).memory.unified = true;
        assert_eq!(codes(&evidence), ["unified_memory"]);
    }

    #[test]
    fn a_gpu_that_vanished_without_a_word_is_found() {
        for mut evidence in [nvidia(), amd()] {
            evidence.sources[0].result.as_mut().unwrap().devices.truncate(1);
            assert_eq!(codes(&evidence), ["gpu_not_reported"]);
            let finding = &diagnose(&evidence)[0];
            assert_eq!(
                (finding.severity, &*finding.devices),
                (DoctorSeverity::Error, &["0000:c1:00.0".to_owned()][..])
            );
            let inside = contained(evidence);
            assert_eq!(diagnose(&inside)[0].severity, DoctorSeverity::Note);
        }
    }

    #[test]
    fn another_spelling_of_an_address_is_the_same_gpu() {
        let mut evidence = nvidia();
        device_mut(&mut evidence, 1).pci = parse_pci_address("00000000:C1:00.0");
        assert_eq!(codes(&evidence), [""; 0]);
    }

    #[test]
    fn devices_without_an_address_cause_no_finding() {
        let mut evidence = nvidia();
        device_mut(&mut evidence, 1).pci = None;
        assert_eq!(codes(&evidence), [""; 0]);
    }

    #[test]
    fn a_gpu_that_left_the_bus_is_found_but_not_under_wsl() {
        let mut evidence = nvidia();
        let Reported::Value(gpus) = &mut evidence.gpus else { panic!("the sample has a bus") };
        gpus.truncate(1);
        assert_eq!(codes(&evidence), ["gpu_not_on_bus"]);
        evidence.kernel_release = Reported::Value("5.15.167.4-microsoft-standard-WSL2".into());
        assert_eq!(codes(&evidence), [""; 0]);
    }

    #[test]
    fn a_sleeping_gpu_is_noted_and_not_missed() {
        let mut evidence = nvidia();
        let Reported::Value(gpus) = &mut evidence.gpus else { panic!("the sample has a bus") };
        gpus[1].asleep = true;
        evidence.sources[0].result.as_mut().unwrap().devices.truncate(1);
        assert_eq!(codes(&evidence), ["gpu_asleep"]);
    }

    #[test]
    fn a_machine_with_only_another_display_adapter_has_no_gpu_to_share() {
        let mut evidence = DoctorEvidence::default();
        let aspeed =
            PciGpu { vendor: Vendor::Other, vendor_id: Some(0x1a03), ..nvidia().gpus.value().unwrap()[0].clone() };
        evidence.gpus = Reported::Value(vec![aspeed]);
        assert_eq!(codes(&evidence), ["no_gpu"]);
        let finding = &diagnose(&evidence)[0];
        assert!(finding.remedy.contains("--simulate") && finding.evidence.len() == 2);
    }

    #[test]
    fn each_faulty_device_in_the_log_has_counts_meaning_and_remedy() {
        let log = "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.183.01\n\
                   NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus.\n\
                   NVRM: Xid (PCI:0000:01:00): 13, pid=1\nNVRM: Xid (PCI:0000:01:00): 13, pid=1\n\
                   NVRM: Xid (PCI:0000:c1:00): 31, pid=2\n";
        let findings = diagnose(&nvidia().with_kernel_log(log));
        let [lost, fine] = findings.as_slice() else { panic!("{findings:?}") };
        assert_eq!((lost.severity, &*lost.devices), (DoctorSeverity::Error, &["0000:01:00.0".to_owned()][..]));
        assert_eq!(lost.evidence.len(), 2);
        assert!(lost.evidence[0].starts_with("Xid 13 ×2: "), "{lost:?}");
        assert!(lost.remedy.starts_with("After Xid 79: reboot"), "{lost:?}");
        assert_eq!((fine.severity, &*fine.devices), (DoctorSeverity::Note, &["0000:c1:00.0".to_owned()][..]));
        assert!(fine.summary.contains("the GPU is fine"), "{fine:?}");
    }

    #[test]
    fn faults_before_the_last_boot_and_other_lines_are_not_found() {
        let quiet = "amdgpu: ring gfx uses VM inv eng 0\nusb: probe of 1-1 failed";
        assert_eq!(codes(&amd().with_kernel_log(quiet)), [""; 0]);
        let rebooted = "NVRM: Xid (PCI:0000:01:00): 79\nLinux version 6.8.0 (a@b) (gcc 13) #1\n";
        assert_eq!(codes(&nvidia().with_kernel_log(rebooted)), [""; 0]);
    }
}

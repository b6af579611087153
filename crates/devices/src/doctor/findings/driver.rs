//! Checks of drivers and sources: loaded, bound, of matching versions, and responding.

use gpupool_core::Vendor;

use crate::doctor::evidence::{DoctorEvidence, vendor_of};
use crate::doctor::findings::{DoctorFinding, DoctorSeverity};
use crate::pci_bus::PciGpu;
use crate::source::{SourceError, SourceKind};

/// Vendor, kernel module and display name of each supported driver.
const DRIVERS: [(Vendor, &str, &str); 2] = [(Vendor::Nvidia, "nvidia", "NVIDIA"), (Vendor::Amd, "amdgpu", "AMD")];

/// Reports a kernel module and a library of different versions, usually after an update.
pub(super) fn version_mismatch(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let mut lines = evidence.errors_with_code("driver_library_mismatch");
    // If the driver works, the library file that was found is not the one in use.
    let differ = evidence.nvidia.differ() && evidence.readings_of(Vendor::Nvidia).next().is_none();
    if differ || !lines.is_empty() {
        let versions = [("kernel module", &evidence.nvidia.kernel), ("library", &evidence.nvidia.library)];
        lines.extend(versions.iter().filter_map(|(what, version)| Some(format!("the {what} is {}", version.value()?))));
    }
    let remedy = if evidence.in_container() {
        "Restart the container to get the libraries of the host's current driver. If the host shows the same error, \
         reboot it."
    } else {
        "Running programs continue. Reboot, or stop everything that uses the GPUs and reload the driver: \
         `sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia`. Exclude the driver from \
         unattended upgrades to keep it from happening again."
    };
    let summary = "The NVIDIA kernel module and library have different versions.";
    vec![DoctorFinding::new("driver_library_mismatch", DoctorSeverity::Error, summary, remedy).based_on(lines)]
}

/// Reports GPUs on the bus without a driver: the driver is not loaded, or does not bind to them.
pub(super) fn driver_missing(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let of_vendor = |(vendor, module, name): (Vendor, &str, &str)| {
        let unbound = evidence.gpus_of(vendor).filter(|gpu| gpu.driver.is_none());
        unbound.clone().next()?;
        if evidence.has_module(module) {
            let remedy = format!(
                "Find the reason with `dmesg | grep -i {module}`: the driver may be too old or too new for this GPU, \
                 or the GPU may have failed to start (power cables, seating, firmware)."
            );
            let summary = format!("The {name} driver is loaded but not bound to every {name} GPU.");
            return Some(
                DoctorFinding::new("driver_not_bound", DoctorSeverity::Warning, summary, remedy).about_gpus(unbound),
            );
        }
        let place = if evidence.in_container() { "on the host: this is a container" } else { "as root" };
        let remedy = format!(
            "Load the driver ({place}): `modprobe {module}`. If the module does not exist, install the {name} driver. \
             After a kernel update the module must be rebuilt (`dkms status`); with Secure Boot it must be signed. \
             `dmesg` shows why loading failed."
        );
        let summary = format!("The {name} driver is not loaded, but a {name} GPU is on the PCI bus.");
        let finding = DoctorFinding::new("driver_not_loaded", DoctorSeverity::Error, summary, remedy)
            .about_gpus(unbound)
            .based_on(evidence.modules.value().map(|_| format!("the kernel module {module} is not loaded")))
            .based_on(evidence.errors_with_code("driver_not_loaded"));
        Some(finding)
    };
    DRIVERS.into_iter().filter_map(of_vendor).collect()
}

/// Reports NVIDIA GPUs bound to nouveau, the kernel's own driver, or without a driver while nouveau is loaded. It
/// cannot compute.
pub(super) fn nouveau_in_use(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let loaded = evidence.has_module("nouveau");
    let holds = |gpu: &&PciGpu| gpu.is_bound_to("nouveau") || loaded && gpu.driver.is_none();
    let remedy = "Install NVIDIA's driver and disable nouveau: write `blacklist nouveau` and `options \
                  nouveau modeset=0` to /etc/modprobe.d/blacklist-nouveau.conf, rebuild the initial ramdisk \
                  (`update-initramfs -u` or `dracut --force`) and reboot.";
    let summary = "The nouveau driver is used instead of NVIDIA's; it cannot compute and reports nothing.";
    let held = evidence.gpus_of(Vendor::Nvidia).filter(holds);
    vec![DoctorFinding::new("nouveau_in_use", DoctorSeverity::Error, summary, remedy).about_gpus(held)]
}

/// Reports AMD GPUs bound to the driver from before 2015.
pub(super) fn legacy_radeon(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let remedy = "The radeon driver does not support ROCm and reports few values. Southern and Sea Islands cards can \
                  use amdgpu with the kernel parameters `radeon.si_support=0 radeon.cik_support=0 amdgpu.si_support=1 \
                  amdgpu.cik_support=1`; older cards cannot be shared for compute.";
    let summary = "An AMD GPU uses the legacy radeon driver.";
    let held = evidence.gpus_of(Vendor::Amd).filter(|gpu| gpu.is_bound_to("radeon"));
    vec![DoctorFinding::new("legacy_radeon_driver", DoctorSeverity::Warning, summary, remedy).about_gpus(held)]
}

/// Reports GPUs reserved for a virtual machine.
pub(super) fn passed_through(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let remedy = "No action is needed if a virtual machine uses the GPU. To use it here, stop the virtual machine, \
                  unbind the GPU from vfio-pci and remove its id from the `vfio-pci.ids` option.";
    let summary = "A GPU is bound to vfio-pci: it is passed through to a virtual machine and cannot be shared here.";
    let kept = evidence.gpus.value().into_iter().flatten().filter(|gpu| gpu.is_bound_to("vfio-pci"));
    vec![DoctorFinding::new("passed_through", DoctorSeverity::Note, summary, remedy).about_gpus(kept)]
}

/// Reports a missing persistence daemon: without it the driver resets its state of a GPU after each last use.
pub(super) fn persistence_off(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let driven = evidence.gpus_of(Vendor::Nvidia).filter(|gpu| gpu.is_bound_to("nvidia"));
    // The daemon is invisible from a container; a laptop's GPU should sleep.
    let matters = !evidence.is_confined() && driven.clone().next().is_some() && !driven.clone().any(|gpu| gpu.asleep);
    let off = matters && evidence.persistence_daemon.value() == Some(&false);
    let remedy = "Start the daemon: `sudo systemctl enable --now nvidia-persistenced` (or `sudo nvidia-smi -pm 1` \
                  until the next boot). Leave it off on a laptop whose GPU should sleep.";
    let summary = "NVIDIA's persistence daemon is not running: the first call on an idle GPU takes seconds.";
    let finding = DoctorFinding::new("persistence_off", DoctorSeverity::Note, summary, remedy)
        .based_on(off.then(|| "neither a process nvidia-persistenced nor its socket exists".to_owned()))
        .about(driven.map(|gpu| gpu.pci));
    vec![finding]
}

// Errors and warnings of the sources.

/// Reports sources that do not respond.
pub(super) fn driver_unresponsive(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let remedy = "Do not use `kill -9` on a hanging program: the device may stay unusable until a reboot. List the \
                  tasks stuck in the driver (state D) with `ps -eo pid,stat,wchan:32,args | awk '$2 ~ /D/'`, and look \
                  for Xid or reset lines in `dmesg`. Wait for running work to end, then reset the device (`nvidia-smi \
                  --gpu-reset`) or reboot.";
    let summary = "The GPU driver does not respond: its tools or library hang.";
    let lines = evidence.errors_with_code("driver_unresponsive");
    vec![DoctorFinding::new("driver_unresponsive", DoctorSeverity::Error, summary, remedy).based_on(lines)]
}

/// Reports sources that failed for a reason that no other check covers.
pub(super) fn source_failed(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let finding = |(kind, error): (SourceKind, &SourceError)| {
        let remedy = match error {
            SourceError::Driver(text) if text.contains("Unknown Error") && evidence.in_container() => {
                "In a container this error appears after the host rewrites the rules of the device control group \
                 (`systemctl daemon-reload` does): the GPU is fine, restart the container. To prevent it, name the \
                 devices when the container starts (`--device=/dev/nvidia0` and so on)."
            }
            SourceError::Driver(_) => {
                "Read the driver's messages of that time in `dmesg`. If a device was lost, reset it or reboot; other \
                 devices are not affected."
            }
            SourceError::DriverNotLoaded(_) if is_driven(evidence, vendor_of(kind)) => {
                "The driver is loaded and bound to a GPU, but its tools cannot reach it. Check the device nodes in \
                 /dev and `dmesg`; reload the driver or reboot."
            }
            SourceError::Malformed { .. } => {
                "Report this with the file that `gpupool doctor --bundle` writes: gpupool does not support this output \
                 of the tool yet."
            }
            _ => return None,
        };
        let summary = format!("The source {kind} returned no devices.");
        Some(DoctorFinding::new("source_failed", DoctorSeverity::Error, summary, remedy).based_on([error.to_string()]))
    };
    evidence.failures().filter_map(finding).collect()
}

/// Reports an NVIDIA driver without its library, for example in a container that was started without it.
pub(super) fn library_missing(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let is_missed = is_driven(evidence, Some(Vendor::Nvidia)) && evidence.readings_of(Vendor::Nvidia).next().is_none();
    let missing =
        evidence.failures().filter(|failure| matches!(failure, (SourceKind::Nvml, SourceError::NotPresent { .. })));
    let lines = missing.filter(|_| is_missed).map(|(_, error)| error.to_string());
    let remedy = if evidence.in_container() {
        "Start the container with the NVIDIA container toolkit (`--gpus all`) and with `utility` among \
         NVIDIA_DRIVER_CAPABILITIES, to get libnvidia-ml.so.1."
    } else {
        "Install the driver package with libnvidia-ml.so.1 (libnvidia-compute, nvidia-driver-cuda or nvidia-utils) in \
         the version of the kernel module, or set GPUPOOL_NVML to its path."
    };
    let summary = "The NVIDIA driver is loaded but its library libnvidia-ml.so.1 is missing.";
    vec![DoctorFinding::new("nvidia_library_missing", DoctorSeverity::Error, summary, remedy).based_on(lines)]
}

/// Reports an AMD compute driver without any of AMD's tools.
pub(super) fn rocm_tools_missing(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let has_kfd = evidence.nodes().iter().any(|node| node.name == "kfd");
    let missing = |kind| matches!(evidence.tools.get(&kind), Some(None));
    if !has_kfd || !missing(SourceKind::AmdSmi) || !missing(SourceKind::RocmSmi) {
        return Vec::new();
    }
    let remedy = "gpupool works without them: it reads the kernel's files. For ECC and partitions install amd-smi, or \
                  add /opt/rocm/bin to the PATH.";
    let summary = "AMD's compute driver is loaded (/dev/kfd), but amd-smi and rocm-smi are missing.";
    let lines = ["/dev/kfd exists".to_owned(), "amd-smi and rocm-smi are not on the PATH".to_owned()];
    vec![DoctorFinding::new("rocm_tools_missing", DoctorSeverity::Note, summary, remedy).based_on(lines)]
}

/// Reports problems of sources that lost no device.
pub(super) fn source_warned(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let readings = evidence.sources.iter().filter_map(|source| Some((source.kind, source.result.as_ref().ok()?)));
    let lines = readings.flat_map(|(kind, reading)| reading.warnings.iter().map(move |text| format!("{kind}: {text}")));
    let remedy = "Devices are still listed. If a value you need is missing, report this with the file that `gpupool \
                  doctor --bundle` writes.";
    let summary = "Some output of the sources could not be read.";
    vec![DoctorFinding::new("source_warned", DoctorSeverity::Note, summary, remedy).based_on(lines)]
}

/// Whether the vendor's own driver is bound to a GPU.
fn is_driven(evidence: &DoctorEvidence, vendor: Option<Vendor>) -> bool {
    let own = |driver: &str| matches!(driver, "nvidia" | "amdgpu");
    vendor.is_some_and(|vendor| evidence.gpus_of(vendor).any(|gpu| gpu.driver.as_deref().is_some_and(own)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    use crate::doctor::findings::diagnose;
    use crate::doctor::findings::tests::samples::{
        amd, bind_all, codes, contained, fail, failing, nvidia, with_modules,
    };
    use crate::reported::Reported;

    #[test]
    fn a_library_of_another_version_is_found_by_its_words_and_by_the_versions() {
        let mut evidence = fail(nvidia(), SourceKind::Nvml, SourceError::VersionMismatch("mismatch".into()));
        assert_eq!(codes(&evidence), ["driver_library_mismatch"]);
        evidence = fail(evidence, SourceKind::Nvml, SourceError::DriverNotLoaded("no answer".into()));
        evidence.nvidia.library = Reported::Value("550.54.14".into());
        assert!(codes(&evidence).contains(&"driver_library_mismatch"));
        let finding = &diagnose(&evidence)[0];
        assert_eq!(finding.evidence, ["the kernel module is 535.183.01", "the library is 550.54.14"]);
    }

    #[test]
    fn another_library_file_is_no_mismatch_while_the_driver_works() {
        let mut evidence = nvidia();
        evidence.nvidia.library = Reported::Value("550.54.14".into());
        assert_eq!(codes(&evidence), [""; 0]);
    }

    /// Creates a machine without a driver: nothing bound, nothing loaded, no nodes.
    fn without_driver(evidence: DoctorEvidence) -> DoctorEvidence {
        let mut evidence = with_modules(bind_all(evidence, None), &[]);
        let gone = SourceError::DriverNotLoaded("no driver".into());
        for kind in evidence.sources.iter().map(|source| source.kind).collect::<Vec<_>>() {
            evidence = fail(evidence, kind, gone.clone());
        }
        evidence.nodes = Reported::Value(Vec::new());
        evidence
    }

    #[test]
    fn a_gpu_on_the_bus_without_a_loaded_driver_is_found() {
        for machine in [nvidia(), amd()] {
            let evidence = without_driver(machine);
            assert_eq!(codes(&evidence), ["driver_not_loaded"]);
            assert_eq!(diagnose(&evidence)[0].devices.len(), 2);
        }
    }

    #[test]
    fn a_gpu_without_its_loaded_driver_is_found() {
        let mut evidence = nvidia();
        if let Reported::Value(gpus) = &mut evidence.gpus {
            gpus[1].driver = None;
        }
        evidence.sources[0].result.as_mut().unwrap().devices.truncate(1);
        assert_eq!(codes(&evidence), ["driver_not_bound"]);
        assert_eq!(diagnose(&evidence)[0].devices, ["0000:c1:00.0"]);
    }

    #[test]
    fn nouveau_and_radeon_and_vfio_are_named() {
        for (machine, driver, code) in [
            (nvidia(), "nouveau", "nouveau_in_use"),
            (amd(), "radeon", "legacy_radeon_driver"),
            (nvidia(), "vfio-pci", "passed_through"),
            (amd(), "vfio-pci", "passed_through"),
        ] {
            let evidence = bind_all(without_driver(machine), Some(driver));
            assert_eq!(codes(&evidence), [code]);
        }
    }

    #[test]
    fn nouveau_that_is_only_loaded_is_named_beside_the_missing_driver() {
        let evidence = with_modules(without_driver(nvidia()), &["nouveau"]);
        assert_eq!(codes(&evidence), ["driver_not_loaded", "nouveau_in_use"]);
    }

    #[test]
    fn a_missing_persistence_daemon_is_noted_unless_the_gpu_sleeps() {
        let mut evidence = nvidia();
        evidence.persistence_daemon = Reported::Value(false);
        assert_eq!(codes(&evidence), ["persistence_off"]);
        assert_eq!(codes(&contained(evidence.clone())), [""; 0]);
        if let Reported::Value(gpus) = &mut evidence.gpus {
            gpus[0].asleep = true;
        }
        assert_eq!(codes(&evidence), ["gpu_asleep"]);
        evidence = nvidia();
        evidence.persistence_daemon = Reported::ABSENT;
        assert_eq!(codes(&evidence), [""; 0]);
    }

    #[test]
    fn a_hanging_driver_is_found_and_kill_is_discouraged() {
        let silent = SourceError::Unresponsive { what: "nvmlInit".into(), after: Duration::from_secs(30) };
        let evidence = fail(nvidia(), SourceKind::Nvml, silent);
        assert_eq!(codes(&evidence), ["driver_unresponsive"]);
        assert!(diagnose(&evidence)[0].remedy.contains("state D"));
    }

    #[test]
    fn a_failing_source_is_found_with_its_error() {
        for error in [
            SourceError::Driver("Unknown Error".into()),
            SourceError::malformed("nvidia-smi XML", "ends early"),
            SourceError::DriverNotLoaded("cannot communicate".into()),
        ] {
            let evidence = fail(nvidia(), SourceKind::Nvml, error.clone());
            assert_eq!(codes(&evidence), ["source_failed"]);
            assert_eq!(diagnose(&evidence)[0].evidence, [error.to_string()]);
        }
    }

    #[test]
    fn an_unknown_error_in_a_container_does_not_blame_the_gpu() {
        let evidence = fail(contained(nvidia()), SourceKind::Nvml, SourceError::Driver("Unknown Error".into()));
        assert!(diagnose(&evidence)[0].remedy.contains("the GPU is fine"));
    }

    #[test]
    fn a_missing_library_is_found_where_the_driver_runs() {
        let absent = SourceError::NotPresent { what: "libnvidia-ml.so.1".into(), why: "no such file".into() };
        assert_eq!(codes(&fail(nvidia(), SourceKind::Nvml, absent.clone())), ["nvidia_library_missing"]);
        // A working tool replaces the library.
        let mut evidence = nvidia();
        evidence.sources[0].kind = SourceKind::NvidiaSmi;
        evidence.sources.push(failing(SourceKind::Nvml, absent.clone()));
        assert_eq!(codes(&evidence), [""; 0]);
        // A machine with only AMD GPUs does not need the library.
        let mut evidence = amd();
        evidence.sources.push(failing(SourceKind::Nvml, absent));
        assert_eq!(codes(&evidence), [""; 0]);
    }

    #[test]
    fn missing_rocm_tools_are_noted_where_kfd_is() {
        let mut evidence = amd();
        evidence.tools.insert(SourceKind::AmdSmi, None);
        assert_eq!(codes(&evidence), [""; 0]);
        evidence.tools.insert(SourceKind::RocmSmi, None);
        assert_eq!(codes(&evidence), ["rocm_tools_missing"]);
    }

    #[test]
    fn warnings_of_sources_are_passed_on() {
        let mut evidence = nvidia();
        evidence.sources[0].result.as_mut().unwrap().warn("line 3 cannot be read");
        assert_eq!(codes(&evidence), ["source_warned"]);
        assert_eq!(diagnose(&evidence)[0].evidence, ["nvml: line 3 cannot be read"]);
    }
}

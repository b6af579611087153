//! Whether the right driver is loaded, bound and of the right version.

use gpupool_core::device::Vendor;

use super::{Finding, Severity};
use crate::doctor::evidence::Evidence;
use crate::pci_bus::PciGpu;
use crate::source::{SourceError, SourceKind};

/// Each vendor's own driver.
const DRIVERS: [(Vendor, &str, &str); 2] = [(Vendor::Nvidia, "nvidia", "NVIDIA"), (Vendor::Amd, "amdgpu", "AMD")];

/// The library was updated and the loaded kernel module was not.
pub(super) fn version_mismatch(evidence: &Evidence) -> Vec<Finding> {
    let said = |(kind, error): (SourceKind, &SourceError)| match error {
        SourceError::VersionMismatch(text) => Some(format!("{kind} says: {text}")),
        _ => None,
    };
    let mut lines: Vec<String> = evidence.failures().filter_map(said).collect();
    // Where the driver answers, the library file that was found is just not the one in use.
    let differ = evidence.nvidia.differ() && evidence.answers_about(Vendor::Nvidia).next().is_none();
    if lines.is_empty() && !differ {
        return Vec::new();
    }
    let versions = [("kernel module", &evidence.nvidia.kernel), ("library", &evidence.nvidia.library)];
    lines.extend(versions.iter().filter_map(|(what, told)| Some(format!("the {what} is {}", told.value()?))));
    let remedy = if evidence.in_container() {
        "Restart the container, so that it gets the libraries of the driver that the host runs now. If the host itself \
         shows the same, reboot it."
    } else {
        "Programs that already run go on. Reboot; or stop everything that uses the GPUs and reload the driver: \
         `sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia`. Exclude the driver from \
         unattended upgrades to keep it from happening again."
    };
    let summary = "The NVIDIA kernel module and its library are of different versions.";
    vec![Finding::new("driver_library_mismatch", Severity::Error, summary, remedy).because(lines)]
}

/// A GPU is on the bus and its driver is not loaded.
pub(super) fn not_loaded(evidence: &Evidence) -> Vec<Finding> {
    let of_vendor = |(vendor, module, name): (Vendor, &str, &str)| {
        let unbound: Vec<&PciGpu> = evidence.gpus_of(vendor).filter(|gpu| gpu.driver.is_none()).collect();
        if unbound.is_empty() || evidence.has_module(module) {
            return None;
        }
        let place = if evidence.in_container() { "on the host: this is a container" } else { "as root" };
        let remedy = format!(
            "Load it ({place}): `modprobe {module}`. If there is no such module, install the {name} driver; after a \
             new kernel it must be built again (`dkms status`); with Secure Boot it must be signed. `dmesg` says why \
             it is refused."
        );
        let summary = format!("The {name} driver is not loaded although a GPU of it is on the PCI bus.");
        let not_answering = evidence.failures().filter_map(|(kind, error)| match error {
            SourceError::DriverNotLoaded(text) => Some(format!("{kind} says: {text}")),
            _ => None,
        });
        let finding = Finding::new("driver_not_loaded", Severity::Error, summary, remedy)
            .because(unbound.iter().map(|gpu| seen(gpu)))
            .because(evidence.modules.value().map(|_| format!("the kernel module {module} is not loaded")))
            .because(not_answering)
            .about(unbound.iter().map(|gpu| gpu.pci));
        Some(finding)
    };
    DRIVERS.into_iter().filter_map(of_vendor).collect()
}

/// The driver is loaded and leaves a GPU alone.
pub(super) fn not_bound(evidence: &Evidence) -> Vec<Finding> {
    let of_vendor = |(vendor, module, name): (Vendor, &str, &str)| {
        let unbound: Vec<&PciGpu> = evidence.gpus_of(vendor).filter(|gpu| gpu.driver.is_none()).collect();
        if unbound.is_empty() || !evidence.has_module(module) {
            return None;
        }
        let remedy = format!(
            "Look for the reason in `dmesg | grep -i {module}`: the driver may be too old or too new for this GPU, or \
             the GPU may have failed to start (power cables, seating, firmware)."
        );
        let summary = format!("The {name} driver is loaded but does not drive every GPU of it.");
        let finding = Finding::new("driver_not_bound", Severity::Warning, summary, remedy)
            .because(unbound.iter().map(|gpu| seen(gpu)))
            .about(unbound.iter().map(|gpu| gpu.pci));
        Some(finding)
    };
    DRIVERS.into_iter().filter_map(of_vendor).collect()
}

/// The driver that comes with the kernel holds an NVIDIA GPU, or stands in the way of the right one; it cannot compute.
pub(super) fn nouveau(evidence: &Evidence) -> Vec<Finding> {
    let loaded = evidence.has_module("nouveau");
    let holds = |gpu: &&PciGpu| gpu.is_bound_to("nouveau") || loaded && gpu.driver.is_none();
    let bound: Vec<&PciGpu> = evidence.gpus_of(Vendor::Nvidia).filter(holds).collect();
    if bound.is_empty() {
        return Vec::new();
    }
    let remedy = "Install NVIDIA's driver and keep nouveau from being loaded: write `blacklist nouveau` and `options \
                  nouveau modeset=0` to /etc/modprobe.d/blacklist-nouveau.conf, renew the initial ramdisk \
                  (`update-initramfs -u` or `dracut --force`) and reboot.";
    let summary = "The nouveau driver is in the place of NVIDIA's: it cannot compute and reports nothing.";
    let finding = Finding::new("nouveau_in_use", Severity::Error, summary, remedy)
        .because(bound.iter().map(|gpu| seen(gpu)))
        .about(bound.iter().map(|gpu| gpu.pci));
    vec![finding]
}

/// AMD's driver of the time before 2015 holds a GPU.
pub(super) fn legacy_radeon(evidence: &Evidence) -> Vec<Finding> {
    let bound: Vec<&PciGpu> = evidence.gpus_of(Vendor::Amd).filter(|gpu| gpu.is_bound_to("radeon")).collect();
    if bound.is_empty() {
        return Vec::new();
    }
    let remedy = "This driver has no ROCm and reports little. Cards of the Southern and Sea Islands kinds can be given \
                  to amdgpu instead with the kernel parameters `radeon.si_support=0 radeon.cik_support=0 \
                  amdgpu.si_support=1 amdgpu.cik_support=1`; older ones cannot be shared for compute.";
    let summary = "An AMD GPU is driven by the legacy radeon driver.";
    let finding = Finding::new("legacy_radeon_driver", Severity::Warning, summary, remedy)
        .because(bound.iter().map(|gpu| seen(gpu)))
        .about(bound.iter().map(|gpu| gpu.pci));
    vec![finding]
}

/// A GPU is kept for a virtual machine.
pub(super) fn passed_through(evidence: &Evidence) -> Vec<Finding> {
    let gpus = evidence.gpus.value().into_iter().flatten();
    let kept: Vec<&PciGpu> = gpus.filter(|gpu| gpu.is_bound_to("vfio-pci")).collect();
    if kept.is_empty() {
        return Vec::new();
    }
    let remedy = "Nothing, if a virtual machine is meant to have it. To use it here, stop that machine, unbind it from \
                  vfio-pci and remove its number from the `vfio-pci.ids` option.";
    let summary = "A GPU is bound to vfio-pci: it is passed through to a virtual machine and cannot be shared here.";
    let finding = Finding::new("passed_through", Severity::Note, summary, remedy)
        .because(kept.iter().map(|gpu| seen(gpu)))
        .about(kept.iter().map(|gpu| gpu.pci));
    vec![finding]
}

/// Without the persistence daemon the driver forgets the GPU whenever nobody uses it.
pub(super) fn persistence_off(evidence: &Evidence) -> Vec<Finding> {
    let driven: Vec<&PciGpu> = evidence.gpus_of(Vendor::Nvidia).filter(|gpu| gpu.is_bound_to("nvidia")).collect();
    let off = evidence.persistence_daemon.value() == Some(&false);
    let confined = evidence.in_container() || evidence.confinement.host_pids.value() == Some(&false);
    // From a container the daemon cannot be seen; a laptop's GPU is meant to sleep.
    if !off || driven.is_empty() || confined || driven.iter().any(|gpu| gpu.asleep) {
        return Vec::new();
    }
    let remedy = "Start it: `sudo systemctl enable --now nvidia-persistenced` (or `sudo nvidia-smi -pm 1` until the \
                  next boot). Leave it off on a laptop whose GPU should sleep.";
    let summary = "NVIDIA's persistence daemon does not run: the first call on an idle GPU takes seconds.";
    let finding = Finding::new("persistence_off", Severity::Note, summary, remedy)
        .because(["no process nvidia-persistenced and no socket of it".to_owned()])
        .about(driven.iter().map(|gpu| gpu.pci));
    vec![finding]
}

/// A GPU on the bus, for people.
fn seen(gpu: &PciGpu) -> String {
    let driver = gpu.driver.as_deref().map_or("no driver".to_owned(), |driver| format!("driver {driver}"));
    format!("{}: PCI device {}, {driver}", gpu.pci, gpu.ids())
}

#[cfg(test)]
mod tests {
    use super::super::examine;
    use super::super::samples::{amd, bind_all, codes, contained, fail, nvidia, with_modules};
    use crate::doctor::evidence::Evidence;
    use crate::source::{SourceError, SourceKind};
    use crate::told::Told;

    #[test]
    fn a_library_of_another_version_is_found_by_its_words_and_by_the_versions() {
        let mut evidence = fail(nvidia(), SourceKind::Nvml, SourceError::VersionMismatch("mismatch".into()));
        assert_eq!(codes(&evidence), ["driver_library_mismatch"]);
        evidence = fail(evidence, SourceKind::Nvml, SourceError::DriverNotLoaded("no answer".into()));
        evidence.nvidia.library = Told::Value("550.54.14".into());
        assert!(codes(&evidence).contains(&"driver_library_mismatch"));
        let finding = &examine(&evidence)[0];
        assert_eq!(finding.evidence, ["the kernel module is 535.183.01", "the library is 550.54.14"]);
    }

    #[test]
    fn another_library_file_is_no_mismatch_while_the_driver_answers() {
        let mut evidence = nvidia();
        evidence.nvidia.library = Told::Value("550.54.14".into());
        assert_eq!(codes(&evidence), [""; 0]);
    }

    /// A machine whose driver is gone: nothing bound, nothing loaded, no nodes.
    fn without_driver(evidence: Evidence) -> Evidence {
        let mut evidence = with_modules(bind_all(evidence, None), &[]);
        let gone = SourceError::DriverNotLoaded("no driver".into());
        for kind in evidence.sources.iter().map(|answer| answer.kind).collect::<Vec<_>>() {
            evidence = fail(evidence, kind, gone.clone());
        }
        evidence.nodes = Told::Value(Vec::new());
        evidence
    }

    #[test]
    fn a_gpu_on_the_bus_without_a_loaded_driver_is_found() {
        for machine in [nvidia(), amd()] {
            let evidence = without_driver(machine);
            assert_eq!(codes(&evidence), ["driver_not_loaded"]);
            assert_eq!(examine(&evidence)[0].devices.len(), 2);
        }
    }

    #[test]
    fn a_gpu_the_loaded_driver_leaves_alone_is_found() {
        let mut evidence = nvidia();
        if let Told::Value(gpus) = &mut evidence.gpus {
            gpus[1].driver = None;
        }
        evidence.sources[0].result.as_mut().unwrap().devices.truncate(1);
        assert_eq!(codes(&evidence), ["driver_not_bound"]);
        assert_eq!(examine(&evidence)[0].devices, ["0000:c1:00.0"]);
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
    fn a_machine_without_the_persistence_daemon_is_told_so_unless_its_gpu_sleeps() {
        let mut evidence = nvidia();
        evidence.persistence_daemon = Told::Value(false);
        assert_eq!(codes(&evidence), ["persistence_off"]);
        assert_eq!(codes(&contained(evidence.clone())), [""; 0]);
        if let Told::Value(gpus) = &mut evidence.gpus {
            gpus[0].asleep = true;
        }
        assert_eq!(codes(&evidence), ["gpu_asleep"]);
        evidence = nvidia();
        evidence.persistence_daemon = Told::ABSENT;
        assert_eq!(codes(&evidence), [""; 0]);
    }
}

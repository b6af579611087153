//! What the answers and the silence of the sources mean.

use gpupool_core::device::Vendor;

use super::{Finding, Severity};
use crate::doctor::evidence::{Evidence, vendor_of};
use crate::source::{SourceError, SourceKind};

/// A source was asked and does not answer.
pub(super) fn unresponsive(evidence: &Evidence) -> Vec<Finding> {
    let silent = evidence.failures().filter(|(_, error)| matches!(error, SourceError::Unresponsive { .. }));
    let lines: Vec<String> = silent.map(|(kind, error)| format!("{kind}: {error}")).collect();
    if lines.is_empty() {
        return Vec::new();
    }
    let remedy = "Do not end what hangs with `kill -9`: that can wedge the device for good. See which tasks are stuck \
                  in the driver (state D) with `ps -eo pid,stat,wchan:32,args | awk '$2 ~ /D/'`, and look for Xid or \
                  reset lines in `dmesg`. Let running work end, then reset the device (`nvidia-smi --gpu-reset`) or \
                  reboot.";
    let summary = "The GPU driver does not answer: its tools or library hang.";
    vec![Finding::new("driver_unresponsive", Severity::Error, summary, remedy).because(lines)]
}

/// A source failed in a way that no other check explains.
pub(super) fn failed(evidence: &Evidence) -> Vec<Finding> {
    let finding = |(kind, error): (SourceKind, &SourceError)| {
        let remedy = match error {
            SourceError::Driver(text) if text.contains("Unknown Error") && evidence.in_container() => {
                "In a container this is what remains when the host rewrote the rules of the device control group \
                 (`systemctl daemon-reload` does): the GPU is fine, restart the container. To keep it from happening \
                 again, name the devices when the container starts (`--device=/dev/nvidia0` and so on)."
            }
            SourceError::Driver(_) => {
                "Look into `dmesg` for what the driver says at that time. If a device was lost, reset or reboot; \
                 others are not affected."
            }
            SourceError::DriverNotLoaded(_) if is_driven(evidence, vendor_of(kind)) => {
                "The driver is loaded and drives a GPU, but its tools cannot reach it. Check the device nodes in /dev \
                 and `dmesg`; reload the driver or reboot."
            }
            SourceError::Malformed { .. } => {
                "Please report it with the file that `gpupool doctor --bundle` writes: this version of the tool prints \
                 something that is not understood yet."
            }
            _ => return None,
        };
        let summary = format!("{kind} gave no devices.");
        Some(Finding::new("source_failed", Severity::Error, summary, remedy).because([error.to_string()]))
    };
    evidence.failures().filter_map(finding).collect()
}

/// NVIDIA's driver runs and its library is not here, as in a container started without it.
pub(super) fn library_missing(evidence: &Evidence) -> Vec<Finding> {
    let lines: Vec<String> = evidence
        .failures()
        .filter(|(kind, error)| matches!((kind, error), (SourceKind::Nvml, SourceError::NotHere { .. })))
        .map(|(_, error)| error.to_string())
        .collect();
    let answered = evidence.answers_about(Vendor::Nvidia).next().is_some();
    if lines.is_empty() || answered || !is_driven(evidence, Some(Vendor::Nvidia)) {
        return Vec::new();
    }
    let remedy = if evidence.in_container() {
        "Start the container with the NVIDIA container toolkit (`--gpus all`) and with `utility` among \
         NVIDIA_DRIVER_CAPABILITIES, so that it gets libnvidia-ml.so.1."
    } else {
        "Install the part of the driver that holds libnvidia-ml.so.1 (libnvidia-compute, nvidia-driver-cuda or \
         nvidia-utils), of the version of the kernel module, or say where it is with GPUPOOL_NVML."
    };
    let summary = "The NVIDIA driver is loaded but its library libnvidia-ml.so.1 is not here.";
    vec![Finding::new("nvidia_library_missing", Severity::Error, summary, remedy).because(lines)]
}

/// AMD's compute driver is here and none of its tools.
pub(super) fn rocm_tools_missing(evidence: &Evidence) -> Vec<Finding> {
    let has_kfd = evidence.nodes().iter().any(|node| node.name == "kfd");
    let missing = |kind| matches!(evidence.tools.get(&kind), Some(None));
    if !has_kfd || !missing(SourceKind::AmdSmi) || !missing(SourceKind::RocmSmi) {
        return Vec::new();
    }
    let remedy = "Nothing needs them: the kernel's files are read. Install amd-smi to see more (ECC, partitions), or \
                  add /opt/rocm/bin to the PATH.";
    let summary = "AMD's compute driver is here (/dev/kfd) but neither amd-smi nor rocm-smi.";
    let lines = ["/dev/kfd exists".to_owned(), "amd-smi and rocm-smi are not on the PATH".to_owned()];
    vec![Finding::new("rocm_tools_missing", Severity::Note, summary, remedy).because(lines)]
}

/// What went wrong in sources without losing a device.
pub(super) fn warned(evidence: &Evidence) -> Vec<Finding> {
    let answered = evidence.sources.iter().filter_map(|answer| Some((answer.kind, answer.result.as_ref().ok()?)));
    let lines: Vec<String> =
        answered.flat_map(|(kind, answer)| answer.warnings.iter().map(move |text| format!("{kind}: {text}"))).collect();
    if lines.is_empty() {
        return Vec::new();
    }
    let remedy = "Devices are still listed. If a value you need is missing, report it with the file that `gpupool \
                  doctor --bundle` writes.";
    let summary = "Some of what the sources gave could not be read.";
    vec![Finding::new("source_warned", Severity::Note, summary, remedy).because(lines)]
}

/// Whether the vendor's own driver is bound to a GPU.
fn is_driven(evidence: &Evidence, vendor: Option<Vendor>) -> bool {
    let own = |driver: &str| matches!(driver, "nvidia" | "amdgpu");
    vendor.is_some_and(|vendor| evidence.gpus_of(vendor).any(|gpu| gpu.driver.as_deref().is_some_and(own)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::examine;
    use super::super::samples::{amd, codes, contained, fail, failing, nvidia};
    use crate::source::{SourceError, SourceKind};

    #[test]
    fn a_hanging_driver_is_found_and_nobody_is_told_to_kill() {
        let silent = SourceError::Unresponsive { what: "nvmlInit".into(), after: Duration::from_secs(30) };
        let evidence = fail(nvidia(), SourceKind::Nvml, silent);
        assert_eq!(codes(&evidence), ["driver_unresponsive"]);
        assert!(examine(&evidence)[0].remedy.contains("state D"));
    }

    #[test]
    fn a_failing_source_is_found_with_its_words() {
        for error in [
            SourceError::Driver("Unknown Error".into()),
            SourceError::malformed("nvidia-smi XML", "ends early"),
            SourceError::DriverNotLoaded("cannot communicate".into()),
        ] {
            let evidence = fail(nvidia(), SourceKind::Nvml, error.clone());
            assert_eq!(codes(&evidence), ["source_failed"]);
            assert_eq!(examine(&evidence)[0].evidence, [error.to_string()]);
        }
    }

    #[test]
    fn an_unknown_error_in_a_container_does_not_blame_the_gpu() {
        let evidence = fail(contained(nvidia()), SourceKind::Nvml, SourceError::Driver("Unknown Error".into()));
        assert!(examine(&evidence)[0].remedy.contains("the GPU is fine"));
    }

    #[test]
    fn a_missing_library_is_found_where_the_driver_runs() {
        let absent = SourceError::NotHere { what: "libnvidia-ml.so.1".into(), why: "no such file".into() };
        assert_eq!(codes(&fail(nvidia(), SourceKind::Nvml, absent.clone())), ["nvidia_library_missing"]);
        // Where the tool answers, the library is not missed.
        let mut evidence = nvidia();
        evidence.sources[0].kind = SourceKind::NvidiaSmi;
        evidence.sources.push(failing(SourceKind::Nvml, absent.clone()));
        assert_eq!(codes(&evidence), [""; 0]);
        // A machine of another vendor has no use for it.
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
        assert_eq!(examine(&evidence)[0].evidence, ["nvml: line 3 cannot be read"]);
    }
}

//! Evaluation of the evidence. Each check is a pure function; a new check needs one line in the table.

mod access;
mod devices;
mod driver;

use std::fmt;

use serde::Serialize;

use crate::doctor::evidence::DoctorEvidence;
use crate::pci_bus::PciGpu;

/// Severity of a finding, worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DoctorSeverity {
    /// Devices cannot be used.
    Error,
    /// Devices work, but not as they should.
    Warning,
    /// Information without a problem.
    Note,
}

impl fmt::Display for DoctorSeverity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Note => "note",
        })
    }
}

/// Problem or noteworthy fact about a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DoctorFinding {
    /// Stable name for programs.
    pub code: &'static str,
    pub severity: DoctorSeverity,
    /// Description in one sentence.
    pub summary: String,
    /// Observations that support the finding.
    pub evidence: Vec<String>,
    /// Next steps.
    pub remedy: String,
    /// Affected devices; empty if the finding concerns the machine.
    pub devices: Vec<String>,
}

impl DoctorFinding {
    fn new(
        code: &'static str,
        severity: DoctorSeverity,
        summary: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (summary, remedy) = (summary.into(), remedy.into());
        Self { code, severity, summary, evidence: Vec::new(), remedy, devices: Vec::new() }
    }

    /// Adds observations.
    fn based_on(mut self, lines: impl IntoIterator<Item = String>) -> Self {
        self.evidence.extend(lines.into_iter().take(Self::MAX_EVIDENCE_LINES.saturating_sub(self.evidence.len())));
        self
    }

    /// Adds affected devices.
    fn about<D: fmt::Display>(mut self, devices: impl IntoIterator<Item = D>) -> Self {
        self.devices.extend(devices.into_iter().map(|device| device.to_string()));
        self
    }

    /// Adds GPUs of the bus as observations and as affected devices.
    fn about_gpus<'a>(self, gpus: impl Iterator<Item = &'a PciGpu> + Clone) -> Self {
        let seen = |gpu: &PciGpu| {
            let driver = gpu.driver.as_deref().map_or("no driver".to_owned(), |driver| format!("driver {driver}"));
            format!("{}: PCI device {}, {driver}", gpu.pci, gpu.ids())
        };
        self.based_on(gpus.clone().map(seen)).about(gpus.map(|gpu| gpu.pci))
    }

    /// Maximum number of observations of one finding.
    const MAX_EVIDENCE_LINES: usize = 64;
}

/// Function that returns findings. One without observations is dropped, so a check may return it unconditionally.
type DiagnosticCheck = fn(&DoctorEvidence) -> Vec<DoctorFinding>;

/// All checks, in the order in which findings of equal severity are shown.
const CHECKS: &[DiagnosticCheck] = &[
    driver::version_mismatch,
    driver::driver_missing,
    driver::nouveau_in_use,
    driver::legacy_radeon,
    driver::passed_through,
    driver::driver_unresponsive,
    driver::source_failed,
    driver::library_missing,
    access::no_permission,
    access::forbidden_by_control_group,
    access::nodes_missing,
    devices::gpu_not_reported,
    devices::gpu_not_on_bus,
    devices::device_lost,
    devices::device_unhealthy,
    devices::device_hot,
    devices::mig_without_instances,
    devices::utilization_stuck,
    access::invalid_device_list,
    access::all_devices_hidden,
    access::both_amd_lists,
    devices::kernel_log_faults,
    access::other_pid_namespace,
    access::cgroup_limits_missing,
    devices::unified_memory,
    devices::gpu_asleep,
    driver::persistence_off,
    driver::rocm_tools_missing,
    driver::source_warned,
    devices::no_gpu,
    access::unreadable_evidence,
];

/// Returns the findings on a machine, worst first.
pub fn diagnose(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let findings = CHECKS.iter().flat_map(|check| check(evidence));
    let mut findings: Vec<DoctorFinding> = findings.filter(|finding| !finding.evidence.is_empty()).collect();
    findings.sort_by_key(|finding| finding.severity);
    findings
}

#[cfg(test)]
pub(super) mod tests {
    use self::samples::{amd, codes, nvidia};
    use super::*;
    use crate::reported::Reported;

    #[test]
    fn nothing_is_found_on_a_healthy_machine() {
        assert_eq!(diagnose(&nvidia()), []);
        assert_eq!(diagnose(&amd()), []);
    }

    #[test]
    fn a_machine_without_evidence_has_only_a_note() {
        assert_eq!(codes(&DoctorEvidence::default()), ["no_gpu"]);
    }

    #[test]
    fn the_worst_finding_comes_first() {
        let mut evidence = nvidia();
        evidence.persistence_daemon = Reported::Value(false);
        evidence.nodes = Reported::Value(Vec::new());
        let severities: Vec<DoctorSeverity> = diagnose(&evidence).iter().map(|finding| finding.severity).collect();
        assert_eq!(severities, [DoctorSeverity::Error, DoctorSeverity::Note]);
    }

    #[test]
    fn every_finding_has_summary_evidence_and_remedy() {
        for finding in samples::every_kind() {
            assert!(finding.summary.ends_with('.') && finding.remedy.ends_with('.'), "{finding:?}");
            assert!(!finding.evidence.is_empty(), "{finding:?}");
        }
    }

    #[test]
    fn a_finding_is_plain_data_for_programs() {
        let finding = DoctorFinding::new("no_gpu", DoctorSeverity::Note, "None.", "Look.")
            .based_on(["seen".to_owned()])
            .about(["x"]);
        let json = serde_json::to_value(&finding).unwrap();
        let expected = serde_json::json!({"code": "no_gpu", "severity": "note", "summary": "None.",
            "evidence": ["seen"], "remedy": "Look.", "devices": ["x"]});
        assert_eq!(json, expected);
    }

    /// Healthy machines, for tests that break one thing.
    pub(crate) mod samples {
        use std::collections::{BTreeMap, BTreeSet};
        use std::time::Duration;

        use gpupool_core::{Bytes, DeviceHealth, Percent, Vendor};

        use crate::address::parse_pci_address;
        use crate::detected_device::{DetectedDevice, MemoryReading};
        use crate::doctor::evidence::{
            CgroupMode, CgroupSupport, ContainerEvidence, CurrentUser, DeviceNode, DoctorEvidence, NodeAccess,
            NvidiaVersions, SourceResult, UserGroup,
        };
        use crate::doctor::findings::{DoctorFinding, diagnose};
        use crate::pci_bus::PciGpu;
        use crate::reported::Reported;
        use crate::source::{SourceError, SourceKind};
        use crate::source_reading::SourceReading;

        /// PCI addresses of the two GPUs of a sample.
        const PCI_ADDRESSES: [&str; 2] = ["0000:01:00.0", "0000:c1:00.0"];

        /// Returns the codes of all findings.
        pub(crate) fn codes(evidence: &DoctorEvidence) -> Vec<&'static str> {
            diagnose(evidence).iter().map(|finding| finding.code).collect()
        }

        /// Returns a healthy machine with two NVIDIA GPUs.
        pub(crate) fn nvidia() -> DoctorEvidence {
            let nodes = ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"];
            DoctorEvidence {
                nvidia: NvidiaVersions {
                    kernel_text: Reported::Value("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01".into()),
                    kernel: Reported::Value("535.183.01".into()),
                    library: Reported::Value("535.183.01".into()),
                },
                persistence_daemon: Reported::Value(true),
                nodes: Reported::Value(nodes.iter().map(|name| node(name, Vendor::Nvidia, 0o666, 0)).collect()),
                ..with_modules(machine(Vendor::Nvidia, SourceKind::Nvml, "nvidia"), &["nvidia", "nvidia_uvm"])
            }
        }

        /// Returns a healthy machine with two AMD GPUs.
        pub(crate) fn amd() -> DoctorEvidence {
            let nodes = ["kfd", "dri/renderD128", "dri/renderD129"];
            DoctorEvidence {
                nodes: Reported::Value(nodes.iter().map(|name| node(name, Vendor::Amd, 0o660, 110)).collect()),
                ..with_modules(machine(Vendor::Amd, SourceKind::AmdSysfs, "amdgpu"), &["amdgpu"])
            }
        }

        /// Returns the same machine, seen from a container with all devices.
        pub(crate) fn contained(mut evidence: DoctorEvidence) -> DoctorEvidence {
            evidence.confinement.container = vec!["/.dockerenv exists".into()];
            evidence
        }

        /// Returns the same machine with only these modules loaded.
        pub(crate) fn with_modules(mut evidence: DoctorEvidence, modules: &[&str]) -> DoctorEvidence {
            evidence.modules = Reported::Value(modules.iter().map(|name| (*name).to_owned()).collect());
            evidence
        }

        /// Returns the same machine with every GPU bound to `driver`.
        pub(crate) fn bind_all(mut evidence: DoctorEvidence, driver: Option<&str>) -> DoctorEvidence {
            if let Reported::Value(gpus) = &mut evidence.gpus {
                gpus.iter_mut().for_each(|gpu| gpu.driver = driver.map(Into::into));
            }
            evidence
        }

        /// Returns the same machine with one source failing.
        pub(crate) fn fail(mut evidence: DoctorEvidence, kind: SourceKind, error: SourceError) -> DoctorEvidence {
            evidence.sources.retain(|source| source.kind != kind);
            evidence.sources.push(failing(kind, error));
            evidence
        }

        /// Returns the outcome of a source that failed.
        pub(crate) fn failing(kind: SourceKind, error: SourceError) -> SourceResult {
            SourceResult { kind, result: Err(error) }
        }

        /// Returns a device of the first source.
        pub(crate) fn device_mut(evidence: &mut DoctorEvidence, position: usize) -> &mut DetectedDevice {
            &mut evidence.sources[0].result.as_mut().unwrap().devices[position]
        }

        pub(crate) fn nodes_mut(evidence: &mut DoctorEvidence) -> &mut Vec<DeviceNode> {
            match &mut evidence.nodes {
                Reported::Value(nodes) => nodes,
                _ => panic!("the sample has nodes"),
            }
        }

        /// Returns findings of many kinds, from machines with many problems.
        pub(crate) fn every_kind() -> Vec<DoctorFinding> {
            let mut broken = nvidia().with_kernel_log("NVRM: Xid (PCI:0000:01:00): 79");
            device_mut(&mut broken, 0).health = Some(DeviceHealth::Lost);
            device_mut(&mut broken, 0).mig = Some(true);
            device_mut(&mut broken, 0).temperature_c = Reported::Value(99);
            device_mut(&mut broken, 1).health = Some(DeviceHealth::Unhealthy("bad".into()));
            device_mut(&mut broken, 1).utilization = Reported::Value(Percent::FULL);
            device_mut(&mut broken, 1).memory.unified = true;
            device_mut(&mut broken, 1).pci = parse_pci_address("0000:e1:00.0");
            nodes_mut(&mut broken)[0].access = NodeAccess::Denied;
            nodes_mut(&mut broken)[2].access = NodeAccess::Forbidden;
            nodes_mut(&mut broken).remove(3);
            broken.persistence_daemon = Reported::Value(false);
            broken.confinement.host_pids = Reported::Failed("no".into());
            broken.variables =
                BTreeMap::from([("CUDA_VISIBLE_DEVICES", "9".to_owned()), ("HIP_VISIBLE_DEVICES", String::new())]);
            let silent = SourceError::Unresponsive { what: "x".into(), after: Duration::from_secs(9) };
            broken.sources.push(failing(SourceKind::AmdSmi, silent));
            let mut other = bind_all(amd(), Some("radeon"));
            other.variables =
                BTreeMap::from([("ROCR_VISIBLE_DEVICES", "1".into()), ("HIP_VISIBLE_DEVICES", "1".into())]);
            other.confinement.host_pids = Reported::Value(false);
            other.confinement.cgroup = Reported::Value(CgroupSupport {
                mode: CgroupMode::Legacy,
                controllers: BTreeSet::new(),
                has_kill: false,
            });
            other.tools = BTreeMap::from([(SourceKind::AmdSmi, None), (SourceKind::RocmSmi, None)]);
            let mismatch = SourceError::VersionMismatch("x".into());
            let machines = [
                broken,
                other,
                DoctorEvidence::default(),
                bind_all(nvidia(), Some("nouveau")),
                bind_all(nvidia(), Some("vfio-pci")),
                bind_all(nvidia(), None),
                with_modules(bind_all(amd(), None), &[]),
                fail(contained(nvidia()), SourceKind::Nvml, mismatch),
            ];
            machines.iter().flat_map(diagnose).collect()
        }

        fn machine(vendor: Vendor, source: SourceKind, driver: &str) -> DoctorEvidence {
            let mut reading = SourceReading::default();
            for (pci, minor) in PCI_ADDRESSES.iter().zip(0..) {
                reading.push(device(vendor, pci, minor));
            }
            let tool = Some("/usr/bin/tool".into());
            let controllers = ["cpu", "memory", "pids"].map(str::to_owned);
            DoctorEvidence {
                gpus: Reported::Value(PCI_ADDRESSES.iter().map(|pci| bus_gpu(vendor, pci, driver)).collect()),
                sources: vec![SourceResult { kind: source, result: Ok(reading) }],
                user: CurrentUser {
                    uid: 1000,
                    gids: vec![1000],
                    groups: Reported::Value(vec![UserGroup { gid: 110, name: "render".into(), lists_user: false }]),
                },
                confinement: ContainerEvidence {
                    container: Vec::new(),
                    host_pids: Reported::Value(true),
                    cgroup: Reported::Value(CgroupSupport {
                        mode: CgroupMode::Unified,
                        controllers: controllers.into(),
                        has_kill: true,
                    }),
                },
                kernel_release: Reported::Value("6.8.0-45-generic".into()),
                tools: [SourceKind::NvidiaSmi, SourceKind::AmdSmi, SourceKind::RocmSmi]
                    .map(|kind| (kind, tool.clone()))
                    .into(),
                ..DoctorEvidence::default()
            }
        }

        fn device(vendor: Vendor, pci: &str, minor: u32) -> DetectedDevice {
            let number = minor + 1;
            let uuid = match vendor {
                Vendor::Nvidia => format!("GPU-00000000-0000-0000-0000-{number:012}"),
                _ => format!("GPU-00000000000000a{number}"),
            };
            DetectedDevice {
                index: Some(minor),
                minor: Some(if vendor == Vendor::Nvidia { minor } else { 128 + minor }),
                name: Some("sample".into()),
                uuid: Some(uuid.into()),
                pci: parse_pci_address(pci),
                memory: MemoryReading { total: Reported::Value(Bytes(24 << 30)), ..MemoryReading::default() },
                utilization: Reported::Value(Percent(0)),
                temperature_c: Reported::Value(40),
                processes: Reported::Value(Vec::new()),
                health: Some(DeviceHealth::Healthy),
                ..DetectedDevice::new(vendor)
            }
        }

        fn bus_gpu(vendor: Vendor, pci: &str, driver: &str) -> PciGpu {
            PciGpu {
                pci: parse_pci_address(pci).unwrap(),
                vendor,
                vendor_id: Some(if vendor == Vendor::Nvidia { 0x10de } else { 0x1002 }),
                device_id: Some(0x1234),
                driver: Some(driver.into()),
                numa: None,
                asleep: false,
                bus_path: Vec::new(),
            }
        }

        fn node(name: &str, vendor: Vendor, mode: u32, gid: u32) -> DeviceNode {
            DeviceNode { name: name.to_owned(), vendor: Some(vendor), mode, uid: 0, gid, access: NodeAccess::Granted }
        }
    }
}

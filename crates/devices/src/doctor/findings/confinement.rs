//! What containers, namespaces and control groups take away.

use gpupool_core::device::Vendor;

use super::nodes::{listed, missing_nodes};
use super::{Finding, Severity};
use crate::doctor::evidence::{CgroupMode, Evidence};
use crate::told::Told;

/// A container on a machine with GPUs that was started without them.
pub(super) fn container_without_devices(evidence: &Evidence) -> Vec<Finding> {
    if !evidence.in_container() {
        return Vec::new();
    }
    let finding = |(vendor, remedy): (Vendor, &str)| {
        let missing = missing_nodes(evidence, vendor);
        if missing.is_empty() {
            return None;
        }
        let summary = format!("This container was not given the GPUs of the machine: {} missing.", listed(&missing));
        let gpus = evidence.gpus_of(vendor).map(|gpu| gpu.pci);
        let finding = Finding::new("container_without_devices", Severity::Error, summary, remedy)
            .because(evidence.confinement.container.iter().cloned())
            .because(missing.iter().map(|name| format!("/dev/{name} does not exist")))
            .about(gpus);
        Some(finding)
    };
    let nvidia = "Start it with `--gpus all` (Docker, with the NVIDIA container toolkit), `--device nvidia.com/gpu=all` \
                  (Podman, CDI) or a `nvidia.com/gpu` limit (Kubernetes).";
    let amd = "Start it with `--device=/dev/kfd --device=/dev/dri --group-add render`, or with an `amd.com/gpu` limit \
               (Kubernetes).";
    [(Vendor::Nvidia, nvidia), (Vendor::Amd, amd)].into_iter().filter_map(finding).collect()
}

/// Drivers number processes as the host does; here the numbers mean others or nobody.
pub(super) fn other_pid_namespace(evidence: &Evidence) -> Vec<Finding> {
    if evidence.confinement.host_pids.value() != Some(&false) {
        return Vec::new();
    }
    let remedy = "Run the agent in the host's PID namespace: `--pid=host` (Docker, Podman), `hostPID: true` \
                  (Kubernetes). Until then processes on GPUs are reported as unattributed.";
    let summary = "This is not the host's PID namespace: processes on GPUs cannot be told apart.";
    let lines = ["/proc/self/ns/pid is not the first PID namespace".to_owned()];
    vec![Finding::new("other_pid_namespace", Severity::Warning, summary, remedy).because(lines)]
}

/// Which limits on jobs cannot be enforced with the control groups there are.
pub(super) fn limits_missing(evidence: &Evidence) -> Vec<Finding> {
    const WANTED: [(&str, &str); 3] = [("cpu", "processor time"), ("memory", "host memory"), ("pids", "processes")];
    let Some(cgroup) = evidence.confinement.cgroup.value() else { return Vec::new() };
    let without: Vec<&str> =
        WANTED.iter().filter(|(name, _)| !cgroup.controllers.contains(*name)).map(|(_, what)| *what).collect();
    let unified = cgroup.mode == CgroupMode::Unified;
    if unified && without.is_empty() && cgroup.kill {
        return Vec::new();
    }
    let mut lines = vec![format!("{} is in force", cgroup.mode.name())];
    if !without.is_empty() {
        lines.push(format!("limits on {} cannot be enforced: the controllers are missing", without.join(", ")));
    }
    if !cgroup.kill {
        lines.push("cgroup.kill is missing (Linux before 5.14 or version 1): jobs are ended process by process".into());
    }
    let dmem = if cgroup.controllers.contains("dmem") { "can" } else { "cannot" };
    lines.push(format!("device memory {dmem} be limited by the kernel (controller dmem, Linux 6.14)"));
    let remedy = if unified {
        "Enable the missing controllers for the service that runs the agent (`Delegate=yes` in its unit), or use a \
         newer kernel."
    } else {
        "Boot with `systemd.unified_cgroup_hierarchy=1` to have version 2 alone, which enforces all limits and ends \
         whole jobs at once."
    };
    let summary = "The control groups of this machine cannot enforce everything on jobs.";
    vec![Finding::new("cgroup_limits_missing", Severity::Note, summary, remedy).because(lines)]
}

/// What could not be read at all, so that silence is not taken for health.
pub(super) fn not_looked_at(evidence: &Evidence) -> Vec<Finding> {
    fn failed<T>(what: &str, told: &Told<T>) -> Option<String> {
        match told {
            Told::Failed(words) => Some(format!("{what}: {words}")),
            Told::Value(_) | Told::Unsupported(_) => None,
        }
    }
    let looked = [
        failed("the PCI bus", &evidence.gpus),
        failed("the loaded modules", &evidence.modules),
        failed("the device nodes", &evidence.nodes),
        failed("the version of NVIDIA's kernel module", &evidence.nvidia.kernel_text),
        failed("the groups of the machine", &evidence.user.groups),
        failed("the PID namespace", &evidence.confinement.host_pids),
        failed("the control groups", &evidence.confinement.cgroup),
        failed("the persistence daemon", &evidence.persistence_daemon),
        failed("the kernel release", &evidence.kernel_release),
    ];
    let lines: Vec<String> = looked.into_iter().flatten().collect();
    if lines.is_empty() {
        return Vec::new();
    }
    let summary = "Some things could not be looked at, so this report may miss something.";
    let remedy = "Run it again as root to see more.";
    vec![Finding::new("not_looked_at", Severity::Note, summary, remedy).because(lines)]
}

#[cfg(test)]
mod tests {
    use super::super::examine;
    use super::super::samples::{amd, codes, contained, nodes_mut, nvidia};
    use super::*;

    #[test]
    fn a_container_with_its_devices_is_fine_and_one_without_is_found() {
        for (machine, words) in [(nvidia(), "--gpus all"), (amd(), "--device=/dev/kfd")] {
            let mut evidence = contained(machine);
            assert_eq!(codes(&evidence), [""; 0]);
            nodes_mut(&mut evidence).clear();
            assert_eq!(codes(&evidence), ["container_without_devices"]);
            assert!(examine(&evidence)[0].remedy.contains(words));
        }
    }

    #[test]
    fn another_pid_namespace_is_found() {
        let mut evidence = nvidia();
        evidence.confinement.host_pids = Told::Value(false);
        assert_eq!(codes(&evidence), ["other_pid_namespace"]);
        evidence.confinement.host_pids = Told::ABSENT;
        assert_eq!(codes(&evidence), [""; 0]);
    }

    #[test]
    fn control_groups_that_cannot_enforce_everything_are_noted() {
        let mut evidence = amd();
        let Told::Value(cgroup) = &mut evidence.confinement.cgroup else { panic!("the sample has control groups") };
        cgroup.controllers.remove("memory");
        assert_eq!(codes(&evidence), ["cgroup_limits_missing"]);
        assert!(examine(&evidence)[0].evidence[1].contains("host memory"));
        let Told::Value(cgroup) = &mut evidence.confinement.cgroup else { panic!("the sample has control groups") };
        cgroup.controllers.insert("memory".into());
        cgroup.mode = CgroupMode::Hybrid;
        assert_eq!(codes(&evidence), ["cgroup_limits_missing"]);
    }

    #[test]
    fn what_could_not_be_read_is_said() {
        let mut evidence = nvidia();
        evidence.nvidia.kernel_text = Told::Failed("Permission denied".into());
        assert_eq!(codes(&evidence), ["not_looked_at"]);
    }
}

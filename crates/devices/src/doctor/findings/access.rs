//! Checks of device nodes, containers, control groups and environment variables.

use std::collections::BTreeMap;

use gpupool_core::Vendor;

use crate::detected_device::DetectedDevice;
use crate::doctor::evidence::{CgroupMode, DeviceNode, DoctorEvidence, NodeAccess};
use crate::doctor::findings::{DoctorFinding, DoctorSeverity};
use crate::reported::Reported;

/// Reports permission bits that deny the user access; the remedy names the group to join.
pub(super) fn no_permission(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let mut by_group: BTreeMap<u32, Vec<&DeviceNode>> = BTreeMap::new();
    for node in evidence.nodes().iter().filter(|node| is_needed(node) && node.access == NodeAccess::Denied) {
        by_group.entry(node.gid).or_default().push(node);
    }
    let denied = |(gid, nodes): (&u32, &Vec<&DeviceNode>)| {
        let summary = format!("Permission is denied on {}.", join_paths(nodes.iter().map(|node| node.name.as_str())));
        DoctorFinding::new("no_permission", DoctorSeverity::Error, summary, access_remedy(evidence, *gid, nodes))
            .based_on(nodes.iter().map(|node| describe_node(evidence, node)))
            .based_on([format!("the user {} is in the groups {:?}", evidence.user.uid, evidence.user.gids)])
    };
    let mut findings: Vec<DoctorFinding> = by_group.iter().map(denied).collect();
    if findings.is_empty() {
        let remedy = "The device nodes allow access, so another mechanism denies it: try again as root, and look for \
                      AppArmor or SELinux denials in the log.";
        let summary = "A driver denies access to this user.";
        let lines = evidence.errors_with_code("no_permission");
        findings.push(DoctorFinding::new("no_permission", DoctorSeverity::Error, summary, remedy).based_on(lines));
    }
    findings
}

/// Reports nodes whose permission bits allow access but whose device control group denies it.
pub(super) fn forbidden_by_control_group(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let nodes: Vec<&DeviceNode> =
        evidence.nodes().iter().filter(|node| is_needed(node) && node.access == NodeAccess::Forbidden).collect();
    let summary = format!(
        "The device control group denies access to {}, although their mode allows it.",
        join_paths(nodes.iter().map(|node| node.name.as_str()))
    );
    let remedy = "In a container: `systemctl daemon-reload` on the host removes devices that were not named at the \
                  start; restart the container with `--device` for each node. In a service: add `DeviceAllow=` lines. \
                  The GPU itself is fine.";
    let finding = DoctorFinding::new("device_cgroup_forbids", DoctorSeverity::Error, summary, remedy)
        .based_on(nodes.iter().map(|node| describe_node(evidence, node)));
    vec![finding]
}

/// Reports missing nodes of driven GPUs, for example in a container that was started without them.
pub(super) fn nodes_missing(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let finding = |(vendor, outside, inside): (Vendor, &str, &str)| {
        let missing = missing_nodes(evidence, vendor);
        missing.first()?;
        let lines = missing.iter().map(|name| format!("/dev/{name} does not exist"));
        if !evidence.in_container() {
            let summary = format!("The driver is loaded but device nodes are missing: {}.", join_paths(&missing));
            return Some(
                DoctorFinding::new("device_nodes_missing", DoctorSeverity::Error, summary, outside).based_on(lines),
            );
        }
        let summary = format!("This container lacks the device nodes of the machine's GPUs: {}.", join_paths(&missing));
        let finding = DoctorFinding::new("container_without_devices", DoctorSeverity::Error, summary, inside)
            .based_on(evidence.confinement.container.iter().cloned())
            .based_on(lines)
            .about(evidence.gpus_of(vendor).map(|gpu| gpu.pci));
        Some(finding)
    };
    let nvidia = (
        Vendor::Nvidia,
        "Create them with `sudo nvidia-modprobe -c 0 -u`, with one `-c` for the minor number of each GPU, or with any \
         program that runs as root (`sudo nvidia-smi`). Install nvidia-modprobe to create them automatically.",
        "Start the container with `--gpus all` (Docker, with the NVIDIA container toolkit), `--device \
         nvidia.com/gpu=all` (Podman, CDI) or a `nvidia.com/gpu` limit (Kubernetes).",
    );
    let amd = (
        Vendor::Amd,
        "Check that the kernel has AMD's compute support (`dmesg | grep -i kfd`; CONFIG_HSA_AMD) and that udev runs \
         (`sudo udevadm trigger`).",
        "Start the container with `--device=/dev/kfd --device=/dev/dri --group-add render`, or with an `amd.com/gpu` \
         limit (Kubernetes).",
    );
    [nvidia, amd].into_iter().filter_map(finding).collect()
}

/// Returns the required nodes that do not exist, for the GPUs that have a driver.
pub(super) fn missing_nodes(evidence: &DoctorEvidence, vendor: Vendor) -> Vec<String> {
    let Some(nodes) = evidence.nodes.value() else { return Vec::new() };
    let own = if vendor == Vendor::Nvidia { "nvidia" } else { "amdgpu" };
    let driven = evidence.gpus_of(vendor).filter(|gpu| gpu.is_bound_to(own)).count();
    if driven == 0 {
        return Vec::new();
    }
    let exists = |name: &str| nodes.iter().any(|node| node.name == name);
    if vendor == Vendor::Amd {
        let render =
            nodes.iter().any(|node| node.is_render() && node.vendor.is_none_or(|vendor| vendor == Vendor::Amd));
        let kfd = (!exists("kfd")).then(|| "kfd".to_owned());
        return kfd.into_iter().chain((!render).then(|| "dri/renderD128".to_owned())).collect();
    }
    let shared = ["nvidiactl", "nvidia-uvm"].into_iter().map(str::to_owned);
    let reading = evidence.merged_reading();
    let whole_gpus =
        reading.devices.iter().filter(|device| device.vendor == Vendor::Nvidia && device.partition.is_none());
    let mut minors: Vec<u32> = whole_gpus.filter_map(|device| device.minor).collect();
    let has_any = nodes.iter().any(|node| node.nvidia_minor().is_some());
    if minors.is_empty() && !has_any {
        minors.push(0);
    }
    shared.chain(minors.iter().map(|minor| format!("nvidia{minor}"))).filter(|name| !exists(name)).collect()
}

/// Whether compute programs need the node. NVIDIA's render nodes and those of other adapters are not needed.
fn is_needed(node: &DeviceNode) -> bool {
    if node.is_render() { node.vendor == Some(Vendor::Amd) } else { node.vendor.is_some() }
}

/// Returns the remedy that gives the user access to the nodes of one group.
fn access_remedy(evidence: &DoctorEvidence, gid: u32, nodes: &[&DeviceNode]) -> String {
    if evidence.in_container() {
        return format!("Start the container with `--group-add {gid}`, the group of the nodes on the host.");
    }
    let group = evidence.user.group(gid);
    let name = group.map_or_else(|| gid.to_string(), |group| group.name.clone());
    if gid == 0 || !nodes.iter().all(|node| node.is_open_to_group()) {
        return format!(
            "Joining the group of the nodes ({name}) does not help. For NVIDIA set the driver's options \
             NVreg_DeviceFileMode=0666 (or NVreg_DeviceFileGID and 0660); for AMD install the udev rules that assign \
             /dev/kfd and /dev/dri/renderD* to the group render."
        );
    }
    if group.is_some_and(|group| group.lists_user) {
        return format!("You are in the group {name}, but this session is older than the membership: log in again.");
    }
    if group.is_none() {
        return format!(
            "The group {name} has no name on this machine: create it (`sudo groupadd -g {gid} render`), join it (`sudo \
             usermod -aG render $USER`) and log in again."
        );
    }
    format!("Join the group {name} (`sudo usermod -aG {name} $USER`) and log in again.")
}

fn describe_node(evidence: &DoctorEvidence, node: &DeviceNode) -> String {
    let group = evidence.user.group(node.gid).map_or_else(|| node.gid.to_string(), |group| group.name.clone());
    format!("/dev/{} has mode {:04o}, owner {}, group {group}", node.name, node.mode, node.uid)
}

/// Joins the first names as paths, and counts the rest.
pub(super) fn join_paths(names: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    const SHOWN: usize = 6;
    let mut paths: Vec<String> = names.into_iter().map(|name| format!("/dev/{}", name.as_ref())).collect();
    let more = paths.len().saturating_sub(SHOWN);
    paths.truncate(SHOWN);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("{}{more}", paths.join(", "))
}

// Restrictions by containers, namespaces and control groups.

/// Reports a PID namespace other than the host's, in which the drivers' process numbers are meaningless.
pub(super) fn other_pid_namespace(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let remedy = "Run the agent in the host's PID namespace: `--pid=host` (Docker, Podman), `hostPID: true` \
                  (Kubernetes). Until then processes on GPUs are reported as unattributed.";
    let summary = "This is not the host's PID namespace: processes on GPUs cannot be identified.";
    let is_other = evidence.confinement.host_pids.value() == Some(&false);
    let lines = is_other.then(|| "/proc/self/ns/pid is not the initial PID namespace".to_owned());
    vec![DoctorFinding::new("other_pid_namespace", DoctorSeverity::Warning, summary, remedy).based_on(lines)]
}

/// Reports limits on jobs that the available control groups cannot enforce.
pub(super) fn cgroup_limits_missing(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    const WANTED: [(&str, &str); 3] = [("cpu", "processor time"), ("memory", "host memory"), ("pids", "processes")];
    let Some(cgroup) = evidence.confinement.cgroup.value() else { return Vec::new() };
    let without: Vec<&str> =
        WANTED.iter().filter(|(name, _)| !cgroup.controllers.contains(*name)).map(|(_, what)| *what).collect();
    let unified = cgroup.mode == CgroupMode::Unified;
    if unified && without.is_empty() && cgroup.has_kill {
        return Vec::new();
    }
    let mut lines = vec![format!("{} is in use", cgroup.mode.name())];
    if !without.is_empty() {
        lines.push(format!("limits on {} cannot be enforced: the controllers are missing", without.join(", ")));
    }
    if !cgroup.has_kill {
        lines.push("no cgroup.kill (Linux before 5.14 or version 1): jobs are killed process by process".into());
    }
    let dmem = if cgroup.controllers.contains("dmem") { "can" } else { "cannot" };
    lines.push(format!("device memory {dmem} be limited by the kernel (controller dmem, Linux 6.14)"));
    let remedy = if unified {
        "Enable the missing controllers for the service that runs the agent (`Delegate=yes` in its unit), or use a \
         newer kernel."
    } else {
        "Boot with `systemd.unified_cgroup_hierarchy=1` to use version 2 alone, which enforces all limits and kills \
         whole jobs at once."
    };
    let summary = "The control groups of this machine cannot enforce all limits on jobs.";
    vec![DoctorFinding::new("cgroup_limits_missing", DoctorSeverity::Note, summary, remedy).based_on(lines)]
}

/// Reports unreadable evidence, so that a missing finding is not mistaken for health.
pub(super) fn unreadable_evidence(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    fn failed<T>(what: &str, reported: &Reported<T>) -> Option<String> {
        match reported {
            Reported::Failed(words) => Some(format!("{what}: {words}")),
            Reported::Value(_) | Reported::Unsupported(_) => None,
        }
    }
    let failures = [
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
    let summary = "Some evidence could not be read, so this report may be incomplete.";
    let remedy = "Run `gpupool doctor` again as root.";
    vec![
        DoctorFinding::new("not_looked_at", DoctorSeverity::Note, summary, remedy)
            .based_on(failures.into_iter().flatten()),
    ]
}

// Variables that hide devices from programs: outdated, contradictory, or hiding all.

const CUDA: &str = "CUDA_VISIBLE_DEVICES";
const ROCR: &str = "ROCR_VISIBLE_DEVICES";
const HIP: &str = "HIP_VISIBLE_DEVICES";
const NVIDIA: &str = "NVIDIA_VISIBLE_DEVICES";

/// Reports a variable with an entry that matches no device; the list ends there.
pub(super) fn invalid_device_list(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let devices = evidence.merged_reading().devices;
    let vendors = [(CUDA, Vendor::Nvidia), (ROCR, Vendor::Amd), (HIP, Vendor::Amd)];
    let finding = |(name, vendor): (&'static str, Vendor)| {
        let value = evidence.variables.get(name).filter(|value| !hides_all(value))?;
        let known: Vec<&DetectedDevice> = devices.iter().filter(|device| device.vendor == vendor).collect();
        let seen_by_hip = (name == HIP).then(|| evidence.variables.get(ROCR)).flatten();
        let count = match seen_by_hip {
            Some(left) => entries(left).count(),
            None => known.iter().filter(|device| !device.is_mig_instance()).count(),
        };
        if known.is_empty() {
            return None;
        }
        let wrong = entries(value).position(|entry| !names_a_device(entry, count, &known))?;
        let entry = entries(value).nth(wrong)?;
        let summary = format!("{name} names a device that does not exist, so programs see {wrong} of its devices.");
        let remedy = format!(
            "Unset {name} or correct it. The list ends at the first invalid entry; numbers go from 0 to {}.",
            count.saturating_sub(1)
        );
        let lines = [format!("{name}={value}"), format!("{entry:?} matches no device")];
        Some(DoctorFinding::new("visible_devices_invalid", DoctorSeverity::Warning, summary, remedy).based_on(lines))
    };
    vendors.into_iter().filter_map(finding).collect()
}

/// Reports a variable that hides every device.
pub(super) fn all_devices_hidden(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let finding = |(name, value): (&&'static str, &String)| {
        let hides = match *name {
            // Only the container runtime reads this variable.
            NVIDIA => evidence.in_container() && matches!(value.trim(), "" | "none" | "void"),
            _ => hides_all(value),
        };
        if !hides {
            return None;
        }
        let remedy = match *name {
            NVIDIA => "Start the container with `--gpus all` or NVIDIA_VISIBLE_DEVICES=all.".to_owned(),
            _ => format!("Unset it (`unset {name}`) if programs that start in this environment should see GPUs."),
        };
        let summary = format!("{name} hides every GPU from programs.");
        let line = [format!("{name}={value:?}")];
        Some(DoctorFinding::new("visible_devices_hide_all", DoctorSeverity::Warning, summary, remedy).based_on(line))
    };
    evidence.variables.iter().filter_map(finding).collect()
}

/// Reports ROCR and HIP lists that are both set: the second indexes into the result of the first.
pub(super) fn both_amd_lists(evidence: &DoctorEvidence) -> Vec<DoctorFinding> {
    let (Some(rocr), Some(hip)) = (evidence.variables.get(ROCR), evidence.variables.get(HIP)) else {
        return Vec::new();
    };
    let summary = format!("{ROCR} and {HIP} are both set, and {HIP} numbers only the devices that {ROCR} leaves.");
    let remedy = format!("Keep {ROCR} and unset {HIP}: with the same number in both, no device may be left.");
    let lines = [format!("{ROCR}={rocr}"), format!("{HIP}={hip}")];
    vec![DoctorFinding::new("visible_devices_both", DoctorSeverity::Warning, summary, remedy).based_on(lines)]
}

fn entries(value: &str) -> impl Iterator<Item = &str> {
    value.split(',').map(str::trim)
}

fn hides_all(value: &str) -> bool {
    let first = entries(value).next().unwrap_or_default();
    first.is_empty() || first.starts_with('-') || first == "NoDevFiles"
}

/// Whether an entry is a number below `count` or the prefix of a known UUID.
fn names_a_device(entry: &str, count: usize, known: &[&DetectedDevice]) -> bool {
    if let Ok(number) = entry.parse::<usize>() {
        return number < count;
    }
    // The old name of a MIG instance is the UUID of its GPU with two numbers.
    if let Some((gpu, _)) = entry.strip_prefix("MIG-").and_then(|name| name.split_once('/')) {
        return known.iter().any(|device| device.uuid.as_deref() == Some(gpu));
    }
    let has_prefix = |uuid: &str| uuid.get(..entry.len()).is_some_and(|start| start.eq_ignore_ascii_case(entry));
    // A device without a known UUID may match any entry.
    !entry.is_empty() && known.iter().any(|device| device.uuid.as_deref().is_none_or(has_prefix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::findings::diagnose;
    use crate::doctor::findings::tests::samples::{amd, codes, contained, fail, nodes_mut, nvidia};
    use crate::source::{SourceError, SourceKind};

    fn denied(mut evidence: DoctorEvidence, name: &str) -> DoctorEvidence {
        let node = nodes_mut(&mut evidence).iter_mut().find(|node| node.name == name).unwrap();
        (node.mode, node.access) = (0o660, NodeAccess::Denied);
        evidence
    }

    #[test]
    fn the_group_of_a_closed_node_is_named() {
        let evidence = denied(denied(amd(), "kfd"), "dri/renderD128");
        assert_eq!(codes(&evidence), ["no_permission"]);
        let finding = &diagnose(&evidence)[0];
        assert_eq!(finding.summary, "Permission is denied on /dev/kfd, /dev/dri/renderD128.");
        assert!(finding.remedy.contains("usermod -aG render $USER"), "{}", finding.remedy);
    }

    #[test]
    fn a_new_member_of_the_group_must_log_in_again() {
        let mut evidence = denied(amd(), "kfd");
        let Reported::Value(groups) = &mut evidence.user.groups else { panic!("the sample has groups") };
        groups.iter_mut().for_each(|group| group.lists_user = true);
        assert!(diagnose(&evidence)[0].remedy.contains("log in again"));
        assert!(!diagnose(&evidence)[0].remedy.contains("usermod"));
    }

    #[test]
    fn joining_a_group_without_access_is_not_suggested() {
        let mut evidence = denied(nvidia(), "nvidia0");
        let root_group_remedy = diagnose(&evidence)[0].remedy.clone();
        (nodes_mut(&mut evidence)[0].mode, nodes_mut(&mut evidence)[0].gid) = (0o600, 110);
        assert_eq!(codes(&evidence), ["no_permission"]);
        for remedy in [root_group_remedy, diagnose(&evidence)[0].remedy.clone()] {
            assert!(remedy.contains("NVreg_DeviceFileMode") && !remedy.contains("usermod"), "{remedy}");
        }
    }

    #[test]
    fn in_a_container_the_remedy_names_the_group_number() {
        let evidence = denied(contained(amd()), "kfd");
        assert!(diagnose(&evidence)[0].remedy.contains("--group-add 110"));
    }

    #[test]
    fn a_closed_render_node_of_another_adapter_is_ignored() {
        let mut evidence = denied(amd(), "dri/renderD128");
        let render = nodes_mut(&mut evidence).iter_mut().find(|node| node.is_render()).unwrap();
        render.vendor = Some(Vendor::Intel);
        assert_eq!(codes(&evidence), [""; 0]);
        nodes_mut(&mut evidence).retain(|node| node.name != "dri/renderD129");
        assert_eq!(codes(&evidence), ["device_nodes_missing"], "nor does it stand for one of AMD");
    }

    #[test]
    fn a_denying_source_without_a_closed_node_is_found() {
        let refused = SourceError::NoPermission("nvmlInit".into());
        assert_eq!(codes(&fail(nvidia(), SourceKind::Nvml, refused)), ["no_permission"]);
    }

    #[test]
    fn a_node_denied_by_the_device_control_group_has_its_own_finding() {
        let mut evidence = contained(nvidia());
        nodes_mut(&mut evidence)[0].access = NodeAccess::Forbidden;
        assert_eq!(codes(&evidence), ["device_cgroup_forbids"]);
    }

    #[test]
    fn missing_nodes_are_found_by_minor_number() {
        let mut evidence = nvidia();
        nodes_mut(&mut evidence).retain(|node| node.name != "nvidia1" && node.name != "nvidia-uvm");
        assert_eq!(codes(&evidence), ["device_nodes_missing"]);
        let missing = ["/dev/nvidia-uvm does not exist", "/dev/nvidia1 does not exist"];
        assert_eq!(diagnose(&evidence)[0].evidence, missing);
        let mut evidence = amd();
        nodes_mut(&mut evidence).clear();
        assert_eq!(codes(&evidence), ["device_nodes_missing"]);
    }

    #[test]
    fn a_container_with_its_devices_is_fine_and_one_without_is_found() {
        for (machine, words) in [(nvidia(), "--gpus all"), (amd(), "--device=/dev/kfd")] {
            let mut evidence = contained(machine);
            assert_eq!(codes(&evidence), [""; 0]);
            nodes_mut(&mut evidence).clear();
            assert_eq!(codes(&evidence), ["container_without_devices"]);
            assert!(diagnose(&evidence)[0].remedy.contains(words));
        }
    }

    #[test]
    fn another_pid_namespace_is_found() {
        let mut evidence = nvidia();
        evidence.confinement.host_pids = Reported::Value(false);
        assert_eq!(codes(&evidence), ["other_pid_namespace"]);
        evidence.confinement.host_pids = Reported::ABSENT;
        assert_eq!(codes(&evidence), [""; 0]);
    }

    #[test]
    fn control_groups_that_cannot_enforce_everything_are_noted() {
        let mut evidence = amd();
        let Reported::Value(cgroup) = &mut evidence.confinement.cgroup else { panic!("the sample has control groups") };
        cgroup.controllers.remove("memory");
        assert_eq!(codes(&evidence), ["cgroup_limits_missing"]);
        assert!(diagnose(&evidence)[0].evidence[1].contains("host memory"));
        let Reported::Value(cgroup) = &mut evidence.confinement.cgroup else { panic!("the sample has control groups") };
        cgroup.controllers.insert("memory".into());
        cgroup.mode = CgroupMode::Hybrid;
        assert_eq!(codes(&evidence), ["cgroup_limits_missing"]);
    }

    #[test]
    fn unreadable_evidence_is_a_finding() {
        let mut evidence = nvidia();
        evidence.nvidia.kernel_text = Reported::Failed("Permission denied".into());
        assert_eq!(codes(&evidence), ["not_looked_at"]);
    }

    fn with(mut evidence: DoctorEvidence, variables: &[(&'static str, &str)]) -> DoctorEvidence {
        evidence.variables = variables.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        evidence
    }

    #[test]
    fn lists_of_devices_that_exist_are_fine() {
        for value in [
            "0",
            "1,0",
            "GPU-0",
            "GPU-00000000-0000-0000-0000-000000000001",
            "MIG-GPU-00000000-0000-0000-0000-000000000001/1/0",
        ] {
            assert_eq!(codes(&with(nvidia(), &[(CUDA, value)])), [""; 0], "{value}");
        }
        assert_eq!(codes(&with(amd(), &[(ROCR, "GPU-00000000000000a1,0")])), [""; 0]);
        assert_eq!(codes(&with(amd(), &[(HIP, "1")])), [""; 0]);
    }

    #[test]
    fn an_entry_that_names_no_device_is_found() {
        for value in ["2", "0,7", "GPU-deadbeef", "0,,1", "MIG-GPU-dead/1/0"] {
            assert_eq!(codes(&with(nvidia(), &[(CUDA, value)])), ["visible_devices_invalid"], "{value}");
        }
        assert_eq!(codes(&with(amd(), &[(ROCR, "5")])), ["visible_devices_invalid"]);
        let finding = &diagnose(&with(nvidia(), &[(CUDA, "0,7")]))[0];
        assert!(finding.summary.contains("see 1 of its devices"), "{}", finding.summary);
    }

    #[test]
    fn a_list_that_hides_all_is_found() {
        for value in ["", "-1", "NoDevFiles"] {
            assert_eq!(codes(&with(nvidia(), &[(CUDA, value)])), ["visible_devices_hide_all"], "{value}");
        }
        assert_eq!(codes(&with(nvidia(), &[(NVIDIA, "void")])), [""; 0]);
        assert_eq!(codes(&with(contained(nvidia()), &[(NVIDIA, "void")])), ["visible_devices_hide_all"]);
    }

    #[test]
    fn the_second_amd_list_numbers_the_devices_of_the_first() {
        assert_eq!(codes(&with(amd(), &[(ROCR, "0,1"), (HIP, "1")])), ["visible_devices_both"]);
        let nothing_left = codes(&with(amd(), &[(ROCR, "1"), (HIP, "1")]));
        assert_eq!(nothing_left, ["visible_devices_invalid", "visible_devices_both"]);
    }
}

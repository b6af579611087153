//! Whether the device nodes are there and may be opened by who is looking.

use std::collections::BTreeMap;

use gpupool_core::device::Vendor;

use super::{Finding, Severity};
use crate::doctor::evidence::{Access, Evidence, Node};
use crate::source::SourceError;

/// The mode of a node keeps the user out; says which group lets them in.
pub(super) fn no_permission(evidence: &Evidence) -> Vec<Finding> {
    let mut by_group: BTreeMap<u32, Vec<&Node>> = BTreeMap::new();
    for node in evidence.nodes().iter().filter(|node| is_needed(node) && node.access == Access::Denied) {
        by_group.entry(node.gid).or_default().push(node);
    }
    let denied = |(gid, nodes): (&u32, &Vec<&Node>)| {
        let summary = format!("Permission is denied on {}.", listed(nodes.iter().map(|node| node.name.as_str())));
        Finding::new("no_permission", Severity::Error, summary, way_in(evidence, *gid, nodes))
            .because(nodes.iter().map(|node| described(evidence, node)))
            .because([format!("the user is {} in the groups {:?}", evidence.user.uid, evidence.user.gids)])
    };
    let mut findings: Vec<Finding> = by_group.iter().map(denied).collect();
    if findings.is_empty() {
        let refused = |error: &SourceError| matches!(error, SourceError::NoPermission(_));
        let lines: Vec<String> = evidence
            .failures()
            .filter(|(_, error)| refused(error))
            .map(|(kind, error)| format!("{kind}: {error}"))
            .collect();
        let remedy = "The device nodes allow it, so something else refuses: run as root to see whether that helps, and \
                      look for AppArmor or SELinux denials in the log.";
        let summary = "A driver refuses to answer this user.";
        if !lines.is_empty() {
            findings.push(Finding::new("no_permission", Severity::Error, summary, remedy).because(lines));
        }
    }
    findings
}

/// The mode of a node lets the user in and the device control group does not.
pub(super) fn forbidden_by_control_group(evidence: &Evidence) -> Vec<Finding> {
    let nodes: Vec<&Node> =
        evidence.nodes().iter().filter(|node| is_needed(node) && node.access == Access::Forbidden).collect();
    if nodes.is_empty() {
        return Vec::new();
    }
    let summary = format!(
        "The device control group forbids {}, whatever their mode says.",
        listed(nodes.iter().map(|node| node.name.as_str()))
    );
    let remedy = "In a container: `systemctl daemon-reload` on the host takes devices away that were not named at the \
                  start; restart the container, and start it with `--device` for each node. In a service: add \
                  `DeviceAllow=` lines. The GPU itself is fine.";
    let finding = Finding::new("device_cgroup_forbids", Severity::Error, summary, remedy)
        .because(nodes.iter().map(|node| described(evidence, node)));
    vec![finding]
}

/// The driver drives GPUs and nodes to reach them are missing.
pub(super) fn missing(evidence: &Evidence) -> Vec<Finding> {
    if evidence.in_container() {
        return Vec::new();
    }
    let finding = |(vendor, remedy): (Vendor, &str)| {
        let missing = missing_nodes(evidence, vendor);
        if missing.is_empty() {
            return None;
        }
        let summary = format!("The driver is loaded but device nodes are missing: {}.", listed(&missing));
        let lines = missing.iter().map(|name| format!("/dev/{name} does not exist"));
        Some(Finding::new("device_nodes_missing", Severity::Error, summary, remedy).because(lines))
    };
    let nvidia = "Make them: `sudo nvidia-modprobe -c 0 -u`, with one `-c` for each GPU by its minor number; any program \
                  run as root makes them too (`sudo nvidia-smi`). Install nvidia-modprobe so that it happens by itself.";
    let amd = "Check that the kernel has AMD's compute support (`dmesg | grep -i kfd`; CONFIG_HSA_AMD) and that udev \
               runs (`sudo udevadm trigger`).";
    [(Vendor::Nvidia, nvidia), (Vendor::Amd, amd)].into_iter().filter_map(finding).collect()
}

/// Which nodes a program needs that are not there, given which GPUs are driven.
pub(super) fn missing_nodes(evidence: &Evidence, vendor: Vendor) -> Vec<String> {
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
    let machine = evidence.machine();
    let of_gpu = machine.devices.iter().filter(|device| device.vendor == Vendor::Nvidia && device.partition.is_none());
    let mut minors: Vec<u32> = of_gpu.filter_map(|device| device.minor).collect();
    let has_any = nodes.iter().any(|node| node.nvidia_minor().is_some());
    if minors.is_empty() && !has_any {
        minors.push(0);
    }
    shared.chain(minors.iter().map(|minor| format!("nvidia{minor}"))).filter(|name| !exists(name)).collect()
}

/// Nodes that computing needs; NVIDIA's render nodes and those of other adapters are not among them.
fn is_needed(node: &Node) -> bool {
    if node.is_render() { node.vendor == Some(Vendor::Amd) } else { node.vendor.is_some() }
}

/// What lets a user use nodes of one group.
fn way_in(evidence: &Evidence, gid: u32, nodes: &[&Node]) -> String {
    if evidence.in_container() {
        return format!("Start the container with `--group-add {gid}`, the group of the nodes on the host.");
    }
    let group = evidence.user.group(gid);
    let name = group.map_or_else(|| gid.to_string(), |group| group.name.clone());
    if gid == 0 || !nodes.iter().all(|node| node.is_open_to_group()) {
        return format!(
            "No group of yours can be let in: the nodes belong to {name}. For NVIDIA set the driver's options \
             NVreg_DeviceFileMode=0666 (or NVreg_DeviceFileGID and 0660); for AMD install the udev rules that give \
             /dev/kfd and /dev/dri/renderD* to the group render."
        );
    }
    if group.is_some_and(|group| group.lists_user) {
        return format!("You are in the group {name}, but this session is older than that: log in again.");
    }
    if group.is_none() {
        return format!(
            "The group {name} has no name here: make one (`sudo groupadd -g {gid} render`), join it (`sudo usermod -aG \
             render $USER`) and log in again."
        );
    }
    format!("Join the group {name} (`sudo usermod -aG {name} $USER`) and log in again.")
}

fn described(evidence: &Evidence, node: &Node) -> String {
    let group = evidence.user.group(node.gid).map_or_else(|| node.gid.to_string(), |group| group.name.clone());
    format!("/dev/{} has mode {:04o}, owner {}, group {group}", node.name, node.mode, node.uid)
}

/// Names as paths, the first few of them.
pub(super) fn listed(names: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    const SHOWN: usize = 6;
    let mut paths: Vec<String> = names.into_iter().map(|name| format!("/dev/{}", name.as_ref())).collect();
    let more = paths.len().saturating_sub(SHOWN);
    paths.truncate(SHOWN);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("{}{more}", paths.join(", "))
}

#[cfg(test)]
mod tests {
    use super::super::examine;
    use super::super::samples::{amd, codes, contained, fail, nodes_mut, nvidia};
    use super::*;
    use crate::source::SourceKind;
    use crate::told::Told;

    fn denied(mut evidence: Evidence, name: &str) -> Evidence {
        let node = nodes_mut(&mut evidence).iter_mut().find(|node| node.name == name).unwrap();
        (node.mode, node.access) = (0o660, Access::Denied);
        evidence
    }

    #[test]
    fn the_group_of_a_closed_node_is_named() {
        let evidence = denied(denied(amd(), "kfd"), "dri/renderD128");
        assert_eq!(codes(&evidence), ["no_permission"]);
        let finding = &examine(&evidence)[0];
        assert_eq!(finding.summary, "Permission is denied on /dev/kfd, /dev/dri/renderD128.");
        assert!(finding.remedy.contains("usermod -aG render $USER"), "{}", finding.remedy);
    }

    #[test]
    fn who_was_just_added_to_the_group_is_told_to_log_in_again() {
        let mut evidence = denied(amd(), "kfd");
        let Told::Value(groups) = &mut evidence.user.groups else { panic!("the sample has groups") };
        groups.iter_mut().for_each(|group| group.lists_user = true);
        assert!(examine(&evidence)[0].remedy.contains("log in again"));
        assert!(!examine(&evidence)[0].remedy.contains("usermod"));
    }

    #[test]
    fn a_node_that_is_closed_to_its_group_is_not_opened_by_joining_it() {
        let mut evidence = denied(nvidia(), "nvidia0");
        let nobody_joins_root = examine(&evidence)[0].remedy.clone();
        (nodes_mut(&mut evidence)[0].mode, nodes_mut(&mut evidence)[0].gid) = (0o600, 110);
        assert_eq!(codes(&evidence), ["no_permission"]);
        for remedy in [nobody_joins_root, examine(&evidence)[0].remedy.clone()] {
            assert!(remedy.contains("NVreg_DeviceFileMode") && !remedy.contains("usermod"), "{remedy}");
        }
    }

    #[test]
    fn in_a_container_the_number_of_the_group_is_what_helps() {
        let evidence = denied(contained(amd()), "kfd");
        assert!(examine(&evidence)[0].remedy.contains("--group-add 110"));
    }

    #[test]
    fn a_closed_render_node_of_another_adapter_matters_to_nobody() {
        let mut evidence = denied(amd(), "dri/renderD128");
        let render = nodes_mut(&mut evidence).iter_mut().find(|node| node.is_render()).unwrap();
        render.vendor = Some(Vendor::Intel);
        assert_eq!(codes(&evidence), [""; 0]);
        nodes_mut(&mut evidence).retain(|node| node.name != "dri/renderD129");
        assert_eq!(codes(&evidence), ["device_nodes_missing"], "nor does it stand for one of AMD");
    }

    #[test]
    fn a_source_that_refuses_without_a_closed_node_is_found() {
        let refused = SourceError::NoPermission("nvmlInit".into());
        assert_eq!(codes(&fail(nvidia(), SourceKind::Nvml, refused)), ["no_permission"]);
    }

    #[test]
    fn a_node_the_device_control_group_forbids_is_told_apart() {
        let mut evidence = contained(nvidia());
        nodes_mut(&mut evidence)[0].access = Access::Forbidden;
        assert_eq!(codes(&evidence), ["device_cgroup_forbids"]);
    }

    #[test]
    fn missing_nodes_are_found_by_the_minor_numbers_of_the_devices() {
        let mut evidence = nvidia();
        nodes_mut(&mut evidence).retain(|node| node.name != "nvidia1" && node.name != "nvidia-uvm");
        assert_eq!(codes(&evidence), ["device_nodes_missing"]);
        let missing = ["/dev/nvidia-uvm does not exist", "/dev/nvidia1 does not exist"];
        assert_eq!(examine(&evidence)[0].evidence, missing);
        let mut evidence = amd();
        nodes_mut(&mut evidence).clear();
        assert_eq!(codes(&evidence), ["device_nodes_missing"]);
    }
}

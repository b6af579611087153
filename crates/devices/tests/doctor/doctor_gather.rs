//! Evidence gathered on machines made of files, never on the machine of the test.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use crate::machine::FakeMachine;
use gpupool_core::Vendor;
use gpupool_devices::doctor::{CgroupMode, DoctorEvidence, NodeAccess};
use gpupool_devices::{Reported, SourceKind, SourcePaths};

fn gather(machine: &FakeMachine) -> DoctorEvidence {
    DoctorEvidence::gather(&machine.paths, &|_| None, Vec::new())
}

#[test]
fn gpus_on_the_bus_have_their_driver_and_power_state() {
    let evidence = gather(&FakeMachine::new("tools"));
    let gpus = evidence.gpus.value().unwrap();
    let seen: Vec<_> = gpus.iter().map(|gpu| (gpu.vendor, gpu.device_id, gpu.driver.as_deref(), gpu.asleep)).collect();
    assert_eq!(
        seen,
        [(Vendor::Nvidia, Some(0x2330), Some("nvidia"), false), (Vendor::Amd, Some(0x74a1), Some("amdgpu"), true)],
        "a network card is no GPU"
    );
}

#[test]
fn loaded_modules_and_versions_are_gathered() {
    let evidence = gather(&FakeMachine::new("tools"));
    let modules: Vec<&str> = evidence.modules.value().unwrap().iter().map(String::as_str).collect();
    assert_eq!(modules, ["amdgpu", "nvidia", "nvidia_uvm"]);
    assert_eq!(evidence.nvidia.kernel, Reported::Value("535.183.01".into()));
    assert_eq!(evidence.nvidia.library, Reported::Value("535.183.01".into()));
    assert_eq!(evidence.kernel_release, Reported::Value("6.8.0-45-generic".into()));
    assert_eq!(evidence.persistence_daemon, Reported::Value(true));
}

#[test]
fn nodes_have_their_mode_and_access() {
    let machine = FakeMachine::new("tools");
    fs::set_permissions(machine.at("dev/kfd"), fs::Permissions::from_mode(0o000)).unwrap();
    let evidence = gather(&machine);
    let nodes = evidence.nodes.value().unwrap();
    let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names, ["kfd", "nvidia-uvm", "nvidia0", "nvidiactl", "dri/renderD128"]);
    // The superuser may open a node in spite of its mode.
    let root = rustix::process::geteuid().is_root();
    assert_eq!(nodes[0].access, if root { NodeAccess::Granted } else { NodeAccess::Denied });
    assert_eq!((nodes[2].mode, &nodes[2].access), (0o666, &NodeAccess::Granted));
    assert_eq!(nodes[4].vendor, Some(Vendor::Amd));
}

#[test]
fn containers_namespaces_and_control_groups_are_gathered() {
    let machine = FakeMachine::new("tools");
    let on_host = gather(&machine).confinement;
    assert_eq!((on_host.container, on_host.host_pids), (vec![], Reported::Value(true)));
    let cgroup = on_host.cgroup.value().unwrap();
    assert!(cgroup.has_kill && cgroup.controllers.contains("dmem") && cgroup.mode == CgroupMode::Unified);

    machine.write(".dockerenv", b"");
    machine.write("proc/1/cgroup", b"0::/kubepods/burstable/pod1\n");
    fs::remove_file(machine.at("proc/self/ns/pid")).unwrap();
    symlink("pid:[4026532211]", machine.at("proc/self/ns/pid")).unwrap();
    fs::remove_file(machine.at("sys/fs/cgroup/cgroup.controllers")).unwrap();
    machine.write("sys/fs/cgroup/unified/cgroup.procs", b"1\n");
    machine.write("proc/cgroups", b"#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t2\t1\t1\nmemory\t0\t1\t0\n");
    let variable = |name: &str| (name == "container").then(|| "podman".to_owned());
    let inside = DoctorEvidence::gather(&machine.paths, &variable, Vec::new()).confinement;
    assert_eq!((inside.container.len(), inside.host_pids), (3, Reported::Value(false)));
    let cgroup = inside.cgroup.value().unwrap();
    assert_eq!((cgroup.mode, cgroup.controllers.len()), (CgroupMode::Hybrid, 1));
}

#[test]
fn without_a_group_the_kernel_release_decides_on_cgroup_kill() {
    let machine = FakeMachine::new("tools");
    let can_kill = || gather(&machine).confinement.cgroup.value().unwrap().has_kill;
    fs::remove_dir_all(machine.at("sys/fs/cgroup/init.scope")).unwrap();
    assert!(can_kill(), "Linux 6.8");
    machine.write("proc/sys/kernel/osrelease", b"5.10.0-32-amd64\n");
    assert!(!can_kill(), "Linux 5.10");
    machine.write("proc/sys/kernel/osrelease", b"6.8.0-45-generic\n");
    machine.write("sys/fs/cgroup/init.scope/cgroup.procs", b"1\n");
    assert!(!can_kill(), "a group that lacks the file is believed more than the release");
    fs::remove_file(machine.at("sys/fs/cgroup/cgroup.controllers")).unwrap();
    machine.write("proc/cgroups", b"cpu\t2\t1\t1\n");
    assert!(!can_kill(), "version 1 alone");
}

#[test]
fn tools_and_hiding_variables_are_looked_up_in_the_given_environment() {
    let machine = FakeMachine::new("tools");
    let folder = machine.paths.nvidia_smi.parent().unwrap().to_owned();
    let paths = SourcePaths { nvidia_smi: "nvidia-smi".into(), ..machine.paths.clone() };
    let variable = |name: &str| match name {
        "PATH" => Some(format!("/no/such/folder:{}", folder.display())),
        "CUDA_VISIBLE_DEVICES" => Some(String::new()),
        _ => None,
    };
    let evidence = DoctorEvidence::gather(&paths, &variable, Vec::new());
    assert_eq!(evidence.tools[&SourceKind::NvidiaSmi], Some(folder.join("nvidia-smi")));
    assert_eq!(evidence.tools[&SourceKind::AmdSmi], None);
    assert_eq!(evidence.variables.get("CUDA_VISIBLE_DEVICES").map(String::as_str), Some(""), "empty is not unset");
    assert_eq!(evidence.variables.len(), 1);
}

#[test]
fn an_empty_machine_is_still_gathered() {
    let machine = FakeMachine::new("tools");
    for folder in ["sys", "proc", "dev", "etc", "usr"] {
        fs::remove_dir_all(machine.at(folder)).unwrap();
    }
    let evidence = gather(&machine);
    assert!(evidence.gpus.is_absent() && evidence.modules.is_absent() && evidence.nodes.is_absent());
    assert!(evidence.nvidia.kernel.is_absent() && evidence.confinement.cgroup.is_absent());
}

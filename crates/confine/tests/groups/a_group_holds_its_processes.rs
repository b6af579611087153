//! Cgroups on the running kernel: created, limited, observed, killed, opened again, removed.

use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Instant;

use crate::support::{
    StarterProcess, WAIT_TIMEOUT, cgroups_or_skip, detect_v1_only, expect_exited, is_root, job_with_escapes,
    kill_process, memory_peak, skipped, unique_group_name,
};
use gpupool_confine::cgroup::{CgroupError, CgroupLayout, CgroupLimits, CgroupManager, ProcessCgroup};
use gpupool_confine::process::ProcessId;

/// A process of the test that is added to a cgroup and killed with it.
fn start_sleeper() -> (Child, ProcessId) {
    let child = Command::new("sleep").arg("600").stdin(Stdio::null()).process_group(0).spawn().unwrap();
    let id = ProcessId::of_pid(child.id()).unwrap().unwrap();
    (child, id)
}

/// Starts a Python process that waits for the end of its standard input and then runs the script in its current cgroup.
fn waiting_python(script: &str) -> Child {
    let script = format!("import os, sys\nprint('ready', flush=True)\nsys.stdin.read()\n{script}");
    let mut command = Command::new("python3");
    let mut child = command.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
    assert_eq!(ready, "ready\n");
    child
}

/// Adds the waiting process to the cgroup, lets it run and waits for its exit.
fn run_in(group: &ProcessCgroup, mut child: Child) -> ExitStatus {
    group.add_process(ProcessId::of_pid(child.id()).unwrap().unwrap()).unwrap();
    drop(child.stdin.take());
    child.wait().unwrap()
}

fn expect_empty(group: &ProcessCgroup) {
    assert!(group.wait_empty(Instant::now() + WAIT_TIMEOUT).unwrap(), "still in it: {:?}", group.processes());
}

/// Runs through the whole life of a cgroup.
fn check_lifecycle(cgroups: &CgroupManager, story: &str) {
    let name = unique_group_name(story);
    let group = cgroups.create(&name, &CgroupLimits { host_memory: Some(256 << 20), pids: Some(64) }).unwrap();
    assert!(matches!(cgroups.create(&name, &CgroupLimits::default()), Err(CgroupError::Exists { .. })));
    assert!(cgroups.cgroup_names().unwrap().contains(&name));
    assert!(!group.is_populated().unwrap());
    expect_empty(&group);

    let (mut first, first_id) = start_sleeper();
    let (mut second, second_id) = start_sleeper();
    group.add_process(first_id).unwrap();
    group.add_process(second_id).unwrap();
    assert!(group.is_populated().unwrap());
    assert!(!group.wait_empty(Instant::now()).unwrap());
    let mut pids = [first_id.pid, second_id.pid];
    pids.sort_unstable();
    assert_eq!(group.processes().unwrap(), pids);
    let membership = std::fs::read_to_string(format!("/proc/{}/cgroup", first_id.pid)).unwrap();
    assert!(membership.contains(&format!("/gpupool/{name}\n")), "{membership}");
    match group.remove() {
        Err(CgroupError::StillAlive { left, .. }) => assert_eq!(left, pids),
        other => panic!("a group with processes was removed: {other:?}"),
    }

    // As after a restart: the cgroup is opened by name and killed without any other knowledge.
    drop(group);
    let group = cgroups.open(&name).unwrap().unwrap();
    group.set_limits(&CgroupLimits { host_memory: None, pids: None }).unwrap();
    group.kill().unwrap();
    expect_empty(&group);
    first.wait().unwrap();
    second.wait().unwrap();
    assert!(matches!(group.add_process(first_id), Err(CgroupError::ProcessGone(id)) if id == first_id));
    group.kill().unwrap();
    group.remove().unwrap();
    assert!(cgroups.open(&name).unwrap().is_none());
    assert!(!cgroups.cgroup_names().unwrap().contains(&name));
}

#[test]
fn a_cgroup_is_created_killed_and_removed() {
    let Some(cgroups) = cgroups_or_skip() else { return };
    if !cgroups.limits_memory() || !cgroups.limits_pids() {
        return skipped("limits by control groups", &cgroups.describe());
    }
    check_lifecycle(&cgroups, "life");
}

#[test]
fn a_v1_cgroup_is_created_killed_and_removed() {
    let Some(cgroups) = detect_v1_only() else { return skipped("cgroup v1", "this machine has no cgroup v1") };
    if !cgroups.limits_memory() || !cgroups.limits_pids() {
        return skipped("limits by control groups", &cgroups.describe());
    }
    check_lifecycle(&cgroups, "v1");
}

#[test]
fn process_1_and_this_process_are_never_added_to_a_cgroup() {
    let Some(cgroups) = cgroups_or_skip() else { return };
    let group = cgroups.create(&unique_group_name("refuse"), &CgroupLimits::default()).unwrap();
    let init = ProcessId { pid: 1, started: 0 };
    for process in [ProcessId::current().unwrap(), init] {
        assert!(matches!(group.add_process(process), Err(CgroupError::Refused { .. })), "{process} was taken");
    }
    assert!(group.processes().unwrap().is_empty());
    group.remove().unwrap();
}

#[test]
fn a_memory_hog_is_killed_by_its_cgroup_and_counted() {
    let Some(cgroups) = cgroups_or_skip() else { return };
    if !cgroups.limits_memory() {
        return skipped("limits by control groups", &cgroups.describe());
    }
    let limit = 64 << 20;
    let group =
        cgroups.create(&unique_group_name("hog"), &CgroupLimits { host_memory: Some(limit), pids: None }).unwrap();
    assert_eq!(group.usage_meter().oom_kills(), Some(0));
    let status = run_in(&group, waiting_python("b = b'x' * (512 << 20); sys.exit(len(b) == 0)"));
    let (kills, peak) = (group.usage_meter().oom_kills(), memory_peak(&cgroups, group.name()));
    expect_empty(&group);
    group.remove().unwrap();
    assert_eq!(status.signal(), Some(9), "{status:?}");
    assert!(kills >= Some(1), "{kills:?}");
    assert!(peak.is_none_or(|peak| peak > limit / 2 && peak <= limit), "{peak:?}");
}

#[test]
fn a_limit_on_processes_stops_forks() {
    let Some(cgroups) = cgroups_or_skip() else { return };
    if !cgroups.limits_pids() {
        return skipped("limits by control groups", &cgroups.describe());
    }
    let group = cgroups.create(&unique_group_name("pids"), &CgroupLimits { host_memory: None, pids: Some(3) }).unwrap();
    let script = "made = 0\n\
        try:\n    while made < 10:\n        if os.fork() == 0:\n            import time; time.sleep(600)\n        made += 1\n\
        except BlockingIOError:\n    pass\n\
        os._exit(made)\n";
    let status = run_in(&group, waiting_python(script));
    group.kill().unwrap();
    expect_empty(&group);
    group.remove().unwrap();
    assert_eq!(status.code(), Some(2), "it was to get two children beside itself: {status:?}");
}

#[test]
fn nested_cgroups_of_the_job_are_killed_and_removed() {
    let Some(cgroups) = cgroups_or_skip() else { return };
    let group = cgroups.create(&unique_group_name("nested"), &CgroupLimits::default()).unwrap();
    let inner = group.path().join("a").join("b");
    std::fs::create_dir_all(&inner).unwrap();
    let (mut child, id) = start_sleeper();
    std::fs::write(inner.join("cgroup.procs"), id.pid.to_string()).unwrap();
    assert_eq!(group.processes().unwrap(), [id.pid]);
    assert!(group.is_populated().unwrap());
    group.kill().unwrap();
    child.wait().unwrap();
    expect_empty(&group);
    group.remove().unwrap();
    assert!(!Path::new(group.path()).exists());
}

#[test]
fn a_job_joins_its_cgroup_before_it_runs_and_the_cgroup_ends_with_it() {
    let Some(cgroups) = cgroups_or_skip() else { return };
    let name = unique_group_name("job");
    let own = format!("/gpupool/{name}");
    let mut starter = StarterProcess::run(&["--group", &name], &["grep", "-o", &own, "/proc/self/cgroup"]);
    starter.expect(&own);
    starter.expect("ended exited 0");
    starter.exit_code();

    let mut starter = StarterProcess::run(&["--group", &name], &job_with_escapes("sys.stdin.readline(); sys.exit(4)"));
    let escaped = starter.escaped_processes();
    let mut expected: Vec<u32> = escaped.iter().map(|process| process.id().pid).collect();
    expected.sort_unstable();
    assert_eq!(cgroups.open(&name).unwrap().unwrap().processes().unwrap(), expected);
    starter.send_input();
    assert_eq!(starter.expect("ended "), "exited 4");
    expect_exited(&escaped);
    starter.exit_code();
    assert!(cgroups.open(&name).unwrap().is_none(), "the group outlived its job");
}

#[test]
fn with_a_cgroup_a_kill_of_both_helpers_leaves_no_process() {
    let Some(cgroups) = cgroups_or_skip() else { return };
    let name = unique_group_name("both");
    let mut starter = StarterProcess::run(&["--group", &name], &job_with_escapes("time.sleep(600)"));
    let escaped = starter.escaped_processes();
    let (guard, supervisor) = starter.helper_processes();
    // Stopped first, so that it cannot act between the two kills.
    guard.signal(gpupool_confine::Signal::STOP).unwrap();
    kill_process(&supervisor);
    kill_process(&guard);
    assert_eq!(starter.expect("ended "), "signalled 9");
    expect_exited(&escaped);
    starter.exit_code();
    assert!(cgroups.open(&name).unwrap().is_none());
}

#[test]
fn a_kill_of_the_cgroup_by_another_process_is_reported() {
    let Some(cgroups) = cgroups_or_skip() else { return };
    let name = unique_group_name("agent");
    let mut starter = StarterProcess::run(&["--group", &name], &job_with_escapes("time.sleep(600)"));
    let escaped = starter.escaped_processes();
    let (guard, supervisor) = starter.helper_processes();
    cgroups.open(&name).unwrap().unwrap().kill().unwrap();
    assert_eq!(starter.expect("ended "), "signalled 9");
    expect_exited(escaped.iter().chain([&guard, &supervisor]));
}

#[test]
fn an_unprivileged_user_can_create_cgroups_only_below_a_delegated_one() {
    let Some(cgroups) = cgroups_or_skip() else { return };
    let Some(unified) = cgroups.base_paths().next().and_then(|base| base.parent().map(Path::to_owned)) else { return };
    if !is_root() || cgroups.layout() == CgroupLayout::V1 || !unified.join("cgroup.procs").exists() {
        return skipped("delegated control groups", "needs root and cgroup v2, to hand a part of it to user 65534");
    }
    let as_nobody = |prefix: &str| {
        let mut command = Command::new("sh");
        let script = format!("{prefix} exec setpriv --reuid=65534 --regid=65534 --clear-groups \"$0\" \"$@\"");
        command.args(["-c", &script]).arg(crate::support::starter_program());
        command
    };
    let output = as_nobody("").arg("--describe").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    if !output.status.success() {
        return skipped(
            "delegated control groups",
            "setpriv is missing, or the build directory cannot be reached by user 65534",
        );
    }
    assert!(text.starts_with("none: ") && text.contains("is not writable"), "{text}");

    let scope = unified.join(format!("gpupool-test-scope-{}", std::process::id()));
    std::fs::create_dir(&scope).unwrap();
    for file in [scope.clone(), scope.join("cgroup.procs"), scope.join("cgroup.subtree_control")] {
        std::os::unix::fs::chown(file, Some(65534), Some(65534)).unwrap();
    }
    let enter = format!("echo $$ > {}/cgroup.procs;", scope.display());
    let mut starter =
        StarterProcess::run_by(as_nobody(&enter), &["--group", "mine"], &job_with_escapes("time.sleep(600)"));
    let escaped = starter.escaped_processes();
    assert!(scope.join("gpupool/mine/cgroup.procs").exists());
    let (guard, supervisor) = starter.helper_processes();
    guard.signal(gpupool_confine::Signal::STOP).unwrap();
    kill_process(&supervisor);
    kill_process(&guard);
    assert_eq!(starter.expect("ended "), "signalled 9");
    expect_exited(&escaped);
    starter.exit_code();
    std::fs::remove_dir(scope.join("gpupool")).unwrap();
    // The leaf exists if there are controllers to enable; the starter in it has exited.
    if scope.join("agent").exists() {
        std::fs::remove_dir(scope.join("agent")).unwrap();
    }
    std::fs::remove_dir(scope).unwrap();
}

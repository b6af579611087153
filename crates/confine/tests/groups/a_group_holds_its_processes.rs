//! Groups on the running kernel: made, limited, watched, killed, found again, removed.

use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Instant;

use crate::support::{
    PATIENCE, Starter, escaping_job, expect_gone, group_name, groups_or_skip, is_root, kill, memory_peak, skipped,
    v1_alone,
};
use gpupool_confine::cgroup::{CgroupError, CgroupLayout, CgroupLimits, CgroupManager, ProcessCgroup};
use gpupool_confine::process::ProcessId;

/// A process of the test that is put into a group and killed with it.
fn sleeper() -> (Child, ProcessId) {
    let child = Command::new("sleep").arg("600").stdin(Stdio::null()).process_group(0).spawn().unwrap();
    let id = ProcessId::of_pid(child.id()).unwrap().unwrap();
    (child, id)
}

/// A Python process that waits for its standard input to end and then runs the script, which thus runs in whatever
/// group the process was put into before.
fn waiting_python(script: &str) -> Child {
    let script = format!("import os, sys\nprint('ready', flush=True)\nsys.stdin.read()\n{script}");
    let mut command = Command::new("python3");
    let mut child = command.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
    assert_eq!(ready, "ready\n");
    child
}

/// Puts the waiting process into the group, lets it run and waits for its end.
fn run_in(group: &ProcessCgroup, mut child: Child) -> ExitStatus {
    group.add_process(ProcessId::of_pid(child.id()).unwrap().unwrap()).unwrap();
    drop(child.stdin.take());
    child.wait().unwrap()
}

fn expect_empty(group: &ProcessCgroup) {
    assert!(group.wait_empty(Instant::now() + PATIENCE).unwrap(), "still in it: {:?}", group.processes());
}

/// The whole life of a group, on whatever path `cgroups` found.
fn live_through(cgroups: &CgroupManager, story: &str) {
    let name = group_name(story);
    let group = cgroups.create(&name, &CgroupLimits { host_memory: Some(256 << 20), pids: Some(64) }).unwrap();
    assert!(matches!(cgroups.create(&name, &CgroupLimits::default()), Err(CgroupError::Exists { .. })));
    assert!(cgroups.cgroup_names().unwrap().contains(&name));
    assert!(!group.is_populated().unwrap());
    expect_empty(&group);

    let (mut first, first_id) = sleeper();
    let (mut second, second_id) = sleeper();
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

    // As after a restart: the group is found by its name, and killed without anything else known about it.
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
fn a_group_lives_and_dies_on_this_machine() {
    let Some(cgroups) = groups_or_skip() else { return };
    if !cgroups.limits_memory() || !cgroups.limits_pids() {
        return skipped("limits by control groups", &cgroups.describe());
    }
    live_through(&cgroups, "life");
}

#[test]
fn a_group_lives_and_dies_with_v1_alone() {
    let Some(cgroups) = v1_alone() else { return skipped("cgroup v1", "this machine has no cgroup v1") };
    if !cgroups.limits_memory() || !cgroups.limits_pids() {
        return skipped("limits by control groups", &cgroups.describe());
    }
    live_through(&cgroups, "v1");
}

#[test]
fn neither_process_1_nor_ourselves_get_into_a_group() {
    let Some(cgroups) = groups_or_skip() else { return };
    let group = cgroups.create(&group_name("refuse"), &CgroupLimits::default()).unwrap();
    let init = ProcessId { pid: 1, started: 0 };
    for process in [ProcessId::current().unwrap(), init] {
        assert!(matches!(group.add_process(process), Err(CgroupError::Refused { .. })), "{process} was taken");
    }
    assert!(group.processes().unwrap().is_empty());
    group.remove().unwrap();
}

#[test]
fn a_hog_is_killed_by_the_limit_of_its_group_and_counted() {
    let Some(cgroups) = groups_or_skip() else { return };
    if !cgroups.limits_memory() {
        return skipped("limits by control groups", &cgroups.describe());
    }
    let limit = 64 << 20;
    let group = cgroups.create(&group_name("hog"), &CgroupLimits { host_memory: Some(limit), pids: None }).unwrap();
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
    let Some(cgroups) = groups_or_skip() else { return };
    if !cgroups.limits_pids() {
        return skipped("limits by control groups", &cgroups.describe());
    }
    let group = cgroups.create(&group_name("pids"), &CgroupLimits { host_memory: None, pids: Some(3) }).unwrap();
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
fn groups_the_job_made_inside_are_killed_and_removed_too() {
    let Some(cgroups) = groups_or_skip() else { return };
    let group = cgroups.create(&group_name("nested"), &CgroupLimits::default()).unwrap();
    let inner = group.path().join("a").join("b");
    std::fs::create_dir_all(&inner).unwrap();
    let (mut child, id) = sleeper();
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
fn a_job_is_in_its_group_before_it_runs_and_the_group_goes_with_it() {
    let Some(cgroups) = groups_or_skip() else { return };
    let name = group_name("job");
    let own = format!("/gpupool/{name}");
    let mut starter = Starter::run(&["--group", &name], &["grep", "-o", &own, "/proc/self/cgroup"]);
    starter.expect(&own);
    starter.expect("ended exited 0");
    starter.exit_code();

    let mut starter = Starter::run(&["--group", &name], &escaping_job("sys.stdin.readline(); sys.exit(4)"));
    let escapers = starter.escapers();
    let mut expected: Vec<u32> = escapers.iter().map(|process| process.id().pid).collect();
    expected.sort_unstable();
    assert_eq!(cgroups.open(&name).unwrap().unwrap().processes().unwrap(), expected);
    starter.give_input();
    assert_eq!(starter.expect("ended "), "exited 4");
    expect_gone(&escapers);
    starter.exit_code();
    assert!(cgroups.open(&name).unwrap().is_none(), "the group outlived its job");
}

#[test]
fn with_a_group_even_both_keepers_may_be_killed_at_once() {
    let Some(cgroups) = groups_or_skip() else { return };
    let name = group_name("both");
    let mut starter = Starter::run(&["--group", &name], &escaping_job("time.sleep(600)"));
    let escapers = starter.escapers();
    let (guard, keeper) = starter.keepers();
    // Stopped first: it has no chance to act between the two kills.
    guard.signal(gpupool_confine::Signal::STOP).unwrap();
    kill(&keeper);
    kill(&guard);
    assert_eq!(starter.expect("ended "), "signalled 9");
    expect_gone(&escapers);
    starter.exit_code();
    assert!(cgroups.open(&name).unwrap().is_none());
}

#[test]
fn a_group_can_be_killed_by_somebody_else_and_the_job_says_so() {
    let Some(cgroups) = groups_or_skip() else { return };
    let name = group_name("agent");
    let mut starter = Starter::run(&["--group", &name], &escaping_job("time.sleep(600)"));
    let escapers = starter.escapers();
    let (guard, keeper) = starter.keepers();
    cgroups.open(&name).unwrap().unwrap().kill().unwrap();
    assert_eq!(starter.expect("ended "), "signalled 9");
    expect_gone(escapers.iter().chain([&guard, &keeper]));
}

#[test]
fn an_ordinary_user_gets_groups_below_a_cgroup_that_was_handed_over_and_else_a_reason() {
    let Some(cgroups) = groups_or_skip() else { return };
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
    let mut starter = Starter::run_by(as_nobody(&enter), &["--group", "mine"], &escaping_job("time.sleep(600)"));
    let escapers = starter.escapers();
    assert!(scope.join("gpupool/mine/cgroup.procs").exists());
    let (guard, keeper) = starter.keepers();
    guard.signal(gpupool_confine::Signal::STOP).unwrap();
    kill(&keeper);
    kill(&guard);
    assert_eq!(starter.expect("ended "), "signalled 9");
    expect_gone(&escapers);
    starter.exit_code();
    std::fs::remove_dir(scope.join("gpupool")).unwrap();
    // Made where there are controllers to hand down, with the starter in it, which has gone.
    if scope.join("agent").exists() {
        std::fs::remove_dir(scope.join("agent")).unwrap();
    }
    std::fs::remove_dir(scope).unwrap();
}

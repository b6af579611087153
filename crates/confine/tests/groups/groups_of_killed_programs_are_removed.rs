//! Cgroups left by killed programs, and cgroups that only look like it.

use std::time::Instant;

use crate::support::{StarterProcess, WAIT_TIMEOUT, cgroups_or_skip, expect_exited, kill_process, open_process};
use gpupool_confine::bounds::BoundsWatcher;
use gpupool_confine::cgroup::{CgroupLimits, CgroupManager};
use gpupool_confine::process::ProcessId;

/// Creates the cgroup of a job whose program was killed, and returns its name.
fn orphan_cgroup() -> String {
    let mut starter = StarterProcess::run(&[], &["sleep", "600"]);
    let job: u32 = starter.expect("started ").parse().unwrap();
    let id = ProcessId::of_pid(job).unwrap().unwrap();
    let name = format!("worker-{}-{}", id.pid, id.started);
    let process = open_process(job);
    CgroupManager::detect().create(&name, &CgroupLimits::default()).unwrap().add_process(id).unwrap();
    kill_process(&open_process(starter.child.id()));
    expect_exited([&process]);
    // The process counts as existing until its new parent reaps it.
    let give_up = Instant::now() + WAIT_TIMEOUT;
    while ProcessId::of_pid(job).unwrap() == Some(id) {
        assert!(Instant::now() < give_up, "process {job} is not reaped");
        std::thread::yield_now();
    }
    name
}

#[test]
fn only_empty_cgroups_of_exited_processes_are_removed() {
    let Some(cgroups) = cgroups_or_skip() else { return };
    let ours = ProcessId::current().unwrap();
    let make = |name: String| {
        cgroups.create(&name, &CgroupLimits::default()).unwrap();
        name
    };
    let left = [orphan_cgroup(), make(format!("run-{}-{}", ours.pid, ours.started + 1))];
    let stay = [
        make(format!("run-{}-{}", ours.pid, ours.started)),
        make(format!("leases-{}-1", ours.pid)),
        make(format!("worker-{}-used", ours.pid)),
    ];
    // Not empty, although its name suggests it.
    let mut sleeper = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let used = cgroups.create(&format!("run-{}-{}", ours.pid, ours.started + 2), &CgroupLimits::default()).unwrap();
    used.add_process(ProcessId::of_pid(sleeper.id()).unwrap().unwrap()).unwrap();

    let watcher = BoundsWatcher::start(cgroups.clone()).unwrap();
    let give_up = Instant::now() + WAIT_TIMEOUT;
    let names = loop {
        let names = cgroups.cgroup_names().unwrap();
        if !left.iter().any(|name| names.contains(name)) {
            break names;
        }
        assert!(Instant::now() < give_up, "of {left:?} something is left in {names:?}");
        std::thread::yield_now();
    };
    for name in stay.iter().map(String::as_str).chain([used.name()]) {
        assert!(names.iter().any(|there| there == name), "{name} is gone");
    }
    drop(watcher);
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
    used.remove().unwrap();
    stay.iter().for_each(|name| cgroups.open(name).unwrap().unwrap().remove().unwrap());
}

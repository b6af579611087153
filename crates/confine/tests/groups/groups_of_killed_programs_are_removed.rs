//! Groups that programs left behind because they were killed, and groups that only look like it.

use std::time::Instant;

use crate::support::{PATIENCE, Starter, expect_gone, groups_or_skip, held, kill};
use gpupool_confine::bounds::BoundsWatcher;
use gpupool_confine::cgroup::{CgroupLimits, CgroupManager};
use gpupool_confine::process::ProcessId;

/// The name of the group of a job that a program left when it was killed.
fn left_by_a_killed_program() -> String {
    let mut starter = Starter::run(&[], &["sleep", "600"]);
    let job: u32 = starter.expect("started ").parse().unwrap();
    let id = ProcessId::of_pid(job).unwrap().unwrap();
    let name = format!("worker-{}-{}", id.pid, id.started);
    let process = held(job);
    CgroupManager::detect().create(&name, &CgroupLimits::default()).unwrap().add_process(id).unwrap();
    kill(&held(starter.child.id()));
    expect_gone([&process]);
    // Until its new parent has taken notice, it still counts as there.
    let give_up = Instant::now() + PATIENCE;
    while ProcessId::of_pid(job).unwrap() == Some(id) {
        assert!(Instant::now() < give_up, "nobody takes notice of the end of process {job}");
        std::thread::yield_now();
    }
    name
}

#[test]
fn an_empty_group_whose_process_is_gone_is_removed_and_no_other() {
    let Some(cgroups) = groups_or_skip() else { return };
    let ours = ProcessId::current().unwrap();
    let make = |name: String| {
        cgroups.create(&name, &CgroupLimits::default()).unwrap();
        name
    };
    let left = [left_by_a_killed_program(), make(format!("run-{}-{}", ours.pid, ours.started + 1))];
    let stay = [
        make(format!("run-{}-{}", ours.pid, ours.started)),
        make(format!("leases-{}-1", ours.pid)),
        make(format!("worker-{}-used", ours.pid)),
    ];
    // Not empty, whatever its name says.
    let mut sleeper = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let used = cgroups.create(&format!("run-{}-{}", ours.pid, ours.started + 2), &CgroupLimits::default()).unwrap();
    used.add_process(ProcessId::of_pid(sleeper.id()).unwrap().unwrap()).unwrap();

    let watcher = BoundsWatcher::start(cgroups.clone()).unwrap();
    let give_up = Instant::now() + PATIENCE;
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

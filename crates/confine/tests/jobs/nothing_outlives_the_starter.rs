//! Whoever is killed, in whatever way the job tried to get away: no process of it is left.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{
    PATIENCE, Starter, escaping_job, expect_gone, group_name, held, is_root, kill, skipped, starter_program,
};
use gpupool_confine::Signal;
use gpupool_confine::process::ProcFs;
use gpupool_confine::spawn::{Job, JobEnd, JobSpec};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A group in the freezer of cgroup v1, thawed also when its test fails.
struct Frozen(PathBuf);

impl Frozen {
    fn freeze(group: &Path, pid: u32) -> Self {
        std::fs::create_dir(group).unwrap();
        std::fs::write(group.join("cgroup.procs"), pid.to_string()).unwrap();
        std::fs::write(group.join("freezer.state"), "FROZEN").unwrap();
        Self(group.to_owned())
    }

    fn thaw(self) -> PathBuf {
        self.0.clone()
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        std::fs::write(self.0.join("freezer.state"), "THAWED").unwrap();
    }
}

const FOR_EVER: &str = "time.sleep(600)";

#[test]
fn kill_9_of_the_starter_leaves_no_process() {
    let mut starter = Starter::run(&[], &escaping_job(FOR_EVER));
    let escapers = starter.escapers();
    let (guard, keeper) = starter.keepers();
    kill(&held(starter.child.id()));
    expect_gone(escapers.iter().chain([&guard, &keeper]));
}

#[test]
fn kill_9_of_the_keeper_leaves_no_process_and_is_told() {
    let mut starter = Starter::run(&[], &escaping_job(FOR_EVER));
    let escapers = starter.escapers();
    let (guard, keeper) = starter.keepers();
    kill(&keeper);
    assert_eq!(starter.expect("ended "), "signalled 9");
    expect_gone(escapers.iter().chain([&guard]));
    assert_eq!(starter.exit_code(), Some(137));
}

#[test]
fn kill_9_of_the_guard_leaves_no_process_and_is_told() {
    let mut starter = Starter::run(&[], &escaping_job(FOR_EVER));
    let escapers = starter.escapers();
    let (guard, keeper) = starter.keepers();
    kill(&guard);
    assert_eq!(starter.expect("ended "), "signalled 9");
    expect_gone(escapers.iter().chain([&keeper]));
    assert_eq!(starter.exit_code(), Some(137));
}

#[test]
fn a_keeper_that_was_stopped_does_not_save_the_job_from_the_death_of_the_starter() {
    let mut starter = Starter::run(&[], &escaping_job(FOR_EVER));
    let escapers = starter.escapers();
    let (guard, keeper) = starter.keepers();
    assert!(keeper.signal(Signal::STOP).unwrap());
    kill(&held(starter.child.id()));
    expect_gone(escapers.iter().chain([&guard, &keeper]));
}

#[test]
fn a_keeper_that_is_stopped_after_it_told_the_end_does_not_stay() {
    // Often enough that it is stopped, and not gone already, at least once.
    for _ in 0..100 {
        let prepared = Job::prepare(JobSpec::new("true").keeper_program(starter_program())).unwrap();
        let keeper = held(ProcFs::system().stat(prepared.id().pid).unwrap().unwrap().parent);
        let mut job = prepared.start().unwrap();
        let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::new(&job, PollFlags::IN)], Some(&patience)), Ok(1), "the end was never told");
        keeper.signal(Signal::STOP).unwrap();
        assert_eq!(job.wait().unwrap(), JobEnd::Exited(0));
        expect_gone([&keeper]);
    }
}

#[test]
fn the_normal_end_kills_what_was_left_behind_before_it_is_told() {
    let mut starter = Starter::run(&[], &escaping_job("sys.stdin.readline(); sys.exit(7)"));
    let escapers = starter.escapers();
    starter.give_input();
    assert_eq!(starter.expect("ended "), "exited 7");
    for escaper in &escapers {
        assert!(escaper.has_exited().unwrap(), "{} was there when the end was told", escaper.id());
    }
    assert_eq!(starter.exit_code(), Some(7));
}

#[test]
fn a_dropped_job_is_gone_when_the_drop_returns() {
    let mut starter = Starter::run(&["--drop-on-input"], &escaping_job(FOR_EVER));
    let escapers = starter.escapers();
    starter.give_input();
    starter.expect("dropped");
    for escaper in &escapers {
        assert!(escaper.has_exited().unwrap(), "{} outlived the drop", escaper.id());
    }
}

#[test]
fn a_job_that_goes_on_forking_is_caught() {
    // Always two generations on the move: each child forks the next one and ends, in a session of its own.
    let runaway = "import os\n\
        os.write(1, b'pid %d\\n' % os.getpid())\n\
        while True:\n    if os.fork(): os._exit(0)\n    os.setsid()\n";
    let job = [
        "python3",
        "-c",
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(600)",
        runaway,
    ];
    let mut starter = Starter::run(&[], &job);
    starter.expect("pid ");
    let (guard, keeper) = starter.keepers();
    kill(&held(starter.child.id()));
    // The keepers end only when they have no child left, and any process of the job would be one.
    expect_gone([&guard, &keeper]);
}

#[test]
fn a_thread_that_started_a_job_may_end() {
    let mut starter = Starter::run(&["--from-a-thread"], &["sh", "-c", "read line; exit 5"]);
    starter.expect("started ");
    starter.give_input();
    assert_eq!(starter.expect("ended "), "exited 5");
}

#[test]
fn a_process_that_cannot_die_yet_holds_up_neither_the_end_nor_its_own_later_end() {
    // The freezer of cgroup v1 keeps a process from dying as a hung driver does.
    let freezer = Path::new("/sys/fs/cgroup/freezer");
    if !is_root() || !freezer.join("cgroup.procs").exists() {
        return skipped("frozen processes", "needs root and the freezer of cgroup v1");
    }
    let mut starter = Starter::run(&[], &escaping_job("sys.stdin.readline(); sys.exit(0)"));
    let job: u32 = starter.expect("prepared ").parse().unwrap();
    let escapers = starter.escapers();
    let (guard, keeper) = starter.keepers();
    let stuck = escapers.iter().find(|process| process.id().pid != job).unwrap();
    let frozen = Frozen::freeze(&freezer.join(group_name("gpupool-frozen")), stuck.id().pid);

    starter.give_input();
    assert_eq!(starter.expect("stuck "), "1");
    assert_eq!(starter.expect("ended "), "exited 0");
    assert!(!stuck.has_exited().unwrap() && !guard.has_exited().unwrap());
    let group = frozen.thaw();
    expect_gone(escapers.iter().chain([&guard, &keeper]));
    std::fs::remove_dir(group).unwrap();
}

#[test]
fn an_ordinary_user_is_served_as_well() {
    if !is_root() {
        return skipped("an ordinary user", "all tests of this file run as an ordinary user already");
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(starter_program());
    let reachable = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "test", "-x"])
        .arg(starter_program())
        .status();
    if !reachable.is_ok_and(|status| status.success()) {
        return skipped(
            "an ordinary user",
            "setpriv is missing, or the build directory cannot be reached by user 65534",
        );
    }
    let mut starter = Starter::run_by(command, &[], &escaping_job(FOR_EVER));
    let escapers = starter.escapers();
    assert_eq!(escapers[0].uid().unwrap(), Some(65534));
    kill(&held(starter.child.id()));
    expect_gone(&escapers);
}

//! No process of a job is left after any process was killed, however the job tried to escape.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{
    StarterProcess, WAIT_TIMEOUT, expect_exited, is_root, job_with_escapes, kill_process, open_process, skipped,
    starter_program, unique_group_name,
};
use gpupool_confine::Signal;
use gpupool_confine::process::ProcFs;
use gpupool_confine::spawn::{Job, JobEnd, JobSpec};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A cgroup in the freezer of v1, thawed also when its test fails.
struct FrozenCgroup(PathBuf);

impl FrozenCgroup {
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

impl Drop for FrozenCgroup {
    fn drop(&mut self) {
        std::fs::write(self.0.join("freezer.state"), "THAWED").unwrap();
    }
}

const FOR_EVER: &str = "time.sleep(600)";

#[test]
fn kill_9_of_the_starter_leaves_no_process() {
    let mut starter = StarterProcess::run(&[], &job_with_escapes(FOR_EVER));
    let escaped = starter.escaped_processes();
    let (guard, supervisor) = starter.helper_processes();
    kill_process(&open_process(starter.child.id()));
    expect_exited(escaped.iter().chain([&guard, &supervisor]));
}

#[test]
fn kill_9_of_the_supervisor_leaves_no_process_and_is_reported() {
    let mut starter = StarterProcess::run(&[], &job_with_escapes(FOR_EVER));
    let escaped = starter.escaped_processes();
    let (guard, supervisor) = starter.helper_processes();
    kill_process(&supervisor);
    assert_eq!(starter.expect("ended "), "signalled 9");
    expect_exited(escaped.iter().chain([&guard]));
    assert_eq!(starter.exit_code(), Some(137));
}

#[test]
fn kill_9_of_the_guard_leaves_no_process_and_is_reported() {
    let mut starter = StarterProcess::run(&[], &job_with_escapes(FOR_EVER));
    let escaped = starter.escaped_processes();
    let (guard, supervisor) = starter.helper_processes();
    kill_process(&guard);
    assert_eq!(starter.expect("ended "), "signalled 9");
    expect_exited(escaped.iter().chain([&supervisor]));
    assert_eq!(starter.exit_code(), Some(137));
}

#[test]
fn a_stopped_supervisor_does_not_let_the_job_outlive_its_starter() {
    let mut starter = StarterProcess::run(&[], &job_with_escapes(FOR_EVER));
    let escaped = starter.escaped_processes();
    let (guard, supervisor) = starter.helper_processes();
    assert!(supervisor.signal(Signal::STOP).unwrap());
    kill_process(&open_process(starter.child.id()));
    expect_exited(escaped.iter().chain([&guard, &supervisor]));
}

#[test]
fn a_supervisor_stopped_after_it_reported_the_end_is_killed() {
    // Often enough that the supervisor is stopped before its exit at least once.
    for _ in 0..100 {
        let prepared = Job::prepare(JobSpec::new("true").supervisor_program(starter_program())).unwrap();
        let supervisor = open_process(ProcFs::system().stat(prepared.id().pid).unwrap().unwrap().parent);
        let mut job = prepared.start().unwrap();
        let patience = Timespec { tv_sec: WAIT_TIMEOUT.as_secs() as i64, tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::new(&job, PollFlags::IN)], Some(&patience)), Ok(1), "the end was never reported");
        supervisor.signal(Signal::STOP).unwrap();
        assert_eq!(job.wait().unwrap(), JobEnd::Exited(0));
        expect_exited([&supervisor]);
    }
}

#[test]
fn leftover_processes_are_killed_before_the_end_is_reported() {
    let mut starter = StarterProcess::run(&[], &job_with_escapes("sys.stdin.readline(); sys.exit(7)"));
    let escaped = starter.escaped_processes();
    starter.send_input();
    assert_eq!(starter.expect("ended "), "exited 7");
    for escaper in &escaped {
        assert!(escaper.has_exited().unwrap(), "{} was there when the end was reported", escaper.id());
    }
    assert_eq!(starter.exit_code(), Some(7));
}

#[test]
fn dropping_a_job_waits_until_its_processes_have_exited() {
    let mut starter = StarterProcess::run(&["--drop-on-input"], &job_with_escapes(FOR_EVER));
    let escaped = starter.escaped_processes();
    starter.send_input();
    starter.expect("dropped");
    for escaper in &escaped {
        assert!(escaper.has_exited().unwrap(), "{} outlived the drop", escaper.id());
    }
}

#[test]
fn a_job_that_keeps_forking_is_killed() {
    // Two generations at any time: each child forks the next one and exits, in a session of its own.
    let runaway = "import os\n\
        os.write(1, b'pid %d\\n' % os.getpid())\n\
        while True:\n    if os.fork(): os._exit(0)\n    os.setsid()\n";
    let job = [
        "python3",
        "-c",
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(600)",
        runaway,
    ];
    let mut starter = StarterProcess::run(&[], &job);
    starter.expect("pid ");
    let (guard, supervisor) = starter.helper_processes();
    kill_process(&open_process(starter.child.id()));
    // The helpers exit only when they have no child left, and any process of the job would be one.
    expect_exited([&guard, &supervisor]);
}

#[test]
fn a_thread_that_started_a_job_may_end() {
    let mut starter = StarterProcess::run(&["--from-a-thread"], &["sh", "-c", "read line; exit 5"]);
    starter.expect("started ");
    starter.send_input();
    assert_eq!(starter.expect("ended "), "exited 5");
}

#[test]
fn a_process_that_cannot_die_yet_does_not_delay_the_end_and_is_killed_later() {
    // The freezer of cgroup v1 keeps a process from dying as a hung driver does.
    let freezer = Path::new("/sys/fs/cgroup/freezer");
    if !is_root() || !freezer.join("cgroup.procs").exists() {
        return skipped("frozen processes", "needs root and the freezer of cgroup v1");
    }
    let mut starter = StarterProcess::run(&[], &job_with_escapes("sys.stdin.readline(); sys.exit(0)"));
    let job: u32 = starter.expect("prepared ").parse().unwrap();
    let escaped = starter.escaped_processes();
    let (guard, supervisor) = starter.helper_processes();
    let stuck = escaped.iter().find(|process| process.id().pid != job).unwrap();
    let frozen = FrozenCgroup::freeze(&freezer.join(unique_group_name("gpupool-frozen")), stuck.id().pid);

    starter.send_input();
    assert_eq!(starter.expect("stuck "), "1");
    assert_eq!(starter.expect("ended "), "exited 0");
    assert!(!stuck.has_exited().unwrap() && !guard.has_exited().unwrap());
    let group = frozen.thaw();
    expect_exited(escaped.iter().chain([&guard, &supervisor]));
    std::fs::remove_dir(group).unwrap();
}

#[test]
fn an_unprivileged_user_can_run_jobs() {
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
    let mut starter = StarterProcess::run_by(command, &[], &job_with_escapes(FOR_EVER));
    let escaped = starter.escaped_processes();
    assert_eq!(escaped[0].uid().unwrap(), Some(65534));
    kill_process(&open_process(starter.child.id()));
    expect_exited(&escaped);
}

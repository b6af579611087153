//! Exit codes, signals and errors reach the starter as a shell would report them.

use crate::support::{StarterProcess, expect_exited, open_process};
use gpupool_confine::Signal;

#[test]
fn exit_codes_pass_through() {
    for code in [0, 1, 42, 255] {
        let mut starter = StarterProcess::run(&[], &["sh", "-c", &format!("exit {code}")]);
        assert_eq!(starter.expect("ended "), format!("exited {code}"));
        assert_eq!(starter.exit_code(), Some(code));
    }
}

#[test]
fn a_terminating_signal_is_reported() {
    for (name, number) in [("SEGV", 11), ("TERM", 15), ("KILL", 9), ("PIPE", 13)] {
        let mut starter = StarterProcess::run(&[], &["sh", "-c", &format!("kill -{name} $$")]);
        assert_eq!(starter.expect("ended "), format!("signalled {number}"));
        assert_eq!(starter.exit_code(), Some(128 + number));
    }
}

#[test]
fn a_program_that_does_not_exist_is_127_and_one_that_cannot_run_is_126() {
    let mut starter = StarterProcess::run(&[], &["no-such-program-anywhere"]);
    assert_eq!(starter.expect("failed "), "no-such-program-anywhere: command not found");
    assert_eq!(starter.exit_code(), Some(127));

    let directory = tempfile::tempdir().unwrap();
    let plain = directory.path().join("plain");
    std::fs::write(&plain, "not a program").unwrap();
    for path in [plain.to_str().unwrap(), directory.path().to_str().unwrap()] {
        let mut starter = StarterProcess::run(&[], &[path]);
        let reason = starter.expect("failed ");
        assert!(reason.starts_with(path) && reason.contains("cannot be run: Permission denied"), "{reason}");
        assert_eq!(starter.exit_code(), Some(126));
    }
}

#[test]
fn the_prepared_pid_is_the_pid_of_the_program() {
    let mut starter = StarterProcess::run(&[], &["sh", "-c", "echo pid $$"]);
    let prepared = starter.expect("prepared ");
    assert_eq!(starter.expect("pid "), prepared);
}

#[test]
fn a_job_starts_with_no_signal_blocked_or_changed() {
    let mut starter = StarterProcess::run(&[], &["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]);
    // Signals that the test inherited as ignored stay ignored, except SIGPIPE. Signals from 32 on belong to the C
    // library.
    let ordinary = |mask: &str| u64::from_str_radix(mask.trim(), 16).unwrap() & ((1 << 31) - 1);
    let own = std::fs::read_to_string("/proc/self/status").unwrap();
    let inherited = own.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    assert_eq!(starter.expect("SigBlk:"), "0000000000000000");
    assert_eq!(ordinary(&starter.expect("SigIgn:")), ordinary(inherited) & !(1 << (13 - 1)));
}

#[test]
fn stops_and_continuations_are_reported() {
    let mut starter = StarterProcess::run(&[], &["sh", "-c", "echo ready; read line; exit 3"]);
    let job = open_process(starter.expect("started ").parse().unwrap());
    job.signal(Signal::STOP).unwrap();
    assert_eq!(starter.expect("stopped "), "19");
    job.signal(Signal::CONT).unwrap();
    starter.expect("continued");
    starter.send_input();
    assert_eq!(starter.expect("ended "), "exited 3");
    expect_exited([&job]);
}

#[test]
fn the_output_ends_when_the_job_closes_it() {
    // The helpers hold no copy of the job's streams: the reader sees the end although the job lives on.
    let mut starter = StarterProcess::run(&[], &["sh", "-c", "exec >/dev/null; echo open >&2; read line; exit 0"]);
    let (guard, supervisor) = {
        starter.expect("started ");
        starter.helper_processes()
    };
    let output = |pid: u32| std::fs::read_link(format!("/proc/{pid}/fd/1")).unwrap();
    assert_eq!(output(guard.id().pid).to_str(), Some("/dev/null"));
    assert_eq!(output(supervisor.id().pid).to_str(), Some("/dev/null"));
    starter.send_input();
    starter.expect("ended exited 0");
}

//! Exit codes, signals and reasons reach the starter as a shell would tell them.

use crate::support::{Starter, expect_gone, held};
use gpupool_confine::Signal;

#[test]
fn exit_codes_pass_through() {
    for code in [0, 1, 42, 255] {
        let mut starter = Starter::run(&[], &["sh", "-c", &format!("exit {code}")]);
        assert_eq!(starter.expect("ended "), format!("exited {code}"));
        assert_eq!(starter.exit_code(), Some(code));
    }
}

#[test]
fn a_signal_that_ended_the_job_is_told_as_such() {
    for (name, number) in [("SEGV", 11), ("TERM", 15), ("KILL", 9), ("PIPE", 13)] {
        let mut starter = Starter::run(&[], &["sh", "-c", &format!("kill -{name} $$")]);
        assert_eq!(starter.expect("ended "), format!("signalled {number}"));
        assert_eq!(starter.exit_code(), Some(128 + number));
    }
}

#[test]
fn a_program_that_does_not_exist_is_127_and_one_that_cannot_run_is_126() {
    let mut starter = Starter::run(&[], &["no-such-program-anywhere"]);
    assert_eq!(starter.expect("failed "), "no-such-program-anywhere: command not found");
    assert_eq!(starter.exit_code(), Some(127));

    let directory = tempfile::tempdir().unwrap();
    let plain = directory.path().join("plain");
    std::fs::write(&plain, "not a program").unwrap();
    for path in [plain.to_str().unwrap(), directory.path().to_str().unwrap()] {
        let mut starter = Starter::run(&[], &[path]);
        let reason = starter.expect("failed ");
        assert!(reason.starts_with(path) && reason.contains("cannot be run: Permission denied"), "{reason}");
        assert_eq!(starter.exit_code(), Some(126));
    }
}

#[test]
fn the_pid_told_before_the_start_is_that_of_the_running_program() {
    let mut starter = Starter::run(&[], &["sh", "-c", "echo pid $$"]);
    let prepared = starter.expect("prepared ");
    assert_eq!(starter.expect("pid "), prepared);
}

#[test]
fn a_job_starts_with_no_signal_blocked_or_changed() {
    let mut starter = Starter::run(&[], &["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]);
    // What the test itself inherited as ignored stays so, except SIGPIPE. Signals from 32 on are the C library's own.
    let ordinary = |mask: &str| u64::from_str_radix(mask.trim(), 16).unwrap() & ((1 << 31) - 1);
    let own = std::fs::read_to_string("/proc/self/status").unwrap();
    let inherited = own.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    assert_eq!(starter.expect("SigBlk:"), "0000000000000000");
    assert_eq!(ordinary(&starter.expect("SigIgn:")), ordinary(inherited) & !(1 << (13 - 1)));
}

#[test]
fn a_stopped_job_is_told_and_so_is_its_going_on() {
    let mut starter = Starter::run(&[], &["sh", "-c", "echo ready; read line; exit 3"]);
    let job = held(starter.expect("started ").parse().unwrap());
    job.signal(Signal::STOP).unwrap();
    assert_eq!(starter.expect("stopped "), "19");
    job.signal(Signal::CONT).unwrap();
    starter.expect("continued");
    starter.give_input();
    assert_eq!(starter.expect("ended "), "exited 3");
    expect_gone([&job]);
}

#[test]
fn the_output_ends_when_the_job_closes_it() {
    // The keepers hold no copy of the job's streams: the reader sees the end although the job lives on.
    let mut starter = Starter::run(&[], &["sh", "-c", "exec >/dev/null; echo open >&2; read line; exit 0"]);
    let (guard, keeper) = {
        starter.expect("started ");
        starter.keepers()
    };
    let output = |pid: u32| std::fs::read_link(format!("/proc/{pid}/fd/1")).unwrap();
    assert_eq!(output(guard.id().pid).to_str(), Some("/dev/null"));
    assert_eq!(output(keeper.id().pid).to_str(), Some("/dev/null"));
    starter.give_input();
    starter.expect("ended exited 0");
}

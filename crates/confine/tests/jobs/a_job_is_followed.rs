//! Use of the library from a program with many threads: environment, streams, signals, waiting without blocking.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;
use std::time::Instant;

use crate::support::{
    ESCAPING_PID_COUNT, WAIT_TIMEOUT, expect_exited, job_with_escapes, open_process, starter_program,
};
use gpupool_confine::Signal;
use gpupool_confine::process::ProcFs;
use gpupool_confine::spawn::{Job, JobEnd, JobEvent, JobSpec, SpawnError};
use rustix::event::{PollFd, PollFlags, poll};

/// A shell script as a job with pipes. A test program cannot be its own supervisor, so the example is.
fn shell(script: &str) -> JobSpec {
    with_pipes(JobSpec::new("sh").args(["-c", script]))
}

fn with_pipes(spec: JobSpec) -> JobSpec {
    spec.supervisor_program(starter_program()).streams(Stdio::piped(), Stdio::piped(), Stdio::inherit())
}

/// Reads this many lines of the job's output.
fn read_lines(job: &mut Job, count: usize) -> Vec<String> {
    let (_, output, _) = job.take_streams();
    BufReader::new(output.unwrap()).lines().take(count).map(Result::unwrap).collect()
}

#[test]
fn a_job_gets_its_environment_directory_and_streams() {
    let directory = tempfile::tempdir().unwrap();
    let spec = shell("pwd; echo $GPUS ${PATH_OF_NOBODY-unset}; cat")
        .directory(directory.path())
        .env("GPUS", "0,1")
        .env("PATH_OF_NOBODY", "x")
        .env_remove("PATH_OF_NOBODY");
    let mut job = Job::spawn(spec).unwrap();
    let (input, output, error) = job.take_streams();
    assert!(error.is_none(), "not piped");
    input.unwrap().write_all(b"through the pipe\n").unwrap();
    let mut text = String::new();
    output.unwrap().read_to_string(&mut text).unwrap();
    let directory = directory.path().canonicalize().unwrap();
    assert_eq!(text, format!("{}\n0,1 unset\nthrough the pipe\n", directory.display()));
    assert_eq!(job.wait().unwrap(), JobEnd::Exited(0));
    assert_eq!(job.wait().unwrap(), JobEnd::Exited(0), "the same answer again");
}

#[test]
fn the_end_can_be_awaited_by_a_file_descriptor() {
    let mut job = Job::spawn(shell("read line; exit 2")).unwrap();
    assert_eq!(job.try_next_event().unwrap(), None);
    drop(job.take_streams());
    poll(&mut [PollFd::new(&job, PollFlags::IN)], None).unwrap();
    assert_eq!(job.try_next_event().unwrap(), Some(JobEvent::Ended(JobEnd::Exited(2))));
}

#[test]
fn a_signal_reaches_the_whole_process_group() {
    let mut job = Job::spawn(shell("trap 'exit 9' TERM; sleep 600 & echo $!; wait")).unwrap();
    let child = open_process(read_lines(&mut job, 1)[0].parse().unwrap());
    job.signal(Signal::TERM).unwrap();
    assert_eq!(job.wait().unwrap(), JobEnd::Exited(9));
    expect_exited([&child]);
}

#[test]
fn a_stopped_job_ends_on_a_termination_signal() {
    let mut job = Job::spawn(shell("exec sleep 600")).unwrap();
    job.signal(Signal::STOP).unwrap();
    assert_eq!(job.next_event().unwrap(), JobEvent::Stopped(Signal::STOP.as_raw()));
    job.signal(Signal::TERM).unwrap();
    assert_eq!(job.wait().unwrap(), JobEnd::Signalled(15));
    // Late commands are no error: the job has ended, as they requested.
    job.signal(Signal::TERM).unwrap();
    job.kill().unwrap();
}

#[test]
fn a_kill_ends_every_process_of_the_job() {
    let [program, arguments @ ..] = job_with_escapes("time.sleep(600)");
    let mut job = Job::spawn(with_pipes(JobSpec::new(program).args(arguments))).unwrap();
    let output = read_lines(&mut job, ESCAPING_PID_COUNT);
    let pids = output.iter().map(|line| line.strip_prefix("pid ").unwrap().parse().unwrap());
    let escaped: Vec<_> = pids.map(open_process).collect();
    job.kill().unwrap();
    assert_eq!(job.wait().unwrap(), JobEnd::Signalled(9));
    for escaper in &escaped {
        assert!(escaper.has_exited().unwrap(), "{} was there when the end was reported", escaper.id());
    }
}

#[test]
fn a_prepared_job_that_is_never_started_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    let prepared = Job::prepare(shell(&format!("touch {}", trace.display()))).unwrap();
    let process = open_process(prepared.id().pid);
    assert_eq!(process.id(), prepared.id());
    drop(prepared);
    expect_exited([&process]);
    assert!(!trace.exists());
}

#[test]
fn a_job_killed_before_its_start_reports_the_signal() {
    let prepared = Job::prepare(shell("exit 0")).unwrap();
    let job = open_process(prepared.id().pid);
    let supervisor = open_process(job.parent().unwrap().unwrap());
    let guard = open_process(supervisor.parent().unwrap().unwrap());
    crate::support::kill_process(&job);
    // No process reads the start command, but the earlier events can still be read.
    expect_exited([&supervisor, &guard]);
    assert_eq!(prepared.start().unwrap().wait().unwrap(), JobEnd::Signalled(9));
}

#[test]
fn unread_commands_do_not_hide_the_exit_status() {
    let mut running = Job::spawn(shell("exec sleep 600")).unwrap();
    let job = open_process(running.id().pid);
    let supervisor = open_process(job.parent().unwrap().unwrap());
    let guard = open_process(supervisor.parent().unwrap().unwrap());
    // While the supervisor is stopped, the job ends and a command arrives: the end is handled first.
    supervisor.signal(Signal::STOP).unwrap();
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while ProcFs::system().stat(supervisor.id().pid).unwrap().unwrap().state != 'T' {
        assert!(Instant::now() < deadline, "the supervisor {} does not stop", supervisor.id());
        std::thread::yield_now();
    }
    running.signal(Signal::URG).unwrap();
    job.signal(Signal::TERM).unwrap();
    expect_exited([&job]);
    supervisor.signal(Signal::CONT).unwrap();
    expect_exited([&supervisor, &guard]);
    assert_eq!(running.wait().unwrap(), JobEnd::Signalled(15));
}

#[test]
fn a_bad_directory_or_supervisor_program_is_reported() {
    let missing = Job::spawn(shell("exit 0").directory("/no/such/directory")).unwrap_err();
    assert_eq!(
        missing.to_string(),
        "cannot enter working directory /no/such/directory: No such file or directory (os error 2)"
    );
    let file = Job::spawn(shell("exit 0").directory("/proc/version")).unwrap_err();
    assert!(matches!(file, SpawnError::Directory { .. }), "{file}");
    let stranger = Job::spawn(shell("exit 0").supervisor_program("/bin/true")).unwrap_err();
    assert_eq!(stranger.to_string(), "the job supervisor exited before the job's process existed");
}

//! The library as a program with many threads uses it: environment, streams, signals, waiting without blocking.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;
use std::time::Instant;

use crate::support::{ESCAPING_PIDS, PATIENCE, escaping_job, expect_gone, held, starter_program};
use gpupool_confine::Signal;
use gpupool_confine::process::ProcFs;
use gpupool_confine::spawn::{Job, JobEnd, JobEvent, JobSpec, SpawnError};
use rustix::event::{PollFd, PollFlags, poll};

/// A shell script as a job with pipes for streams. A test program cannot be its own keeper; the example can.
fn shell(script: &str) -> JobSpec {
    with_pipes(JobSpec::new("sh").args(["-c", script]))
}

fn with_pipes(spec: JobSpec) -> JobSpec {
    spec.keeper_program(starter_program()).streams(Stdio::piped(), Stdio::piped(), Stdio::inherit())
}

/// Waits until the job has said so many lines.
fn lines(job: &mut Job, count: usize) -> Vec<String> {
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
    let child = held(lines(&mut job, 1)[0].parse().unwrap());
    job.signal(Signal::TERM).unwrap();
    assert_eq!(job.wait().unwrap(), JobEnd::Exited(9));
    expect_gone([&child]);
}

#[test]
fn a_stopped_job_that_is_told_to_end_does() {
    let mut job = Job::spawn(shell("exec sleep 600")).unwrap();
    job.signal(Signal::STOP).unwrap();
    assert_eq!(job.next_event().unwrap(), JobEvent::Stopped(Signal::STOP.as_raw()));
    job.signal(Signal::TERM).unwrap();
    assert_eq!(job.wait().unwrap(), JobEnd::Signalled(15));
    // Late words are no error: the job has ended, which is what they asked for.
    job.signal(Signal::TERM).unwrap();
    job.kill().unwrap();
}

#[test]
fn a_kill_takes_all_the_job_started() {
    let [program, arguments @ ..] = escaping_job("time.sleep(600)");
    let mut job = Job::spawn(with_pipes(JobSpec::new(program).args(arguments))).unwrap();
    let told = lines(&mut job, ESCAPING_PIDS);
    let pids = told.iter().map(|line| line.strip_prefix("pid ").unwrap().parse().unwrap());
    let escapers: Vec<_> = pids.map(held).collect();
    job.kill().unwrap();
    assert_eq!(job.wait().unwrap(), JobEnd::Signalled(9));
    for escaper in &escapers {
        assert!(escaper.has_exited().unwrap(), "{} was there when the end was told", escaper.id());
    }
}

#[test]
fn a_job_prepared_and_never_started_does_nothing_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    let prepared = Job::prepare(shell(&format!("touch {}", trace.display()))).unwrap();
    let process = held(prepared.id().pid);
    assert_eq!(process.id(), prepared.id());
    drop(prepared);
    expect_gone([&process]);
    assert!(!trace.exists());
}

#[test]
fn a_job_killed_before_its_start_says_so_as_any_other() {
    let prepared = Job::prepare(shell("exit 0")).unwrap();
    let job = held(prepared.id().pid);
    let keeper = held(job.parent().unwrap().unwrap());
    let guard = held(keeper.parent().unwrap().unwrap());
    crate::support::kill(&job);
    // With nobody left to hear the word to start, what was said before is still to be read.
    expect_gone([&keeper, &guard]);
    assert_eq!(prepared.start().unwrap().wait().unwrap(), JobEnd::Signalled(9));
}

#[test]
fn words_the_keeper_never_read_do_not_hide_how_the_job_ended() {
    let mut running = Job::spawn(shell("exec sleep 600")).unwrap();
    let job = held(running.id().pid);
    let keeper = held(job.parent().unwrap().unwrap());
    let guard = held(keeper.parent().unwrap().unwrap());
    // While the keeper cannot act, the job ends and a word for it arrives: the end is looked at first.
    keeper.signal(Signal::STOP).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while ProcFs::system().stat(keeper.id().pid).unwrap().unwrap().state != 'T' {
        assert!(Instant::now() < deadline, "the keeper {} does not stop", keeper.id());
        std::thread::yield_now();
    }
    running.signal(Signal::URG).unwrap();
    job.signal(Signal::TERM).unwrap();
    expect_gone([&job]);
    keeper.signal(Signal::CONT).unwrap();
    expect_gone([&keeper, &guard]);
    assert_eq!(running.wait().unwrap(), JobEnd::Signalled(15));
}

#[test]
fn what_is_wrong_with_the_directory_or_the_keeper_is_told() {
    let missing = Job::spawn(shell("exit 0").directory("/no/such/directory")).unwrap_err();
    assert_eq!(missing.to_string(), "working directory /no/such/directory: No such file or directory (os error 2)");
    let file = Job::spawn(shell("exit 0").directory("/proc/version")).unwrap_err();
    assert!(matches!(file, SpawnError::Directory { .. }), "{file}");
    let stranger = Job::spawn(shell("exit 0").keeper_program("/bin/true")).unwrap_err();
    assert_eq!(stranger.to_string(), "the keeper of the job ended before the job's process existed");
}

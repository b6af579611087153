//! The end of a pool, in all ways.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use gpupool_dispatch::resource_pool::{AcquireError, HeldWorkerError, WorkerHoldEndReason, read_audit_file};
use serde_json::json;

use crate::kit::{Story, ends, expect_gone, handle, in_time, text, until};
use crate::support::{example, odd_worker};

#[tokio::test]
async fn shutting_down_tells_who_waits_lets_work_end_and_cleans_up() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let story = Story::of(1).with(|config| {
        config.settings = json!({"clean_up": "fail"});
        config.audit = Some(file.path().to_owned());
    });
    let pool = story.start();
    let worker = in_time("a worker", pool.acquire("works")).await.unwrap();
    let working = worker.run("sleep 100".into());
    let waiting = pool.acquire("waits");
    until(&pool, "it waits", |status| status.waiting_tasks == 1).await;
    let mut status = pool.watch_status();
    let shutdown = pool.shutdown();
    assert_eq!(in_time("who waits", waiting).await.unwrap_err(), AcquireError::Closed);
    in_time("what it was at", working).await.unwrap();
    in_time("its end", shutdown).await;
    story.expect_nothing_left();
    assert_eq!(in_time("later", worker.run("echo no".into())).await, Err(HeldWorkerError::Closed));
    assert_eq!(in_time("later", pool.acquire("late")).await.unwrap_err(), AcquireError::Closed);
    // It could not clean up, but it tried.
    assert_eq!(status.borrow_and_update().clean_up_failure.as_deref(), Some("could not save"));
    assert_eq!((pool.status().total_workers, pool.status().active_tasks), (0, 0));
    assert_eq!(ends(&pool), [Some(WorkerHoldEndReason::Closed)]);
    assert_eq!(read_audit_file(file.path()).unwrap(), pool.audit_entries());
}

#[tokio::test]
async fn a_worker_that_does_not_end_is_killed_at_the_end() {
    for task in ["sleep 1000000", "echo idle"] {
        let story = Story::of(2).with(|config| {
            config.settings = json!({"clean_up": "hang"});
            config.clean_up_timeout = Duration::from_millis(100);
        });
        let pool = story.start();
        let worker = in_time("a worker", pool.acquire("holds")).await.unwrap();
        let working = worker.run(task.into());
        in_time("its end", pool.shutdown()).await;
        story.expect_nothing_left();
        assert_eq!(in_time("it is told", working).await.is_ok(), task == "echo idle");
    }
}

#[tokio::test]
async fn a_pool_that_is_dropped_leaves_no_process() {
    let story = Story::of(3).with(|config| config.settings = json!({"clean_up": "hang"}));
    let pool = story.start();
    let worker = in_time("a worker", pool.acquire("holds")).await.unwrap();
    in_time("children", worker.run("spawn".into())).await.unwrap();
    assert!(!story.processes().is_empty());
    drop(pool);
    story.expect_nothing_left();
    assert_eq!(in_time("it is told", worker.run("echo no".into())).await, Err(HeldWorkerError::Closed));
}

#[tokio::test]
async fn a_pool_that_is_dropped_at_once_leaves_no_process() {
    for _ in 0..3 {
        let story = Story::of(2);
        drop(story.start());
        story.expect_nothing_left();
    }
}

#[tokio::test]
async fn a_release_that_comes_after_the_end_comes_back() {
    let pool = Story::of(1).start();
    let worker = in_time("a worker", pool.acquire("holds")).await.unwrap();
    assert_eq!(text(in_time("an answer", worker.run("echo a".into())).await), "a");
    in_time("its end", pool.shutdown()).await;
    in_time("a late release", worker.release()).await;
}

#[test]
fn kill_9_of_the_program_leaves_no_process_and_a_readable_trail() {
    let directory = tempfile::tempdir().unwrap();
    let trail = directory.path().join("audit.jsonl");
    let mut program = Command::new(example("pool_holder"))
        .args([odd_worker(), trail.clone()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut pids = BufReader::new(program.stdout.take().unwrap()).lines().map_while(Result::ok);
    let processes: Vec<_> = (0..2).map(|_| handle(pids.next().unwrap().parse().unwrap())).collect();
    // Written by a thread of its own, a moment after the hold began.
    while read_audit_file(&trail).unwrap().len() < 2 {
        std::thread::yield_now();
    }
    program.kill().unwrap();
    program.wait().unwrap();
    processes.iter().for_each(expect_gone);
    let trail = read_audit_file(&trail).unwrap();
    let told: Vec<_> = trail.iter().map(|entry| (&*entry.task_id, entry.pid, entry.ended.is_some())).collect();
    assert_eq!(told, [("first", processes[0].id().pid, false), ("second", processes[1].id().pid, false)]);
    // The output ends when the last process that could write to it has gone: children of the workers as well.
    assert_eq!(pids.next(), None);
}

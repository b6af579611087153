//! The end of a pool, in all ways.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use gpupool_dispatch::resource_pool::{AcquireError, HeldWorkerError, WorkerHoldEndReason, read_audit_file};
use serde_json::json;

use crate::support::{example, odd_worker};
use crate::test_pool::{TestPool, hold_ends, process_handle, text, wait_for_exit, wait_for_status, within_patience};

#[tokio::test]
async fn a_shutdown_refuses_waiters_finishes_runs_and_cleans_up() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let test_pool = TestPool::with_workers(1).configure(|config| {
        config.settings = json!({"clean_up": "fail"});
        config.audit = Some(file.path().to_owned());
    });
    let pool = test_pool.start();
    let worker = within_patience("a worker", pool.acquire("works")).await.unwrap();
    let working = worker.run("sleep 100".into());
    let waiting = pool.acquire("waits");
    wait_for_status(&pool, "a waiter", |status| status.waiting_tasks == 1).await;
    let mut status = pool.watch_status();
    let shutdown = pool.shutdown();
    assert_eq!(within_patience("the waiter", waiting).await.unwrap_err(), AcquireError::Closed);
    within_patience("the running task", working).await.unwrap();
    within_patience("the end of the worker", shutdown).await;
    test_pool.assert_nothing_left();
    assert_eq!(within_patience("a late call", worker.run("echo no".into())).await, Err(HeldWorkerError::Closed));
    assert_eq!(within_patience("a late call", pool.acquire("late")).await.unwrap_err(), AcquireError::Closed);
    // The worker tried to clean up and failed.
    assert_eq!(status.borrow_and_update().clean_up_failure.as_deref(), Some("could not save"));
    assert_eq!((pool.status().total_workers, pool.status().active_tasks), (0, 0));
    assert_eq!(hold_ends(&pool), [Some(WorkerHoldEndReason::Closed)]);
    assert_eq!(read_audit_file(file.path()).unwrap(), pool.audit_entries());
}

#[tokio::test]
async fn a_worker_that_does_not_stop_is_killed_at_the_end() {
    for task in ["sleep 1000000", "echo idle"] {
        let test_pool = TestPool::with_workers(2).configure(|config| {
            config.settings = json!({"clean_up": "hang"});
            config.clean_up_timeout = Duration::from_millis(100);
        });
        let pool = test_pool.start();
        let worker = within_patience("a worker", pool.acquire("holds")).await.unwrap();
        let working = worker.run(task.into());
        within_patience("the end of the worker", pool.shutdown()).await;
        test_pool.assert_nothing_left();
        assert_eq!(within_patience("the result of the run", working).await.is_ok(), task == "echo idle");
    }
}

#[tokio::test]
async fn a_pool_that_is_dropped_leaves_no_process() {
    let test_pool = TestPool::with_workers(3).configure(|config| config.settings = json!({"clean_up": "hang"}));
    let pool = test_pool.start();
    let worker = within_patience("a worker", pool.acquire("holds")).await.unwrap();
    within_patience("children", worker.run("spawn".into())).await.unwrap();
    assert!(!test_pool.processes().is_empty());
    drop(pool);
    test_pool.assert_nothing_left();
    assert_eq!(
        within_patience("the result of the run", worker.run("echo no".into())).await,
        Err(HeldWorkerError::Closed)
    );
}

#[tokio::test]
async fn a_pool_that_is_dropped_at_once_leaves_no_process() {
    for _ in 0..3 {
        let test_pool = TestPool::with_workers(2);
        drop(test_pool.start());
        test_pool.assert_nothing_left();
    }
}

#[tokio::test]
async fn a_release_after_the_end_returns() {
    let pool = TestPool::with_workers(1).start();
    let worker = within_patience("a worker", pool.acquire("holds")).await.unwrap();
    assert_eq!(text(within_patience("a result", worker.run("echo a".into())).await), "a");
    within_patience("the end of the worker", pool.shutdown()).await;
    within_patience("a late release", worker.release()).await;
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
    let processes: Vec<_> = (0..2).map(|_| process_handle(pids.next().unwrap().parse().unwrap())).collect();
    // Written by a separate thread, shortly after the hold began.
    while read_audit_file(&trail).unwrap().len() < 2 {
        std::thread::yield_now();
    }
    program.kill().unwrap();
    program.wait().unwrap();
    processes.iter().for_each(wait_for_exit);
    let trail = read_audit_file(&trail).unwrap();
    let holds: Vec<_> = trail.iter().map(|entry| (&*entry.task_id, entry.pid, entry.ended.is_some())).collect();
    assert_eq!(holds, [("first", processes[0].id().pid, false), ("second", processes[1].id().pid, false)]);
    // The output closes when the last process with access is gone, including children of the workers.
    assert_eq!(pids.next(), None);
}

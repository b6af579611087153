//! Runs on a held worker, and the worker's state afterwards.

use std::time::Duration;

use bytes::Bytes;
use gpupool_confine::Signal;
use gpupool_dispatch::resource_pool::{
    AcquireError, HeldWorker, HeldWorkerError, ResourcePoolConfig, WorkerHoldEndReason,
};
use gpupool_dispatch::{SubmitError, WorkerExitCause, WorkerProgram};
use serde_json::json;

use crate::test_pool::{TestPool, hold_ends, process_handle, text, wait_for_exit, within_patience};

async fn run(worker: &HeldWorker, task: impl Into<Bytes>) -> Result<Bytes, HeldWorkerError> {
    within_patience("a result", worker.run(task.into())).await
}

#[tokio::test]
async fn a_released_worker_is_reused() {
    let pool = TestPool::with_workers(1).start();
    let mut pids = Vec::new();
    for n in 0..3 {
        let worker = within_patience("a worker", pool.acquire(format!("task {n}"))).await.unwrap();
        assert_eq!(text(run(&worker, "pid").await), worker.pid().to_string());
        assert_eq!(run(&worker, "fail too hot").await, Err(HeldWorkerError::Failed("too hot".into())));
        assert_eq!(text(run(&worker, "echo alive").await), "alive");
        pids.push(worker.pid());
        worker.release().await;
    }
    assert!(pids.iter().all(|pid| *pid == pids[0]), "{pids:?}");
    let audit = pool.audit_entries();
    assert_eq!(audit.iter().map(|entry| &*entry.task_id).collect::<Vec<_>>(), ["task 0", "task 1", "task 2"]);
    assert!(audit.iter().all(|entry| (entry.worker_id, &*entry.device, entry.pid) == (0, "cpu", pids[0])));
    assert_eq!(hold_ends(&pool), [Some(WorkerHoldEndReason::Released); 3]);
}

#[tokio::test]
async fn runs_keep_their_order_and_may_be_large() {
    let pool = TestPool::with_workers(1).start();
    let worker = within_patience("a worker", pool.acquire("many")).await.unwrap();
    // An abandoned run is skipped, or finishes before the next ones.
    drop(worker.run("sleep 50".into()));
    let large = Bytes::from([b"echo ".as_slice(), &vec![7; 5 << 20]].concat());
    let (one, two, three) = within_patience("all runs", async {
        tokio::join!(worker.run("task".into()), worker.run(large), worker.run("echo last".into()))
    })
    .await;
    assert!(text(one).parse::<u32>().unwrap() <= 1);
    assert_eq!(two.unwrap().len(), 5 << 20);
    assert_eq!(text(three), "last");
    worker.release().await;
    assert_eq!(hold_ends(&pool), [Some(WorkerHoldEndReason::Released)]);
}

#[tokio::test]
async fn a_busy_worker_that_is_dropped_is_killed_and_replaced() {
    let pool = TestPool::with_workers(1).start();
    let worker = within_patience("a worker", pool.acquire("leaves")).await.unwrap();
    let process = process_handle(worker.pid());
    let running = worker.run("sleep 1000000".into());
    drop(worker);
    assert_eq!(within_patience("the abandoned run", running).await, Err(HeldWorkerError::GivenBack));
    let next = within_patience("the next worker", pool.acquire("next")).await.unwrap();
    assert!(process.has_exited().unwrap());
    assert_ne!(next.pid(), process.id().pid);
    assert_eq!(hold_ends(&pool), [Some(WorkerHoldEndReason::Abandoned), None]);
}

#[tokio::test]
async fn a_holder_can_kill_its_worker() {
    let pool = TestPool::with_workers(1).start();
    let worker = within_patience("a worker", pool.acquire("kills")).await.unwrap();
    let process = process_handle(worker.pid());
    let running = worker.run("stuck".into());
    worker.kill();
    assert_eq!(within_patience("the running task", running).await, Err(HeldWorkerError::Killed));
    worker.kill();
    assert_eq!(run(&worker, "echo no").await, Err(HeldWorkerError::Killed));
    wait_for_exit(&process);
    let next = within_patience("the next worker", pool.acquire("next")).await.unwrap();
    assert_eq!(text(run(&next, "echo fresh").await), "fresh");
    assert_eq!((worker.memory_usage(), next.memory_usage().is_some()), (None, true));
    assert_eq!(hold_ends(&pool), [Some(WorkerHoldEndReason::Killed), None]);
}

#[tokio::test]
async fn a_worker_that_exits_is_reported_and_replaced() {
    let pool = TestPool::with_workers(1).start();
    for (task, expected) in [("exit 3", WorkerExitCause::Exited(3)), ("kill", WorkerExitCause::Signalled(9))] {
        let worker = within_patience("a worker", pool.acquire(task)).await.unwrap();
        assert_eq!(run(&worker, task).await, Err(HeldWorkerError::Lost(expected)));
    }
    for task in ["garbage", "lie", "partial", "close"] {
        let worker = within_patience("a worker", pool.acquire(task)).await.unwrap();
        let lost = run(&worker, task).await.unwrap_err();
        assert!(matches!(lost, HeldWorkerError::Lost(_)), "{task}: {lost}");
    }
    let worker = within_patience("a worker", pool.acquire("last")).await.unwrap();
    assert_eq!(text(run(&worker, "echo alive").await), "alive");
    assert_eq!(hold_ends(&pool), [vec![Some(WorkerHoldEndReason::Lost); 6], vec![None]].concat());
    let why = pool.audit_entries()[0].ended.clone().unwrap().why.unwrap();
    assert_eq!(&*why, "it exited with code 3");
}

#[tokio::test]
async fn a_free_worker_that_is_killed_is_replaced() {
    let test_pool = TestPool::with_workers(1);
    let pool = test_pool.start();
    let worker = within_patience("a worker", pool.acquire("first")).await.unwrap();
    let process = process_handle(worker.pid());
    worker.release().await;
    let mut status = pool.watch_status();
    assert!(process.signal(Signal::KILL).unwrap());
    within_patience("the exit of the worker", status.wait_for(|status| status.available_workers == 0)).await.unwrap();
    let next = within_patience("the next worker", pool.acquire("next")).await.unwrap();
    assert_ne!(next.pid(), process.id().pid);
    assert_eq!(test_pool.workers(), [next.pid()]);
}

#[tokio::test]
async fn a_pool_that_cannot_start_workers_gives_the_reason() {
    let failing =
        |setup: &'static str| move |config: &mut ResourcePoolConfig| config.settings = json!({"setup": setup});
    let slow = |config: &mut ResourcePoolConfig| {
        config.settings = json!({"setup": "hang"});
        config.setup_timeout = Duration::from_millis(50);
    };
    let missing = |config: &mut ResourcePoolConfig| config.program = WorkerProgram::native("there-is-no-such-worker");
    let cases = [
        (TestPool::with_workers(2).configure(failing("fail")), "the model is not there"),
        (TestPool::with_workers(2).configure(failing("exit")), "it exited with code 7"),
        (TestPool::with_workers(1).configure(slow), "setup took longer than 50ms"),
        (TestPool::with_workers(1).configure(missing), "there-is-no-such-worker"),
    ];
    for (test_pool, expected) in cases {
        let pool = test_pool.start();
        let error = within_patience("an error", pool.acquire("task")).await.unwrap_err();
        assert!(matches!(&error, AcquireError::NoWorker(why) if why.contains(expected)), "{error}");
        let ready = within_patience("an error", pool.wait_until_ready()).await.unwrap_err();
        assert!(ready.to_string().starts_with("no worker can be started: "), "{ready}");
        assert_eq!(pool.status().total_workers, test_pool.config.min_workers as usize);
        within_patience("the end of the worker", pool.shutdown()).await;
        test_pool.assert_nothing_left();
    }
}

#[tokio::test]
async fn a_slot_that_never_starts_leaves_its_work_to_the_others() {
    let test_pool = TestPool::with_workers(2).configure(|config| config.settings = json!({"setup": "fail first"}));
    let pool = test_pool.start();
    for n in 0..3 {
        let worker = within_patience("a worker", pool.acquire(format!("task {n}"))).await.unwrap();
        assert_eq!(text(run(&worker, "worker").await), "1");
        worker.release().await;
    }
}

#[tokio::test]
async fn a_worker_may_speak_lines() {
    let script = "while read -r line; do echo \"got $line\"; done";
    let test_pool =
        TestPool::with_workers(1).configure(|config| config.program = WorkerProgram::lines("sh").args(["-c", script]));
    let pool = test_pool.start();
    let worker = within_patience("a worker", pool.acquire("lines")).await.unwrap();
    assert_eq!(text(run(&worker, "one").await), "got one");
    assert_eq!(text(run(&worker, "two").await), "got two");
    assert_eq!(run(&worker, "not\none").await, Err(HeldWorkerError::Refused(SubmitError::NotALine)));
    worker.release().await;
    assert_eq!(hold_ends(&pool), [Some(WorkerHoldEndReason::Released)]);
}

//! What a worker does for whoever has it, and what becomes of it after.

use std::time::Duration;

use bytes::Bytes;
use gpupool_confine::Signal;
use gpupool_dispatch::resource_pool::{
    AcquireError, HeldWorker, HeldWorkerError, ResourcePoolConfig, WorkerHoldEndReason,
};
use gpupool_dispatch::{SubmitError, WorkerExitCause, WorkerProgram};
use serde_json::json;

use crate::kit::{Story, ends, expect_gone, handle, in_time, text};

async fn run(worker: &HeldWorker, task: impl Into<Bytes>) -> Result<Bytes, HeldWorkerError> {
    in_time("an answer", worker.run(task.into())).await
}

#[tokio::test]
async fn a_worker_given_back_in_order_is_used_again() {
    let pool = Story::of(1).start();
    let mut pids = Vec::new();
    for n in 0..3 {
        let worker = in_time("a worker", pool.acquire(format!("task {n}"))).await.unwrap();
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
    assert_eq!(ends(&pool), [Some(WorkerHoldEndReason::Released); 3]);
}

#[tokio::test]
async fn work_is_done_in_the_order_it_was_given_and_may_be_large() {
    let pool = Story::of(1).start();
    let worker = in_time("a worker", pool.acquire("many")).await.unwrap();
    // Given up: not begun any more, or gone on with before those that come after it.
    drop(worker.run("sleep 50".into()));
    let large = Bytes::from([b"echo ".as_slice(), &vec![7; 5 << 20]].concat());
    let (one, two, three) = in_time("all", async {
        tokio::join!(worker.run("task".into()), worker.run(large), worker.run("echo last".into()))
    })
    .await;
    assert!(text(one).parse::<u32>().unwrap() <= 1);
    assert_eq!(two.unwrap().len(), 5 << 20);
    assert_eq!(text(three), "last");
    worker.release().await;
    assert_eq!(ends(&pool), [Some(WorkerHoldEndReason::Released)]);
}

#[tokio::test]
async fn a_worker_left_while_at_work_is_killed_and_replaced() {
    let pool = Story::of(1).start();
    let worker = in_time("a worker", pool.acquire("leaves")).await.unwrap();
    let process = handle(worker.pid());
    let running = worker.run("sleep 1000000".into());
    drop(worker);
    assert_eq!(in_time("what was left", running).await, Err(HeldWorkerError::GivenBack));
    let next = in_time("the next", pool.acquire("next")).await.unwrap();
    assert!(process.has_exited().unwrap());
    assert_ne!(next.pid(), process.id().pid);
    assert_eq!(ends(&pool), [Some(WorkerHoldEndReason::Abandoned), None]);
}

#[tokio::test]
async fn whoever_has_a_worker_can_kill_it() {
    let pool = Story::of(1).start();
    let worker = in_time("a worker", pool.acquire("kills")).await.unwrap();
    let process = handle(worker.pid());
    let running = worker.run("stuck".into());
    worker.kill();
    assert_eq!(in_time("what it was at", running).await, Err(HeldWorkerError::Killed));
    worker.kill();
    assert_eq!(run(&worker, "echo no").await, Err(HeldWorkerError::Killed));
    expect_gone(&process);
    let next = in_time("the next", pool.acquire("next")).await.unwrap();
    assert_eq!(text(run(&next, "echo fresh").await), "fresh");
    assert_eq!((worker.memory_usage(), next.memory_usage().is_some()), (None, true));
    assert_eq!(ends(&pool), [Some(WorkerHoldEndReason::Killed), None]);
}

#[tokio::test]
async fn a_worker_that_dies_is_told_of_and_replaced() {
    let pool = Story::of(1).start();
    for (task, expected) in [("exit 3", WorkerExitCause::Exited(3)), ("kill", WorkerExitCause::Signalled(9))] {
        let worker = in_time("a worker", pool.acquire(task)).await.unwrap();
        assert_eq!(run(&worker, task).await, Err(HeldWorkerError::Lost(expected)));
    }
    for task in ["garbage", "lie", "partial", "close"] {
        let worker = in_time("a worker", pool.acquire(task)).await.unwrap();
        let lost = run(&worker, task).await.unwrap_err();
        assert!(matches!(lost, HeldWorkerError::Lost(_)), "{task}: {lost}");
    }
    let worker = in_time("a worker", pool.acquire("last")).await.unwrap();
    assert_eq!(text(run(&worker, "echo alive").await), "alive");
    assert_eq!(ends(&pool), [vec![Some(WorkerHoldEndReason::Lost); 6], vec![None]].concat());
    let why = pool.audit_entries()[0].ended.clone().unwrap().why.unwrap();
    assert_eq!(&*why, "it exited with code 3");
}

#[tokio::test]
async fn a_worker_that_is_killed_while_nobody_has_it_is_replaced() {
    let story = Story::of(1);
    let pool = story.start();
    let worker = in_time("a worker", pool.acquire("first")).await.unwrap();
    let process = handle(worker.pid());
    worker.release().await;
    let mut status = pool.watch_status();
    assert!(process.signal(Signal::KILL).unwrap());
    in_time("its death is seen", status.wait_for(|status| status.available_workers == 0)).await.unwrap();
    let next = in_time("the next", pool.acquire("next")).await.unwrap();
    assert_ne!(next.pid(), process.id().pid);
    assert_eq!(story.workers(), [next.pid()]);
}

#[tokio::test]
async fn where_no_worker_can_be_started_it_is_said_why() {
    let failing =
        |setup: &'static str| move |config: &mut ResourcePoolConfig| config.settings = json!({"setup": setup});
    let slow = |config: &mut ResourcePoolConfig| {
        config.settings = json!({"setup": "hang"});
        config.setup_timeout = Duration::from_millis(50);
    };
    let missing = |config: &mut ResourcePoolConfig| config.program = WorkerProgram::native("there-is-no-such-worker");
    let stories = [
        (Story::of(2).with(failing("fail")), "the model is not there"),
        (Story::of(2).with(failing("exit")), "it exited with code 7"),
        (Story::of(1).with(slow), "setup took longer than 50ms"),
        (Story::of(1).with(missing), "there-is-no-such-worker"),
    ];
    for (story, says) in stories {
        let pool = story.start();
        let error = in_time("an error", pool.acquire("task")).await.unwrap_err();
        assert!(matches!(&error, AcquireError::NoWorker(why) if why.contains(says)), "{error}");
        let ready = in_time("an error", pool.wait_until_ready()).await.unwrap_err();
        assert!(ready.to_string().starts_with("no worker can be started: "), "{ready}");
        assert_eq!(pool.status().total_workers, story.config.min_workers as usize);
        in_time("its end", pool.shutdown()).await;
        story.expect_nothing_left();
    }
}

#[tokio::test]
async fn one_that_never_starts_leaves_the_work_to_the_others() {
    let story = Story::of(2).with(|config| config.settings = json!({"setup": "fail first"}));
    let pool = story.start();
    for n in 0..3 {
        let worker = in_time("a worker", pool.acquire(format!("task {n}"))).await.unwrap();
        assert_eq!(text(run(&worker, "worker").await), "1");
        worker.release().await;
    }
}

#[tokio::test]
async fn a_worker_may_speak_in_lines() {
    let script = "while read -r line; do echo \"got $line\"; done";
    let story = Story::of(1).with(|config| config.program = WorkerProgram::lines("sh").args(["-c", script]));
    let pool = story.start();
    let worker = in_time("a worker", pool.acquire("lines")).await.unwrap();
    assert_eq!(text(run(&worker, "one").await), "got one");
    assert_eq!(text(run(&worker, "two").await), "got two");
    assert_eq!(run(&worker, "not\none").await, Err(HeldWorkerError::Refused(SubmitError::NotALine)));
    worker.release().await;
    assert_eq!(ends(&pool), [Some(WorkerHoldEndReason::Released)]);
}

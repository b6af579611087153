//! Workers that exceed their limits, with control groups if available, and with polling.

use std::time::Duration;

use gpupool_confine::bounds::BoundExceeded;
use gpupool_confine::cgroup::CgroupManager;
use gpupool_dispatch::resource_pool::{HeldWorkerError, ResourcePool, WorkerHoldEndReason};

use crate::skipped::skipped;
use crate::test_pool::{TestPool, hold_ends, process_handle, text, wait_for_exit, within_patience};

/// Starts a pool for each way in which limits can be enforced here.
fn start_on_each_path(test_pool: impl Fn() -> TestPool) -> Vec<(TestPool, ResourcePool)> {
    let mut paths = vec![CgroupManager::unavailable("this test wants no groups")];
    let groups = CgroupManager::detect();
    if groups.limits_memory() {
        paths.push(groups);
    } else {
        skipped("limits by control groups", &groups.describe());
    }
    let start = |cgroups| {
        let test_pool = test_pool();
        let pool = ResourcePool::start_with_cgroups(test_pool.config.clone(), cgroups).unwrap();
        (test_pool, pool)
    };
    paths.into_iter().map(start).collect()
}

#[tokio::test]
async fn a_worker_held_too_long_is_killed_with_its_descendants_and_replaced() {
    // Long enough for its children to start on a slow machine.
    let millis = Duration::from_millis(2_500);
    for (test_pool, pool) in
        start_on_each_path(|| TestPool::with_workers(1).configure(|config| config.worker_timeout = millis))
    {
        let worker = within_patience("a worker", pool.acquire("slow")).await.unwrap();
        within_patience("hidden children", worker.run("spawn".into())).await.unwrap();
        // A process during its exec is not recognized.
        let old = within_patience("visible children", async {
            loop {
                match test_pool.workers() {
                    seen if seen.len() > 1 => break seen,
                    _ => tokio::task::yield_now().await,
                }
            }
        });
        let old = old.await;
        let exceeded = worker.wait_until_exceeded();
        let error = within_patience("the end of the worker", worker.run("sleep 1000000".into())).await.unwrap_err();
        assert_eq!(error, HeldWorkerError::Timeout(millis));
        assert_eq!(error.to_string(), "Worker exceeded 2.5s timeout");
        assert_eq!(within_patience("the exceeded limit", exceeded).await, error);
        assert_eq!(within_patience("a late run", worker.run("echo no".into())).await, Err(error));

        let next = within_patience("the next worker", pool.acquire("next")).await.unwrap();
        assert_eq!((next.id(), worker.id() == next.id()), (worker.id(), true));
        assert_eq!(test_pool.workers(), [next.pid()], "processes are left of {old:?}");
        assert_eq!(text(within_patience("a result", next.run("echo fresh".into())).await), "fresh");
        drop(worker);
        next.release().await;
        assert_eq!(hold_ends(&pool), [Some(WorkerHoldEndReason::Timeout), Some(WorkerHoldEndReason::Released)]);
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_blocked_runtime_does_not_suspend_the_time_limit() {
    let pool = TestPool::with_workers(1).configure(|config| config.worker_timeout = Duration::from_millis(100)).start();
    let worker = within_patience("a worker", pool.acquire("blocks")).await.unwrap();
    // Nothing else runs on this thread meanwhile.
    wait_for_exit(&process_handle(worker.pid()));
    let error = within_patience("the exceeded limit", worker.wait_until_exceeded()).await;
    assert_eq!(error.to_string(), "Worker exceeded 0.1s timeout");
}

#[tokio::test]
async fn a_worker_that_sends_without_end_does_not_delay_others() {
    let pool = TestPool::with_workers(2).configure(|config| config.worker_timeout = Duration::from_secs(2)).start();
    let talker = within_patience("a worker", pool.acquire("talks")).await.unwrap();
    let other = within_patience("another worker", pool.acquire("works")).await.unwrap();
    let talking = talker.run("flood".into());
    assert_eq!(text(within_patience("the other worker", other.run("echo heard".into())).await), "heard");
    let error = within_patience("the end of the worker", talking).await.unwrap_err();
    assert_eq!(error, HeldWorkerError::Timeout(Duration::from_secs(2)));
}

#[tokio::test]
async fn a_body_can_select_on_an_exceeded_limit() {
    let pool = TestPool::with_workers(1).configure(|config| config.worker_timeout = Duration::from_millis(100)).start();
    let worker = within_patience("a worker", pool.acquire("waits")).await.unwrap();
    let body = std::future::pending::<()>();
    let ended = within_patience("the end of the body", async {
        tokio::select! {
            () = body => None,
            error = worker.wait_until_exceeded() => Some(error),
        }
    });
    assert_eq!(ended.await, Some(HeldWorkerError::Timeout(Duration::from_millis(100))));
}

#[tokio::test]
async fn a_worker_over_its_memory_limit_is_killed_and_replaced() {
    const ALLOWED: u64 = 100 << 20;
    for (_, pool) in
        start_on_each_path(|| TestPool::with_workers(1).configure(|config| config.worker_memory = Some(ALLOWED)))
    {
        let worker = within_patience("a worker", pool.acquire("hog")).await.unwrap();
        let used = worker.memory_usage().unwrap();
        assert!((1..ALLOWED).contains(&used), "{used}");
        let (first, error) = within_patience("the end of the worker", async {
            tokio::join!(worker.wait_until_exceeded(), worker.run("hog 4000".into()))
        })
        .await;
        let error = error.unwrap_err();
        assert_eq!((&first, &error), (&HeldWorkerError::Memory(ALLOWED), &first));
        assert_eq!(error.to_string(), "Worker exceeded 100MB memory limit");
        let next = within_patience("the next worker", pool.acquire("next")).await.unwrap();
        assert_eq!(text(within_patience("a result", next.run("hog 10".into())).await), "10");
        assert_eq!(hold_ends(&pool), [Some(WorkerHoldEndReason::Memory), None]);
    }
}

#[tokio::test]
async fn cpu_time_is_counted_per_hold() {
    let limit = Duration::from_millis(600);
    for (_, pool) in
        start_on_each_path(|| TestPool::with_workers(1).configure(|config| config.worker_cpu_time = Some(limit)))
    {
        for n in 0..4 {
            let worker = within_patience("a worker", pool.acquire(format!("task {n}"))).await.unwrap();
            within_patience("a short task", worker.run("burn 200".into())).await.unwrap();
            worker.release().await;
        }
        let worker = within_patience("a worker", pool.acquire("much")).await.unwrap();
        let error = within_patience("the end of the worker", worker.run("burn 60000".into())).await.unwrap_err();
        assert!(matches!(error, HeldWorkerError::BoundExceeded(BoundExceeded::CpuTime { .. })), "{error}");
        assert_eq!(hold_ends(&pool).last(), Some(&Some(WorkerHoldEndReason::BoundExceeded)));
    }
}

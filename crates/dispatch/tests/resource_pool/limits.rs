//! Workers that pass their limits, by control groups where there are any, and by looking.

use std::time::Duration;

use gpupool_confine::bounds::BoundExceeded;
use gpupool_confine::cgroup::CgroupManager;
use gpupool_dispatch::resource_pool::{HeldWorkerError, ResourcePool, WorkerHoldEndReason};

use crate::kit::{Story, ends, expect_gone, handle, in_time, text};
use crate::skipped::skipped;

/// A pool for each path by which limits can be kept here.
fn on_each_path(story: impl Fn() -> Story) -> Vec<(Story, ResourcePool)> {
    let mut paths = vec![CgroupManager::unavailable("this test wants no groups")];
    let groups = CgroupManager::detect();
    if groups.limits_memory() {
        paths.push(groups);
    } else {
        skipped("limits by control groups", &groups.describe());
    }
    let start = |cgroups| {
        let story = story();
        let pool = ResourcePool::start_with_cgroups(story.config.clone(), cgroups).unwrap();
        (story, pool)
    };
    paths.into_iter().map(start).collect()
}

#[tokio::test]
async fn a_worker_held_too_long_is_killed_with_all_it_started_and_replaced() {
    // Long enough for its children to have begun, however slow the machine.
    let millis = Duration::from_millis(2_500);
    for (story, pool) in on_each_path(|| Story::of(1).with(|config| config.worker_timeout = millis)) {
        let worker = in_time("a worker", pool.acquire("slow")).await.unwrap();
        in_time("children that hide", worker.run("spawn".into())).await.unwrap();
        // One that is just becoming another program is not recognised.
        let old = in_time("children to be seen", async {
            loop {
                match story.workers() {
                    seen if seen.len() > 1 => break seen,
                    _ => tokio::task::yield_now().await,
                }
            }
        });
        let old = old.await;
        let exceeded = worker.wait_until_exceeded();
        let error = in_time("its end", worker.run("sleep 1000000".into())).await.unwrap_err();
        assert_eq!(error, HeldWorkerError::Timeout(millis));
        assert_eq!(error.to_string(), "Worker exceeded 2.5s timeout");
        assert_eq!(in_time("who waits for it", exceeded).await, error);
        assert_eq!(in_time("what is wanted later", worker.run("echo no".into())).await, Err(error));

        let next = in_time("the next", pool.acquire("next")).await.unwrap();
        assert_eq!((next.id(), worker.id() == next.id()), (worker.id(), true));
        assert_eq!(story.workers(), [next.pid()], "of {old:?} something is left");
        assert_eq!(text(in_time("an answer", next.run("echo fresh".into())).await), "fresh");
        drop(worker);
        next.release().await;
        assert_eq!(ends(&pool), [Some(WorkerHoldEndReason::Timeout), Some(WorkerHoldEndReason::Released)]);
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_body_that_blocks_its_runtime_does_not_save_the_worker() {
    let pool = Story::of(1).with(|config| config.worker_timeout = Duration::from_millis(100)).start();
    let worker = in_time("a worker", pool.acquire("blocks")).await.unwrap();
    // Nothing else runs on this thread meanwhile.
    expect_gone(&handle(worker.pid()));
    let told = in_time("it is told at the next await", worker.wait_until_exceeded()).await;
    assert_eq!(told.to_string(), "Worker exceeded 0.1s timeout");
}

#[tokio::test]
async fn a_worker_that_talks_without_end_keeps_nobody_from_keeping_time() {
    let pool = Story::of(2).with(|config| config.worker_timeout = Duration::from_secs(2)).start();
    let talker = in_time("a worker", pool.acquire("talks")).await.unwrap();
    let other = in_time("another", pool.acquire("works")).await.unwrap();
    let talking = talker.run("flood".into());
    assert_eq!(text(in_time("the other works on", other.run("echo heard".into())).await), "heard");
    let told = in_time("its end", talking).await.unwrap_err();
    assert_eq!(told, HeldWorkerError::Timeout(Duration::from_secs(2)));
}

#[tokio::test]
async fn a_body_is_interrupted_when_a_limit_is_passed() {
    let pool = Story::of(1).with(|config| config.worker_timeout = Duration::from_millis(100)).start();
    let worker = in_time("a worker", pool.acquire("waits")).await.unwrap();
    let body = std::future::pending::<()>();
    let ended = in_time("the end of the body", async {
        tokio::select! {
            () = body => None,
            error = worker.wait_until_exceeded() => Some(error),
        }
    });
    assert_eq!(ended.await, Some(HeldWorkerError::Timeout(Duration::from_millis(100))));
}

#[tokio::test]
async fn a_worker_that_takes_too_much_memory_is_killed_and_replaced() {
    const ALLOWED: u64 = 100 << 20;
    for (_, pool) in on_each_path(|| Story::of(1).with(|config| config.worker_memory = Some(ALLOWED))) {
        let worker = in_time("a worker", pool.acquire("hog")).await.unwrap();
        let used = worker.memory_usage().unwrap();
        assert!((1..ALLOWED).contains(&used), "{used}");
        let (first, error) =
            in_time("its end", async { tokio::join!(worker.wait_until_exceeded(), worker.run("hog 4000".into())) })
                .await;
        let error = error.unwrap_err();
        assert_eq!((&first, &error), (&HeldWorkerError::Memory(ALLOWED), &first));
        assert_eq!(error.to_string(), "Worker exceeded 100MB memory limit");
        let next = in_time("the next", pool.acquire("next")).await.unwrap();
        assert_eq!(text(in_time("an answer", next.run("hog 10".into())).await), "10");
        assert_eq!(ends(&pool), [Some(WorkerHoldEndReason::Memory), None]);
    }
}

#[tokio::test]
async fn processor_time_is_counted_anew_for_each_hold() {
    let limit = Duration::from_millis(600);
    for (_, pool) in on_each_path(|| Story::of(1).with(|config| config.worker_cpu_time = Some(limit))) {
        for n in 0..4 {
            let worker = in_time("a worker", pool.acquire(format!("task {n}"))).await.unwrap();
            in_time("a little work", worker.run("burn 200".into())).await.unwrap();
            worker.release().await;
        }
        let worker = in_time("a worker", pool.acquire("much")).await.unwrap();
        let error = in_time("its end", worker.run("burn 60000".into())).await.unwrap_err();
        assert!(matches!(error, HeldWorkerError::BoundExceeded(BoundExceeded::CpuTime { .. })), "{error}");
        assert_eq!(ends(&pool).last(), Some(&Some(WorkerHoldEndReason::BoundExceeded)));
    }
}

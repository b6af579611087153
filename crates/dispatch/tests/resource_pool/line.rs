//! Waiting for a worker, and how many there are.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use gpupool_dispatch::resource_pool::{AcquireError, MAX_WAITING, ResourcePool, ResourcePoolConfig, WorkerDevice};

use crate::kit::{Story, ends, in_time, text, until};

#[tokio::test]
async fn whoever_came_first_is_served_first_also_when_others_leave_between() {
    let story = Story::of(1);
    let pool = story.start();
    let first = in_time("the first", pool.acquire("first")).await.unwrap();
    let waiting: Vec<_> = (0..20).map(|n| (n, pool.acquire(format!("task {n}")))).collect();
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for (n, acquiring) in waiting {
        if n % 3 == 1 {
            drop(acquiring);
            continue;
        }
        let served = Arc::clone(&served);
        tasks.push(tokio::spawn(async move {
            let worker = acquiring.await.unwrap();
            served.lock().unwrap().push(n);
            worker.release().await;
        }));
    }
    until(&pool, "those who stay wait", |status| status.waiting_tasks == 13).await;
    first.release().await;
    for task in tasks {
        in_time("a task", task).await.unwrap();
    }
    let expected: Vec<i32> = (0..20).filter(|n| n % 3 != 1).collect();
    assert_eq!(*served.lock().unwrap(), expected);
    assert_eq!(ends(&pool).len(), 14);
}

#[tokio::test]
async fn waiting_is_bounded_and_leaves_nothing_behind() {
    let story = Story::of(1).with(|config| config.acquire_patience = Duration::from_millis(50));
    let pool = story.start();
    in_time("ready", pool.wait_until_ready()).await.unwrap();
    let held = in_time("the first", pool.acquire("first")).await.unwrap();
    let error = in_time("the second", pool.acquire("second")).await.unwrap_err();
    assert_eq!(error.to_string(), "no worker was free within 0.05s");
    assert_eq!(pool.status().waiting_tasks, 0);
    held.release().await;
    assert_eq!(pool.status().available_workers, 1);
    let long = in_time("a long name", pool.acquire("x".repeat(2_000))).await.unwrap_err();
    assert_eq!(long, AcquireError::TaskId(2_000));
}

#[tokio::test]
async fn a_grant_that_nobody_takes_goes_back() {
    let pool = Story::of(1).start();
    let acquiring = pool.acquire("left");
    until(&pool, "granted", |status| status.active_tasks == 1).await;
    drop(acquiring);
    until(&pool, "given back", |status| status.available_workers == 1).await;
}

#[tokio::test]
async fn the_status_tells_who_has_a_worker_and_a_release_is_seen_at_once() {
    let story = Story::of(2).with(|config| config.worker_memory = Some(512 << 20));
    let pool = story.start();
    in_time("ready", pool.wait_until_ready()).await.unwrap();
    let one = in_time("one", pool.acquire("b")).await.unwrap();
    let other = in_time("other", pool.acquire("a")).await.unwrap();
    let status = pool.status();
    assert_eq!((status.total_workers, status.available_workers, status.active_tasks), (2, 0, 2));
    assert_eq!(status.active_task_ids, ["b".into(), "a".into()]);
    assert_eq!((status.worker_timeout, status.worker_memory), (story.config.worker_timeout, Some(512 << 20)));
    one.release().await;
    drop(other);
    assert!(pool.status().available_workers >= 1);
    until(&pool, "both are back", |status| status.available_workers == 2).await;
    assert_eq!((pool.status().active_tasks, pool.status().active_task_ids.len()), (0, 0));
}

#[tokio::test]
async fn workers_share_the_devices_in_turn_and_see_only_theirs() {
    let device = |name: &str, id: u32| WorkerDevice {
        gpu_ids: vec![id],
        environment: vec![("CUDA_VISIBLE_DEVICES".into(), Some(id.to_string()))],
        ..WorkerDevice::new(name)
    };
    let story = Story::of(3).with(|config| config.devices = vec![device("cuda:4", 4), device("cuda:6", 6)]);
    let pool = story.start();
    let mut seen = Vec::new();
    let mut holds = Vec::new();
    for n in 0..3 {
        let worker = in_time("a worker", pool.acquire(format!("task {n}"))).await.unwrap();
        let visible = text(in_time("its variable", worker.run("env CUDA_VISIBLE_DEVICES".into())).await);
        seen.push((worker.id().0, worker.device().to_owned(), visible));
        holds.push(worker);
    }
    seen.sort();
    let expected = [(0, "cuda:4", "4"), (1, "cuda:6", "6"), (2, "cuda:4", "4")];
    assert_eq!(seen, expected.map(|(id, name, visible)| (id, name.to_owned(), visible.to_owned())));
}

#[tokio::test]
async fn workers_come_with_load_and_go_when_idle() {
    let story = Story::of(3).with(|config| {
        config.min_workers = 1;
        config.idle_time = Duration::from_millis(100);
    });
    let pool = story.start();
    in_time("ready", pool.wait_until_ready()).await.unwrap();
    assert_eq!(pool.status().total_workers, 1);
    let mut holds = Vec::new();
    for n in 0..3 {
        holds.push(in_time("a worker", pool.acquire(format!("task {n}"))).await.unwrap());
    }
    let ids: BTreeSet<u32> = holds.iter().map(|worker| worker.id().0).collect();
    assert_eq!(ids, BTreeSet::from([0, 1, 2]));
    drop(holds);
    until(&pool, "the others go", |status| status.total_workers == 1 && status.available_workers == 1).await;
    let last = in_time("the last", pool.acquire("last")).await.unwrap();
    assert!(ids.contains(&last.id().0));
    assert_eq!(story.workers(), [last.pid()]);
}

#[tokio::test]
async fn a_pool_without_workers_at_rest_starts_one_when_it_is_wanted() {
    let story = Story::of(1).with(|config| config.min_workers = 0);
    let pool = story.start();
    in_time("ready", pool.wait_until_ready()).await.unwrap();
    story.expect_nothing_left();
    let worker = in_time("a worker", pool.acquire("task")).await.unwrap();
    assert_eq!(text(in_time("an answer", worker.run("echo hello".into())).await), "hello");
}

#[test]
fn a_configuration_that_cannot_be_is_refused() {
    let refused = |change: fn(&mut ResourcePoolConfig)| {
        ResourcePool::start(Story::of(1).with(change).config).unwrap_err().to_string()
    };
    assert_eq!(refused(|config| config.max_workers = 0), "max_workers must be positive, got 0");
    let unwritable = refused(|config| config.audit = Some("/proc/audit".into()));
    assert!(unwritable.starts_with("the audit trail /proc/audit: "), "{unwritable}");
}

#[tokio::test]
async fn who_finds_the_line_full_is_told_so_at_once_and_there_is_room_again_when_others_leave() {
    let pool = Story::of(1).with(|config| config.acquire_patience = Duration::from_secs(3_600)).start();
    let held = in_time("a worker", pool.acquire("first")).await.unwrap();
    let line: Vec<_> = (0..MAX_WAITING).map(|_| pool.acquire("waits")).collect();
    let error = in_time("an answer", pool.acquire("one too many")).await.unwrap_err();
    assert_eq!(error, AcquireError::TooManyWaiting);
    // Whoever has a worker can kill it, however full it is.
    held.kill();
    drop(line);
    drop(held);
    until(&pool, "that all have left", |status| status.waiting_tasks == 0 && status.active_tasks == 0).await;
    in_time("the next worker", pool.acquire("next")).await.unwrap().release().await;
}

//! Waiting for a worker, and the number of workers.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use gpupool_dispatch::resource_pool::{AcquireError, MAX_WAITING, ResourcePool, ResourcePoolConfig, WorkerDevice};

use crate::test_pool::{TestPool, hold_ends, text, wait_for_status, within_patience};

#[tokio::test]
async fn waiters_are_served_in_order_even_if_others_leave() {
    let test_pool = TestPool::with_workers(1);
    let pool = test_pool.start();
    let first = within_patience("the first worker", pool.acquire("first")).await.unwrap();
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
    wait_for_status(&pool, "13 waiters", |status| status.waiting_tasks == 13).await;
    first.release().await;
    for task in tasks {
        within_patience("a task", task).await.unwrap();
    }
    let expected: Vec<i32> = (0..20).filter(|n| n % 3 != 1).collect();
    assert_eq!(*served.lock().unwrap(), expected);
    assert_eq!(hold_ends(&pool).len(), 14);
}

#[tokio::test]
async fn an_acquire_times_out_and_leaves_nothing_behind() {
    let test_pool = TestPool::with_workers(1).configure(|config| config.acquire_patience = Duration::from_millis(50));
    let pool = test_pool.start();
    within_patience("ready workers", pool.wait_until_ready()).await.unwrap();
    let held = within_patience("the first worker", pool.acquire("first")).await.unwrap();
    let error = within_patience("the second worker", pool.acquire("second")).await.unwrap_err();
    assert_eq!(error.to_string(), "no worker was free within 0.05s");
    assert_eq!(pool.status().waiting_tasks, 0);
    held.release().await;
    assert_eq!(pool.status().available_workers, 1);
    let long = within_patience("the refusal", pool.acquire("x".repeat(2_000))).await.unwrap_err();
    assert_eq!(long, AcquireError::TaskId(2_000));
}

#[tokio::test]
async fn an_abandoned_grant_returns_to_the_pool() {
    let pool = TestPool::with_workers(1).start();
    let acquiring = pool.acquire("left");
    wait_for_status(&pool, "a grant", |status| status.active_tasks == 1).await;
    drop(acquiring);
    wait_for_status(&pool, "a free worker", |status| status.available_workers == 1).await;
}

#[tokio::test]
async fn the_status_lists_holders_and_shows_a_release_at_once() {
    let test_pool = TestPool::with_workers(2).configure(|config| config.worker_memory = Some(512 << 20));
    let pool = test_pool.start();
    within_patience("ready workers", pool.wait_until_ready()).await.unwrap();
    let one = within_patience("one worker", pool.acquire("b")).await.unwrap();
    let other = within_patience("another worker", pool.acquire("a")).await.unwrap();
    let status = pool.status();
    assert_eq!((status.total_workers, status.available_workers, status.active_tasks), (2, 0, 2));
    assert_eq!(status.active_task_ids, ["b".into(), "a".into()]);
    assert_eq!((status.worker_timeout, status.worker_memory), (test_pool.config.worker_timeout, Some(512 << 20)));
    one.release().await;
    drop(other);
    assert!(pool.status().available_workers >= 1);
    wait_for_status(&pool, "two free workers", |status| status.available_workers == 2).await;
    assert_eq!((pool.status().active_tasks, pool.status().active_task_ids.len()), (0, 0));
}

#[tokio::test]
async fn workers_share_the_devices_in_turn_and_see_only_their_own() {
    let device = |name: &str, id: u32| WorkerDevice {
        gpu_ids: vec![id],
        environment: vec![("CUDA_VISIBLE_DEVICES".into(), Some(id.to_string()))],
        ..WorkerDevice::new(name)
    };
    let test_pool =
        TestPool::with_workers(3).configure(|config| config.devices = vec![device("cuda:4", 4), device("cuda:6", 6)]);
    let pool = test_pool.start();
    let mut seen = Vec::new();
    let mut holds = Vec::new();
    for n in 0..3 {
        let worker = within_patience("a worker", pool.acquire(format!("task {n}"))).await.unwrap();
        let visible = text(within_patience("the variable", worker.run("env CUDA_VISIBLE_DEVICES".into())).await);
        seen.push((worker.id().0, worker.device().to_owned(), visible));
        holds.push(worker);
    }
    seen.sort();
    let expected = [(0, "cuda:4", "4"), (1, "cuda:6", "6"), (2, "cuda:4", "4")];
    assert_eq!(seen, expected.map(|(id, name, visible)| (id, name.to_owned(), visible.to_owned())));
}

#[tokio::test]
async fn workers_start_with_load_and_stop_when_idle() {
    let test_pool = TestPool::with_workers(3).configure(|config| {
        config.min_workers = 1;
        config.idle_time = Duration::from_millis(100);
    });
    let pool = test_pool.start();
    within_patience("ready workers", pool.wait_until_ready()).await.unwrap();
    assert_eq!(pool.status().total_workers, 1);
    let mut holds = Vec::new();
    for n in 0..3 {
        holds.push(within_patience("a worker", pool.acquire(format!("task {n}"))).await.unwrap());
    }
    let ids: BTreeSet<u32> = holds.iter().map(|worker| worker.id().0).collect();
    assert_eq!(ids, BTreeSet::from([0, 1, 2]));
    drop(holds);
    wait_for_status(&pool, "one worker", |status| status.total_workers == 1 && status.available_workers == 1).await;
    let last = within_patience("the last worker", pool.acquire("last")).await.unwrap();
    assert!(ids.contains(&last.id().0));
    assert_eq!(test_pool.workers(), [last.pid()]);
}

#[tokio::test]
async fn a_pool_without_a_minimum_starts_a_worker_on_demand() {
    let test_pool = TestPool::with_workers(1).configure(|config| config.min_workers = 0);
    let pool = test_pool.start();
    within_patience("ready workers", pool.wait_until_ready()).await.unwrap();
    test_pool.assert_nothing_left();
    let worker = within_patience("a worker", pool.acquire("task")).await.unwrap();
    assert_eq!(text(within_patience("a result", worker.run("echo hello".into())).await), "hello");
}

#[test]
fn an_invalid_configuration_is_refused() {
    let refused = |change: fn(&mut ResourcePoolConfig)| {
        ResourcePool::start(TestPool::with_workers(1).configure(change).config).unwrap_err().to_string()
    };
    assert_eq!(refused(|config| config.max_workers = 0), "max_workers must be positive, got 0");
    let unwritable = refused(|config| config.audit = Some("/proc/audit".into()));
    assert!(unwritable.starts_with("cannot open the audit trail /proc/audit: "), "{unwritable}");
}

#[tokio::test]
async fn a_full_queue_refuses_at_once_and_has_room_when_others_leave() {
    let pool =
        TestPool::with_workers(1).configure(|config| config.acquire_patience = Duration::from_secs(3_600)).start();
    let held = within_patience("a worker", pool.acquire("first")).await.unwrap();
    let line: Vec<_> = (0..MAX_WAITING).map(|_| pool.acquire("waits")).collect();
    let error = within_patience("a result", pool.acquire("one too many")).await.unwrap_err();
    assert_eq!(error, AcquireError::TooManyWaiting);
    // A holder can kill its worker even if the queue is full.
    held.kill();
    drop(line);
    drop(held);
    wait_for_status(&pool, "an idle pool", |status| status.waiting_tasks == 0 && status.active_tasks == 0).await;
    within_patience("the next worker", pool.acquire("next")).await.unwrap().release().await;
}

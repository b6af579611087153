//! Many tasks on few workers, with random failures of both. A separate test program, so that file descriptors can be
//! counted.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "support/mod.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod support;
#[path = "resource_pool/test_pool.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod test_pool;

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use gpupool_confine::Signal;
use gpupool_confine::process::{ProcessHandle, ProcessId};
use gpupool_dispatch::resource_pool::{HeldWorker, HeldWorkerError, ResourcePool};
use gpupool_testkit::SeededRng;
use test_pool::{TestPool, wait_for_status, within_patience};

const TASKS: u64 = 200;

/// Pids of held workers.
#[derive(Clone, Default)]
struct HeldPids(Arc<Mutex<HashSet<u32>>>);

impl HeldPids {
    fn add(&self, worker: &HeldWorker) {
        assert!(self.0.lock().unwrap().insert(worker.pid()), "worker {} has two holders", worker.id());
    }

    fn remove(&self, worker: &HeldWorker) {
        assert!(self.0.lock().unwrap().remove(&worker.pid()));
    }
}

async fn run_task(pool: Arc<ResourcePool>, held_pids: HeldPids, number: u64, mut random: SeededRng) {
    let acquiring = pool.acquire(format!("task {number}"));
    let worker = if random.below(5) == 0 {
        match tokio::time::timeout(Duration::from_millis(random.below(300)), acquiring).await {
            Ok(worker) => worker.unwrap(),
            Err(_) => return,
        }
    } else {
        within_patience("a worker", acquiring).await.unwrap()
    };
    held_pids.add(&worker);
    let run = |task: &str| worker.run(task.to_owned().into());
    match random.below(8) {
        0 => {
            let error = within_patience("the limit", run("sleep 1000000")).await.unwrap_err();
            assert!(matches!(error, HeldWorkerError::Timeout(_)), "{error}");
        }
        1 => worker.kill(),
        2 => {
            let error = within_patience("the end of the worker", run("exit 1")).await.unwrap_err();
            assert!(matches!(error, HeldWorkerError::Lost(_) | HeldWorkerError::Timeout(_)), "{error}");
        }
        3 => drop(run("sleep 1000000")),
        4 => {
            if let Some(process) = ProcessId::of_pid(worker.pid()).unwrap()
                && let Some(process) = ProcessHandle::open(process).unwrap()
            {
                process.signal(Signal::KILL).unwrap();
            }
            let ended = within_patience("the end of the worker", run("stuck")).await.unwrap_err();
            assert!(!matches!(ended, HeldWorkerError::Failed(_)), "{ended}");
        }
        5 => drop(within_patience("hidden children", run("spawn")).await),
        _ => {
            let echoed = within_patience("an echo", run(&format!("echo {number}"))).await;
            assert!(
                echoed == Ok(number.to_string().into()) || matches!(echoed, Err(HeldWorkerError::Timeout(_))),
                "{echoed:?}"
            );
        }
    }
    held_pids.remove(&worker);
    if random.below(2) == 0 {
        worker.release().await;
    }
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn each_worker_has_one_holder_and_nothing_is_left() {
    let seed = std::process::id().into();
    eprintln!("seed {seed}");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let before = open_files();
    let test_pool = TestPool::with_workers(4).configure(|config| {
        config.min_workers = 2;
        config.worker_timeout = Duration::from_millis(400);
        config.idle_time = Duration::from_millis(100);
        config.acquire_patience = Duration::from_secs(600);
    });
    let pool = Arc::new(test_pool.start());
    runtime.block_on(async {
        let held_pids = HeldPids::default();
        let mut random = SeededRng::new(seed);
        let tasks: Vec<_> = (0..TASKS)
            .map(|number| tokio::spawn(run_task(Arc::clone(&pool), held_pids.clone(), number, random.fork())))
            .collect();
        for task in tasks {
            task.await.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        }
        wait_for_status(&pool, "no holds", |status| status.active_tasks == 0 && status.waiting_tasks == 0).await;
        wait_for_status(&pool, "an idle pool", |status| status.available_workers == 2 && status.total_workers == 2)
            .await;
        assert!(pool.audit_entries().iter().all(|entry| entry.ended.is_some()), "seed {seed}");
        within_patience("the end of the worker", pool.shutdown()).await;
    });
    let status = pool.status();
    assert_eq!((status.total_workers, status.active_tasks, status.waiting_tasks), (0, 0, 0), "seed {seed}");
    test_pool.assert_nothing_left();
    drop(pool);
    assert_eq!(open_files(), before, "seed {seed}: descriptors are left open");
}

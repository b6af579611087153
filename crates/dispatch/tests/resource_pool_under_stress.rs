//! Many tasks, few workers, and everything that can happen to either, at random. Alone in its program, so that file descriptors
//! can be counted.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "resource_pool/kit.rs"]
#[allow(dead_code, reason = "other stories use the rest")]
mod kit;
#[path = "support/mod.rs"]
#[allow(dead_code, reason = "other stories use the rest")]
mod support;

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use gpupool_confine::Signal;
use gpupool_confine::process::{ProcessHandle, ProcessId};
use gpupool_dispatch::resource_pool::{HeldWorker, HeldWorkerError, ResourcePool};
use kit::{Story, in_time, until};

const TASKS: u64 = 200;

/// Numbers that look random, the same for the same seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// Processes that somebody has.
#[derive(Clone, Default)]
struct Taken(Arc<Mutex<HashSet<u32>>>);

impl Taken {
    fn take(&self, worker: &HeldWorker) {
        assert!(self.0.lock().unwrap().insert(worker.pid()), "somebody else has worker {}", worker.id());
    }

    fn give_back(&self, worker: &HeldWorker) {
        assert!(self.0.lock().unwrap().remove(&worker.pid()));
    }
}

async fn one_task(pool: Arc<ResourcePool>, taken: Taken, number: u64, mut dice: Dice) {
    let acquiring = pool.acquire(format!("task {number}"));
    let worker = if dice.roll(5) == 0 {
        match tokio::time::timeout(Duration::from_millis(dice.roll(300)), acquiring).await {
            Ok(worker) => worker.unwrap(),
            Err(_) => return,
        }
    } else {
        in_time("a worker", acquiring).await.unwrap()
    };
    taken.take(&worker);
    let run = |task: &str| worker.run(task.to_owned().into());
    match dice.roll(8) {
        0 => {
            let error = in_time("the limit", run("sleep 1000000")).await.unwrap_err();
            assert!(matches!(error, HeldWorkerError::Timeout(_)), "{error}");
        }
        1 => worker.kill(),
        2 => {
            let error = in_time("its end", run("exit 1")).await.unwrap_err();
            assert!(matches!(error, HeldWorkerError::Lost(_) | HeldWorkerError::Timeout(_)), "{error}");
        }
        3 => drop(run("sleep 1000000")),
        4 => {
            if let Some(process) = ProcessId::of_pid(worker.pid()).unwrap()
                && let Some(process) = ProcessHandle::open(process).unwrap()
            {
                process.signal(Signal::KILL).unwrap();
            }
            let ended = in_time("its end", run("stuck")).await.unwrap_err();
            assert!(!matches!(ended, HeldWorkerError::Failed(_)), "{ended}");
        }
        5 => drop(in_time("children that hide", run("spawn")).await),
        _ => {
            let echoed = in_time("an echo", run(&format!("echo {number}"))).await;
            assert!(
                echoed == Ok(number.to_string().into()) || matches!(echoed, Err(HeldWorkerError::Timeout(_))),
                "{echoed:?}"
            );
        }
    }
    taken.give_back(&worker);
    if dice.roll(2) == 0 {
        worker.release().await;
    }
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn nobody_shares_a_worker_and_nothing_is_left() {
    let seed = std::process::id().into();
    eprintln!("seed {seed}");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let before = open_files();
    let story = Story::of(4).with(|config| {
        config.min_workers = 2;
        config.worker_timeout = Duration::from_millis(400);
        config.idle_time = Duration::from_millis(100);
        config.acquire_patience = Duration::from_secs(600);
    });
    let pool = Arc::new(story.start());
    runtime.block_on(async {
        let taken = Taken::default();
        let mut dice = Dice(seed);
        let tasks: Vec<_> = (0..TASKS)
            .map(|number| tokio::spawn(one_task(Arc::clone(&pool), taken.clone(), number, Dice(dice.roll(u64::MAX)))))
            .collect();
        for task in tasks {
            task.await.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        }
        until(&pool, "nobody has one", |status| status.active_tasks == 0 && status.waiting_tasks == 0).await;
        until(&pool, "it is at rest", |status| status.available_workers == 2 && status.total_workers == 2).await;
        assert!(pool.audit_entries().iter().all(|entry| entry.ended.is_some()), "seed {seed}");
        in_time("its end", pool.shutdown()).await;
    });
    let status = pool.status();
    assert_eq!((status.total_workers, status.active_tasks, status.waiting_tasks), (0, 0, 0), "seed {seed}");
    story.expect_nothing_left();
    drop(pool);
    assert_eq!(open_files(), before, "seed {seed}: files are left open");
}

//! Runs that are ended early.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use bytes::Bytes;
use gpupool_confine::process::ProcFs;
use gpupool_dispatch::{DispatchRules, Dispatcher, RunEvent, TaskOutcome, WorkerState};
use serde_json::json;

use crate::common::odd_worker_plan;

/// Whether a worker of this test is alive; other tests run in other threads.
fn is_alive(pid: u32) -> bool {
    ProcFs::system().stat(pid).unwrap().is_some_and(|stat| !stat.has_exited())
}

/// Starts a run whose two workers have endless tasks with more queued behind. Returns their pids.
fn stuck() -> (Dispatcher, Vec<u32>) {
    let mut dispatcher = Dispatcher::start(odd_worker_plan(2)).unwrap();
    for _ in 0..20 {
        dispatcher.submit("sleep 1000000".into()).unwrap();
    }
    let handle = dispatcher.handle();
    loop {
        drop(dispatcher.take_events());
        let stats = handle.stats();
        if stats.workers.iter().all(|worker| worker.task.is_some()) {
            return (dispatcher, stats.workers.iter().filter_map(|worker| worker.pid).collect());
        }
    }
}

#[test]
fn every_cancelled_task_is_reported_and_no_process_is_left() {
    let (mut dispatcher, pids) = stuck();
    dispatcher.handle().cancel();
    let mut cancelled = 0;
    while let Some(event) = dispatcher.next_event() {
        if let RunEvent::TaskEnded(end) = event {
            assert_eq!(end.outcome, TaskOutcome::Cancelled);
            cancelled += 1;
        }
    }
    assert_eq!(cancelled, 20);
    assert!(pids.iter().all(|pid| !is_alive(*pid)));
    assert_eq!(dispatcher.finish().unwrap().cancelled, 20);
}

/// One worker ignores its interrupt, another dies of it, and one is idle.
#[test]
fn stopping_kills_stubborn_workers_and_lets_the_others_clean_up() {
    let mut plan = odd_worker_plan(3);
    plan.settings = json!({"clean_up": "fail"});
    plan.rules = DispatchRules { grace: Duration::from_millis(50), ..DispatchRules::default() };
    let mut dispatcher = Dispatcher::start(plan).unwrap();
    dispatcher.submit("stuck".into()).unwrap();
    dispatcher.submit("sleep 1000000".into()).unwrap();
    let handle = dispatcher.handle();
    let has_begun = || {
        let workers = handle.stats().workers;
        let is_such = |state| workers.iter().filter(|worker| worker.state == state).count();
        (is_such(WorkerState::Busy), is_such(WorkerState::Idle)) == (2, 1)
    };
    while !has_begun() {
        drop(dispatcher.take_events());
    }
    let pids: Vec<u32> = handle.stats().workers.iter().filter_map(|worker| worker.pid).collect();
    handle.stop();
    let (mut cancelled, mut cleaned_up, mut gone) = (0, 0, 0);
    while let Some(event) = dispatcher.next_event() {
        match event {
            RunEvent::TaskEnded(end) => {
                assert_eq!(end.outcome, TaskOutcome::Cancelled);
                cancelled += 1;
            }
            RunEvent::WorkerCleanupFailed { .. } => cleaned_up += 1,
            // May still wait to be taken when the statistics already show the worker.
            RunEvent::WorkerReady { .. } => {}
            RunEvent::WorkerGone { is_last, .. } => {
                assert!(is_last, "no process replaces it");
                gone += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((cancelled, cleaned_up, gone), (2, 1, 3));
    assert!(pids.iter().all(|pid| !is_alive(*pid)));
    assert_eq!(dispatcher.finish().unwrap().cancelled, 2);
}

#[test]
fn a_run_that_is_dropped_leaves_no_process() {
    let (dispatcher, pids) = stuck();
    drop(dispatcher);
    assert!(pids.iter().all(|pid| !is_alive(*pid)));
}

#[test]
fn a_callback_that_panics_ends_the_run_and_leaves_no_process() {
    let mut pids = Vec::new();
    let source = (0..100).map(|_| Ok::<Bytes, std::convert::Infallible>("pid".into()));
    let run = || {
        Dispatcher::start(odd_worker_plan(2)).unwrap().run(source, |event| {
            if let RunEvent::TaskEnded(end) = event {
                if let TaskOutcome::Done(pid) = end.outcome {
                    pids.push(String::from_utf8_lossy(&pid).parse::<u32>().unwrap());
                }
                panic!("panic of the callback");
            }
        })
    };
    let panicked = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
    assert_eq!(panicked.downcast_ref::<&str>(), Some(&"panic of the callback"));
    assert_eq!(pids.len(), 1);
    assert!(!is_alive(pids[0]));
}

#[test]
fn cancelling_pending_tasks_lets_running_ones_finish() {
    let mut plan = odd_worker_plan(1);
    plan.rules = DispatchRules { prefetch: false, ..DispatchRules::default() };
    let mut dispatcher = Dispatcher::start(plan).unwrap();
    for n in 0..10 {
        dispatcher.submit(format!("sleep {}", 50 + n).into()).unwrap();
    }
    let handle = dispatcher.handle();
    while handle.stats().workers[0].task.is_none() {
        drop(dispatcher.take_events());
    }
    handle.cancel_pending();
    let stats = dispatcher.finish().unwrap();
    assert_eq!((stats.completed, stats.cancelled), (1, 9));
}

#[test]
fn no_task_is_accepted_after_the_close() {
    let dispatcher = Dispatcher::start(odd_worker_plan(1)).unwrap();
    let handle = dispatcher.handle();
    dispatcher.close();
    assert_eq!(handle.submit_blocking("echo late".into()), Err(gpupool_dispatch::SubmitError::Closed));
    assert_eq!(dispatcher.finish().unwrap().completed, 0);
}

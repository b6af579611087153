//! Workers that fail to set up or to clean up.

use std::time::Duration;

use gpupool_dispatch::{
    DispatchError, Dispatcher, RunEvent, RunPlan, TaskOutcome, WorkerId, WorkerOutputPolicy, WorkerProgram,
};
use serde_json::json;

use crate::common::{odd_worker_plan, run, with_helper};

#[test]
fn a_run_without_a_usable_worker_ends_with_the_reason() {
    let failing = |setup: &str| {
        let mut plan = odd_worker_plan(2);
        plan.settings = json!({"setup": setup, "write": "loading"});
        plan.output = WorkerOutputPolicy::Discarded;
        plan
    };
    let not_there = with_helper(RunPlan::new(WorkerProgram::native("there-is-no-such-worker")).workers(2));
    for (plan, expected) in [
        (failing("fail"), "the model is not there"),
        (failing("exit"), "it exited with code 7; its output ends with:\nloading"),
        (not_there, "there-is-no-such-worker: command not found"),
    ] {
        let result = run(plan, ["echo a", "echo b"]);
        let error = result.stats.as_ref().unwrap_err();
        assert!(matches!(error, DispatchError::AllFailedSetup { .. }), "{error}");
        assert!(error.to_string().starts_with("All workers failed during setup"), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(result.count(|outcome| *outcome == TaskOutcome::Cancelled), result.task_ends.len());
        let failures = result.events.iter().filter(|event| matches!(event, RunEvent::WorkerSetupFailed { .. })).count();
        assert_eq!(failures, 2);
    }
}

#[test]
fn a_worker_that_fails_to_set_up_leaves_its_work_to_the_others() {
    let mut plan = odd_worker_plan(2);
    plan.settings = json!({"setup": "fail first"});
    let mut dispatcher = Dispatcher::start(plan).unwrap();
    loop {
        match dispatcher.next_event() {
            Some(RunEvent::WorkerSetupFailed { worker, why }) => {
                assert_eq!((worker, &*why), (WorkerId(0), "this one never works"));
                break;
            }
            Some(RunEvent::WorkerReady { worker: WorkerId(1) }) => {}
            other => panic!("{other:?}"),
        }
    }
    for _ in 0..50 {
        dispatcher.submit("worker".into()).unwrap();
    }
    let stats = dispatcher.finish().unwrap();
    assert_eq!(stats.workers.iter().map(|worker| worker.completed).collect::<Vec<_>>(), [0, 50]);
}

#[test]
fn a_setup_has_a_time_limit() {
    let mut plan = odd_worker_plan(1);
    plan.settings = json!({"setup": "hang"});
    plan.setup_timeout = Some(Duration::from_millis(200));
    let error = run(plan, ["echo a"]).stats.unwrap_err();
    assert!(error.to_string().contains("setup took longer than 200ms"), "{error}");
}

#[test]
fn a_failed_cleanup_is_reported_and_loses_nothing() {
    let mut plan = odd_worker_plan(1);
    plan.settings = json!({"clean_up": "fail"});
    let result = run(plan, ["echo a"]);
    assert_eq!(result.done(0), "a");
    let is_reported = result
        .events
        .iter()
        .any(|event| matches!(event, RunEvent::WorkerCleanupFailed { why, .. } if &**why == "could not save"));
    assert!(is_reported, "{:?}", result.events);
    result.stats.unwrap();
}

#[test]
fn settings_may_be_large() {
    let mut plan = odd_worker_plan(1);
    plan.settings = json!({"large": "x".repeat(3 << 20)});
    assert_eq!(run(plan, ["echo a"]).done(0), "a");
}

#[test]
fn an_invalid_plan_names_the_field() {
    let refused = |change: fn(&mut RunPlan)| {
        let mut plan = odd_worker_plan(1);
        change(&mut plan);
        Dispatcher::start(plan).unwrap_err().to_string()
    };
    assert_eq!(refused(|plan| plan.rules.queue_size = 0), "queue_size is 0; it must be at least 1");
    assert!(refused(|plan| plan.rules.task_timeout = Some(Duration::ZERO)).contains("task_timeout is 0 s"));
    assert!(refused(|plan| plan.slots.push(plan.slots[0].clone())).contains("worker 0 twice"));
}

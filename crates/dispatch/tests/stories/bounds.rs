//! Workers that exceed their bounds.

use std::time::Duration;

use gpupool_confine::bounds::BoundExceeded;
use gpupool_dispatch::{TaskOutcome, WorkerExitCause};

use crate::common::{odd_worker_plan, run};

fn excess(outcome: &TaskOutcome) -> &BoundExceeded {
    match outcome {
        TaskOutcome::WorkerLost(loss) => match &loss.cause {
            WorkerExitCause::BoundExceeded(excess) => excess,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_worker_over_its_memory_limit_is_killed_and_replaced() {
    let mut plan = odd_worker_plan(1);
    plan.bounds.host_memory = Some(100 << 20);
    let result = run(plan, ["echo before", "hog 400", "echo after"]);
    assert!(matches!(excess(result.outcome(1)), BoundExceeded::HostMemory { allowed, .. } if *allowed == 100 << 20));
    assert_eq!((result.done(0), result.done(2)), ("before".into(), "after".into()));
}

#[test]
fn cpu_time_can_be_counted_per_task() {
    let mut plan = odd_worker_plan(1);
    plan.bounds.cpu_time = Some(Duration::from_millis(400));
    plan.cpu_time_per_task = true;
    let result = run(plan, ["burn 150", "burn 150", "burn 150", "burn 150", "burn 60000", "burn 10"]);
    assert!(matches!(excess(result.outcome(4)), BoundExceeded::CpuTime { .. }));
    assert_eq!(result.count(|outcome| matches!(outcome, TaskOutcome::Done(_))), 5);
}

#[test]
fn a_worker_is_limited_in_processes() {
    let mut plan = odd_worker_plan(1);
    plan.bounds.processes = Some(20);
    let result = run(plan, ["forks 60", "echo after"]);
    // The kernel refuses more processes; without control groups the worker is killed.
    match result.outcome(0) {
        TaskOutcome::Done(count) => assert!(String::from_utf8_lossy(count).parse::<u32>().unwrap() <= 20),
        other => assert!(matches!(excess(other), BoundExceeded::Processes { .. })),
    }
    assert_eq!(result.done(1), "after");
}

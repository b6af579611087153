//! Time limits of tasks and workers.

use std::time::Duration;

use gpupool_dispatch::command::CommandLine;
use gpupool_dispatch::{RunEvent, TaskOutcome};

use crate::common::{command_plan, odd_worker_plan, run};

const LIMIT: Duration = Duration::from_millis(300);

#[test]
fn a_slow_task_times_out_once_and_the_others_continue() {
    for slow in ["sleep 100000", "stuck", "stop"] {
        let mut plan = odd_worker_plan(2);
        plan.rules.task_timeout = Some(LIMIT);
        plan.rules.grace = Duration::from_millis(100);
        let tasks = (0..40).map(|n| if n == 20 { slow.to_owned() } else { format!("echo {n}") });
        let result = run(plan, tasks);
        assert_eq!(result.outcome(20), &TaskOutcome::TimedOut(LIMIT), "{slow}");
        let done = result.count(|outcome| matches!(outcome, TaskOutcome::Done(_)));
        assert_eq!(done, 39, "{slow}");
        assert_eq!(result.stats.unwrap().timeouts, 1);
    }
}

#[test]
fn an_interrupted_command_can_clean_up_and_keeps_its_worker() {
    // Long enough for a shell to start on a slow machine.
    let limit = Duration::from_secs(2);
    let mut plan = command_plan(1);
    plan.rules.task_timeout = Some(limit);
    plan.output = gpupool_dispatch::WorkerOutputPolicy::Reported;
    let tidy = CommandLine::shell("trap 'echo tidied; exit 1' TERM; echo begun; sleep 1000 & wait");
    let result = run(plan, [tidy.to_payload(), CommandLine::direct(["echo", "next"]).to_payload()]);
    assert_eq!(result.outcome(0), &TaskOutcome::TimedOut(limit));
    let mut out = Vec::new();
    result.task_ends[&gpupool_dispatch::TaskId(0)].output.as_ref().unwrap().copy_stdout_to(&mut out).unwrap();
    assert_eq!(out, b"begun\ntidied\n");
    assert_eq!(result.stats.unwrap().workers[0].replaced, 0);
}

#[test]
fn a_stubborn_command_is_killed_with_its_descendants() {
    let mut plan = command_plan(1);
    plan.rules.task_timeout = Some(LIMIT);
    plan.rules.grace = Duration::from_millis(50);
    let stubborn = CommandLine::shell("trap '' TERM INT; setsid sleep 1234 & sleep 1234");
    let result = run(plan, [stubborn.to_payload(), CommandLine::direct(["true"]).to_payload()]);
    assert_eq!(result.outcome(0), &TaskOutcome::TimedOut(LIMIT));
    assert!(matches!(result.outcome(1), TaskOutcome::Done(_)));
    for id in gpupool_confine::process::ProcFs::system().descendants(std::process::id()).unwrap() {
        let command = std::fs::read_to_string(format!("/proc/{}/cmdline", id.pid)).unwrap_or_default();
        assert!(!command.contains("sleep\x001234"), "{id} is left");
    }
}

#[test]
fn a_worker_is_replaced_after_its_lifetime_between_two_tasks() {
    let mut plan = odd_worker_plan(1);
    plan.worker_lifetime = Some(Duration::from_millis(50));
    let result = run(plan, (0..100).map(|_| "sleep 5"));
    assert_eq!(result.count(|outcome| matches!(outcome, TaskOutcome::Done(_))), 100);
    assert!(result.stats.unwrap().workers[0].replaced >= 2);
}

#[test]
fn task_starts_are_reported_if_configured() {
    let mut plan = odd_worker_plan(2);
    plan.report_started = true;
    let result = run(plan, (0..500).map(|n| format!("echo {n}")));
    let started = result.events.iter().filter(|event| matches!(event, RunEvent::TaskStarted { .. })).count();
    assert_eq!(started, 500);
}

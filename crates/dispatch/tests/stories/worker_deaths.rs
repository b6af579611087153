//! Exits of workers, in all ways.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gpupool_dispatch::{
    AttachDenied, Dispatcher, RunEvent, TaskId, TaskOutcome, WorkerExitCause, WorkerId, WorkerSlot,
};

use crate::common::{odd_worker_plan, run};

fn cause(outcome: &TaskOutcome) -> &WorkerExitCause {
    match outcome {
        TaskOutcome::WorkerLost(loss) => &loss.cause,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_dying_worker_loses_its_current_task_and_no_other() {
    for (task, expected) in [("exit 3", WorkerExitCause::Exited(3)), ("kill", WorkerExitCause::Signalled(9))] {
        let mut tasks: Vec<String> = (0..200).map(|n| format!("echo {n}")).collect();
        tasks[100] = task.to_owned();
        let result = run(odd_worker_plan(2), tasks);
        let lost = result.count(|outcome| matches!(outcome, TaskOutcome::WorkerLost(_)));
        assert_eq!(cause(result.outcome(100)), &expected);
        assert_eq!(result.task_ends.len(), 200);
        // Unsent results are recovered from the outbox.
        assert_eq!(lost, 1, "{task}");
        let replaced: u64 = result.stats.unwrap().workers.iter().map(|worker| worker.replaced).sum();
        assert_eq!(replaced, 1);
    }
}

#[test]
fn a_lost_task_is_retried_if_configured() {
    let mut plan = odd_worker_plan(1);
    plan.rules.retries = 1;
    let result = run(plan, ["exit 1", "echo fine"]);
    assert_eq!(result.task_ends[&TaskId(0)].tries, 2);
    assert_eq!(result.done(1), "fine");
    assert_eq!(result.stats.unwrap().workers[0].replaced, 2);
}

#[test]
fn a_worker_that_violates_the_protocol_is_killed_and_replaced() {
    for (task, expected) in [("garbage", "4294967295"), ("lie", "18446744073709551615"), ("partial", ""), ("close", "")]
    {
        let result = run(odd_worker_plan(1), ["echo before", task, "echo after"]);
        assert_eq!((result.done(0), result.done(2)), ("before".into(), "after".into()), "{task}");
        let cause = cause(result.outcome(1)).to_string();
        assert!(cause.contains(expected), "{task}: {cause}");
    }
}

#[test]
fn nothing_a_worker_started_outlives_it() {
    let result = run(odd_worker_plan(1), ["pid", "spawn", "kill"]);
    let worker: u32 = result.done(0).parse().unwrap();
    let groups = gpupool_confine::cgroup::CgroupManager::detect().cgroup_names().unwrap();
    let its_group = format!("worker-{worker}-");
    assert!(!groups.iter().any(|name| name.starts_with(&its_group)), "{groups:?}");
    let left = gpupool_confine::process::ProcFs::system().processes().unwrap();
    assert!(!left.iter().any(|process| process.pid == worker));
    // The descendants had no other reason to exit.
    let ours = gpupool_confine::process::ProcFs::system().descendants(std::process::id()).unwrap();
    for id in ours {
        let command = std::fs::read_to_string(format!("/proc/{}/cmdline", id.pid)).unwrap_or_default();
        assert!(!command.contains("sleep\x001000"), "{id} is left: {command:?}");
    }
}

#[test]
fn the_task_of_a_withdrawn_worker_runs_on_another() {
    let mut dispatcher = Dispatcher::start(odd_worker_plan(1)).unwrap();
    let handle = dispatcher.handle();
    dispatcher.submit("sleep 100000".into()).unwrap();
    while handle.stats().workers[0].task.is_none() {
        if let Some(RunEvent::TaskEnded(end)) = dispatcher.take_events().pop() {
            panic!("{end:?}");
        }
    }
    handle.withdraw_worker(WorkerId(0), "revoked by ann");
    let mut slot = WorkerSlot::new(WorkerId(1));
    slot.gpu_ids = vec![4];
    loop {
        match dispatcher.next_event() {
            Some(RunEvent::WorkerGone {
                worker: WorkerId(0),
                cause: WorkerExitCause::GpuWithdrawn(why),
                is_last: true,
                ..
            }) => {
                assert_eq!(&*why, "revoked by ann");
                break;
            }
            Some(RunEvent::TaskEnded(end)) => panic!("{end:?}"),
            Some(_) => {}
            None => panic!("the run ended"),
        }
    }
    handle.add_worker(slot);
    while handle.stats().workers.get(1).is_none_or(|worker| worker.task != Some(TaskId(0))) {
        drop(dispatcher.take_events());
    }
    handle.cancel();
    let mut cancelled = 0;
    while let Some(event) = dispatcher.next_event() {
        cancelled += usize::from(matches!(event, RunEvent::TaskEnded(end) if end.outcome == TaskOutcome::Cancelled));
    }
    assert_eq!(cancelled, 1);
}

#[test]
fn a_withdrawn_slot_can_be_restored() {
    let mut dispatcher = Dispatcher::start(odd_worker_plan(1)).unwrap();
    let handle = dispatcher.handle();
    while !matches!(dispatcher.next_event(), Some(RunEvent::WorkerReady { .. })) {}
    handle.withdraw_worker(WorkerId(0), "for a moment");
    while !matches!(dispatcher.next_event(), Some(RunEvent::WorkerGone { .. })) {}
    dispatcher.submit("worker".into()).unwrap();
    dispatcher.close();
    handle.add_worker(WorkerSlot::new(WorkerId(0)));
    let mut done = Vec::new();
    while let Some(event) = dispatcher.next_event() {
        if let RunEvent::TaskEnded(end) = event {
            done.push(end.outcome);
        }
    }
    assert_eq!(done, [TaskOutcome::Done("0".into())]);
}

#[test]
fn a_slot_revoked_during_the_start_can_be_restored() {
    let mut plan = odd_worker_plan(1);
    let revoked = || AttachDenied::SlotRevoked("the lease was lost".into());
    plan.slots[0].attach = Some(Arc::new(move |_| Err(revoked())));
    let mut dispatcher = Dispatcher::start(plan).unwrap();
    dispatcher.submit("echo fine".into()).unwrap();
    dispatcher.close();
    match dispatcher.next_event() {
        Some(RunEvent::WorkerGone { cause: WorkerExitCause::GpuWithdrawn(why), .. }) => {
            assert_eq!(&*why, "the lease was lost")
        }
        other => panic!("{other:?}"),
    }
    dispatcher.handle().add_worker(WorkerSlot::new(WorkerId(0)));
    assert_eq!(dispatcher.finish().unwrap().completed, 1);
}

#[test]
fn a_worker_that_cannot_be_attached_yet_starts_later() {
    let mut plan = odd_worker_plan(1);
    let tries = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&tries);
    plan.slots[0].attach = Some(Arc::new(move |pid| {
        assert!(pid > 1);
        match counted.fetch_add(1, Ordering::SeqCst) {
            0 | 1 => Err(AttachDenied::TryLater("the agent is away".into())),
            _ => Ok(false),
        }
    }));
    assert_eq!(run(plan, ["echo fine"]).done(0), "fine");
    assert_eq!(tries.load(Ordering::SeqCst), 3);

    let mut never = odd_worker_plan(1);
    never.slots[0].attach = Some(Arc::new(|_| Err(AttachDenied::TryLater("the agent is away".into()))));
    let error = run(never, ["echo fine"]).stats.unwrap_err();
    assert!(error.to_string().contains("the agent is away"), "{error}");
}

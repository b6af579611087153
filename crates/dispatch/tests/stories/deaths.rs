//! Workers that die, in all ways.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gpupool_dispatch::{Cause, Dispatcher, Event, NotAttached, Outcome, Place, TaskId, WorkerId};

use crate::common::{odd, run};

fn cause(outcome: &Outcome) -> &Cause {
    match outcome {
        Outcome::WorkerLost(loss) => &loss.cause,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_dying_worker_costs_the_task_it_was_at_and_no_other() {
    for (task, expected) in [("exit 3", Cause::Exited(3)), ("kill", Cause::Signalled(9))] {
        let mut tasks: Vec<String> = (0..200).map(|n| format!("echo {n}")).collect();
        tasks[100] = task.to_owned();
        let ran = run(odd(2), tasks);
        let lost = ran.count(|outcome| matches!(outcome, Outcome::WorkerLost(_)));
        assert_eq!(cause(ran.outcome(100)), &expected);
        assert_eq!(ran.overs.len(), 200);
        // Results it had and had not sent are heard all the same.
        assert_eq!(lost, 1, "{task}");
        let replaced: u64 = ran.stats.unwrap().workers.iter().map(|worker| worker.replaced).sum();
        assert_eq!(replaced, 1);
    }
}

#[test]
fn a_lost_task_is_tried_again_where_that_is_wanted() {
    let mut plan = odd(1);
    plan.rules.retries = 1;
    let ran = run(plan, ["exit 1", "echo fine"]);
    assert_eq!(ran.overs[&TaskId(0)].tries, 2);
    assert_eq!(ran.done(1), "fine");
    assert_eq!(ran.stats.unwrap().workers[0].replaced, 2);
}

#[test]
fn a_worker_that_talks_nonsense_is_killed_and_replaced() {
    for (task, says) in [("garbage", "4294967295"), ("lie", "18446744073709551615"), ("partial", ""), ("close", "")] {
        let ran = run(odd(1), ["echo before", task, "echo after"]);
        assert_eq!((ran.done(0), ran.done(2)), ("before".into(), "after".into()), "{task}");
        let cause = cause(ran.outcome(1)).to_string();
        assert!(cause.contains(says), "{task}: {cause}");
    }
}

#[test]
fn nothing_a_worker_started_outlives_it() {
    let ran = run(odd(1), ["pid", "spawn", "kill"]);
    let worker: u32 = ran.done(0).parse().unwrap();
    let groups = gpupool_confine::cgroup::Cgroups::detect().names().unwrap();
    let its_group = format!("worker-{worker}-");
    assert!(!groups.iter().any(|name| name.starts_with(&its_group)), "{groups:?}");
    let left = gpupool_confine::process::ProcFs::here().all().unwrap();
    assert!(!left.iter().any(|process| process.pid == worker));
    // What was started had no other reason to end.
    let ours = gpupool_confine::process::ProcFs::here().tree(std::process::id()).unwrap();
    for id in ours {
        let command = std::fs::read_to_string(format!("/proc/{}/cmdline", id.pid)).unwrap_or_default();
        assert!(!command.contains("sleep\x001000"), "{id} is left: {command:?}");
    }
}

#[test]
fn what_a_worker_whose_gpu_is_taken_away_was_at_is_done_by_another() {
    let mut dispatcher = Dispatcher::start(odd(1)).unwrap();
    let remote = dispatcher.remote();
    dispatcher.submit("sleep 100000".into()).unwrap();
    while remote.stats().workers[0].task.is_none() {
        if let Some(Event::Over(over)) = dispatcher.events_now().pop() {
            panic!("{over:?}");
        }
    }
    remote.withdraw(WorkerId(0), "revoked by ann");
    let mut place = Place::new(WorkerId(1));
    place.gpu_ids = vec![4];
    loop {
        match dispatcher.next_event() {
            Some(Event::Gone { worker: WorkerId(0), cause: Cause::Withdrawn(why), is_last: true, .. }) => {
                assert_eq!(&*why, "revoked by ann");
                break;
            }
            Some(Event::Over(over)) => panic!("{over:?}"),
            Some(_) => {}
            None => panic!("it ended"),
        }
    }
    remote.add(place);
    while remote.stats().workers.get(1).is_none_or(|worker| worker.task != Some(TaskId(0))) {
        drop(dispatcher.events_now());
    }
    remote.cancel();
    let mut cancelled = 0;
    while let Some(event) = dispatcher.next_event() {
        cancelled += usize::from(matches!(event, Event::Over(over) if over.outcome == Outcome::Cancelled));
    }
    assert_eq!(cancelled, 1);
}

#[test]
fn a_place_that_was_taken_away_can_come_back() {
    let mut dispatcher = Dispatcher::start(odd(1)).unwrap();
    let remote = dispatcher.remote();
    while !matches!(dispatcher.next_event(), Some(Event::Ready { .. })) {}
    remote.withdraw(WorkerId(0), "for a moment");
    while !matches!(dispatcher.next_event(), Some(Event::Gone { .. })) {}
    dispatcher.submit("worker".into()).unwrap();
    dispatcher.close();
    remote.add(Place::new(WorkerId(0)));
    let mut done = Vec::new();
    while let Some(event) = dispatcher.next_event() {
        if let Event::Over(over) = event {
            done.push(over.outcome);
        }
    }
    assert_eq!(done, [Outcome::Done("0".into())]);
}

#[test]
fn a_place_that_is_gone_when_its_worker_starts_can_be_given_anew() {
    let mut plan = odd(1);
    let gone = || NotAttached::PlaceGone("the lease was lost".into());
    plan.places[0].attach = Some(Arc::new(move |_| Err(gone())));
    let mut dispatcher = Dispatcher::start(plan).unwrap();
    dispatcher.submit("echo fine".into()).unwrap();
    dispatcher.close();
    match dispatcher.next_event() {
        Some(Event::Gone { cause: Cause::Withdrawn(why), .. }) => assert_eq!(&*why, "the lease was lost"),
        other => panic!("{other:?}"),
    }
    dispatcher.remote().add(Place::new(WorkerId(0)));
    assert_eq!(dispatcher.finish().unwrap().completed, 1);
}

#[test]
fn a_worker_nobody_can_be_told_of_now_is_started_a_little_later() {
    let mut plan = odd(1);
    let tries = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&tries);
    plan.places[0].attach = Some(Arc::new(move |pid| {
        assert!(pid > 1);
        match counted.fetch_add(1, Ordering::SeqCst) {
            0 | 1 => Err(NotAttached::NotNow("the agent is away".into())),
            _ => Ok(false),
        }
    }));
    assert_eq!(run(plan, ["echo fine"]).done(0), "fine");
    assert_eq!(tries.load(Ordering::SeqCst), 3);

    let mut never = odd(1);
    never.places[0].attach = Some(Arc::new(|_| Err(NotAttached::NotNow("the agent is away".into()))));
    let error = run(never, ["echo fine"]).stats.unwrap_err();
    assert!(error.to_string().contains("the agent is away"), "{error}");
}

//! Workers that die, hang, hog and lie at random, and runs that are ended at random: every task is told exactly once, and
//! nothing is left: no process, no thread, no file descriptor.
//!
//! `GPUPOOL_CHAOS_CLIENTS` (workers), `GPUPOOL_CHAOS_SECS` and `GPUPOOL_CHAOS_SEED` make it larger, longer, or the same again.
//! A test program of its own, because it counts what this process has.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../support/runs.rs"]
#[allow(dead_code, reason = "stories use more of it")]
mod common;
mod outside;
#[path = "../support/mod.rs"]
mod support;
mod traces;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use bytes::Bytes;
use gpupool_dispatch::{Dispatcher, RunError, RunEvent, RunPlan, TaskEnd, TaskId, TaskOutcome};
use gpupool_testkit::{ChaosRun, SeededRng};

use common::odd;
use outside::Outside;
use traces::Traces;

/// How a run ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// When all is over.
    Orderly,
    /// The source fails.
    SourceFails,
    /// Whoever hears the results panics.
    CallbackPanics,
    /// Somebody cancels.
    Cancelled,
    /// Somebody stops it, and workers may clean up.
    Stopped,
    /// Nothing new is wanted.
    FinishedSoon,
}

const ENDINGS: [Ending; 6] = [
    Ending::Orderly,
    Ending::SourceFails,
    Ending::CallbackPanics,
    Ending::Cancelled,
    Ending::Stopped,
    Ending::FinishedSoon,
];

#[test]
fn chaos_loses_no_task_and_leaves_nothing() {
    let chaos = ChaosRun::new("chaos", 8, 6);
    let workers = u32::try_from(chaos.clients).unwrap();
    let mut chance = SeededRng::new(chaos.seed);
    let until = Instant::now() + Duration::from_secs(chaos.secs);
    let tasks = if chaos.secs >= 60 { 20_000 } else { 2_000 };
    let (mut rounds, mut told) = (0, Told::default());
    // Each way to end at least once.
    while rounds < ENDINGS.len() || Instant::now() < until {
        let ending = ENDINGS.get(rounds).copied().unwrap_or_else(|| *chance.pick(&ENDINGS));
        told.add(&one_round(workers, tasks, ending, &mut chance));
        rounds += 1;
    }
    assert!(told.lost > 0 && told.timed_out > 0 && told.done > 0, "nothing ever happened: {told:?}");
    println!("{rounds} runs, {told:?}");
}

/// How many tasks ended how.
#[derive(Debug, Default)]
struct Told {
    done: usize,
    failed: usize,
    lost: usize,
    timed_out: usize,
    cancelled: usize,
}

impl Told {
    fn of(overs: &BTreeMap<TaskId, TaskEnd>) -> Self {
        let mut told = Self::default();
        for over in overs.values() {
            match over.outcome {
                TaskOutcome::Done(_) => told.done += 1,
                TaskOutcome::Failed(_) => told.failed += 1,
                TaskOutcome::WorkerLost(_) => told.lost += 1,
                TaskOutcome::TimedOut(_) => told.timed_out += 1,
                TaskOutcome::Cancelled => told.cancelled += 1,
            }
        }
        told
    }

    fn add(&mut self, other: &Self) {
        self.done += other.done;
        self.failed += other.failed;
        self.lost += other.lost;
        self.timed_out += other.timed_out;
        self.cancelled += other.cancelled;
    }
}

fn plan(workers: u32, chance: &mut SeededRng) -> RunPlan {
    let mut plan = odd(workers);
    plan.rules.task_timeout = Some(Duration::from_millis(400));
    plan.rules.grace = Duration::from_millis(100);
    plan.rules.retries = u32::try_from(chance.below(2)).unwrap();
    plan.rules.queue_size = usize::try_from(1 + chance.below(500)).unwrap();
    plan.setup_timeout = Some(Duration::from_secs(5));
    plan.clean_up_timeout = Duration::from_secs(1);
    plan.bounds.host_memory = Some(150 << 20);
    plan.bounds.processes = Some(60);
    plan
}

fn task(number: u64, chance: &mut SeededRng) -> String {
    const ODD: [&str; 13] = [
        "exit 3",
        "kill",
        "stop",
        "stuck",
        "hog 300",
        "forks 100",
        "garbage",
        "partial",
        "lie",
        "close",
        "spawn",
        "sleep 1000",
        "fail because",
    ];
    if chance.below(200) == 0 { (*chance.pick(&ODD)).to_owned() } else { format!("echo {number}") }
}

fn one_round(workers: u32, tasks: u64, ending: Ending, chance: &mut SeededRng) -> Told {
    let before = Traces::now();
    let plan = plan(workers, chance);
    let mut given = Vec::new();
    let fails_at = chance.below(tasks);
    let mut for_tasks = chance.fork();
    let source = (0..tasks).map(|number| {
        if ending == Ending::SourceFails && number == fails_at {
            return Err("the source's own");
        }
        let task = task(number, &mut for_tasks);
        given.push(task.clone());
        Ok(Bytes::from(task))
    });
    let dispatcher = Dispatcher::start(plan).unwrap();
    let remote = dispatcher.handle();
    let outside = Outside::start(remote.clone(), chance.fork());
    let ends_at = usize::try_from(chance.below(tasks)).unwrap();
    let mut overs: BTreeMap<TaskId, TaskEnd> = BTreeMap::new();
    let run = || {
        dispatcher.run(source, |event| {
            let RunEvent::TaskEnded(over) = event else { return };
            let twice = overs.insert(over.task, over);
            assert!(twice.is_none(), "told twice: {twice:?}");
            if overs.len() == ends_at + 1 {
                match ending {
                    Ending::CallbackPanics => std::panic::resume_unwind(Box::new("the callback's own")),
                    Ending::Cancelled => remote.cancel(),
                    Ending::Stopped => remote.stop(),
                    Ending::FinishedSoon => remote.cancel_pending(),
                    Ending::Orderly | Ending::SourceFails => {}
                }
            }
        })
    };
    let ended = catch_unwind(AssertUnwindSafe(run));
    outside.end();
    drop(remote);
    match (ending, ended) {
        (Ending::CallbackPanics, Err(panic)) => {
            assert_eq!(panic.downcast_ref::<&str>(), Some(&"the callback's own"));
        }
        (_, Err(panic)) => std::panic::resume_unwind(panic),
        (Ending::SourceFails, Ok(outcome)) => {
            assert!(matches!(outcome, Err(RunError::Source("the source's own"))), "{outcome:?}");
        }
        (_, Ok(outcome)) => drop(outcome.unwrap()),
    }
    if ending != Ending::CallbackPanics {
        assert_eq!(overs.len(), given.len(), "{ending:?}: some task was never told to be over");
    }
    for (task, over) in &overs {
        check(&given[usize::try_from(task.0).unwrap()], over);
    }
    before.check_nothing_is_left();
    Told::of(&overs)
}

/// What came of a task can have come of it.
fn check(task: &str, over: &TaskEnd) {
    match (&over.outcome, task.split_once(' ')) {
        (TaskOutcome::Done(result), Some(("echo", text))) => {
            assert_eq!(result, text.as_bytes(), "another task's result")
        }
        (TaskOutcome::Failed(why), Some(("fail", text))) => assert_eq!(why, text.as_bytes()),
        // Where it already has as many processes as it may.
        (TaskOutcome::Failed(_), _) if task == "spawn" => {}
        (TaskOutcome::Failed(why), _) => panic!("{task} failed: {why:?}"),
        (TaskOutcome::Done(_), _) => {
            assert!(
                ["forks", "spawn", "hog", "stop", "sleep", "garbage", "lie"].iter().any(|odd| task.starts_with(odd)),
                "{task} was done"
            );
        }
        (TaskOutcome::WorkerLost(_) | TaskOutcome::TimedOut(_) | TaskOutcome::Cancelled, _) => {}
    }
}

//! Workers die, hang, hog memory and send invalid frames at random, and runs are ended at random: every task ends
//! exactly once, and no process, thread or file descriptor is left.
//!
//! `GPUPOOL_CHAOS_CLIENTS` (workers), `GPUPOOL_CHAOS_SECS` and `GPUPOOL_CHAOS_SEED` set size, duration and seed. A
//! separate test program, because it counts the resources of its process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../support/runs.rs"]
#[allow(dead_code, reason = "the other tests use more of it")]
mod common;
mod process_killer;
mod resource_snapshot;
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use bytes::Bytes;
use gpupool_dispatch::{Dispatcher, RunError, RunEvent, RunPlan, TaskEnd, TaskId, TaskOutcome};
use gpupool_testkit::{ChaosRun, SeededRng};

use common::odd_worker_plan;
use process_killer::ProcessKiller;
use resource_snapshot::ResourceSnapshot;

/// The way a run ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RunEnding {
    /// All tasks end.
    Orderly,
    /// The source fails.
    SourceFails,
    /// The event callback panics.
    CallbackPanics,
    /// The run is cancelled.
    Cancelled,
    /// The run is stopped, and workers may clean up.
    Stopped,
    /// Pending tasks are cancelled.
    FinishedSoon,
}

const ENDINGS: [RunEnding; 6] = [
    RunEnding::Orderly,
    RunEnding::SourceFails,
    RunEnding::CallbackPanics,
    RunEnding::Cancelled,
    RunEnding::Stopped,
    RunEnding::FinishedSoon,
];

#[test]
fn chaos_loses_no_task_and_leaves_nothing() {
    let chaos = ChaosRun::new("chaos", 8, 6);
    let workers = u32::try_from(chaos.clients).unwrap();
    let mut random = SeededRng::new(chaos.seed);
    let until = Instant::now() + Duration::from_secs(chaos.secs);
    let tasks = if chaos.secs >= 60 { 20_000 } else { 2_000 };
    let (mut rounds, mut counts) = (0, OutcomeCounts::default());
    // Each ending at least once.
    while rounds < ENDINGS.len() || Instant::now() < until {
        let ending = ENDINGS.get(rounds).copied().unwrap_or_else(|| *random.pick(&ENDINGS));
        counts.add(&run_round(workers, tasks, ending, &mut random));
        rounds += 1;
    }
    assert!(
        counts.lost > 0 && counts.timed_out > 0 && counts.done > 0,
        "the run had no deaths or timeouts: {counts:?}"
    );
    println!("{rounds} runs, {counts:?}");
}

/// Counts of tasks by outcome.
#[derive(Debug, Default)]
struct OutcomeCounts {
    done: usize,
    failed: usize,
    lost: usize,
    timed_out: usize,
    cancelled: usize,
}

impl OutcomeCounts {
    fn of(ends: &BTreeMap<TaskId, TaskEnd>) -> Self {
        let mut counts = Self::default();
        for end in ends.values() {
            match end.outcome {
                TaskOutcome::Done(_) => counts.done += 1,
                TaskOutcome::Failed(_) => counts.failed += 1,
                TaskOutcome::WorkerLost(_) => counts.lost += 1,
                TaskOutcome::TimedOut(_) => counts.timed_out += 1,
                TaskOutcome::Cancelled => counts.cancelled += 1,
            }
        }
        counts
    }

    fn add(&mut self, other: &Self) {
        self.done += other.done;
        self.failed += other.failed;
        self.lost += other.lost;
        self.timed_out += other.timed_out;
        self.cancelled += other.cancelled;
    }
}

fn plan(workers: u32, random: &mut SeededRng) -> RunPlan {
    let mut plan = odd_worker_plan(workers);
    plan.rules.task_timeout = Some(Duration::from_millis(400));
    plan.rules.grace = Duration::from_millis(100);
    plan.rules.retries = u32::try_from(random.below(2)).unwrap();
    plan.rules.queue_size = usize::try_from(1 + random.below(500)).unwrap();
    plan.setup_timeout = Some(Duration::from_secs(5));
    plan.clean_up_timeout = Duration::from_secs(1);
    plan.bounds.host_memory = Some(150 << 20);
    plan.bounds.processes = Some(60);
    plan
}

fn task(number: u64, random: &mut SeededRng) -> String {
    const ODD_TASKS: [&str; 13] = [
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
    if random.below(200) == 0 { (*random.pick(&ODD_TASKS)).to_owned() } else { format!("echo {number}") }
}

fn run_round(workers: u32, tasks: u64, ending: RunEnding, random: &mut SeededRng) -> OutcomeCounts {
    let before = ResourceSnapshot::now();
    let plan = plan(workers, random);
    let mut submitted = Vec::new();
    let fails_at = random.below(tasks);
    let mut task_random = random.fork();
    let source = (0..tasks).map(|number| {
        if ending == RunEnding::SourceFails && number == fails_at {
            return Err("error of the source");
        }
        let task = task(number, &mut task_random);
        submitted.push(task.clone());
        Ok(Bytes::from(task))
    });
    let dispatcher = Dispatcher::start(plan).unwrap();
    let handle = dispatcher.handle();
    let killer = ProcessKiller::start(handle.clone(), random.fork());
    let ends_at = usize::try_from(random.below(tasks)).unwrap();
    let mut ends: BTreeMap<TaskId, TaskEnd> = BTreeMap::new();
    let run = || {
        dispatcher.run(source, |event| {
            let RunEvent::TaskEnded(end) = event else { return };
            let twice = ends.insert(end.task, end);
            assert!(twice.is_none(), "ended twice: {twice:?}");
            if ends.len() == ends_at + 1 {
                match ending {
                    RunEnding::CallbackPanics => std::panic::resume_unwind(Box::new("panic of the callback")),
                    RunEnding::Cancelled => handle.cancel(),
                    RunEnding::Stopped => handle.stop(),
                    RunEnding::FinishedSoon => handle.cancel_pending(),
                    RunEnding::Orderly | RunEnding::SourceFails => {}
                }
            }
        })
    };
    let ended = catch_unwind(AssertUnwindSafe(run));
    killer.end();
    drop(handle);
    match (ending, ended) {
        (RunEnding::CallbackPanics, Err(panic)) => {
            assert_eq!(panic.downcast_ref::<&str>(), Some(&"panic of the callback"));
        }
        (_, Err(panic)) => std::panic::resume_unwind(panic),
        (RunEnding::SourceFails, Ok(outcome)) => {
            assert!(matches!(outcome, Err(RunError::Source("error of the source"))), "{outcome:?}");
        }
        (_, Ok(outcome)) => drop(outcome.unwrap()),
    }
    if ending != RunEnding::CallbackPanics {
        assert_eq!(ends.len(), submitted.len(), "{ending:?}: some task was never told to be over");
    }
    for (task, end) in &ends {
        check_outcome(&submitted[usize::try_from(task.0).unwrap()], end);
    }
    before.assert_nothing_left();
    OutcomeCounts::of(&ends)
}

/// Checks that the outcome is possible for the task.
fn check_outcome(task: &str, end: &TaskEnd) {
    match (&end.outcome, task.split_once(' ')) {
        (TaskOutcome::Done(result), Some(("echo", text))) => {
            assert_eq!(result, text.as_bytes(), "another task's result")
        }
        (TaskOutcome::Failed(why), Some(("fail", text))) => assert_eq!(why, text.as_bytes()),
        // At its limit of processes.
        (TaskOutcome::Failed(_), _) if task == "spawn" => {}
        (TaskOutcome::Failed(why), _) => panic!("{task} failed: {why:?}"),
        (TaskOutcome::Done(_), _) => {
            assert!(
                ["forks", "spawn", "hog", "stop", "sleep", "garbage", "lie"]
                    .iter()
                    .any(|odd_worker_plan| task.starts_with(odd_worker_plan)),
                "{task} was done"
            );
        }
        (TaskOutcome::WorkerLost(_) | TaskOutcome::TimedOut(_) | TaskOutcome::Cancelled, _) => {}
    }
}

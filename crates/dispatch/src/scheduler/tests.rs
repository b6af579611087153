use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::limits::RECALL_AFTER;

const W: WorkerId = WorkerId(0);

fn rules() -> DispatchRules {
    DispatchRules { queue_size: 8, task_timeout: None, grace: Duration::from_secs(1), retries: 0, prefetch: true }
}

fn with_assigned(rules: DispatchRules, tasks: usize, counts: bool) -> (TaskScheduler, Vec<SchedulerEffect>, Instant) {
    let now = Instant::now();
    let mut scheduler = TaskScheduler::new(rules);
    (0..tasks).for_each(|_| {
        scheduler.accept_task();
    });
    scheduler.add_worker(W, if counts { WorkerCapability::Recallable } else { WorkerCapability::OneTask }, now);
    let mut effects = Vec::new();
    scheduler.assign_tasks(now, &mut effects);
    (scheduler, effects, now)
}

fn done() -> TaskOutcome {
    TaskOutcome::Done(Bytes::new())
}

fn sample(started: u64, finished: u64, started_at: Instant, now: Instant) -> WorkerSample {
    WorkerSample { worker: W, counted: counted(started, finished), started: Some(started_at), now }
}

fn ended(task: u64, outcome: TaskOutcome, started: Option<Instant>) -> SchedulerEffect {
    SchedulerEffect::TaskEnded { task: TaskId(task), worker: Some(W), outcome, started, tries: 1 }
}

fn counted(started: u64, finished: u64) -> TaskCounts {
    TaskCounts { started, finished, started_at_ns: 0 }
}

#[test]
fn a_worker_starts_with_one_task_and_gets_more_as_it_proves_fast() {
    let (mut scheduler, effects, now) = with_assigned(rules(), 8, true);
    assert_eq!(effects, [SchedulerEffect::Send { worker: W, tasks: vec![TaskId(0)] }]);
    let mut effects = Vec::new();
    scheduler.record_result(W, TaskId(0), done(), now, &mut effects).unwrap();
    scheduler.assign_tasks(now, &mut effects);
    assert_eq!(effects[0], ended(0, done(), Some(now)));
    assert_eq!(effects[1], SchedulerEffect::Send { worker: W, tasks: vec![TaskId(1), TaskId(2)] });
}

#[test]
fn unstarted_tasks_of_a_dead_worker_are_requeued_and_started_ones_end() {
    let (mut scheduler, mut effects, now) = with_assigned(rules(), 8, true);
    scheduler.record_result(W, TaskId(0), done(), now, &mut effects).unwrap();
    scheduler.assign_tasks(now, &mut effects);
    scheduler.record_result(W, TaskId(1), done(), now, &mut effects).unwrap();
    scheduler.assign_tasks(now, &mut effects);
    // The worker has tasks 2 to 5: finished 2 without reporting it, and runs 3.
    effects.clear();
    scheduler.remove_worker(W, counted(4, 3), &WorkerExitCause::Signalled(9), &mut effects);
    let lost = |stage| TaskOutcome::WorkerLost(WorkerLoss { stage, cause: WorkerExitCause::Signalled(9) });
    assert_eq!(effects, [ended(2, lost(LossStage::ResultLost), Some(now)), ended(3, lost(LossStage::Running), None)]);
    assert_eq!(scheduler.pending, [4, 5, 6, 7].map(TaskId));
    assert_eq!(scheduler.task_counts(), (4, 0, 4));
}

#[test]
fn a_worker_without_counters_has_one_task_at_a_time_and_loses_only_that() {
    let (mut scheduler, mut effects, now) = with_assigned(rules(), 3, false);
    scheduler.record_result(W, TaskId(0), done(), now, &mut effects).unwrap();
    scheduler.assign_tasks(now, &mut effects);
    assert_eq!(effects.last(), Some(&SchedulerEffect::Send { worker: W, tasks: vec![TaskId(1)] }));
    effects.clear();
    scheduler.remove_worker(W, TaskCounts::default(), &WorkerExitCause::Exited(1), &mut effects);
    assert!(matches!(effects[..], [SchedulerEffect::TaskEnded { task: TaskId(1), .. }]));
}

#[test]
fn a_failed_task_is_retried_up_to_the_limit() {
    let (mut scheduler, mut effects, now) = with_assigned(DispatchRules { retries: 2, ..rules() }, 1, true);
    for _ in 0..2 {
        effects.clear();
        scheduler.record_result(W, TaskId(0), TaskOutcome::Failed(Bytes::new()), now, &mut effects).unwrap();
        scheduler.assign_tasks(now, &mut effects);
        assert!(matches!(effects[0], SchedulerEffect::TaskRetried { task: TaskId(0), worker: W, .. }));
        assert_eq!(effects[1], SchedulerEffect::Send { worker: W, tasks: vec![TaskId(0)] });
    }
    effects.clear();
    scheduler.record_result(W, TaskId(0), TaskOutcome::Failed(Bytes::new()), now, &mut effects).unwrap();
    assert!(matches!(effects[..], [SchedulerEffect::TaskEnded { outcome: TaskOutcome::Failed(_), tries: 3, .. }]));
    scheduler.close();
    assert!(scheduler.is_done());
}

#[test]
fn a_late_task_is_interrupted_then_killed_and_times_out_once() {
    let limit = Duration::from_secs(5);
    let (mut scheduler, _, now) = with_assigned(DispatchRules { task_timeout: Some(limit), ..rules() }, 1, true);
    let mut effects = Vec::new();
    let check_worker = |scheduler: &mut TaskScheduler, at, effects: &mut Vec<SchedulerEffect>| {
        scheduler.check_worker(sample(1, 0, now, at), effects)
    };
    assert_eq!(check_worker(&mut scheduler, now, &mut effects), Some(now + limit));
    assert_eq!(check_worker(&mut scheduler, now + limit, &mut effects), Some(now + limit + rules().grace));
    assert_eq!(effects, [SchedulerEffect::Interrupt { worker: W, started: 1 }]);
    check_worker(&mut scheduler, now + limit + rules().grace, &mut effects);
    assert_eq!(effects.last(), Some(&SchedulerEffect::Kill { worker: W }));
    effects.clear();
    scheduler.remove_worker(W, counted(1, 0), &WorkerExitCause::IgnoredInterrupt, &mut effects);
    assert_eq!(effects, [ended(0, TaskOutcome::TimedOut(limit), Some(now))]);
}

#[test]
fn an_interrupted_worker_that_replies_lives_on() {
    let limit = Duration::from_secs(5);
    let (mut scheduler, mut effects, now) =
        with_assigned(DispatchRules { task_timeout: Some(limit), ..rules() }, 2, true);
    scheduler.check_worker(sample(1, 0, now, now + limit), &mut effects);
    effects.clear();
    scheduler
        .record_result(W, TaskId(0), TaskOutcome::Failed("KeyboardInterrupt".into()), now + limit, &mut effects)
        .unwrap();
    scheduler.assign_tasks(now, &mut effects);
    assert_eq!(effects[0], ended(0, TaskOutcome::TimedOut(limit), Some(now)));
    assert_eq!(effects[1], SchedulerEffect::Send { worker: W, tasks: vec![TaskId(1)] });
}

#[test]
fn the_task_of_a_withdrawn_worker_is_requeued() {
    let (mut scheduler, mut effects, _) = with_assigned(rules(), 2, true);
    effects.clear();
    scheduler.remove_worker(W, counted(1, 0), &WorkerExitCause::GpuWithdrawn("revoked".into()), &mut effects);
    assert_eq!(effects, []);
    assert_eq!(scheduler.pending, [0, 1].map(TaskId));
}

#[test]
fn tasks_behind_a_long_task_are_recalled_and_run_next() {
    let (mut scheduler, mut effects, mut now) = with_assigned(rules(), 6, true);
    // Fast tasks first, so that the worker gets several at once.
    for number in 0..3 {
        now += Duration::from_micros(10);
        scheduler.record_result(W, TaskId(number), done(), now, &mut effects).unwrap();
        scheduler.assign_tasks(now, &mut effects);
    }
    assert!(scheduler.has_blocked_tasks(W));
    effects.clear();
    let again = scheduler.check_worker(sample(4, 3, now, now + Duration::from_millis(1)), &mut effects);
    assert_eq!((again, effects.as_slice()), (Some(now + RECALL_AFTER), &[][..]));
    assert_eq!(scheduler.check_worker(sample(4, 3, now, now + RECALL_AFTER), &mut effects), None);
    assert_eq!(effects, [SchedulerEffect::Recall { worker: W }]);
    effects.clear();
    scheduler.take_back_unclaimed(W, 4, &mut effects);
    // Another worker gets them in order, and nothing more is queued behind the long task.
    scheduler.add_worker(WorkerId(1), WorkerCapability::Recallable, now);
    scheduler.assign_tasks(now, &mut effects);
    assert_eq!(effects, [SchedulerEffect::Send { worker: WorkerId(1), tasks: vec![TaskId(4)] }]);
}

#[test]
fn an_invalid_result_is_rejected_with_its_reason() {
    let (mut scheduler, _, now) = with_assigned(rules(), 1, true);
    let unexpected = scheduler.record_result(W, TaskId(9), done(), now, &mut Vec::new()).unwrap_err();
    assert_eq!(unexpected.to_string(), "worker 0 sent a result of task 9; expected 0");
    let not_ready = scheduler.record_result(WorkerId(7), TaskId(0), done(), now, &mut Vec::new()).unwrap_err();
    assert_eq!(not_ready.to_string(), "worker 7 is not ready for tasks");
}

/// Simulated worker with its tasks and progress.
#[derive(Debug, Default, Clone)]
struct SimulatedWorker {
    tasks: VecDeque<TaskId>,
    started: u64,
    finished: u64,
    /// Finished tasks whose results are not reported.
    unreported: VecDeque<TaskId>,
}

#[derive(Debug, Clone)]
enum SchedulerStep {
    AcceptTasks(usize),
    Work(u8, u8),
    ReportResults(u8),
    Die(u8),
    Withdraw(u8),
    AddWorker(u8),
    Wait(u16),
    Cancel,
    CancelPending,
}

fn step() -> impl Strategy<Value = SchedulerStep> {
    prop_oneof![
        4 => (1_usize..6).prop_map(SchedulerStep::AcceptTasks),
        8 => (0_u8..3, 1_u8..4).prop_map(|(worker, times)| SchedulerStep::Work(worker, times)),
        8 => (0_u8..3).prop_map(SchedulerStep::ReportResults),
        2 => (0_u8..3).prop_map(SchedulerStep::Die),
        1 => (0_u8..3).prop_map(SchedulerStep::Withdraw),
        3 => (0_u8..3).prop_map(SchedulerStep::AddWorker),
        4 => (0_u16..3_000).prop_map(SchedulerStep::Wait),
        1 => prop::sample::select(vec![SchedulerStep::Cancel, SchedulerStep::CancelPending]),
    ]
}

proptest! {
    #[test]
    fn every_task_ends_exactly_once(
        steps in prop::collection::vec(step(), 0..200),
        retries in 0_u32..3,
        has_timeout in any::<bool>(),
    ) {
        let task_timeout = has_timeout.then_some(Duration::from_secs(2));
        let mut simulation = SchedulerSimulation::new(DispatchRules { retries, task_timeout, ..rules() });
        for step in steps {
            simulation.step(step);
        }
        simulation.finish();
    }
}

struct SchedulerSimulation {
    scheduler: TaskScheduler,
    now: Instant,
    workers: BTreeMap<WorkerId, SimulatedWorker>,
    ended: BTreeMap<TaskId, u32>,
    killed: Vec<WorkerId>,
}

impl SchedulerSimulation {
    fn new(rules: DispatchRules) -> Self {
        let (workers, ended) = (BTreeMap::new(), BTreeMap::new());
        Self { scheduler: TaskScheduler::new(rules), now: Instant::now(), workers, ended, killed: Vec::new() }
    }

    /// Returns how many more tasks can be accepted now.
    fn room(&self) -> usize {
        if self.scheduler.is_open() {
            self.scheduler.rules.queue_size.saturating_sub(self.scheduler.waiting_count())
        } else {
            0
        }
    }

    fn step(&mut self, step: SchedulerStep) {
        let mut effects = Vec::new();
        match step {
            SchedulerStep::AcceptTasks(count) => {
                for _ in 0..count.min(self.room()) {
                    self.scheduler.accept_task();
                }
            }
            SchedulerStep::Work(worker, times) => {
                if let Some(simulated) = self.workers.get_mut(&WorkerId(worker.into())) {
                    for _ in 0..times {
                        simulated.work();
                    }
                }
            }
            SchedulerStep::ReportResults(worker) => self.report_results(WorkerId(worker.into()), &mut effects),
            SchedulerStep::Die(worker) => {
                self.remove_simulated(WorkerId(worker.into()), WorkerExitCause::Signalled(9), &mut effects)
            }
            SchedulerStep::Withdraw(worker) => {
                self.remove_simulated(WorkerId(worker.into()), WorkerExitCause::GpuWithdrawn("".into()), &mut effects)
            }
            SchedulerStep::CancelPending => self.scheduler.cancel_pending(&mut effects),
            SchedulerStep::AddWorker(worker) => {
                let worker = WorkerId(worker.into());
                if let std::collections::btree_map::Entry::Vacant(free) = self.workers.entry(worker) {
                    free.insert(SimulatedWorker::default());
                    self.scheduler.add_worker(
                        worker,
                        [WorkerCapability::Recallable, WorkerCapability::Counting][worker.0 as usize % 2],
                        self.now,
                    );
                }
            }
            SchedulerStep::Wait(millis) => self.advance_time(Duration::from_millis(millis.into()), &mut effects),
            SchedulerStep::Cancel => self.scheduler.cancel_all(&mut effects),
        }
        self.scheduler.assign_tasks(self.now, &mut effects);
        self.apply_effects(effects);
    }

    fn report_results(&mut self, worker: WorkerId, effects: &mut Vec<SchedulerEffect>) {
        let Some(simulated) = self.workers.get_mut(&worker) else { return };
        while let Some(task) = simulated.unreported.pop_front() {
            let outcome = if task.0 % 5 == 0 { TaskOutcome::Failed(Bytes::new()) } else { done() };
            self.scheduler.record_result(worker, task, outcome, self.now, effects).unwrap();
        }
    }

    fn remove_simulated(&mut self, worker: WorkerId, cause: WorkerExitCause, effects: &mut Vec<SchedulerEffect>) {
        if let Some(simulated) = self.workers.remove(&worker) {
            self.scheduler.remove_worker(worker, counted(simulated.started, simulated.finished), &cause, effects);
        }
    }

    fn advance_time(&mut self, time: Duration, effects: &mut Vec<SchedulerEffect>) {
        self.now += time;
        for (worker, simulated) in self.workers.clone() {
            let counted = counted(simulated.started, simulated.finished);
            self.scheduler.check_worker(WorkerSample { worker, counted, started: None, now: self.now }, effects);
        }
    }

    fn apply_effects(&mut self, effects: Vec<SchedulerEffect>) {
        for effect in effects {
            match effect {
                SchedulerEffect::Send { worker, tasks } => self.workers.get_mut(&worker).unwrap().tasks.extend(tasks),
                SchedulerEffect::TaskEnded { task, .. } => *self.ended.entry(task).or_default() += 1,
                SchedulerEffect::Interrupt { .. } | SchedulerEffect::TaskRetried { .. } => {}
                SchedulerEffect::Recall { worker } => {
                    let simulated = self.workers.get_mut(&worker).unwrap();
                    // A worker may have claimed a task that it has not started yet.
                    let claims = simulated.started
                        + u64::from(simulated.started == simulated.finished && !simulated.tasks.is_empty());
                    let keeps = usize::try_from(claims - simulated.finished).unwrap();
                    simulated.tasks.truncate(keeps);
                    let mut more = Vec::new();
                    self.scheduler.take_back_unclaimed(worker, claims, &mut more);
                    self.apply_effects(more);
                }
                SchedulerEffect::Kill { worker } => self.killed.push(worker),
            }
        }
        assert!(self.ended.values().all(|times| *times == 1), "ended twice: {:?}", self.ended);
        let mut effects = Vec::new();
        for worker in std::mem::take(&mut self.killed) {
            self.remove_simulated(worker, WorkerExitCause::IgnoredInterrupt, &mut effects);
        }
        if !effects.is_empty() {
            self.apply_effects(effects);
        }
    }

    /// Lets all workers run until no task is left.
    fn finish(&mut self) {
        self.scheduler.close();
        for _ in 0..2_000 {
            if self.scheduler.is_done() {
                break;
            }
            (0..3).for_each(|worker| self.step(SchedulerStep::AddWorker(worker)));
            (0..3).for_each(|worker| self.step(SchedulerStep::Work(worker, 3)));
            (0..3).for_each(|worker| self.step(SchedulerStep::ReportResults(worker)));
        }
        assert!(self.scheduler.is_done(), "{:?}", self.scheduler);
        assert_eq!(self.ended.len() as u64, self.scheduler.accepted);
    }
}

impl SimulatedWorker {
    /// Starts the next task, or finishes the current one.
    fn work(&mut self) {
        if self.started > self.finished {
            self.finished += 1;
            self.unreported.extend(self.tasks.pop_front());
        } else if !self.tasks.is_empty() {
            self.started += 1;
        }
    }
}

fn pace(times: &[Duration]) -> WorkerPace {
    let mut pace = WorkerPace::default();
    times.iter().for_each(|duration| pace.record_duration(*duration));
    pace
}

#[test]
fn short_tasks_are_prefetched_and_long_ones_are_not() {
    assert_eq!(WorkerPace::default().queue_depth(None, 4), 1);
    assert_eq!(pace(&[Duration::from_nanos(500); 20]).queue_depth(None, 4), MAX_WORKER_QUEUE);
    assert_eq!(pace(&[Duration::from_micros(100); 20]).queue_depth(None, 4), 80);
    assert_eq!(pace(&[Duration::from_secs(1); 20]).queue_depth(None, 4), 1);
    let mut turned = [Duration::from_micros(1); 21];
    turned[20] = Duration::from_millis(50);
    assert_eq!(pace(&turned).queue_depth(None, 4), 1, "one long task suffices");
}

#[test]
fn the_last_tasks_are_spread_over_the_workers() {
    let fast = pace(&[Duration::from_nanos(500); 20]);
    assert_eq!(fast.queue_depth(Some(80), 4), 10);
    assert_eq!(fast.queue_depth(Some(7), 4), 1);
}

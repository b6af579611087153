use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::limits::RECALL_AFTER;

const W: WorkerId = WorkerId(0);

fn rules() -> DispatchRules {
    DispatchRules { queue_size: 8, task_timeout: None, grace: Duration::from_secs(1), retries: 0, prefetch: true }
}

fn fed(rules: DispatchRules, tasks: usize, counts: bool) -> (Ledger, Vec<Effect>, Instant) {
    let now = Instant::now();
    let mut ledger = Ledger::new(rules);
    (0..tasks).for_each(|_| {
        ledger.take_in();
    });
    ledger.ready(W, if counts { Skill::Recalls } else { Skill::None }, now);
    let mut effects = Vec::new();
    ledger.feed(now, &mut effects);
    (ledger, effects, now)
}

fn done() -> TaskOutcome {
    TaskOutcome::Done(Bytes::new())
}

fn seen(started: u64, finished: u64, begun: Instant, now: Instant) -> Seen {
    Seen { worker: W, counted: counted(started, finished), begun: Some(begun), now }
}

fn over(task: u64, outcome: TaskOutcome, begun: Option<Instant>) -> Effect {
    Effect::Over { task: TaskId(task), worker: Some(W), outcome, begun, tries: 1 }
}

fn counted(started: u64, finished: u64) -> Counted {
    Counted { started, finished, started_at_ns: 0 }
}

#[test]
fn a_worker_starts_with_one_task_and_gets_more_as_it_proves_fast() {
    let (mut ledger, effects, now) = fed(rules(), 8, true);
    assert_eq!(effects, [Effect::Send { worker: W, tasks: vec![TaskId(0)] }]);
    let mut effects = Vec::new();
    ledger.answered(W, TaskId(0), done(), now, &mut effects).unwrap();
    ledger.feed(now, &mut effects);
    assert_eq!(effects[0], over(0, done(), Some(now)));
    assert_eq!(effects[1], Effect::Send { worker: W, tasks: vec![TaskId(1), TaskId(2)] });
}

#[test]
fn what_a_dead_worker_never_began_goes_on_and_what_it_had_begun_is_told() {
    let (mut ledger, mut effects, now) = fed(rules(), 8, true);
    ledger.answered(W, TaskId(0), done(), now, &mut effects).unwrap();
    ledger.feed(now, &mut effects);
    ledger.answered(W, TaskId(1), done(), now, &mut effects).unwrap();
    ledger.feed(now, &mut effects);
    // It has 2, 3, 4, 5: finished 2 without telling, was at 3.
    effects.clear();
    ledger.gone(W, counted(4, 3), &WorkerExitCause::Signalled(9), &mut effects);
    let lost = |stage| TaskOutcome::WorkerLost(WorkerLoss { stage, cause: WorkerExitCause::Signalled(9) });
    assert_eq!(effects, [over(2, lost(LossStage::ResultLost), Some(now)), over(3, lost(LossStage::Running), None)]);
    assert_eq!(ledger.pending, [4, 5, 6, 7].map(TaskId));
    assert_eq!(ledger.counts(), (4, 0, 4));
}

#[test]
fn a_worker_that_does_not_count_has_one_task_at_a_time_and_loses_only_that() {
    let (mut ledger, mut effects, now) = fed(rules(), 3, false);
    ledger.answered(W, TaskId(0), done(), now, &mut effects).unwrap();
    ledger.feed(now, &mut effects);
    assert_eq!(effects.last(), Some(&Effect::Send { worker: W, tasks: vec![TaskId(1)] }));
    effects.clear();
    ledger.gone(W, Counted::default(), &WorkerExitCause::Exited(1), &mut effects);
    assert!(matches!(effects[..], [Effect::Over { task: TaskId(1), .. }]));
}

#[test]
fn a_task_that_fails_is_tried_again_as_often_as_it_may() {
    let (mut ledger, mut effects, now) = fed(DispatchRules { retries: 2, ..rules() }, 1, true);
    for _ in 0..2 {
        effects.clear();
        ledger.answered(W, TaskId(0), TaskOutcome::Failed(Bytes::new()), now, &mut effects).unwrap();
        ledger.feed(now, &mut effects);
        assert!(matches!(effects[0], Effect::Retried { task: TaskId(0), worker: W, .. }));
        assert_eq!(effects[1], Effect::Send { worker: W, tasks: vec![TaskId(0)] });
    }
    effects.clear();
    ledger.answered(W, TaskId(0), TaskOutcome::Failed(Bytes::new()), now, &mut effects).unwrap();
    assert!(matches!(effects[..], [Effect::Over { outcome: TaskOutcome::Failed(_), tries: 3, .. }]));
    ledger.close();
    assert!(ledger.is_done());
}

#[test]
fn what_takes_too_long_is_interrupted_then_killed_and_timed_out_once() {
    let limit = Duration::from_secs(5);
    let (mut ledger, _, now) = fed(DispatchRules { task_timeout: Some(limit), ..rules() }, 1, true);
    let mut effects = Vec::new();
    let look = |ledger: &mut Ledger, at, effects: &mut Vec<Effect>| ledger.look(seen(1, 0, now, at), effects);
    assert_eq!(look(&mut ledger, now, &mut effects), Some(now + limit));
    assert_eq!(look(&mut ledger, now + limit, &mut effects), Some(now + limit + rules().grace));
    assert_eq!(effects, [Effect::Interrupt { worker: W, begun: 1 }]);
    look(&mut ledger, now + limit + rules().grace, &mut effects);
    assert_eq!(effects.last(), Some(&Effect::Kill { worker: W }));
    effects.clear();
    ledger.gone(W, counted(1, 0), &WorkerExitCause::IgnoredInterrupt, &mut effects);
    assert_eq!(effects, [over(0, TaskOutcome::TimedOut(limit), Some(now))]);
}

#[test]
fn an_interrupted_worker_that_answers_lives_on() {
    let limit = Duration::from_secs(5);
    let (mut ledger, mut effects, now) = fed(DispatchRules { task_timeout: Some(limit), ..rules() }, 2, true);
    ledger.look(seen(1, 0, now, now + limit), &mut effects);
    effects.clear();
    ledger.answered(W, TaskId(0), TaskOutcome::Failed("KeyboardInterrupt".into()), now + limit, &mut effects).unwrap();
    ledger.feed(now, &mut effects);
    assert_eq!(effects[0], over(0, TaskOutcome::TimedOut(limit), Some(now)));
    assert_eq!(effects[1], Effect::Send { worker: W, tasks: vec![TaskId(1)] });
}

#[test]
fn what_a_withdrawn_worker_was_at_is_done_by_another() {
    let (mut ledger, mut effects, _) = fed(rules(), 2, true);
    effects.clear();
    ledger.gone(W, counted(1, 0), &WorkerExitCause::GpuWithdrawn("revoked".into()), &mut effects);
    assert_eq!(effects, []);
    assert_eq!(ledger.pending, [0, 1].map(TaskId));
}

#[test]
fn what_waits_behind_a_long_task_is_taken_back_and_done_next() {
    let (mut ledger, mut effects, mut now) = fed(rules(), 6, true);
    // Quick ones at first: it is given several at once.
    for number in 0..3 {
        now += Duration::from_micros(10);
        ledger.answered(W, TaskId(number), done(), now, &mut effects).unwrap();
        ledger.feed(now, &mut effects);
    }
    assert!(ledger.has_behind(W));
    effects.clear();
    let again = ledger.look(seen(4, 3, now, now + Duration::from_millis(1)), &mut effects);
    assert_eq!((again, effects.as_slice()), (Some(now + RECALL_AFTER), &[][..]));
    assert_eq!(ledger.look(seen(4, 3, now, now + RECALL_AFTER), &mut effects), None);
    assert_eq!(effects, [Effect::Recall { worker: W }]);
    effects.clear();
    ledger.recalled(W, 4, &mut effects);
    // Somebody else gets them, in their order, and nothing more waits behind the long one.
    ledger.ready(WorkerId(1), Skill::Recalls, now);
    ledger.feed(now, &mut effects);
    assert_eq!(effects, [Effect::Send { worker: WorkerId(1), tasks: vec![TaskId(4)] }]);
}

#[test]
fn nonsense_is_named() {
    let (mut ledger, _, now) = fed(rules(), 1, true);
    let wrong = ledger.answered(W, TaskId(9), done(), now, &mut Vec::new()).unwrap_err();
    assert_eq!(wrong.to_string(), "worker 0 speaks of task 9; its next one is 0");
    let nobody = ledger.answered(WorkerId(7), TaskId(0), done(), now, &mut Vec::new()).unwrap_err();
    assert_eq!(nobody.to_string(), "worker 7 is not at work");
}

/// A worker as the world has it: what it was sent, how far it is.
#[derive(Debug, Default, Clone)]
struct Real {
    has: VecDeque<TaskId>,
    started: u64,
    finished: u64,
    /// Results it has and has not told.
    untold: VecDeque<TaskId>,
}

#[derive(Debug, Clone)]
enum Step {
    TakeIn(usize),
    Work(u8, u8),
    Tell(u8),
    Die(u8),
    Withdraw(u8),
    Come(u8),
    Wait(u16),
    Cancel,
    FinishSoon,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1_usize..6).prop_map(Step::TakeIn),
        8 => (0_u8..3, 1_u8..4).prop_map(|(worker, times)| Step::Work(worker, times)),
        8 => (0_u8..3).prop_map(Step::Tell),
        2 => (0_u8..3).prop_map(Step::Die),
        1 => (0_u8..3).prop_map(Step::Withdraw),
        3 => (0_u8..3).prop_map(Step::Come),
        4 => (0_u16..3_000).prop_map(Step::Wait),
        1 => prop::sample::select(vec![Step::Cancel, Step::FinishSoon]),
    ]
}

proptest! {
    #[test]
    fn every_task_is_over_exactly_once_whatever_workers_do(
        steps in prop::collection::vec(step(), 0..200),
        retries in 0_u32..3,
        has_timeout in any::<bool>(),
    ) {
        let task_timeout = has_timeout.then_some(Duration::from_secs(2));
        let mut world = World::new(DispatchRules { retries, task_timeout, ..rules() });
        for step in steps {
            world.step(step);
        }
        world.finish();
    }
}

struct World {
    ledger: Ledger,
    now: Instant,
    workers: BTreeMap<WorkerId, Real>,
    over: BTreeMap<TaskId, u32>,
    killed: Vec<WorkerId>,
}

impl World {
    fn new(rules: DispatchRules) -> Self {
        let (workers, over) = (BTreeMap::new(), BTreeMap::new());
        Self { ledger: Ledger::new(rules), now: Instant::now(), workers, over, killed: Vec::new() }
    }

    /// How many more tasks can be taken in now.
    fn room(&self) -> usize {
        if self.ledger.is_open() { self.ledger.rules.queue_size.saturating_sub(self.ledger.waiting()) } else { 0 }
    }

    fn step(&mut self, step: Step) {
        let mut effects = Vec::new();
        match step {
            Step::TakeIn(count) => {
                for _ in 0..count.min(self.room()) {
                    self.ledger.take_in();
                }
            }
            Step::Work(worker, times) => {
                if let Some(real) = self.workers.get_mut(&WorkerId(worker.into())) {
                    for _ in 0..times {
                        real.work();
                    }
                }
            }
            Step::Tell(worker) => self.tell(WorkerId(worker.into()), &mut effects),
            Step::Die(worker) => self.die(WorkerId(worker.into()), WorkerExitCause::Signalled(9), &mut effects),
            Step::Withdraw(worker) => {
                self.die(WorkerId(worker.into()), WorkerExitCause::GpuWithdrawn("".into()), &mut effects)
            }
            Step::FinishSoon => self.ledger.finish_soon(&mut effects),
            Step::Come(worker) => {
                let worker = WorkerId(worker.into());
                if let std::collections::btree_map::Entry::Vacant(free) = self.workers.entry(worker) {
                    free.insert(Real::default());
                    self.ledger.ready(worker, [Skill::Recalls, Skill::Counts][worker.0 as usize % 2], self.now);
                }
            }
            Step::Wait(millis) => self.wait(Duration::from_millis(millis.into()), &mut effects),
            Step::Cancel => self.ledger.cancel(&mut effects),
        }
        self.ledger.feed(self.now, &mut effects);
        self.take(effects);
    }

    fn tell(&mut self, worker: WorkerId, effects: &mut Vec<Effect>) {
        let Some(real) = self.workers.get_mut(&worker) else { return };
        while let Some(task) = real.untold.pop_front() {
            let outcome = if task.0 % 5 == 0 { TaskOutcome::Failed(Bytes::new()) } else { done() };
            self.ledger.answered(worker, task, outcome, self.now, effects).unwrap();
        }
    }

    fn die(&mut self, worker: WorkerId, cause: WorkerExitCause, effects: &mut Vec<Effect>) {
        if let Some(real) = self.workers.remove(&worker) {
            self.ledger.gone(worker, counted(real.started, real.finished), &cause, effects);
        }
    }

    fn wait(&mut self, time: Duration, effects: &mut Vec<Effect>) {
        self.now += time;
        for (worker, real) in self.workers.clone() {
            let counted = counted(real.started, real.finished);
            self.ledger.look(Seen { worker, counted, begun: None, now: self.now }, effects);
        }
    }

    fn take(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send { worker, tasks } => self.workers.get_mut(&worker).unwrap().has.extend(tasks),
                Effect::Over { task, .. } => *self.over.entry(task).or_default() += 1,
                Effect::Interrupt { .. } | Effect::Retried { .. } => {}
                Effect::Recall { worker } => {
                    let real = self.workers.get_mut(&worker).unwrap();
                    // Somebody may claim a task, and begin it only after that.
                    let claims = real.started + u64::from(real.started == real.finished && !real.has.is_empty());
                    let keeps = usize::try_from(claims - real.finished).unwrap();
                    real.has.truncate(keeps);
                    let mut more = Vec::new();
                    self.ledger.recalled(worker, claims, &mut more);
                    self.take(more);
                }
                Effect::Kill { worker } => self.killed.push(worker),
            }
        }
        assert!(self.over.values().all(|times| *times == 1), "told twice: {:?}", self.over);
        let mut effects = Vec::new();
        for worker in std::mem::take(&mut self.killed) {
            self.die(worker, WorkerExitCause::IgnoredInterrupt, &mut effects);
        }
        if !effects.is_empty() {
            self.take(effects);
        }
    }

    /// Everybody works until nothing is left.
    fn finish(&mut self) {
        self.ledger.close();
        for _ in 0..2_000 {
            if self.ledger.is_done() {
                break;
            }
            (0..3).for_each(|worker| self.step(Step::Come(worker)));
            (0..3).for_each(|worker| self.step(Step::Work(worker, 3)));
            (0..3).for_each(|worker| self.step(Step::Tell(worker)));
        }
        assert!(self.ledger.is_done(), "{:?}", self.ledger);
        assert_eq!(self.over.len() as u64, self.ledger.taken_in);
    }
}

impl Real {
    /// Does the next thing: begins a task, or finishes the one it is at.
    fn work(&mut self) {
        if self.started > self.finished {
            self.finished += 1;
            self.untold.extend(self.has.pop_front());
        } else if !self.has.is_empty() {
            self.started += 1;
        }
    }
}

fn pace(times: &[Duration]) -> Pace {
    let mut pace = Pace::default();
    times.iter().for_each(|took| pace.took(*took));
    pace
}

#[test]
fn short_tasks_are_many_at_once_and_long_ones_alone() {
    assert_eq!(Pace::default().depth(None, 4), 1);
    assert_eq!(pace(&[Duration::from_nanos(500); 20]).depth(None, 4), DEPTH);
    assert_eq!(pace(&[Duration::from_micros(100); 20]).depth(None, 4), 80);
    assert_eq!(pace(&[Duration::from_secs(1); 20]).depth(None, 4), 1);
    let mut turned = [Duration::from_micros(1); 21];
    turned[20] = Duration::from_millis(50);
    assert_eq!(pace(&turned).depth(None, 4), 1, "one long task is enough");
}

#[test]
fn the_last_tasks_are_spread() {
    let fast = pace(&[Duration::from_nanos(500); 20]);
    assert_eq!(fast.depth(Some(80), 4), 10);
    assert_eq!(fast.depth(Some(7), 4), 1);
}

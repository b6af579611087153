//! Who has which task, what is sent next, what became of each. Decides, and touches nothing: no process, no clock.
//!
//! A task is pending, with a worker, or over, and goes forward only; every task that was taken in is told to be over exactly
//! once. A worker works its tasks off in the order it got them. When it dies, its counters say how far it was: what it never
//! began goes back to the head of the queue, the others are over (or tried again, where retries are left).

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::limits::{DEFAULT_GRACE, DEFAULT_QUEUE_SIZE, MAX_WORKER_QUEUE, PREFETCH_TIME, RECALL_AFTER, SHORT_TASK};
use crate::protocol::TaskCounts;
use crate::{LossStage, TaskId, TaskOutcome, WorkerExitCause, WorkerId, WorkerLoss};

/// How tasks are dealt with.
#[derive(Debug, Clone)]
pub struct DispatchRules {
    /// Tasks that are taken in and wait, at most, also with workers; results nobody took count as well.
    pub queue_size: usize,
    /// How long a task may take.
    pub task_timeout: Option<Duration>,
    /// How long a worker that was interrupted may take to be done with its task.
    pub grace: Duration,
    /// How often a task that failed is tried again.
    pub retries: u32,
    /// Whether a worker may be given tasks ahead of the one it works on. What it has ahead is begun even if nothing new is
    /// to be.
    pub prefetch: bool,
}

impl Default for DispatchRules {
    fn default() -> Self {
        Self { queue_size: DEFAULT_QUEUE_SIZE, task_timeout: None, grace: DEFAULT_GRACE, retries: 0, prefetch: true }
    }
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SchedulerEffect {
    /// Send these to a worker, in this order.
    Send {
        /// To whom.
        worker: WorkerId,
        /// What.
        tasks: Vec<TaskId>,
    },
    /// A task is over.
    TaskEnded {
        /// Which.
        task: TaskId,
        /// Who had it last; `None` where nobody had it.
        worker: Option<WorkerId>,
        /// What became of it.
        outcome: TaskOutcome,
        /// Since when it was worked on, as far as is known.
        started: Option<Instant>,
        /// How often it was tried.
        tries: u32,
    },
    /// A task failed and is tried again.
    TaskRetried {
        /// Which.
        task: TaskId,
        /// Who had it.
        worker: WorkerId,
        /// What would have become of it.
        outcome: TaskOutcome,
    },
    /// A task takes too long: interrupt the worker.
    Interrupt {
        /// Whom.
        worker: WorkerId,
        /// How many tasks it had begun, this one included.
        started: u64,
    },
    /// It takes long over a task while others wait behind it: take back what it has not claimed, and tell
    /// [`Ledger::recalled`].
    Recall {
        /// From whom.
        worker: WorkerId,
    },
    /// It was interrupted and goes on: kill it with all it started, and replace it.
    Kill {
        /// Whom.
        worker: WorkerId,
    },
}

/// What a worker said that it cannot have meant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidResult {
    /// There is no such worker, or it is not ready.
    #[error("worker {0} is not ready for tasks")]
    WorkerNotReady(WorkerId),
    /// It speaks of a task it does not have, or not of the one it has first.
    #[error("worker {worker} sent a result of task {task}; expected {}", expected.map_or("none".into(), |task| format!("task {task}")))]
    UnexpectedTask {
        /// Who.
        worker: WorkerId,
        /// Of which.
        task: TaskId,
        /// Which it should have been.
        expected: Option<TaskId>,
    },
}

/// What a worker can do besides its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WorkerCapability {
    /// Nothing: it has one task at a time.
    OneTask,
    /// It counts where its death cannot take it along, and may have many.
    Counting,
    /// It counts, and what it has not begun can be taken back.
    Recallable,
}

#[derive(Debug)]
struct WorkerRecord {
    /// What it was sent and has not answered, in order.
    inbox: VecDeque<TaskId>,
    /// Answers it gave.
    results: u64,
    capability: WorkerCapability,
    /// It takes long over what it is at: nothing is to wait behind that.
    is_slow: bool,
    pace: WorkerPace,
    /// When the first of its inbox was begun, as far as is known.
    started: Option<Instant>,
    /// Answers since the pace was last looked at, and since when that was.
    unpaced_results: u32,
    paced_at: Instant,
    /// The task it was interrupted for, and until when it may take.
    interrupted: Option<(TaskId, Instant)>,
    is_killed: bool,
    is_retiring: bool,
}

impl WorkerRecord {
    fn counts(&self) -> bool {
        self.capability != WorkerCapability::OneTask
    }
}

/// The books of one run.
#[derive(Debug, Default)]
pub(crate) struct TaskScheduler {
    rules: DispatchRules,
    pending: VecDeque<TaskId>,
    /// Times a live task was tried and failed; those that never did are not listed.
    failures: BTreeMap<TaskId, u32>,
    workers: BTreeMap<WorkerId, WorkerRecord>,
    /// Whether more may come.
    is_open: bool,
    /// Whether nothing is begun any more.
    is_finishing: bool,
    /// Whether nobody wants what is being worked on either.
    is_cancelled: bool,
    accepted: u64,
    ended: u64,
}

impl TaskScheduler {
    /// Empty books.
    pub(crate) fn new(rules: DispatchRules) -> Self {
        Self { rules, is_open: true, ..Self::default() }
    }

    /// Takes in the next task of the source.
    pub(crate) fn accept_task(&mut self) -> TaskId {
        let task = TaskId(self.accepted);
        self.accepted += 1;
        self.pending.push_back(task);
        task
    }

    /// The source has no more.
    pub(crate) fn close(&mut self) {
        self.is_open = false;
    }

    /// Whether everything that was taken in is over, and nothing more comes.
    pub(crate) fn is_done(&self) -> bool {
        !self.is_open && self.ended == self.accepted
    }

    /// Tasks that wait, tasks workers have, tasks that are over.
    pub(crate) fn task_counts(&self) -> (usize, usize, u64) {
        let with_workers = self.workers.values().map(|worker| worker.inbox.len()).sum();
        (self.pending.len(), with_workers, self.ended)
    }

    /// Tasks that wait, also those that wait with a worker behind the one it is at.
    pub(crate) fn waiting_count(&self) -> usize {
        let behind = |worker: &WorkerRecord| worker.inbox.len().saturating_sub(1);
        self.pending.len() + self.workers.values().map(behind).sum::<usize>()
    }

    /// Whether more may come.
    pub(crate) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Whether nobody wants the rest.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.is_cancelled
    }

    /// Whether tasks have a time limit.
    pub(crate) fn has_timeout(&self) -> bool {
        self.rules.task_timeout.is_some()
    }

    /// What a worker is at, and since when.
    pub(crate) fn current_task(&self, worker: WorkerId) -> (Option<TaskId>, Option<Instant>) {
        let Some(worker) = self.workers.get(&worker) else { return (None, None) };
        (worker.inbox.front().copied(), worker.started)
    }

    /// A worker gets no more; `true` where it has nothing, and is forgotten.
    pub(crate) fn retire_worker(&mut self, worker: WorkerId) -> bool {
        let Some(retiring) = self.workers.get_mut(&worker) else { return true };
        retiring.is_retiring = true;
        retiring.inbox.is_empty() && self.workers.remove(&worker).is_some()
    }

    /// A worker is set up.
    pub(crate) fn add_worker(&mut self, worker: WorkerId, capability: WorkerCapability, now: Instant) {
        let new = WorkerRecord {
            inbox: VecDeque::new(),
            results: 0,
            capability,
            is_slow: false,
            pace: WorkerPace::default(),
            started: None,
            unpaced_results: 0,
            paced_at: now,
            interrupted: None,
            is_killed: false,
            is_retiring: false,
        };
        self.workers.insert(worker, new);
    }

    /// Gives workers what they can have, the ones with least to do first.
    pub(crate) fn assign_tasks(&mut self, now: Instant, effects: &mut Vec<SchedulerEffect>) {
        for worker in self.workers.values_mut().filter(|worker| worker.unpaced_results > 0) {
            worker.pace.record_duration(now.saturating_duration_since(worker.paced_at) / worker.unpaced_results);
            (worker.unpaced_results, worker.paced_at) = (0, now);
        }
        let mut sending: BTreeMap<WorkerId, Vec<TaskId>> = BTreeMap::new();
        // One at a time to whoever has least, so that the last tasks are spread.
        while let Some(worker) = self.next_worker() {
            let Some(task) = self.pending.pop_front() else { break };
            let Some(record) = self.workers.get_mut(&worker) else { break };
            if record.inbox.is_empty() {
                (record.started, record.paced_at) = (Some(now), now);
            }
            record.inbox.push_back(task);
            sending.entry(worker).or_default().push(task);
        }
        effects.extend(sending.into_iter().map(|(worker, tasks)| SchedulerEffect::Send { worker, tasks }));
    }

    fn next_worker(&self) -> Option<WorkerId> {
        let live_workers = self.workers.values().filter(|worker| !worker.is_killed).count().max(1);
        let remaining = (!self.is_open).then_some(self.pending.len());
        let candidates = self.workers.iter().filter(|(_, worker)| {
            let may = worker.counts() && self.rules.prefetch && !worker.is_slow;
            let most = if may { worker.pace.queue_depth(remaining, live_workers) } else { 1 };
            let is_able = !worker.is_killed && !worker.is_retiring && worker.interrupted.is_none();
            is_able && worker.inbox.len() < most
        });
        candidates.min_by_key(|(_, worker)| worker.inbox.len()).map(|(id, _)| *id)
    }

    /// A worker says what became of its task.
    pub(crate) fn record_result(
        &mut self,
        worker: WorkerId,
        task: TaskId,
        outcome: TaskOutcome,
        now: Instant,
        effects: &mut Vec<SchedulerEffect>,
    ) -> Result<(), InvalidResult> {
        let record = self.workers.get_mut(&worker).ok_or(InvalidResult::WorkerNotReady(worker))?;
        let expected = record.inbox.front().copied();
        if expected != Some(task) {
            return Err(InvalidResult::UnexpectedTask { worker, task, expected });
        }
        record.inbox.pop_front();
        record.results += 1;
        record.unpaced_results += 1;
        record.is_slow = false;
        let started = record.started;
        record.started = (!record.inbox.is_empty()).then_some(now);
        let timed_out = record.interrupted.take_if(|(interrupted, _)| *interrupted == task).is_some();
        // It was interrupted: whatever it says came of that.
        let outcome = match (timed_out, self.rules.task_timeout) {
            (true, Some(timeout)) => TaskOutcome::TimedOut(timeout),
            _ if self.is_cancelled && matches!(outcome, TaskOutcome::Failed(_)) => TaskOutcome::Cancelled,
            _ => outcome,
        };
        self.end_task(task, Some(worker), outcome, started, effects);
        Ok(())
    }

    /// A worker is dead; its counters say how far it was. One whose GPU was taken away is not to blame: what it was at is
    /// done again, by another.
    pub(crate) fn remove_worker(
        &mut self,
        worker: WorkerId,
        counted: TaskCounts,
        cause: &WorkerExitCause,
        effects: &mut Vec<SchedulerEffect>,
    ) {
        let Some(mut lost_worker) = self.workers.remove(&worker) else { return };
        // Of its inbox, counted from the front: begun, and finished. One that does not count has begun what it has.
        let (begun, finished) = if lost_worker.counts() {
            let of_inbox =
                |count: u64| usize::try_from(count.saturating_sub(lost_worker.results)).unwrap_or(usize::MAX);
            (of_inbox(counted.started), of_inbox(counted.finished))
        } else {
            (1, 0)
        };
        let begun = if matches!(cause, WorkerExitCause::GpuWithdrawn(_)) { 0 } else { begun };
        let untouched = lost_worker.inbox.split_off(begun.min(lost_worker.inbox.len()));
        self.requeue_tasks(untouched, effects);
        for (nth, task) in lost_worker.inbox.into_iter().enumerate() {
            let was_interrupted = lost_worker.interrupted.is_some_and(|(interrupted, _)| interrupted == task);
            let lost = |stage| TaskOutcome::WorkerLost(WorkerLoss { stage, cause: cause.clone() });
            let outcome = match (was_interrupted, self.rules.task_timeout) {
                (true, Some(timeout)) => TaskOutcome::TimedOut(timeout),
                _ if self.is_cancelled => TaskOutcome::Cancelled,
                _ if nth < finished => lost(LossStage::ResultLost),
                _ => lost(LossStage::Running),
            };
            let started = lost_worker.started.filter(|_| nth == 0);
            self.end_task(task, Some(worker), outcome, started, effects);
        }
    }

    /// Tasks nobody has begun are done next, by anybody; or not at all, where nobody wants them any more.
    fn requeue_tasks(&mut self, tasks: VecDeque<TaskId>, effects: &mut Vec<SchedulerEffect>) {
        for task in tasks.into_iter().rev() {
            if self.is_finishing {
                self.end_task(task, None, TaskOutcome::Cancelled, None, effects);
            } else {
                self.pending.push_front(task);
            }
        }
    }

    /// Nobody wants the rest: what waits is over now, what workers have when they answered it or are gone.
    pub(crate) fn cancel_all(&mut self, effects: &mut Vec<SchedulerEffect>) {
        self.is_cancelled = true;
        self.cancel_pending(effects);
    }

    /// What waits is over, and nothing is tried again; what workers have goes on.
    pub(crate) fn cancel_pending(&mut self, effects: &mut Vec<SchedulerEffect>) {
        (self.is_open, self.is_finishing) = (false, true);
        self.rules.retries = 0;
        for task in std::mem::take(&mut self.pending) {
            self.end_task(task, None, TaskOutcome::Cancelled, None, effects);
        }
    }

    fn end_task(
        &mut self,
        task: TaskId,
        worker: Option<WorkerId>,
        outcome: TaskOutcome,
        started: Option<Instant>,
        effects: &mut Vec<SchedulerEffect>,
    ) {
        let failures = self.failures.get(&task).copied().unwrap_or(0);
        let is_good = matches!(outcome, TaskOutcome::Done(_) | TaskOutcome::Cancelled);
        if let (false, Some(worker), true) = (is_good, worker, failures < self.rules.retries) {
            self.failures.insert(task, failures + 1);
            self.pending.push_front(task);
            effects.push(SchedulerEffect::TaskRetried { task, worker, outcome });
            return;
        }
        self.failures.remove(&task);
        self.ended += 1;
        let tries = failures + u32::from(worker.is_some());
        effects.push(SchedulerEffect::TaskEnded { task, worker, outcome, started, tries });
    }
}

// Looking at a worker now and then: whether its task takes too long, and whether others wait behind one that does.

/// What a look at a worker finds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkerObservation {
    /// Which.
    pub worker: WorkerId,
    /// What it counted.
    pub counted: TaskCounts,
    /// When its last task was begun by this clock, where it tells.
    pub started: Option<Instant>,
    /// When it was looked at.
    pub now: Instant,
}

impl TaskScheduler {
    /// When a worker has to be looked at next, because of its task's time or of what waits behind that.
    pub(crate) fn check_worker(
        &mut self,
        observation: WorkerObservation,
        effects: &mut Vec<SchedulerEffect>,
    ) -> Option<Instant> {
        let behind = self.check_blocked_tasks(observation, effects);
        let late = self.check_timeout(observation, effects);
        behind.into_iter().chain(late).min()
    }

    /// Whether others wait behind a task that takes long.
    fn check_blocked_tasks(
        &mut self,
        observation: WorkerObservation,
        effects: &mut Vec<SchedulerEffect>,
    ) -> Option<Instant> {
        let WorkerObservation { worker, counted, started, now } = observation;
        let record = self
            .workers
            .get_mut(&worker)
            .filter(|record| record.capability == WorkerCapability::Recallable && !record.is_slow)?;
        let started_here = counted.started.saturating_sub(record.results);
        if record.is_killed || record.inbox.len() as u64 <= started_here.max(1) {
            return None;
        }
        let is_running = counted.started > counted.finished;
        let due = started.or(record.started).filter(|_| is_running).unwrap_or(now) + RECALL_AFTER;
        if now < due {
            return Some(due);
        }
        record.is_slow = true;
        effects.push(SchedulerEffect::Recall { worker });
        None
    }

    /// A worker claimed so many tasks since it is set up; the others of its inbox are not its own any more.
    pub(crate) fn take_back_unclaimed(&mut self, worker: WorkerId, claimed: u64, effects: &mut Vec<SchedulerEffect>) {
        let Some(record) = self.workers.get_mut(&worker) else { return };
        let keeps = usize::try_from(claimed.saturating_sub(record.results)).unwrap_or(usize::MAX);
        let back = record.inbox.split_off(keeps.min(record.inbox.len()));
        self.requeue_tasks(back, effects);
    }

    /// Whether tasks a worker has not begun can be taken back from it.
    pub(crate) fn can_recall(&self, worker: WorkerId) -> bool {
        self.workers.get(&worker).is_some_and(|record| record.capability == WorkerCapability::Recallable)
    }

    /// Whether tasks wait behind the one a worker has first, and could be taken back.
    pub(crate) fn has_blocked_tasks(&self, worker: WorkerId) -> bool {
        let can = |record: &WorkerRecord| {
            record.capability == WorkerCapability::Recallable && !record.is_slow && record.inbox.len() > 1
        };
        self.workers.get(&worker).is_some_and(can)
    }

    /// Whether its task takes longer than it may.
    fn check_timeout(&mut self, observation: WorkerObservation, effects: &mut Vec<SchedulerEffect>) -> Option<Instant> {
        let WorkerObservation { worker, counted, started, now } = observation;
        let timeout = self.rules.task_timeout?;
        let record = self.workers.get_mut(&worker).filter(|record| !record.is_killed)?;
        if let Some((_, until)) = record.interrupted {
            if now < until {
                return Some(until);
            }
            record.is_killed = true;
            effects.push(SchedulerEffect::Kill { worker });
            return None;
        }
        // Between two tasks nothing runs; the next one is looked at when it has.
        let is_running = !record.counts() || counted.started > counted.finished;
        let begun = started.or(record.started).filter(|_| is_running && !record.inbox.is_empty());
        let Some(due) = begun.map(|begun| begun + timeout) else { return Some(now + timeout) };
        if now < due {
            return Some(due);
        }
        let nth = if record.counts() { counted.started.saturating_sub(record.results).saturating_sub(1) } else { 0 };
        let task = usize::try_from(nth).ok().and_then(|nth| record.inbox.get(nth).copied())?;
        record.interrupted = Some((task, now + self.rules.grace));
        effects.push(SchedulerEffect::Interrupt { worker, started: counted.started });
        Some(now + self.rules.grace)
    }
}

/// How fast a worker is, and so how many tasks it has at once: enough short ones that it never waits for the next, and
/// never a long one behind another, where another worker could have it.
#[derive(Debug, Default)]
struct WorkerPace {
    /// How long its tasks take, the last ones counting most; `None` before the first.
    average: Option<Duration>,
    /// Grown step by step, so that one lucky task does not fill the inbox.
    current_depth: usize,
}

impl WorkerPace {
    /// A task took so long.
    pub(crate) fn record_duration(&mut self, duration: Duration) {
        self.average = Some(match self.average {
            // A long one counts at once: whatever is behind it waits.
            Some(average) if duration < average * 4 => average.mul_f64(0.75) + duration.mul_f64(0.25),
            _ => duration,
        });
        self.current_depth = (self.current_depth.max(1) * 2).min(self.max_depth());
    }

    /// How many tasks it may have at once. `left` tasks wait and no more will come; so many workers share them.
    pub(crate) fn queue_depth(&self, left: Option<usize>, workers: usize) -> usize {
        let depth = self.current_depth.clamp(1, self.max_depth());
        match left {
            // The last ones are spread: nobody takes more than half of its part.
            Some(left) => depth.min((left / (2 * workers)).max(1)),
            None => depth,
        }
    }

    fn max_depth(&self) -> usize {
        let Some(average) = self.average.filter(|average| *average <= SHORT_TASK) else { return 1 };
        let ahead = PREFETCH_TIME.as_nanos() / average.as_nanos().max(1);
        usize::try_from(ahead).unwrap_or(MAX_WORKER_QUEUE).clamp(2, MAX_WORKER_QUEUE)
    }
}

//! The task scheduler: decides which worker runs which task. It performs no I/O and reads no clock.
//!
//! A task is pending, with a worker, or ended, and only moves forward; each accepted task ends exactly once. A worker
//! runs its tasks in the order it got them. After its exit, its counters show its progress: tasks that it never
//! started return to the head of the queue, the others end or are retried.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::limits::{DEFAULT_GRACE, DEFAULT_QUEUE_SIZE, MAX_WORKER_QUEUE, PREFETCH_TIME, RECALL_AFTER, SHORT_TASK};
use crate::protocol::TaskCounts;
use crate::{LossStage, TaskId, TaskOutcome, WorkerExitCause, WorkerId, WorkerLoss};

/// Rules for queueing, time limits and retries.
#[derive(Debug, Clone)]
pub struct DispatchRules {
    /// Maximum number of waiting tasks, including those queued at workers, plus undelivered results.
    pub queue_size: usize,
    /// Time limit of a task.
    pub task_timeout: Option<Duration>,
    /// Time in which an interrupted worker must give up its task.
    pub grace: Duration,
    /// Number of retries of a failed task.
    pub retries: u32,
    /// Whether a worker may get further tasks while it runs one. These are run even after pending tasks were
    /// cancelled.
    pub prefetch: bool,
}

impl Default for DispatchRules {
    fn default() -> Self {
        Self { queue_size: DEFAULT_QUEUE_SIZE, task_timeout: None, grace: DEFAULT_GRACE, retries: 0, prefetch: true }
    }
}

/// An effect that the engine applies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SchedulerEffect {
    /// Send tasks to a worker, in this order.
    Send {
        /// Receiving worker.
        worker: WorkerId,
        /// Tasks to send.
        tasks: Vec<TaskId>,
    },
    /// A task has ended.
    TaskEnded {
        /// Task id.
        task: TaskId,
        /// Worker that ran the last attempt; `None` if the task had no worker.
        worker: Option<WorkerId>,
        /// Outcome of the task.
        outcome: TaskOutcome,
        /// Start of the last attempt, if known.
        started: Option<Instant>,
        /// Number of attempts.
        tries: u32,
    },
    /// A task failed and is retried.
    TaskRetried {
        /// Task id.
        task: TaskId,
        /// Worker that ran the failed attempt.
        worker: WorkerId,
        /// Outcome of the failed attempt.
        outcome: TaskOutcome,
    },
    /// Interrupt a worker whose task exceeds the time limit.
    Interrupt {
        /// Worker to interrupt.
        worker: WorkerId,
        /// Number of tasks that it had started, including this one.
        started: u64,
    },
    /// Recall the unclaimed tasks behind a long one, and report the claims to [`TaskScheduler::take_back_unclaimed`].
    Recall {
        /// Worker to recall from.
        worker: WorkerId,
    },
    /// Kill and replace a worker that ignored its interrupt, with its descendants.
    Kill {
        /// Worker to kill.
        worker: WorkerId,
    },
}

/// An invalid result of a worker.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidResult {
    /// The worker is unknown or not ready.
    #[error("worker {0} is not ready for tasks")]
    WorkerNotReady(WorkerId),
    /// The result is not of the first task in the worker's queue.
    #[error("worker {worker} sent a result of task {task}; expected {}", expected.map_or("none".into(), |id| id.to_string()))]
    UnexpectedTask {
        /// Worker id.
        worker: WorkerId,
        /// Task of the result.
        task: TaskId,
        /// First task in the worker's queue.
        expected: Option<TaskId>,
    },
}

/// Capability of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WorkerCapability {
    /// No shared counters, so one task at a time.
    OneTask,
    /// Shared counters, so many tasks at a time.
    Counting,
    /// Shared counters, and unclaimed tasks can be recalled.
    Recallable,
}

#[derive(Debug)]
struct WorkerRecord {
    /// Tasks sent to the worker and not ended, in order.
    inbox: VecDeque<TaskId>,
    /// Number of results received.
    results: u64,
    capability: WorkerCapability,
    /// Whether the current task is long, so that none may queue behind it.
    is_slow: bool,
    pace: WorkerPace,
    /// Start of the first task in the inbox, if known.
    started: Option<Instant>,
    /// Results since the last update of the pace.
    unpaced_results: u32,
    paced_at: Instant,
    /// Interrupted task, and the end of its grace.
    interrupted: Option<(TaskId, Instant)>,
    is_killed: bool,
    is_retiring: bool,
}

impl WorkerRecord {
    fn counts(&self) -> bool {
        self.capability != WorkerCapability::OneTask
    }
}

/// State of all tasks and workers of one run.
#[derive(Debug, Default)]
pub(crate) struct TaskScheduler {
    rules: DispatchRules,
    pending: VecDeque<TaskId>,
    /// Failed attempts of unfinished tasks; tasks without one are not listed.
    failures: BTreeMap<TaskId, u32>,
    workers: BTreeMap<WorkerId, WorkerRecord>,
    /// Whether more tasks may come.
    is_open: bool,
    /// Whether pending tasks are cancelled.
    is_finishing: bool,
    /// Whether running tasks are cancelled, too.
    is_cancelled: bool,
    accepted: u64,
    ended: u64,
}

impl TaskScheduler {
    /// Creates a scheduler without tasks or workers.
    pub(crate) fn new(rules: DispatchRules) -> Self {
        Self { rules, is_open: true, ..Self::default() }
    }

    /// Accepts the next task of the source.
    pub(crate) fn accept_task(&mut self) -> TaskId {
        let task = TaskId(self.accepted);
        self.accepted += 1;
        self.pending.push_back(task);
        task
    }

    /// Ends the input: no more tasks follow.
    pub(crate) fn close(&mut self) {
        self.is_open = false;
    }

    /// Whether every accepted task has ended and no more follow.
    pub(crate) fn is_done(&self) -> bool {
        !self.is_open && self.ended == self.accepted
    }

    /// Returns the numbers of pending tasks, tasks at workers, and ended tasks.
    pub(crate) fn task_counts(&self) -> (usize, usize, u64) {
        let with_workers = self.workers.values().map(|worker| worker.inbox.len()).sum();
        (self.pending.len(), with_workers, self.ended)
    }

    /// Returns the number of tasks that wait, including those queued at workers.
    pub(crate) fn waiting_count(&self) -> usize {
        let behind = |worker: &WorkerRecord| worker.inbox.len().saturating_sub(1);
        self.pending.len() + self.workers.values().map(behind).sum::<usize>()
    }

    /// Whether more tasks may come.
    pub(crate) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Whether the run is cancelled.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.is_cancelled
    }

    /// Whether tasks have a time limit.
    pub(crate) fn has_timeout(&self) -> bool {
        self.rules.task_timeout.is_some()
    }

    /// Returns a worker's current task and its start.
    pub(crate) fn current_task(&self, worker: WorkerId) -> (Option<TaskId>, Option<Instant>) {
        let Some(worker) = self.workers.get(&worker) else { return (None, None) };
        (worker.inbox.front().copied(), worker.started)
    }

    /// Gives a worker no more tasks. Returns `true` and removes the worker if it has none.
    pub(crate) fn retire_worker(&mut self, worker: WorkerId) -> bool {
        let Some(retiring) = self.workers.get_mut(&worker) else { return true };
        retiring.is_retiring = true;
        retiring.inbox.is_empty() && self.workers.remove(&worker).is_some()
    }

    /// Adds a worker that is set up.
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

    /// Assigns pending tasks to workers, the least loaded first.
    pub(crate) fn assign_tasks(&mut self, now: Instant, effects: &mut Vec<SchedulerEffect>) {
        for worker in self.workers.values_mut().filter(|worker| worker.unpaced_results > 0) {
            worker.pace.record_duration(now.saturating_duration_since(worker.paced_at) / worker.unpaced_results);
            (worker.unpaced_results, worker.paced_at) = (0, now);
        }
        let mut sending: BTreeMap<WorkerId, Vec<TaskId>> = BTreeMap::new();
        // One task at a time to the least loaded worker spreads the last tasks.
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
            let limit = if may { worker.pace.queue_depth(remaining, live_workers) } else { 1 };
            let is_able = !worker.is_killed && !worker.is_retiring && worker.interrupted.is_none();
            is_able && worker.inbox.len() < limit
        });
        candidates.min_by_key(|(_, worker)| worker.inbox.len()).map(|(id, _)| *id)
    }

    /// Records a worker's result of its first task.
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
        // Any result of an interrupted task comes from the interrupt.
        let outcome = match (timed_out, self.rules.task_timeout) {
            (true, Some(timeout)) => TaskOutcome::TimedOut(timeout),
            _ if self.is_cancelled && matches!(outcome, TaskOutcome::Failed(_)) => TaskOutcome::Cancelled,
            _ => outcome,
        };
        self.end_task(task, Some(worker), outcome, started, effects);
        Ok(())
    }

    /// Removes a worker that has exited, with its last counters. If its GPU was withdrawn, its current task is requeued
    /// without blame.
    pub(crate) fn remove_worker(
        &mut self,
        worker: WorkerId,
        counted: TaskCounts,
        cause: &WorkerExitCause,
        effects: &mut Vec<SchedulerEffect>,
    ) {
        let Some(mut lost) = self.workers.remove(&worker) else { return };
        // Positions in the inbox. A worker without counters has started its one task.
        let (started, finished) = if lost.counts() {
            let of_inbox = |count: u64| usize::try_from(count.saturating_sub(lost.results)).unwrap_or(usize::MAX);
            (of_inbox(counted.started), of_inbox(counted.finished))
        } else {
            (1, 0)
        };
        let started = if matches!(cause, WorkerExitCause::GpuWithdrawn(_)) { 0 } else { started };
        let untouched = lost.inbox.split_off(started.min(lost.inbox.len()));
        self.requeue_tasks(untouched, effects);
        for (nth, task) in lost.inbox.into_iter().enumerate() {
            let was_interrupted = lost.interrupted.is_some_and(|(interrupted, _)| interrupted == task);
            let loss = |stage| TaskOutcome::WorkerLost(WorkerLoss { stage, cause: cause.clone() });
            let outcome = match (was_interrupted, self.rules.task_timeout) {
                (true, Some(timeout)) => TaskOutcome::TimedOut(timeout),
                _ if self.is_cancelled => TaskOutcome::Cancelled,
                _ if nth < finished => loss(LossStage::ResultLost),
                _ => loss(LossStage::Running),
            };
            let started = lost.started.filter(|_| nth == 0);
            self.end_task(task, Some(worker), outcome, started, effects);
        }
    }

    /// Returns unstarted tasks to the head of the queue, or cancels them if the run is finishing.
    fn requeue_tasks(&mut self, tasks: VecDeque<TaskId>, effects: &mut Vec<SchedulerEffect>) {
        for task in tasks.into_iter().rev() {
            if self.is_finishing {
                self.end_task(task, None, TaskOutcome::Cancelled, None, effects);
            } else {
                self.pending.push_front(task);
            }
        }
    }

    /// Cancels all tasks: pending ones now, those at workers when they end.
    pub(crate) fn cancel_all(&mut self, effects: &mut Vec<SchedulerEffect>) {
        self.is_cancelled = true;
        self.cancel_pending(effects);
    }

    /// Cancels pending tasks and disables retries. Tasks at workers continue.
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

// Periodic checks of a worker: time limit, and tasks blocked behind a long one.

/// Observed state of a worker.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkerSample {
    /// Worker id.
    pub worker: WorkerId,
    /// Counters of the worker.
    pub counted: TaskCounts,
    /// Start of its last task by this clock, if counted.
    pub started: Option<Instant>,
    /// Time of the observation.
    pub now: Instant,
}

impl TaskScheduler {
    /// Checks a worker and returns the time of the next check.
    pub(crate) fn check_worker(&mut self, sample: WorkerSample, effects: &mut Vec<SchedulerEffect>) -> Option<Instant> {
        let behind = self.check_blocked_tasks(sample, effects);
        let late = self.check_timeout(sample, effects);
        behind.into_iter().chain(late).min()
    }

    /// Recalls tasks that wait behind a long one.
    fn check_blocked_tasks(&mut self, sample: WorkerSample, effects: &mut Vec<SchedulerEffect>) -> Option<Instant> {
        let WorkerSample { worker, counted, started, now } = sample;
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

    /// Requeues the unclaimed tasks of a worker, given the number of tasks it has claimed.
    pub(crate) fn take_back_unclaimed(&mut self, worker: WorkerId, claimed: u64, effects: &mut Vec<SchedulerEffect>) {
        let Some(record) = self.workers.get_mut(&worker) else { return };
        let keeps = usize::try_from(claimed.saturating_sub(record.results)).unwrap_or(usize::MAX);
        let back = record.inbox.split_off(keeps.min(record.inbox.len()));
        self.requeue_tasks(back, effects);
    }

    /// Whether unclaimed tasks can be recalled from a worker.
    pub(crate) fn can_recall(&self, worker: WorkerId) -> bool {
        self.workers.get(&worker).is_some_and(|record| record.capability == WorkerCapability::Recallable)
    }

    /// Whether a worker has recallable tasks behind its current one.
    pub(crate) fn has_blocked_tasks(&self, worker: WorkerId) -> bool {
        let can = |record: &WorkerRecord| {
            record.capability == WorkerCapability::Recallable && !record.is_slow && record.inbox.len() > 1
        };
        self.workers.get(&worker).is_some_and(can)
    }

    /// Interrupts a task past its time limit, and kills the worker after the grace.
    fn check_timeout(&mut self, sample: WorkerSample, effects: &mut Vec<SchedulerEffect>) -> Option<Instant> {
        let WorkerSample { worker, counted, started, now } = sample;
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
        // No task is running; the next one is checked later.
        let is_running = !record.counts() || counted.started > counted.finished;
        let task_start = started.or(record.started).filter(|_| is_running && !record.inbox.is_empty());
        let Some(due) = task_start.map(|start| start + timeout) else { return Some(now + timeout) };
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

/// Speed of a worker, which determines its queue depth: enough short tasks that it never idles, and none behind a long
/// one that another worker could take.
#[derive(Debug, Default)]
struct WorkerPace {
    /// Moving average of task durations; `None` before the first.
    average: Option<Duration>,
    /// Doubles with each task, so that one fast task does not fill the inbox.
    current_depth: usize,
}

impl WorkerPace {
    /// Adds a task's duration to the average.
    pub(crate) fn record_duration(&mut self, duration: Duration) {
        self.average = Some(match self.average {
            // A long task counts fully at once, because others wait behind it.
            Some(average) if duration < average * 4 => average.mul_f64(0.75) + duration.mul_f64(0.25),
            _ => duration,
        });
        self.current_depth = (self.current_depth.max(1) * 2).min(self.max_depth());
    }

    /// Returns the number of tasks that the worker may have. `remaining` is the number of tasks at the end of the input,
    /// shared by so many workers.
    pub(crate) fn queue_depth(&self, remaining: Option<usize>, workers: usize) -> usize {
        let depth = self.current_depth.clamp(1, self.max_depth());
        match remaining {
            // Spreads the last tasks: no worker takes more than half of its share.
            Some(remaining) => depth.min((remaining / (2 * workers)).max(1)),
            None => depth,
        }
    }

    fn max_depth(&self) -> usize {
        let Some(average) = self.average.filter(|average| *average <= SHORT_TASK) else { return 1 };
        let ahead = PREFETCH_TIME.as_nanos() / average.as_nanos().max(1);
        usize::try_from(ahead).unwrap_or(MAX_WORKER_QUEUE).clamp(2, MAX_WORKER_QUEUE)
    }
}

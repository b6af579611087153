//! Who has which task, what is sent next, what became of each. Decides, and touches nothing: no process, no clock.
//!
//! A task is pending, with a worker, or over, and goes forward only; every task that was taken in is told to be over exactly
//! once. A worker works its tasks off in the order it got them. When it dies, its counters say how far it was: what it never
//! began goes back to the head of the queue, the others are over (or tried again, where retries are left).

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::limits::{AHEAD, DEPTH, GRACE, QUEUE_SIZE, RECALL_AFTER, SHORT};
use crate::protocol::Counted;
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
        Self { queue_size: QUEUE_SIZE, task_timeout: None, grace: GRACE, retries: 0, prefetch: true }
    }
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Send these to a worker, in this order.
    Send {
        /// To whom.
        worker: WorkerId,
        /// What.
        tasks: Vec<TaskId>,
    },
    /// A task is over.
    Over {
        /// Which.
        task: TaskId,
        /// Who had it last; `None` where nobody had it.
        worker: Option<WorkerId>,
        /// What became of it.
        outcome: TaskOutcome,
        /// Since when it was worked on, as far as is known.
        begun: Option<Instant>,
        /// How often it was tried.
        tries: u32,
    },
    /// A task failed and is tried again.
    Retried {
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
        begun: u64,
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
pub(crate) enum Nonsense {
    /// There is no such worker, or it is not ready.
    #[error("worker {0} is not at work")]
    NotAtWork(WorkerId),
    /// It speaks of a task it does not have, or not of the one it has first.
    #[error("worker {worker} speaks of task {task}; its next one is {}", expected.map_or("none".into(), |task| task.to_string()))]
    WrongTask {
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
pub(crate) enum Skill {
    /// Nothing: it has one task at a time.
    None,
    /// It counts where its death cannot take it along, and may have many.
    Counts,
    /// It counts, and what it has not begun can be taken back.
    Recalls,
}

#[derive(Debug)]
struct Worker {
    /// What it was sent and has not answered, in order.
    inbox: VecDeque<TaskId>,
    /// Answers it gave.
    answers: u64,
    skill: Skill,
    /// It takes long over what it is at: nothing is to wait behind that.
    is_slow: bool,
    pace: Pace,
    /// When the first of its inbox was begun, as far as is known.
    begun: Option<Instant>,
    /// Answers since the pace was last looked at, and since when that was.
    fresh: u32,
    paced: Instant,
    /// The task it was interrupted for, and until when it may take.
    interrupted: Option<(TaskId, Instant)>,
    is_killed: bool,
    is_retiring: bool,
}

impl Worker {
    fn counts(&self) -> bool {
        self.skill != Skill::None
    }
}

/// The books of one run.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    rules: DispatchRules,
    pending: VecDeque<TaskId>,
    /// Times a live task was tried and failed; those that never did are not listed.
    failures: BTreeMap<TaskId, u32>,
    workers: BTreeMap<WorkerId, Worker>,
    /// Whether more may come.
    is_open: bool,
    /// Whether nothing is begun any more.
    is_finishing: bool,
    /// Whether nobody wants what is being worked on either.
    is_cancelled: bool,
    taken_in: u64,
    over: u64,
}

impl Ledger {
    /// Empty books.
    pub(crate) fn new(rules: DispatchRules) -> Self {
        Self { rules, is_open: true, ..Self::default() }
    }

    /// Takes in the next task of the source.
    pub(crate) fn take_in(&mut self) -> TaskId {
        let task = TaskId(self.taken_in);
        self.taken_in += 1;
        self.pending.push_back(task);
        task
    }

    /// The source has no more.
    pub(crate) fn close(&mut self) {
        self.is_open = false;
    }

    /// Whether everything that was taken in is over, and nothing more comes.
    pub(crate) fn is_done(&self) -> bool {
        !self.is_open && self.over == self.taken_in
    }

    /// Tasks that wait, tasks workers have, tasks that are over.
    pub(crate) fn counts(&self) -> (usize, usize, u64) {
        let with_workers = self.workers.values().map(|worker| worker.inbox.len()).sum();
        (self.pending.len(), with_workers, self.over)
    }

    /// Tasks that wait, also those that wait with a worker behind the one it is at.
    pub(crate) fn waiting(&self) -> usize {
        let behind = |worker: &Worker| worker.inbox.len().saturating_sub(1);
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
    pub(crate) fn at(&self, worker: WorkerId) -> (Option<TaskId>, Option<Instant>) {
        let Some(worker) = self.workers.get(&worker) else { return (None, None) };
        (worker.inbox.front().copied(), worker.begun)
    }

    /// A worker gets no more; `true` where it has nothing, and is forgotten.
    pub(crate) fn retire(&mut self, worker: WorkerId) -> bool {
        let Some(retiring) = self.workers.get_mut(&worker) else { return true };
        retiring.is_retiring = true;
        retiring.inbox.is_empty() && self.workers.remove(&worker).is_some()
    }

    /// A worker is set up.
    pub(crate) fn ready(&mut self, worker: WorkerId, skill: Skill, now: Instant) {
        let new = Worker {
            inbox: VecDeque::new(),
            answers: 0,
            skill,
            is_slow: false,
            pace: Pace::default(),
            begun: None,
            fresh: 0,
            paced: now,
            interrupted: None,
            is_killed: false,
            is_retiring: false,
        };
        self.workers.insert(worker, new);
    }

    /// Gives workers what they can have, the ones with least to do first.
    pub(crate) fn feed(&mut self, now: Instant, effects: &mut Vec<Effect>) {
        for worker in self.workers.values_mut().filter(|worker| worker.fresh > 0) {
            worker.pace.took(now.saturating_duration_since(worker.paced) / worker.fresh);
            (worker.fresh, worker.paced) = (0, now);
        }
        let mut sending: BTreeMap<WorkerId, Vec<TaskId>> = BTreeMap::new();
        // One at a time to whoever has least, so that the last tasks are spread.
        while let Some(worker) = self.hungriest() {
            let Some(task) = self.pending.pop_front() else { break };
            let Some(here) = self.workers.get_mut(&worker) else { break };
            if here.inbox.is_empty() {
                (here.begun, here.paced) = (Some(now), now);
            }
            here.inbox.push_back(task);
            sending.entry(worker).or_default().push(task);
        }
        effects.extend(sending.into_iter().map(|(worker, tasks)| Effect::Send { worker, tasks }));
    }

    fn hungriest(&self) -> Option<WorkerId> {
        let able = self.workers.values().filter(|worker| !worker.is_killed).count().max(1);
        let waiting = (!self.is_open).then_some(self.pending.len());
        let hungry = self.workers.iter().filter(|(_, worker)| {
            let may = worker.counts() && self.rules.prefetch && !worker.is_slow;
            let most = if may { worker.pace.depth(waiting, able) } else { 1 };
            let is_able = !worker.is_killed && !worker.is_retiring && worker.interrupted.is_none();
            is_able && worker.inbox.len() < most
        });
        hungry.min_by_key(|(_, worker)| worker.inbox.len()).map(|(id, _)| *id)
    }

    /// A worker says what became of its task.
    pub(crate) fn answered(
        &mut self,
        worker: WorkerId,
        task: TaskId,
        outcome: TaskOutcome,
        now: Instant,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Nonsense> {
        let here = self.workers.get_mut(&worker).ok_or(Nonsense::NotAtWork(worker))?;
        let expected = here.inbox.front().copied();
        if expected != Some(task) {
            return Err(Nonsense::WrongTask { worker, task, expected });
        }
        here.inbox.pop_front();
        here.answers += 1;
        here.fresh += 1;
        here.is_slow = false;
        let begun = here.begun;
        here.begun = (!here.inbox.is_empty()).then_some(now);
        let timed_out = here.interrupted.take_if(|(interrupted, _)| *interrupted == task).is_some();
        // It was interrupted: whatever it says came of that.
        let outcome = match (timed_out, self.rules.task_timeout) {
            (true, Some(timeout)) => TaskOutcome::TimedOut(timeout),
            _ if self.is_cancelled && matches!(outcome, TaskOutcome::Failed(_)) => TaskOutcome::Cancelled,
            _ => outcome,
        };
        self.end(task, Some(worker), outcome, begun, effects);
        Ok(())
    }

    /// A worker is dead; its counters say how far it was. One whose GPU was taken away is not to blame: what it was at is
    /// done again, by another.
    pub(crate) fn gone(
        &mut self,
        worker: WorkerId,
        counted: Counted,
        cause: &WorkerExitCause,
        effects: &mut Vec<Effect>,
    ) {
        let Some(mut gone) = self.workers.remove(&worker) else { return };
        // Of its inbox, counted from the front: begun, and finished. One that does not count has begun what it has.
        let (begun, finished) = if gone.counts() {
            let of_inbox = |count: u64| usize::try_from(count.saturating_sub(gone.answers)).unwrap_or(usize::MAX);
            (of_inbox(counted.started), of_inbox(counted.finished))
        } else {
            (1, 0)
        };
        let begun = if matches!(cause, WorkerExitCause::GpuWithdrawn(_)) { 0 } else { begun };
        let untouched = gone.inbox.split_off(begun.min(gone.inbox.len()));
        self.give_back(untouched, effects);
        for (nth, task) in gone.inbox.into_iter().enumerate() {
            let was_interrupted = gone.interrupted.is_some_and(|(interrupted, _)| interrupted == task);
            let lost = |stage| TaskOutcome::WorkerLost(WorkerLoss { stage, cause: cause.clone() });
            let outcome = match (was_interrupted, self.rules.task_timeout) {
                (true, Some(timeout)) => TaskOutcome::TimedOut(timeout),
                _ if self.is_cancelled => TaskOutcome::Cancelled,
                _ if nth < finished => lost(LossStage::ResultLost),
                _ => lost(LossStage::Running),
            };
            let begun = gone.begun.filter(|_| nth == 0);
            self.end(task, Some(worker), outcome, begun, effects);
        }
    }

    /// Tasks nobody has begun are done next, by anybody; or not at all, where nobody wants them any more.
    fn give_back(&mut self, tasks: VecDeque<TaskId>, effects: &mut Vec<Effect>) {
        for task in tasks.into_iter().rev() {
            if self.is_finishing {
                self.end(task, None, TaskOutcome::Cancelled, None, effects);
            } else {
                self.pending.push_front(task);
            }
        }
    }

    /// Nobody wants the rest: what waits is over now, what workers have when they answered it or are gone.
    pub(crate) fn cancel(&mut self, effects: &mut Vec<Effect>) {
        self.is_cancelled = true;
        self.finish_soon(effects);
    }

    /// What waits is over, and nothing is tried again; what workers have goes on.
    pub(crate) fn finish_soon(&mut self, effects: &mut Vec<Effect>) {
        (self.is_open, self.is_finishing) = (false, true);
        self.rules.retries = 0;
        for task in std::mem::take(&mut self.pending) {
            self.end(task, None, TaskOutcome::Cancelled, None, effects);
        }
    }

    fn end(
        &mut self,
        task: TaskId,
        worker: Option<WorkerId>,
        outcome: TaskOutcome,
        begun: Option<Instant>,
        effects: &mut Vec<Effect>,
    ) {
        let failures = self.failures.get(&task).copied().unwrap_or(0);
        let is_good = matches!(outcome, TaskOutcome::Done(_) | TaskOutcome::Cancelled);
        if let (false, Some(worker), true) = (is_good, worker, failures < self.rules.retries) {
            self.failures.insert(task, failures + 1);
            self.pending.push_front(task);
            effects.push(Effect::Retried { task, worker, outcome });
            return;
        }
        self.failures.remove(&task);
        self.over += 1;
        let tries = failures + u32::from(worker.is_some());
        effects.push(Effect::Over { task, worker, outcome, begun, tries });
    }
}

// Looking at a worker now and then: whether its task takes too long, and whether others wait behind one that does.

/// What a look at a worker finds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    /// Which.
    pub worker: WorkerId,
    /// What it counted.
    pub counted: Counted,
    /// When its last task was begun by this clock, where it tells.
    pub begun: Option<Instant>,
    /// When it was looked at.
    pub now: Instant,
}

impl Ledger {
    /// When a worker has to be looked at next, because of its task's time or of what waits behind that.
    pub(crate) fn look(&mut self, seen: Seen, effects: &mut Vec<Effect>) -> Option<Instant> {
        let behind = self.look_behind(seen, effects);
        let late = self.look_at_time(seen, effects);
        behind.into_iter().chain(late).min()
    }

    /// Whether others wait behind a task that takes long.
    fn look_behind(&mut self, seen: Seen, effects: &mut Vec<Effect>) -> Option<Instant> {
        let Seen { worker, counted, begun, now } = seen;
        let here = self.workers.get_mut(&worker).filter(|here| here.skill == Skill::Recalls && !here.is_slow)?;
        let begun_here = counted.started.saturating_sub(here.answers);
        if here.is_killed || here.inbox.len() as u64 <= begun_here.max(1) {
            return None;
        }
        let is_amid = counted.started > counted.finished;
        let due = begun.or(here.begun).filter(|_| is_amid).unwrap_or(now) + RECALL_AFTER;
        if now < due {
            return Some(due);
        }
        here.is_slow = true;
        effects.push(Effect::Recall { worker });
        None
    }

    /// A worker claimed so many tasks since it is set up; the others of its inbox are not its own any more.
    pub(crate) fn recalled(&mut self, worker: WorkerId, claimed: u64, effects: &mut Vec<Effect>) {
        let Some(here) = self.workers.get_mut(&worker) else { return };
        let keeps = usize::try_from(claimed.saturating_sub(here.answers)).unwrap_or(usize::MAX);
        let back = here.inbox.split_off(keeps.min(here.inbox.len()));
        self.give_back(back, effects);
    }

    /// Whether tasks a worker has not begun can be taken back from it.
    pub(crate) fn can_recall(&self, worker: WorkerId) -> bool {
        self.workers.get(&worker).is_some_and(|here| here.skill == Skill::Recalls)
    }

    /// Whether tasks wait behind the one a worker has first, and could be taken back.
    pub(crate) fn has_behind(&self, worker: WorkerId) -> bool {
        let can = |here: &Worker| here.skill == Skill::Recalls && !here.is_slow && here.inbox.len() > 1;
        self.workers.get(&worker).is_some_and(can)
    }

    /// Whether its task takes longer than it may.
    fn look_at_time(&mut self, seen: Seen, effects: &mut Vec<Effect>) -> Option<Instant> {
        let Seen { worker, counted, begun, now } = seen;
        let timeout = self.rules.task_timeout?;
        let here = self.workers.get_mut(&worker).filter(|here| !here.is_killed)?;
        if let Some((_, until)) = here.interrupted {
            if now < until {
                return Some(until);
            }
            here.is_killed = true;
            effects.push(Effect::Kill { worker });
            return None;
        }
        // Between two tasks nothing runs; the next one is looked at when it has.
        let is_amid = !here.counts() || counted.started > counted.finished;
        let begun = begun.or(here.begun).filter(|_| is_amid && !here.inbox.is_empty());
        let Some(due) = begun.map(|begun| begun + timeout) else { return Some(now + timeout) };
        if now < due {
            return Some(due);
        }
        let nth = if here.counts() { counted.started.saturating_sub(here.answers).saturating_sub(1) } else { 0 };
        let task = usize::try_from(nth).ok().and_then(|nth| here.inbox.get(nth).copied())?;
        here.interrupted = Some((task, now + self.rules.grace));
        effects.push(Effect::Interrupt { worker, begun: counted.started });
        Some(now + self.rules.grace)
    }
}

/// How fast a worker is, and so how many tasks it has at once: enough short ones that it never waits for the next, and
/// never a long one behind another, where another worker could have it.
#[derive(Debug, Default)]
struct Pace {
    /// How long its tasks take, the last ones counting most; `None` before the first.
    average: Option<Duration>,
    /// Grown step by step, so that one lucky task does not fill the inbox.
    reached: usize,
}

impl Pace {
    /// A task took so long.
    pub(crate) fn took(&mut self, took: Duration) {
        self.average = Some(match self.average {
            // A long one counts at once: whatever is behind it waits.
            Some(average) if took < average * 4 => average.mul_f64(0.75) + took.mul_f64(0.25),
            _ => took,
        });
        self.reached = (self.reached.max(1) * 2).min(self.most());
    }

    /// How many tasks it may have at once. `left` tasks wait and no more will come; so many workers share them.
    pub(crate) fn depth(&self, left: Option<usize>, workers: usize) -> usize {
        let depth = self.reached.clamp(1, self.most());
        match left {
            // The last ones are spread: nobody takes more than half of its part.
            Some(left) => depth.min((left / (2 * workers)).max(1)),
            None => depth,
        }
    }

    fn most(&self) -> usize {
        let Some(average) = self.average.filter(|average| *average <= SHORT) else { return 1 };
        let ahead = AHEAD.as_nanos() / average.as_nanos().max(1);
        usize::try_from(ahead).unwrap_or(DEPTH).clamp(2, DEPTH)
    }
}

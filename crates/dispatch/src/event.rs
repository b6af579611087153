//! What a run tells: tasks and what becomes of them, events, how it stands, and what goes wrong with it as a whole.

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, io};

use bytes::Bytes;
use serde::Serialize;

use crate::command::CommandOutput;

/// One thing that happened.
#[derive(Debug)]
pub enum RunEvent {
    /// A worker is set up.
    WorkerReady {
        /// Who.
        worker: WorkerId,
    },
    /// A worker could not be set up. It is tried again only where it had worked before.
    WorkerSetupFailed {
        /// Who.
        worker: WorkerId,
        /// In its own words, or how its process ended.
        why: Arc<str>,
    },
    /// A worker works on a task now. Told only where [`crate::RunPlan::report_started`] asks for it.
    TaskStarted {
        /// Which.
        task: TaskId,
        /// Who.
        worker: WorkerId,
        /// Since when.
        at: Instant,
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
    /// A task is over. Told once for each.
    TaskEnded(TaskEnd),
    /// A worker's process is gone; another takes its place unless `is_last`.
    WorkerGone {
        /// Who.
        worker: WorkerId,
        /// What of.
        cause: WorkerExitCause,
        /// The last it wrote to its standard error, where that is kept.
        stderr_tail: Arc<str>,
        /// Nobody takes its place.
        is_last: bool,
    },
    /// A worker could not clean up. No task is lost by that.
    WorkerCleanupFailed {
        /// Who.
        worker: WorkerId,
        /// In its own words.
        why: Arc<str>,
    },
    /// A worker wrote to its standard output or error. Told only with [`crate::WorkerOutputPolicy::Reported`].
    WorkerWrote {
        /// Who.
        worker: WorkerId,
        /// What, as it came: not cut at the ends of lines.
        bytes: Bytes,
    },
}

/// The end of a task.
#[derive(Debug)]
pub struct TaskEnd {
    /// Which.
    pub task: TaskId,
    /// Who had it last; `None` where nobody had it.
    pub worker: Option<WorkerId>,
    /// What became of it.
    pub outcome: TaskOutcome,
    /// Since when it was worked on, as far as is known.
    pub started: Option<Instant>,
    /// Since when it is over.
    pub finished: Instant,
    /// How often it was tried.
    pub tries: u32,
    /// What its command wrote, where each task is a command.
    pub output: Option<CommandOutput>,
}

impl TaskEnd {
    /// Of a task nobody wanted any more.
    pub(crate) fn never_started(task: TaskId) -> Self {
        let (worker, started, output) = (None, None, None);
        Self { task, worker, outcome: TaskOutcome::Cancelled, started, finished: Instant::now(), tries: 0, output }
    }
}

/// A task: its place in the source, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub struct TaskId(pub u64);

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A worker's place; whoever replaces it has the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub struct WorkerId(pub u32);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What became of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TaskOutcome {
    /// It was done, and this came of it.
    Done(Bytes),
    /// It failed; in the worker's words, such as a traceback.
    Failed(Bytes),
    /// It took longer than it may.
    TimedOut(Duration),
    /// Its worker died.
    WorkerLost(WorkerLoss),
    /// Nobody wants it any more.
    Cancelled,
}

/// A task whose worker died.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerLoss {
    /// How far it was.
    pub stage: LossStage,
    /// What the worker died of.
    pub cause: WorkerExitCause,
}

/// How far a task was when its worker died.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossStage {
    /// It was being worked on.
    Running,
    /// It was done, and its result died with the worker.
    ResultLost,
}

/// What a worker died of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerExitCause {
    /// It ended by itself, with this exit code.
    Exited(i32),
    /// A signal of this number that was not ours.
    Signalled(i32),
    /// It used more than it may, and was killed for it.
    BoundExceeded(gpupool_confine::bounds::BoundExceeded),
    /// It was interrupted, went on, and was killed for it.
    IgnoredInterrupt,
    /// It said what cannot be understood, and was killed for it.
    ProtocolViolation(Arc<str>),
    /// It could not be started again.
    StartFailed(Arc<str>),
    /// Its GPU was taken away.
    GpuWithdrawn(Arc<str>),
    /// Nobody wanted it any more.
    Stopped,
}

impl fmt::Display for WorkerExitCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "it exited with code {code}"),
            Self::Signalled(signal) => write!(f, "it was killed by signal {signal}"),
            Self::BoundExceeded(excess) => write!(f, "it was killed: {excess}"),
            Self::IgnoredInterrupt => write!(f, "it was killed: it did not let itself be interrupted"),
            Self::ProtocolViolation(what) => write!(f, "it was killed: {what}"),
            Self::StartFailed(why) => write!(f, "it could not be started: {why}"),
            Self::GpuWithdrawn(why) => write!(f, "its GPU was taken away: {why}"),
            Self::Stopped => write!(f, "it was stopped"),
        }
    }
}

impl fmt::Display for WorkerLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stage {
            LossStage::Running => write!(f, "the worker died at work: {}", self.cause),
            LossStage::ResultLost => write!(f, "the worker died before it told the result: {}", self.cause),
        }
    }
}

/// How many tasks are where, and what each worker does.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RunStats {
    /// Taken in and with no worker.
    pub pending: u64,
    /// With workers.
    pub running: u64,
    /// Done.
    pub completed: u64,
    /// Failed, those lost with their workers included.
    pub failed: u64,
    /// Of those that failed, lost with their workers.
    pub lost: u64,
    /// Took too long.
    pub timeouts: u64,
    /// Given up because nobody wanted them any more.
    pub cancelled: u64,
    /// Failures after which a task was tried again.
    pub retried: u64,
    /// The workers, in the order of their ids.
    pub workers: Vec<WorkerStats>,
}

impl RunStats {
    /// A task is over.
    pub(crate) fn count(&mut self, outcome: &TaskOutcome) {
        match outcome {
            TaskOutcome::Done(_) => self.completed += 1,
            TaskOutcome::Failed(_) => self.failed += 1,
            TaskOutcome::TimedOut(_) => self.timeouts += 1,
            TaskOutcome::WorkerLost(_) => (self.failed, self.lost) = (self.failed + 1, self.lost + 1),
            TaskOutcome::Cancelled => self.cancelled += 1,
        }
    }
}

/// What a worker does.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WorkerStats {
    /// Who.
    pub id: WorkerId,
    /// Its GPUs.
    pub gpu_ids: Vec<u32>,
    /// How it stands.
    pub state: WorkerState,
    /// Its process, where there is one.
    pub pid: Option<u32>,
    /// What it works on.
    pub task: Option<TaskId>,
    /// Since when.
    #[serde(skip)]
    pub task_since: Option<Instant>,
    /// Tasks it did.
    pub completed: u64,
    /// Tasks that failed in its hands.
    pub failed: u64,
    /// Tasks that took too long in its hands.
    pub timeouts: u64,
    /// How often its process was replaced.
    pub replaced: u64,
}

/// How a worker stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkerState {
    /// Its process is being started, or waits to be.
    Starting,
    /// It is being set up.
    SettingUp,
    /// It has nothing to do.
    Idle,
    /// It works.
    Busy,
    /// It cleans up, or is being killed.
    Ending,
    /// It is gone for good.
    Gone,
}

/// Why a run cannot begin or go on.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DispatchError {
    /// The plan asks for what cannot be.
    #[error("{field}: {value} is not possible; allowed is {allowed}")]
    Plan {
        /// Which field of the plan.
        field: &'static str,
        /// What it says.
        value: String,
        /// What it may say.
        allowed: &'static str,
    },
    /// No worker could be set up.
    #[error("All workers failed during setup; worker {worker}: {why}")]
    AllFailedSetup {
        /// The first that could not.
        worker: WorkerId,
        /// Why that one could not.
        why: Arc<str>,
    },
    /// No worker is left to do the rest.
    #[error("no worker is left; the last one, {worker}: {why}")]
    NoneLeft {
        /// The last one.
        worker: WorkerId,
        /// Why it is not replaced.
        why: Arc<str>,
    },
    /// The system refused what a run cannot do without.
    #[error("the dispatcher: {0}")]
    System(Arc<io::Error>),
}

impl From<io::Error> for DispatchError {
    fn from(error: io::Error) -> Self {
        Self::System(Arc::new(error))
    }
}

/// Why a task was not taken in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The run takes no more.
    #[error("the run takes no more tasks")]
    Closed,
    /// The queue is full.
    #[error("the queue is full")]
    Full,
    /// It is too large to be sent.
    #[error("a task of {0} bytes; allowed are up to {most}", most = crate::limits::MAX_FRAME_BYTES)]
    TooLarge(usize),
    /// It holds the end of a line, and the worker is given one line for each task.
    #[error("a task that is not one line")]
    NotALine,
}

/// Why a run did not come to its end in order. Every task that was taken in was told to be over all the same.
#[derive(Debug, thiserror::Error)]
pub enum RunError<E> {
    /// The source failed.
    #[error("the source of tasks failed")]
    Source(#[source] E),
    /// A task was not taken in.
    #[error(transparent)]
    Refused(SubmitError),
    /// The run could not go on.
    #[error(transparent)]
    Dispatch(DispatchError),
}

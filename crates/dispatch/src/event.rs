//! Events of a run, outcomes of tasks, statistics and errors.

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, io};

use bytes::Bytes;
use serde::Serialize;

use crate::command::CommandOutput;

/// An event of a run.
#[derive(Debug)]
pub enum RunEvent {
    /// A worker is set up.
    WorkerReady {
        /// Worker id.
        worker: WorkerId,
    },
    /// A worker failed to set up. It is retried only if a worker of its slot was set up before.
    WorkerSetupFailed {
        /// Worker id.
        worker: WorkerId,
        /// Reason reported by the worker, or the exit of its process.
        why: Arc<str>,
    },
    /// A worker starts a task. Reported only with [`crate::RunPlan::report_started`].
    TaskStarted {
        /// Task id.
        task: TaskId,
        /// Worker id.
        worker: WorkerId,
        /// Start time.
        at: Instant,
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
    /// A task has ended. Reported exactly once for each task.
    TaskEnded(TaskEnd),
    /// A worker's process has exited; another replaces it unless `is_last`.
    WorkerGone {
        /// Worker id.
        worker: WorkerId,
        /// Cause of the exit.
        cause: WorkerExitCause,
        /// End of the worker's output, if it was captured.
        output_tail: Arc<str>,
        /// Whether no other process replaces it.
        is_last: bool,
    },
    /// A worker failed to clean up. This loses no task.
    WorkerCleanupFailed {
        /// Worker id.
        worker: WorkerId,
        /// Reason reported by the worker.
        why: Arc<str>,
    },
    /// A worker wrote to its standard output or error. Reported only with [`crate::WorkerOutputPolicy::Reported`].
    WorkerWrote {
        /// Worker id.
        worker: WorkerId,
        /// Bytes as they were read, not split into lines.
        bytes: Bytes,
    },
}

/// The end of a task.
#[derive(Debug)]
pub struct TaskEnd {
    /// Task id.
    pub task: TaskId,
    /// Worker that ran the last attempt; `None` if the task had no worker.
    pub worker: Option<WorkerId>,
    /// Outcome of the task.
    pub outcome: TaskOutcome,
    /// Start of the last attempt, if known.
    pub started: Option<Instant>,
    /// End of the task.
    pub finished: Instant,
    /// Number of attempts.
    pub tries: u32,
    /// Output of the command, if the task is a command.
    pub output: Option<CommandOutput>,
}

impl TaskEnd {
    /// Creates the end of a task that was cancelled before it reached a worker.
    pub(crate) fn never_started(task: TaskId) -> Self {
        let (worker, started, output) = (None, None, None);
        Self { task, worker, outcome: TaskOutcome::Cancelled, started, finished: Instant::now(), tries: 0, output }
    }
}

/// Task id: position in the source, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub struct TaskId(pub u64);

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Id of a worker slot. A replacement process has the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub struct WorkerId(pub u32);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Outcome of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TaskOutcome {
    /// The task succeeded with this result.
    Done(Bytes),
    /// The task failed, with the worker's error text, such as a traceback.
    Failed(Bytes),
    /// The task exceeded this time limit.
    TimedOut(Duration),
    /// The worker exited before it reported a result.
    WorkerLost(WorkerLoss),
    /// The task was cancelled.
    Cancelled,
}

/// Loss of a task with its worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerLoss {
    /// Progress of the task.
    pub stage: LossStage,
    /// Cause of the worker's exit.
    pub cause: WorkerExitCause,
}

/// Progress of a task at the exit of its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossStage {
    /// The task was running.
    Running,
    /// The task was finished, and its result was lost with the worker.
    ResultLost,
}

/// Cause of a worker's exit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerExitCause {
    /// It exited on its own with this code.
    Exited(i32),
    /// A signal of this number, not sent by the dispatcher, killed it.
    Signalled(i32),
    /// It exceeded a bound and was killed.
    BoundExceeded(gpupool_confine::bounds::BoundExceeded),
    /// It ignored an interrupt and was killed.
    IgnoredInterrupt,
    /// It violated the worker protocol and was killed.
    ProtocolViolation(Arc<str>),
    /// Its process could not be started.
    StartFailed(Arc<str>),
    /// Its GPU was withdrawn.
    GpuWithdrawn(Arc<str>),
    /// The dispatcher stopped it.
    Stopped,
}

impl fmt::Display for WorkerExitCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "it exited with code {code}"),
            Self::Signalled(signal) => write!(f, "it was killed by signal {signal}"),
            Self::BoundExceeded(excess) => write!(f, "it was killed: {excess}"),
            Self::IgnoredInterrupt => write!(f, "it was killed: it ignored an interrupt"),
            Self::ProtocolViolation(violation) => write!(f, "it was killed: {violation}"),
            Self::StartFailed(why) => write!(f, "it could not be started: {why}"),
            Self::GpuWithdrawn(why) => write!(f, "its GPU was withdrawn: {why}"),
            Self::Stopped => write!(f, "it was stopped"),
        }
    }
}

impl fmt::Display for WorkerLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stage {
            LossStage::Running => write!(f, "the worker exited during the task: {}", self.cause),
            LossStage::ResultLost => write!(f, "the worker exited before it sent the result: {}", self.cause),
        }
    }
}

/// Counts of tasks by state, and the workers.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RunStats {
    /// Tasks that are not assigned to a worker.
    pub pending: u64,
    /// Tasks that are assigned to workers.
    pub running: u64,
    /// Tasks that succeeded.
    pub completed: u64,
    /// Tasks that failed, including those lost with their workers.
    pub failed: u64,
    /// Failed tasks that were lost with their workers.
    pub lost: u64,
    /// Tasks that exceeded the time limit.
    pub timeouts: u64,
    /// Tasks that were cancelled.
    pub cancelled: u64,
    /// Failed attempts that were followed by a retry.
    pub retried: u64,
    /// Workers in the order of their ids.
    pub workers: Vec<WorkerStats>,
}

impl RunStats {
    /// Adds the outcome of a task to the counts.
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

/// State and counts of a worker.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WorkerStats {
    /// Worker id.
    pub id: WorkerId,
    /// GPUs of the worker, by their numbers on the node.
    pub gpu_ids: Vec<u32>,
    /// State of the worker.
    pub state: WorkerState,
    /// Process id, if a process runs.
    pub pid: Option<u32>,
    /// Task that the worker runs.
    pub task: Option<TaskId>,
    /// Start of that task.
    #[serde(skip)]
    pub task_since: Option<Instant>,
    /// Tasks that it completed.
    pub completed: u64,
    /// Tasks that failed on it.
    pub failed: u64,
    /// Tasks that exceeded the time limit on it.
    pub timeouts: u64,
    /// Number of times that its process was replaced.
    pub replaced: u64,
}

/// State of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkerState {
    /// Its process is being started or waits to be started.
    Starting,
    /// The worker is setting up.
    SettingUp,
    /// The worker has no task.
    Idle,
    /// The worker runs a task.
    Busy,
    /// The worker cleans up or is being killed.
    Ending,
    /// The worker has exited and is not replaced.
    Gone,
}

/// Error that prevents or ends a run.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DispatchError {
    /// A field of the plan is invalid.
    #[error("{field} is {value}; it must be {allowed}")]
    Plan {
        /// Field of the plan.
        field: &'static str,
        /// Value of the field.
        value: String,
        /// Allowed values.
        allowed: &'static str,
    },
    /// No worker could be set up.
    #[error("All workers failed during setup; worker {worker}: {why}")]
    AllFailedSetup {
        /// Worker whose failure is reported.
        worker: WorkerId,
        /// Reason of that worker.
        why: Arc<str>,
    },
    /// No worker is left to run the remaining tasks.
    #[error("no worker is left; worker {worker} was the last: {why}")]
    NoneLeft {
        /// The last worker.
        worker: WorkerId,
        /// Reason for which it is not replaced.
        why: Arc<str>,
    },
    /// A system call that the run depends on failed.
    #[error("the dispatcher failed: {0}")]
    System(Arc<io::Error>),
}

impl From<io::Error> for DispatchError {
    fn from(error: io::Error) -> Self {
        Self::System(Arc::new(error))
    }
}

/// Reason for which a task was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The run accepts no more tasks.
    #[error("the run accepts no more tasks")]
    Closed,
    /// The task queue is full.
    #[error("the task queue is full")]
    Full,
    /// The payload exceeds the largest frame.
    #[error("a task of {0} bytes; at most {most} are allowed", most = crate::limits::MAX_FRAME_BYTES)]
    TooLarge(usize),
    /// The payload contains a line end, but the worker reads one line per task.
    #[error("a task with a line end, for a worker that reads one line per task")]
    NotALine,
}

/// Error of [`crate::Dispatcher::run`]. Every accepted task was reported as ended nevertheless.
#[derive(Debug, thiserror::Error)]
pub enum RunError<E> {
    /// The source of tasks failed.
    #[error("the source of tasks failed")]
    Source(#[source] E),
    /// A task was not accepted.
    #[error(transparent)]
    Refused(SubmitError),
    /// The run could not continue.
    #[error(transparent)]
    Dispatch(DispatchError),
}

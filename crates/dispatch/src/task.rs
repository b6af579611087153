//! A task, who works on it, and what becomes of it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

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
pub enum Outcome {
    /// It was done, and this came of it.
    Done(Bytes),
    /// It failed; in the worker's words, such as a traceback.
    Failed(Bytes),
    /// It took longer than it may.
    TimedOut(Duration),
    /// Its worker died.
    WorkerLost(Loss),
    /// Nobody wants it any more.
    Cancelled,
}

/// A task whose worker died.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// How far it was.
    pub stage: Stage,
    /// What the worker died of.
    pub cause: Cause,
}

/// How far a task was when its worker died.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// It was being worked on.
    Running,
    /// It was done, and its result died with the worker.
    ResultLost,
}

/// What a worker died of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// It ended by itself, with this exit code.
    Exited(i32),
    /// A signal of this number that was not ours.
    Signalled(i32),
    /// It used more than it may, and was killed for it.
    Excess(gpupool_confine::bounds::Excess),
    /// It was interrupted, went on, and was killed for it.
    Stuck,
    /// It said what cannot be understood, and was killed for it.
    Nonsense(Arc<str>),
    /// It could not be started again.
    NotStarted(Arc<str>),
    /// Its GPU was taken away.
    Withdrawn(Arc<str>),
    /// Nobody wanted it any more.
    Stopped,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "it exited with code {code}"),
            Self::Signalled(signal) => write!(f, "it was killed by signal {signal}"),
            Self::Excess(excess) => write!(f, "it was killed: {excess}"),
            Self::Stuck => write!(f, "it was killed: it did not let itself be interrupted"),
            Self::Nonsense(what) => write!(f, "it was killed: {what}"),
            Self::NotStarted(why) => write!(f, "it could not be started: {why}"),
            Self::Withdrawn(why) => write!(f, "its GPU was taken away: {why}"),
            Self::Stopped => write!(f, "it was stopped"),
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stage {
            Stage::Running => write!(f, "the worker died at work: {}", self.cause),
            Stage::ResultLost => write!(f, "the worker died before it told the result: {}", self.cause),
        }
    }
}

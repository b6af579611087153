//! What happens in a run, as it is told.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;

use crate::command::TaskOutput;
use crate::{Cause, Outcome, TaskId, WorkerId};

/// One thing that happened.
#[derive(Debug)]
pub enum Event {
    /// A worker is set up.
    Ready {
        /// Who.
        worker: WorkerId,
    },
    /// A worker could not be set up. It is tried again only where it had worked before.
    SetupFailed {
        /// Who.
        worker: WorkerId,
        /// In its own words, or how its process ended.
        why: Arc<str>,
    },
    /// A worker works on a task now. Told only where [`crate::Plan::tell_started`] asks for it.
    Started {
        /// Which.
        task: TaskId,
        /// Who.
        worker: WorkerId,
        /// Since when.
        at: Instant,
    },
    /// A task failed and is tried again.
    Retried {
        /// Which.
        task: TaskId,
        /// Who had it.
        worker: WorkerId,
        /// What would have become of it.
        outcome: Outcome,
    },
    /// A task is over. Told once for each.
    Over(Over),
    /// A worker's process is gone; another takes its place unless `is_last`.
    Gone {
        /// Who.
        worker: WorkerId,
        /// What of.
        cause: Cause,
        /// The last it wrote to its standard error, where that is kept.
        last_words: Arc<str>,
        /// Nobody takes its place.
        is_last: bool,
    },
    /// A worker could not clean up. No task is lost by that.
    CleanupFailed {
        /// Who.
        worker: WorkerId,
        /// In its own words.
        why: Arc<str>,
    },
    /// A worker wrote to its standard output or error. Told only with [`crate::WorkerOutput::Told`].
    Wrote {
        /// Who.
        worker: WorkerId,
        /// What, as it came: not cut at the ends of lines.
        bytes: Bytes,
    },
}

/// The end of a task.
#[derive(Debug)]
pub struct Over {
    /// Which.
    pub task: TaskId,
    /// Who had it last; `None` where nobody had it.
    pub worker: Option<WorkerId>,
    /// What became of it.
    pub outcome: Outcome,
    /// Since when it was worked on, as far as is known.
    pub started: Option<Instant>,
    /// Since when it is over.
    pub finished: Instant,
    /// How often it was tried.
    pub tries: u32,
    /// What its command wrote, where each task is a command.
    pub output: Option<TaskOutput>,
}

impl Over {
    /// Of a task nobody wanted any more.
    pub(crate) fn never_begun(task: TaskId) -> Self {
        let (worker, started, output) = (None, None, None);
        Self { task, worker, outcome: Outcome::Cancelled, started, finished: Instant::now(), tries: 0, output }
    }
}

//! What can go wrong with a run as a whole.

use std::io;
use std::sync::Arc;

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
        worker: crate::WorkerId,
        /// Why that one could not.
        why: Arc<str>,
    },
    /// No worker is left to do the rest.
    #[error("no worker is left; the last one, {worker}: {why}")]
    NoneLeft {
        /// The last one.
        worker: crate::WorkerId,
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
pub enum Refused {
    /// The run takes no more.
    #[error("the run takes no more tasks")]
    Closed,
    /// The queue is full.
    #[error("the queue is full")]
    Full,
    /// It is too large to be sent.
    #[error("a task of {0} bytes; allowed are up to {most}", most = crate::limits::FRAME_BYTES)]
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
    Refused(Refused),
    /// The run could not go on.
    #[error(transparent)]
    Dispatch(DispatchError),
}

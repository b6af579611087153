//! What can go wrong with a resource pool, by who is told.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use gpupool_confine::bounds::Excess;

use super::limits::{TASK_ID_BYTES, WAITING};
use crate::gpus::GpuError;
use crate::{Cause, Refused};

/// Why there is no pool.
#[derive(Debug, thiserror::Error)]
pub enum ResourceError {
    /// The configuration asks for what cannot be.
    #[error("{field} must be {allowed}, got {value}")]
    Config {
        /// Which field.
        field: &'static str,
        /// What it may say.
        allowed: String,
        /// What it says.
        value: String,
    },
    /// The file of the audit trail cannot be written.
    #[error("the audit trail {}: {source}", path.display())]
    Audit {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// GPUs cannot be asked for.
    #[error(transparent)]
    Gpus(#[from] GpuError),
    /// The system refused what a pool cannot do without.
    #[error("the resource pool: {0}")]
    System(#[from] io::Error),
}

/// Why somebody got no worker.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AcquireError {
    /// None was free in time.
    #[error("no worker was free within {}{}", Seconds(*patience), Because(why))]
    Timeout {
        /// How long it was waited.
        patience: Duration,
        /// Why there is none at all, if none lives.
        why: Option<Arc<str>>,
    },
    /// There is none, and none can be started.
    #[error("no worker can be started: {0}")]
    NoWorker(Arc<str>),
    /// The pool is shut down.
    #[error("the resource pool is shut down")]
    Closed,
    /// Too many wait already.
    #[error("{WAITING} wait for a worker already, and no more may")]
    TooManyWaiting,
    /// The name of the task is too long.
    #[error("a task id of {0} bytes; allowed are up to {TASK_ID_BYTES}")]
    TaskId(usize),
}

/// Why a worker did not do what was wanted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkerError {
    /// The work itself failed; in the worker's words, such as a traceback. The worker lives on.
    #[error("{}", String::from_utf8_lossy(.0))]
    Failed(Bytes),
    /// It was held for longer than it may be, and was killed.
    #[error("Worker exceeded {} timeout", Seconds(*.0))]
    Timeout(Duration),
    /// It used more memory than it may (in bytes), and was killed.
    #[error("Worker exceeded {}MB memory limit", Mebibytes(*.0))]
    Memory(u64),
    /// It used more of something else than it may, and was killed.
    #[error("Worker exceeded its limits: {0}")]
    Excess(Excess),
    /// Whoever held it killed it.
    #[error("the worker was killed by whoever held it")]
    Killed,
    /// It died.
    #[error("the worker was lost: {0}")]
    Lost(Cause),
    /// It was given back while it was still at this.
    #[error("the worker was given back before it was done")]
    GivenBack,
    /// The pool was shut down.
    #[error("the resource pool is shut down")]
    Closed,
    /// The work was not taken.
    #[error(transparent)]
    Refused(#[from] Refused),
}

impl WorkerError {
    /// Whether it tells of a limit that was passed.
    pub fn is_limit(&self) -> bool {
        matches!(self, Self::Timeout(_) | Self::Memory(_) | Self::Excess(_))
    }

    pub(super) fn of_excess(excess: Excess) -> Self {
        match excess {
            Excess::HostMemory { allowed, .. } => Self::Memory(allowed),
            other => Self::Excess(other),
        }
    }
}

/// A time as people write it: `1s`, `0.25s`.
pub(super) struct Seconds(pub Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}s", self.0.as_secs_f64())
    }
}

struct Mebibytes(u64);

impl fmt::Display for Mebibytes {
    #[allow(clippy::cast_precision_loss, reason = "it is for people")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self.0 as f64 / f64::from(1 << 20)).fmt(f)
    }
}

struct Because<'a>(&'a Option<Arc<str>>);

impl fmt::Display for Because<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(why) => write!(f, "; {why}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_told_in_the_words_programs_know() {
        let timeout = |millis| WorkerError::Timeout(Duration::from_millis(millis)).to_string();
        assert_eq!(timeout(1_000), "Worker exceeded 1s timeout");
        assert_eq!(timeout(250), "Worker exceeded 0.25s timeout");
        assert_eq!(WorkerError::Memory(512 << 20).to_string(), "Worker exceeded 512MB memory limit");
        assert_eq!(WorkerError::Memory(3 << 19).to_string(), "Worker exceeded 1.5MB memory limit");
    }
}

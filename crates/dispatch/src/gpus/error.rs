//! What can go wrong with GPUs from the pool, by what the caller can do about it.

use std::io;

use gpupool_client::ClientError;

use super::limits::ANSWER_PATIENCE;

/// Why something about GPUs was not done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// The wish makes no sense: change it.
    #[error("{field} is {value}, and must be {allowed}")]
    Wish {
        /// Which part of it.
        field: &'static str,
        /// What it was.
        value: String,
        /// What is allowed.
        allowed: String,
    },
    /// The lease is not held any more: wait for the next one.
    #[error("lease {lease} is not held any more")]
    NotHeld {
        /// Which.
        lease: u64,
    },
    /// The agent said no, or nobody answers.
    #[error(transparent)]
    Agent(#[from] ClientError),
    /// The agent does not answer: try again later, or go on without.
    #[error("the agent did not answer within {} s", ANSWER_PATIENCE.as_secs())]
    Silent,
    /// The GPUs are being given back.
    #[error("the GPUs are being given back")]
    Stopped,
    /// The system does not let us have a thread for it.
    #[error("cannot start the thread that keeps GPUs ({0})")]
    System(#[from] io::Error),
}

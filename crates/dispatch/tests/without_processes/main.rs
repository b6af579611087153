//! Parts that start no process. A process started by another test inherits this program's files, and with them the lock
//! of a job log, until it runs its own program.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod handoff;
mod job_log;

// Dependencies of `src/driver_handoff.rs`, as its test replaces them.
use handoff::{limits, sync};

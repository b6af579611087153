//! Parts that start no process. A process that another test starts has the files of this program open until it runs its own
//! program, and with them the lock of a job log.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod driver_handoff;
mod job_log;

// What `src/shift.rs` uses, as the test of it wants it.
use driver_handoff::{limits, sync};

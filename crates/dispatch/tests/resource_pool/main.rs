//! What must be true of a resource pool, with real worker processes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod ends;
mod kit;
mod leased;
mod limits;
mod line;
#[path = "../../../../tests/skipped.rs"]
mod skipped;
#[path = "../support/mod.rs"]
#[allow(dead_code, reason = "other stories use the rest")]
mod support;
mod workers;

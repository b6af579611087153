//! Behavior of a resource pool with real worker processes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod acquire;
mod gpu_leases;
mod limits;
mod shutdown;
#[path = "../../../../tests/skipped.rs"]
mod skipped;
#[path = "../support/mod.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod support;
mod test_pool;
mod workers;

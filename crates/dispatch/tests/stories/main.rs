//! Behavior of a run with real worker processes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod bounds;
#[path = "../support/runs.rs"]
mod common;
mod early_ends;
mod examples;
#[path = "../support/mod.rs"]
mod support;
mod tasks;
mod time_limits;
mod worker_deaths;
mod worker_kinds;
mod worker_setup;

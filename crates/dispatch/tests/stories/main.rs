//! What must be true of a run, with real worker processes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod bounds;
#[path = "../support/runs.rs"]
mod common;
mod deaths;
mod ends;
mod examples;
mod kinds;
mod setting_up;
#[path = "../support/mod.rs"]
mod support;
mod tasks;
mod times;

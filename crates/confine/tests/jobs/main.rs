//! Jobs from their start to their end: followed, given the terminal, and leaving nothing behind.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod a_job_has_the_terminal;
mod a_job_is_followed;
mod ends_and_failures_are_told;
mod nothing_outlives_the_starter;
#[path = "../support/mod.rs"]
mod support;

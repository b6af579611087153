//! Jobs from start to end: events, the terminal, and no process left behind.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod a_job_has_the_terminal;
mod a_job_is_followed;
mod exit_status_and_errors_are_reported;
mod nothing_outlives_the_starter;
#[path = "../support/mod.rs"]
mod support;

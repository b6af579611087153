//! The client with many endpoints, end to end: real agents in their own processes, behind proxies that fail on demand.
//!
//! All tests are one program, so that it is linked once. `scripts/soak` runs the long form of the chaos test.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod access;
mod authority;
mod balance;
mod chaos;
mod client_crash;
mod command_line;
mod common;
mod examples;
mod faults;
mod lifecycle;
mod pulled_cable;
mod waiting;

//! The client of many endpoints, end to end: real agents in processes of their own, over paths that go wrong on demand.
//!
//! One program for all stories, so that it is linked once. `scripts/soak` runs the long form of the chaos.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod access;
mod authority;
mod balance;
mod cable;
mod chaos;
mod command_line;
mod common;
mod dying;
mod examples;
mod faults;
mod lifecycle;
mod waiting;

//! Fuzz tests: for any input, each reader returns a sound reading or an error.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod damaged_tool_output;
mod fuzz_formats;
mod fuzz_invariants;

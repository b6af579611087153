//! Whatever the bytes, each reader ends with something sound or with an error.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod damaged_tools;
mod fuzz_formats;
mod fuzzed;

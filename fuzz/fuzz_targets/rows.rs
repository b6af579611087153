//! Rows and commands, one JSON value a line: the pool comes up, keeps its books and goes on.

#![no_main]

#[allow(dead_code)]
#[path = "../../crates/core/tests/support/mod.rs"]
mod support;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| support::fuzzed::rows(bytes));

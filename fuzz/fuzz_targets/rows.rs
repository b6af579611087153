//! Rows and commands, one JSON value per line: the pool restores, keeps its invariants and continues.

#![no_main]

#[allow(dead_code)]
#[path = "../../crates/core/tests/support/mod.rs"]
mod support;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| support::fuzzed::rows(bytes));

//! Request bodies: any bytes become a request the pool can judge, or an error that names the field.

#![no_main]

#[allow(dead_code)]
#[path = "../../crates/core/tests/support/mod.rs"]
mod support;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| support::fuzzed::request_body(bytes));

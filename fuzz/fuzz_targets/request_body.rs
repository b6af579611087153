//! Request bodies: any bytes give a request that the pool accepts or denies, or an error that names the field.

#![no_main]

#[allow(dead_code)]
#[path = "../../crates/core/tests/support/mod.rs"]
mod support;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| support::fuzzed::request_body(bytes));

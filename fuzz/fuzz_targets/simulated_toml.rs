//! Simulated devices, as TOML: any input gives a valid value or an error.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| gpupool_fuzz::devices::run("simulated_toml", bytes));

//! Captures in the format `sysfs`: any input gives a valid reading or an error.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| gpupool_fuzz::devices::run("sysfs", bytes));

//! Captures in the format `hwloc-xml`: what is read is sound, or there is an error.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| gpupool_fuzz::devices::run("hwloc", bytes));

//! The binary table `gpu_metrics`: any input gives a valid value or an error.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| gpupool_fuzz::devices::run("gpu_metrics", bytes));

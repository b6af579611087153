//! The binary table `gpu_metrics`: what is read is sound, or there is an error.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| gpupool_fuzz::devices::run("gpu_metrics", bytes));

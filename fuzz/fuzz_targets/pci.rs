//! Captures in the format `pci`: any input gives a valid reading or an error.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| gpupool_fuzz::devices::run("pci", bytes));

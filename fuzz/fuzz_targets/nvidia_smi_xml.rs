//! Captures in the format `nvidia-smi-xml`: what is read is sound, or there is an error.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| gpupool_fuzz::devices::run("nvidia_smi_xml", bytes));

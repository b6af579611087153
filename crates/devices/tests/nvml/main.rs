//! Tests of the NVML source against a stand-in for NVIDIA's library, loaded by the real loader.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod nvml_devices;
mod nvml_failure_isolation;
mod nvml_failures;
mod nvml_machine;
mod nvml_python;
#[path = "../../../../tests/skipped.rs"]
mod skipped;

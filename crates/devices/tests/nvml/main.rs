//! The real way to NVIDIA's library, against a stand-in for it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod machine;
mod nvml_any_failure;
mod nvml_devices;
mod nvml_python;
mod nvml_troubles;
#[path = "../../../../tests/skipped.rs"]
mod skipped;

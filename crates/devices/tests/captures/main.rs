//! Tests that read captures: our own small ones, and those of real machines if present.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod capture_fixtures;
mod captured_amd_sysfs;
mod captured_amd_tools;
mod captured_doctor;
mod captured_machines;
mod captured_nvidia_smi;
mod golden;
mod nvidia_smi_variants;
mod old_bundles;
#[path = "../../../../tests/skipped.rs"]
mod skipped;

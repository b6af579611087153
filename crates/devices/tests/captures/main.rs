//! What people captured of machines, read back: our own small captures, and those of real machines where they are at hand.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod captured_amd_sysfs;
mod captured_amd_tools;
mod captured_doctor;
mod captured_machines;
mod captured_nvidia_smi;
mod golden;
mod nvidia_smi_variants;
mod old_bundles;
mod own;
#[path = "../../../../tests/skipped.rs"]
mod skipped;

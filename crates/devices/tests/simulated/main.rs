//! Tests of simulated devices and of the tracker.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod simulated_devices;
mod simulated_faults;
mod simulated_properties;
mod tracker;

//! Simulated devices, and what the tracker makes of readings.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod simulated_faults;
mod simulated_properties;
mod simulated_stories;
mod tracker;

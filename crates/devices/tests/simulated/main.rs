//! Simulated devices, and the books that are kept over their readings.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod simulated_faults;
mod simulated_properties;
mod simulated_stories;
mod watch;

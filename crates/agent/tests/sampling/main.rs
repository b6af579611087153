//! What the sampler tells of devices, and the statistics made of it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod nvml;
mod sampled;
mod simulated;
mod stats_properties;
mod troubles;

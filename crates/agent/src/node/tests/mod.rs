//! Samples and statistics of simulated devices, of a stand-in for NVIDIA's library, and of scripted sources.

mod failures;
mod nvml;
mod simulated;
mod stage;
mod stats_properties;

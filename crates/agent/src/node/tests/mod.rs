//! Samples and statistics of simulated devices, of a stand-in for NVIDIA's library, and of scripted sources.

mod nvml;
mod sampled;
mod simulated;
mod stats_properties;
mod troubles;

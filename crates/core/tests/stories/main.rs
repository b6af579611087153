//! Tests of the pool by topic, and fuzzed input that it must survive.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod bad_rows;
mod batches;
mod closed_devices;
mod draining;
mod forgetting;
mod fuzz_requests;
mod fuzz_rows;
mod host_resources;
mod leases;
mod memory;
mod partitions;
mod policies;
mod queue;
mod restore;
mod several_gpus;
mod strategies;
#[path = "../support/mod.rs"]
mod support;
mod thresholds;

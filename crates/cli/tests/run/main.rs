//! `gpupool run`, and GPUs leased for a run of many workers, through the real binary and real agents.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod environment_and_exit;
mod gpu_leases;
mod host_memory;
mod leaves_nothing_behind;
mod locality;
mod nested;
#[path = "../support/mod.rs"]
mod support;
mod survives_the_agent;
mod terminal;
mod waiting;

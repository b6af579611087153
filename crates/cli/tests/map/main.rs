//! `gpupool map` through the real binary: commands, output, log, ends, limits, GPUs and the terminal.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod commands;
mod early_end;
mod gpus;
mod job_log;
mod limits;
mod output;
#[path = "../support/mod.rs"]
mod support;
mod terminal;
mod usage;
mod workers;

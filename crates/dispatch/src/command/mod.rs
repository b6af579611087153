//! A command for each task.
//!
//! A runner, which is this very program started again, is the worker: it starts each task's command, waits for it, ends what
//! the command left behind, and says how it went. What commands write goes to two files the dispatcher made, one behind the
//! other; so it needs no copying and survives the runner. A program that dispatches commands calls [`main_if_asked`] first
//! thing in its `main`.

mod line;
mod output;
mod report;
mod runner;

pub use line::CommandLine;
pub(crate) use output::Spool;
pub use output::TaskOutput;
pub use report::Report;
pub use runner::main_if_asked;

/// The first argument that makes this program a runner.
pub(crate) const RUNNER_ARGUMENT: &str = "gpupool-command-runner";

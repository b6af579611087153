//! Feeding tasks to long-lived worker processes, each task with exactly one outcome.
//!
//! - [`Dispatcher`]: a run: a [`RunPlan`] and tasks in, [`RunEvent`]s out.
//! - [`protocol`]: memory that dispatcher and worker share.
//! - [`worker`]: the worker's side of it, in Rust.
//! - [`command`]: a command for each task.
//! - [`resource_pool`]: workers that are handed out one by one, each held to limits.
//! - [`gpu_leases`]: leases on GPUs of the pool, for as long as a run lives.
//! - [`job_log`]: the log of finished tasks, from which an interrupted run goes on.
//!
//! A program that dispatches calls [`run_helper_if_requested`] first thing in its `main`.
//!
//! Inside, the `ledger` decides: who has which task, what is sent next, what became of each. It touches nothing; the `engine`
//! around it starts processes, sends and reads.

#![warn(missing_docs, unreachable_pub)]

pub mod command;
mod dispatcher;
mod engine;
mod event;
pub mod gpu_leases;
pub mod job_log;
mod ledger;
mod limits;
mod plan;
mod process;
pub mod protocol;
pub mod resource_pool;
mod shift;
/// What [`shift`] is built of, in a module so that its test can use its own.
mod sync {
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
}
pub mod worker;

pub use dispatcher::{Dispatcher, RunHandle};
pub use event::{
    DispatchError, LossStage, RunError, RunEvent, RunStats, SubmitError, TaskEnd, TaskId, TaskOutcome, WorkerExitCause,
    WorkerId, WorkerLoss, WorkerState, WorkerStats,
};
pub use ledger::DispatchRules;
pub use plan::{AttachDenied, AttachHook, ResultOrder, RunPlan, WorkerOutputPolicy, WorkerProgram, WorkerSlot};

/// Runs as the supervisor of a process, or as the runner of commands, and never comes back, if this program was started as one.
pub fn run_helper_if_requested() {
    gpupool_confine::supervisor::run_helper_if_requested();
    command::run_helper_if_requested();
}

/// Compiles the programs of the guides.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../../../docs/dispatch.md")]
    mod dispatching {}
    #[doc = include_str!("../../../docs/resource-pool.md")]
    mod resource_pools {}
}

//! Runs tasks on long-lived worker processes. Each task has exactly one outcome.
//!
//! - [`Dispatcher`]: a run, which takes a [`RunPlan`] and tasks and returns [`RunEvent`]s.
//! - [`protocol`]: memory that dispatcher and worker share.
//! - [`worker`]: the worker's side of the protocol, in Rust.
//! - [`command`]: one command per task.
//! - [`resource_pool`]: workers that are acquired one by one and held to limits.
//! - [`gpu_leases`]: leases on GPUs for the life of a run.
//! - [`job_log`]: log of finished tasks, with which an interrupted run can resume.
//!
//! A program that dispatches calls [`run_helper_if_requested`] first in its `main`.
//!
//! Inside, the `scheduler` decides without I/O which worker runs which task. The `engine` around it starts processes,
//! sends tasks and reads results.

#![warn(missing_docs, unreachable_pub)]

pub mod command;
mod dispatcher;
mod driver_handoff;
mod engine;
mod event;
pub mod gpu_leases;
pub mod job_log;
mod limits;
mod plan;
mod process;
pub mod protocol;
pub mod resource_pool;
mod scheduler;
/// Primitives of [`driver_handoff`], in a module that its test replaces.
mod sync {
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
}
pub mod worker;

pub use dispatcher::{Dispatcher, RunHandle};
pub use event::{
    DispatchError, LossStage, RunError, RunEvent, RunStats, SubmitError, TaskEnd, TaskId, TaskOutcome, WorkerExitCause,
    WorkerId, WorkerLoss, WorkerState, WorkerStats,
};
pub use plan::{AttachDenied, AttachHook, ResultOrder, RunPlan, WorkerOutputPolicy, WorkerProgram, WorkerSlot};
pub use scheduler::DispatchRules;

/// Runs as process supervisor or command runner and never returns, if this program was started as one.
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

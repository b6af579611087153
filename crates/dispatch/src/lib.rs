//! Feeding tasks to long-lived worker processes, each task with exactly one outcome.
//!
//! - [`Dispatcher`]: a run: a [`Plan`] and tasks in, [`Event`]s out.
//! - [`protocol`]: what dispatcher and worker say to each other, byte for byte, so that any language can write a worker.
//! - [`worker`]: the worker's side of it, in Rust.
//! - [`command`]: a command for each task.
//! - [`resource_pool`]: workers that are handed out one by one, each held to limits.
//! - [`gpus`]: leases on GPUs of the pool, for as long as a run lives.
//! - [`ledger`]: who has which task, what is sent next, what became of each; decides, and touches nothing.
//! - [`joblog`]: the log of finished tasks, from which an interrupted run goes on.
//!
//! A program that dispatches calls [`main_if_asked`] first thing in its `main`.

#![warn(missing_docs)]

pub mod command;
mod dispatcher;
mod engine;
mod event;
pub mod gpus;
pub mod joblog;
pub mod ledger;
pub mod limits;
mod plan;
mod process;
pub mod protocol;
pub mod resource_pool;
mod shift;
/// What [`shift`] is built of, in a module so that its test can use its own.
mod sync {
    pub use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
}
pub mod worker;

pub use dispatcher::{Dispatcher, Remote};
pub use event::{
    Cause, DispatchError, Event, Loss, Outcome, Over, Refused, RunError, Stage, Stats, TaskId, WorkerId, WorkerState,
    WorkerStats,
};
pub use ledger::Rules;
pub use plan::{Attach, NotAttached, Order, Place, Plan, Program, WorkerOutput};

/// Runs as the keeper of a process, or as the runner of commands, and never comes back, if this program was started as one.
pub fn main_if_asked() {
    gpupool_confine::keeper::main_if_asked();
    command::main_if_asked();
}

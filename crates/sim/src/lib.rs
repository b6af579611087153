//! How good a placement strategy is, measured by replaying traces through the real [`gpupool_core::Pool`].
//!
//! [`trace`] reads a folder of traces, a [`Scenario`] says what to do with it: [`replay`] fills an empty cluster with
//! arrivals that never leave, [`churn`] lets them leave; [`plot`] draws the outcome.

pub mod churn;
pub mod plot;
pub mod replay;
mod scenario;
pub mod trace;

pub use scenario::{NodeOrdering, Scenario, WorkloadSource};

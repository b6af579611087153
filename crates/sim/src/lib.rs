//! Measures placement strategies by replaying traces through the real [`gpupool_core::Pool`].
//!
//! [`trace`] reads a folder of traces and a [`Scenario`] selects the simulation: [`replay`] fills an empty cluster with
//! arrivals that never leave, [`churn`] lets them leave, and [`plot`] draws the result.

pub mod churn;
pub mod plot;
pub mod replay;
mod scenario;
pub mod trace;

pub use scenario::{NodeOrdering, Scenario, WorkloadSource};

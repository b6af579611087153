//! Holding jobs to bounds: host memory, processes and threads, processor time, memory of devices.
//!
//! A [`Watcher`] puts each job into a control group, where one can be made, and lets the kernel keep what it can. All else
//! one thread keeps by looking at the job's processes, the more often the closer the job is to a bound; it tells the
//! caller, who kills. Which way each bound is kept is an [`Enforcement`], to be shown to people. A job is everything
//! below its keeper, so what it orphans is found as well. Looking after eight jobs that are far from their bounds takes
//! 0.2 to 0.3 % of a core on a machine with a hundred processes.
//! The thread ends when the watcher is dropped; a job is no longer looked at when its [`Held`] is dropped.

mod bound;
mod enforcement;
mod excess;
mod hold;
mod look;
mod pace;
mod processors;
mod table;
mod tree_memory;
mod watcher;

pub use bound::{Bounds, Usage};
pub use enforcement::{Enforcement, Means};
pub use excess::Excess;
pub use hold::Held;
pub use watcher::Watcher;

pub use crate::cgroup::DeviceMemory;

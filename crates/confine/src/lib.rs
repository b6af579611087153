//! Starting processes that cannot escape: spawn, process tree, cgroups, limits, kill.
//!
//! - [`spawn`]: a job that never outlives the program that started it.
//! - [`keeper`]: the small processes between starter and job that see to that. A program that spawns jobs calls
//!   [`keeper::main_if_asked`] first thing in its `main`.
//! - [`cgroup`]: one control group per lease, with limits the kernel enforces and a kill nothing dodges.
//! - [`bounds`]: what a job may use, kept by the kernel where it can, else by looking.
//! - [`process`]: a process known for sure (pid and start time), and its descendants.

pub mod bounds;
pub mod cgroup;
pub mod keeper;
pub mod limits;
pub mod process;
pub mod spawn;

use std::time::Duration;

pub use rustix::process::Signal;

/// A duration as the system calls take it.
pub(crate) fn timespec(duration: Duration) -> rustix::event::Timespec {
    let tv_sec = i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    rustix::event::Timespec { tv_sec, tv_nsec: i64::from(duration.subsec_nanos()) }
}

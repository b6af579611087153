//! The bounds of sampling.

use std::time::Duration;

/// How long the first round waits for sources before the agent goes on without those that did not answer.
pub const FIRST_PATIENCE: Duration = Duration::from_millis(80);
/// The longest that a later round waits for all sources before it is told; late answers are told when they come.
pub const PATIENCE: Duration = Duration::from_millis(250);
/// The shortest time between two rounds.
pub const SHORTEST_REFRESH: Duration = Duration::from_millis(10);
/// After how long without an answer a source is said to be unresponsive, unless told otherwise.
pub const UNRESPONSIVE_AFTER: Duration = Duration::from_secs(10);

/// Ancestors of a process that are looked at.
pub const ANCESTORS: usize = 64;
/// Bytes read of the environment of a process.
pub const ENVIRONMENT_BYTES: u64 = 1 << 20;
/// Bytes read of another file about a process.
pub const PROC_BYTES: u64 = 64 << 10;
/// After how long a process is looked at again: it may have replaced its program and with it its environment.
pub const LOOK_AGAIN: Duration = Duration::from_secs(10);

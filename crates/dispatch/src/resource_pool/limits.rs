//! The bounds of resource pools, each with its reason.

use std::time::Duration;

/// How long somebody waits for a worker, unless said.
pub const ACQUIRE_PATIENCE: Duration = Duration::from_secs(30);
/// How long a worker above the least number may idle, unless said.
pub const IDLE_TIME: Duration = Duration::from_secs(60);
/// How long a worker may take to be set up, unless said: a model that is loaded over a slow network.
pub const SETUP_PATIENCE: Duration = Duration::from_secs(300);
/// Those who wait for a worker of one pool.
pub const WAITING: usize = 65_536;
/// Bytes of the name of whoever holds a worker.
pub const TASK_ID_BYTES: usize = 1_024;
/// Holds that an audit trail keeps in memory, and gives back when it is read.
pub const AUDIT_ENTRIES: usize = 10_000;
/// Longest line of an audit trail.
pub const AUDIT_LINE_BYTES: u64 = 64 * 1_024;
/// Lines of an audit trail on their way to a slow disk; more are left out, and that is told.
pub const AUDIT_UNWRITTEN: usize = 16_384;
/// How often an audit trail is made safe against a crash of the machine. A crash of the program loses nothing that was written.
pub const AUDIT_SYNC: Duration = Duration::from_secs(1);
/// Longest time anything may be allowed to take, ten years: with more, clocks would run over.
pub const LONGEST_TIME: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

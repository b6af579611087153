//! The bounds of this crate, each with its reason.

use std::time::Duration;

/// How often the memory of a process tree is measured where no memory cgroup can be had. One measurement of a
/// hundred processes takes a few milliseconds; a second keeps that below one percent of a core.
pub const TREE_MEMORY_INTERVAL: Duration = Duration::from_secs(1);

/// How often a cgroup v1 group is looked at while waiting for it to become empty; v1 sends no event.
pub const EMPTY_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The longest name of a group.
pub const GROUP_NAME_LENGTH: usize = 64;

/// How deep a job may nest cgroups below its own before we stop looking (the kernel's own default is unlimited).
pub const GROUP_DEPTH: usize = 32;

/// How long a kill without `cgroup.kill` goes on signalling before it says who is left.
pub const GROUP_KILL_PATIENCE: Duration = Duration::from_secs(5);

/// Pause between two rounds of killing, in which the signalled processes get to die.
pub const KILL_ROUND_PAUSE: Duration = Duration::from_millis(10);

/// Pause between two rounds once [`CLEAN_UP_PATIENCE`] is over: what has not died by then hangs for long.
pub const STUCK_ROUND_PAUSE: Duration = Duration::from_secs(1);

/// How long a fresh keeper may take to say that the job's process exists.
pub const KEEPER_START_PATIENCE: Duration = Duration::from_secs(30);

/// How long the end of a job is held back for what it left behind. Only a process stuck inside the kernel (a hung
/// driver) or one of another user takes longer; then the end is told, with the number of those still there.
pub const CLEAN_UP_PATIENCE: Duration = Duration::from_secs(5);

/// How long dropping a job waits until its processes are gone.
pub const DROP_PATIENCE: Duration = Duration::from_secs(5);

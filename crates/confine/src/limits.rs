//! The bounds of this crate, each with its reason.

use std::time::Duration;

/// The shortest pause between two looks at a job that is close to a bound. At 200 MiB a second a job gets 2 MiB further
/// in it; reading the memory of ten known processes takes 0.1 ms of it.
pub const SHORTEST_LOOK_PAUSE: Duration = Duration::from_millis(10);

/// The same where every look has to go through all of `/proc`, which takes about 15 µs for each process of the machine.
pub const SHORTEST_TREE_PAUSE: Duration = Duration::from_millis(50);

/// The longest pause between two looks, at a job that is far from all its bounds.
pub const LONGEST_LOOK_PAUSE: Duration = Duration::from_secs(1);

/// How fast a job is taken to fill memory, in bytes a second: about what one core touches for the first time. The next
/// look comes before a job this fast can pass its bound.
pub const MEMORY_GROWTH: u64 = 2 << 30;

/// How many processes a job is taken to start in a second. A loop of forks makes more, but is then seen on the way:
/// jobs that keep a few spare processes free must not cost a look through `/proc` every few milliseconds.
pub const PROCESS_GROWTH: u64 = 250;

/// The part of a core that may go into finding a job's processes while only its memory has to be looked at: one in so
/// many.
pub const TREE_COST_SHARE: u32 = 20;

/// The longest time in which a new process of a job is not seen yet by those looks at memory.
pub const LONGEST_TREE_AGE: Duration = Duration::from_millis(250);

/// How long the fair share of memory that others share too is believed. It can grow without the job's doing, when
/// others let go; to read it takes the kernel milliseconds for each GiB.
pub const FAIR_SHARE_AGE: Duration = Duration::from_secs(5);

/// How often it is asked whether the kernel killed a process of a job for want of memory, where it kills one and not all.
pub const KERNEL_KILLS_PAUSE: Duration = Duration::from_millis(250);

/// The most that is read of one file about a process; the longest we need has a few KiB.
pub const PROC_FILE_LENGTH: u64 = 1 << 20;

/// How often a cgroup v1 group is looked at while waiting for it to become empty; v1 sends no event.
pub const EMPTY_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The longest name of a group.
pub const GROUP_NAME_LENGTH: usize = 64;

/// How deep a job may nest cgroups below its own before we stop looking (the kernel's own default is unlimited).
pub const GROUP_DEPTH: usize = 32;

/// How long a group that seems to be nobody's must have been so before it is removed. Its owner, if it lives, removes it
/// within milliseconds; or takes [`DROP_PATIENCE`], where a process hangs, but then the group is not empty.
pub const LEFTOVER_AGE: Duration = Duration::from_secs(2);

/// How many of those are removed by one watcher: to look at each takes about 0.1 ms, in which no job is looked at.
pub const LEFTOVERS: usize = 256;

/// How often we look at who else is in a group before we believe that it is a stranger, as processes come and go meanwhile.
pub const STRANGER_LOOKS: usize = 4;

/// How often we move what is ours out of a group; each time leaves only what was started meanwhile.
pub const LEAF_ROUNDS: usize = 20;

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

/// How long those who keep a job may take to end it before they are killed themselves: somebody may have stopped them. Beyond
/// [`CLEAN_UP_PATIENCE`], so that who is merely busy is not.
pub const STOPPED_PATIENCE: Duration = Duration::from_secs(6);

/// How often a job that should end, or begin, is looked at in case somebody stopped those who keep it.
pub const STOPPED_PAUSE: Duration = Duration::from_millis(200);

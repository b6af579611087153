//! Limits and intervals of this crate, each with its reason.

use std::time::Duration;

/// Shortest poll interval, for a job close to a bound. At 200 MiB a second a job gets 2 MiB further in it; reading the
/// memory of ten known processes takes 0.1 ms of it.
pub const SHORTEST_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Shortest poll interval if every poll reads all of `/proc`, which takes about 15 µs for each process of the machine.
pub const SHORTEST_TREE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Longest poll interval, for a job far from all its bounds.
pub const LONGEST_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Assumed growth of a job's memory in bytes a second: about the rate at which one core first touches pages. The next
/// poll comes before a job this fast can exceed its bound.
pub const MEMORY_GROWTH_PER_SECOND: u64 = 2 << 30;

/// Assumed number of processes that a job starts in a second. A loop of forks starts more, but polls detect it on the
/// way. Jobs that keep a few spare processes must not cost a scan of `/proc` every few milliseconds.
pub const PROCESS_GROWTH_PER_SECOND: u64 = 250;

/// Divisor that limits the cost of scans for a job whose memory alone is polled: one core divided by this number.
pub const TREE_SCAN_COST_DIVISOR: u32 = 20;

/// Longest time until a poll of memory detects a new process of a job.
pub const LONGEST_SNAPSHOT_AGE: Duration = Duration::from_millis(250);

/// Validity of a proportional memory reading. The value grows without the job's doing when other processes release
/// shared pages. A reading takes the kernel milliseconds for each GiB.
pub const PROPORTIONAL_MEMORY_AGE: Duration = Duration::from_secs(5);

/// Poll interval for OOM kills in cgroups where the kernel kills one process and not all of them.
pub const OOM_KILL_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Maximum number of bytes read from one file of a process; the longest needed file has a few KiB.
pub const MAX_PROC_FILE_LENGTH: u64 = 1 << 20;

/// Poll interval while waiting for a v1 cgroup to become empty; v1 sends no event.
pub const EMPTY_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Maximum length of a cgroup name.
pub const MAX_CGROUP_NAME_LENGTH: usize = 64;

/// Maximum depth of cgroups that a job nests below its own (the kernel's default is unlimited).
pub const MAX_CGROUP_DEPTH: usize = 32;

/// Time that a cgroup must stay orphaned before it is removed. A living owner removes its cgroup within milliseconds.
/// With a hung process it takes [`JOB_DROP_TIMEOUT`], but then the cgroup is not empty.
pub const ORPHANED_CGROUP_AGE: Duration = Duration::from_secs(2);

/// Maximum number of orphaned cgroups that one watcher removes: each takes about 0.1 ms, in which no job is polled.
pub const MAX_ORPHANED_CGROUPS: usize = 256;

/// Number of checks before a process in a cgroup counts as foreign, because processes come and go between the reads.
pub const FOREIGN_PROCESS_CHECKS: usize = 4;

/// Maximum number of rounds that move our processes out of a cgroup; each round leaves only those started meanwhile.
pub const LEAF_MOVE_ROUNDS: usize = 20;

/// Maximum duration of a kill without `cgroup.kill`, before the remaining processes are reported.
pub const CGROUP_KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval between two rounds of killing, in which the signalled processes can exit.
pub const KILL_ROUND_INTERVAL: Duration = Duration::from_millis(10);

/// Interval between two rounds after [`CLEAN_UP_TIMEOUT`]: a process that still lives then hangs for long.
pub const STUCK_KILL_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum time until a new supervisor reports that the job's process exists.
pub const SUPERVISOR_START_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum time that the end of a job is delayed by leftover processes. Only a process stuck inside the kernel (a hung
/// driver) or one of another user takes longer; then the end is reported with the number of remaining processes.
pub const CLEAN_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum time that dropping a job waits for its processes to exit.
pub const JOB_DROP_TIMEOUT: Duration = Duration::from_secs(5);

/// Time that the helper processes have to end a job before they are killed: they may be stopped. Longer than
/// [`CLEAN_UP_TIMEOUT`], so that a busy helper is not killed.
pub const SUPERVISOR_RESPONSE_TIMEOUT: Duration = Duration::from_secs(6);

/// Interval at which the helper processes of a starting or ending job are resumed, in case they are stopped.
pub const SUPERVISOR_CHECK_INTERVAL: Duration = Duration::from_millis(200);

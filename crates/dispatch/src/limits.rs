//! Limits of this crate.

use std::time::Duration;

/// Maximum size of a frame.
pub(crate) const MAX_FRAME_BYTES: usize = 1 << 30;
/// Maximum number of tasks that a worker has at once.
pub(crate) const MAX_WORKER_QUEUE: usize = 1_024;
/// Amount of prefetched work per worker, enough to hide the round trip.
pub(crate) const PREFETCH_TIME: Duration = Duration::from_millis(8);
/// Maximum average duration of the tasks of a worker that gets further tasks in advance.
pub(crate) const SHORT_TASK: Duration = Duration::from_millis(5);
/// Run time of a task after which the tasks behind it are recalled.
pub(crate) const RECALL_AFTER: Duration = Duration::from_millis(20);
/// Default size of the task queue.
pub(crate) const DEFAULT_QUEUE_SIZE: usize = 1_024;
/// Default time in which an interrupted worker must give up its task.
pub(crate) const DEFAULT_GRACE: Duration = Duration::from_secs(5);
/// Time in which a worker that closed its socket may exit, so that its own exit code is reported instead of our kill.
pub(crate) const EXIT_TIMEOUT: Duration = Duration::from_millis(500);
/// Default time limit of a worker's cleanup.
pub(crate) const DEFAULT_CLEAN_UP_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit of a setup that is still running at the end of a run.
pub(crate) const UNUSED_WORKER_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before a restart after two consecutive exits without a finished task. Doubles up to the next bound.
pub(crate) const RESTART_BACKOFF: Duration = Duration::from_millis(50);
/// Longest pause before a restart.
pub(crate) const MAX_RESTART_BACKOFF: Duration = Duration::from_secs(2);
/// Maximum number of consecutive setup failures of a slot that was set up before.
pub(crate) const MAX_SETUP_TRIES: u32 = 5;
/// Number of bytes kept from the end of a worker's output.
pub(crate) const OUTPUT_TAIL_BYTES: usize = 8 * 1_024;
/// Maximum length of a line from a worker that uses the line protocol.
pub(crate) const MAX_LINE_BYTES: usize = 64 << 20;
/// Minimum size of the buffer for a read from a worker.
pub(crate) const READ_BYTES: usize = 64 * 1_024;
/// Minimum size of a payload that is sent directly instead of copied into a buffer with others.
pub(crate) const LARGE_PAYLOAD_BYTES: usize = 16 * 1_024;
/// Maximum number of pieces in one send to a worker.
pub(crate) const MAX_SEND_PIECES: usize = 64;
/// Number of bytes of consumed command output that are freed on the disk at once.
pub(crate) const PUNCH_BYTES: u64 = 1 << 20;
/// Time that the caller spends in a callback or the source until the backup thread drives the run.
pub(crate) const BACKUP_DRIVER_DELAY: Duration = Duration::from_millis(2);
/// Longest sleep of an engine, which bounds the cost of a lost wakeup.
pub(crate) const MAX_SLEEP: Duration = Duration::from_secs(60);
/// Time in which a runner tries to end the processes that a command left behind.
pub(crate) const LEFTOVER_KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two attempts to end these processes.
pub(crate) const LEFTOVER_KILL_PAUSE: Duration = Duration::from_millis(1);
/// Requested buffer size of a socket to a worker.
pub(crate) const SOCKET_BUFFER_BYTES: usize = 4 << 20;
/// Time in which a cancelled worker may exit on its own.
pub(crate) const CANCEL_GRACE: Duration = Duration::from_millis(500);
/// Number of undelivered events at which reading of worker output pauses.
pub(crate) const MAX_UNREAD_EVENTS: usize = 1_024;
/// Longest wait for the end of all processes when a run is dropped.
pub(crate) const DROP_TIMEOUT: Duration = Duration::from_secs(10);
/// Time to wait for a statistics reply before the caller tries the lock again.
pub(crate) const STATS_TIMEOUT: Duration = Duration::from_millis(100);
/// Maximum number of workers of one run.
pub(crate) const MAX_WORKERS: usize = 4_096;
/// Largest task number in a job log.
pub(crate) const MAX_JOBLOG_SEQ: u64 = 1 << 32;
/// Maximum length of a command in a job log.
pub(crate) const MAX_JOBLOG_COMMAND_BYTES: usize = 1 << 16;
/// Maximum length of a line that is read from a job log.
pub(crate) const MAX_JOBLOG_LINE_BYTES: usize = 4 << 20;
/// Shortest pause between two syncs of a job log.
pub(crate) const JOBLOG_SYNC_PAUSE: Duration = Duration::from_millis(200);
/// Pause after a sync of a job log, as a multiple of its duration.
pub(crate) const JOBLOG_SYNC_REST_FACTOR: u32 = 19;

// GPU leases.

/// Maximum number of GPUs of one run.
pub(crate) const MAX_GPUS: usize = 1_024;
/// Maximum number of unread notes about GPUs; the oldest are dropped.
pub(crate) const MAX_GPU_NOTES: usize = 64;
/// Time limit of a reply of the agent on which a starting or running worker depends.
pub(crate) const AGENT_REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before a request that failed temporarily is repeated.
pub(crate) const AGENT_RETRY_PAUSE: Duration = Duration::from_millis(500);
/// Life of a lease below which the next request waits for the pause above, to avoid a busy loop.
pub(crate) const SHORT_LEASE: Duration = Duration::from_secs(1);
/// Time in which leases that could not be released, because the agent was away, are released in the background.
pub(crate) const BACKGROUND_RELEASE_TIME: Duration = Duration::from_secs(600);

// Resource pools.

/// Default time limit of an acquire.
pub(crate) const DEFAULT_ACQUIRE_PATIENCE: Duration = Duration::from_secs(30);
/// Default idle time after which a worker above the minimum stops.
pub(crate) const DEFAULT_IDLE_TIME: Duration = Duration::from_secs(60);
/// Default time limit of a worker's setup, such as loading a model over a slow network.
pub(crate) const DEFAULT_SETUP_TIMEOUT: Duration = Duration::from_secs(300);
/// Maximum number of waiters of one pool.
pub const MAX_WAITING: usize = 65_536;
/// Maximum length of a task id.
pub(crate) const MAX_TASK_ID_BYTES: usize = 1_024;
/// Maximum number of finished holds in memory and in the result of a read.
pub(crate) const MAX_AUDIT_ENTRIES: usize = 10_000;
/// Maximum length of a line of an audit trail.
pub(crate) const MAX_AUDIT_LINE_BYTES: u64 = 64 * 1_024;
/// Maximum number of audit lines that wait for a slow disk; further lines are dropped, which is reported.
pub(crate) const MAX_AUDIT_UNWRITTEN: usize = 16_384;
/// Interval of syncs that protect an audit trail from a crash of the machine. A crash of the program loses no written
/// line.
pub(crate) const AUDIT_SYNC_INTERVAL: Duration = Duration::from_secs(1);
/// Longest duration of any setting, ten years; clocks would overflow with more.
pub const MAX_DURATION: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

//! Every bound of this crate, in one place.

use std::time::Duration;

/// Largest frame: more is no frame but garbage.
pub(crate) const MAX_FRAME_BYTES: usize = 1 << 30;
/// Tasks a worker has at once, at most.
pub(crate) const MAX_WORKER_QUEUE: usize = 1_024;
/// How much work a worker is given ahead: enough to hide the way to it and back.
pub(crate) const PREFETCH_TIME: Duration = Duration::from_millis(8);
/// How long a task may take so that another one may wait behind it.
pub(crate) const SHORT_TASK: Duration = Duration::from_millis(5);
/// How long a worker may be at one task before others that wait behind it are taken back.
pub(crate) const RECALL_AFTER: Duration = Duration::from_millis(20);
/// Tasks that are taken in ahead, unless said.
pub(crate) const DEFAULT_QUEUE_SIZE: usize = 1_024;
/// How long an interrupted worker may take to be done with its task, unless said.
pub(crate) const DEFAULT_GRACE: Duration = Duration::from_secs(5);
/// How long a worker that closed its socket may take to end, so that its own exit code is told and not that of our kill.
pub(crate) const EXIT_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a worker may take to clean up at the end.
pub(crate) const DEFAULT_CLEAN_UP_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a worker that is still being set up when all is over may take, before it is killed.
pub(crate) const UNUSED_WORKER_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before a worker is started again after it died twice in a row without a task done between; it doubles up to the
/// next bound.
pub(crate) const RESTART_BACKOFF: Duration = Duration::from_millis(50);
/// Longest pause before a worker is started again.
pub(crate) const MAX_RESTART_BACKOFF: Duration = Duration::from_secs(2);
/// How often in a row a worker that had worked before may fail to be set up before it is given up.
pub(crate) const MAX_SETUP_TRIES: u32 = 5;
/// Bytes of a worker's last words that are kept.
pub(crate) const STDERR_TAIL_BYTES: usize = 8 * 1_024;
/// Longest line of a worker that speaks in lines.
pub(crate) const MAX_LINE_BYTES: usize = 64 << 20;
/// Bytes that are read from a worker at once, at least.
pub(crate) const READ_BYTES: usize = 64 * 1_024;
/// Payloads from this size on are sent as they are, not copied together with others.
pub(crate) const LARGE_PAYLOAD_BYTES: usize = 16 * 1_024;
/// Pieces that are sent to a worker at once.
pub(crate) const MAX_SEND_PIECES: usize = 64;
/// Output of commands that was read is given back to the disk in pieces of so many bytes.
pub(crate) const PUNCH_BYTES: u64 = 1 << 20;
/// How long whoever drives the run may be away (in a callback, reading the source) before another thread does it.
pub(crate) const BACKUP_DRIVER_DELAY: Duration = Duration::from_millis(2);
/// Longest time an engine sleeps with nothing due: a bound, so that a lost wake-up costs no more.
pub(crate) const MAX_SLEEP: Duration = Duration::from_secs(60);
/// How long a runner tries to end what a command left behind.
pub(crate) const LEFTOVER_KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two tries, in which what was killed dies.
pub(crate) const LEFTOVER_KILL_PAUSE: Duration = Duration::from_millis(1);
/// Bytes a socket to a worker may hold, where the system allows so many.
pub(crate) const SOCKET_BUFFER_BYTES: usize = 4 << 20;
/// How long a worker that is cancelled may take to end by itself.
pub(crate) const CANCEL_GRACE: Duration = Duration::from_millis(500);
/// Events nobody took, from which on what workers write is not read for now.
pub(crate) const MAX_UNREAD_EVENTS: usize = 1_024;
/// How long dropping a run waits until its processes are gone.
pub(crate) const DROP_TIMEOUT: Duration = Duration::from_secs(10);
/// How long whoever asks how things stand waits for an answer before it looks by itself.
pub(crate) const STATS_TIMEOUT: Duration = Duration::from_millis(100);
/// Workers of one run.
pub(crate) const MAX_WORKERS: usize = 4_096;
/// Largest number of a task in a job log.
pub(crate) const MAX_JOBLOG_SEQ: u64 = 1 << 32;
/// How much of a command stands in a job log.
pub(crate) const MAX_JOBLOG_COMMAND_BYTES: usize = 1 << 16;
/// Longest line of a job log that is read.
pub(crate) const MAX_JOBLOG_LINE_BYTES: usize = 4 << 20;
/// Least time between two times a job log is brought to the disk.
pub(crate) const JOBLOG_SYNC_PAUSE: Duration = Duration::from_millis(200);
/// After bringing it to the disk, so many times as long as that took nothing is brought there.
pub(crate) const JOBLOG_SYNC_REST_FACTOR: u32 = 19;

// GPUs from the pool.

/// GPUs of one run: more than any machine has.
pub(crate) const MAX_GPUS: usize = 1_024;
/// Notes about GPUs that wait to be read; of more, the oldest are left out.
pub(crate) const MAX_GPU_NOTES: usize = 64;
/// How long the agent may take to answer something a starting or running worker depends on.
pub(crate) const AGENT_REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before a request that failed for a reason that may pass is made again.
pub(crate) const AGENT_RETRY_PAUSE: Duration = Duration::from_millis(500);
/// A lease that lived shorter than this was of no use; so that this does not go on without pause, the next one is asked for
/// after the pause above.
pub(crate) const SHORT_LEASE: Duration = Duration::from_secs(1);
/// How long leases that could not be given back, because the agent was away, are tried to be given back in the background by a
/// process that lives on.
pub(crate) const BACKGROUND_RELEASE_TIME: Duration = Duration::from_secs(600);

// Resource pools.

/// How long somebody waits for a worker, unless said.
pub(crate) const DEFAULT_ACQUIRE_PATIENCE: Duration = Duration::from_secs(30);
/// How long a worker above the least number may idle, unless said.
pub(crate) const DEFAULT_IDLE_TIME: Duration = Duration::from_secs(60);
/// How long a worker may take to be set up, unless said: a model that is loaded over a slow network.
pub(crate) const DEFAULT_SETUP_TIMEOUT: Duration = Duration::from_secs(300);
/// Those who wait for a worker of one pool.
pub const MAX_WAITING: usize = 65_536;
/// Bytes of the name of whoever holds a worker.
pub(crate) const MAX_TASK_ID_BYTES: usize = 1_024;
/// Holds that an audit trail keeps in memory, and gives back when it is read.
pub(crate) const MAX_AUDIT_ENTRIES: usize = 10_000;
/// Longest line of an audit trail.
pub(crate) const MAX_AUDIT_LINE_BYTES: u64 = 64 * 1_024;
/// Lines of an audit trail on their way to a slow disk; more are left out, and that is told.
pub(crate) const MAX_AUDIT_UNWRITTEN: usize = 16_384;
/// How often an audit trail is made safe against a crash of the machine. A crash of the program loses nothing that was written.
pub(crate) const AUDIT_SYNC_INTERVAL: Duration = Duration::from_secs(1);
/// Longest time anything may be allowed to take, ten years: with more, clocks would run over.
pub const MAX_DURATION: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

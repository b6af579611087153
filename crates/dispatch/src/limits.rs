//! Every bound of this crate, in one place.

use std::time::Duration;

/// Largest frame: more is no frame but garbage.
pub const FRAME_BYTES: usize = 1 << 30;
/// Tasks a worker has at once, at most.
pub const DEPTH: usize = 1_024;
/// How much work a worker is given ahead: enough to hide the way to it and back.
pub const AHEAD: Duration = Duration::from_millis(8);
/// How long a task may take so that another one may wait behind it.
pub const SHORT: Duration = Duration::from_millis(5);
/// How long a worker may be at one task before others that wait behind it are taken back.
pub const RECALL_AFTER: Duration = Duration::from_millis(20);
/// Tasks that are taken in ahead, unless said.
pub const QUEUE_SIZE: usize = 1_024;
/// How long an interrupted worker may take to be done with its task, unless said.
pub const GRACE: Duration = Duration::from_secs(5);
/// How long a worker that closed its socket may take to end, so that its own exit code is told and not that of our kill.
pub const EXIT_PATIENCE: Duration = Duration::from_millis(500);
/// How long a worker may take to clean up at the end.
pub const CLEAN_UP_PATIENCE: Duration = Duration::from_secs(30);
/// How long a worker that is still being set up when all is over may take, before it is killed.
pub const UNUSED_PATIENCE: Duration = Duration::from_secs(5);
/// Pause before a worker is started again after it died twice in a row without a task done between; it doubles up to the
/// next bound.
pub const BACKOFF: Duration = Duration::from_millis(50);
/// Longest pause before a worker is started again.
pub const BACKOFF_MOST: Duration = Duration::from_secs(2);
/// How often in a row a worker that had worked before may fail to be set up before it is given up.
pub const SETUP_TRIES: u32 = 5;
/// Bytes of a worker's last words that are kept.
pub const LAST_WORDS: usize = 8 * 1_024;
/// Longest line of a worker that speaks in lines.
pub const LINE_BYTES: usize = 64 << 20;
/// Bytes that are read from a worker at once, at least.
pub const READ_BYTES: usize = 64 * 1_024;
/// Payloads from this size on are sent as they are, not copied together with others.
pub const LARGE_BYTES: usize = 16 * 1_024;
/// Pieces that are sent to a worker at once.
pub const PIECES: usize = 64;
/// Output of commands that was read is given back to the disk in pieces of so many bytes.
pub const PUNCH_BYTES: u64 = 1 << 20;
/// How long whoever drives the run may be away (in a callback, reading the source) before another thread does it.
pub const AWAY: Duration = Duration::from_millis(2);
/// Longest time an engine sleeps with nothing due: a bound, so that a lost wake-up costs no more.
pub const SLEEP_MOST: Duration = Duration::from_secs(60);
/// How long a runner tries to end what a command left behind.
pub const LEFT_PATIENCE: Duration = Duration::from_secs(5);
/// Pause between two tries, in which what was killed dies.
pub const LEFT_PAUSE: Duration = Duration::from_millis(1);
/// Bytes a socket to a worker may hold, where the system allows so many.
pub const SOCKET_BYTES: usize = 4 << 20;
/// How long a worker that is cancelled may take to end by itself.
pub const CANCEL_GRACE: Duration = Duration::from_millis(500);
/// Events nobody took, from which on what workers write is not read for now.
pub const UNREAD_EVENTS: usize = 1_024;
/// How long dropping a run waits until its processes are gone.
pub const DROP_PATIENCE: Duration = Duration::from_secs(10);
/// How long whoever asks how things stand waits for an answer before it looks by itself.
pub const STATS_PATIENCE: Duration = Duration::from_millis(100);
/// Workers of one run.
pub const WORKERS: usize = 4_096;
/// Largest number of a task in a job log.
pub const JOBLOG_SEQ: u64 = 1 << 32;
/// How much of a command stands in a job log.
pub const JOBLOG_COMMAND_BYTES: usize = 1 << 16;
/// Longest line of a job log that is read.
pub const JOBLOG_LINE_BYTES: usize = 4 << 20;
/// Least time between two times a job log is brought to the disk.
pub const JOBLOG_SYNC_PAUSE: Duration = Duration::from_millis(200);
/// After bringing it to the disk, so many times as long as that took nothing is brought there.
pub const JOBLOG_SYNC_REST: u32 = 19;

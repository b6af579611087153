//! Every bound of this crate, in one place.

use std::time::Duration;

/// How long making a connection may take.
pub const CONNECT: Duration = Duration::from_secs(5);
/// How long an answer may take, beyond what it was asked to wait.
pub const ANSWER: Duration = Duration::from_secs(30);
/// Times a request is sent again after a passing fault.
pub const RETRIES: u32 = 3;
/// Longest time all retries of one request may take together.
pub const RETRY_PATIENCE: Duration = Duration::from_secs(10);
/// The first pause before a retry; later ones double.
pub const PAUSE_FIRST: Duration = Duration::from_millis(50);
/// The longest pause before a retry.
pub const PAUSE_MOST: Duration = Duration::from_secs(2);
/// Largest answer that is read.
pub const ANSWER_BYTES: usize = 32 * 1024 * 1024;
/// Largest event, and largest line of a held lease, that is read.
pub const EVENT_BYTES: usize = 1024 * 1024;
/// Largest certificate file that is read.
pub const CA_BYTES: u64 = 4 * 1024 * 1024;
/// A stream that says nothing for so long is dead: agents speak every 10 s.
pub const STREAM_SILENCE: Duration = Duration::from_secs(35);
/// How long one answer about a waiting request may take, unless the caller says otherwise.
pub const FOLLOW_WAIT: Duration = Duration::from_secs(10);
/// The longest such time an agent accepts.
pub const FOLLOW_WAIT_MOST: Duration = Duration::from_secs(300);
/// How long an agent may be away while a request waits, or while events are followed.
pub const AWAY: Duration = Duration::from_secs(60);
/// How long a lease that is dropped is tried to be released.
pub const RELEASE_PATIENCE: Duration = Duration::from_secs(20);
/// Length of an idempotency key.
pub const KEY_BYTES: usize = gpupool_core::limits::NAME_BYTES;
/// Length of the path of a Unix socket: the kernel's bound.
pub const SOCKET_PATH_BYTES: usize = 107;
/// Shown of an answer that makes no sense.
pub const EXCERPT_CHARS: usize = 200;

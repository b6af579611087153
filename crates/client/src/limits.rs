//! Every bound of this crate, in one place.

use std::time::Duration;

/// How long making a connection may take.
pub const CONNECT: Duration = Duration::from_secs(5);
/// How long a connection that nothing is asked over is used again.
pub const IDLE_TIME: Duration = Duration::from_secs(90);
/// Connections to one agent that are kept for when more is asked.
pub const IDLE_CONNECTIONS: usize = 64;
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
pub const AGENT_AWAY_LIMIT: Duration = Duration::from_secs(60);
/// How long a lease that is dropped is tried to be released.
pub const RELEASE_PATIENCE: Duration = Duration::from_secs(20);
/// How long after its end a lease is over for the agent as well, whose clock has milliseconds.
pub const ENDED_BY_THEN: Duration = Duration::from_millis(5);
/// How often who waits for GPUs of this machine asks how things stand; the agent forgets a waiter after 15 s.
pub const WAIT_POLL_INTERVAL: Duration = Duration::from_secs(3);
/// How long another way to the same agent may take to answer.
pub const SOCKET_PATIENCE: Duration = Duration::from_secs(2);
/// Pause between two tries to tie a lease to us again while the agent is away.
pub const AWAY_PAUSE: Duration = Duration::from_millis(500);
/// How long a request that is not wanted any more is tried to be taken back; the agent forgets it a little later.
pub const CANCEL_PATIENCE: Duration = Duration::from_secs(5);
/// How long a lease that is tied to us is tried to be given back; the agent sees our end anyway.
pub const LOCAL_RELEASE_PATIENCE: Duration = Duration::from_secs(5);
/// Length of an idempotency key.
pub const KEY_BYTES: usize = gpupool_core::limits::MAX_NAME_BYTES;
/// Length of the path of a Unix socket: the kernel's bound.
pub const SOCKET_PATH_BYTES: usize = 107;
/// Shown of an answer that makes no sense.
pub const EXCERPT_CHARS: usize = 200;

/// Failures in a row after which an endpoint is left alone.
pub const BREAKER_FAILURES: u32 = 3;
/// How long it is left alone the first time.
pub const BREAKER_FIRST: Duration = Duration::from_secs(10);
/// By how much that grows each time.
pub const BREAKER_GROWTH: f64 = 1.5;
/// The longest it is left alone.
pub const BREAKER_MOST: Duration = Duration::from_secs(120);
/// Answers after which it is asked again.
pub const BREAKER_SUCCESSES: u32 = 2;
/// The part of its work an endpoint gets at once when it comes back.
pub const RETURN_FIRST_SHARE: f64 = 0.1;
/// How long it takes until it gets all of it.
pub const RETURN_TIME: Duration = Duration::from_secs(30);
/// Retries that can be made at once.
pub const RETRY_BUDGET: u32 = 20;
/// Requests that earn one retry.
pub const RETRY_COST: u32 = 5;
/// The first pause before a request that failed everywhere is tried again; later ones double.
pub const ROUND_PAUSE_FIRST: Duration = Duration::from_secs(1);
/// The longest such pause, and the longest between two looks at an endpoint that fails.
pub const ROUND_PAUSE_MOST: Duration = Duration::from_secs(30);
/// Leases an agent lets be followed in one call.
pub const FOLLOWED_AT_ONCE: usize = 4_096;
/// An endpoint that takes longer than this to answer a look is asked last.
pub const SUSPECT_AFTER: Duration = Duration::from_secs(1);
/// Requests of one client that wait at its endpoints. One more waits, as long as it may, until one of them has left.
pub const WAITING: usize = 65_536;
/// How long one endpoint may take to grant what another one could grant as well.
pub const DIRECT_PATIENCE: Duration = Duration::from_secs(2);
/// How long a confirmation may take before it is sent again.
pub const CONFIRM_PATIENCE: Duration = Duration::from_secs(2);
/// How much longer a second of this machine may be than one of a server, at most.
pub const SLOWEST_CLOCK: f64 = 1.15;
/// How long the other endpoints may take to be learned once one is, when a client starts.
pub const START_GRACE: Duration = Duration::from_millis(200);
/// Requests and leases an endpoint may still hold that are remembered to be given back.
pub const STRAYS: usize = 1_024;
/// Pause between the two looks after which an endpoint is asked again.
pub const PROBE_PAUSE: Duration = Duration::from_millis(100);
/// Pause between looks that somebody wants because an endpoint had no room.
pub const LOOK_PAUSE: Duration = Duration::from_millis(50);
/// Updates that are kept for a reader that is slow.
pub const UPDATES: usize = 1_024;
/// Endpoints of one client.
pub const ENDPOINTS: usize = 256;
/// How long stopping waits for leases to be given back.
pub const STOP_PATIENCE: Duration = Duration::from_secs(5);
/// GPUs of one server whose books are kept here; a server that names more is not believed.
pub const BOOKS_GPUS: usize = 256;

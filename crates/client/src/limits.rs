//! Limits of this crate.

use std::time::Duration;

/// Time limit for opening a connection.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time after which an idle connection is no longer reused.
pub const IDLE_CONNECTION_LIFETIME: Duration = Duration::from_secs(90);
/// Maximum number of idle connections to one agent.
pub const MAX_IDLE_CONNECTIONS: usize = 64;
/// Time limit for a response, beyond the wait requested from the agent.
pub const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of retries of a call after transient failures.
pub const MAX_CALL_RETRIES: u32 = 3;
/// Time limit for all retries of one call together.
pub const RETRY_TIME_LIMIT: Duration = Duration::from_secs(10);
/// First pause before a retry; later ones double.
pub const MIN_RETRY_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause before a retry.
pub const MAX_RETRY_PAUSE: Duration = Duration::from_secs(2);
/// Maximum size of a response.
pub const MAX_RESPONSE_BYTES: usize = 32 * 1024 * 1024;
/// Maximum size of an event, and of a line of a held lease.
pub const MAX_EVENT_BYTES: usize = 1024 * 1024;
/// Maximum size of a certificate file.
pub const MAX_CA_FILE_BYTES: u64 = 4 * 1024 * 1024;
/// Time without data after which a stream counts as dead: agents send at least every 10 s.
pub const STREAM_IDLE_TIMEOUT: Duration = Duration::from_secs(35);
/// Default wait of one call that follows a waiting request.
pub const FOLLOW_WAIT: Duration = Duration::from_secs(10);
/// Longest wait that an agent accepts in one call.
pub const MAX_FOLLOW_WAIT: Duration = Duration::from_secs(300);
/// Longest absence of an agent that a waiting request or an event stream survives.
pub const AGENT_AWAY_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for releasing a dropped lease.
pub const RELEASE_TIME_LIMIT: Duration = Duration::from_secs(20);
/// Margin after which a lease is over for the agent as well, whose clock counts milliseconds.
pub const LEASE_END_MARGIN: Duration = Duration::from_millis(5);
/// Poll interval of a local request that waits; the agent drops a waiter after 15 s without a poll.
pub const WAIT_POLL_INTERVAL: Duration = Duration::from_secs(3);
/// Time limit for a response over another socket of the same agent.
pub const SOCKET_PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause between attempts to bind a lease again while the agent is away.
pub const RECONNECT_PAUSE: Duration = Duration::from_millis(500);
/// Time limit for cancelling a request; the agent drops it a little later in any case.
pub const CANCEL_TIME_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for releasing a lease bound to this process; the agent notices the end of the process anyway.
pub const LOCAL_RELEASE_PATIENCE: Duration = Duration::from_secs(5);
/// Maximum length of an idempotency key.
pub const MAX_IDEMPOTENCY_KEY_BYTES: usize = gpupool_core::limits::MAX_NAME_BYTES;
/// Maximum length of the path of a Unix socket, set by the kernel.
pub const MAX_SOCKET_PATH_BYTES: usize = 107;
/// Maximum length of the excerpt of an unexpected response.
pub const MAX_EXCERPT_CHARS: usize = 200;

/// Consecutive failures that open the circuit breaker.
pub const BREAKER_FAILURE_LIMIT: u32 = 3;
/// First pause of an open circuit breaker.
pub const MIN_BREAKER_PAUSE: Duration = Duration::from_secs(10);
/// Growth factor of that pause.
pub const BREAKER_PAUSE_GROWTH: f64 = 1.5;
/// Longest pause of an open circuit breaker.
pub const MAX_BREAKER_PAUSE: Duration = Duration::from_secs(120);
/// Successes that close a half-open circuit breaker.
pub const BREAKER_CLOSING_SUCCESSES: u32 = 2;
/// Share of its traffic that a recovered endpoint gets at once.
pub const INITIAL_TRAFFIC_SHARE: f64 = 0.1;
/// Time until a recovered endpoint gets its full share.
pub const TRAFFIC_RAMP_TIME: Duration = Duration::from_secs(30);
/// Maximum number of saved retries.
pub const MAX_RETRY_BUDGET: u32 = 20;
/// Requests that earn one retry.
pub const REQUESTS_PER_RETRY: u32 = 5;
/// First pause before a request that failed at every endpoint is tried again; later ones double.
pub const MIN_ROUND_PAUSE: Duration = Duration::from_secs(1);
/// Longest such pause, and longest pause between two polls of a failing endpoint.
pub const MAX_ROUND_PAUSE: Duration = Duration::from_secs(30);
/// Maximum number of leases that an agent follows in one call.
pub const MAX_FOLLOWED_LEASES: usize = 4_096;
/// Duration of a poll after which its endpoint is tried last.
pub const SLOW_POLL_THRESHOLD: Duration = Duration::from_secs(1);
/// Maximum number of requests of one client that wait at its endpoints. Further ones wait until one of these leaves.
pub const MAX_WAITING_REQUESTS: usize = 65_536;
/// Time limit for a direct request while another endpoint could grant it as well.
pub const DIRECT_REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit for a confirmation before it is sent again.
pub const CONFIRM_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum ratio between a second of a server's clock and a second of this machine.
pub const MAX_CLOCK_SLOWDOWN: f64 = 1.15;
/// Time that start-up waits for the other endpoints once one has responded.
pub const START_GRACE_PERIOD: Duration = Duration::from_millis(200);
/// Maximum number of orphaned grants remembered per endpoint.
pub const MAX_ORPHANED_GRANTS: usize = 1_024;
/// Pause between the polls that close a half-open circuit breaker.
pub const BREAKER_PROBE_PAUSE: Duration = Duration::from_millis(100);
/// Delay that merges polls requested because an endpoint had no capacity.
pub const POLL_COALESCING_DELAY: Duration = Duration::from_millis(50);
/// Maximum number of updates kept for a slow reader.
pub const STATUS_UPDATE_BUFFER: usize = 1_024;
/// Maximum number of endpoints of one client.
pub const MAX_ENDPOINTS: usize = 256;
/// Time that stopping waits for releases.
pub const STOP_TIME_LIMIT: Duration = Duration::from_secs(5);
/// Maximum number of GPUs that client-side accounting accepts from one server.
pub const MAX_ACCOUNTED_GPUS: usize = 256;

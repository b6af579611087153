//! Limits of the agent.

use std::time::Duration;

use gpupool_core::Millis;

/// Maximum number of messages that wait for the authority. Further ones are refused as busy.
pub(crate) const MESSAGES: usize = 16_384;
/// Maximum number of messages that share one commit.
pub(crate) const BATCH: usize = 1_024;
/// Grace of a running job whose lease an administrator releases.
pub(crate) const RELEASE_GRACE: Millis = Millis::from_secs(10);
/// Maximum number of orders in the channel to a node. Further ones wait in the authority.
pub(crate) const ORDERS: usize = 4_096;
/// Pause before orders that a node could not take are sent again.
pub(crate) const ORDER_RETRY: Duration = Duration::from_millis(50);
/// Longest time that the authority waits for a message before it confirms its snapshot.
pub(crate) const AUTHORITY_BEAT: Duration = Duration::from_secs(1);
/// Silence after which the authority counts as stuck, unless it waits for its disk.
pub(crate) const AUTHORITY_SILENCE: Millis = Millis::from_secs(20);
/// Age of the snapshot from which `/health` reports that the authority does not respond.
pub(crate) const SNAPSHOT_OLD: Millis = Millis::from_secs(3);
/// Time limit of a query of the pool or the audit trail, after which it is refused as busy.
pub(crate) const QUERY_PATIENCE: Duration = Duration::from_secs(2);
/// Maximum number of audit trail queries that wait. Further ones are refused as busy.
pub(crate) const TRAIL_QUERIES: usize = 64;
/// Number of retained events, from which streams can continue.
pub(crate) const EVENTS_RETAINED: usize = 10_000;
/// Maximum number of events that are sent to a stream at once.
pub(crate) const EVENTS_AT_ONCE: usize = 256;
/// Interval at which the patience of followed leases is extended.
pub(crate) const FOLLOW_EVERY: Millis = Millis::from_secs(5);
/// Maximum number of leases that one call follows.
pub(crate) const FOLLOWED_BY_CALL: usize = 4_096;
/// Maximum number of leases that all calls together follow, counted once per call. Calls for a single lease are not limited.
pub(crate) const FOLLOWED: usize = 1_048_576;
/// Maximum number of jobs of one lease that are known apart from its control group.
pub(crate) const JOBS_OF_A_LEASE: usize = 1_024;
/// Number of batches in the store's write-ahead buffer from which it is flushed, after the replies to the callers.
pub(crate) const BUFFERED_BATCHES: usize = 32;
/// Time that the write-ahead buffer waits for an idle moment.
pub(crate) const FLUSH_WAIT: Duration = Duration::from_millis(200);
/// Pause before a failed store is tried again.
pub(crate) const STORE_RETRY: Duration = Duration::from_secs(1);
/// Longest time that one response waits for a lease, in seconds.
pub(crate) const WAIT_SECS: f64 = 300.0;
/// Maximum number of leases in one response.
pub(crate) const LEASES_AT_ONCE: usize = 1_000;
/// Maximum number of audit trail records in one response.
pub(crate) const RECORDS_AT_ONCE: usize = 1_000;
/// Interval of heartbeats on an open stream.
pub(crate) const HOLD_BEAT: Duration = Duration::from_secs(10);
/// Number of owners that metrics name. The others are counted together.
pub(crate) const NAMED_OWNERS: usize = 50;

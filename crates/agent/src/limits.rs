//! Every bound of the agent, in one place.

use std::time::Duration;

use gpupool_core::Millis;

/// The messages that may wait for the authority. More are refused as busy.
pub(crate) const MESSAGES: usize = 16_384;
/// The messages that share one commit.
pub(crate) const BATCH: usize = 1_024;
/// The grace of a running job whose lease an administrator releases.
pub(crate) const RELEASE_GRACE: Millis = Millis::from_secs(10);
/// The orders that may wait in the channel to a node. The others wait in the authority.
pub(crate) const ORDERS: usize = 4_096;
/// The time after which the authority tries to send orders again that a node could not take.
pub(crate) const ORDER_RETRY: Duration = Duration::from_millis(50);
/// The longest time that the authority waits for a message before it confirms its snapshot.
pub(crate) const AUTHORITY_BEAT: Duration = Duration::from_secs(1);
/// The silence after which the authority counts as stuck, unless it waits for its disk.
pub(crate) const AUTHORITY_SILENCE: Millis = Millis::from_secs(20);
/// The age of the snapshot from which `/health` reports that the authority does not respond.
pub(crate) const SNAPSHOT_OLD: Millis = Millis::from_secs(3);
/// The time that a query of the pool or of the audit trail may take before it is refused as busy.
pub(crate) const QUERY_PATIENCE: Duration = Duration::from_secs(2);
/// The queries of the audit trail that may wait. More are refused as busy.
pub(crate) const TRAIL_QUERIES: usize = 64;
/// The events that are retained for streams to continue from.
pub(crate) const EVENTS_RETAINED: usize = 10_000;
/// The events that are sent to a stream at once.
pub(crate) const EVENTS_AT_ONCE: usize = 256;
/// The time between two rounds that extend the patience of followed leases.
pub(crate) const FOLLOW_EVERY: Millis = Millis::from_secs(5);
/// The leases that one call may follow.
pub(crate) const FOLLOWED_BY_CALL: usize = 4_096;
/// The leases that all calls together may follow, counted once per call. Calls that follow a single lease are not limited.
pub(crate) const FOLLOWED: usize = 1_048_576;
/// The jobs of one lease that are known beside its control group.
pub(crate) const JOBS_OF_A_LEASE: usize = 1_024;
/// The batches in the write-ahead buffer of the store from which on it is flushed, once the callers have their answers.
pub(crate) const BUFFERED_BATCHES: usize = 32;
/// The time that the write-ahead buffer waits for an idle moment.
pub(crate) const FLUSH_WAIT: Duration = Duration::from_millis(200);
/// The time after which a store that failed is tried again.
pub(crate) const STORE_RETRY: Duration = Duration::from_secs(1);
/// The longest time that one answer may wait for a lease.
pub(crate) const WAIT_SECS: f64 = 300.0;
/// The leases in one answer.
pub(crate) const LEASES_AT_ONCE: usize = 1_000;
/// The records of the audit trail in one answer.
pub(crate) const RECORDS_AT_ONCE: usize = 1_000;
/// The time between two signs of life on an open stream.
pub(crate) const HOLD_BEAT: Duration = Duration::from_secs(10);
/// The owners that metrics name. The others are counted together.
pub(crate) const OWNERS_TOLD: usize = 50;

//! Every bound of the agent, in one place.

use std::time::Duration;

use gpupool_core::Millis;

/// Wishes and facts that may wait for the owner thread; more are refused with "busy".
pub const MESSAGES: usize = 16_384;
/// Messages that share one commit.
pub const BATCH: usize = 1_024;
/// Events kept for streams to go on from.
pub const EVENTS_KEPT: usize = 10_000;
/// Events handed to a stream at once.
pub const EVENTS_AT_ONCE: usize = 256;
/// How often waiters somebody asks for are kept in the queue.
pub const FOLLOW_EVERY: Millis = Millis::from_secs(5);
/// Leases one call may follow.
pub const FOLLOWED_BY_CALL: usize = 4_096;
/// Leases all calls together may follow, one that several follow counted for each; what follows a single one is not held
/// to it.
pub const FOLLOWED: usize = 1_048_576;
/// Jobs of one lease that are known beside its control group.
pub const JOBS_OF_A_LEASE: usize = 1_024;
/// Batches the store keeps as notes before its tables hear of them, once whoever asked is answered.
pub const NOTES: usize = 32;
/// How long the store's notes wait for a moment in which nothing is asked.
pub const NOTES_WAIT: Duration = Duration::from_millis(200);
/// How often a store that failed is tried again.
pub const STORE_RETRY: Duration = Duration::from_secs(1);
/// Longest time one answer may wait for a lease.
pub const WAIT_SECS: f64 = 300.0;
/// Leases in one answer.
pub const LEASES_AT_ONCE: usize = 1_000;
/// Records of the audit trail in one answer.
pub const RECORDS_AT_ONCE: usize = 1_000;
/// How often an open stream says that it is still there.
pub const HOLD_BEAT: Duration = Duration::from_secs(10);
/// Owners told by name in metrics; the others are told together.
pub const OWNERS_TOLD: usize = 50;
/// How long metrics wait for the owner thread before they are told without the pool.
pub const SCRAPE_PATIENCE: Duration = Duration::from_secs(2);

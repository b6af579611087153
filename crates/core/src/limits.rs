//! Limits of this crate.

use crate::units::Millis;

/// Maximum number of GPUs per request.
pub(crate) const MAX_GPUS_PER_REQUEST: u16 = 64;
/// Maximum number of entries in a list of a selector.
pub(crate) const MAX_SELECT_ENTRIES: usize = 256;
/// Maximum length of the name of an owner, a worker or a policy.
pub const MAX_NAME_BYTES: usize = 253;
/// Largest absolute priority.
pub const MAX_PRIORITY: i32 = 1_000_000;
/// Default life of a lease without a renewal.
pub const DEFAULT_TTL: Millis = Millis::from_secs(60);
/// Shortest life of a lease without a renewal.
pub const MIN_TTL: Millis = Millis::from_secs(1);
/// Longest life of a lease without a renewal.
pub const MAX_TTL: Millis = Millis::from_secs(86_400);
/// Time after which a waiter leaves the queue if its client stops following it.
pub const WAITER_PATIENCE: Millis = Millis::from_secs(15);
/// Time for which an offer is held for its confirmation.
pub const OFFER_LIFETIME: Millis = Millis::from_secs(5);
/// Maximum number of ended leases that are remembered, so that repeated releases and requests find them.
pub(crate) const MAX_ENDED_LEASES: usize = 4_096;
/// Maximum number of waiting requests.
pub(crate) const MAX_WAITERS: usize = 1_000_000;
/// Maximum number of lanes that one pass over the queue visits, without those that a quota holds back.
pub(crate) const MAX_LANES_PER_PASS: usize = 1_024;
/// Maximum number of promises up to which backfill by `max_duration` is computed.
pub(crate) const MAX_BACKFILL_PROMISES: usize = 16_384;
/// Maximum number of request classes that are remembered.
pub(crate) const MAX_CLASSES: usize = 4_096;
/// Temperature above which a device takes no new work, in °C.
pub(crate) const MAX_TEMPERATURE_C: i16 = 90;
/// Maximum number of task classes of a learned workload.
pub(crate) const MAX_WORKLOAD_CLASSES: usize = 4_096;
/// Upper bound of lease numbers, tokens and arrivals; a row beyond it is bad.
pub(crate) const MAX_COUNT: u64 = 1 << 62;
/// Maximum number of vacant numbers of nodes or devices between two rows; a larger gap makes a row bad.
pub(crate) const MAX_VACANT_NUMBERS: u32 = 1 << 16;
/// Largest number of a device on its node.
pub const MAX_GPU_ID: u32 = 1 << 20;

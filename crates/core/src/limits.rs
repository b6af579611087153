//! Every bound of this crate, in one place.

use crate::units::Millis;

/// GPUs one request may ask for.
pub(crate) const MAX_GPUS_PER_REQUEST: u16 = 64;
/// Entries in one list of a selector.
pub(crate) const MAX_SELECT_ENTRIES: usize = 256;
/// Length of an owner's, worker's or policy's name.
pub const MAX_NAME_BYTES: usize = 253;
/// Largest priority, either way.
pub const MAX_PRIORITY: i32 = 1_000_000;
/// Life of a lease without a renewal, unless the request says otherwise.
pub const DEFAULT_TTL: Millis = Millis::from_secs(60);
/// Shortest such life.
pub const MIN_TTL: Millis = Millis::from_secs(1);
/// Longest such life.
pub const MAX_TTL: Millis = Millis::from_secs(86_400);
/// A waiter nobody asks for leaves the queue after this.
pub const WAITER_PATIENCE: Millis = Millis::from_secs(15);
/// How long an offer is held for its confirmation.
pub const OFFER_LIFETIME: Millis = Millis::from_secs(5);
/// Ended leases that are still remembered, so that a repeated release or request finds them.
pub(crate) const MAX_ENDED_LEASES: usize = 4_096;
/// Requests waiting at once.
pub(crate) const MAX_WAITERS: usize = 1_000_000;
/// Lanes (same wish, same owner) that one pass of the queue looks at, those a quota holds back aside.
pub(crate) const MAX_LANES_PER_PASS: usize = 1_024;
/// Promises up to which backfill by `max_duration` is worked out.
pub(crate) const MAX_BACKFILL_PROMISES: usize = 16_384;
/// Distinct shapes of requests whose placement is remembered.
pub(crate) const MAX_CLASSES: usize = 4_096;
/// Temperature above which a device takes no new work, in °C.
pub(crate) const MAX_TEMPERATURE_C: i16 = 90;
/// Classes of tasks a learned workload may hold.
pub(crate) const MAX_WORKLOAD_CLASSES: usize = 4_096;
/// Numbers of leases, tokens and arrivals stay below this; a row that says otherwise is bad.
pub(crate) const MAX_COUNT: u64 = 1 << 62;
/// Numbers of nodes or devices that may be vacant between two rows; more is not a gap but nonsense.
pub(crate) const MAX_VACANT_NUMBERS: u32 = 1 << 16;
/// The largest small number a device may have on its node.
pub const MAX_GPU_ID: u32 = 1 << 20;

//! The two clocks: the pool's, which cannot be set and does not stop while the machine sleeps, and the wall clock.
//!
//! After a restart of the machine the pool's clock continues from its saved time: [`continue_from`] is called once, before
//! the time is first read.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use gpupool_core::{Millis, PoolTime};
use gpupool_store::ClockAnchor;
use jiff::Timestamp;
use jiff::fmt::temporal::DateTimePrinter;
use jiff::tz::Offset;
use rustix::time::{ClockId, clock_gettime};

/// The milliseconds by which the pool's clock is ahead of the time since the machine started.
static AHEAD: AtomicU64 = AtomicU64::new(0);

/// Returns the pool's time.
pub fn now() -> PoolTime {
    PoolTime(uptime().saturating_add(AHEAD.load(Ordering::Relaxed)))
}

/// Lets the pool's clock continue from a saved instant, and not before `latest`, the last time in any row.
pub(crate) fn continue_from(saved: Option<&ClockAnchor>, latest: PoolTime) {
    let ahead = ahead(saved, latest, &boot(), uptime(), SystemTime::now());
    AHEAD.store(ahead.0, Ordering::Relaxed);
}

/// Returns the present instant, to be saved.
pub(crate) fn anchor() -> ClockAnchor {
    ClockAnchor { boot: boot(), ahead: Millis(AHEAD.load(Ordering::Relaxed)), at: both() }
}

/// Returns how far the clock is ahead. After a restart of the machine the wall clock shows how much time has passed;
/// the clock never goes back.
fn ahead(saved: Option<&ClockAnchor>, latest: PoolTime, boot: &str, uptime: u64, wall: SystemTime) -> Millis {
    let ahead = match saved {
        Some(saved) if saved.boot == boot => saved.ahead,
        Some(saved) => {
            let passed = wall.duration_since(saved.at.wall).unwrap_or_default();
            let passed = u64::try_from(passed.as_millis()).unwrap_or(u64::MAX);
            Millis(saved.at.pool.0.saturating_add(passed).saturating_sub(uptime))
        }
        None => Millis(0),
    };
    ahead.max(Millis(latest.0.saturating_sub(uptime)))
}

/// Returns the kernel's id of this start of the machine.
fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

fn uptime() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let (secs, nanos) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    secs.saturating_mul(1000).saturating_add(nanos / 1_000_000)
}

/// Returns the present instant on both clocks.
pub(crate) fn both() -> gpupool_store::ClockReading {
    gpupool_store::ClockReading { pool: now(), wall: SystemTime::now() }
}

/// Converts a time of the pool to the wall clock, by an instant on both clocks.
pub(crate) fn wall(time: PoolTime, at: gpupool_store::ClockReading) -> SystemTime {
    let apart = |millis| Duration::from_millis(millis);
    let converted = if time >= at.pool {
        at.wall.checked_add(apart(time.since(at.pool).0))
    } else {
        at.wall.checked_sub(apart(at.pool.since(time).0))
    };
    converted.unwrap_or(at.wall)
}

/// Formats a time: ISO 8601 with an offset, to the millisecond.
pub fn iso(at: SystemTime) -> String {
    const PRINTER: DateTimePrinter = DateTimePrinter::new().precision(Some(3));
    let at = Timestamp::try_from(at).unwrap_or(Timestamp::MAX);
    PRINTER.timestamp_with_offset_to_string(&at, Offset::UTC)
}

/// Formats a time of the pool.
pub(crate) fn iso_of(time: PoolTime, at: gpupool_store::ClockReading) -> String {
    iso(wall(time, at))
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn the_pool_clock_continues_after_a_restart_and_never_goes_back() {
        let at = |secs| UNIX_EPOCH + Duration::from_secs(secs);
        let saved = ClockAnchor {
            boot: "a".into(),
            ahead: Millis(500),
            at: gpupool_store::ClockReading { pool: PoolTime(90_500), wall: at(1_000) },
        };
        let ahead = |boot, uptime, wall| super::ahead(Some(&saved), PoolTime(91_000), boot, uptime, at(wall)).0;
        // On the same start of the machine the wall clock does not matter.
        assert_eq!(ahead("a", 200_000, 1), 500);
        // The machine was restarted an hour later, three seconds ago.
        assert_eq!(ahead("b", 3_000, 4_600) + 3_000, 90_500 + 3_600_000);
        // The wall clock was set back: the clock does not go behind the last time in a row.
        assert_eq!(ahead("b", 3_000, 10) + 3_000, 91_000);
        assert_eq!(super::ahead(None, PoolTime(0), "a", 3_000, at(0)), Millis(0));
    }

    #[test]
    fn a_pool_time_is_converted_by_an_instant_on_both_clocks() {
        let at = gpupool_store::ClockReading {
            pool: PoolTime(10_000),
            wall: UNIX_EPOCH + Duration::from_secs(1_000_000_000),
        };
        assert_eq!(iso_of(PoolTime(10_000), at), "2001-09-09T01:46:40.000+00:00");
        assert_eq!(iso_of(PoolTime(8_500), at), "2001-09-09T01:46:38.500+00:00");
        assert!(iso_of(PoolTime(u64::MAX), at).starts_with("9999-12-3"));
    }
}

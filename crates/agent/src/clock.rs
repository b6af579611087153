//! The two clocks: the pool's, which no one can set and which goes on while the machine sleeps, and people's.
//!
//! The pool's clock counts on from where it stood when the machine was started anew: [`continue_from`] is called once, before
//! the first time is asked for.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use gpupool_core::{Millis, PoolTime};
use gpupool_store::ClockAnchor;
use jiff::Timestamp;
use jiff::fmt::temporal::DateTimePrinter;
use jiff::tz::Offset;
use rustix::time::{ClockId, clock_gettime};

/// How far the pool's clock is ahead of the time since the machine started.
static AHEAD: AtomicU64 = AtomicU64::new(0);

/// The pool's time in milliseconds.
pub fn now() -> PoolTime {
    PoolTime(uptime().saturating_add(AHEAD.load(Ordering::Relaxed)))
}

/// Lets the pool's clock go on from an instant that was saved, and not before `latest`, the last time in any row.
pub fn continue_from(saved: Option<&ClockAnchor>, latest: PoolTime) {
    let ahead = ahead(saved, latest, &boot(), uptime(), SystemTime::now());
    AHEAD.store(ahead.0, Ordering::Relaxed);
}

/// The present instant, to be saved.
pub fn anchor() -> ClockAnchor {
    ClockAnchor { boot: boot(), ahead: Millis(AHEAD.load(Ordering::Relaxed)), at: both() }
}

/// On the same start of the machine the clock simply goes on. After another one it stands where the wall clock says, but
/// never before what it said already.
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

/// Identifies this start of the machine.
fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

fn uptime() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let (secs, nanos) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    secs.saturating_mul(1000).saturating_add(nanos / 1_000_000)
}

/// An instant on both clocks.
pub fn both() -> gpupool_store::ClockReading {
    gpupool_store::ClockReading { pool: now(), wall: SystemTime::now() }
}

/// A time of the pool on the wall, by an instant on both clocks.
pub fn wall(time: PoolTime, at: gpupool_store::ClockReading) -> SystemTime {
    let apart = |millis| Duration::from_millis(millis);
    let told = if time >= at.pool {
        at.wall.checked_add(apart(time.since(at.pool).0))
    } else {
        at.wall.checked_sub(apart(at.pool.since(time).0))
    };
    told.unwrap_or(at.wall)
}

/// A time for people and programs: ISO 8601 with an offset, to the millisecond.
pub fn iso(at: SystemTime) -> String {
    const PRINTER: DateTimePrinter = DateTimePrinter::new().precision(Some(3));
    let at = Timestamp::try_from(at).unwrap_or(Timestamp::MAX);
    PRINTER.timestamp_with_offset_to_string(&at, Offset::UTC)
}

/// A time of the pool for people and programs.
pub fn iso_of(time: PoolTime, at: gpupool_store::ClockReading) -> String {
    iso(wall(time, at))
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn the_pools_clock_goes_on_after_a_restart_of_agent_and_machine_and_never_back() {
        let at = |secs| UNIX_EPOCH + Duration::from_secs(secs);
        let saved = ClockAnchor {
            boot: "a".into(),
            ahead: Millis(500),
            at: gpupool_store::ClockReading { pool: PoolTime(90_500), wall: at(1_000) },
        };
        let ahead = |boot, uptime, wall| super::ahead(Some(&saved), PoolTime(91_000), boot, uptime, at(wall)).0;
        // The same start of the machine, whatever the wall clock says.
        assert_eq!(ahead("a", 200_000, 1), 500);
        // Another start, an hour later, three seconds old.
        assert_eq!(ahead("b", 3_000, 4_600) + 3_000, 90_500 + 3_600_000);
        // The wall clock was put back: not before the last time anything happened.
        assert_eq!(ahead("b", 3_000, 10) + 3_000, 91_000);
        assert_eq!(super::ahead(None, PoolTime(0), "a", 3_000, at(0)), Millis(0));
    }

    #[test]
    fn a_time_of_the_pool_is_told_by_an_instant_on_both_clocks() {
        let at = gpupool_store::ClockReading {
            pool: PoolTime(10_000),
            wall: UNIX_EPOCH + Duration::from_secs(1_000_000_000),
        };
        assert_eq!(iso_of(PoolTime(10_000), at), "2001-09-09T01:46:40.000+00:00");
        assert_eq!(iso_of(PoolTime(8_500), at), "2001-09-09T01:46:38.500+00:00");
        assert!(iso_of(PoolTime(u64::MAX), at).starts_with("9999-12-3"));
    }
}

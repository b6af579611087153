//! The two clocks: the pool's, which no one can set and which goes on while the machine sleeps, and people's.

use std::time::{Duration, SystemTime};

use gpupool_core::Time;
use jiff::Timestamp;
use rustix::time::{ClockId, clock_gettime};

/// The pool's time: milliseconds since the machine started.
pub fn now() -> Time {
    let now = clock_gettime(ClockId::Boottime);
    let (secs, nanos) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    Time(secs.saturating_mul(1000).saturating_add(nanos / 1_000_000))
}

/// An instant on both clocks.
pub fn both() -> gpupool_store::Clock {
    gpupool_store::Clock { pool: now(), wall: SystemTime::now() }
}

/// A time of the pool on the wall, by an instant on both clocks.
pub fn wall(time: Time, at: gpupool_store::Clock) -> SystemTime {
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
    let at = Timestamp::try_from(at).unwrap_or(Timestamp::MAX);
    format!("{}+00:00", at.strftime("%Y-%m-%dT%H:%M:%S%.3f"))
}

/// A time of the pool for people and programs.
pub fn iso_of(time: Time, at: gpupool_store::Clock) -> String {
    iso(wall(time, at))
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn a_time_of_the_pool_is_told_by_an_instant_on_both_clocks() {
        let at = gpupool_store::Clock { pool: Time(10_000), wall: UNIX_EPOCH + Duration::from_secs(1_000_000_000) };
        assert_eq!(iso_of(Time(10_000), at), "2001-09-09T01:46:40.000+00:00");
        assert_eq!(iso_of(Time(8_500), at), "2001-09-09T01:46:38.500+00:00");
        assert!(iso_of(Time(u64::MAX), at).starts_with("9999-12-3"));
    }
}

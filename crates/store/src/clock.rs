//! The pool's clock told as people's time.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gpupool_core::Time;

/// One instant on both clocks, by which any time of the pool can be told as wall time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    /// On the pool's clock.
    pub pool: Time,
    /// On the wall.
    pub wall: SystemTime,
}

impl Clock {
    /// For what tells no time.
    pub(crate) const NEVER: Self = Self { pool: Time(0), wall: UNIX_EPOCH };

    /// A time of the pool as milliseconds since 1970; what lies before counts as 1970.
    pub(crate) fn millis(self, time: Time) -> u64 {
        let now = millis(self.wall);
        if time >= self.pool {
            now.saturating_add(time.since(self.pool).0)
        } else {
            now.saturating_sub(self.pool.since(time).0)
        }
    }
}

/// Milliseconds since 1970, within what the database can hold.
pub(crate) fn millis(at: SystemTime) -> u64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX).min(i64::MAX as u64)
}

/// The wall time that is so many milliseconds after 1970.
pub(crate) fn wall(millis: u64) -> SystemTime {
    UNIX_EPOCH.checked_add(Duration::from_millis(millis)).unwrap_or(UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_the_pool_are_told_from_one_instant_on_both_clocks() {
        let clock = Clock { pool: Time(5_000), wall: wall(1_000_000) };
        assert_eq!(clock.millis(Time(5_000)), 1_000_000);
        assert_eq!(clock.millis(Time(2_000)), 997_000);
        assert_eq!(clock.millis(Time(6_500)), 1_001_500);
        assert_eq!(Clock { pool: Time(u64::MAX), wall: wall(7) }.millis(Time(0)), 0);
    }
}

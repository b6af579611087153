//! Conversion from the pool's clock to wall time.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gpupool_core::{Millis, PoolTime};

/// One instant on both clocks, from which any pool time converts to wall time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockReading {
    /// Time on the pool's clock.
    pub pool: PoolTime,
    /// Wall time.
    pub wall: SystemTime,
}

impl ClockReading {
    /// Returns a pool time as wall time, in whole milliseconds; times before 1970 count as 1970.
    pub(crate) fn wall_of(self, time: PoolTime) -> SystemTime {
        let now = millis(self.wall);
        wall(if time >= self.pool {
            now.saturating_add(time.since(self.pool).0).min(i64::MAX as u64)
        } else {
            now.saturating_sub(self.pool.since(time).0)
        })
    }
}

/// Returns a wall time as milliseconds since 1970, within the range of a database integer.
pub(crate) fn millis(at: SystemTime) -> u64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX).min(i64::MAX as u64)
}

/// Returns the wall time that many milliseconds after 1970.
pub(crate) fn wall(millis: u64) -> SystemTime {
    UNIX_EPOCH.checked_add(Duration::from_millis(millis)).unwrap_or(UNIX_EPOCH)
}

// Anchor of the pool's clock, so that the clock continues after a reboot.

/// An instant on both clocks, and the boot of the machine that it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClockAnchor {
    /// Identifier of the boot.
    pub boot: String,
    /// Lead of the pool's clock over the time since that boot.
    pub ahead: Millis,
    /// Instant on both clocks.
    pub at: ClockReading,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_times_convert_from_one_instant_on_both_clocks() {
        let clock = ClockReading { pool: PoolTime(5_000), wall: wall(1_000_000) };
        assert_eq!(clock.wall_of(PoolTime(5_000)), wall(1_000_000));
        assert_eq!(clock.wall_of(PoolTime(2_000)), wall(997_000));
        assert_eq!(clock.wall_of(PoolTime(6_500)), wall(1_001_500));
        assert_eq!(ClockReading { pool: PoolTime(u64::MAX), wall: wall(7) }.wall_of(PoolTime(0)), UNIX_EPOCH);
    }
}

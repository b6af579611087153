//! The pool's clock told as people's time.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gpupool_core::{Millis, Time};
use rusqlite::{OptionalExtension, params};

use crate::commit::execute;
use crate::error::{CommitError, ReadError};
use crate::open::Store;

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

// Where the pool's clock stands, so that it goes on after the machine was started anew.

/// An instant on both clocks, and which start of the machine it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Anchor {
    /// Identifies a start of the machine.
    pub boot: String,
    /// How far the pool's clock is ahead of the time since that start.
    pub ahead: Millis,
    /// The instant.
    pub at: Clock,
}

impl Store {
    /// The instant that was kept last.
    pub fn anchor(&self) -> Result<Option<Anchor>, ReadError> {
        let read = || {
            self.connection
                .prepare_cached("SELECT boot, ahead, pool, wall FROM clock")?
                .query_row([], |row| {
                    let number = |column| row.get::<_, i64>(column).map(|n| n.max(0).cast_unsigned());
                    let at = Clock { pool: Time(number(2)?), wall: wall(number(3)?) };
                    Ok(Anchor { boot: row.get(0)?, ahead: Millis(number(1)?), at })
                })
                .optional()
        };
        read().map_err(|source| self.not_read(source))
    }

    /// Keeps an instant, in place of the one before. Also tells whether the store can be written to at all.
    pub fn set_anchor(&mut self, anchor: &Anchor) -> Result<(), CommitError> {
        let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let sql = "INSERT OR REPLACE INTO clock (one, boot, ahead, pool, wall) VALUES (1, ?1, ?2, ?3, ?4)";
        let [ahead, pool, wall] = [anchor.ahead.0, anchor.at.pool.0, millis(anchor.at.wall)].map(number);
        self.transact(|transaction| execute(transaction, sql, params![anchor.boot, ahead, pool, wall]).map(drop))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use tempfile::tempdir;

    use super::*;

    #[test]
    fn times_of_the_pool_are_told_from_one_instant_on_both_clocks() {
        let clock = Clock { pool: Time(5_000), wall: wall(1_000_000) };
        assert_eq!(clock.millis(Time(5_000)), 1_000_000);
        assert_eq!(clock.millis(Time(2_000)), 997_000);
        assert_eq!(clock.millis(Time(6_500)), 1_001_500);
        assert_eq!(Clock { pool: Time(u64::MAX), wall: wall(7) }.millis(Time(0)), 0);
    }

    #[test]
    fn the_last_instant_is_kept() {
        let dir = tempdir().unwrap();
        let mut store = Store::open(dir.path()).unwrap().store;
        assert_eq!(store.anchor().unwrap(), None);
        for pool in [5, 7] {
            let at = Clock { pool: Time(pool), wall: UNIX_EPOCH + Duration::from_secs(pool) };
            let anchor = Anchor { boot: "a".into(), ahead: Millis(3), at };
            store.set_anchor(&anchor).unwrap();
            assert_eq!(store.anchor().unwrap(), Some(anchor));
        }
    }
}

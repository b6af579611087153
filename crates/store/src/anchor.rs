//! Where the pool's clock stands, so that it goes on after the machine was started anew.

use gpupool_core::{Millis, Time};
use rusqlite::{OptionalExtension, params};

use crate::clock::{Clock, millis, wall};
use crate::error::{CommitError, ReadError};
use crate::open::Store;

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
        self.transact(|transaction| {
            transaction
                .prepare_cached(
                    "INSERT OR REPLACE INTO clock (one, boot, ahead, pool, wall) VALUES (1, ?1, ?2, ?3, ?4)",
                )?
                .execute(params![
                    anchor.boot,
                    number(anchor.ahead.0),
                    number(anchor.at.pool.0),
                    number(millis(anchor.at.wall))
                ])
                .map(drop)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use tempfile::tempdir;

    use super::*;

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

//! The default store: an SQLite database in a state directory, in WAL mode, with one writer.

mod buffer;
mod commit;
mod disk;
mod open;
mod trail;

use std::path::PathBuf;
use std::time::SystemTime;

use gpupool_core::{Millis, PoolRow, PoolTime};
use rusqlite::{Connection, OptionalExtension, Params, params};

use crate::clock::{ClockAnchor, ClockReading, millis, wall};
use crate::error::{CommitError, ReadError};
use crate::lease_store::{LeaseStore, LoadedRows, TrailReader};
use crate::limits::PRUNED_LEASES;
use crate::tokens::{self, TokenId, TokenMetadata, TokenOwner, TokenOwners, TokenRole, TokenSecret};

use buffer::WriteAheadBuffer;
use disk::{BallastFile, StateDirLock};
use trail::{DeviceNames, SqliteTrailReader};

/// The open database of one state directory. No other process can open it meanwhile.
#[derive(Debug)]
pub struct SqliteStore {
    connection: Connection,
    file: PathBuf,
    ballast: BallastFile,
    buffer: WriteAheadBuffer,
    device_names: DeviceNames,
    generation: u64,
    /// Problems found while opening that do not prevent operation.
    warnings: Vec<String>,
    // The last field, so that the database is closed before another process can open it.
    _lock: StateDirLock,
}

impl LeaseStore for SqliteStore {
    fn load(&self) -> Result<LoadedRows, ReadError> {
        let mut warnings = self.warnings.clone();
        let rows = self.read(|connection| open::read_rows(connection, &self.buffer, &mut warnings))?;
        Ok(LoadedRows { rows, warnings })
    }

    fn generation(&self) -> u64 {
        self.generation
    }

    fn commit(&mut self, rows: &[PoolRow], clock: ClockReading) -> Result<(), CommitError> {
        self.commit_batch(rows, clock)
    }

    fn commit_urgent(&mut self, rows: &[PoolRow], clock: ClockReading) -> Result<(), CommitError> {
        self.commit_urgent_batch(rows, clock)
    }

    fn unflushed_batches(&self) -> usize {
        self.buffer.len()
    }

    fn flush(&mut self) -> Result<(), CommitError> {
        self.flush_buffer()
    }

    fn recover(&mut self, anchor: &ClockAnchor) -> Result<(), CommitError> {
        self.set_clock_anchor(anchor)?;
        self.ballast.fill().map_err(|error| CommitError::Full { file: self.ballast.path.clone(), source: error.into() })
    }

    fn clock_anchor(&self) -> Result<Option<ClockAnchor>, ReadError> {
        self.read(|connection| {
            connection
                .prepare_cached("SELECT boot, ahead, pool, wall FROM clock")?
                .query_row([], |row| {
                    let number = |column| row.get::<_, i64>(column).map(|n| n.max(0).cast_unsigned());
                    let at = ClockReading { pool: PoolTime(number(2)?), wall: wall(number(3)?) };
                    Ok(ClockAnchor { boot: row.get(0)?, ahead: Millis(number(1)?), at })
                })
                .optional()
        })
    }

    fn set_clock_anchor(&mut self, anchor: &ClockAnchor) -> Result<(), CommitError> {
        let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let sql = "INSERT OR REPLACE INTO clock (one, boot, ahead, pool, wall) VALUES (1, ?1, ?2, ?3, ?4)";
        let [ahead, pool, wall] = [anchor.ahead.0, anchor.at.pool.0, millis(anchor.at.wall)].map(number);
        self.execute_change(sql, params![anchor.boot, ahead, pool, wall]).map(drop)
    }

    fn create_token(
        &mut self,
        owner: &str,
        role: TokenRole,
        at: SystemTime,
    ) -> Result<(TokenId, TokenSecret), CommitError> {
        let refused = |source: std::io::Error| CommitError::Refused { file: self.file.clone(), source: source.into() };
        let secret = tokens::generate_secret().map_err(refused)?;
        let sql = "INSERT INTO tokens (hash, owner, admin, read_only, created_at) VALUES (?1, ?2, ?3, ?4, ?5)";
        let hash = tokens::hash_secret(secret.reveal());
        let (admin, read_only) = (role == TokenRole::Admin, role == TokenRole::ReadOnly);
        self.execute_change(sql, params![hash, owner, admin, read_only, millis(at).cast_signed()])?;
        Ok((TokenId(self.connection.last_insert_rowid().cast_unsigned()), secret))
    }

    fn revoke_token(&mut self, id: TokenId, at: SystemTime) -> Result<bool, CommitError> {
        let sql = "UPDATE tokens SET revoked_at = ?2 WHERE id = ?1 AND revoked_at IS NULL";
        let changed = self.execute_change(sql, [id.0.cast_signed(), millis(at).cast_signed()])?;
        Ok(changed == 1)
    }

    fn tokens(&self) -> Result<Vec<TokenMetadata>, ReadError> {
        self.read(|connection| {
            let sql = "SELECT id, owner, admin, read_only, created_at, revoked_at FROM tokens ORDER BY id";
            let mut statement = connection.prepare_cached(sql)?;
            let tokens = statement.query_map([], |row| {
                let time = |at: i64| wall(at.max(0).cast_unsigned());
                Ok(TokenMetadata {
                    token: read_token_owner(row)?,
                    created_at: time(row.get(4)?),
                    revoked_at: row.get::<_, Option<i64>>(5)?.map(time),
                })
            })?;
            tokens.collect()
        })
    }

    fn token_owners(&self) -> Result<TokenOwners, ReadError> {
        self.read(|connection| {
            let sql = "SELECT id, owner, admin, read_only, hash FROM tokens WHERE revoked_at IS NULL";
            let mut statement = connection.prepare_cached(sql)?;
            statement.query_map([], |row| Ok((row.get(4)?, read_token_owner(row)?)))?.collect()
        })
    }

    fn prune_trail(&mut self, older_than: SystemTime) -> Result<usize, CommitError> {
        self.flush_buffer()?;
        self.transact(|transaction, _, _| trail::prune_trail(transaction, older_than, PRUNED_LEASES))
    }

    fn trail_reader(&self) -> Box<dyn TrailReader> {
        Box::new(SqliteTrailReader { file: self.file.clone() })
    }
}

impl SqliteStore {
    /// Reads with the writer's connection.
    fn read<T>(&self, read: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T, ReadError> {
        read(&self.connection).map_err(|source| ReadError { file: self.file.clone(), source: source.into() })
    }

    /// Runs one statement in its own transaction, and returns the number of changed rows.
    fn execute_change(&mut self, sql: &str, values: impl Params) -> Result<usize, CommitError> {
        self.transact(|transaction, _, _| execute(transaction, sql, values))
    }
}

fn read_token_owner(row: &rusqlite::Row<'_>) -> rusqlite::Result<TokenOwner> {
    let role = match (row.get(3)?, row.get(2)?) {
        (true, _) => TokenRole::ReadOnly,
        (false, true) => TokenRole::Admin,
        (false, false) => TokenRole::User,
    };
    Ok(TokenOwner { id: TokenId(row.get::<_, i64>(0)?.cast_unsigned()), owner: row.get(1)?, role })
}

/// Runs a cached prepared statement, and returns the number of changed rows.
fn execute(connection: &Connection, sql: &str, values: impl Params) -> rusqlite::Result<usize> {
    connection.prepare_cached(sql)?.execute(values)
}

fn encode_error(error: serde_json::Error) -> rusqlite::Error {
    rusqlite::Error::ToSqlConversionFailure(Box::new(error))
}

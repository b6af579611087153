//! Commits: one transaction, one sync of the disk, all or nothing.
//!
//! A small batch goes to the write-ahead buffer and reaches the tables with a later flush; a large batch goes to the
//! tables at once.

use std::mem;

use gpupool_core::PoolRow;
use rusqlite::{Connection, ErrorCode, Transaction, TransactionBehavior, params};

use crate::clock::ClockReading;
use crate::error::CommitError;
use crate::lease_store::{is_removal, renames_devices, row_key};
use crate::trail::add_records;

use super::buffer::WriteAheadBuffer;
use super::trail::{DeviceNames, TableTrail};
use super::{SqliteStore, encode_error, execute};

impl SqliteStore {
    pub(super) fn commit_batch(&mut self, rows: &[PoolRow], clock: ClockReading) -> Result<(), CommitError> {
        let Some(text) = self.buffer.encode(rows, clock) else { return self.commit_to_tables(rows, clock) };
        self.buffer.write(&self.connection, &text).map_err(|source| self.commit_error(source))?;
        self.buffer.push(rows, clock);
        Ok(())
    }

    pub(super) fn commit_urgent_batch(&mut self, rows: &[PoolRow], clock: ClockReading) -> Result<(), CommitError> {
        match self.commit_batch(rows, clock) {
            // An exhausted quota looks like a failing disk.
            Err(CommitError::Full { .. } | CommitError::Io { .. }) if self.ballast.release() => {
                self.commit_batch(rows, clock)
            }
            committed => committed,
        }
    }

    pub(super) fn flush_buffer(&mut self) -> Result<(), CommitError> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        self.transact(flush)?;
        self.buffer.clear();
        Ok(())
    }

    /// Flushes the buffer and then commits these rows, in one transaction.
    fn commit_to_tables(&mut self, rows: &[PoolRow], clock: ClockReading) -> Result<(), CommitError> {
        self.transact(|transaction, buffer, names| {
            flush(transaction, buffer, names)?;
            for row in rows {
                add_records(&mut TableTrail { connection: transaction, names }, row, clock)?;
                put_row(transaction, row)?;
                if renames_devices(row) {
                    names.clear();
                }
            }
            Ok(())
        })?;
        self.buffer.clear();
        Ok(())
    }

    /// Runs a change in one transaction.
    pub(super) fn transact<T>(
        &mut self,
        change: impl FnOnce(&Transaction<'_>, &WriteAheadBuffer, &mut DeviceNames) -> rusqlite::Result<T>,
    ) -> Result<T, CommitError> {
        // A failed transaction may have read names that were never committed, so the names are kept only on success.
        let mut names = mem::take(&mut self.device_names);
        let result = transact(&mut self.connection, |transaction| change(transaction, &self.buffer, &mut names));
        let result = result.map_err(|source| self.commit_error(source))?;
        self.device_names = names;
        Ok(result)
    }

    /// Converts an error of the database to an error of a commit.
    pub(super) fn commit_error(&self, source: rusqlite::Error) -> CommitError {
        let (file, is_disk_full) = (self.file.clone(), self.ballast.is_disk_full());
        let (code, source) = (source.sqlite_error_code(), source.into());
        match code {
            Some(ErrorCode::DiskFull) => CommitError::Full { file, source },
            // Some writes do not report the system's error: on a full disk the log's index fails with plain I/O.
            Some(ErrorCode::SystemIoFailure | ErrorCode::CannotOpen) if is_disk_full => {
                CommitError::Full { file, source }
            }
            Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => CommitError::ReadOnly { file, source },
            Some(ErrorCode::SystemIoFailure | ErrorCode::CannotOpen) => CommitError::Io { file, source },
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => CommitError::Corrupt { file, source },
            _ => CommitError::Refused { file, source },
        }
    }
}

/// Runs a change in one transaction.
pub(super) fn transact<T>(
    connection: &mut Connection,
    change: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T>,
) -> rusqlite::Result<T> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let result = change(&transaction)?;
    transaction.commit()?;
    Ok(result)
}

/// Moves every batch of the buffer to the tables.
fn flush(transaction: &Transaction<'_>, buffer: &WriteAheadBuffer, names: &mut DeviceNames) -> rusqlite::Result<()> {
    if buffer.is_empty() {
        return Ok(());
    }
    let mut trail = TableTrail { connection: transaction, names };
    buffer.rows().try_for_each(|(row, clock)| add_records(&mut trail, row, clock))?;
    buffer.latest_rows().map_err(encode_error)?.try_for_each(|row| put_row(transaction, row))?;
    buffer.write_flushed(transaction)
}

/// Replaces the row about the same entity, or removes it.
fn put_row(transaction: &Transaction<'_>, row: &PoolRow) -> rusqlite::Result<()> {
    let json = || serde_json::to_string(row).map_err(encode_error);
    let changed = match row {
        PoolRow::Lease(lease) => {
            let sql = "INSERT OR REPLACE INTO leases (id, value) VALUES (?1, ?2)";
            execute(transaction, sql, params![lease.id.0.cast_signed(), json()?])
        }
        PoolRow::Forget(lease) => execute(transaction, "DELETE FROM leases WHERE id = ?1", [lease.0.cast_signed()]),
        _ if is_removal(row) => {
            let (kind, key) = row_key(row).map_err(encode_error)?;
            execute(transaction, "DELETE FROM rows WHERE kind = ?1 AND key = ?2", params![kind, key])
        }
        _ => {
            let (kind, key) = row_key(row).map_err(encode_error)?;
            let sql = "INSERT OR REPLACE INTO rows (kind, key, value) VALUES (?1, ?2, ?3)";
            execute(transaction, sql, params![kind, key, json()?])
        }
    };
    changed.map(drop)
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use gpupool_core::{LeaseId, Millis, PoolCounters, PoolTime};
    use rusqlite::ffi;
    use tempfile::{TempDir, tempdir};

    use super::*;
    use crate::clock::ClockAnchor;
    use crate::lease_store::LeaseStore;
    use crate::trail::TrailQuery;

    const CLOCK: ClockReading = ClockReading { pool: PoolTime(0), wall: UNIX_EPOCH };

    fn store() -> (TempDir, SqliteStore) {
        let dir = tempdir().unwrap();
        let store = SqliteStore::open(dir.path()).unwrap();
        (dir, store)
    }

    fn rows(store: &SqliteStore) -> Vec<PoolRow> {
        store.load().unwrap().rows
    }

    fn anchor() -> ClockAnchor {
        ClockAnchor { boot: "boot".into(), ahead: Millis(0), at: CLOCK }
    }

    /// Creates usage rows of many owners, the simplest rows of any number.
    fn usage(count: u64) -> Vec<PoolRow> {
        let row = |number| gpupool_core::UsageRow {
            owner: format!("owner {number}").into(),
            period: 0,
            share_millis: number,
            settled_at: PoolTime(0),
        };
        (0..count).map(row).map(PoolRow::Usage).collect()
    }

    fn limit_pages(store: &SqliteStore, pages: u32) {
        store.connection.pragma_update_and_check(None, "max_page_count", pages, |_| Ok(())).unwrap();
    }

    #[test]
    fn a_batch_without_space_leaves_nothing_and_can_be_committed_later() {
        let (_dir, mut store) = store();
        let first = PoolRow::Counters(PoolCounters { next_lease: 1, ..PoolCounters::default() });
        store.commit(std::slice::from_ref(&first), CLOCK).unwrap();
        limit_pages(&store, 12);
        let error = store.commit(&usage(5_000), CLOCK).unwrap_err();
        assert!(matches!(error, CommitError::Full { .. }), "{error}");
        assert_eq!(rows(&store), [first]);
        limit_pages(&store, 1_000_000);
        store.commit(&usage(5_000), CLOCK).unwrap();
        assert_eq!(rows(&store).len(), 5_001);
    }

    #[test]
    fn the_ballast_is_released_once_and_only_for_urgent_batches() {
        let (dir, mut store) = store();
        let ballast = dir.path().join("ballast");
        limit_pages(&store, 12);
        store.commit(&usage(5_000), CLOCK).unwrap_err();
        assert!(ballast.exists());
        let error = store.commit_urgent(&usage(5_000), CLOCK).unwrap_err();
        assert!(matches!(error, CommitError::Full { .. }), "{error}");
        assert!(!ballast.exists());
        store.recover(&anchor()).unwrap();
        assert!(ballast.exists());
    }

    #[test]
    fn a_small_batch_writes_one_page_and_is_visible_before_its_flush() {
        let (dir, mut store) = store();
        let row = |next_lease| PoolRow::Counters(PoolCounters { next_lease, ..PoolCounters::default() });
        let one = |store: &mut SqliteStore, number| store.commit(&[row(number)], CLOCK).unwrap();
        // Each slot of the buffer is created when it is first used.
        (0..100).for_each(|number| one(&mut store, number));
        let pages_of_log = |store: &SqliteStore| -> i64 {
            store.connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| row.get(1)).unwrap()
        };
        pages_of_log(&store);
        (100..103).for_each(|number| one(&mut store, number));
        assert_eq!(pages_of_log(&store), 3);
        assert!(store.unflushed_batches() > 0);
        assert_eq!(rows(&store), [row(102)]);
        drop(store);
        let mut store = SqliteStore::open(dir.path()).unwrap();
        assert_eq!(rows(&store), [row(102)]);
        assert!(store.unflushed_batches() > 0, "closing flushes nothing");
        store.flush().unwrap();
        assert_eq!((store.unflushed_batches(), rows(&store)), (0, vec![row(102)]));
        one(&mut store, 103);
        drop(store);
        assert_eq!(rows(&SqliteStore::open(dir.path()).unwrap()), [row(103)]);
    }

    #[test]
    fn a_batch_that_cannot_be_flushed_stays_in_the_buffer() {
        let (_dir, mut store) = store();
        let lease = |id| PoolRow::Forget(LeaseId(id));
        store.commit(&[lease(1)], CLOCK).unwrap();
        store.connection.pragma_update(None, "query_only", true).unwrap();
        store.flush().unwrap_err();
        assert_eq!(store.unflushed_batches(), 1);
        store.connection.pragma_update(None, "query_only", false).unwrap();
        store.flush().unwrap();
        assert_eq!(store.unflushed_batches(), 0);
    }

    #[test]
    fn a_read_only_database_is_reported_as_such() {
        let (_dir, mut store) = store();
        store.connection.pragma_update(None, "query_only", true).unwrap();
        let error = store.commit(&[PoolRow::Forget(LeaseId(1))], CLOCK).unwrap_err();
        assert!(matches!(error, CommitError::ReadOnly { .. }), "{error}");
    }

    #[test]
    fn a_store_can_be_sent_to_a_thread() {
        fn is_send(_: impl Send) {}
        is_send(store().1);
    }

    #[test]
    fn a_reader_neither_waits_for_a_transaction_nor_sees_part_of_it() {
        let (_dir, mut store) = store();
        let reader = store.trail_reader();
        let transaction = store.connection.transaction_with_behavior(TransactionBehavior::Exclusive).unwrap();
        let sql = "INSERT INTO history (lease, event, at, owner, devices) VALUES (1, 'ended', 5, 'alice', '[]')";
        transaction.execute(sql, []).unwrap();
        assert_eq!(reader.history(&TrailQuery::default()).unwrap().records, []);
        transaction.commit().unwrap();
        assert_eq!(reader.history(&TrailQuery::default()).unwrap().records.len(), 1);
    }

    #[test]
    fn database_errors_are_classified_by_remedy() {
        let (_dir, store) = store();
        let kind = |code| match store.commit_error(rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)) {
            CommitError::Full { .. } => "full",
            CommitError::ReadOnly { .. } => "read-only",
            CommitError::Io { .. } => "io",
            CommitError::Corrupt { .. } => "corrupt",
            CommitError::Refused { .. } => "refused",
        };
        assert_eq!(kind(ffi::SQLITE_FULL), "full");
        assert_eq!(kind(ffi::SQLITE_IOERR_FSYNC), "io");
        assert_eq!(kind(ffi::SQLITE_READONLY), "read-only");
        assert_eq!(kind(ffi::SQLITE_CORRUPT), "corrupt");
        assert_eq!(kind(ffi::SQLITE_BUSY), "refused");
    }
}

//! Databases that open, and databases that are refused and stay unchanged.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::common::{clock, lease_ids, open, queued_lease};
use gpupool_core::PoolRow;
use gpupool_store::{BALLAST_BYTES, LeaseStore, SqliteStore, StoreError, TrailQuery};
use rusqlite::Connection;
use tempfile::tempdir;

/// Changes the database without the store.
fn tamper(dir: &Path, sql: &str) {
    let connection = Connection::open(dir.join("pool.db")).unwrap();
    connection.execute_batch(sql).unwrap();
}

/// Closes a store with that many leases in its tables.
fn create_closed_store(dir: &Path, count: u64) {
    let rows: Vec<PoolRow> = (0..count).map(queued_lease).collect();
    let mut store = open(dir).0;
    store.commit(&rows, clock(0)).unwrap();
    store.flush().unwrap();
}

/// Returns the error of a refused database, which must not change.
fn open_refused(dir: &Path) -> StoreError {
    let before = fs::read(dir.join("pool.db")).unwrap();
    let error = SqliteStore::open(dir).expect_err("it must be refused");
    assert!(fs::read(dir.join("pool.db")).unwrap() == before, "{error}: and the file was changed");
    error
}

#[test]
fn a_new_store_is_empty_private_and_has_its_ballast() {
    let parent = tempdir().unwrap();
    let dir = parent.path().join("state/here");
    let (_store, rows) = open(&dir);
    assert_eq!(rows, []);
    let mode = |name: &str| fs::metadata(dir.join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(""), mode("pool.db"), mode("ballast"), mode("lock")), (0o711, 0o600, 0o600, 0o600));
    assert_eq!(fs::metadata(dir.join("ballast")).unwrap().len(), BALLAST_BYTES);
}

#[test]
fn a_second_opener_gets_the_pid_of_the_first() {
    let dir = tempdir().unwrap();
    let first = open(dir.path());
    let error = SqliteStore::open(dir.path()).unwrap_err();
    assert!(matches!(error, StoreError::InUse { pid: Some(pid), .. } if pid == std::process::id()), "{error}");
    drop(first);
    open(dir.path());
}

#[test]
fn a_newer_schema_is_refused_and_left_untouched() {
    let dir = tempdir().unwrap();
    create_closed_store(dir.path(), 3);
    tamper(dir.path(), "PRAGMA user_version = 99");
    let error = open_refused(dir.path());
    assert!(matches!(error, StoreError::NewerSchema { found: 99, known: 5, .. }), "{error}");
}

#[test]
fn a_newer_schema_that_is_still_in_the_log_is_refused_too() {
    let dir = tempdir().unwrap();
    create_closed_store(dir.path(), 3);
    let other = Connection::open(dir.path().join("pool.db")).unwrap();
    other.execute_batch("PRAGMA user_version = 99").unwrap();
    let log = fs::read(dir.path().join("pool.db-wal")).unwrap();
    assert!(!log.is_empty());
    let crashed = tempdir().unwrap();
    for name in ["pool.db", "pool.db-wal"] {
        fs::copy(dir.path().join(name), crashed.path().join(name)).unwrap();
    }
    let error = open_refused(crashed.path());
    assert!(matches!(error, StoreError::NewerSchema { found: 99, .. }), "{error}");
    assert!(fs::read(crashed.path().join("pool.db-wal")).unwrap() == log);
}

#[test]
fn another_programs_database_is_refused_and_left_untouched() {
    let dir = tempdir().unwrap();
    tamper(dir.path(), "CREATE TABLE theirs (x); INSERT INTO theirs VALUES (1)");
    assert!(matches!(open_refused(dir.path()), StoreError::NotOurs { found: 0, .. }));
    tamper(dir.path(), "PRAGMA application_id = 77");
    assert!(matches!(open_refused(dir.path()), StoreError::NotOurs { found: 77, .. }));
}

#[test]
fn a_file_that_is_no_database_is_refused_and_left_untouched() {
    let dir = tempdir().unwrap();
    for bytes in [&b"short"[..], &[b'x'; 8192]] {
        fs::write(dir.path().join("pool.db"), bytes).unwrap();
        let error = open_refused(dir.path());
        assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
    }
}

#[test]
fn a_damaged_database_is_refused_and_left_untouched() {
    let dir = tempdir().unwrap();
    create_closed_store(dir.path(), 200);
    let file = dir.path().join("pool.db");
    let whole = fs::read(&file).unwrap();
    assert!(whole.len() > 10 * 4096);
    let mut scribbled = whole.clone();
    scribbled[4096..].fill(0x5a);
    for damaged in [scribbled, whole[..whole.len() / 2].to_vec()] {
        fs::write(&file, damaged).unwrap();
        let error = open_refused(dir.path());
        assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
    }
}

#[test]
fn an_unreadable_row_is_a_warning_and_stays() {
    let dir = tempdir().unwrap();
    create_closed_store(dir.path(), 3);
    tamper(
        dir.path(),
        "UPDATE leases SET value = '{\"lease\":' WHERE id = 1;
         INSERT INTO leases SELECT 7, value FROM leases WHERE id = 2;
         INSERT INTO rows VALUES ('dream', 'x', '{\"dream\":1}'), ('node', x'ff', 5)",
    );
    for _ in 0..2 {
        let loaded = SqliteStore::open(dir.path()).unwrap().load().unwrap();
        assert_eq!(lease_ids(&loaded.rows), [0, 2]);
        assert_eq!(loaded.warnings.len(), 4, "{:?}", loaded.warnings);
        assert!(loaded.warnings.iter().any(|message| message.contains("lease row \"1\"")), "{:?}", loaded.warnings);
    }
}

#[test]
fn an_unreadable_buffered_batch_is_refused_and_left_untouched() {
    let dir = tempdir().unwrap();
    let mut store = open(dir.path()).0;
    store.commit(&[queued_lease(0)], clock(0)).unwrap();
    let reader = store.trail_reader();
    drop(store);
    tamper(dir.path(), "UPDATE notes SET batch = substr(batch, 1, 100)");
    let message = reader.history(&TrailQuery::default()).unwrap_err().to_string();
    assert!(message.contains("number 1"), "{message}");
    let error = open_refused(dir.path());
    assert!(matches!(&error, StoreError::Corrupt { what, .. } if what.contains("number 1")), "{error}");
}

#[test]
fn creating_a_store_can_be_interrupted_anywhere() {
    let empty = tempdir().unwrap();
    fs::write(empty.path().join("pool.db"), b"").unwrap();
    open(empty.path());
    let only_a_log = tempdir().unwrap();
    tamper(only_a_log.path(), "PRAGMA journal_mode = wal");
    assert!(fs::metadata(only_a_log.path().join("pool.db")).unwrap().len() > 0);
    open(only_a_log.path());
}

#[test]
fn a_file_in_place_of_the_directory_is_named_in_the_error() {
    let dir = tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    let message = SqliteStore::open(&file).unwrap_err().to_string();
    assert!(message.contains(&*file.to_string_lossy()) && message.contains("writable"), "{message}");
}

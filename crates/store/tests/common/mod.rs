//! Helpers for the stories about a store: clocks, and leases as a pool leaves them.

// Each test program uses only some of the helpers.
#![allow(dead_code)]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gpupool_core::{LeaseId, LeaseRow, LeaseState, PoolCounters, PoolRow, PoolTime, Request};
use gpupool_store::{ClockReading, LeaseStore, LoadedRows, SqliteStore};

/// A wall time that many milliseconds after a day in 2026.
pub fn wall(ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(1_790_000_000_000 + ms)
}

/// The pool's clock, which starts at that day.
pub fn clock(ms: u64) -> ClockReading {
    ClockReading { pool: PoolTime(ms), wall: wall(ms) }
}

/// A queued lease.
pub fn queued_lease(id: u64) -> PoolRow {
    PoolRow::Lease(LeaseRow {
        id: LeaseId(id),
        request: Arc::new(Request::default()),
        key: None,
        state: LeaseState::Queued,
        cause: None,
        token: None,
        node: None,
        promises: Arc::from([]),
        draining: false,
        quarantined: false,
        decision: None,
        holder: None,
        created_at: PoolTime(0),
        granted_at: None,
        ended_at: None,
        revoke_at: None,
        revocation: None,
        hard_end: None,
        seq: id,
    })
}

pub fn counters_row(next_lease: u64) -> PoolRow {
    PoolRow::Counters(PoolCounters { next_lease, ..PoolCounters::default() })
}

/// Opens a store that must have no warnings.
pub fn open(dir: &Path) -> (SqliteStore, Vec<PoolRow>) {
    let store = SqliteStore::open(dir).expect("the store opens");
    let rows = load_rows(&store);
    (store, rows)
}

/// Loads rows that must have no warnings.
pub fn load_rows(store: &dyn LeaseStore) -> Vec<PoolRow> {
    let LoadedRows { rows, warnings } = store.load().expect("the rows can be read");
    assert_eq!(warnings, [] as [&str; 0]);
    rows
}

/// Returns the ids of the leases among rows, in order.
pub fn lease_ids(rows: &[PoolRow]) -> Vec<u64> {
    let id = |row: &PoolRow| if let PoolRow::Lease(lease) = row { Some(lease.id.0) } else { None };
    let mut ids: Vec<u64> = rows.iter().filter_map(id).collect();
    ids.sort_unstable();
    ids
}

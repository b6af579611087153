//! What the stories about a store share: a clock, and leases as a pool leaves them.

// Each story is a crate of its own and uses its own part of this.
#![allow(dead_code)]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gpupool_core::{Counters, LeaseId, LeaseRow, LeaseState, Request, Row, Time};
use gpupool_store::{Clock, LeaseStore, LoadedRows, SqliteStore};

/// A wall time so many milliseconds after a day in 2026.
pub fn wall(ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(1_790_000_000_000 + ms)
}

/// The pool's clock, which starts at that day.
pub fn clock(ms: u64) -> Clock {
    Clock { pool: Time(ms), wall: wall(ms) }
}

/// A request that waits.
pub fn waiting(id: u64) -> Row {
    Row::Lease(LeaseRow {
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
        created_at: Time(0),
        granted_at: None,
        ended_at: None,
        revoke_at: None,
        hard_end: None,
        seq: id,
    })
}

pub fn counters(next_lease: u64) -> Row {
    Row::Counters(Counters { next_lease, ..Counters::default() })
}

/// Opens a store that must open without complaints.
pub fn open(dir: &Path) -> (SqliteStore, Vec<Row>) {
    let store = SqliteStore::open(dir).expect("the store opens");
    let rows = rows(&store);
    (store, rows)
}

/// Loads rows that must be without complaints.
pub fn rows(store: &dyn LeaseStore) -> Vec<Row> {
    let LoadedRows { rows, complaints } = store.load().expect("the rows can be read");
    assert_eq!(complaints, [] as [&str; 0]);
    rows
}

/// The ids of the leases among rows, in order.
pub fn leases(rows: &[Row]) -> Vec<u64> {
    let id = |row: &Row| if let Row::Lease(lease) = row { Some(lease.id.0) } else { None };
    let mut ids: Vec<u64> = rows.iter().filter_map(id).collect();
    ids.sort_unstable();
    ids
}

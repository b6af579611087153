//! Contract of every store.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::common::{clock, counters_row, lease_ids, load_rows, open, queued_lease, wall};
use crate::support::{PoolFixture, owned, part};
use crate::{StoreBackend, all_backends};
use gpupool_core::{LeaseId, Millis, PoolRow};
use gpupool_store::{
    ClockAnchor, CommitError, LeaseStore, MemoryDisk, MemoryFault, TokenId, TokenOwner, TokenRole, TrailEvent,
    TrailQuery,
};
use tempfile::tempdir;

fn in_every_store(story: impl Fn(&dyn StoreBackend)) {
    all_backends().iter().for_each(|backend| story(&**backend));
}

/// Sorts rows, which are loaded in any order.
fn sorted(mut rows: Vec<PoolRow>) -> Vec<PoolRow> {
    rows.sort_by_key(|row| format!("{row:?}"));
    rows
}

#[test]
fn the_last_row_about_each_entity_is_loaded_now_and_after_reopening() {
    in_every_store(|backend| {
        let mut store = backend.open();
        assert_eq!(load_rows(&*store), []);
        let forget = PoolRow::Forget(LeaseId(1));
        store.commit(&[counters_row(1), queued_lease(1), queued_lease(2), counters_row(3), forget], clock(0)).unwrap();
        assert_eq!(sorted(load_rows(&*store)), [counters_row(3), queued_lease(2)]);
        store.commit(&[queued_lease(1), PoolRow::Forget(LeaseId(2))], clock(0)).unwrap();
        store.commit_urgent(&[counters_row(4)], clock(0)).unwrap();
        let committed = [counters_row(4), queued_lease(1)];
        assert_eq!(sorted(load_rows(&*store)), committed);
        drop(store);
        let mut store = backend.open();
        assert_eq!(sorted(load_rows(&*store)), committed);
        store.flush().unwrap();
        assert_eq!((store.unflushed_batches(), sorted(load_rows(&*store))), (0, committed.to_vec()));
    });
}

#[test]
fn a_large_batch_is_committed_like_a_small_one() {
    in_every_store(|backend| {
        let mut store = backend.open();
        let large: Vec<PoolRow> = (0..500).map(queued_lease).collect();
        store.commit(&[queued_lease(7), queued_lease(1000)], clock(0)).unwrap();
        store.commit(&large, clock(0)).unwrap();
        assert_eq!(store.unflushed_batches(), 0, "a batch in the tables comes after all of the buffer");
        drop(store);
        let expected: Vec<u64> = (0..500).chain([1000]).collect();
        assert_eq!(lease_ids(&load_rows(&*backend.open())), expected);
    });
}

#[test]
fn the_generation_grows_by_one_with_each_opening() {
    in_every_store(|backend| {
        for generation in 1..4 {
            let mut store = backend.open();
            assert_eq!(store.generation(), generation);
            store.commit(&[counters_row(generation)], clock(0)).unwrap();
            assert_eq!(load_rows(&*store), [counters_row(generation)], "the generation is no row of the pool");
        }
    });
}

#[test]
fn the_last_anchor_is_stored() {
    in_every_store(|backend| {
        let mut store = backend.open();
        assert_eq!(store.clock_anchor().unwrap(), None);
        let anchor = |at| ClockAnchor { boot: "a".into(), ahead: Millis(3), at: clock(at) };
        store.set_clock_anchor(&anchor(5)).unwrap();
        assert_eq!(store.clock_anchor().unwrap(), Some(anchor(5)));
        store.recover(&anchor(7)).unwrap();
        drop(store);
        assert_eq!(backend.open().clock_anchor().unwrap(), Some(anchor(7)));
    });
}

#[test]
fn a_token_is_found_by_its_secret_until_it_is_revoked() {
    in_every_store(|backend| {
        let mut store = backend.open();
        let (alice, secret) = store.create_token("alice", TokenRole::User, wall(1)).unwrap();
        let (_, other) = store.create_token("root", TokenRole::Admin, wall(2)).unwrap();
        let (_, reader) = store.create_token("grafana", TokenRole::ReadOnly, wall(2)).unwrap();
        assert_ne!(secret, other);
        drop(store);
        let mut store = backend.open();
        let owners = store.token_owners().unwrap();
        let owner = TokenOwner { id: alice, owner: "alice".into(), role: TokenRole::User };
        assert_eq!(owners.find(secret.reveal()), Some(&owner));
        assert_eq!(owners.find(other.reveal()).unwrap().role, TokenRole::Admin);
        assert_eq!(owners.find(reader.reveal()).unwrap().role, TokenRole::ReadOnly);
        assert_eq!(owners.find(&secret.reveal()[..67]), None);
        assert!(store.revoke_token(alice, wall(3)).unwrap());
        assert!(!store.revoke_token(alice, wall(4)).unwrap(), "it is revoked already");
        assert!(!store.revoke_token(TokenId(99), wall(4)).unwrap());
        let owners = store.token_owners().unwrap();
        assert_eq!(owners.find(secret.reveal()), None);
        assert!(owners.find(other.reveal()).is_some());
        let times: Vec<_> = store.tokens().unwrap().iter().map(|token| (token.created_at, token.revoked_at)).collect();
        assert_eq!(times, [(wall(1), Some(wall(3))), (wall(2), None), (wall(2), None)]);
    });
}

#[test]
fn a_secret_is_neither_printed_nor_stored() {
    let dir = tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    let created = store.create_token("alice", TokenRole::User, wall(1)).unwrap();
    let secret = created.1.reveal();
    assert!(secret.len() == 68 && secret.starts_with("gpt_"), "{} characters", secret.len());
    assert!(!format!("{created:?}").contains(&secret[4..]));
    for file in ["pool.db", "pool.db-wal"] {
        let bytes = fs::read(dir.path().join(file)).unwrap();
        assert!(!bytes.windows(20).any(|part| part == &secret.as_bytes()[10..30]), "{file}");
    }
}

/// Batches of a pool in which a lease is granted and released repeatedly.
fn grant_and_release(count: usize) -> Vec<(Vec<PoolRow>, u64)> {
    let mut fixture = PoolFixture::of(1);
    let mut batches = vec![(fixture.rows.clone(), fixture.now.0)];
    let mut committed = fixture.rows.len();
    let mut add = |fixture: &PoolFixture| {
        batches.push((fixture.rows[committed..].to_vec(), fixture.now.0));
        committed = fixture.rows.len();
    };
    for _ in 0..count {
        let lease = fixture.request(owned("alice", part(100)));
        add(&fixture);
        fixture.release(lease);
        add(&fixture);
    }
    batches
}

#[test]
fn a_reader_in_another_thread_sees_whole_batches_in_order() {
    const ROUNDS: usize = 150;
    in_every_store(|backend| {
        let mut store = backend.open();
        let reader = store.trail_reader();
        let is_finished = AtomicBool::new(false);
        thread::scope(|scope| {
            let reader_thread = scope.spawn(|| {
                let mut seen = 0;
                loop {
                    // Before the last reading, so that it includes every batch.
                    let is_last = is_finished.load(Ordering::Acquire);
                    let records = reader.history(&TrailQuery::default()).unwrap().records;
                    assert!(records.len() >= seen, "{} after {seen}", records.len());
                    seen = records.len();
                    for (number, record) in records.iter().enumerate() {
                        let event = if number % 2 == 0 { TrailEvent::Granted } else { TrailEvent::Ended };
                        assert_eq!((record.lease.0, record.event), (number as u64 / 2, event));
                        assert_eq!(record.devices.len(), 1);
                    }
                    if is_last {
                        return seen;
                    }
                }
            });
            let mut commit = || {
                for (number, (rows, at)) in grant_and_release(ROUNDS).into_iter().enumerate() {
                    store.commit(&rows, clock(at)).unwrap();
                    if number % 40 == 0 {
                        store.flush().unwrap();
                    }
                }
            };
            commit();
            is_finished.store(true, Ordering::Release);
            assert_eq!(reader_thread.join().unwrap(), 2 * ROUNDS);
        });
    });
}

#[test]
fn a_reader_outlives_its_store_and_sees_what_the_next_one_commits() {
    in_every_store(|backend| {
        let mut store = backend.open();
        let reader = store.trail_reader();
        let batches = grant_and_release(1);
        store.commit(&batches[0].0, clock(0)).unwrap();
        store.commit(&batches[1].0, clock(0)).unwrap();
        drop(store);
        assert_eq!(reader.history(&TrailQuery::default()).unwrap().records.len(), 1);
        backend.open().commit(&batches[2].0, clock(0)).unwrap();
        assert_eq!(reader.history(&TrailQuery::default()).unwrap().records.len(), 2);
    });
}

#[test]
fn a_reader_that_was_used_leaves_the_log_to_the_writer() {
    let dir = tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    let reader = store.trail_reader();
    store.commit(&[queued_lease(0)], clock(0)).unwrap();
    reader.history(&TrailQuery::default()).unwrap();
    drop(store);
    assert!(!dir.path().join("pool.db-wal").exists(), "the writer wrote everything back when it was closed");
    drop(reader);
}

#[test]
fn memory_faults_behave_like_disk_faults() {
    let disk = MemoryDisk::default();
    let mut store = disk.open();
    let anchor = ClockAnchor { boot: "a".into(), ahead: Millis(0), at: clock(0) };
    disk.set_fault(Some(MemoryFault::Full));
    assert!(matches!(store.commit(&[queued_lease(0)], clock(0)), Err(CommitError::Full { .. })));
    assert!(matches!(store.recover(&anchor), Err(CommitError::Full { .. })));
    store.commit_urgent(&[queued_lease(1)], clock(0)).unwrap();
    disk.set_fault(Some(MemoryFault::Io));
    assert!(matches!(store.commit_urgent(&[queued_lease(2)], clock(0)), Err(CommitError::Io { .. })));
    disk.set_fault(None);
    store.recover(&anchor).unwrap();
    assert_eq!(lease_ids(&load_rows(&store)), [1]);
}

#[test]
fn a_hanging_commit_blocks_no_reader_and_continues() {
    let disk = MemoryDisk::default();
    let mut store = disk.open();
    let reader = store.trail_reader();
    disk.set_fault(Some(MemoryFault::Hang));
    let commit = thread::spawn(move || {
        store.commit(&[queued_lease(0)], clock(0)).unwrap();
        store
    });
    disk.wait_until_hanging();
    assert_eq!(reader.history(&TrailQuery::default()).unwrap().records, []);
    disk.set_fault(None);
    assert_eq!(lease_ids(&load_rows(&commit.join().unwrap())), [0]);
}

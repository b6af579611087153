//! A disk that is full or read-only: a small one of our own, in a mount namespace where that is allowed.
//!
//! Its own program: a starting child process holds the locks of every open store until it executes another program.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
#[path = "../../../tests/skipped.rs"]
mod skipped;
#[path = "../../core/tests/support/mod.rs"]
mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::{env, io};

use common::{clock, lease_ids, open, queued_lease};
use gpupool_core::{LeaseRow, Millis, PoolRow, Request};
use gpupool_store::{ClockAnchor, CommitError, LeaseStore, SqliteStore, StoreError, TrailEvent, TrailQuery};
use support::{Stage, owned, whole};
use tempfile::tempdir;

use skipped::skipped;

const DISK_VARIABLE: &str = "GPUPOOL_TEST_SMALL_DISK";

/// Runs an ignored test of this file in a process with a disk of 4 MiB; reports a skipped test without one.
fn on_a_small_disk(test: &str) {
    let dir = tempdir().unwrap();
    let script = "mount -t tmpfs -o size=4m none \"$1\" || exit 77; shift; exec \"$@\"";
    let run = Command::new("unshare")
        .args(["-rm", "sh", "-c", script, "sh"])
        .arg(dir.path())
        .arg(env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(DISK_VARIABLE, dir.path())
        .output();
    match run {
        Err(error) if error.kind() == io::ErrorKind::NotFound => skipped(test, "there is no unshare here"),
        Err(error) => panic!("{error}"),
        Ok(run) => {
            let output = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
            if !run.status.success() && !output.contains("running 1 test") {
                return skipped(test, &format!("no mount namespace here: {}", output.trim().replace('\n', " ")));
            }
            assert!(run.status.success(), "{output}");
            assert!(output.contains("1 passed"), "{output}");
        }
    }
}

fn small_disk() -> PathBuf {
    env::var_os(DISK_VARIABLE).map(PathBuf::from).expect("run by the test of the same story")
}

/// Fills the disk completely.
fn fill_disk(dir: &Path) -> PathBuf {
    let path = dir.join("filler");
    let mut file = fs::File::create(&path).unwrap();
    let error = loop {
        if let Err(error) = io::Write::write_all(&mut file, &[1; 4096]) {
            break error;
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    path
}

/// A queued lease that takes some space.
fn bulky_lease(id: u64) -> PoolRow {
    let PoolRow::Lease(lease) = queued_lease(id) else { unreachable!() };
    let request = Arc::new(Request { owner: "o".repeat(250).into(), ..Request::default() });
    PoolRow::Lease(LeaseRow { request, ..lease })
}

fn batch(number: u64) -> Vec<PoolRow> {
    (number * 64..(number + 1) * 64).map(bulky_lease).collect()
}

#[test]
fn releases_succeed_on_a_full_disk() {
    on_a_small_disk("release_on_small_disk");
}

#[test]
#[ignore = "run by the test above, on a small disk"]
fn release_on_small_disk() {
    let dir = small_disk();
    let mut stage = Stage::of(1);
    let lease = stage.ask(owned("alice", whole()));
    let (mut store, _) = open(&dir);
    store.commit(&stage.rows, clock(stage.now.0)).unwrap();
    let committed = stage.rows.len();
    let filler = fill_disk(&dir);
    let mut batches = 1000..;
    let refused = batches.by_ref().find_map(|number| store.commit(&batch(number), clock(0)).err().map(|e| (number, e)));
    let (lost, error) = refused.unwrap();
    assert!(matches!(error, CommitError::Full { .. }), "{error}");
    assert!(dir.join("ballast").exists(), "a batch that takes does not cost the ballast");

    stage.release(lease);
    store.commit_urgent(&stage.rows[committed..], clock(stage.now.0)).unwrap();
    // Some commits still fit into the log. Then the ballast is released, once, and the batch is committed.
    let last_batch = batches.by_ref().find(|number| {
        store.commit_urgent(&batch(*number), clock(0)).unwrap();
        !dir.join("ballast").exists()
    });
    let anchor = ClockAnchor { boot: "boot".into(), ahead: Millis(0), at: clock(0) };
    let error = store.recover(&anchor).expect_err("there is no space for the ballast");
    assert!(matches!(error, CommitError::Full { .. }), "{error}");
    assert!(!dir.join("ballast").exists(), "nor a part of it");
    fs::remove_file(filler).unwrap();
    store.recover(&anchor).unwrap();
    assert!(dir.join("ballast").exists());
    store.commit(&batch(lost), clock(0)).unwrap();
    drop(store);

    let (store, rows) = open(&dir);
    let found = lease_ids(&rows);
    let whole = |number: u64| (number * 64..(number + 1) * 64).all(|id| found.binary_search(&id).is_ok());
    assert!((1000..=last_batch.unwrap()).all(whole));
    let trail = store.trail_reader().history(&TrailQuery::default()).unwrap().records;
    let events: Vec<TrailEvent> = trail.iter().map(|record| record.event).collect();
    assert_eq!(events, [TrailEvent::Granted, TrailEvent::Ended]);
}

#[test]
fn a_batch_without_space_leaves_nothing() {
    on_a_small_disk("fill_small_disk_with_batches");
}

#[test]
#[ignore = "run by the test above, on a small disk"]
fn fill_small_disk_with_batches() {
    let dir = small_disk();
    let (mut store, _) = open(&dir);
    let committed = (0..).find(|number| store.commit(&batch(*number), clock(0)).is_err()).unwrap();
    drop(store);
    let rows = SqliteStore::open(&dir).unwrap().load().unwrap().rows;
    assert_eq!(lease_ids(&rows), (0..committed * 64).collect::<Vec<_>>());
}

#[test]
fn a_store_opens_on_a_full_disk_as_long_as_it_has_its_ballast() {
    on_a_small_disk("open_with_ballast_on_small_disk");
}

#[test]
#[ignore = "run by the test above, on a small disk"]
fn open_with_ballast_on_small_disk() {
    let dir = small_disk();
    drop(open(&dir));
    let filler = fill_disk(&dir);
    // The database needs space for the index of its log even without a write.
    let bytes = fs::metadata(&filler).unwrap().len();
    fs::File::options().write(true).open(&filler).unwrap().set_len(bytes - (36 << 10)).unwrap();
    let mut store = SqliteStore::open(&dir).unwrap();
    assert_eq!(store.generation(), 2);
    let warnings = store.load().unwrap().warnings;
    assert!(warnings.len() == 1 && warnings[0].contains("ballast"), "{warnings:?}");
    store.commit_urgent(&[queued_lease(0)], clock(0)).unwrap();
    assert_eq!(store.trail_reader().history(&TrailQuery::default()).unwrap().records, []);
}

#[test]
fn a_read_only_disk_is_named_in_the_error() {
    on_a_small_disk("open_on_read_only_disk");
}

#[test]
#[ignore = "run by the test above, on a small disk"]
fn open_on_read_only_disk() {
    let dir = small_disk();
    drop(open(&dir));
    let mounted = Command::new("mount").args(["-o", "remount,ro"]).arg(&dir).status().unwrap();
    assert!(mounted.success());
    let error = SqliteStore::open(&dir).unwrap_err();
    assert!(matches!(&error, StoreError::File { source, .. } if source.kind() == io::ErrorKind::ReadOnlyFilesystem));
    assert!(error.to_string().contains("lock"), "{error}");
}

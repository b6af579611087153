//! A disk that is full, or cannot be written: a small one of our own, in a mount namespace where that is allowed.
//!
//! A program of its own: a child that is being started holds the locks of every open store until it is another program.

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

use common::{clock, leases, open, waiting};
use gpupool_core::{LeaseRow, Millis, PoolRow, Request};
use gpupool_store::{ClockAnchor, CommitError, LeaseStore, SqliteStore, StoreError, TrailEvent, TrailQuery};
use support::{Stage, owned, whole};
use tempfile::tempdir;

use skipped::skipped;

const DISK: &str = "GPUPOOL_TEST_SMALL_DISK";

/// Runs an ignored test of this file in a process that has a disk of 4 MiB; says aloud where that cannot be had.
fn on_a_small_disk(test: &str) {
    let dir = tempdir().unwrap();
    let script = "mount -t tmpfs -o size=4m none \"$1\" || exit 77; shift; exec \"$@\"";
    let run = Command::new("unshare")
        .args(["-rm", "sh", "-c", script, "sh"])
        .arg(dir.path())
        .arg(env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(DISK, dir.path())
        .output();
    match run {
        Err(error) if error.kind() == io::ErrorKind::NotFound => skipped(test, "there is no unshare here"),
        Err(error) => panic!("{error}"),
        Ok(run) => {
            let words = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
            if !run.status.success() && !words.contains("running 1 test") {
                return skipped(test, &format!("no mount namespace here: {}", words.trim().replace('\n', " ")));
            }
            assert!(run.status.success(), "{words}");
            assert!(words.contains("1 passed"), "{words}");
        }
    }
}

fn disk() -> PathBuf {
    env::var_os(DISK).map(PathBuf::from).expect("run by the test of the same story")
}

/// Leaves no byte free.
fn fill(dir: &Path) -> PathBuf {
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

/// A waiting lease that takes some space.
fn bulky(id: u64) -> PoolRow {
    let PoolRow::Lease(lease) = waiting(id) else { unreachable!() };
    let request = Arc::new(Request { owner: "o".repeat(250).into(), ..Request::default() });
    PoolRow::Lease(LeaseRow { request, ..lease })
}

fn batch(number: u64) -> Vec<PoolRow> {
    (number * 64..(number + 1) * 64).map(bulky).collect()
}

#[test]
fn a_full_disk_keeps_nobody_from_giving_back() {
    on_a_small_disk("releases_on_a_full_disk");
}

#[test]
#[ignore = "run by the test above, on a small disk"]
fn releases_on_a_full_disk() {
    let dir = disk();
    let mut stage = Stage::of(1);
    let lease = stage.ask(owned("alice", whole()));
    let (mut store, _) = open(&dir);
    store.commit(&stage.rows, clock(stage.now.0)).unwrap();
    let kept = stage.rows.len();
    let filler = fill(&dir);
    let mut batches = 1000..;
    let refused = batches.by_ref().find_map(|number| store.commit(&batch(number), clock(0)).err().map(|e| (number, e)));
    let (lost, error) = refused.unwrap();
    assert!(matches!(error, CommitError::Full { .. }), "{error}");
    assert!(dir.join("ballast").exists(), "a batch that takes does not cost the ballast");

    stage.release(lease);
    store.commit_urgent(&stage.rows[kept..], clock(stage.now.0)).unwrap();
    // Room in the log is used up sooner or later: then the ballast goes, once, and the batch is kept.
    let given_up = batches.by_ref().find(|number| {
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
    let found = leases(&rows);
    let whole = |number: u64| (number * 64..(number + 1) * 64).all(|id| found.binary_search(&id).is_ok());
    assert!((1000..=given_up.unwrap()).all(whole));
    let trail = store.trail_reader().history(&TrailQuery::default()).unwrap().records;
    let events: Vec<TrailEvent> = trail.iter().map(|record| record.event).collect();
    assert_eq!(events, [TrailEvent::Granted, TrailEvent::Ended]);
}

#[test]
fn a_batch_that_finds_no_space_leaves_nothing() {
    on_a_small_disk("is_all_or_nothing_on_a_full_disk");
}

#[test]
#[ignore = "run by the test above, on a small disk"]
fn is_all_or_nothing_on_a_full_disk() {
    let dir = disk();
    let (mut store, _) = open(&dir);
    let kept = (0..).find(|number| store.commit(&batch(*number), clock(0)).is_err()).unwrap();
    drop(store);
    let rows = SqliteStore::open(&dir).unwrap().load().unwrap().rows;
    assert_eq!(leases(&rows), (0..kept * 64).collect::<Vec<_>>());
}

#[test]
fn a_store_opens_on_a_full_disk_as_long_as_it_has_its_ballast() {
    on_a_small_disk("opens_with_its_ballast");
}

#[test]
#[ignore = "run by the test above, on a small disk"]
fn opens_with_its_ballast() {
    let dir = disk();
    drop(open(&dir));
    let filler = fill(&dir);
    // The database needs space for the index of its log, whether it writes or not.
    let bytes = fs::metadata(&filler).unwrap().len();
    fs::File::options().write(true).open(&filler).unwrap().set_len(bytes - (36 << 10)).unwrap();
    let mut store = SqliteStore::open(&dir).unwrap();
    assert_eq!(store.generation(), 2);
    let warnings = store.load().unwrap().warnings;
    assert!(warnings.len() == 1 && warnings[0].contains("ballast"), "{warnings:?}");
    store.commit_urgent(&[waiting(0)], clock(0)).unwrap();
    assert_eq!(store.trail_reader().history(&TrailQuery::default()).unwrap().records, []);
}

#[test]
fn a_disk_that_cannot_be_written_is_named() {
    on_a_small_disk("opens_on_a_read_only_disk");
}

#[test]
#[ignore = "run by the test above, on a small disk"]
fn opens_on_a_read_only_disk() {
    let dir = disk();
    drop(open(&dir));
    let mounted = Command::new("mount").args(["-o", "remount,ro"]).arg(&dir).status().unwrap();
    assert!(mounted.success());
    let error = SqliteStore::open(&dir).unwrap_err();
    assert!(matches!(&error, StoreError::File { source, .. } if source.kind() == io::ErrorKind::ReadOnlyFilesystem));
    assert!(error.to_string().contains("lock"), "{error}");
}

//! `kill -9` at any instant: acknowledged batches are durable, and every batch is complete or absent.
//!
//! Its own program: a starting child process holds the locks of every open store until it executes another program.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{clock, counters_row, lease_ids, open, queued_lease};
use gpupool_core::PoolRow;
use gpupool_store::LeaseStore;
use tempfile::tempdir;

const DIR_VARIABLE: &str = "GPUPOOL_TEST_KILLED_DIR";
const ROUNDS: u64 = 20;

/// First lease of a batch. Most batches are small and go to the buffer; each fifth goes to the tables and flushes.
fn first_lease_of(batch: u64) -> u64 {
    batch + 15 * (batch / 5)
}

/// Body of the process that the test below kills.
#[test]
#[ignore = "run by the test below, in a process of its own"]
fn commit_until_killed() {
    let Some(dir) = env::var_os(DIR_VARIABLE).map(PathBuf::from) else { return };
    let (mut store, rows) = open(&dir);
    let mut out = std::io::stdout();
    let committed = lease_ids(&rows).len() as u64;
    for batch in (0..).skip_while(|batch| first_lease_of(*batch) < committed) {
        let mut rows: Vec<PoolRow> = (first_lease_of(batch)..first_lease_of(batch + 1)).map(queued_lease).collect();
        rows.push(counters_row(first_lease_of(batch + 1)));
        store.commit(&rows, clock(batch)).unwrap();
        writeln!(out, "\nkept {batch}").unwrap();
        out.flush().unwrap();
    }
}

/// Kills a committing process after `lines` acknowledgements, and returns the last acknowledged batch.
fn kill_after(dir: &Path, lines: usize) -> u64 {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "commit_until_killed", "--ignored", "--nocapture"])
        .env(DIR_VARIABLE, dir)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines_read = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut committed = lines_read.filter_map(|line| line.strip_prefix("kept ").and_then(|batch| batch.parse().ok()));
    let seen = committed.by_ref().take(lines).last();
    child.kill().unwrap();
    child.wait().unwrap();
    committed.last().or(seen).expect("the process keeps at least one batch")
}

#[test]
fn a_killed_store_has_every_acknowledged_batch_and_no_partial_one() {
    let dir = tempdir().unwrap();
    let mut random = 0x9e37_79b9_u64;
    for round in 0..ROUNDS {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let last = kill_after(dir.path(), 1 + (random >> 33) as usize % 24);
        let (_, rows) = open(dir.path());
        let found = lease_ids(&rows);
        let count = found.len() as u64;
        assert_eq!(found, (0..count).collect::<Vec<_>>(), "round {round}");
        let whole = [first_lease_of(last + 1), first_lease_of(last + 2)];
        assert!(whole.contains(&count), "round {round}: batch {last} was kept, and there are {count} leases");
        assert!(rows.contains(&counters_row(count)), "round {round}: counters are of another batch");
    }
}

//! `kill -9` at any instant: what was said to be kept is there, and a batch is there whole or not at all.
//!
//! A program of its own: a child that is being started holds the locks of every open store until it is another program.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{clock, counters, leases, open, waiting};
use gpupool_core::PoolRow;
use gpupool_store::LeaseStore;
use tempfile::tempdir;

const DIR: &str = "GPUPOOL_TEST_KILLED_DIR";
const ROUNDS: u64 = 20;

/// The first lease of a batch. Most are small, so that they go to the buffer; each fifth goes to the tables, and flushes.
fn first_of(batch: u64) -> u64 {
    batch + 15 * (batch / 5)
}

/// Not a test of its own: what the process does that is killed below.
#[test]
#[ignore = "run by the test below, in a process of its own"]
fn commits_until_it_is_killed() {
    let Some(dir) = env::var_os(DIR).map(PathBuf::from) else { return };
    let (mut store, rows) = open(&dir);
    let mut out = std::io::stdout();
    let kept = leases(&rows).len() as u64;
    for batch in (0..).skip_while(|batch| first_of(*batch) < kept) {
        let mut rows: Vec<PoolRow> = (first_of(batch)..first_of(batch + 1)).map(waiting).collect();
        rows.push(counters(first_of(batch + 1)));
        store.commit(&rows, clock(batch)).unwrap();
        writeln!(out, "\nkept {batch}").unwrap();
        out.flush().unwrap();
    }
}

/// Lets a process commit, kills it when it has said so `lines` times, and gives the last batch it said was kept.
fn kill_after(dir: &Path, lines: usize) -> u64 {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "commits_until_it_is_killed", "--ignored", "--nocapture"])
        .env(DIR, dir)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut kept = said.filter_map(|line| line.strip_prefix("kept ").and_then(|batch| batch.parse().ok()));
    let seen = kept.by_ref().take(lines).last();
    child.kill().unwrap();
    child.wait().unwrap();
    kept.last().or(seen).expect("the process keeps at least one batch")
}

#[test]
fn a_killed_store_has_every_batch_it_said_it_has_and_no_half_one() {
    let dir = tempdir().unwrap();
    let mut uneven = 0x9e37_79b9_u64;
    for round in 0..ROUNDS {
        uneven = uneven.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let last = kill_after(dir.path(), 1 + (uneven >> 33) as usize % 24);
        let (_, rows) = open(dir.path());
        let found = leases(&rows);
        let count = found.len() as u64;
        assert_eq!(found, (0..count).collect::<Vec<_>>(), "round {round}");
        let whole = [first_of(last + 1), first_of(last + 2)];
        assert!(whole.contains(&count), "round {round}: batch {last} was kept, and there are {count} leases");
        assert!(rows.contains(&counters(count)), "round {round}: counters are of another batch");
    }
}

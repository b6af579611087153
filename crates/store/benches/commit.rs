//! Commits per second with a synced disk, beside a bare `fdatasync` of the same bytes: appended to a growing file, and
//! overwritten (which saves the disk the file's new length, as the store's log usually does).
//!
//! Runs in the directory `GPUPOOL_BENCH_DIR`, or in a temporary one, and measures its disk.

#![allow(clippy::unwrap_used, missing_docs, reason = "a bench may panic")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::env;
use std::io::{Seek, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use common::{clock, open, queued_lease};
use gpupool_core::{LeaseRow, PoolRow, PoolTime};
use gpupool_store::LeaseStore;

const BATCHES: [u64; 4] = [1, 8, 64, 512];
const ROUNDS: usize = 3;
const EACH: Duration = Duration::from_millis(700);

fn main() {
    let dir = match env::var_os("GPUPOOL_BENCH_DIR") {
        Some(dir) => tempfile::tempdir_in(dir),
        None => tempfile::tempdir(),
    }
    .unwrap();
    println!("  rows  commits/s     rows/s   append/s  ratio  overwrite/s  ratio");
    for size in BATCHES {
        // Alternating rounds, since the speed of a disk varies; the median of each counts.
        let rounds: [[f64; 3]; ROUNDS] = std::array::from_fn(|_| {
            let at = dir.path();
            [
                store_rate(at, size),
                file_rate(at, size, WritePosition::Append),
                file_rate(at, size, WritePosition::Overwrite),
            ]
        });
        let [commits, append, overwrite] = std::array::from_fn(|column| median(rounds.map(|round| round[column])));
        let rows = commits * size as f64;
        let (to_append, to_overwrite) = (commits / append, commits / overwrite);
        println!(
            "{size:>6} {commits:>10.0} {rows:>10.0} {append:>10.0} {to_append:>6.2} {overwrite:>12.0} {to_overwrite:>6.2}"
        );
    }
}

fn median(mut rates: [f64; ROUNDS]) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[ROUNDS / 2]
}

/// Measures commits per second. Leases repeat, as they do between request and end.
fn store_rate(dir: &Path, size: u64) -> f64 {
    let dir = tempfile::tempdir_in(dir).unwrap();
    let mut store = open(dir.path()).0;
    turns_per_second(|turn| store.commit(&batch(turn, size), clock(turn)).unwrap())
}

#[derive(Clone, Copy, PartialEq)]
enum WritePosition {
    Append,
    Overwrite,
}

/// Measures how many times per second the same bytes are written and synced.
fn file_rate(dir: &Path, size: u64, position: WritePosition) -> f64 {
    let file = tempfile::NamedTempFile::new_in(dir).unwrap();
    let mut file = file.as_file();
    if position == WritePosition::Overwrite {
        file.write_all(&vec![1; 4 << 20]).unwrap();
        file.sync_all().unwrap();
        file.rewind().unwrap();
    }
    turns_per_second(|turn| {
        let bytes: Vec<u8> = batch(turn, size).iter().flat_map(|row| serde_json::to_vec(row).unwrap()).collect();
        if position == WritePosition::Overwrite && file.stream_position().unwrap() + bytes.len() as u64 > 4 << 20 {
            file.rewind().unwrap();
        }
        file.write_all(&bytes).unwrap();
        file.sync_data().unwrap();
    })
}

/// Returns rows that differ in each round, because the database neither writes nor syncs unchanged rows.
fn batch(turn: u64, size: u64) -> Vec<PoolRow> {
    let row = |number| match queued_lease((turn * size + number) % 10_000) {
        PoolRow::Lease(lease) => PoolRow::Lease(LeaseRow { created_at: PoolTime(turn), ..lease }),
        other => other,
    };
    (0..size).map(row).collect()
}

fn turns_per_second(mut act: impl FnMut(u64)) -> f64 {
    let start = Instant::now();
    let mut turns = 0;
    while start.elapsed() < EACH {
        act(turns);
        turns += 1;
    }
    turns as f64 / start.elapsed().as_secs_f64()
}

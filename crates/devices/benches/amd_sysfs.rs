//! Cost of a reading of eight AMD cards, on a tree in memory.
//!
//! `cargo bench -p gpupool-devices --bench amd_sysfs`. The result does not include the kernel's own work behind each
//! file; the number of reads is printed first as a measure of that work. divan measures the times.

#![allow(clippy::unwrap_used, reason = "a benchmark may panic")]

mod support;

use std::fs;

use divan::Bencher;
use gpupool_devices::DeviceSource;
use support::{CARDS, Tree};

fn main() {
    for processes in [0, 500] {
        let tree = Tree::new(processes);
        let mut source = tree.source();
        source.read().unwrap();
        let (before, readings) = (read_calls(), 100);
        for _ in 0..readings {
            source.read().unwrap();
        }
        let per_reading = (read_calls() - before) / readings;
        println!("{CARDS} cards, {processes} processes: {per_reading} read calls per reading, two for each file");
    }
    divan::main();
}

/// Reads all cards, by the number of processes on the machine, of which every fiftieth computes.
#[divan::bench(args = [0, 500])]
fn reading(bencher: Bencher, processes: u32) {
    let tree = Tree::new(processes);
    let mut source = tree.source();
    bencher.bench_local(|| source.read().unwrap());
}

/// Makes the first reading, which walks the tree.
#[divan::bench]
fn first_reading(bencher: Bencher) {
    let tree = Tree::new(0);
    bencher.bench_local(|| tree.source().read().unwrap());
}

fn read_calls() -> u64 {
    let text = fs::read_to_string("/proc/self/io").unwrap();
    text.lines().find_map(|line| line.strip_prefix("syscr: ")).unwrap().parse().unwrap()
}

//! The real client and two or three servers in virtual time, with everything going wrong that can, from a seed.
//!
//! `GPUPOOL_SIM_SEED=n` runs one seed and prints all that happens; `GPUPOOL_SOAK_SEEDS=n` runs so many.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod audit;
#[path = "../../../testkit/src/chance.rs"]
mod chance;
mod counts;
mod network;
mod routes;
mod server;
mod world;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

const SEEDS: u64 = 300;

fn number_in(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is {text:?}, and must be a number")))
}

/// Panics of tasks in the background count, too.
fn watch_panics() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        world::PANICS.with_borrow_mut(|panics| panics.push(panic.to_string()));
        before(panic);
    }));
}

#[test]
fn whatever_goes_wrong_nothing_is_held_twice_everybody_is_told_and_nothing_is_left_behind() {
    watch_panics();
    if let Some(seed) = number_in("GPUPOOL_SIM_SEED") {
        let results = world::run(seed, true);
        eprintln!("seed {seed}: {:?}", results.counts);
        assert!(results.wrong.is_empty(), "seed {seed}:\n{}", results.wrong.join("\n"));
        return;
    }
    let seeds = number_in("GPUPOOL_SOAK_SEEDS").unwrap_or(SEEDS);
    let (next, failed) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    let all = Mutex::new(counts::Counts::default());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    let results = world::run(seed, false);
                    all.lock().unwrap().add(&results.counts);
                    if !results.wrong.is_empty() {
                        failed.lock().unwrap().push((seed, results.wrong));
                    }
                }
            });
        }
    });
    let counts = all.into_inner().unwrap();
    eprintln!("{seeds} seeds: {counts:?}");
    let mut failed = failed.into_inner().unwrap();
    failed.sort();
    for (seed, wrong) in &failed {
        eprintln!("seed {seed}: {}", wrong.join("\n  "));
    }
    let again = "GPUPOOL_SIM_SEED=n cargo test -p gpupool-client --test simulation -- --nocapture whatever";
    let which: Vec<u64> = failed.iter().map(|(seed, _)| *seed).collect();
    assert!(failed.is_empty(), "{} of {seeds} seeds failed: {which:?}; to see one again:\n{again}", failed.len());
    // A simulation in which nothing happens proves nothing.
    let shown = [counts.won, counts.won_waiting, counts.told, counts.given_up, counts.lost, counts.strays];
    assert!(shown.iter().all(|count| *count > seeds / 10), "too little happened: {counts:?}");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in [1, 2, 3, 4, 5] {
        let (first, second) = (world::run(seed, false), world::run(seed, false));
        assert_eq!(first.hash, second.hash, "seed {seed} differs from itself");
    }
    assert_ne!(world::run(1, false).hash, world::run(2, false).hash);
}

//! Runs the real client with two or three servers in virtual time, with random faults from a seed.
//!
//! `GPUPOOL_SIM_SEED=n` runs one seed and prints its trace; `GPUPOOL_SOAK_SEEDS=n` runs that many seeds.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod audit;
mod event_counts;
mod network;
mod scenario;
#[path = "../../../testkit/src/seeded_rng.rs"]
mod seeded_rng;
mod server_routes;
mod simulated_server;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

const SEEDS: u64 = 300;

fn number_in(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is {text:?}; it must be a number")))
}

/// Records panics of background tasks too.
fn record_panics() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        scenario::PANICS.with_borrow_mut(|panics| panics.push(panic.to_string()));
        before(panic);
    }));
}

#[test]
fn under_any_faults_no_gpu_is_held_twice_every_call_ends_and_no_lease_is_left() {
    record_panics();
    if let Some(seed) = number_in("GPUPOOL_SIM_SEED") {
        let results = scenario::run(seed, true);
        eprintln!("seed {seed}: {:?}", results.event_counts);
        assert!(results.violations.is_empty(), "seed {seed}:\n{}", results.violations.join("\n"));
        return;
    }
    let seeds = number_in("GPUPOOL_SOAK_SEEDS").unwrap_or(SEEDS);
    let (next, failed) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    let all = Mutex::new(event_counts::EventCounts::default());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    let results = scenario::run(seed, false);
                    all.lock().unwrap().add(&results.event_counts);
                    if !results.violations.is_empty() {
                        failed.lock().unwrap().push((seed, results.violations));
                    }
                }
            });
        }
    });
    let event_counts = all.into_inner().unwrap();
    eprintln!("{seeds} seeds: {event_counts:?}");
    let mut failed = failed.into_inner().unwrap();
    failed.sort();
    for (seed, violations) in &failed {
        eprintln!("seed {seed}: {}", violations.join("\n  "));
    }
    let again = "GPUPOOL_SIM_SEED=n cargo test -p gpupool-client --test simulation -- --nocapture under_any_faults";
    let which: Vec<u64> = failed.iter().map(|(seed, _)| *seed).collect();
    assert!(failed.is_empty(), "{} of {seeds} seeds failed: {which:?}; to repeat one:\n{again}", failed.len());
    // A simulation without events proves nothing.
    let shown = [
        event_counts.granted,
        event_counts.granted_waiting,
        event_counts.errors,
        event_counts.cancelled,
        event_counts.lost,
        event_counts.orphans,
    ];
    assert!(shown.iter().all(|count| *count > seeds / 10), "too little happened: {event_counts:?}");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in [1, 2, 3, 4, 5] {
        let (first, second) = (scenario::run(seed, false), scenario::run(seed, false));
        assert_eq!(first.hash, second.hash, "seed {seed} differs from itself");
    }
    assert_ne!(scenario::run(1, false).hash, scenario::run(2, false).hash);
}

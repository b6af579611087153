//! Shared parts of the property tests, in the order in which a step passes through them:
//!
//! - [`world`], [`generators`]: fleets and steps, and their random generation;
//! - [`session`]: turns steps into commands, applies them to a pool and checks everything after each;
//! - [`model`]: a model of the pool that sees only commands, effects and rows;
//! - [`effects`], [`grants`]: effects that a command must and may have;
//! - [`claims`]: eligibility and order of requests, by plain scans;
//! - [`store`]: rows that survive a crash;
//! - [`restored_pool`]: a pool compared with one restored from its rows.

#![allow(dead_code)] // each test file uses a part

pub mod claims;
pub mod effects;
pub mod generators;
pub mod grants;
pub mod model;
pub mod restored_pool;
pub mod session;
pub mod store;
pub mod world;

use proptest::test_runner::{Config, FileFailurePersistence, RngSeed};

/// Runs `cases` cases, the same ones every time, so that results depend only on the code. For a soak,
/// `GPUPOOL_SOAK_CASES` or `PROPTEST_CASES` sets a number of new random cases.
///
/// A failure prints its smallest input and stores its seed in `tests/properties/<file>.regressions`, which the next run
/// tries first.
pub fn cases(cases: u32) -> Config {
    let set = |name| std::env::var(name).ok().and_then(|cases| cases.parse().ok());
    let soak = set("GPUPOOL_SOAK_CASES").or_else(|| set("PROPTEST_CASES"));
    let persistence = FileFailurePersistence::WithSource("regressions");
    Config {
        cases: soak.unwrap_or(cases),
        rng_seed: if soak.is_some() { RngSeed::Random } else { RngSeed::Fixed(42) },
        failure_persistence: Some(Box::new(persistence)),
        max_shrink_iters: set("PROPTEST_MAX_SHRINK_ITERS").unwrap_or(20_000),
        ..Config::default()
    }
}

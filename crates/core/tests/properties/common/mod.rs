//! What the property tests share, in the order a step goes through it:
//!
//! - [`world`], [`chance`]: a fleet and steps, and how they come about at random;
//! - [`session`]: turns steps into commands, gives them to a pool and checks everything after each;
//! - [`model`]: the books of somebody who only hears what the pool says;
//! - [`follow`], [`grants`]: which effects a command must and may have;
//! - [`turns`]: what fits where and whose turn it is, the long way round;
//! - [`store`]: what survives a crash;
//! - [`twins`]: a pool and another one restored from its rows.

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

/// `cases` by default, the same ones every time: a change is judged by itself, not by luck. So many new ones where
/// `GPUPOOL_SOAK_CASES` or `PROPTEST_CASES` is set, for a soak.
///
/// A failure prints its smallest input, and keeps its seed in `tests/properties/<file>.regressions`, which the next run tries first.
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

//! What all stories of this crate need.

use std::path::PathBuf;

/// The example that is worker, keeper and runner, built together with the tests.
pub fn odd_worker() -> PathBuf {
    example("odd_worker")
}

/// An example, built together with the tests.
pub fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.parent().and_then(|deps| deps.parent()).unwrap().join("examples").join(name);
    assert!(program.exists(), "{} is missing: cargo build -p gpupool-dispatch --examples", program.display());
    program
}

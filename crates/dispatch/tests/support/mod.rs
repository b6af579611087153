//! Paths of the example programs that the tests run.

use std::path::PathBuf;

/// The example that serves as worker, supervisor and runner.
pub fn odd_worker() -> PathBuf {
    example("odd_worker")
}

/// Path of an example, built together with the tests.
pub fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.parent().and_then(|deps| deps.parent()).unwrap().join("examples").join(name);
    assert!(program.exists(), "{} is missing: cargo build -p gpupool-dispatch --examples", program.display());
    program
}

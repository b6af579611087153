//! Reports a test, or a part of one, that this machine cannot run. Tests of all crates include this file with `#[path]`.

use std::fs::OpenOptions;
use std::io::Write;

/// Reports on the real standard error that `what` was skipped, and adds it to the file that `GPUPOOL_TEST_SKIPS` names.
/// `scripts/test` prints that file as a summary; with `GPUPOOL_TEST_STRICT=1` only skips listed in `tests/allowed-skips` pass.
pub fn skipped(what: &str, why: &str) {
    let line = format!("{what}: {why}\n");
    // Not `eprint!`, which the test harness captures.
    let _ = std::io::stderr().write_all(format!("skipped {line}").as_bytes());
    if let Some(path) = std::env::var_os("GPUPOOL_TEST_SKIPS") {
        let mut file =
            OpenOptions::new().create(true).append(true).open(path).expect("the list of skips can be opened");
        file.write_all(line.as_bytes()).expect("the list of skips can be written");
    }
}

//! Where the `gpupool` binary is.

use std::path::PathBuf;

/// The `gpupool` binary that was built together with this test: the one that `GPUPOOL_BINARY` names, or else the one beside
/// the folder of the test's own executable (`target/debug/gpupool` for `target/debug/deps/some_test`).
///
/// The tests of the command line's own crate should rather pass `env!("CARGO_BIN_EXE_gpupool")`, which Cargo builds
/// for them; for the tests of other crates Cargo builds no binary, so it may be missing or old: `cargo build` first.
pub fn gpupool_binary() -> PathBuf {
    if let Some(named) = std::env::var_os("GPUPOOL_BINARY") {
        return named.into();
    }
    let test = std::env::current_exe().expect("a test knows its own executable");
    let beside = test.parent().and_then(|folder| folder.parent()).map(|folder| folder.join("gpupool"));
    let binary = beside.filter(|path| path.is_file());
    binary.unwrap_or_else(|| {
        panic!("no gpupool binary near {}; run `cargo build`, or set GPUPOOL_BINARY", test.display())
    })
}

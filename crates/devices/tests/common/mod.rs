//! Where captures of real machines are, on a machine that has them.

#![allow(dead_code, clippy::unwrap_used, reason = "each test binary uses a part, and a test may panic")]

use std::io::Write;
use std::path::{Path, PathBuf};

/// The folder of captures, or `None` after saying on the real standard error that `test` is skipped.
pub fn captures(test: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/captures");
    if folder.is_dir() {
        return Some(folder);
    }
    let _ = writeln!(std::io::stderr(), "skipped: {test}: no folder of captures on this machine");
    None
}

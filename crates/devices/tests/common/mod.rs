//! Where captures of real machines are, on a machine that has them, and what can happen to a text on its way.

#![allow(dead_code, clippy::unwrap_used, reason = "each test binary uses a part, and a test may panic")]

use std::io::Write;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::sample::{Index, select};

/// The folder of captures, or `None` after saying on the real standard error that `test` is skipped.
pub fn captures(test: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/captures");
    if folder.is_dir() {
        return Some(folder);
    }
    let _ = writeln!(std::io::stderr(), "skipped: {test}: no folder of captures on this machine");
    None
}

/// One of these texts, cut off anywhere and with some bytes changed.
pub fn damaged(texts: &'static [&'static str]) -> impl Strategy<Value = String> {
    let changes = prop::collection::vec((any::<Index>(), any::<u8>()), 0..8);
    (select(texts), any::<Index>(), changes).prop_map(|(text, end, changes)| {
        let mut bytes = text.as_bytes().to_vec();
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        bytes.truncate(end.index(bytes.len() + 1));
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

//! Whatever the bytes, each reader ends with something sound or with an error.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod amd_tools_fuzz;
mod damaged_nvidia_smi;
mod fuzz_formats;
mod fuzzed;

use proptest::prelude::*;
use proptest::sample::{Index, select};

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

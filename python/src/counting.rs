//! A count that is one process' own: a forked child begins at nothing, and no lock can be taken at the fork.

use std::sync::atomic::{AtomicU64, Ordering};

/// The process in the upper half, the count in the lower one.
pub(crate) struct ProcessCount(AtomicU64);

impl ProcessCount {
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// How many there are in this process.
    pub fn get(&self) -> u64 {
        counted(self.0.load(Ordering::SeqCst))
    }

    pub fn change(&self, by: i64) {
        let here = u64::from(std::process::id()) << 32;
        // Always changed, so there is nothing to fail.
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |seen| {
            Some(here | counted(seen).saturating_add_signed(by))
        });
    }
}

fn counted(seen: u64) -> u64 {
    if seen >> 32 == u64::from(std::process::id()) { seen & u64::from(u32::MAX) } else { 0 }
}

//! Things counted by name, where all names are known beforehand.

use std::sync::atomic::{AtomicU64, Ordering};

/// A count for each name.
#[derive(Debug)]
pub(super) struct Tally(Vec<(&'static str, AtomicU64)>);

impl Tally {
    pub fn new(names: impl IntoIterator<Item = &'static str>) -> Self {
        Self(names.into_iter().map(|name| (name, AtomicU64::new(0))).collect())
    }

    /// Counts one; a name that is not known is a mistake of the caller.
    pub fn add(&self, name: &str) {
        let line = self.0.iter().find(|(known, _)| *known == name);
        debug_assert!(line.is_some(), "{name} is counted and was not foreseen");
        if let Some((_, count)) = line {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn lines(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.iter().map(|(name, count)| (*name, count.load(Ordering::Relaxed)))
    }
}

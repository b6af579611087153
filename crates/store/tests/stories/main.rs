//! Stories about a store: what every store does, what opens and what is refused, its trail and its tokens.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../common/mod.rs"]
mod common;
mod contract;
mod opening;
mod same_rows;
#[path = "../../../core/tests/support/mod.rs"]
mod support;
mod trail;

use gpupool_store::{LeaseStore, MemoryDisk, SqliteStore};
use tempfile::{TempDir, tempdir};

/// Place where a store can be opened again and again.
pub trait Backend {
    fn open(&self) -> Box<dyn LeaseStore>;
    /// Whether small batches stay in a buffer until they are flushed.
    fn has_buffer(&self) -> bool;
}

impl Backend for TempDir {
    fn open(&self) -> Box<dyn LeaseStore> {
        Box::new(SqliteStore::open(self.path()).expect("the store opens"))
    }

    fn has_buffer(&self) -> bool {
        true
    }
}

impl Backend for MemoryDisk {
    fn open(&self) -> Box<dyn LeaseStore> {
        Box::new(MemoryDisk::open(self))
    }

    fn has_buffer(&self) -> bool {
        false
    }
}

/// One of every kind, all empty.
pub fn backends() -> [Box<dyn Backend>; 2] {
    [Box::new(tempdir().unwrap()), Box::new(MemoryDisk::default())]
}

//! Stories about a store: the contract of every store, opening and refusal, the trail and tokens.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../common/mod.rs"]
mod common;
mod contract;
mod opening;
mod random_batches;
#[path = "../../../core/tests/support/mod.rs"]
mod support;
mod trail;

use gpupool_store::{LeaseStore, MemoryDisk, SqliteStore};
use tempfile::{TempDir, tempdir};

/// Storage on which a store can be opened repeatedly.
pub trait StoreBackend {
    fn open(&self) -> Box<dyn LeaseStore>;
    /// Whether small batches stay in a buffer until they are flushed.
    fn has_buffer(&self) -> bool;
}

impl StoreBackend for TempDir {
    fn open(&self) -> Box<dyn LeaseStore> {
        Box::new(SqliteStore::open(self.path()).expect("the store opens"))
    }

    fn has_buffer(&self) -> bool {
        true
    }
}

impl StoreBackend for MemoryDisk {
    fn open(&self) -> Box<dyn LeaseStore> {
        Box::new(MemoryDisk::open(self))
    }

    fn has_buffer(&self) -> bool {
        false
    }
}

/// Empty storage of every kind.
pub fn all_backends() -> [Box<dyn StoreBackend>; 2] {
    [Box::new(tempdir().unwrap()), Box::new(MemoryDisk::default())]
}

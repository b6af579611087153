//! Durable storage of leases.
//!
//! [`LeaseStore`] serves the thread that owns the pool: [`LeaseStore::load`] returns the rows that the last pool left,
//! [`LeaseStore::commit`] writes the rows of a batch durably, all or nothing. A store derives the audit trail from
//! lease rows, so trail and leases never disagree; a [`TrailReader`] reads it without waiting for commits. API tokens
//! are stored beside them, as hashes.
//!
//! [`SqliteStore`] is an embedded database on one disk, with one writer. [`MemoryStore`] is in memory, for tests. Both
//! pass the same contract tests.
//!
//! Every call blocks: a store belongs on its own thread.

mod clock;
mod error;
mod lease_store;
mod limits;
mod memory;
mod sqlite;
mod tokens;
mod trail;

pub use clock::{ClockAnchor, ClockReading};
pub use error::{BoxedError, CommitError, ReadError, StoreError};
pub use lease_store::{LeaseStore, LoadedRows, TrailReader};
pub use limits::BALLAST_BYTES;
pub use memory::{MemoryDisk, MemoryFault, MemoryStore};
pub use sqlite::SqliteStore;
pub use tokens::{TokenId, TokenMetadata, TokenOwner, TokenOwners, TokenRole, TokenSecret};
pub use trail::{HeldDevice, TrailCursor, TrailEvent, TrailPage, TrailQuery, TrailRecord, UsageDimension, UsageTotal};

//! Where leases survive a crash.
//!
//! [`LeaseStore`] is what the thread that owns the pool needs: [`LeaseStore::load`] gives the rows that the last pool left,
//! [`LeaseStore::commit`] keeps the rows of a batch, durably and all or nothing. From lease rows a store derives the audit
//! trail, so that trail and leases never disagree; a [`TrailReader`] reads it without waiting for commits. API tokens are
//! kept beside them, as hashes.
//!
//! [`SqliteStore`] keeps everything in an embedded database on one disk, with one writer. [`MemoryStore`] keeps it in
//! memory, for tests. Both pass the same contract tests.
//!
//! Everything here blocks: a store belongs on a thread of its own.

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

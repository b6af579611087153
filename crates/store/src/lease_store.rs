//! Interface between the agent and the storage of leases.

use std::borrow::Cow;
use std::time::SystemTime;

use gpupool_core::{DeviceId, NodeId, PoolRow};

use crate::clock::{ClockAnchor, ClockReading};
use crate::error::{CommitError, ReadError};
use crate::tokens::{TokenId, TokenMetadata, TokenOwners, TokenRole, TokenSecret};
use crate::trail::{TrailPage, TrailQuery, UsageDimension, UsageTotal};

/// Durable storage of a pool's rows, of the audit trail that follows from them, and of API tokens. It has one writer.
pub trait LeaseStore: Send {
    /// Returns the last row about each entity, to build a pool at the start and again after a failed commit.
    fn load(&self) -> Result<LoadedRows, ReadError>;

    /// Returns the number of times the store was opened for writing, including this one. The number is durable and
    /// never falls, so it distinguishes a later writer from an earlier one.
    fn generation(&self) -> u64;

    /// Commits rows, in this order, and the audit trail records that follow from them. Rows are durable when the call
    /// returns; if it fails, none is written. Committing the same rows again is harmless.
    fn commit(&mut self, rows: &[PoolRow], clock: ClockReading) -> Result<(), CommitError>;

    /// Commits like [`LeaseStore::commit`], for batches that only release. On a full disk the reserved space is
    /// released for them.
    fn commit_urgent(&mut self, rows: &[PoolRow], clock: ClockReading) -> Result<(), CommitError>;

    /// Returns the number of committed batches in the write-ahead buffer. They are durable, and every reading includes
    /// them.
    fn unflushed_batches(&self) -> usize;

    /// Moves the batches of the write-ahead buffer to the tables. On failure they stay in the buffer, and nothing is
    /// lost.
    fn flush(&mut self) -> Result<(), CommitError>;

    /// Tries to write again after a failure: stores the anchor, and reserves the space again that an urgent commit
    /// used. [`CommitError::Full`] means that only urgent commits can succeed.
    fn recover(&mut self, anchor: &ClockAnchor) -> Result<(), CommitError>;

    /// Returns the last stored anchor.
    fn clock_anchor(&self) -> Result<Option<ClockAnchor>, ReadError>;

    /// Stores an anchor, replacing the previous one.
    fn set_clock_anchor(&mut self, anchor: &ClockAnchor) -> Result<(), CommitError>;

    /// Creates a token and returns its secret, which cannot be read again.
    fn create_token(
        &mut self,
        owner: &str,
        role: TokenRole,
        at: SystemTime,
    ) -> Result<(TokenId, TokenSecret), CommitError>;

    /// Revokes a token. Returns whether a valid token had this id.
    fn revoke_token(&mut self, id: TokenId, at: SystemTime) -> Result<bool, CommitError>;

    /// Lists every token, including revoked ones, oldest first.
    fn tokens(&self) -> Result<Vec<TokenMetadata>, ReadError>;

    /// Returns the owners of all valid tokens, to look up secrets in memory. The result is outdated when a token is
    /// created or revoked.
    fn token_owners(&self) -> Result<TokenOwners, ReadError>;

    /// Removes the records of at most a thousand leases that ended before `older_than`, and returns the number of
    /// removed records. Call this until it returns 0, with other commits in between. Records of held leases stay.
    fn prune_trail(&mut self, older_than: SystemTime) -> Result<usize, CommitError>;

    /// Returns a reader of the audit trail, for any other thread.
    fn trail_reader(&self) -> Box<dyn TrailReader>;
}

/// Reader of the audit trail. It neither waits for the store's writer nor delays it, and includes every committed
/// batch.
pub trait TrailReader: Send + Sync {
    /// Returns a page of the audit trail, oldest first.
    fn history(&self, query: &TrailQuery) -> Result<TrailPage, ReadError>;

    /// Sums the usage from `since` until `now`, including held leases; highest first.
    fn usage(&self, by: UsageDimension, since: SystemTime, now: SystemTime) -> Result<Vec<UsageTotal>, ReadError>;
}

/// Rows of a store, and its problems.
#[derive(Debug, Default)]
pub struct LoadedRows {
    /// Last row about each entity.
    pub rows: Vec<PoolRow>,
    /// Problems for people that do not prevent operation: unreadable rows, which stay stored, or space that cannot be
    /// reserved.
    pub warnings: Vec<String>,
}

// Identity of rows. A new kind of row is added only here.

/// Kind and key of the entity of a row; a later row with the same key replaces an earlier one.
pub(crate) type RowKey<'a> = (&'static str, Cow<'a, str>);

const NODE: &str = "node";
const DEVICE: &str = "device";

/// Returns the kind of the entity of a row.
fn row_kind(row: &PoolRow) -> &'static str {
    match row {
        PoolRow::Node(_) | PoolRow::ForgetNode(_) => NODE,
        PoolRow::Device(_) | PoolRow::ForgetDevice(_) => DEVICE,
        PoolRow::Lease(_) | PoolRow::Forget(_) => "lease",
        PoolRow::Counters(_) => "counters",
        PoolRow::Policies(_) => "policies",
        PoolRow::Usage(_) => "usage",
        PoolRow::Workload(_) => "workload",
    }
}

/// Returns the kind and key of the entity of a row.
pub(crate) fn row_key(row: &PoolRow) -> Result<RowKey<'_>, serde_json::Error> {
    let key = match row {
        PoolRow::Node(row) => row.node.to_string().into(),
        PoolRow::Device(row) => row.device.to_string().into(),
        PoolRow::Lease(row) => row.id.to_string().into(),
        PoolRow::Forget(lease) => lease.to_string().into(),
        PoolRow::ForgetNode(node) => node.to_string().into(),
        PoolRow::ForgetDevice(device) => device.to_string().into(),
        PoolRow::Counters(_) | PoolRow::Policies(_) => "".into(),
        PoolRow::Usage(row) => Cow::Borrowed(&*row.owner),
        PoolRow::Workload(row) => serde_json::to_string(&row.class)?.into(),
    };
    Ok((row_kind(row), key))
}

/// Returns whether a row removes its entity.
pub(crate) fn is_removal(row: &PoolRow) -> bool {
    matches!(row, PoolRow::Forget(_) | PoolRow::ForgetNode(_) | PoolRow::ForgetDevice(_))
}

/// Returns whether a row changes the names of devices in the audit trail.
pub(crate) fn renames_devices(row: &PoolRow) -> bool {
    matches!(row_kind(row), NODE | DEVICE)
}

/// Returns the key of a device's row.
pub(crate) fn device_key(device: DeviceId) -> (&'static str, String) {
    (DEVICE, device.to_string())
}

/// Returns the key of a node's row.
pub(crate) fn node_key(node: NodeId) -> (&'static str, String) {
    (NODE, node.to_string())
}

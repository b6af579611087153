//! What an agent needs from the place where leases are kept.

use std::borrow::Cow;
use std::time::SystemTime;

use gpupool_core::{DeviceId, NodeId, PoolRow};

use crate::clock::{ClockAnchor, ClockReading};
use crate::error::{CommitError, ReadError};
use crate::tokens::{TokenId, TokenMetadata, TokenOwners, TokenRole, TokenSecret};
use crate::trail::{TrailPage, TrailQuery, UsageDimension, UsageTotal};

/// Durable storage of a pool's rows, of the audit trail that follows from them, and of API tokens. It has one writer.
pub trait LeaseStore: Send {
    /// Returns the last row about each thing: to build a pool at the start, and anew after a commit that failed.
    fn load(&self) -> Result<LoadedRows, ReadError>;

    /// Returns how many times the store was opened for writing, this time included. It is kept durably and never falls, so
    /// that a later writer can be told from an earlier one.
    fn generation(&self) -> u64;

    /// Commits rows, in this order, and the records that they mean for the audit trail. When this returns they are durable;
    /// when it fails none of them is kept. Committing the same rows again is harmless.
    fn commit(&mut self, rows: &[PoolRow], clock: ClockReading) -> Result<(), CommitError>;

    /// Commits as [`LeaseStore::commit`] does, for batches that only give back: where no space is left, space that was set
    /// aside is given up for them.
    fn commit_urgent(&mut self, rows: &[PoolRow], clock: ClockReading) -> Result<(), CommitError>;

    /// Returns how many committed batches wait in the write-ahead buffer. They are durable, and every reading shows them.
    fn unflushed_batches(&self) -> usize;

    /// Moves the batches of the write-ahead buffer to where they are kept for good. Where this fails they stay in the
    /// buffer, and nothing is lost.
    fn flush(&mut self) -> Result<(), CommitError>;

    /// Tries to write again after a failure: keeps the anchor, and sets aside anew the space that an urgent commit took.
    /// [`CommitError::Full`] means that only urgent commits can be expected to succeed.
    fn recover(&mut self, anchor: &ClockAnchor) -> Result<(), CommitError>;

    /// Returns the anchor that was kept last.
    fn clock_anchor(&self) -> Result<Option<ClockAnchor>, ReadError>;

    /// Keeps an anchor in place of the one before.
    fn set_clock_anchor(&mut self, anchor: &ClockAnchor) -> Result<(), CommitError>;

    /// Makes a token. Its secret is told here and never again.
    fn create_token(
        &mut self,
        owner: &str,
        role: TokenRole,
        at: SystemTime,
    ) -> Result<(TokenId, TokenSecret), CommitError>;

    /// Revokes a token, and returns whether there was one to revoke.
    fn revoke_token(&mut self, id: TokenId, at: SystemTime) -> Result<bool, CommitError>;

    /// Lists every token, revoked ones too, oldest first.
    fn tokens(&self) -> Result<Vec<TokenMetadata>, ReadError>;

    /// Returns the owners of all tokens that were not revoked, to look secrets up in memory. Ask again after a token was
    /// created or revoked.
    fn token_owners(&self) -> Result<TokenOwners, ReadError>;

    /// Removes the records of leases that ended before `older_than`, up to a thousand leases, and returns how many records
    /// were removed. Call it again until it returns 0, with other commits in between. Records of held leases stay.
    fn prune_trail(&mut self, older_than: SystemTime) -> Result<usize, CommitError>;

    /// Returns a reader of the audit trail, for any other thread.
    fn trail_reader(&self) -> Box<dyn TrailReader>;
}

/// Reader of the audit trail. It never waits for the store's writer nor holds it up, and sees every committed batch.
pub trait TrailReader: Send + Sync {
    /// Returns a page of the audit trail, oldest first.
    fn history(&self, query: &TrailQuery) -> Result<TrailPage, ReadError>;

    /// Sums what was held from `since` until `now`, what is still held included; most first.
    fn usage(&self, by: UsageDimension, since: SystemTime, now: SystemTime) -> Result<Vec<UsageTotal>, ReadError>;
}

/// Rows of a store, and what is wrong with it.
#[derive(Debug, Default)]
pub struct LoadedRows {
    /// The last row about each thing.
    pub rows: Vec<PoolRow>,
    /// Faults that do not stand in the way, for people: rows that cannot be read (they stay where they are), space that
    /// cannot be set aside.
    pub warnings: Vec<String>,
}

// How rows are told apart. A new kind of row is added here and nowhere else.

/// Kind and key of the thing that a row is about: a later row with the same ones replaces it.
pub(crate) type RowKey<'a> = (&'static str, Cow<'a, str>);

const NODE: &str = "node";
const DEVICE: &str = "device";

/// Returns the kind of the thing that a row is about.
fn kind_of(row: &PoolRow) -> &'static str {
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

/// Returns what a row is about.
pub(crate) fn key_of(row: &PoolRow) -> Result<RowKey<'_>, serde_json::Error> {
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
    Ok((kind_of(row), key))
}

/// Returns whether a row removes the thing that it is about.
pub(crate) fn is_removal(row: &PoolRow) -> bool {
    matches!(row, PoolRow::Forget(_) | PoolRow::ForgetNode(_) | PoolRow::ForgetDevice(_))
}

/// Returns whether a row changes what devices are called in the audit trail.
pub(crate) fn names_devices(row: &PoolRow) -> bool {
    matches!(kind_of(row), NODE | DEVICE)
}

/// Returns the key of a device's row.
pub(crate) fn device_key(device: DeviceId) -> (&'static str, String) {
    (DEVICE, device.to_string())
}

/// Returns the key of a node's row.
pub(crate) fn node_key(node: NodeId) -> (&'static str, String) {
    (NODE, node.to_string())
}

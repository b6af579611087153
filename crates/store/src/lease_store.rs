//! What an agent needs from the place where leases are kept.

use std::borrow::Cow;
use std::time::SystemTime;

use gpupool_core::{DeviceId, NodeId, Row};

use crate::clock::{Anchor, Clock};
use crate::error::{CommitError, ReadError};
use crate::tokens::{Role, Secret, TokenId, TokenLine, TokenOwners};
use crate::trail::{By, Page, Query, UsageLine};

/// Durable storage of a pool's rows, of the audit trail that follows from them, and of API tokens. It has one writer.
pub trait LeaseStore: Send {
    /// Returns the last row about each thing: to build a pool at the start, and anew after a commit that failed.
    fn load(&self) -> Result<LoadedRows, ReadError>;

    /// Returns how many times the store was opened for writing, this time included. It is kept durably and never falls, so
    /// that a later writer can be told from an earlier one.
    fn generation(&self) -> u64;

    /// Commits rows, in this order, and the records that they mean for the audit trail. When this returns they are durable;
    /// when it fails none of them is kept. Committing the same rows again is harmless.
    fn commit(&mut self, rows: &[Row], clock: Clock) -> Result<(), CommitError>;

    /// Commits as [`LeaseStore::commit`] does, for batches that only give back: where no space is left, space that was set
    /// aside is given up for them.
    fn commit_urgent(&mut self, rows: &[Row], clock: Clock) -> Result<(), CommitError>;

    /// Returns how many committed batches wait in the write-ahead buffer. They are durable, and every reading shows them.
    fn unflushed(&self) -> usize;

    /// Moves the batches of the write-ahead buffer to where they are kept for good. Where this fails they stay in the
    /// buffer, and nothing is lost.
    fn flush(&mut self) -> Result<(), CommitError>;

    /// Tries to write again after a failure: keeps the anchor, and sets aside anew the space that an urgent commit took.
    /// [`CommitError::Full`] means that only urgent commits can be expected to succeed.
    fn recover(&mut self, anchor: &Anchor) -> Result<(), CommitError>;

    /// Returns the anchor that was kept last.
    fn anchor(&self) -> Result<Option<Anchor>, ReadError>;

    /// Keeps an anchor in place of the one before.
    fn set_anchor(&mut self, anchor: &Anchor) -> Result<(), CommitError>;

    /// Makes a token. Its secret is told here and never again.
    fn create_token(&mut self, owner: &str, role: Role, at: SystemTime) -> Result<(TokenId, Secret), CommitError>;

    /// Revokes a token, and returns whether there was one to revoke.
    fn revoke_token(&mut self, id: TokenId, at: SystemTime) -> Result<bool, CommitError>;

    /// Lists every token, revoked ones too, oldest first.
    fn tokens(&self) -> Result<Vec<TokenLine>, ReadError>;

    /// Returns the owners of all tokens that were not revoked, to look secrets up in memory. Ask again after a token was
    /// created or revoked.
    fn token_owners(&self) -> Result<TokenOwners, ReadError>;

    /// Removes the records of leases that ended before `older_than`, up to a thousand leases, and returns how many records
    /// were removed. Call it again until it returns 0, with other commits in between. Records of held leases stay.
    fn retain(&mut self, older_than: SystemTime) -> Result<usize, CommitError>;

    /// Returns a reader of the audit trail, for any other thread.
    fn trail_reader(&self) -> Box<dyn TrailReader>;
}

/// Reader of the audit trail. It never waits for the store's writer nor holds it up, and sees every committed batch.
pub trait TrailReader: Send + Sync {
    /// Returns a page of the audit trail, oldest first.
    fn history(&self, query: &Query) -> Result<Page, ReadError>;

    /// Sums what was held from `since` until `now`, what is still held included; most first.
    fn usage(&self, by: By, since: SystemTime, now: SystemTime) -> Result<Vec<UsageLine>, ReadError>;
}

/// Rows of a store, and what is wrong with it.
#[derive(Debug, Default)]
pub struct LoadedRows {
    /// The last row about each thing.
    pub rows: Vec<Row>,
    /// Faults that do not stand in the way, for people: rows that cannot be read (they stay where they are), space that
    /// cannot be set aside.
    pub complaints: Vec<String>,
}

// How rows are told apart. A new kind of row is added here and nowhere else.

/// Kind and key of the thing that a row is about: a later row with the same ones replaces it.
pub(crate) type RowKey<'a> = (&'static str, Cow<'a, str>);

const NODE: &str = "node";
const DEVICE: &str = "device";

/// Returns the kind of the thing that a row is about.
fn kind_of(row: &Row) -> &'static str {
    match row {
        Row::Node(_) | Row::ForgetNode(_) => NODE,
        Row::Device(_) | Row::ForgetDevice(_) => DEVICE,
        Row::Lease(_) | Row::Forget(_) => "lease",
        Row::Counters(_) => "counters",
        Row::Policies(_) => "policies",
        Row::Usage(_) => "usage",
        Row::Workload(_) => "workload",
    }
}

/// Returns what a row is about.
pub(crate) fn key_of(row: &Row) -> Result<RowKey<'_>, serde_json::Error> {
    let key = match row {
        Row::Node(row) => row.node.to_string().into(),
        Row::Device(row) => row.device.to_string().into(),
        Row::Lease(row) => row.id.to_string().into(),
        Row::Forget(lease) => lease.to_string().into(),
        Row::ForgetNode(node) => node.to_string().into(),
        Row::ForgetDevice(device) => device.to_string().into(),
        Row::Counters(_) | Row::Policies(_) => "".into(),
        Row::Usage(row) => Cow::Borrowed(&*row.owner),
        Row::Workload(row) => serde_json::to_string(&row.class)?.into(),
    };
    Ok((kind_of(row), key))
}

/// Returns whether a row removes the thing that it is about.
pub(crate) fn is_removal(row: &Row) -> bool {
    matches!(row, Row::Forget(_) | Row::ForgetNode(_) | Row::ForgetDevice(_))
}

/// Returns whether a row changes what devices are called in the audit trail.
pub(crate) fn names_devices(row: &Row) -> bool {
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

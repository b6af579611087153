//! A store in memory, for tests: it ends with the process, and faults can make its commits fail or hang.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use gpupool_core::{DeviceId, LeaseId, PoolRow};

use crate::clock::{ClockAnchor, ClockReading, millis};
use crate::error::{CommitError, ReadError};
use crate::lease_store::{LeaseStore, LoadedRows, RowKey, TrailReader, device_key, is_removal, node_key, row_key};
use crate::limits::PRUNED_LEASES;
use crate::tokens::{self, SecretHash, TokenId, TokenMetadata, TokenOwner, TokenOwners, TokenRole, TokenSecret};
use crate::trail::{
    HeldDevice, HoldingPeriod, TrailEvent, TrailLog, TrailPage, TrailQuery, TrailRecord, UsageDimension, UsageTotal,
    add_records, name_device, sum_usage,
};

/// Contents of a [`MemoryStore`], like the disk of another store. Clones share the contents. It outlives the stores
/// that are opened on it, and can make their commits fail.
#[derive(Debug, Clone, Default)]
pub struct MemoryDisk {
    shared: Arc<MemoryDiskState>,
}

#[derive(Debug, Default)]
struct MemoryDiskState {
    contents: Mutex<MemoryContents>,
    /// Separate from the contents, so that a hanging commit does not block readers.
    faults: Mutex<CommitFaults>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct CommitFaults {
    fault: Option<MemoryFault>,
    /// Number of hanging commits.
    hanging: usize,
}

/// Fault of a [`MemoryDisk`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryFault {
    /// No space is left: only urgent commits succeed.
    Full,
    /// Every commit fails with a disk error.
    Io,
    /// Every commit waits until the fault changes.
    Hang,
}

impl MemoryDisk {
    /// Opens a store on the disk.
    pub fn open(&self) -> MemoryStore {
        let mut contents = lock(&self.shared.contents);
        contents.generation += 1;
        MemoryStore { disk: self.clone(), generation: contents.generation }
    }

    /// Makes commits fail, hang or succeed again. Hanging commits continue.
    pub fn set_fault(&self, fault: Option<MemoryFault>) {
        lock(&self.shared.faults).fault = fault;
        self.shared.changed.notify_all();
    }

    /// Waits until a commit hangs.
    pub fn wait_until_hanging(&self) {
        let faults = lock(&self.shared.faults);
        let hangs = self.shared.changed.wait_while(faults, |faults| faults.hanging == 0);
        drop(hangs.unwrap_or_else(PoisonError::into_inner));
    }

    /// Changes the contents, unless there is a fault.
    fn write<T>(&self, is_urgent: bool, change: impl FnOnce(&mut MemoryContents) -> T) -> Result<T, CommitError> {
        let mut faults = lock(&self.shared.faults);
        if faults.fault == Some(MemoryFault::Hang) {
            faults.hanging += 1;
            self.shared.changed.notify_all();
            let hangs = |faults: &mut CommitFaults| faults.fault == Some(MemoryFault::Hang);
            faults = self.shared.changed.wait_while(faults, hangs).unwrap_or_else(PoisonError::into_inner);
            faults.hanging -= 1;
        }
        let file = PathBuf::from("memory");
        match faults.fault {
            Some(MemoryFault::Full) if !is_urgent => {
                Err(CommitError::Full { file, source: io::Error::from(io::ErrorKind::StorageFull).into() })
            }
            Some(MemoryFault::Io) => Err(CommitError::Io { file, source: "the disk was made to fail".into() }),
            _ => Ok(change(&mut lock(&self.shared.contents))),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A store on a [`MemoryDisk`]. It has no write-ahead buffer, and always space for urgent commits.
#[derive(Debug)]
pub struct MemoryStore {
    disk: MemoryDisk,
    generation: u64,
}

#[derive(Debug, Default)]
struct MemoryContents {
    generation: u64,
    rows: BTreeMap<RowKey<'static>, PoolRow>,
    /// Audit trail, oldest first, with the sequence number of each record.
    trail: Vec<(u64, TrailRecord)>,
    anchor: Option<ClockAnchor>,
    tokens: Vec<(SecretHash, TokenMetadata)>,
}

impl MemoryContents {
    fn apply(&mut self, rows: &[PoolRow], clock: ClockReading) {
        for row in rows {
            let Ok(()) = add_records(self, row, clock);
            self.put_row(row);
        }
    }

    fn put_row(&mut self, row: &PoolRow) {
        let Ok((kind, key)) = row_key(row) else { return };
        let key = (kind, Cow::Owned(key.into_owned()));
        if is_removal(row) {
            self.rows.remove(&key);
        } else {
            self.rows.insert(key, row.clone());
        }
    }

    fn row(&self, (kind, key): (&'static str, String)) -> Option<&PoolRow> {
        self.rows.get(&(kind, Cow::Owned(key)))
    }

    fn records(&self) -> Vec<TrailRecord> {
        self.trail.iter().map(|(_, record)| record.clone()).collect()
    }
}

impl TrailLog for MemoryContents {
    type Error = Infallible;

    fn grant(&mut self, lease: LeaseId) -> Result<Option<TrailRecord>, Infallible> {
        let is_grant = |record: &&TrailRecord| record.lease == lease && record.event == TrailEvent::Granted;
        Ok(self.trail.iter().map(|(_, record)| record).find(is_grant).cloned())
    }

    fn device_names(&mut self, id: DeviceId) -> Result<HeldDevice, Infallible> {
        let device = match self.row(device_key(id)) {
            Some(PoolRow::Device(device)) => Some(device),
            _ => None,
        };
        let node = match device.and_then(|device| self.row(node_key(device.node))) {
            Some(PoolRow::Node(node)) => Some(node),
            _ => None,
        };
        Ok(name_device(id, device, node))
    }

    fn add(&mut self, record: TrailRecord) -> Result<(), Infallible> {
        let exists = self.trail.iter().any(|(_, known)| (known.lease, known.event) == (record.lease, record.event));
        if !exists {
            let sequence = self.trail.last().map_or(1, |(last, _)| last + 1);
            self.trail.push((sequence, record));
        }
        Ok(())
    }
}

impl LeaseStore for MemoryStore {
    fn load(&self) -> Result<LoadedRows, ReadError> {
        let rows = lock(&self.disk.shared.contents).rows.values().cloned().collect();
        Ok(LoadedRows { rows, warnings: Vec::new() })
    }

    fn generation(&self) -> u64 {
        self.generation
    }

    fn commit(&mut self, rows: &[PoolRow], clock: ClockReading) -> Result<(), CommitError> {
        self.disk.write(false, |contents| contents.apply(rows, clock))
    }

    fn commit_urgent(&mut self, rows: &[PoolRow], clock: ClockReading) -> Result<(), CommitError> {
        self.disk.write(true, |contents| contents.apply(rows, clock))
    }

    fn unflushed_batches(&self) -> usize {
        0
    }

    fn flush(&mut self) -> Result<(), CommitError> {
        Ok(())
    }

    fn recover(&mut self, anchor: &ClockAnchor) -> Result<(), CommitError> {
        self.set_clock_anchor(anchor)
    }

    fn clock_anchor(&self) -> Result<Option<ClockAnchor>, ReadError> {
        Ok(lock(&self.disk.shared.contents).anchor.clone())
    }

    fn set_clock_anchor(&mut self, anchor: &ClockAnchor) -> Result<(), CommitError> {
        self.disk.write(false, |contents| contents.anchor = Some(anchor.clone()))
    }

    fn create_token(
        &mut self,
        owner: &str,
        role: TokenRole,
        at: SystemTime,
    ) -> Result<(TokenId, TokenSecret), CommitError> {
        let refused = |error: io::Error| CommitError::Refused { file: "memory".into(), source: error.into() };
        let secret = tokens::generate_secret().map_err(refused)?;
        let hash = tokens::hash_secret(secret.reveal());
        self.disk.write(false, |contents| {
            let id = TokenId(contents.tokens.len() as u64 + 1);
            let token = TokenOwner { id, owner: owner.to_owned(), role };
            contents.tokens.push((hash, TokenMetadata { token, created_at: at, revoked_at: None }));
            (id, secret)
        })
    }

    fn revoke_token(&mut self, id: TokenId, at: SystemTime) -> Result<bool, CommitError> {
        self.disk.write(false, |contents| {
            let live = |(_, token): &&mut (_, TokenMetadata)| token.token.id == id && token.revoked_at.is_none();
            contents.tokens.iter_mut().find(live).map(|(_, token)| token.revoked_at = Some(at)).is_some()
        })
    }

    fn tokens(&self) -> Result<Vec<TokenMetadata>, ReadError> {
        Ok(lock(&self.disk.shared.contents).tokens.iter().map(|(_, token)| token.clone()).collect())
    }

    fn token_owners(&self) -> Result<TokenOwners, ReadError> {
        let contents = lock(&self.disk.shared.contents);
        let live = contents.tokens.iter().filter(|(_, token)| token.revoked_at.is_none());
        Ok(live.map(|(hash, token)| (*hash, token.token.clone())).collect())
    }

    fn prune_trail(&mut self, older_than: SystemTime) -> Result<usize, CommitError> {
        self.disk.write(false, |contents| {
            let is_old =
                |record: &&TrailRecord| record.event == TrailEvent::Ended && millis(record.at) < millis(older_than);
            let old = contents.trail.iter().map(|(_, record)| record).filter(is_old).map(|record| record.lease);
            let old: HashSet<LeaseId> = old.take(PRUNED_LEASES).collect();
            let before = contents.trail.len();
            contents.trail.retain(|(_, record)| !old.contains(&record.lease));
            before - contents.trail.len()
        })
    }

    fn trail_reader(&self) -> Box<dyn TrailReader> {
        Box::new(self.disk.clone())
    }
}

impl TrailReader for MemoryDisk {
    fn history(&self, query: &TrailQuery) -> Result<TrailPage, ReadError> {
        let contents = lock(&self.shared.contents);
        let found = contents.trail.iter().filter(|(sequence, record)| query.matches(*sequence, record));
        let Ok(page) = TrailPage::collect(query, found.cloned().map(Ok::<_, Infallible>));
        Ok(page)
    }

    fn usage(&self, by: UsageDimension, since: SystemTime, now: SystemTime) -> Result<Vec<UsageTotal>, ReadError> {
        let records = lock(&self.shared.contents).records();
        let held = HoldingPeriod::from_records(&records).map(Ok::<_, Infallible>);
        let Ok(totals) = sum_usage(by, millis(since), millis(now), held);
        Ok(totals)
    }
}

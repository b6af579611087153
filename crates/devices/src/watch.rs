//! The books over many readings: who was here, who is gone, who came back, how old what we know is.
//!
//! Pure: results and times in, changes out. A source that fails takes no device away; only a source that answers
//! without a device does, and only if it says so twice, because drivers say "no devices" for a moment after a reset.

use std::collections::BTreeMap;

use gpupool_core::device::{DeviceIdentity, Health, Link};
use gpupool_core::ids::GpuId;
use gpupool_core::units::{Millis, Time};

use crate::found::{Found, worse};
use crate::gpu_ids::GpuIds;
use crate::snapshot::{FoundLink, Snapshot};
use crate::source::{SourceError, SourceKind};

/// A reading without a device that was there before counts as an answer of this many before the device is gone.
const MISSES_UNTIL_VANISHED: u32 = 2;

/// A reading that was not renewed for this many refresh intervals is stale.
pub const REFRESHES_UNTIL_STALE: u64 = 3;

/// A device as the books have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watched {
    /// Its small number.
    pub gpu_id: GpuId,
    /// Which source it is from.
    pub source: SourceKind,
    /// What was last read of it.
    pub found: Found,
    /// When that was.
    pub read_at: Time,
    misses: u32,
}

impl Watched {
    /// Whether it is there, as far as is known.
    pub fn is_present(&self) -> bool {
        self.misses < MISSES_UNTIL_VANISHED
    }

    /// Whether it can be trusted with work; gone is lost, and a source that tells nothing of health tells nothing bad.
    pub fn health(&self) -> Health {
        if !self.is_present() {
            return Health::Lost;
        }
        self.found.health.clone().unwrap_or(Health::Healthy)
    }

    /// How old the last reading is.
    pub fn age(&self, now: Time) -> Millis {
        now.since(self.read_at)
    }

    /// Whether the last reading is too old to be passed off as fresh, where one is taken every `refresh`.
    pub fn is_stale(&self, now: Time, refresh: Millis) -> bool {
        self.age(now).0 > refresh.0.saturating_mul(REFRESHES_UNTIL_STALE)
    }
}

/// What a reading changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A device nobody saw before.
    Appeared(GpuId),
    /// A device is gone; it is known by its last identity and may come back.
    Vanished(GpuId),
    /// A device that was gone is back.
    Returned(GpuId),
    /// A device that is there is well, or not, in another way than before.
    Health(GpuId, Health),
    /// A source that answered does not any more; its devices stay, and age.
    SourceFailed(SourceKind, SourceError),
    /// A source that did not answer does again.
    SourceBack(SourceKind),
}

/// The books.
#[derive(Debug, Clone, Default)]
pub struct Watch {
    ids: GpuIds,
    devices: BTreeMap<DeviceIdentity, Watched>,
    troubles: BTreeMap<SourceKind, SourceError>,
    links: BTreeMap<SourceKind, Vec<Link>>,
}

impl Watch {
    /// Books that go on with the numbers given before.
    pub fn new(ids: GpuIds) -> Self {
        Self { ids, ..Self::default() }
    }

    /// Takes in what a source answered at `at`.
    pub fn observe(&mut self, at: Time, source: SourceKind, result: Result<Snapshot, SourceError>) -> Vec<Change> {
        match result {
            Ok(snapshot) => self.answered(at, source, snapshot),
            Err(error) => self.failed(source, error),
        }
    }

    fn failed(&mut self, source: SourceKind, error: SourceError) -> Vec<Change> {
        let before = self.troubles.insert(source, error.clone());
        let same = before.is_some_and(|before| before.code() == error.code());
        if same { Vec::new() } else { vec![Change::SourceFailed(source, error)] }
    }

    fn answered(&mut self, at: Time, source: SourceKind, mut snapshot: Snapshot) -> Vec<Change> {
        let mut changes = Vec::new();
        if self.troubles.remove(&source).is_some() {
            changes.push(Change::SourceBack(source));
        }
        spread_health(&mut snapshot.devices);
        let identities = self.recognised(source, &snapshot);
        let ids = self.ids.assign(&identities);
        let link = |link: &FoundLink| Some(Link { a: *ids.get(link.a)?, b: *ids.get(link.b)?, kind: link.kind });
        self.links.insert(source, snapshot.links.iter().filter_map(link).collect());
        let mut missing: Vec<DeviceIdentity> = self.of_source(source).cloned().collect();
        missing.retain(|identity| !identities.contains(identity));
        for ((identity, gpu_id), found) in identities.into_iter().zip(ids).zip(snapshot.devices) {
            self.seen(at, source, identity, gpu_id, found, &mut changes);
        }
        for identity in missing {
            self.missed(&identity, &mut changes);
        }
        changes
    }

    /// The identity of each device: the one it had, for a device that was seen at this place before.
    ///
    /// What identifies a device can change while the device does not: the line about a lost GPU only tells its place
    /// on the bus, and a UUID that two dies share means one of them while the other is gone.
    fn recognised(&self, source: SourceKind, snapshot: &Snapshot) -> Vec<DeviceIdentity> {
        let mut identities = snapshot.identities();
        for (place, device) in snapshot.devices.iter().enumerate() {
            if device.pci.is_none() || self.devices.contains_key(&identities[place]) {
                continue;
            }
            let was_here = |identity: &&DeviceIdentity| {
                self.devices.get(identity).is_some_and(|known| same_place(&known.found, device))
            };
            let known = self.of_source(source).filter(was_here).find(|identity| !identities.contains(identity));
            if let Some(known) = known {
                identities[place] = known.clone();
            }
        }
        identities
    }

    fn of_source(&self, source: SourceKind) -> impl Iterator<Item = &DeviceIdentity> {
        self.devices.iter().filter(move |(_, watched)| watched.source == source).map(|(identity, _)| identity)
    }

    fn seen(
        &mut self,
        at: Time,
        source: SourceKind,
        identity: DeviceIdentity,
        gpu_id: GpuId,
        mut found: Found,
        changes: &mut Vec<Change>,
    ) {
        let Some(before) = self.devices.get_mut(&identity) else {
            let watched = Watched { gpu_id, source, found, read_at: at, misses: 0 };
            changes.push(Change::Appeared(gpu_id));
            if watched.health() != Health::Healthy {
                changes.push(Change::Health(gpu_id, watched.health()));
            }
            self.devices.insert(identity, watched);
            return;
        };
        let (was_present, was_healthy) = (before.is_present(), before.health());
        // What a lost or sleeping device does not tell any more is kept from before.
        if found.health == Some(Health::Lost) || found.asleep {
            found.fill_identity(&before.found);
            if found.memory.total.value().is_none() {
                found.memory.total.clone_from(&before.found.memory.total);
                found.memory.reserved.clone_from(&before.found.memory.reserved);
            }
        }
        *before = Watched { gpu_id, source, found, read_at: at, misses: 0 };
        if !was_present {
            changes.push(Change::Returned(gpu_id));
        }
        if before.health() != was_healthy {
            changes.push(Change::Health(gpu_id, before.health()));
        }
    }

    fn missed(&mut self, identity: &DeviceIdentity, changes: &mut Vec<Change>) {
        let Some(watched) = self.devices.get_mut(identity) else { return };
        let was_present = watched.is_present();
        watched.misses = watched.misses.saturating_add(1);
        if was_present && !watched.is_present() {
            changes.push(Change::Vanished(watched.gpu_id));
        }
    }

    /// Every device ever seen, by number.
    pub fn devices(&self) -> Vec<(&DeviceIdentity, &Watched)> {
        let mut all: Vec<_> = self.devices.iter().collect();
        all.sort_by_key(|(_, watched)| watched.gpu_id);
        all
    }

    /// Links between devices, as last read.
    pub fn links(&self) -> impl Iterator<Item = &Link> {
        self.links.values().flatten()
    }

    /// Sources that do not answer, and why.
    pub fn troubles(&self) -> &BTreeMap<SourceKind, SourceError> {
        &self.troubles
    }

    /// The numbers given so far, to be kept.
    pub fn ids(&self) -> &GpuIds {
        &self.ids
    }
}

/// What is wrong with a GPU is wrong with every part of it: instances and partitions take the health of what they are
/// cut from, and of each other where it is lost.
fn spread_health(devices: &mut [Found]) {
    let mut by_card: BTreeMap<_, Option<Health>> = BTreeMap::new();
    for device in devices.iter().filter(|device| device.partition.is_none()) {
        if let Some(address) = device.pci {
            let health = by_card.entry(address).or_default();
            *health = worse(health.take(), device.health.clone());
        }
    }
    for device in devices.iter_mut().filter(|device| device.partition.is_some()) {
        let of_card = device.pci.and_then(|address| by_card.get(&address).cloned().flatten());
        device.health = worse(device.health.take(), of_card);
    }
}

/// Whether two findings are of one device by place on the bus and partition, and no UUID speaks against it.
fn same_place(one: &Found, other: &Found) -> bool {
    let uuids_agree = one.uuid.is_none() || other.uuid.is_none() || one.uuid == other.uuid;
    one.pci == other.pci && one.partition_number() == other.partition_number() && uuids_agree
}

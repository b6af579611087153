//! Devices over many readings: which are there, which are gone, which came back, and how old each reading is.
//!
//! Pure: results and times in, changes out. A source that fails takes no device away; only a source that answers
//! without a device does, and only if it says so twice, because drivers say "no devices" for a moment after a reset.
//! While a driver is away, its devices are there and not to be trusted with new work.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use gpupool_core::{DeviceFacts, DeviceHealth, DeviceIdentity, DeviceLink, GpuId, Millis, PciAddress, PoolTime};

use crate::detected_device::{DetectedDevice, worse};
use crate::reported::Reported;
use crate::source::{SourceError, SourceKind};
use crate::source_reading::{DetectedLink, SourceReading};

/// A reading without a device that was there before counts as an answer of this many before the device is gone.
const MISSES_UNTIL_VANISHED: u32 = 2;

/// A reading that was not renewed for this many refresh intervals is stale.
const REFRESHES_UNTIL_STALE: u64 = 3;

/// A device as it is tracked over many readings. Its parts are shared, so a clone costs little.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrackedDevice {
    /// Its small number.
    pub gpu_id: GpuId,
    /// What makes it the same device tomorrow.
    pub identity: DeviceIdentity,
    /// Source of the last reading.
    pub source: SourceKind,
    /// Last reading.
    pub found: Arc<DetectedDevice>,
    /// What it is. The same allocation as before while a reading changes nothing of it.
    pub facts: Arc<DeviceFacts>,
    /// Time of the last reading.
    pub read_at: PoolTime,
    /// Whether it can be trusted with new work. A device that is gone is lost, one whose driver is away is unhealthy,
    /// and one whose source tells nothing of health is healthy.
    pub health: DeviceHealth,
    /// Whether its source still lists it.
    pub is_present: bool,
}

impl TrackedDevice {
    /// Returns whether the last reading is too old to be passed off as fresh, where one is taken every `refresh`.
    pub fn is_stale(&self, now: PoolTime, refresh: Millis) -> bool {
        now > fresh_until(self.read_at, refresh)
    }
}

/// Returns until when a reading of `read_at` is fresh, where one is taken every `refresh`.
pub fn fresh_until(read_at: PoolTime, refresh: Millis) -> PoolTime {
    read_at.after(Millis(refresh.0.saturating_mul(REFRESHES_UNTIL_STALE)))
}

/// What a reading changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrackedChange {
    /// A device that was never seen before.
    Appeared(GpuId),
    /// A device is gone; it is known by its last identity and may come back.
    Vanished(GpuId),
    /// A device that was gone is back.
    Returned(GpuId),
    /// A device reports another health than before. That its driver is away is told as [`Self::SourceFailed`].
    Health(GpuId, DeviceHealth),
    /// A source that answered does not any more; its devices stay, and age.
    SourceFailed(SourceKind, SourceError),
    /// A source that did not answer does again.
    SourceBack(SourceKind),
}

/// Keeps track of the devices of all sources of a node.
#[derive(Debug, Clone, Default)]
pub struct DeviceTracker {
    ids: GpuIdRegistry,
    without_mps: bool,
    devices: BTreeMap<DeviceIdentity, Entry>,
    troubles: BTreeMap<SourceKind, SourceError>,
    links: BTreeMap<SourceKind, Vec<DeviceLink>>,
    /// Devices that were read since [`DeviceTracker::take_read`].
    read: BTreeSet<GpuId>,
}

/// A device and the number of readings in a row that left it out.
#[derive(Debug, Clone)]
struct Entry {
    device: Arc<TrackedDevice>,
    misses: u32,
}

impl Entry {
    /// Its health as far as its own source tells; gone is lost.
    fn reported_health(&self) -> DeviceHealth {
        if !self.device.is_present {
            return DeviceHealth::Lost;
        }
        self.device.found.health.clone().unwrap_or(DeviceHealth::Healthy)
    }
}

impl DeviceTracker {
    /// Makes a tracker that goes on with the numbers given before.
    pub fn new(ids: GpuIdRegistry) -> Self {
        Self { ids, ..Self::default() }
    }

    /// Leaves MPS out of the facts of every device, for an agent that does not start the service it takes.
    #[must_use]
    pub fn without_mps(mut self) -> Self {
        self.without_mps = true;
        self
    }

    /// Takes in what a source answered at `at`, and returns what that changed.
    pub fn observe(
        &mut self,
        at: PoolTime,
        source: SourceKind,
        result: Result<SourceReading, SourceError>,
    ) -> Vec<TrackedChange> {
        let changes = match result {
            Ok(snapshot) => self.answered(at, source, snapshot),
            Err(error) => self.failed(source, error),
        };
        self.judge_health(source);
        changes
    }

    fn failed(&mut self, source: SourceKind, error: SourceError) -> Vec<TrackedChange> {
        let before = self.troubles.insert(source, error.clone());
        let same = before.is_some_and(|before| before.code() == error.code());
        if same { Vec::new() } else { vec![TrackedChange::SourceFailed(source, error)] }
    }

    fn answered(&mut self, at: PoolTime, source: SourceKind, mut snapshot: SourceReading) -> Vec<TrackedChange> {
        let mut changes = Vec::new();
        if self.troubles.remove(&source).is_some() {
            changes.push(TrackedChange::SourceBack(source));
        }
        spread_health(&mut snapshot.devices);
        let identities = self.recognised(source, &snapshot);
        let ids = self.ids.assign(&identities);
        let link =
            |link: &DetectedLink| Some(DeviceLink { a: *ids.get(link.a)?, b: *ids.get(link.b)?, kind: link.kind });
        self.links.insert(source, snapshot.links.iter().filter_map(link).collect());
        let mut missing: Vec<DeviceIdentity> = self.of_source(source).cloned().collect();
        missing.retain(|identity| !identities.contains(identity));
        let cards = self.cards(&identities, &snapshot.devices);
        for ((identity, gpu_id), mut found) in identities.into_iter().zip(ids).zip(snapshot.devices) {
            let before = self.devices.get(&identity).map(|entry| &entry.device);
            if let Some(before) = before {
                keep_untold(&mut found, &before.found);
            }
            let facts = self.facts(&identity, &found, &cards, before.map(|before| &before.facts));
            let health = found.health.clone().unwrap_or(DeviceHealth::Healthy);
            let found = Arc::new(found);
            let device =
                TrackedDevice { gpu_id, identity, source, found, facts, read_at: at, health, is_present: true };
            self.read.insert(gpu_id);
            self.seen(device, &mut changes);
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
    fn recognised(&self, source: SourceKind, snapshot: &SourceReading) -> Vec<DeviceIdentity> {
        let mut identities = snapshot.identities();
        for (place, device) in snapshot.devices.iter().enumerate() {
            if device.pci.is_none() || self.devices.contains_key(&identities[place]) {
                continue;
            }
            let was_here = |identity: &&DeviceIdentity| {
                self.devices.get(identity).is_some_and(|known| same_place(&known.device.found, device))
            };
            let known = self.of_source(source).filter(was_here).find(|identity| !identities.contains(identity));
            if let Some(known) = known {
                identities[place] = known.clone();
            }
        }
        identities
    }

    fn of_source(&self, source: SourceKind) -> impl Iterator<Item = &DeviceIdentity> {
        self.devices.iter().filter(move |(_, entry)| entry.device.source == source).map(|(identity, _)| identity)
    }

    /// The whole GPUs by their place on the bus, with those of this reading before those of earlier ones; none where
    /// nothing in the reading is a part of one.
    fn cards(&self, identities: &[DeviceIdentity], read: &[DetectedDevice]) -> HashMap<PciAddress, DeviceIdentity> {
        if read.iter().all(|found| found.partition.is_none()) {
            return HashMap::new();
        }
        let known = self.devices.iter().map(|(identity, entry)| (identity, &*entry.device.found));
        let whole = known.chain(identities.iter().zip(read)).filter(|(_, found)| found.partition.is_none());
        whole.filter_map(|(identity, found)| Some((found.pci?, identity.clone()))).collect()
    }

    /// What a device is. How much memory it has does not change because one reading failed to tell.
    fn facts(
        &self,
        identity: &DeviceIdentity,
        found: &DetectedDevice,
        cards: &HashMap<PciAddress, DeviceIdentity>,
        before: Option<&Arc<DeviceFacts>>,
    ) -> Arc<DeviceFacts> {
        let card = found.pci.and_then(|pci| cards.get(&pci)).cloned();
        let mut facts = found.facts(identity.clone(), card);
        facts.isolation.mps &= !self.without_mps;
        let Some(before) = before else { return Arc::new(facts) };
        if matches!(found.memory.total, Reported::Failed(_)) || matches!(found.memory.reserved, Reported::Failed(_)) {
            facts.memory = before.memory;
        }
        if **before == facts { before.clone() } else { Arc::new(facts) }
    }

    fn seen(&mut self, device: TrackedDevice, changes: &mut Vec<TrackedChange>) {
        let (gpu_id, identity) = (device.gpu_id, device.identity.clone());
        let entry = Entry { device: Arc::new(device), misses: 0 };
        let health = entry.reported_health();
        let before = self.devices.insert(identity, entry);
        match &before {
            None => changes.push(TrackedChange::Appeared(gpu_id)),
            Some(before) if !before.device.is_present => changes.push(TrackedChange::Returned(gpu_id)),
            Some(_) => {}
        }
        if health != before.map_or(DeviceHealth::Healthy, |before| before.reported_health()) {
            changes.push(TrackedChange::Health(gpu_id, health));
        }
    }

    fn missed(&mut self, identity: &DeviceIdentity, changes: &mut Vec<TrackedChange>) {
        let Some(entry) = self.devices.get_mut(identity) else { return };
        entry.misses = entry.misses.saturating_add(1);
        if entry.device.is_present && entry.misses >= MISSES_UNTIL_VANISHED {
            Arc::make_mut(&mut entry.device).is_present = false;
            changes.push(TrackedChange::Vanished(entry.device.gpu_id));
        }
    }

    /// Judges the devices of a source by what they report and by whether their driver is there.
    fn judge_health(&mut self, source: SourceKind) {
        let driver_away = self.troubles.get(&source).and_then(SourceError::driver_away);
        for entry in self.devices.values_mut().filter(|entry| entry.device.source == source) {
            let health = match (entry.reported_health(), &driver_away) {
                (DeviceHealth::Healthy, Some(reason)) => DeviceHealth::Unhealthy(reason.clone()),
                (reported, _) => reported,
            };
            if entry.device.health != health {
                Arc::make_mut(&mut entry.device).health = health;
            }
        }
    }

    /// Returns every device ever seen, by number.
    pub fn devices(&self) -> Vec<Arc<TrackedDevice>> {
        let mut all: Vec<_> = self.devices.values().map(|entry| entry.device.clone()).collect();
        all.sort_by_key(|device| device.gpu_id);
        all
    }

    /// Returns the numbers of the devices that were read since the last call.
    pub fn take_sampled_gpus(&mut self) -> BTreeSet<GpuId> {
        std::mem::take(&mut self.read)
    }

    /// Returns the links between devices, as last read.
    pub fn links(&self) -> impl Iterator<Item = &DeviceLink> {
        self.links.values().flatten()
    }

    /// Returns the sources that do not answer, and why.
    pub fn source_errors(&self) -> &BTreeMap<SourceKind, SourceError> {
        &self.troubles
    }

    /// Returns the numbers given so far, to be kept.
    pub fn ids(&self) -> &GpuIdRegistry {
        &self.ids
    }
}

/// Keeps from before what a lost or sleeping device does not tell any more.
fn keep_untold(found: &mut DetectedDevice, before: &DetectedDevice) {
    if found.health != Some(DeviceHealth::Lost) && !found.asleep {
        return;
    }
    found.fill_identity(before);
    if found.memory.total.value().is_none() {
        found.memory.total.clone_from(&before.memory.total);
        found.memory.reserved.clone_from(&before.memory.reserved);
    }
}

/// What is wrong with a GPU is wrong with every part of it: instances and partitions take the health of what they are
/// cut from, and of each other where it is lost.
fn spread_health(devices: &mut [DetectedDevice]) {
    let mut by_card: BTreeMap<_, Option<DeviceHealth>> = BTreeMap::new();
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
fn same_place(one: &DetectedDevice, other: &DetectedDevice) -> bool {
    let uuids_agree = one.uuid.is_none() || other.uuid.is_none() || one.uuid == other.uuid;
    one.pci == other.pci && one.partition_number() == other.partition_number() && uuids_agree
}

// Small numbers for devices, which stay the same after a restart.

/// Which number each identity has. Numbers once given are never given to another device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuIdRegistry {
    known: BTreeMap<DeviceIdentity, GpuId>,
    used: BTreeSet<GpuId>,
}

impl GpuIdRegistry {
    /// The numbers kept from before.
    pub fn restore(known: impl IntoIterator<Item = (DeviceIdentity, GpuId)>) -> Self {
        let known: BTreeMap<_, _> = known.into_iter().collect();
        let used = known.values().copied().collect();
        Self { known, used }
    }

    /// The numbers of these devices, in their order: the old one for a device seen before, else the smallest that was
    /// never used.
    pub(crate) fn assign(&mut self, identities: &[DeviceIdentity]) -> Vec<GpuId> {
        let number = |identity: &DeviceIdentity| {
            *self.known.entry(identity.clone()).or_insert_with(|| {
                let id = (0..).map(GpuId).find(|id| !self.used.contains(id)).unwrap_or(GpuId(u32::MAX));
                self.used.insert(id);
                id
            })
        };
        identities.iter().map(number).collect()
    }

    /// Every identity with its number, to be kept.
    pub fn iter(&self) -> impl Iterator<Item = (&DeviceIdentity, GpuId)> {
        self.known.iter().map(|(identity, &id)| (identity, id))
    }
}

#[cfg(test)]
mod tests {
    use gpupool_core::{Bytes, Vendor};
    use proptest::prelude::*;

    use super::*;
    use crate::detected_device::DevicePartition;

    const SOURCE: SourceKind = SourceKind::Nvml;

    fn gpu(name: &str) -> DetectedDevice {
        let mut found = DetectedDevice::new(Vendor::Nvidia);
        found.uuid = Some(name.into());
        found.memory.total = Reported::Value(Bytes(1000));
        found
    }

    fn reading(devices: impl IntoIterator<Item = DetectedDevice>) -> Result<SourceReading, SourceError> {
        Ok(SourceReading { devices: devices.into_iter().collect(), ..SourceReading::default() })
    }

    #[test]
    fn memory_stays_what_it_was_while_readings_fail_to_tell_it() {
        let mut tracker = DeviceTracker::default();
        tracker.observe(PoolTime(0), SOURCE, reading([gpu("a")]));
        let before = tracker.devices()[0].facts.clone();
        assert!(before.memory.is_some());
        let mut failed = gpu("a");
        failed.memory.total = Reported::Failed("no".into());
        tracker.observe(PoolTime(1), SOURCE, reading([failed]));
        assert!(Arc::ptr_eq(&tracker.devices()[0].facts, &before), "nothing changed, so nothing was made anew");
        let mut without = gpu("a");
        without.memory.total = Reported::ABSENT;
        tracker.observe(PoolTime(2), SOURCE, reading([without]));
        assert_eq!(tracker.devices()[0].facts.memory, None, "a device that has no such field has no such memory");
    }

    #[test]
    fn a_part_is_of_the_gpu_at_its_place_also_where_it_is_listed_first() {
        let at = crate::address::parse_pci_address("0000:01:00.0");
        let card = DetectedDevice { pci: at, ..gpu("card") };
        let part =
            DevicePartition::Mig { parent_uuid: None, gpu_instance: Some(1), compute_instance: None, profile: None };
        let part = DetectedDevice { pci: at, partition: Some(part), ..gpu("part") };
        let mut tracker = DeviceTracker::default();
        tracker.observe(PoolTime(0), SOURCE, reading([part, card]));
        let facts = &tracker.devices()[0].facts;
        let parent = facts.partition.as_ref().map(|partition| partition.parent.clone());
        assert_eq!(parent, Some(DeviceIdentity::Uuid("card".into())));
    }

    #[test]
    fn mps_is_promised_unless_it_is_left_out() {
        let offers_mps = |mut tracker: DeviceTracker| {
            tracker.observe(PoolTime(0), SOURCE, reading([gpu("a")]));
            tracker.devices()[0].facts.isolation.mps
        };
        assert!(offers_mps(DeviceTracker::default()));
        assert!(!offers_mps(DeviceTracker::default().without_mps()));
    }

    #[test]
    fn a_device_is_not_trusted_while_its_driver_is_away_and_what_it_reports_itself_is_kept() {
        let sick = DeviceHealth::Unhealthy("Xid 48".into());
        let answer = || reading([gpu("a"), DetectedDevice { health: Some(sick.clone()), ..gpu("b") }]);
        let mut tracker = DeviceTracker::default();
        tracker.observe(PoolTime(0), SOURCE, answer());
        let health = |tracker: &DeviceTracker| tracker.devices().iter().map(|it| it.health.clone()).collect::<Vec<_>>();
        let hung = SourceError::Unresponsive { what: "nvml".into(), after: std::time::Duration::from_secs(5) };
        tracker.observe(PoolTime(1), SOURCE, Err(hung));
        assert_eq!(health(&tracker), [DeviceHealth::Unhealthy("driver unresponsive".into()), sick.clone()]);
        let mismatch = SourceError::VersionMismatch("535 and 550".into());
        tracker.observe(PoolTime(2), SOURCE, Err(mismatch.clone()));
        assert_eq!(health(&tracker), [DeviceHealth::Unhealthy(mismatch.to_string().into()), sick.clone()]);
        tracker.observe(PoolTime(3), SOURCE, Err(SourceError::Driver("a hiccup".into())));
        assert_eq!(health(&tracker), [DeviceHealth::Healthy, sick.clone()], "other failures say nothing of devices");
        tracker.observe(PoolTime(4), SOURCE, Err(mismatch));
        tracker.observe(PoolTime(5), SOURCE, reading([]));
        assert_eq!(
            health(&tracker),
            [DeviceHealth::Healthy, sick],
            "the driver is back, and one answer takes nothing away"
        );
    }

    #[test]
    fn devices_that_were_read_are_told_once() {
        let mut tracker = DeviceTracker::default();
        tracker.observe(PoolTime(0), SOURCE, reading([gpu("a"), gpu("b")]));
        tracker.observe(PoolTime(1), SOURCE, reading([gpu("b")]));
        assert_eq!(tracker.take_sampled_gpus(), BTreeSet::from([GpuId(0), GpuId(1)]));
        tracker.observe(PoolTime(1), SOURCE, reading([gpu("b")]));
        tracker.observe(PoolTime(2), SOURCE, Err(SourceError::Driver("a hiccup".into())));
        assert_eq!(tracker.take_sampled_gpus(), BTreeSet::from([GpuId(1)]));
        assert_eq!(tracker.take_sampled_gpus(), BTreeSet::new());
    }

    fn named(name: &str) -> DeviceIdentity {
        DeviceIdentity::Uuid(name.into())
    }

    #[test]
    fn a_device_keeps_its_number_whatever_the_order_and_whoever_left() {
        let mut ids = GpuIdRegistry::default();
        assert_eq!(ids.assign(&[named("a"), named("b"), named("c")]), [GpuId(0), GpuId(1), GpuId(2)]);
        let mut ids = GpuIdRegistry::restore(ids.iter().map(|(identity, id)| (identity.clone(), id)));
        assert_eq!(ids.assign(&[named("c"), named("new"), named("a")]), [GpuId(2), GpuId(3), GpuId(0)]);
    }

    proptest! {
        #[test]
        fn no_two_devices_share_a_number_and_none_changes_it(rounds in prop::collection::vec(prop::collection::vec(0u8..12, 0..8), 1..8)) {
            let mut ids = GpuIdRegistry::default();
            let mut seen: BTreeMap<u8, GpuId> = BTreeMap::new();
            for round in rounds {
                let identities: Vec<_> = round.iter().map(|name| named(&name.to_string())).collect();
                for (name, id) in round.iter().zip(ids.assign(&identities)) {
                    prop_assert_eq!(*seen.entry(*name).or_insert(id), id);
                }
                ids = GpuIdRegistry::restore(ids.iter().map(|(identity, id)| (identity.clone(), id)));
            }
            let distinct: BTreeSet<_> = seen.values().collect();
            prop_assert_eq!(distinct.len(), seen.len());
        }
    }
}

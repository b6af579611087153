//! Tracks devices over many readings: which are present, gone or back, and how old each reading is.
//!
//! The tracker is pure: results and times in, changes out. A source that fails removes no device. A device is gone only
//! after two successful readings without it, because drivers report "no devices" for a moment after a reset. While a
//! driver is away, its devices stay but get no new work.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use gpupool_core::{DeviceFacts, DeviceHealth, DeviceIdentity, DeviceLink, GpuId, Millis, PciAddress, PoolTime};

use crate::detected_device::{DetectedDevice, worse};
use crate::reported::Reported;
use crate::source::{SourceError, SourceKind};
use crate::source_reading::{DetectedLink, SourceReading};

/// Number of successive readings without a device before the device counts as gone.
const MISSES_UNTIL_VANISHED: u32 = 2;

/// Number of refresh intervals after which a reading is stale.
const REFRESHES_UNTIL_STALE: u64 = 3;

/// A device tracked over many readings. Clones are cheap, because they share its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrackedDevice {
    /// Permanent number on this node.
    pub gpu_id: GpuId,
    /// Permanent identity.
    pub identity: DeviceIdentity,
    /// Source of the last reading.
    pub source: SourceKind,
    /// Last reading.
    pub found: Arc<DetectedDevice>,
    /// Facts of the device. The allocation stays the same while the facts do.
    pub facts: Arc<DeviceFacts>,
    /// Time of the last reading.
    pub read_at: PoolTime,
    /// Health. A device that is gone is lost, a device whose driver is away is unhealthy, and a device without reported
    /// health is healthy.
    pub health: DeviceHealth,
    /// Whether the source still lists the device.
    pub is_present: bool,
}

impl TrackedDevice {
    /// Whether the last reading is stale, if one is taken every `refresh`.
    pub fn is_stale(&self, now: PoolTime, refresh: Millis) -> bool {
        now > fresh_until(self.read_at, refresh)
    }
}

/// Returns the time until which a reading of `read_at` is fresh, if one is taken every `refresh`.
pub fn fresh_until(read_at: PoolTime, refresh: Millis) -> PoolTime {
    read_at.after(Millis(refresh.0.saturating_mul(REFRESHES_UNTIL_STALE)))
}

/// Change caused by a reading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrackedChange {
    /// A new device appeared.
    Appeared(GpuId),
    /// A device is gone. Its identity is retained, because it may return.
    Vanished(GpuId),
    /// A device that was gone came back.
    Returned(GpuId),
    /// The reported health of a device changed. A driver that is away is reported as [`Self::SourceFailed`].
    Health(GpuId, DeviceHealth),
    /// A source started to fail; its devices stay, and their readings age.
    SourceFailed(SourceKind, SourceError),
    /// A source works again.
    SourceBack(SourceKind),
}

/// Tracks the devices of all sources of a node.
#[derive(Debug, Clone, Default)]
pub struct DeviceTracker {
    ids: GpuIdRegistry,
    without_mps: bool,
    devices: BTreeMap<DeviceIdentity, TrackerEntry>,
    source_errors: BTreeMap<SourceKind, SourceError>,
    links: BTreeMap<SourceKind, Vec<DeviceLink>>,
    /// Devices read since the last [`DeviceTracker::take_sampled_gpus`].
    sampled: BTreeSet<GpuId>,
}

/// Whole GPUs by PCI address.
type GpusByPci = HashMap<PciAddress, DeviceIdentity>;

/// A device and the number of successive readings without it.
#[derive(Debug, Clone)]
struct TrackerEntry {
    device: Arc<TrackedDevice>,
    misses: u32,
}

impl TrackerEntry {
    /// Returns the health reported by the source; a device that is gone is lost.
    fn reported_health(&self) -> DeviceHealth {
        if !self.device.is_present {
            return DeviceHealth::Lost;
        }
        self.device.found.health.clone().unwrap_or(DeviceHealth::Healthy)
    }
}

impl DeviceTracker {
    /// Creates a tracker that continues with assigned numbers.
    pub fn new(ids: GpuIdRegistry) -> Self {
        Self { ids, ..Self::default() }
    }

    /// Removes MPS from the facts of every device, for an agent that does not start the MPS service.
    #[must_use]
    pub fn without_mps(mut self) -> Self {
        self.without_mps = true;
        self
    }

    /// Applies a result of a source, taken at `at`, and returns the changes.
    pub fn observe(
        &mut self,
        at: PoolTime,
        source: SourceKind,
        result: Result<SourceReading, SourceError>,
    ) -> Vec<TrackedChange> {
        let changes = match result {
            Ok(reading) => self.observe_reading(at, source, reading),
            Err(error) => self.observe_error(source, error),
        };
        self.judge_health(source);
        changes
    }

    fn observe_error(&mut self, source: SourceKind, error: SourceError) -> Vec<TrackedChange> {
        let before = self.source_errors.insert(source, error.clone());
        let is_same = before.is_some_and(|before| before.code() == error.code());
        if is_same { Vec::new() } else { vec![TrackedChange::SourceFailed(source, error)] }
    }

    fn observe_reading(&mut self, at: PoolTime, source: SourceKind, mut reading: SourceReading) -> Vec<TrackedChange> {
        let mut changes = Vec::new();
        if self.source_errors.remove(&source).is_some() {
            changes.push(TrackedChange::SourceBack(source));
        }
        spread_health(&mut reading.devices);
        let identities = self.recognise_devices(source, &reading);
        let ids = self.ids.assign(&identities);
        let link =
            |link: &DetectedLink| Some(DeviceLink { a: *ids.get(link.a)?, b: *ids.get(link.b)?, kind: link.kind });
        self.links.insert(source, reading.links.iter().filter_map(link).collect());
        let mut missing: Vec<DeviceIdentity> = self.identities_of(source).cloned().collect();
        missing.retain(|identity| !identities.contains(identity));
        let gpus_by_pci = self.gpus_by_pci(&identities, &reading.devices);
        for ((identity, gpu_id), mut found) in identities.into_iter().zip(ids).zip(reading.devices) {
            let before = self.devices.get(&identity).map(|entry| &entry.device);
            if let Some(before) = before {
                retain_missing_facts(&mut found, &before.found);
            }
            let facts = self.facts(&identity, &found, &gpus_by_pci, before.map(|before| &before.facts));
            let health = found.health.clone().unwrap_or(DeviceHealth::Healthy);
            let found = Arc::new(found);
            let device =
                TrackedDevice { gpu_id, identity, source, found, facts, read_at: at, health, is_present: true };
            self.sampled.insert(gpu_id);
            self.record_device(device, &mut changes);
        }
        for identity in missing {
            self.record_miss(&identity, &mut changes);
        }
        changes
    }

    /// Returns the identity of each device: its earlier identity, if it was at this position before.
    ///
    /// An identity can change although the device stays: the message about a lost GPU only has its PCI address, and a
    /// UUID that two dies share identifies one of them while the other is gone.
    fn recognise_devices(&self, source: SourceKind, reading: &SourceReading) -> Vec<DeviceIdentity> {
        let mut identities = reading.identities();
        for (position, device) in reading.devices.iter().enumerate() {
            if device.pci.is_none() || self.devices.contains_key(&identities[position]) {
                continue;
            }
            let was_here = |identity: &&DeviceIdentity| {
                self.devices.get(identity).is_some_and(|known| is_same_position(&known.device.found, device))
            };
            let known = self.identities_of(source).filter(was_here).find(|identity| !identities.contains(identity));
            if let Some(known) = known {
                identities[position] = known.clone();
            }
        }
        identities
    }

    fn identities_of(&self, source: SourceKind) -> impl Iterator<Item = &DeviceIdentity> {
        self.devices.iter().filter(move |(_, entry)| entry.device.source == source).map(|(identity, _)| identity)
    }

    /// Returns the whole GPUs by PCI address, preferring those of this reading; empty if the reading has no
    /// partitions.
    fn gpus_by_pci(&self, identities: &[DeviceIdentity], read: &[DetectedDevice]) -> GpusByPci {
        if read.iter().all(|found| found.partition.is_none()) {
            return HashMap::new();
        }
        let known = self.devices.iter().map(|(identity, entry)| (identity, &*entry.device.found));
        let whole = known.chain(identities.iter().zip(read)).filter(|(_, found)| found.partition.is_none());
        whole.filter_map(|(identity, found)| Some((found.pci?, identity.clone()))).collect()
    }

    /// Returns the facts of a device. A reading that failed to report memory does not change the memory.
    fn facts(
        &self,
        identity: &DeviceIdentity,
        found: &DetectedDevice,
        gpus_by_pci: &GpusByPci,
        before: Option<&Arc<DeviceFacts>>,
    ) -> Arc<DeviceFacts> {
        let card = found.pci.and_then(|pci| gpus_by_pci.get(&pci)).cloned();
        let mut facts = found.facts(identity.clone(), card);
        facts.isolation.mps &= !self.without_mps;
        let Some(before) = before else { return Arc::new(facts) };
        if matches!(found.memory.total, Reported::Failed(_)) || matches!(found.memory.reserved, Reported::Failed(_)) {
            facts.memory = before.memory;
        }
        if **before == facts { before.clone() } else { Arc::new(facts) }
    }

    fn record_device(&mut self, device: TrackedDevice, changes: &mut Vec<TrackedChange>) {
        let (gpu_id, identity) = (device.gpu_id, device.identity.clone());
        let entry = TrackerEntry { device: Arc::new(device), misses: 0 };
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

    fn record_miss(&mut self, identity: &DeviceIdentity, changes: &mut Vec<TrackedChange>) {
        let Some(entry) = self.devices.get_mut(identity) else { return };
        entry.misses = entry.misses.saturating_add(1);
        if entry.device.is_present && entry.misses >= MISSES_UNTIL_VANISHED {
            Arc::make_mut(&mut entry.device).is_present = false;
            changes.push(TrackedChange::Vanished(entry.device.gpu_id));
        }
    }

    /// Judges the devices of a source by their reported health and by whether their driver is away.
    fn judge_health(&mut self, source: SourceKind) {
        let driver_away = self.source_errors.get(&source).and_then(SourceError::driver_away);
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

    /// Returns all devices ever seen, by number.
    pub fn devices(&self) -> Vec<Arc<TrackedDevice>> {
        let mut all: Vec<_> = self.devices.values().map(|entry| entry.device.clone()).collect();
        all.sort_by_key(|device| device.gpu_id);
        all
    }

    /// Returns the devices read since the last call.
    pub fn take_sampled_gpus(&mut self) -> BTreeSet<GpuId> {
        std::mem::take(&mut self.sampled)
    }

    /// Returns the links between devices of the last readings.
    pub fn links(&self) -> impl Iterator<Item = &DeviceLink> {
        self.links.values().flatten()
    }

    /// Returns the failing sources and their errors.
    pub fn source_errors(&self) -> &BTreeMap<SourceKind, SourceError> {
        &self.source_errors
    }

    /// Returns the assigned numbers, to be stored.
    pub fn ids(&self) -> &GpuIdRegistry {
        &self.ids
    }
}

/// Retains facts that a lost or sleeping device no longer reports.
fn retain_missing_facts(found: &mut DetectedDevice, before: &DetectedDevice) {
    if found.health != Some(DeviceHealth::Lost) && !found.asleep {
        return;
    }
    found.fill_identity(before);
    if found.memory.total.value().is_none() {
        found.memory.total.clone_from(&before.memory.total);
        found.memory.reserved.clone_from(&before.memory.reserved);
    }
}

/// Applies the health of a GPU to all of its instances and partitions.
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

/// Whether two readings are of one device by PCI address and partition, and their UUIDs do not differ.
fn is_same_position(one: &DetectedDevice, other: &DetectedDevice) -> bool {
    let uuids_agree = one.uuid.is_none() || other.uuid.is_none() || one.uuid == other.uuid;
    one.pci == other.pci && one.partition_number() == other.partition_number() && uuids_agree
}

// Permanent numbers of devices.

/// The number of each identity. A number is never given to another device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuIdRegistry {
    known: BTreeMap<DeviceIdentity, GpuId>,
    used: BTreeSet<GpuId>,
}

impl GpuIdRegistry {
    /// Restores stored numbers.
    pub fn restore(known: impl IntoIterator<Item = (DeviceIdentity, GpuId)>) -> Self {
        let known: BTreeMap<_, _> = known.into_iter().collect();
        let used = known.values().copied().collect();
        Self { known, used }
    }

    /// Returns the numbers of devices: the earlier number of a known device, or else the smallest number never used.
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

    /// Returns every identity with its number, to be stored.
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
    fn memory_facts_stay_while_reading_memory_fails() {
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
    fn a_partition_belongs_to_the_gpu_at_its_address_even_if_listed_first() {
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
    fn mps_is_offered_unless_disabled() {
        let offers_mps = |mut tracker: DeviceTracker| {
            tracker.observe(PoolTime(0), SOURCE, reading([gpu("a")]));
            tracker.devices()[0].facts.isolation.mps
        };
        assert!(offers_mps(DeviceTracker::default()));
        assert!(!offers_mps(DeviceTracker::default().without_mps()));
    }

    #[test]
    fn a_device_is_unhealthy_while_its_driver_is_away_and_keeps_its_own_fault() {
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
    fn sampled_devices_are_returned_once() {
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
    fn a_device_keeps_its_number_in_any_order() {
        let mut ids = GpuIdRegistry::default();
        assert_eq!(ids.assign(&[named("a"), named("b"), named("c")]), [GpuId(0), GpuId(1), GpuId(2)]);
        let mut ids = GpuIdRegistry::restore(ids.iter().map(|(identity, id)| (identity.clone(), id)));
        assert_eq!(ids.assign(&[named("c"), named("new"), named("a")]), [GpuId(2), GpuId(3), GpuId(0)]);
    }

    proptest! {
        #[test]
        fn device_numbers_are_unique_and_permanent(rounds in prop::collection::vec(prop::collection::vec(0u8..12, 0..8), 1..8)) {
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

//! Everything that one source reported at one time, and the merging of several sources.

use std::collections::BTreeMap;

use gpupool_core::{DeviceIdentity, LinkKind, Vendor};

use crate::detected_device::{DetectedDevice, bound_text};
use crate::limits;

/// Prefix of the identity of a device that has no own identity. A UUID with this prefix is not trusted.
const UNIDENTIFIED_PREFIX: &str = "unidentified-";

/// A link between two devices of a reading, identified by their positions in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DetectedLink {
    /// Position of the first device; smaller than `b`.
    pub a: usize,
    /// Position of the second device.
    pub b: usize,
    pub kind: LinkKind,
}

impl DetectedLink {
    /// Creates a link between two positions, in either order.
    pub(crate) fn new(one: usize, other: usize, kind: LinkKind) -> Self {
        Self { a: one.min(other), b: one.max(other), kind }
    }

    /// Returns the link with its positions mapped by `places`, if both devices are there.
    pub(crate) fn map_positions(&self, places: &[Option<usize>]) -> Option<Self> {
        let place = |of: usize| places.get(of).copied().flatten();
        Some(Self::new(place(self.a)?, place(self.b)?, self.kind))
    }

    /// Returns the nearest link of each pair, ordered by pair.
    pub(crate) fn nearest(links: impl IntoIterator<Item = Self>) -> Vec<Self> {
        let mut nearest: BTreeMap<(usize, usize), LinkKind> = BTreeMap::new();
        for link in links {
            let known = nearest.entry((link.a, link.b)).or_insert(link.kind);
            if link.kind.distance() < known.distance() {
                *known = link.kind;
            }
        }
        nearest.into_iter().map(|((a, b), kind)| Self { a, b, kind }).collect()
    }
}

/// Everything that one source reported at one time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourceReading {
    /// Devices in the order of the source.
    pub devices: Vec<DetectedDevice>,
    /// Links between the devices, each pair once.
    pub links: Vec<DetectedLink>,
    /// Problems that lost no device, for people.
    pub warnings: Vec<String>,
}

impl SourceReading {
    /// Adds a warning, shortened, unless there are too many already.
    pub fn warn(&mut self, warning: impl Into<String>) {
        if self.warnings.len() < limits::WARNINGS {
            self.warnings.push(bound_text(warning.into()));
        }
    }

    /// Adds a device and returns its position, unless there are too many already. Long texts are truncated.
    pub(crate) fn push(&mut self, mut device: DetectedDevice) -> Option<usize> {
        if self.devices.len() >= limits::DEVICES {
            let warning = format!("more than {} devices; the rest is left out", limits::DEVICES);
            if self.warnings.last() != Some(&warning) {
                self.warn(warning);
            }
            return None;
        }
        device.bound_texts();
        self.devices.push(device);
        Some(self.devices.len() - 1)
    }

    /// Adds links, keeping the nearest of each pair and ignoring links from a device to itself.
    pub(crate) fn join(&mut self, links: impl IntoIterator<Item = DetectedLink>) {
        let count = self.devices.len();
        let mut links = links.into_iter().filter(|link| link.a < link.b && link.b < count).peekable();
        if links.peek().is_some() {
            self.links = DetectedLink::nearest(std::mem::take(&mut self.links).into_iter().chain(links));
        }
    }

    /// Merges the reading of another source: known devices are completed, new devices, links and warnings are added.
    pub fn merge(&mut self, other: Self) {
        let mut places = Vec::with_capacity(other.devices.len());
        let mut matched = vec![false; self.devices.len()];
        for device in other.devices {
            let same = self.find_same_device(&device, &matched);
            places.push(match same {
                Some(place) => {
                    matched[place] = true;
                    self.devices[place].fill_from(device);
                    Some(place)
                }
                None => self.push(device),
            });
        }
        self.join(other.links.iter().filter_map(|link| link.map_positions(&places)));
        for warning in other.warnings {
            if !self.warnings.contains(&warning) {
                self.warn(warning);
            }
        }
    }

    /// Returns the position of the device that `other` is, among the devices that are not matched yet.
    ///
    /// Devices match by UUID and PCI address; by index only if they have neither in common.
    fn find_same_device(&self, other: &DetectedDevice, matched: &[bool]) -> Option<usize> {
        // Devices added by this merge are skipped: two devices of one source are never the same.
        let free = |place: &usize| matched.get(*place) == Some(&false);
        let comparable =
            |mine: &&DetectedDevice| mine.vendor == other.vendor && mine.is_mig_instance() == other.is_mig_instance();
        let find = |same: &dyn Fn(&DetectedDevice) -> bool| {
            let mut positions = (0..self.devices.len()).filter(free);
            positions.find(|&place| Some(&self.devices[place]).filter(comparable).is_some_and(same))
        };
        fn differ<T: PartialEq>(a: Option<T>, b: Option<T>) -> bool {
            matches!((a, b), (Some(a), Some(b)) if a != b)
        }
        let agree = |mine: &DetectedDevice| {
            !(differ(mine.partition_number(), other.partition_number()) || differ(mine.pci, other.pci))
        };
        let by_uuid = find(&|mine| other.uuid.is_some() && mine.uuid == other.uuid && agree(mine));
        let by_pci = || find(&|mine| other.pci.is_some() && mine.pci == other.pci && agree(mine));
        let by_index = || {
            let unidentified = |found: &DetectedDevice| found.uuid.is_none() && found.pci.is_none();
            // All sources number NVIDIA GPUs alike, so one source may give the UUID and another the address.
            let completes = |mine: &DetectedDevice| {
                let both_named =
                    mine.uuid.is_some() && other.uuid.is_some() || mine.pci.is_some() && other.pci.is_some();
                other.vendor == Vendor::Nvidia && !other.is_mig_instance() && !both_named
            };
            let same = |mine: &DetectedDevice| other.index.is_some() && mine.index == other.index;
            find(&|mine| same(mine) && (unidentified(mine) || unidentified(other) || completes(mine)))
        };
        by_uuid.or_else(by_pci).or_else(by_index)
    }

    /// Returns the permanent identity of each device, in the order of the devices.
    ///
    /// The identity is the vendor's UUID. If it is missing or several devices share it (AMD partitions, the two dies
    /// of an MI250, masked captures), it is the PCI address and the partition. A device with neither is identified by
    /// its position.
    pub fn identities(&self) -> Vec<DeviceIdentity> {
        let mut uuid_counts: BTreeMap<&str, usize> = BTreeMap::new();
        for uuid in self.devices.iter().filter_map(|device| device.uuid.as_deref()) {
            *uuid_counts.entry(uuid).or_default() += 1;
        }
        let mut places: BTreeMap<(_, Option<u16>), usize> = BTreeMap::new();
        for device in &self.devices {
            if let Some(address) = device.pci {
                *places.entry((address, device.partition_number())).or_default() += 1;
            }
        }
        let identity = |(place, device): (usize, &DetectedDevice)| match (&device.uuid, device.pci) {
            (Some(uuid), _) if uuid_counts.get(&**uuid) == Some(&1) && !uuid.starts_with(UNIDENTIFIED_PREFIX) => {
                DeviceIdentity::Uuid(uuid.clone())
            }
            (_, Some(address)) if places.get(&(address, device.partition_number())) == Some(&1) => {
                DeviceIdentity::Pci { address, partition: device.partition_number() }
            }
            _ => DeviceIdentity::Uuid(format!("{UNIDENTIFIED_PREFIX}{place}").into()),
        };
        self.devices.iter().enumerate().map(identity).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::parse_pci_address;
    use crate::detected_device::{DevicePartition, DeviceProcess};
    use crate::reported::Reported;
    use gpupool_core::{Bytes, DeviceHealth, Vendor};

    fn device(uuid: Option<&str>, pci: Option<&str>) -> DetectedDevice {
        let mut found = DetectedDevice::new(Vendor::Amd);
        found.uuid = uuid.map(Into::into);
        found.pci = pci.and_then(parse_pci_address);
        found
    }

    fn part(mut found: DetectedDevice, id: u16) -> DetectedDevice {
        found.partition = Some(DevicePartition::Amd { id, mode: Some("CPX".into()), parts: Some(4) });
        found
    }

    #[test]
    fn a_uuid_shared_by_several_devices_identifies_none() {
        let devices = vec![
            part(device(Some("card"), Some("0000:01:00.0")), 0),
            part(device(Some("card"), Some("0000:01:00.0")), 1),
            device(Some("other"), Some("0000:02:00.0")),
            device(None, None),
            device(Some("unidentified-3"), None),
        ];
        let identities = SourceReading { devices, ..SourceReading::default() }.identities();
        let spelled: Vec<String> = identities.iter().map(ToString::to_string).collect();
        assert_eq!(spelled, ["0000:01:00.0/0", "0000:01:00.0/1", "other", "unidentified-3", "unidentified-4"]);
    }

    #[test]
    fn long_texts_of_all_fields_are_truncated() {
        let long = "é".repeat(3 * limits::TEXT_CHARS);
        let mut found = device(Some(&long), None);
        found.health = Some(DeviceHealth::Unhealthy(long.as_str().into()));
        found.memory.host_used = Reported::Failed(long.clone().into());
        let process = DeviceProcess { name: Some(long.as_str().into()), ..DeviceProcess::default() };
        found.processes = Reported::Value(vec![process; limits::PROCESSES + 1]);
        let mut reading = SourceReading::default();
        reading.warn(long);
        reading.push(found);
        let cut = "é".repeat(limits::TEXT_CHARS);
        let found = &reading.devices[0];
        assert_eq!((reading.warnings.as_slice(), found.uuid.as_deref()), ([cut.clone()].as_slice(), Some(&*cut)));
        assert_eq!(found.health, Some(DeviceHealth::Unhealthy(cut.as_str().into())));
        assert_eq!(found.memory.host_used, Reported::Failed(cut.clone().into()));
        let processes = found.processes.value().unwrap();
        assert_eq!((processes.len(), processes[0].name.as_deref()), (limits::PROCESSES, Some(&*cut)));
    }

    #[test]
    fn readings_of_one_device_by_two_sources_are_merged() {
        let mut one = SourceReading::default();
        one.push(device(Some("a"), Some("0000:01:00.0")));
        one.push(device(Some("b"), Some("0000:02:00.0")));
        let mut other = SourceReading::default();
        let mut same = device(None, Some("0000:02:00.0"));
        same.memory.total = Reported::Value(Bytes(5));
        other.push(same);
        other.push(device(None, Some("0000:03:00.0")));
        other.join([DetectedLink::new(0, 1, LinkKind::Xgmi(1))]);
        one.merge(other);
        assert_eq!(one.devices.len(), 3);
        assert_eq!(one.devices[1].memory.total, Reported::Value(Bytes(5)));
        assert_eq!(one.links, [DetectedLink { a: 1, b: 2, kind: LinkKind::Xgmi(1) }]);
    }

    #[test]
    fn equal_devices_of_one_source_are_not_merged() {
        let mut none = SourceReading::default();
        let alike = vec![device(Some("masked"), None), device(Some("masked"), None)];
        none.merge(SourceReading { devices: alike.clone(), ..SourceReading::default() });
        assert_eq!(none.devices, alike);
    }

    #[test]
    fn partitions_of_one_card_stay_separate_when_sources_are_merged() {
        let cards = || {
            let mut reading = SourceReading::default();
            for id in 0..4 {
                reading.push(part(device(Some("card"), Some("0000:01:00.0")), id));
            }
            reading
        };
        let mut one = cards();
        one.merge(cards());
        assert_eq!(one.devices.len(), 4);
    }
}

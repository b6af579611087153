//! Everything one source said at one time, and how what several said becomes one.

use std::collections::BTreeMap;

use gpupool_core::{DeviceIdentity, LinkKind, Vendor};

use crate::detected_device::{DetectedDevice, bound_text};
use crate::limits;

/// What the identity of a device begins with that has none of its own; no UUID is trusted that does.
const UNIDENTIFIED: &str = "unidentified-";

/// A link between two devices of a snapshot, named by their places in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DetectedLink {
    /// Place of the first device; smaller than that of the second.
    pub a: usize,
    /// Place of the second device.
    pub b: usize,
    /// What joins them.
    pub kind: LinkKind,
}

impl DetectedLink {
    /// The link between two places, in either order.
    pub(crate) fn new(one: usize, other: usize, kind: LinkKind) -> Self {
        Self { a: one.min(other), b: one.max(other), kind }
    }

    /// The link between the places that its devices have elsewhere, where both have one.
    pub(crate) fn moved(&self, places: &[Option<usize>]) -> Option<Self> {
        let place = |of: usize| places.get(of).copied().flatten();
        Some(Self::new(place(self.a)?, place(self.b)?, self.kind))
    }

    /// The nearest link of each pair, in the order of the pairs.
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

/// Everything one source said at one time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourceReading {
    /// The devices, in the order of the source.
    pub devices: Vec<DetectedDevice>,
    /// Links between them, each pair once.
    pub links: Vec<DetectedLink>,
    /// What went wrong without losing a device, for people.
    pub warnings: Vec<String>,
}

impl SourceReading {
    /// Adds a warning, while there are not too many; a long one is cut.
    pub fn warn(&mut self, warning: impl Into<String>) {
        if self.warnings.len() < limits::WARNINGS {
            self.warnings.push(bound_text(warning.into()));
        }
    }

    /// Adds a device, while there are not too many, and says at which place. Long texts of it are cut.
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

    /// Joins devices, keeping the nearest link of each pair; a device is not joined to itself.
    pub(crate) fn join(&mut self, links: impl IntoIterator<Item = DetectedLink>) {
        let count = self.devices.len();
        let mut links = links.into_iter().filter(|link| link.a < link.b && link.b < count).peekable();
        if links.peek().is_some() {
            self.links = DetectedLink::nearest(std::mem::take(&mut self.links).into_iter().chain(links));
        }
    }

    /// Adds what another source said: devices both know are filled in, new ones added, links and warnings kept.
    pub fn merge(&mut self, other: Self) {
        let mut places = Vec::with_capacity(other.devices.len());
        let mut taken = vec![false; self.devices.len()];
        for device in other.devices {
            let same = self.place_of(&device, &taken);
            places.push(match same {
                Some(place) => {
                    taken[place] = true;
                    self.devices[place].fill_from(device);
                    Some(place)
                }
                None => self.push(device),
            });
        }
        self.join(other.links.iter().filter_map(|link| link.moved(&places)));
        for warning in other.warnings {
            if !self.warnings.contains(&warning) {
                self.warn(warning);
            }
        }
    }

    /// The place of the device that `other` is, among those no device was matched with yet.
    ///
    /// By UUID and place on the bus; by the source's number only where the two have neither in common.
    fn place_of(&self, other: &DetectedDevice, taken: &[bool]) -> Option<usize> {
        // Devices that were added just now are not looked at: two of one source are never the same.
        let free = |place: &usize| taken.get(*place) == Some(&false);
        let kin =
            |mine: &&DetectedDevice| mine.vendor == other.vendor && mine.is_mig_instance() == other.is_mig_instance();
        let find = |same: &dyn Fn(&DetectedDevice) -> bool| {
            (0..self.devices.len()).filter(free).find(|&place| Some(&self.devices[place]).filter(kin).is_some_and(same))
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
            let nameless = |found: &DetectedDevice| found.uuid.is_none() && found.pci.is_none();
            // All sources number NVIDIA's GPUs in one way, so that one may give the UUID and another the place.
            let completes = |mine: &DetectedDevice| {
                let both_named =
                    mine.uuid.is_some() && other.uuid.is_some() || mine.pci.is_some() && other.pci.is_some();
                other.vendor == Vendor::Nvidia && !other.is_mig_instance() && !both_named
            };
            let same = |mine: &DetectedDevice| other.index.is_some() && mine.index == other.index;
            find(&|mine| same(mine) && (nameless(mine) || nameless(other) || completes(mine)))
        };
        by_uuid.or_else(by_pci).or_else(by_index)
    }

    /// What makes each device the same device tomorrow, in the order of the devices.
    ///
    /// The vendor's UUID; where that is missing or several devices carry it (AMD partitions, the two dies of an MI250,
    /// masked captures), the place on the bus and the partition. A device with neither is known by its number.
    pub fn identities(&self) -> Vec<DeviceIdentity> {
        let mut carriers: BTreeMap<&str, usize> = BTreeMap::new();
        for uuid in self.devices.iter().filter_map(|device| device.uuid.as_deref()) {
            *carriers.entry(uuid).or_default() += 1;
        }
        let mut places: BTreeMap<(_, Option<u16>), usize> = BTreeMap::new();
        for device in &self.devices {
            if let Some(address) = device.pci {
                *places.entry((address, device.partition_number())).or_default() += 1;
            }
        }
        let identity = |(place, device): (usize, &DetectedDevice)| match (&device.uuid, device.pci) {
            (Some(uuid), _) if carriers.get(&**uuid) == Some(&1) && !uuid.starts_with(UNIDENTIFIED) => {
                DeviceIdentity::Uuid(uuid.clone())
            }
            (_, Some(address)) if places.get(&(address, device.partition_number())) == Some(&1) => {
                DeviceIdentity::Pci { address, partition: device.partition_number() }
            }
            _ => DeviceIdentity::Uuid(format!("{UNIDENTIFIED}{place}").into()),
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
    fn a_uuid_that_several_devices_carry_identifies_none_of_them() {
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
    fn texts_that_are_too_long_are_cut_wherever_they_stand() {
        let long = "é".repeat(3 * limits::TEXT_CHARS);
        let mut found = device(Some(&long), None);
        found.health = Some(DeviceHealth::Unhealthy(long.as_str().into()));
        found.memory.host_used = Reported::Failed(long.clone().into());
        let process = DeviceProcess { name: Some(long.as_str().into()), ..DeviceProcess::default() };
        found.processes = Reported::Value(vec![process; limits::PROCESSES + 1]);
        let mut snapshot = SourceReading::default();
        snapshot.warn(long);
        snapshot.push(found);
        let cut = "é".repeat(limits::TEXT_CHARS);
        let found = &snapshot.devices[0];
        assert_eq!((snapshot.warnings.as_slice(), found.uuid.as_deref()), ([cut.clone()].as_slice(), Some(&*cut)));
        assert_eq!(found.health, Some(DeviceHealth::Unhealthy(cut.as_str().into())));
        assert_eq!(found.memory.host_used, Reported::Failed(cut.clone().into()));
        let processes = found.processes.value().unwrap();
        assert_eq!((processes.len(), processes[0].name.as_deref()), (limits::PROCESSES, Some(&*cut)));
    }

    #[test]
    fn what_two_sources_say_of_one_device_becomes_one() {
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
    fn devices_that_one_source_cannot_tell_apart_stay_two() {
        let mut none = SourceReading::default();
        let alike = vec![device(Some("masked"), None), device(Some("masked"), None)];
        none.merge(SourceReading { devices: alike.clone(), ..SourceReading::default() });
        assert_eq!(none.devices, alike);
    }

    #[test]
    fn partitions_of_one_card_stay_apart_when_sources_are_merged() {
        let cards = || {
            let mut snapshot = SourceReading::default();
            for id in 0..4 {
                snapshot.push(part(device(Some("card"), Some("0000:01:00.0")), id));
            }
            snapshot
        };
        let mut one = cards();
        one.merge(cards());
        assert_eq!(one.devices.len(), 4);
    }
}

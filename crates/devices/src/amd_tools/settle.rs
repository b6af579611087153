//! What can be said of devices only once all of them are known: partitions, dies that share a sensor, health.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_core::device::{Health, PciAddress};

use crate::found::{Found, Partition, Watts};
use crate::snapshot::Snapshot;
use crate::told::Told;

/// What a tool said of how a device is cut.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cut {
    /// Which part it is.
    pub id: Option<u16>,
    /// `SPX`, `CPX`, …; `None` also where the device cannot be cut.
    pub mode: Option<Arc<str>>,
}

impl Cut {
    /// From the words of a tool.
    pub(crate) fn new(id: Option<&str>, mode: Option<&str>) -> Self {
        let mode = mode.map(str::trim).filter(|mode| mode.len() == 3 && mode.to_ascii_uppercase().ends_with("PX"));
        Self { id: id.and_then(|id| id.trim().parse().ok()), mode: mode.map(|mode| mode.to_ascii_uppercase().into()) }
    }

    /// Into how many parts this mode cuts every device, where it does.
    fn parts(&self) -> Option<u16> {
        match self.mode.as_deref()? {
            "DPX" => Some(2),
            "TPX" => Some(3),
            "QPX" => Some(4),
            // CPX: one part for each compute die, of which devices have six or eight.
            _ => None,
        }
    }
}

/// Completes devices with what follows from the others. `cuts` are in the order of the devices.
pub(crate) fn settle(snapshot: &mut Snapshot, cuts: &[Cut]) {
    partitions(&mut snapshot.devices, cuts);
    shared_sensors(snapshot);
    for device in &mut snapshot.devices {
        if device.health.is_none() && is_alive(device) {
            device.health = Some(Health::Healthy);
        }
    }
}

/// Devices at one place on the bus are parts of one; so is one whose mode says it is cut.
fn partitions(devices: &mut [Found], cuts: &[Cut]) {
    let mut at: BTreeMap<PciAddress, u16> = BTreeMap::new();
    for address in devices.iter().filter_map(|device| device.pci) {
        let count = at.entry(address).or_default();
        *count = count.saturating_add(1);
    }
    let mut seen: BTreeMap<Option<PciAddress>, u16> = BTreeMap::new();
    for (device, cut) in devices.iter_mut().zip(cuts) {
        let shared = device.pci.and_then(|address| at.get(&address)).copied().filter(|&count| count > 1);
        let is_cut = cut.mode.as_deref().map_or(cut.id.is_some_and(|id| id > 0), |mode| mode != "SPX");
        let order = seen.entry(device.pci).or_default();
        let turn = *order;
        *order = order.saturating_add(1);
        if shared.is_none() && !is_cut {
            continue;
        }
        let parts = cut.parts().or(shared);
        // Without a place on the bus the parts of several cards follow each other.
        let turn = if device.pci.is_none() { parts.map_or(turn, |parts| turn % parts.max(1)) } else { turn };
        device.partition = Some(Partition::Amd { id: cut.id.unwrap_or(turn), mode: cut.mode.clone(), parts });
    }
}

/// Two dies of one card (MI250) carry one id and have one power sensor: a second die that says 0 W says nothing.
///
/// One that repeats the first is believed, with a warning.
fn shared_sensors(snapshot: &mut Snapshot) {
    let mut powers: BTreeMap<Arc<str>, Watts> = BTreeMap::new();
    let die = |device: &Found| device.uuid.clone().filter(|_| device.partition.is_none());
    for device in &snapshot.devices {
        if let (Some(uuid), Told::Value(watts)) = (die(device), &device.power) {
            let most = powers.entry(uuid).or_default();
            *most = (*most).max(*watts);
        }
    }
    let mut repeated: BTreeMap<Arc<str>, usize> = BTreeMap::new();
    for device in &mut snapshot.devices {
        let Some((uuid, most)) = die(device).and_then(|uuid| powers.get(&uuid).map(|&most| (uuid, most))) else {
            continue;
        };
        if most > Watts(0) && device.power == Told::Value(Watts(0)) {
            device.power = Told::Unsupported("measured at the other die of the card".into());
        } else if device.power == Told::Value(most) {
            *repeated.entry(uuid).or_default() += 1;
        }
    }
    for (uuid, count) in repeated.into_iter().filter(|&(_, count)| count > 1) {
        snapshot.warn(format!("{count} dies of {uuid} report the same power, which may be that of the whole card"));
    }
}

/// Whether a device answered for itself just now. The power limit and the size of memory are no such answer.
fn is_alive(device: &Found) -> bool {
    device.utilization.value().is_some()
        || device.temperature_c.value().is_some()
        || device.power.value().is_some()
        || device.memory.used.value().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address;
    use gpupool_core::device::Vendor;

    fn at(address: &str) -> Found {
        let mut found = Found::new(Vendor::Amd);
        found.pci = address::parse(address);
        found
    }

    fn parts(devices: Vec<Found>, cuts: &[Cut]) -> Vec<Option<Partition>> {
        let mut snapshot = Snapshot { devices, ..Snapshot::default() };
        settle(&mut snapshot, cuts);
        snapshot.devices.into_iter().map(|device| device.partition).collect()
    }

    #[test]
    fn devices_at_one_place_are_parts_of_one() {
        let cuts: Vec<Cut> = ["0", "1", "0"].iter().map(|id| Cut::new(Some(id), None)).collect();
        let found = parts(vec![at("0000:01:00.0"), at("0000:01:00.0"), at("0001:01:00.0")], &cuts);
        assert_eq!(found[1], Some(Partition::Amd { id: 1, mode: None, parts: Some(2) }));
        assert_eq!(found[2], None);
    }

    #[test]
    fn a_device_in_one_piece_is_no_partition() {
        for mode in ["SPX", "N/A", "", "spx"] {
            assert_eq!(parts(vec![at("01:00.0")], &[Cut::new(Some("0"), Some(mode))]), [None], "{mode}");
        }
    }

    #[test]
    fn a_mode_says_that_a_device_is_cut_even_where_its_parts_are_nameless() {
        let cut = Cut::new(None, Some("DPX"));
        let found = parts(vec![Found::new(Vendor::Amd); 4], &vec![cut; 4]);
        let ids: Vec<_> = found.iter().flatten().map(Partition::number).collect();
        assert_eq!(ids, [Some(0), Some(1), Some(0), Some(1)]);
    }

    #[test]
    fn the_second_die_of_a_card_never_draws_zero_watts() {
        let die = |watts| {
            let mut found = Found::new(Vendor::Amd);
            found.uuid = Some("GPU-0000000000000001".into());
            found.power = Told::Value(Watts(watts));
            found
        };
        let mut snapshot = Snapshot { devices: vec![die(89_000), die(0)], ..Snapshot::default() };
        settle(&mut snapshot, &[Cut::default(), Cut::default()]);
        assert_eq!(snapshot.devices[0].power, Told::Value(Watts(89_000)));
        assert!(matches!(snapshot.devices[1].power, Told::Unsupported(_)));
        assert!(snapshot.warnings.is_empty());
        let mut twins = Snapshot { devices: vec![die(89_000), die(89_000)], ..Snapshot::default() };
        settle(&mut twins, &[Cut::default(), Cut::default()]);
        assert_eq!((&twins.devices[1].power, twins.warnings.len()), (&Told::Value(Watts(89_000)), 1));
    }
}

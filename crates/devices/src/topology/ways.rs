//! The ways from the processor to devices, and how near two devices are by where their ways part.

use std::collections::BTreeMap;

use gpupool_core::device::{LinkKind, PciAddress};

use crate::snapshot::FoundLink;

/// One stop on the way from the processor to a device; its number is unique among the stops of its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// A NUMA node.
    Numa(u64),
    /// A PCI host bridge.
    HostBridge(u64),
    /// A PCI bridge: a switch, or a port of one.
    Bridge(u64),
}

impl Stop {
    /// The bridge at this place on the bus.
    pub(crate) fn bridge_at(pci: PciAddress) -> Self {
        let place = u64::from(pci.bus) << 8 | u64::from(pci.device) << 3 | u64::from(pci.function);
        Self::Bridge(u64::from(pci.domain) << 16 | place)
    }
}

/// How a source lists a PCIe switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Switches {
    /// As one bridge (NCCL).
    AsOne,
    /// As the bridge of its upstream port with those of its downstream ports below (the kernel, hwloc).
    ByPort,
}

/// Links that are faster than PCIe, by the places of the devices.
#[derive(Debug, Default)]
pub(crate) struct FastLinks(BTreeMap<(usize, usize), LinkKind>);

impl FastLinks {
    /// Joins two devices, keeping the nearer link where there are several; a device is not joined to itself.
    pub(crate) fn join(&mut self, one: usize, other: usize, kind: LinkKind) {
        if one == other {
            return;
        }
        let link = self.0.entry((one.min(other), one.max(other))).or_insert(kind);
        if kind.distance() < link.distance() {
            *link = kind;
        }
    }

    /// Joins all devices that have lanes into one NVLink switch fabric, by as many as both have.
    pub(crate) fn join_by_switch(&mut self, lanes: &[u32]) {
        let joined = |place: usize| lanes.get(place).copied().filter(|&lanes| lanes > 0);
        for a in 0..lanes.len() {
            for b in a + 1..lanes.len() {
                if let (Some(mine), Some(others)) = (joined(a), joined(b)) {
                    self.join(a, b, nvlink(mine.min(others)));
                }
            }
        }
    }
}

/// NVLink with so many lanes.
pub(crate) fn nvlink(lanes: u32) -> LinkKind {
    LinkKind::NvLink(u8::try_from(lanes).unwrap_or(u8::MAX))
}

/// The link of every pair of devices: the fast one where there is one, else how their ways meet.
pub(crate) fn links(ways: &[Vec<Stop>], switches: Switches, fast: &FastLinks) -> Vec<FoundLink> {
    let mut links = Vec::new();
    for (a, way) in ways.iter().enumerate() {
        for (b, other) in ways.iter().enumerate().skip(a + 1) {
            let slow = between(way, other, switches);
            let fast = fast.0.get(&(a, b)).copied().filter(|fast| fast.distance() < slow.distance());
            links.push(FoundLink { a, b, kind: fast.unwrap_or(slow) });
        }
    }
    links
}

/// How two ways from the processor meet.
fn between(one: &[Stop], other: &[Stop], switches: Switches) -> LinkKind {
    let shared = one.iter().zip(other).take_while(|(a, b)| a == b).count();
    let apart = one.len().max(other.len()).saturating_sub(shared);
    let in_one_switch = match switches {
        Switches::AsOne => apart == 0,
        Switches::ByPort => apart <= 1,
    };
    match shared.checked_sub(1).and_then(|last| one.get(last)) {
        Some(Stop::Bridge(_)) if in_one_switch => LinkKind::PcieSwitch,
        Some(Stop::Bridge(_)) => LinkKind::PcieSwitches,
        Some(Stop::HostBridge(_)) => LinkKind::HostBridge,
        Some(Stop::Numa(_)) => LinkKind::SameNuma,
        None => LinkKind::CrossNuma,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Stop::{Bridge, HostBridge, Numa};

    #[test]
    fn devices_are_as_near_as_the_last_stop_they_share() {
        let way = [Numa(0), HostBridge(1), Bridge(2), Bridge(3)];
        let by_port = |other: &[Stop]| between(&way, other, Switches::ByPort);
        assert_eq!(by_port(&[Numa(0), HostBridge(1), Bridge(2), Bridge(4)]), LinkKind::PcieSwitch);
        assert_eq!(by_port(&[Numa(0), HostBridge(1), Bridge(2), Bridge(4), Bridge(5)]), LinkKind::PcieSwitches);
        assert_eq!(by_port(&[Numa(0), HostBridge(1), Bridge(9)]), LinkKind::HostBridge);
        assert_eq!(by_port(&[Numa(0), HostBridge(7), Bridge(2)]), LinkKind::SameNuma);
        assert_eq!(by_port(&[Numa(1), HostBridge(1)]), LinkKind::CrossNuma);
        assert_eq!(by_port(&[]), LinkKind::CrossNuma);
        assert_eq!(between(&way, &way, Switches::AsOne), LinkKind::PcieSwitch);
        assert_eq!(between(&way, &way[..3], Switches::AsOne), LinkKind::PcieSwitches);
    }

    #[test]
    fn a_fast_link_takes_the_place_of_the_way_over_the_bus() {
        let mut fast = FastLinks::default();
        fast.join(1, 0, LinkKind::NvLink(2));
        fast.join(0, 1, LinkKind::NvLink(4));
        fast.join(2, 2, LinkKind::NvLink(9));
        fast.join_by_switch(&[0, 6, 18]);
        let ways = vec![vec![Numa(0)]; 3];
        let kinds: Vec<_> = links(&ways, Switches::AsOne, &fast).iter().map(|link| link.kind).collect();
        assert_eq!(kinds, [LinkKind::NvLink(4), LinkKind::SameNuma, LinkKind::NvLink(6)]);
    }
}

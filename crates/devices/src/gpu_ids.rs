//! Small numbers for devices that stay the same after a restart.

use std::collections::{BTreeMap, BTreeSet};

use gpupool_core::device::DeviceIdentity;
use gpupool_core::ids::GpuId;

/// Which number each identity has. Numbers once given are never given to another device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuIds {
    known: BTreeMap<DeviceIdentity, GpuId>,
    used: BTreeSet<GpuId>,
}

impl GpuIds {
    /// The numbers kept from before.
    pub fn restore(known: impl IntoIterator<Item = (DeviceIdentity, GpuId)>) -> Self {
        let known: BTreeMap<_, _> = known.into_iter().collect();
        let used = known.values().copied().collect();
        Self { known, used }
    }

    /// The numbers of these devices, in their order: the old one for a device seen before, else the smallest that was
    /// never used.
    pub fn assign(&mut self, identities: &[DeviceIdentity]) -> Vec<GpuId> {
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
    use super::*;
    use proptest::prelude::*;

    fn named(name: &str) -> DeviceIdentity {
        DeviceIdentity::Uuid(name.into())
    }

    #[test]
    fn a_device_keeps_its_number_whatever_the_order_and_whoever_left() {
        let mut ids = GpuIds::default();
        assert_eq!(ids.assign(&[named("a"), named("b"), named("c")]), [GpuId(0), GpuId(1), GpuId(2)]);
        let mut ids = GpuIds::restore(ids.iter().map(|(identity, id)| (identity.clone(), id)));
        assert_eq!(ids.assign(&[named("c"), named("new"), named("a")]), [GpuId(2), GpuId(3), GpuId(0)]);
    }

    proptest! {
        #[test]
        fn no_two_devices_share_a_number_and_none_changes_it(rounds in prop::collection::vec(prop::collection::vec(0u8..12, 0..8), 1..8)) {
            let mut ids = GpuIds::default();
            let mut seen: BTreeMap<u8, GpuId> = BTreeMap::new();
            for round in rounds {
                let identities: Vec<_> = round.iter().map(|name| named(&name.to_string())).collect();
                for (name, id) in round.iter().zip(ids.assign(&identities)) {
                    prop_assert_eq!(*seen.entry(*name).or_insert(id), id);
                }
                ids = GpuIds::restore(ids.iter().map(|(identity, id)| (identity.clone(), id)));
            }
            let distinct: BTreeSet<_> = seen.values().collect();
            prop_assert_eq!(distinct.len(), seen.len());
        }
    }
}

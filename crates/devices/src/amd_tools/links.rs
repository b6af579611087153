//! Links between devices, gathered from both ends before they are kept once.

use std::collections::BTreeMap;

use gpupool_core::device::LinkKind;

use crate::amd_sysfs::links::hops as xgmi_hops;
use crate::snapshot::{FoundLink, Snapshot};

/// What a tool said about the way from one device to another; any of it may be missing.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Way<'a> {
    /// `XGMI`, `PCIE`, `SELF`, …
    pub kind: Option<&'a str>,
    /// Steps on the way.
    pub hops: Option<u64>,
    /// AMD's own measure of how far it is.
    pub weight: Option<u64>,
}

impl Way<'_> {
    /// The link it is; `None` for a device and itself, and where nothing says what joins them.
    ///
    /// Over PCIe, AMD's library counts two hops where both devices hang on one NUMA node, three where these are
    /// neighbours, four otherwise (`rsmi_topo_get_link_type` in github.com/ROCm/rocm_smi_lib, src/rocm_smi.cc). The
    /// weight is the sum of the kernel's (`rsmi_topo_get_link_weight`): 20 from each device to its node, and what lies
    /// between the nodes. Neither tells of switches.
    pub(crate) fn link(self) -> Option<LinkKind> {
        let near = match (self.hops, self.weight) {
            (Some(hops), _) => (1..=2).contains(&hops),
            (None, Some(weight)) => (1..=40).contains(&weight),
            (None, None) => false,
        };
        match self.kind?.to_ascii_uppercase().as_str() {
            "XGMI" => {
                let hops = self.hops.map(|hops| hops.clamp(1, 255) as u8);
                Some(LinkKind::Xgmi(hops.or(self.weight.map(xgmi_hops)).unwrap_or(1)))
            }
            "PCIE" | "PCIEXPRESS" | "PCI" => Some(if near { LinkKind::SameNuma } else { LinkKind::CrossNuma }),
            _ => None,
        }
    }
}

/// Links by pair of places; of several between the same two the nearest.
#[derive(Debug, Default)]
pub(crate) struct Links(BTreeMap<(usize, usize), LinkKind>);

impl Links {
    /// Joins two places, unless they are one.
    pub(crate) fn join(&mut self, one: usize, other: usize, kind: LinkKind) {
        if one == other {
            return;
        }
        let kept = self.0.entry((one.min(other), one.max(other))).or_insert(kind);
        if kind.distance() < kept.distance() {
            *kept = kind;
        }
    }

    /// Gives a snapshot without links those between its devices.
    pub(crate) fn give_to(self, snapshot: &mut Snapshot) {
        let devices = snapshot.devices.len();
        let known = self.0.into_iter().filter(|&((_, b), _)| b < devices);
        snapshot.links = known.map(|((a, b), kind)| FoundLink { a, b, kind }).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(kind: &str, hops: Option<u64>, weight: Option<u64>) -> Option<LinkKind> {
        Way { kind: Some(kind), hops, weight }.link()
    }

    #[test]
    fn a_way_becomes_the_link_it_is() {
        assert_eq!(link("XGMI", Some(1), Some(15)), Some(LinkKind::Xgmi(1)));
        assert_eq!(link("xgmi", None, None), Some(LinkKind::Xgmi(1)));
        assert_eq!(link("XGMI", None, Some(30)), Some(LinkKind::Xgmi(2)));
        assert_eq!(link("XGMI", None, Some(13)), Some(LinkKind::Xgmi(1)));
        assert_eq!(link("PCIE", Some(2), Some(40)), Some(LinkKind::SameNuma));
        assert_eq!(link("PCIE", Some(3), Some(72)), Some(LinkKind::CrossNuma));
        assert_eq!(link("PCIE", None, Some(40)), Some(LinkKind::SameNuma));
        assert_eq!(link("PCIE", None, None), Some(LinkKind::CrossNuma));
        assert_eq!(link("SELF", Some(0), Some(0)), None);
        assert_eq!(link("N/A", Some(1), None), None);
    }
}

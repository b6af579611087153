//! How simulated devices are joined: by the fabric of their model, else by PCIe in one NUMA node or across two.

use gpupool_core::device::LinkKind;

use super::layout::Device;
use crate::snapshot::FoundLink;

/// The link of each pair of devices. MIG instances have none: they cannot talk to each other.
pub(crate) fn links(devices: &[Device]) -> Vec<FoundLink> {
    let joinable = |&(_, device): &(usize, &Device)| !device.is_mig_instance();
    let ends: Vec<(usize, &Device)> = devices.iter().enumerate().filter(joinable).collect();
    let from = |(place, &(a, one)): (usize, &(usize, &Device))| {
        let rest = ends[place + 1..].iter();
        rest.map(|&(b, other)| FoundLink { a, b, kind: kind(one, other) }).collect::<Vec<_>>()
    };
    ends.iter().enumerate().flat_map(from).collect()
}

fn kind(one: &Device, other: &Device) -> LinkKind {
    let akin = one.model == other.model && one.group == other.group && one.fabric == other.fabric;
    match one.fabric {
        Some(fabric) if akin => fabric.link,
        _ if one.numa == other.numa => LinkKind::SameNuma,
        _ => LinkKind::CrossNuma,
    }
}

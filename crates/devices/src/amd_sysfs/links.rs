//! How the GPUs of the compute topology are joined.

use std::collections::BTreeMap;

use gpupool_core::device::LinkKind;

use super::kfd::{Bus, Node};
use crate::snapshot::FoundLink;

/// Every pair of more GPUs than these is not looked at; direct links still are.
const MOST_PAIRED: usize = 256;

/// Links between GPUs, each given with its place among the devices.
///
/// Direct ones are as the driver lists them. Every other pair is as near as the processors they hang on: nothing in the
/// topology tells how many switches lie between.
pub(crate) fn links(gpus: &[(usize, &Node)], cpus: &[u32]) -> Vec<FoundLink> {
    let places: BTreeMap<u32, usize> = gpus.iter().map(|(place, node)| (node.number, *place)).collect();
    let mut kinds: BTreeMap<(usize, usize), LinkKind> = BTreeMap::new();
    for (place, node) in gpus {
        for link in node.links.iter().filter(|link| link.bus == Bus::Xgmi) {
            if let Some(&other) = places.get(&link.to).filter(|other| *other != place) {
                nearer(&mut kinds, *place, other, LinkKind::Xgmi(hops(link.weight)));
            }
        }
    }
    let homes: Vec<(usize, u32)> =
        gpus.iter().take(MOST_PAIRED).filter_map(|(place, node)| Some((*place, home(node, cpus)?))).collect();
    for (at, (place, home)) in homes.iter().enumerate() {
        for (other, other_home) in &homes[at + 1..] {
            let kind = if home == other_home { LinkKind::SameNuma } else { LinkKind::CrossNuma };
            nearer(&mut kinds, *place, *other, kind);
        }
    }
    kinds.into_iter().map(|((a, b), kind)| FoundLink { a, b, kind }).collect()
}

/// The processor a GPU hangs on: the nearest of those it is linked to, or itself where it is one.
pub(crate) fn home(node: &Node, cpus: &[u32]) -> Option<u32> {
    if cpus.contains(&node.number) {
        return Some(node.number);
    }
    node.links.iter().filter(|link| cpus.contains(&link.to)).min_by_key(|link| link.weight).map(|link| link.to)
}

/// The driver weighs a hop between cards 15 and one within a card 13; between partitions of two cards it adds up three.
pub(crate) const fn hops(weight: u64) -> u8 {
    match weight.saturating_add(7) / 15 {
        0 => 1,
        hops if hops > 100 => 100,
        hops => hops as u8,
    }
}

fn nearer(kinds: &mut BTreeMap<(usize, usize), LinkKind>, one: usize, other: usize, kind: LinkKind) {
    let known = kinds.entry((one.min(other), one.max(other))).or_insert(kind);
    if kind.distance() < known.distance() {
        *known = kind;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amd_sysfs::kfd;
    use crate::amd_sysfs::tree::Tree;

    #[test]
    fn the_weight_of_a_link_counts_its_hops() {
        for (weight, expected) in [(13, 1), (15, 1), (30, 2), (41, 3), (45, 3), (0, 1), (u64::MAX >> 1, 100)] {
            assert_eq!(hops(weight), expected, "{weight}");
        }
    }

    #[test]
    fn gpus_without_a_direct_link_are_as_near_as_their_processors() {
        let tree = Tree::new();
        tree.kfd_cpu(0);
        tree.kfd_cpu(1);
        for (gpu, cpu) in [(2, 0), (3, 0), (4, 1)] {
            tree.kfd_gpu(gpu, &format!("location_id {}", gpu * 256), gpu, 1 << 30);
            tree.kfd_link(gpu, "io_links", 0, &format!("type 2\nnode_to {cpu}\nweight 20"));
            tree.kfd_link(gpu, "p2p_links", 0, &format!("type 2\nnode_to {}\nweight 52", 1 - cpu));
        }
        tree.kfd_link(3, "io_links", 1, "type 11\nnode_to 4\nweight 15");
        let topology = kfd::read(&tree.path("class/kfd/kfd/topology/nodes"));
        let gpus: Vec<(usize, &Node)> = topology.gpus.iter().enumerate().collect();
        let kinds: Vec<LinkKind> = links(&gpus, &topology.cpus).iter().map(|link| link.kind).collect();
        assert_eq!(kinds, [LinkKind::SameNuma, LinkKind::CrossNuma, LinkKind::Xgmi(1)]);
    }
}

//! Indexes over the devices of one kind: the next device with enough free share, several orders, and distances between
//! the devices of a node.

use std::collections::{BTreeMap, BTreeSet};

use crate::device::{DeviceLink, LinkKind};
use crate::ids::{DeviceId, GpuId};
use crate::request::LoadThresholds;
use crate::units::{Percent, Share};

use super::{DeviceSlot, SlotTable};

/// Order of devices. It contains only devices with free share; equal keys go by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IndexOrder {
    /// Least free share first, then least free memory.
    LeastFree,
    /// Most free share first, then most free memory.
    MostFree,
    /// Lowest mean of measured utilization and promised share first.
    LeastLoaded,
    /// Lowest memory % + utilization % first.
    LeastUsed,
}

const ORDERS: [IndexOrder; 4] =
    [IndexOrder::LeastFree, IndexOrder::MostFree, IndexOrder::LeastLoaded, IndexOrder::LeastUsed];
const MEMORY_BITS: u32 = 48;
const MEMORY_MASK: u64 = (1 << MEMORY_BITS) - 1;

/// Position of a device in an order.
pub(crate) type IndexKey = (u64, DeviceId);

/// Positions of a device in the existing orders before a change.
pub(super) struct DeviceIndexKeys {
    orders: [Option<IndexKey>; ORDERS.len()],
}

/// Search structures over the devices of one kind.
#[derive(Debug)]
pub(crate) struct DeviceKindIndex {
    free: MaxSegmentTree,
    foreign_memory: MaxSegmentTree,
    foreign_utilization: MaxSegmentTree,
    /// Each order exists from its first use on.
    orders: [Option<BTreeSet<IndexKey>>; ORDERS.len()],
}

impl DeviceKindIndex {
    pub fn new(members: &[DeviceId], devices: &SlotTable<DeviceSlot>) -> Self {
        let tree = |value: fn(&DeviceSlot) -> u16| MaxSegmentTree::new(members.iter().map(|id| value(&devices[id.0])));
        Self {
            free: tree(|slot| slot.free_share().0 as u16),
            foreign_memory: tree(|slot| foreign_levels(slot).0),
            foreign_utilization: tree(|slot| foreign_levels(slot).1),
            orders: [const { None }; ORDERS.len()],
        }
    }

    /// Whether the foreign load of every device is known to be below these thresholds; may be false by rounding.
    pub fn all_below(&self, thresholds: LoadThresholds) -> bool {
        let below = |level: u16, threshold: Percent| level < UNKNOWN && u32::from(level) * LEVEL_STEP < threshold.0;
        below(self.foreign_memory.max(), thresholds.memory)
            && below(self.foreign_utilization.max(), thresholds.utilization)
    }

    /// Returns the largest free share of a device.
    pub fn max_free_share(&self) -> Share {
        Share(u32::from(self.free.max()))
    }

    /// Returns the first position from `from` on with at least `share` free.
    pub fn first_with_free(&self, from: usize, share: Share) -> Option<usize> {
        self.free.first_at_least(from, share.0 as u16)
    }

    /// Returns devices in `order`, without those known to have less than `share` free.
    pub fn in_order(&self, order: IndexOrder, share: Share) -> impl Iterator<Item = DeviceId> + '_ {
        let start = match order {
            IndexOrder::LeastFree => (u64::from(share.0) << MEMORY_BITS, DeviceId(0)),
            IndexOrder::MostFree | IndexOrder::LeastLoaded | IndexOrder::LeastUsed => (0, DeviceId(0)),
        };
        let end = match order {
            IndexOrder::MostFree => (u64::from(Share::WHOLE.0 - share.0 + 1) << MEMORY_BITS, DeviceId(0)),
            IndexOrder::LeastFree | IndexOrder::LeastLoaded | IndexOrder::LeastUsed => (u64::MAX, DeviceId(u32::MAX)),
        };
        let set = self.orders[order as usize].as_ref();
        debug_assert!(set.is_some(), "{order:?} was not built");
        set.into_iter().flat_map(move |set| set.range(start..end)).map(|(_, device)| *device)
    }

    pub(super) fn build_order(&mut self, order: IndexOrder, members: &[DeviceId], devices: &SlotTable<DeviceSlot>) {
        let set = &mut self.orders[order as usize];
        if set.is_none() {
            *set = Some(members.iter().filter_map(|&id| index_key(order, id, &devices[id.0])).collect());
        }
    }

    pub(super) fn index_keys(&self, id: DeviceId, slot: &DeviceSlot) -> DeviceIndexKeys {
        DeviceIndexKeys {
            orders: ORDERS.map(|order| self.orders[order as usize].as_ref().and_then(|_| index_key(order, id, slot))),
        }
    }

    pub(super) fn update(&mut self, id: DeviceId, slot: &DeviceSlot, before: DeviceIndexKeys) {
        let position = slot.position as usize;
        self.free.set(position, slot.free_share().0 as u16);
        let (memory, utilization) = foreign_levels(slot);
        self.foreign_memory.set(position, memory);
        self.foreign_utilization.set(position, utilization);
        for (order, before) in ORDERS.into_iter().zip(before.orders) {
            let Some(set) = &mut self.orders[order as usize] else { continue };
            let after = index_key(order, id, slot);
            if before != after {
                if let Some(before) = before {
                    set.remove(&before);
                }
                set.extend(after);
            }
        }
    }

    pub(super) fn check(&self, devices: &SlotTable<DeviceSlot>) -> Result<(), String> {
        for (order, set) in ORDERS.into_iter().zip(&self.orders) {
            for &(stored, id) in set.iter().flatten() {
                if index_key(order, id, &devices[id.0]) != Some((stored, id)) {
                    return Err(format!("device {id} is at the wrong position in {order:?}"));
                }
            }
        }
        Ok(())
    }
}

/// Step of the foreign load in the index, in thousandths of a percent, rounded up.
const LEVEL_STEP: u32 = 100;
/// Level of unknown foreign load.
const UNKNOWN: u16 = u16::MAX;

/// Returns a device's foreign memory and utilization as levels.
fn foreign_levels(slot: &DeviceSlot) -> (u16, u16) {
    let Some(foreign) = slot.foreign else { return (UNKNOWN, UNKNOWN) };
    let level = |percent: Percent| percent.0.div_ceil(LEVEL_STEP).min(u32::from(UNKNOWN)) as u16;
    let memory = foreign.memory.zip(slot.facts.memory).map(|(used, memory)| Percent::of(used, memory.total));
    let unreported = if foreign.processes == 0 { 0 } else { UNKNOWN };
    (memory.map_or(0, level), foreign.utilization.map_or(unreported, level))
}

fn index_key(order: IndexOrder, id: DeviceId, slot: &DeviceSlot) -> Option<IndexKey> {
    let free = slot.free_share();
    if free.is_zero() {
        return None;
    }
    let memory = slot.unpromised_memory().as_mib().min(MEMORY_MASK);
    let key = match order {
        IndexOrder::LeastFree => u64::from(free.0) << MEMORY_BITS | memory,
        IndexOrder::MostFree => u64::from(Share::WHOLE.0 - free.0) << MEMORY_BITS | (MEMORY_MASK - memory),
        IndexOrder::LeastLoaded => mean_load(slot),
        IndexOrder::LeastUsed => percent_used(slot),
    };
    Some((key, id))
}

/// Returns the mean of measured utilization and promised share, in thousandths of a percent.
pub(crate) fn mean_load(slot: &DeviceSlot) -> u64 {
    (u64::from(slot.measured_utilization().0) + u64::from(slot.promised.0) * 100) / 2
}

/// Returns memory % + utilization %, in thousandths of a percent.
pub(crate) fn percent_used(slot: &DeviceSlot) -> u64 {
    u64::from(slot.memory_percent().0) + u64::from(slot.utilization_percent().0)
}

/// Segment tree: finds the maximum, and the first value that is large enough, in logarithmic time.
#[derive(Debug)]
struct MaxSegmentTree {
    leaves: usize,
    nodes: Vec<u16>,
}

impl MaxSegmentTree {
    fn new(values: impl ExactSizeIterator<Item = u16>) -> Self {
        let leaves = values.len().next_power_of_two().max(1);
        let mut nodes = vec![0; 2 * leaves];
        for (leaf, value) in nodes[leaves..].iter_mut().zip(values) {
            *leaf = value;
        }
        for i in (1..leaves).rev() {
            nodes[i] = nodes[2 * i].max(nodes[2 * i + 1]);
        }
        Self { leaves, nodes }
    }

    fn max(&self) -> u16 {
        self.nodes[1]
    }

    fn set(&mut self, position: usize, value: u16) {
        let mut i = self.leaves + position;
        self.nodes[i] = value;
        while i > 1 {
            i /= 2;
            let max = self.nodes[2 * i].max(self.nodes[2 * i + 1]);
            if self.nodes[i] == max {
                break;
            }
            self.nodes[i] = max;
        }
    }

    /// Returns the first position from `from` on whose value is at least `least` (which is not 0).
    fn first_at_least(&self, from: usize, least: u16) -> Option<usize> {
        if from >= self.leaves || self.nodes[1] < least {
            return None;
        }
        let mut i = self.leaves + from;
        while self.nodes[i] < least {
            // Leave every subtree that lies wholly to the right of a left child, then step to its sibling.
            while i % 2 == 1 {
                if i == 1 {
                    return None;
                }
                i /= 2;
            }
            if i == 0 || i + 1 >= self.nodes.len() {
                return None;
            }
            i += 1;
        }
        while i < self.leaves {
            i = if self.nodes[2 * i] >= least { 2 * i } else { 2 * i + 1 };
        }
        Some(i - self.leaves)
    }
}

/// Number of device sets up to which every set is tried.
const MAX_EXHAUSTIVE_SETS: u64 = 5_000;

/// Distances between the devices of a node, by their positions on the node.
#[derive(Debug, Clone)]
pub(crate) struct LinkDistances {
    /// Matrix row of each position. Positions without a link share the last row, which is far from all.
    rows: Vec<usize>,
    width: usize,
    matrix: Vec<u16>,
}

impl LinkDistances {
    /// Computes distances from `links` between the devices with these numbers; `None` if no link is known.
    pub fn new(links: &[DeviceLink], gpu_ids: impl Iterator<Item = GpuId>) -> Option<Self> {
        if links.is_empty() {
            return None;
        }
        let positions: BTreeMap<GpuId, usize> =
            gpu_ids.enumerate().map(|(position, gpu_id)| (gpu_id, position)).collect();
        let known: Vec<(usize, usize, u16)> = links
            .iter()
            .filter_map(|link| Some((*positions.get(&link.a)?, *positions.get(&link.b)?, link.kind.distance())))
            .collect();
        let mut linked: Vec<usize> = known.iter().flat_map(|(a, b, _)| [*a, *b]).collect();
        linked.sort_unstable();
        linked.dedup();
        let width = linked.len() + 1;
        let mut rows = vec![linked.len(); positions.len()];
        linked.iter().enumerate().for_each(|(row, position)| rows[*position] = row);
        let mut matrix = vec![LinkKind::CrossNuma.distance(); width * width];
        for &(a, b, distance) in &known {
            let (a, b) = (rows[a], rows[b]);
            for cell in [a * width + b, b * width + a] {
                matrix[cell] = matrix[cell].min(distance);
            }
        }
        (!known.is_empty()).then_some(Self { rows, width, matrix })
    }

    fn distance(&self, a: usize, b: usize) -> u32 {
        u32::from(self.matrix[self.rows[a] * self.width + self.rows[b]])
    }

    fn sum(&self, positions: &[usize]) -> u32 {
        let pairs = positions.iter().enumerate().flat_map(|(i, a)| positions[i + 1..].iter().map(move |b| (*a, *b)));
        pairs.map(|(a, b)| self.distance(a, b)).sum()
    }

    /// Returns the `wanted` candidates that are closest together: least sum of distances over all pairs, then lowest
    /// numbers. Few sets are all tried; otherwise each candidate gathers its nearest.
    pub fn closest(&self, candidates: &[usize], wanted: usize) -> Vec<usize> {
        debug_assert!(wanted <= candidates.len());
        if binomial(candidates.len() as u64, wanted as u64) <= MAX_EXHAUSTIVE_SETS {
            return self.closest_exhaustively(candidates, wanted);
        }
        let gathered = candidates.iter().map(|&start| self.gather_nearest(start, candidates, wanted));
        gathered.min_by_key(|set| (self.sum(set), set.clone())).unwrap_or_default()
    }

    fn closest_exhaustively(&self, candidates: &[usize], wanted: usize) -> Vec<usize> {
        let mut chosen: Vec<usize> = (0..wanted).collect();
        let mut best: Option<(u32, Vec<usize>)> = None;
        loop {
            let set: Vec<usize> = chosen.iter().map(|&i| candidates[i]).collect();
            let sum = self.sum(&set);
            if best.as_ref().is_none_or(|(least, _)| sum < *least) {
                best = Some((sum, set));
            }
            let room = |i: usize| candidates.len() - wanted + i;
            let Some(last) = (0..wanted).rev().find(|&i| chosen[i] < room(i)) else { break };
            chosen[last] += 1;
            for i in last + 1..wanted {
                chosen[i] = chosen[i - 1] + 1;
            }
        }
        best.map(|(_, set)| set).unwrap_or_default()
    }

    fn gather_nearest(&self, start: usize, candidates: &[usize], wanted: usize) -> Vec<usize> {
        let mut set = vec![start];
        while set.len() < wanted {
            let left = candidates.iter().copied().filter(|candidate| !set.contains(candidate));
            let nearest = left
                .min_by_key(|&candidate| (set.iter().map(|&s| self.distance(s, candidate)).sum::<u32>(), candidate));
            match nearest {
                Some(nearest) => set.push(nearest),
                None => break,
            }
        }
        set.sort_unstable();
        set
    }
}

/// Returns the number of ways to choose `k` of `n`, or a large number.
fn binomial(n: u64, k: u64) -> u64 {
    (0..k.min(n - k)).try_fold(1_u64, |ways, i| Some(ways.checked_mul(n - i)? / (i + 1))).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_tree_agrees_with_a_scan(
            values in prop::collection::vec(0_u16..20, 1..70),
            sets in prop::collection::vec((any::<prop::sample::Index>(), 0_u16..20), 0..50),
            from in 0_usize..80,
            least in 1_u16..20,
        ) {
            let mut scanned = values.clone();
            let mut tree = MaxSegmentTree::new(values.into_iter());
            for (index, value) in sets {
                let position = index.index(scanned.len());
                scanned[position] = value;
                tree.set(position, value);
            }
            let expected = scanned.iter().enumerate().skip(from).find(|(_, v)| **v >= least).map(|(i, _)| i);
            prop_assert_eq!(tree.first_at_least(from, least), expected);
            prop_assert_eq!(tree.max(), scanned.iter().copied().max().unwrap_or(0));
        }
    }

    fn pairs(count: u32, near: &[(u32, u32)]) -> LinkDistances {
        let link = |&(a, b)| DeviceLink { a: GpuId(a), b: GpuId(b), kind: LinkKind::NvLink(4) };
        LinkDistances::new(&near.iter().map(link).collect::<Vec<_>>(), (0..count).map(GpuId)).unwrap()
    }

    #[test]
    fn two_of_four_are_the_linked_pair() {
        let distances = pairs(4, &[(0, 2), (1, 3)]);
        assert_eq!(distances.closest(&[0, 1, 2, 3], 2), [0, 2]);
        assert_eq!(distances.closest(&[0, 1, 3], 2), [1, 3]);
        assert_eq!(distances.closest(&[0, 1], 2), [0, 1]);
    }

    #[test]
    fn many_candidates_are_gathered_and_few_are_all_tried() {
        let ring: Vec<(u32, u32)> = (8..16).flat_map(|a| (8..a).map(move |b| (a, b))).collect();
        let distances = pairs(20, &ring);
        let all: Vec<usize> = (0..20).collect();
        assert_eq!(distances.closest(&all, 8), (8..16).collect::<Vec<_>>());
    }

    #[test]
    fn no_known_link_means_no_distances() {
        let two = || (0..2).map(GpuId);
        assert!(LinkDistances::new(&[], two()).is_none());
        let elsewhere = DeviceLink { a: GpuId(0), b: GpuId(7), kind: LinkKind::PcieSwitch };
        assert!(LinkDistances::new(&[elsewhere], two()).is_none());
    }
}

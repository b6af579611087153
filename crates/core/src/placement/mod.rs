//! Placement of requests. Every strategy is exact:
//!
//! - `first-fit`: the lowest-numbered device that fits.
//! - `best-fit`: the device with the least share left over after placing, then the least memory, then the lowest number.
//! - `worst-fit`: the device with the most share left over, then the most memory, then the lowest number.
//! - `round-robin`: the lowest-numbered device after the one used last, then from the start.
//! - `load-balanced`: the lowest mean of measured utilization and promised share (the promised share alone if
//!   utilization is not reported), then the lowest number.
//! - `least-used`: the lowest memory % + utilization %, each the larger of measured and promised, then the lowest
//!   number.
//! - `paper-best-fit`, `fgd`, `least-fragmentation`: the node with the best score, then the lowest number; see
//!   `placement/scored.rs`.
//!
//! Several GPUs are always on one node, and the ones closest together by links; the strategy then chooses the node, by
//! its remaining share or by the mean over the chosen devices. Host-only requests go by remaining CPUs. Models that a
//! policy prefers are tried first.

mod fragmentation;
pub(crate) mod scored;

use crate::classes::{DeviceNeed, RequestClass, RequestClassId};
use crate::ids::{DeviceId, NodeId};
use crate::inventory::{DeviceInventory, DeviceKindId, DeviceSlot, IndexOrder, NodeSlot, mean_load, percent_used};
use crate::lease::DevicePromise;
use crate::request::{LoadThresholds, PlacementStrategy};
use crate::units::{PoolTime, Share};

/// Chosen node and the promises on its devices.
#[derive(Debug)]
pub(crate) struct PlacementChoice {
    pub node: NodeId,
    pub promises: Vec<DevicePromise>,
}

/// Search for the devices of one request.
pub(crate) struct PlacementSearch<'a> {
    pub inventory: &'a mut DeviceInventory,
    pub scorer: &'a mut scored::NodeScorer,
    pub id: RequestClassId,
    pub class: &'a RequestClass,
    pub reserved: &'a ReservedCapacity,
    /// Device used last, in a search by `round-robin`.
    pub last_device: Option<DeviceId>,
    /// Readings older than this are ignored for thresholds.
    pub stale_before: Option<PoolTime>,
}

impl PlacementSearch<'_> {
    /// Returns the best placement by the class's strategy, if there is one.
    pub fn find(&mut self) -> Option<PlacementChoice> {
        let class = self.class;
        if class.unsatisfiable.is_some() {
            return None;
        }
        let preferring = class.needs.iter().any(|need| need.preferred);
        let preferred = if preferring { self.find_among(|need| need.preferred) } else { None };
        preferred.or_else(|| self.find_among(|_| true))
    }

    fn find_among(&mut self, wanted: impl Fn(&DeviceNeed) -> bool) -> Option<PlacementChoice> {
        let class = self.class;
        match (class.shape.strategy, class.shape.gpus) {
            (strategy, _) if strategy.scores_nodes() => self.find_best_scored(&wanted),
            (_, 0) => self.find_host_only(),
            (strategy, 1) => {
                let need_room = |need: &&DeviceNeed| {
                    wanted(need)
                        && !self.reserved.contains_kind(need.kind)
                        && self.inventory.kind_index(need.kind).max_free_share() >= need.share
                };
                if !class.needs.iter().any(|need| need_room(&need)) {
                    return None;
                }
                let order = index_order(strategy);
                if let Some(order) = order {
                    self.inventory.build_order(order);
                }
                let device = self.find_one_device(order, &wanted)?;
                self.promise_devices(&[device])
            }
            _ => self.find_several(&wanted),
        }
    }

    fn promise_devices(&self, devices: &[DeviceId]) -> Option<PlacementChoice> {
        let node = self.inventory.device(*devices.first()?).node;
        let promise = |&device: &DeviceId| {
            let need = self.class.need_on(self.inventory.device(device).kind)?;
            Some(DevicePromise { device, share: need.share, memory: need.memory })
        };
        Some(PlacementChoice { node, promises: devices.iter().map(promise).collect::<Option<_>>()? })
    }

    /// Whether a device can take the class now.
    fn device_fits(&self, id: DeviceId, need: &DeviceNeed) -> bool {
        let slot = self.inventory.device(id);
        slot.free_share() >= need.share
            && self.class.could_use_device(id, slot.kind)
            && self.memory_fits(slot, need)
            && self.class.shape.max_allocations.is_none_or(|most| slot.leases.len() < usize::from(most))
            && self.class.shape.thresholds.is_none_or(|thresholds| is_below(slot, thresholds, self.stale_before))
            && !self.reserved.contains_device(id, slot)
    }

    fn memory_fits(&self, slot: &DeviceSlot, need: &DeviceNeed) -> bool {
        let foreign = match slot.foreign {
            Some(foreign) if self.class.shape.names_memory() && need.share < Share::WHOLE => foreign.memory,
            _ => None,
        };
        slot.unpromised_memory().saturating_sub(foreign.unwrap_or_default()) >= need.memory
    }

    /// Whether a node's host can take the class now.
    fn host_fits(&self, node: &NodeSlot) -> bool {
        let shape = &self.class.shape;
        !shape.needs_host()
            || (shape.cpus <= node.cpus_free()
                && shape.host_memory <= node.memory_free()
                && !self.reserved.contains_host(node, self.inventory))
    }
}

/// Whether the foreign load of a device is strictly below both thresholds.
///
/// False for a device without a reading or with a stale one.
pub(crate) fn is_below(slot: &DeviceSlot, thresholds: LoadThresholds, stale_before: Option<PoolTime>) -> bool {
    !slot.is_stale(stale_before) && slot.foreign_levels(slot.foreign).are_below(thresholds)
}

fn index_order(strategy: PlacementStrategy) -> Option<IndexOrder> {
    match strategy {
        PlacementStrategy::BestFit => Some(IndexOrder::LeastFree),
        PlacementStrategy::WorstFit => Some(IndexOrder::MostFree),
        PlacementStrategy::LoadBalanced => Some(IndexOrder::LeastLoaded),
        PlacementStrategy::LeastUsed => Some(IndexOrder::LeastUsed),
        PlacementStrategy::FirstFit
        | PlacementStrategy::RoundRobin
        | PlacementStrategy::PaperBestFit
        | PlacementStrategy::Fgd
        | PlacementStrategy::LeastFragmentation => None,
    }
}

// One GPU or a part of one: strategies that choose devices.

impl PlacementSearch<'_> {
    /// Returns the device that the strategy chooses among the wanted kinds.
    fn find_one_device(&self, order: Option<IndexOrder>, wanted: &impl Fn(&DeviceNeed) -> bool) -> Option<DeviceId> {
        let open = |need: &&DeviceNeed| wanted(need) && !self.reserved.contains_kind(need.kind);
        let needs = || self.class.needs.iter().filter(open);
        match order {
            Some(order) => {
                let best = needs().filter_map(|need| {
                    let device = self.first_in_order(need, order)?;
                    Some((self.device_rank(order, self.inventory.device(device), need), device))
                });
                best.min().map(|(_, device)| device)
            }
            None => {
                let first = |from: DeviceId| needs().filter_map(|need| self.first_fitting_from(need, from)).min();
                match self.last_device {
                    Some(last) => first(DeviceId(last.0 + 1)).or_else(|| first(DeviceId(0))),
                    None => first(DeviceId(0)),
                }
            }
        }
    }

    fn first_in_order(&self, need: &DeviceNeed, order: IndexOrder) -> Option<DeviceId> {
        self.inventory.kind_index(need.kind).in_order(order, need.share).find(|device| self.can_take(*device, need))
    }

    fn first_fitting_from(&self, need: &DeviceNeed, from: DeviceId) -> Option<DeviceId> {
        let members = &self.inventory.kinds[need.kind.0 as usize].members;
        let index = self.inventory.kind_index(need.kind);
        let mut position = members.partition_point(|member| *member < from);
        while let Some(found) = index.first_with_free(position, need.share) {
            if self.can_take(members[found], need) {
                return Some(members[found]);
            }
            position = found + 1;
        }
        None
    }

    fn can_take(&self, device: DeviceId, need: &DeviceNeed) -> bool {
        self.device_fits(device, need) && self.host_fits(self.inventory.node(self.inventory.device(device).node))
    }

    /// Returns the rank of a device across kinds, by the same measure as within one; lower is better.
    fn device_rank(&self, order: IndexOrder, slot: &DeviceSlot, need: &DeviceNeed) -> (u64, u64) {
        let share_left = u64::from((slot.free_share() - need.share).0);
        let memory_left = slot.unpromised_memory().saturating_sub(need.memory).0;
        match order {
            IndexOrder::LeastFree => (share_left, memory_left),
            IndexOrder::MostFree => (u64::MAX - share_left, u64::MAX - memory_left),
            IndexOrder::LeastLoaded => (mean_load(slot), 0),
            IndexOrder::LeastUsed => (percent_used(slot), 0),
        }
    }
}

// Several GPUs of one node, and host-only requests: strategies that choose nodes.

impl PlacementSearch<'_> {
    /// Returns devices on the node that the strategy chooses.
    fn find_several(&mut self, wanted: &impl Fn(&DeviceNeed) -> bool) -> Option<PlacementChoice> {
        let start = self.last_device.map_or(0, |last| self.inventory.device(last).node.0 + 1);
        let count = self.inventory.nodes.span();
        let in_turn = (start..count).chain(0..start.min(count)).map(NodeId);
        let mut found = in_turn.filter_map(|node| Some((node, self.closest_on_node(node, wanted)?)));
        let (_, devices) = match self.class.shape.strategy {
            PlacementStrategy::FirstFit | PlacementStrategy::RoundRobin => found.next(),
            _ => found.min_by_key(|(node, devices)| self.node_rank(*node, devices)),
        }?;
        self.promise_devices(&devices)
    }

    /// Returns the wanted number of devices on a node, closest together, if it has them.
    fn closest_on_node(&self, node: NodeId, wanted: &impl Fn(&DeviceNeed) -> bool) -> Option<Vec<DeviceId>> {
        let slot = self.inventory.nodes.get(node.0)?;
        let gpus = usize::from(self.class.shape.gpus);
        if !self.class.fits_shape(slot.shape) || !self.node_may_fit(slot) || !self.host_fits(slot) {
            return None;
        }
        let fits = |device: &DeviceId| {
            let need = self.class.need_on(self.inventory.device(*device).kind);
            need.is_some_and(|need| wanted(need) && self.device_fits(*device, need))
        };
        let fitting: Vec<usize> = (0..slot.devices.len()).filter(|&i| fits(&slot.devices[i])).collect();
        if fitting.len() < gpus {
            return None;
        }
        let positions = match slot.distances().filter(|_| fitting.len() > gpus) {
            Some(distances) => distances.closest(&fitting, gpus),
            None => fitting[..gpus].to_vec(),
        };
        Some(positions.into_iter().map(|position| slot.devices[position]).collect())
    }

    fn node_may_fit(&self, node: &NodeSlot) -> bool {
        let all_whole = self.class.needs.iter().all(|need| need.share == Share::WHOLE);
        !all_whole || node.fully_free >= u32::from(self.class.shape.gpus)
    }

    /// Returns the rank of a node; lower is better, and ties go to the earlier node.
    fn node_rank(&self, node: NodeId, devices: &[DeviceId]) -> u64 {
        let slot = self.inventory.node(node);
        let sum = |measure: fn(&DeviceSlot) -> u64| {
            devices.iter().map(|device| measure(self.inventory.device(*device))).sum()
        };
        match self.class.shape.strategy {
            PlacementStrategy::BestFit => u64::from(slot.free_share),
            PlacementStrategy::WorstFit => u64::MAX - u64::from(slot.free_share),
            PlacementStrategy::LoadBalanced => sum(mean_load),
            _ => sum(percent_used),
        }
    }

    /// Returns a node with room for a request without GPUs.
    fn find_host_only(&mut self) -> Option<PlacementChoice> {
        let nodes = self.inventory.nodes.iter();
        let mut fitting =
            nodes.filter(|(_, slot)| slot.up && self.class.fits_shape(slot.shape) && self.host_fits(slot));
        let rank = |slot: &NodeSlot| match self.class.shape.strategy {
            PlacementStrategy::BestFit => slot.cpus_free().0,
            PlacementStrategy::WorstFit => u64::MAX - slot.cpus_free().0,
            _ => slot.cpus_promised.0.saturating_mul(1_000) / slot.facts.cpus.0.max(1),
        };
        let (node, _) = match self.class.shape.strategy {
            PlacementStrategy::FirstFit | PlacementStrategy::RoundRobin => fitting.next(),
            _ => fitting.min_by_key(|(_, slot)| rank(slot)),
        }?;
        Some(PlacementChoice { node: NodeId(node), promises: Vec::new() })
    }
}

// Capacity that a request must not take, because an earlier request could use it.

/// Devices and hosts that classes ahead in the queue could use.
///
/// A device above a class's thresholds is not reserved for it: the class cannot use it now.
#[derive(Debug, Default)]
pub(crate) struct ReservedCapacity {
    kinds: Vec<bool>,
    host_shapes: Vec<bool>,
    selective: Vec<SelectiveClaim>,
    active: bool,
}

/// Claim of a class on some devices of a kind only.
#[derive(Debug)]
struct SelectiveClaim {
    kinds: Vec<DeviceKindId>,
    named_devices: Option<Vec<DeviceId>>,
    thresholds: Option<LoadThresholds>,
    /// By node shape; empty if the class needs no host resources.
    host_shapes: Vec<bool>,
}

impl SelectiveClaim {
    fn covers(&self, id: DeviceId, slot: &DeviceSlot) -> bool {
        self.kinds.contains(&slot.kind)
            && self.named_devices.as_ref().is_none_or(|named| named.contains(&id))
            && self.thresholds.is_none_or(|thresholds| is_below(slot, thresholds, None))
    }
}

impl ReservedCapacity {
    /// Reserves everything that `class` could use.
    pub fn add_class(&mut self, class: &RequestClass, inventory: &DeviceInventory) {
        self.active = true;
        let needs_host = class.shape.needs_host();
        let kinds = || class.needs.iter().map(|need| need.kind);
        let wants_all = class.named_devices.is_none()
            && class
                .shape
                .thresholds
                .is_none_or(|thresholds| kinds().all(|kind| inventory.kind_index(kind).all_below(thresholds)));
        if !wants_all {
            self.selective.push(SelectiveClaim {
                kinds: kinds().collect(),
                named_devices: class.named_devices.clone(),
                thresholds: class.shape.thresholds,
                host_shapes: if needs_host { class.host_shapes.clone() } else { Vec::new() },
            });
            return;
        }
        kinds().for_each(|kind| set_flag(&mut self.kinds, kind.0 as usize));
        if needs_host {
            let could = class.host_shapes.iter().enumerate().filter(|(_, could)| **could);
            could.for_each(|(shape, _)| set_flag(&mut self.host_shapes, shape));
        }
    }

    /// Whether every device of a kind is reserved.
    pub fn contains_kind(&self, kind: DeviceKindId) -> bool {
        self.active && self.kinds.get(kind.0 as usize) == Some(&true)
    }

    /// Whether a device is reserved.
    pub fn contains_device(&self, id: DeviceId, slot: &DeviceSlot) -> bool {
        self.active && (self.contains_kind(slot.kind) || self.selective.iter().any(|claim| claim.covers(id, slot)))
    }

    /// Whether the host of a node is reserved.
    pub fn contains_host(&self, node: &NodeSlot, inventory: &DeviceInventory) -> bool {
        let shape = node.shape.0 as usize;
        let wants_one = |claim: &SelectiveClaim| {
            claim.host_shapes.get(shape) == Some(&true)
                && node.devices.iter().any(|device| claim.covers(*device, inventory.device(*device)))
        };
        self.active && (self.host_shapes.get(shape) == Some(&true) || self.selective.iter().any(wants_one))
    }
}

fn set_flag(flags: &mut Vec<bool>, index: usize) {
    if flags.len() <= index {
        flags.resize(index + 1, false);
    }
    flags[index] = true;
}

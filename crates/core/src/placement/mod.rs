//! Where a request goes. Every strategy is exact:
//!
//! - `first-fit`: the lowest-numbered device that fits.
//! - `best-fit`: the device with the least share left over after placing, then the least memory, then the lowest number.
//! - `worst-fit`: the device with the most share left over, then the most memory, then the lowest number.
//! - `round-robin`: the lowest-numbered device after the one used last, then from the start.
//! - `load-balanced`: the lowest mean of measured utilization and promised share (the promised share alone where
//!   utilization is not reported), then the lowest number.
//! - `least-used`: the lowest memory % + utilization %, each the larger of what was measured and what is promised, then
//!   the lowest number.
//! - `paper-best-fit`, `fgd`, `least-fragmentation`: the node with the best score, then the lowest number; see
//!   `placement/scored`.
//!
//! Several GPUs are always of one node, the ones closest together by links; the strategy then chooses the node (by what
//! the whole node has left over, or by the mean over the chosen devices). Host-only requests go by what CPUs are left.
//! Where a policy prefers models, those are tried first.

mod by_device;
mod by_node;
mod guard;
pub(crate) mod scored;

pub(crate) use guard::Guard;

use crate::classes::{Class, ClassId, Need};
use crate::ids::{DeviceId, NodeId};
use crate::inventory::{DeviceSlot, Inventory, NodeSlot, Order};
use crate::lease::Promise;
use crate::request::{Strategy, Thresholds};
use crate::units::{Percent, Time};

/// A place found: a node and what to promise on its devices.
#[derive(Debug)]
pub(crate) struct Place {
    pub node: NodeId,
    pub promises: Vec<Promise>,
}

/// A request in search of a place.
pub(crate) struct Search<'a> {
    pub inventory: &'a mut Inventory,
    pub scorer: &'a mut scored::Scorer,
    pub id: ClassId,
    pub class: &'a Class,
    pub guard: &'a Guard,
    /// The device used last, for `round-robin`.
    pub last_device: Option<DeviceId>,
    /// Readings from before this say nothing about thresholds.
    pub stale_before: Option<Time>,
}

impl Search<'_> {
    /// The best place by the class's strategy, or none.
    pub fn find(&mut self) -> Option<Place> {
        let class = self.class;
        if class.never.is_some() {
            return None;
        }
        let preferring = class.needs.iter().any(|need| need.preferred);
        let preferred = if preferring { self.find_among(|need| need.preferred) } else { None };
        preferred.or_else(|| self.find_among(|_| true))
    }

    fn find_among(&mut self, wanted: impl Fn(&Need) -> bool) -> Option<Place> {
        let class = self.class;
        match (class.shape.strategy, class.shape.gpus) {
            (strategy, _) if strategy.scores_nodes() => self.best_scored(&wanted),
            (strategy, 0) => self.host_only(strategy),
            (strategy, 1) => {
                let need_room = |need: &&Need| {
                    wanted(need)
                        && !self.guard.bars_kind(need.kind)
                        && self.inventory.index_of(need.kind).most_free() >= need.share
                };
                if !class.needs.iter().any(|need| need_room(&need)) {
                    return None;
                }
                let order = order_of(strategy);
                if let Some(order) = order {
                    self.inventory.prepare(order);
                }
                let device = self.one_device(strategy, order, &wanted)?;
                self.place(&[device])
            }
            (strategy, _) => self.several(strategy, &wanted),
        }
    }

    fn place(&self, devices: &[DeviceId]) -> Option<Place> {
        let node = self.inventory.device(*devices.first()?).node;
        let promise = |&device: &DeviceId| {
            let need = self.class.need(self.inventory.device(device).kind)?;
            Some(Promise { device, share: need.share, memory: need.memory })
        };
        Some(Place { node, promises: devices.iter().map(promise).collect::<Option<_>>()? })
    }

    /// Whether a device can take the class now.
    fn fits(&self, id: DeviceId, need: &Need) -> bool {
        let slot = self.inventory.device(id);
        slot.free_share() >= need.share
            && self.class.could_use(id, slot.kind)
            && self.memory_fits(slot, need)
            && self.class.shape.max_allocations.is_none_or(|most| slot.leases.len() < usize::from(most))
            && self.class.shape.thresholds.is_none_or(|thresholds| is_below(slot, thresholds, self.stale_before))
            && !self.guard.bars_device(id, slot)
    }

    fn memory_fits(&self, slot: &DeviceSlot, need: &Need) -> bool {
        let foreign = match slot.foreign {
            Some(foreign) if self.class.shape.names_memory() && need.share < crate::Share::WHOLE => foreign.memory,
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
                && !self.guard.bars_host(node, self.inventory))
    }
}

/// Whether what is foreign on a device is strictly below both thresholds.
///
/// A device that cannot report utilization is judged by memory and by whether a foreign process runs; one that was never
/// read, or not lately, is not judged below anything.
pub(crate) fn is_below(slot: &DeviceSlot, thresholds: Thresholds, stale_before: Option<Time>) -> bool {
    let Some(foreign) = slot.foreign else { return false };
    if slot.is_stale(stale_before) {
        return false;
    }
    let memory = match (foreign.memory, slot.facts.memory) {
        (Some(used), Some(memory)) => Percent::of(used, memory.total) < thresholds.memory,
        _ => true,
    };
    let utilization = match foreign.utilization {
        Some(busy) => busy < thresholds.utilization,
        None => foreign.processes == 0,
    };
    memory && utilization
}

fn order_of(strategy: Strategy) -> Option<Order> {
    match strategy {
        Strategy::BestFit => Some(Order::LeastFree),
        Strategy::WorstFit => Some(Order::MostFree),
        Strategy::LoadBalanced => Some(Order::LeastLoaded),
        Strategy::LeastUsed => Some(Order::LeastUsed),
        Strategy::FirstFit
        | Strategy::RoundRobin
        | Strategy::PaperBestFit
        | Strategy::Fgd
        | Strategy::LeastFragmentation => None,
    }
}

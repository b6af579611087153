//! Several GPUs of one node, and host-only requests: the strategies that look at nodes.

use crate::classes::Need;
use crate::ids::{DeviceId, NodeId};
use crate::inventory::{NodeSlot, load, used};
use crate::request::Strategy;
use crate::units::Share;

use super::{Place, Search};

impl Search<'_> {
    /// Several GPUs of the node the strategy chooses.
    pub(super) fn several(&mut self, strategy: Strategy, wanted: &impl Fn(&Need) -> bool) -> Option<Place> {
        let start = match self.last_device.filter(|_| strategy == Strategy::RoundRobin) {
            Some(last) => self.inventory.device(last).node.index() + 1,
            None => 0,
        };
        let count = self.inventory.nodes.len();
        let in_turn = (start..count).chain(0..start.min(count)).map(|number| NodeId(number as u32));
        let mut found = in_turn.filter_map(|node| Some((node, self.together_on(node, wanted)?)));
        let (_, devices) = match strategy {
            Strategy::FirstFit | Strategy::RoundRobin => found.next(),
            _ => found.min_by_key(|(node, devices)| self.node_rank(strategy, *node, devices)),
        }?;
        self.place(&devices)
    }

    /// As many devices of a node as are wanted, the closest together, where it has them.
    pub(super) fn together_on(&self, node: NodeId, wanted: &impl Fn(&Need) -> bool) -> Option<Vec<DeviceId>> {
        let slot = self.inventory.node(node);
        let gpus = usize::from(self.class.shape.gpus);
        if self.class.hosts.get(slot.shape.0 as usize) != Some(&true)
            || !self.may_have_room(slot)
            || !self.host_fits(slot)
        {
            return None;
        }
        let takes = |device: &DeviceId| {
            let need = self.class.need(self.inventory.device(*device).kind);
            need.is_some_and(|need| wanted(need) && self.fits(*device, need))
        };
        let fitting: Vec<usize> = (0..slot.devices.len()).filter(|&i| takes(&slot.devices[i])).collect();
        if fitting.len() < gpus {
            return None;
        }
        let positions = match slot.distances().filter(|_| fitting.len() > gpus) {
            Some(distances) => distances.closest(&fitting, gpus),
            None => fitting[..gpus].to_vec(),
        };
        Some(positions.into_iter().map(|position| slot.devices[position]).collect())
    }

    fn may_have_room(&self, node: &NodeSlot) -> bool {
        let all_whole = self.class.needs.iter().all(|need| need.share == Share::WHOLE);
        !all_whole || node.untouched >= self.class.shape.gpus
    }

    /// How good a node is; lower is better, and the earlier one among equals.
    fn node_rank(&self, strategy: Strategy, node: NodeId, devices: &[DeviceId]) -> u64 {
        let slot = self.inventory.node(node);
        let sum = |measure: fn(&crate::inventory::DeviceSlot) -> u64| {
            devices.iter().map(|device| measure(self.inventory.device(*device))).sum()
        };
        match strategy {
            Strategy::BestFit => u64::from(slot.free_share),
            Strategy::WorstFit => u64::MAX - u64::from(slot.free_share),
            Strategy::LoadBalanced => sum(load),
            _ => sum(used),
        }
    }

    /// A node with room for a request without GPUs.
    pub(super) fn host_only(&mut self, strategy: Strategy) -> Option<Place> {
        let hosts = |slot: &NodeSlot| self.class.hosts.get(slot.shape.0 as usize) == Some(&true);
        let numbered = self.inventory.nodes.iter().enumerate();
        let mut fitting = numbered.filter(|(_, slot)| slot.up && hosts(slot) && self.host_fits(slot));
        let rank = |slot: &NodeSlot| match strategy {
            Strategy::BestFit => slot.cpus_free().0,
            Strategy::WorstFit => u64::MAX - slot.cpus_free().0,
            _ => slot.cpus_promised.0.saturating_mul(1_000) / slot.facts.cpus.0.max(1),
        };
        let (number, _) = match strategy {
            Strategy::FirstFit | Strategy::RoundRobin => fitting.next(),
            _ => fitting.min_by_key(|(_, slot)| rank(slot)),
        }?;
        Some(Place { node: NodeId(number as u32), promises: Vec::new() })
    }
}

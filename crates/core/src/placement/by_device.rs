//! One GPU, or a part of one: the strategies that look at devices.

use crate::classes::Need;
use crate::ids::DeviceId;
use crate::inventory::{DeviceSlot, Order, load, used};
use crate::request::Strategy;

use super::Search;

impl Search<'_> {
    /// The device the strategy chooses among the wanted kinds.
    pub(super) fn one_device(
        &self,
        strategy: Strategy,
        order: Option<Order>,
        wanted: &impl Fn(&Need) -> bool,
    ) -> Option<DeviceId> {
        let open = |need: &&Need| wanted(need) && !self.guard.bars_kind(need.kind);
        let needs = || self.class.needs.iter().filter(open);
        match order {
            Some(order) => {
                let best = needs().filter_map(|need| {
                    let device = self.first_in_order(need, order)?;
                    Some((self.rank(order, self.inventory.device(device), need), device))
                });
                best.min().map(|(_, device)| device)
            }
            None => {
                let first = |from: DeviceId| needs().filter_map(|need| self.first_from(need, from)).min();
                match self.last_device.filter(|_| strategy == Strategy::RoundRobin) {
                    Some(last) => first(DeviceId(last.0 + 1)).or_else(|| first(DeviceId(0))),
                    None => first(DeviceId(0)),
                }
            }
        }
    }

    fn first_in_order(&self, need: &Need, order: Order) -> Option<DeviceId> {
        self.inventory.index_of(need.kind).walk(order, need.share).find(|device| self.takes(*device, need))
    }

    fn first_from(&self, need: &Need, from: DeviceId) -> Option<DeviceId> {
        let members = &self.inventory.kinds[need.kind.0 as usize].members;
        let index = self.inventory.index_of(need.kind);
        let mut position = members.partition_point(|member| *member < from);
        while let Some(found) = index.first_free(position, need.share) {
            if self.takes(members[found], need) {
                return Some(members[found]);
            }
            position = found + 1;
        }
        None
    }

    fn takes(&self, device: DeviceId, need: &Need) -> bool {
        self.fits(device, need) && self.host_fits(self.inventory.node(self.inventory.device(device).node))
    }

    /// How good a device is across kinds, by the same measure as within one; lower is better.
    fn rank(&self, order: Order, slot: &DeviceSlot, need: &Need) -> (u64, u64) {
        let share_left = u64::from((slot.free_share() - need.share).0);
        let memory_left = slot.unpromised_memory().saturating_sub(need.memory).0;
        match order {
            Order::LeastFree => (share_left, memory_left),
            Order::MostFree => (u64::MAX - share_left, u64::MAX - memory_left),
            Order::LeastLoaded => (load(slot), 0),
            Order::LeastUsed => (used(slot), 0),
        }
    }
}

//! When a waiting class is certain to find a place: what backfill must not put off.
//!
//! Only ends that were promised count (`max_duration`, an announced revocation), never a heartbeat that may go on.

use crate::classes::{Class, ClassId, Shape};
use crate::ids::{DeviceId, NodeId};
use crate::lease::Lease;
use crate::placement::is_below;
use crate::units::{Share, Time};

use super::Pool;

impl Pool {
    /// When a class is certain to find a place, counting on ends that are certain; `None` where none is.
    ///
    /// What drains, or is closed for a reason that may pass at any moment, may be had at any moment: then it is now. A
    /// device above its own thresholds is not counted on.
    pub(super) fn certain_start(&self, id: ClassId) -> Option<Time> {
        let class = self.classes.get(id);
        let nodes = (0..self.inventory.nodes.len() as u32).map(NodeId);
        let hosts = |node: &NodeId| class.hosts.get(self.inventory.node(*node).shape.0 as usize) == Some(&true);
        nodes.filter(hosts).filter_map(|node| self.certain_start_on(&class.shape, id, node)).min()
    }

    fn certain_start_on(&self, shape: &Shape, id: ClassId, node: NodeId) -> Option<Time> {
        let class = self.classes.get(id);
        let slot = self.inventory.node(node);
        let wants = |device: &&DeviceId| {
            let slot = self.inventory.device(**device);
            let judged = shape.thresholds.is_none_or(|thresholds| is_below(slot, thresholds, None));
            judged && class.could_use(**device, slot.kind)
        };
        let usable = slot.devices.iter().filter(wants);
        let mut device_times: Vec<Time> = usable.filter_map(|device| self.device_free_at(class, *device)).collect();
        device_times.sort_unstable();
        let devices = match usize::from(shape.gpus) {
            0 => self.now,
            gpus => *device_times.get(gpus - 1)?,
        };
        Some(devices.max(self.host_free_at(shape, node)?))
    }

    /// When a device is certain to have room for a class.
    pub(super) fn device_free_at(&self, class: &Class, device: DeviceId) -> Option<Time> {
        let slot = self.inventory.device(device);
        let need = class.need(slot.kind)?;
        let free = (u64::from((Share::WHOLE - slot.promised).0), slot.unpromised_memory().0);
        let mut ends = Vec::new();
        for lease in slot.leases.iter().filter_map(|lease| self.leases.get(lease)) {
            for promise in lease.promises.iter().filter(|promise| promise.device == device) {
                ends.extend(self.certain_end(lease).map(|end| (end, u64::from(promise.share.0), promise.memory.0)));
            }
        }
        self.enough_at(free, (u64::from(need.share.0), need.memory.0), ends)
    }

    fn host_free_at(&self, shape: &Shape, node: NodeId) -> Option<Time> {
        if !shape.needs_host() {
            return Some(self.now);
        }
        let slot = self.inventory.node(node);
        let cpus = slot.facts.cpus.saturating_sub(slot.cpus_promised);
        let memory = slot.facts.memory.saturating_sub(slot.memory_promised);
        let here = self
            .leases
            .values()
            .filter(|lease| lease.node == Some(node) && (lease.state.is_granted() || lease.draining));
        let ends = here
            .filter_map(|lease| Some((self.certain_end(lease)?, lease.request.cpus.0, lease.request.host_memory.0)))
            .collect();
        self.enough_at((cpus.0, memory.0), (shape.cpus.0, shape.host_memory.0), ends)
    }

    /// When two amounts that are free now, and what comes back at each end, come to what is needed.
    fn enough_at(&self, free: (u64, u64), need: (u64, u64), mut ends: Vec<(Time, u64, u64)>) -> Option<Time> {
        ends.sort_unstable();
        let (mut at, mut free, mut ends) = (self.now, free, ends.into_iter());
        while free.0 < need.0 || free.1 < need.1 {
            let (end, first, second) = ends.next()?;
            at = end;
            free = (free.0 + first, free.1 + second);
        }
        Some(at)
    }

    fn certain_end(&self, lease: &Lease) -> Option<Time> {
        if lease.draining { Some(self.now) } else { lease.certain_end() }
    }
}

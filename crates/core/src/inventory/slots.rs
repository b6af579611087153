//! A node and a device as the pool holds them: facts, and what is promised and known of them now.

use std::sync::Arc;

use crate::device::{Cordon, DeviceFacts, Health, Link, NodeFacts};
use crate::ids::{DeviceId, GpuId, LeaseId, NodeId};
use crate::outcome::Closed;
use crate::reading::{Field, Foreign};
use crate::units::{Bytes, MilliCpus, Percent, Share, Time};

use super::kinds::{KindId, ShapeId};
use super::links::Distances;

/// A node, with what of it is free.
#[derive(Debug)]
pub(crate) struct NodeSlot {
    pub facts: NodeFacts,
    pub up: bool,
    pub cpus_promised: MilliCpus,
    pub memory_promised: Bytes,
    /// Its devices by rising number.
    pub devices: Vec<DeviceId>,
    pub shape: ShapeId,
    /// Free thousandths of its devices that take new work.
    pub free_share: u32,
    /// Devices that take new work and hold nothing.
    pub untouched: u16,
    pub next_gpu_id: u32,
    pub links: Vec<Link>,
    distances: Option<Distances>,
    /// Whether it is in [`super::Inventory::changed`].
    pub(super) changed: bool,
}

impl NodeSlot {
    pub fn new(facts: NodeFacts) -> Self {
        Self {
            facts,
            up: true,
            cpus_promised: MilliCpus::ZERO,
            memory_promised: Bytes::ZERO,
            devices: Vec::new(),
            shape: ShapeId(0),
            free_share: 0,
            untouched: 0,
            next_gpu_id: 0,
            links: Vec::new(),
            distances: None,
            changed: false,
        }
    }

    /// Host CPUs that can be promised now.
    pub fn cpus_free(&self) -> MilliCpus {
        if self.up { self.facts.cpus.saturating_sub(self.cpus_promised) } else { MilliCpus::ZERO }
    }

    /// Host memory that can be promised now.
    pub fn memory_free(&self) -> Bytes {
        if self.up { self.facts.memory.saturating_sub(self.memory_promised) } else { Bytes::ZERO }
    }

    pub(super) fn recount(&mut self, free_before: Share, untouched_before: bool, slot: &DeviceSlot) {
        self.free_share = self.free_share + slot.free_share().0 - free_before.0;
        self.untouched = self.untouched + u16::from(slot.is_untouched()) - u16::from(untouched_before);
    }

    pub(super) fn set_links(&mut self, links: Vec<Link>, gpu_ids: &[GpuId]) {
        self.distances = Distances::new(&links, gpu_ids);
        self.links = links;
    }

    /// How far apart its devices are, where links are known.
    pub fn distances(&self) -> Option<&Distances> {
        self.distances.as_ref()
    }
}

/// What a device last reported, as far as placement needs it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Observed {
    pub at: Time,
    pub memory_used: Field<Bytes>,
    pub utilization: Field<Percent>,
    pub temperature_c: Field<i16>,
}

/// A device, with what of it is promised and what it reported.
#[derive(Debug)]
pub(crate) struct DeviceSlot {
    pub facts: Arc<DeviceFacts>,
    pub node: NodeId,
    pub gpu_id: GpuId,
    pub kind: KindId,
    /// Its position among the members of its kind.
    pub position: u32,
    pub node_up: bool,
    pub seen: bool,
    pub hot: bool,
    pub cordon: Cordon,
    pub health: Health,
    /// Ended leases whose processes stayed here.
    pub quarantines: u16,
    pub promised: Share,
    pub promised_memory: Bytes,
    /// Who holds it or drains on it, oldest first.
    pub leases: Vec<LeaseId>,
    pub leases_changed_at: Option<Time>,
    pub observed: Option<Observed>,
    /// What no lease explains, from the last reading newer than the last change of leases.
    pub foreign: Option<Foreign>,
}

impl DeviceSlot {
    pub fn new(node: NodeId, gpu_id: GpuId, facts: Arc<DeviceFacts>) -> Self {
        Self {
            facts,
            node,
            gpu_id,
            kind: KindId(0),
            position: 0,
            node_up: true,
            seen: false,
            hot: false,
            cordon: Cordon::Open,
            health: Health::Healthy,
            quarantines: 0,
            promised: Share::ZERO,
            promised_memory: Bytes::ZERO,
            leases: Vec::new(),
            leases_changed_at: None,
            observed: None,
            foreign: None,
        }
    }

    /// Why it takes no new work at all, if so.
    pub fn closed(&self) -> Option<Closed> {
        if !self.node_up {
            return Some(Closed::NodeLost);
        }
        if !self.seen {
            return Some(Closed::NotSeen);
        }
        match self.health {
            Health::Lost => return Some(Closed::Lost),
            Health::Unhealthy(_) => return Some(Closed::Unhealthy),
            Health::Healthy => {}
        }
        if self.hot {
            return Some(Closed::Hot);
        }
        if self.quarantines > 0 {
            return Some(Closed::Quarantined);
        }
        (self.cordon == Cordon::Cordoned).then_some(Closed::Cordoned)
    }

    /// The share that can be promised now; none where it takes no new work.
    pub fn free_share(&self) -> Share {
        if self.closed().is_some() { Share::ZERO } else { Share::WHOLE.saturating_sub(self.promised) }
    }

    /// The memory not promised; zero where it is unknown.
    pub fn unpromised_memory(&self) -> Bytes {
        self.facts.memory_capacity().unwrap_or_default().saturating_sub(self.promised_memory)
    }

    /// Whether its last reading is from before this time.
    pub fn is_stale(&self, before: Option<Time>) -> bool {
        before.is_some_and(|before| self.observed.is_none_or(|observed| observed.at < before))
    }

    /// Takes new work and holds nothing.
    pub fn is_untouched(&self) -> bool {
        self.leases.is_empty() && self.closed().is_none()
    }

    /// Memory % in use, promises counted as used.
    pub fn memory_percent(&self) -> Percent {
        let Some(memory) = self.facts.memory else { return Percent(0) };
        let foreign = self.foreign.and_then(|foreign| foreign.memory).unwrap_or_default();
        let reported = self.observed.and_then(|observed| observed.memory_used.value()).unwrap_or_default();
        let used = reported.max(self.promised_memory.saturating_add(foreign));
        Percent::of(used, memory.total).min(Percent::FULL)
    }

    /// Utilization %, promises counted as used.
    pub fn utilization_percent(&self) -> Percent {
        let foreign = self.foreign.and_then(|foreign| foreign.utilization).unwrap_or(Percent(0));
        let promised = Percent::of_share(self.promised);
        self.measured_utilization().max(Percent(promised.0.saturating_add(foreign.0))).min(Percent::FULL)
    }

    /// Utilization as reported; what is promised where it cannot be.
    pub fn measured_utilization(&self) -> Percent {
        let reported = self.observed.and_then(|observed| observed.utilization.value());
        reported.unwrap_or(Percent::of_share(self.promised))
    }
}

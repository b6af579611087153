//! Nodes and devices: what they are, what is promised of them, and indexes that find a place without a scan.
//!
//! Devices that are alike (same facts, on nodes that are alike) form a [`Kind`]: a selector is judged once per kind, not
//! once per device. Kinds are worked out anew when facts change, which is rare; promises, health and readings keep the
//! indexes up to date in place, through [`Inventory::touch`] only.

mod index;

pub(crate) use index::{Order, load, used};

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::device::{
    Cordon, DeviceFacts, DeviceIdentity, DeviceMemory, Health, IsolationSupport, Link, NodeFacts, Partition, Vendor,
};
use crate::ids::{DeviceId, GpuId, Labels, LeaseId, NodeId};
use crate::lease::Promise;
use crate::limits;
use crate::outcome::Closed;
use crate::reading::{Field, Foreign};
use crate::units::{Bytes, MilliCpus, Percent, Share, Time};
use index::{Distances, KindIndex};

/// All nodes and devices of a pool.
#[derive(Debug, Default)]
pub(crate) struct Inventory {
    pub nodes: Vec<NodeSlot>,
    pub devices: Vec<DeviceSlot>,
    pub kinds: Vec<Kind>,
    pub shapes: Vec<NodeShape>,
    indexes: Vec<KindIndex>,
    node_names: BTreeMap<Arc<str>, NodeId>,
    identities: BTreeMap<(NodeId, DeviceIdentity), DeviceId>,
    /// Grows whenever facts change; what is derived from facts compares it.
    pub version: u64,
    /// The version the kinds were worked out for.
    kinds_version: u64,
    /// Nodes that changed since somebody took this list, each once.
    changed: Vec<NodeId>,
}

impl Inventory {
    pub fn node(&self, id: NodeId) -> &NodeSlot {
        &self.nodes[id.index()]
    }

    pub fn device(&self, id: DeviceId) -> &DeviceSlot {
        &self.devices[id.index()]
    }

    /// What promises come to, in thousandths of whole GPUs.
    pub fn gpu_share(&self, promises: &[Promise]) -> u64 {
        let of_gpu = |promise: &Promise| u64::from(self.device(promise.device).facts.of_gpu().0);
        promises.iter().map(|promise| of_gpu(promise) * u64::from(promise.share.0) / 1000).sum()
    }

    pub fn node_named(&self, name: &str) -> Option<NodeId> {
        self.node_names.get(name).copied()
    }

    /// Puts a node in, or takes over its new facts. Returns whether anything changed.
    pub fn upsert_node(&mut self, facts: NodeFacts) -> (NodeId, bool) {
        if let Some(&id) = self.node_names.get(&facts.name) {
            let slot = &mut self.nodes[id.index()];
            let changed = slot.facts != facts;
            if changed {
                slot.facts = facts;
                self.version += 1;
            }
            return (id, changed);
        }
        let id = NodeId(self.nodes.len() as u32);
        self.node_names.insert(facts.name.clone(), id);
        self.nodes.push(NodeSlot::new(facts));
        self.version += 1;
        (id, true)
    }

    /// Puts a device in under the small number asked for or the next free one, or takes over its new facts. Returns
    /// whether anything changed.
    pub fn upsert_device(&mut self, node: NodeId, facts: DeviceFacts, wanted: Option<GpuId>) -> (DeviceId, bool) {
        let key = (node, facts.identity.clone());
        if let Some(&id) = self.identities.get(&key) {
            let slot = &mut self.devices[id.index()];
            let changed = *slot.facts != facts;
            if changed {
                slot.facts = Arc::new(facts);
                self.version += 1;
            }
            return (id, changed);
        }
        let is_free = |gpu_id: &GpuId| {
            let here = &self.nodes[node.index()].devices;
            gpu_id.0 <= limits::GPU_ID && here.iter().all(|device| self.device(*device).gpu_id != *gpu_id)
        };
        let gpu_id = wanted.filter(is_free).unwrap_or(GpuId(self.nodes[node.index()].next_gpu_id));
        (self.insert_device(node, gpu_id, Arc::new(facts)), true)
    }

    /// Puts a device in under a small number that is known to be its own.
    pub fn insert_device(&mut self, node: NodeId, gpu_id: GpuId, facts: Arc<DeviceFacts>) -> DeviceId {
        let id = DeviceId(self.devices.len() as u32);
        self.identities.insert((node, facts.identity.clone()), id);
        self.devices.push(DeviceSlot::new(node, gpu_id, facts));
        let slot = &mut self.nodes[node.index()];
        slot.next_gpu_id = slot.next_gpu_id.max(gpu_id.0 + 1);
        slot.devices.push(id);
        let links = std::mem::take(&mut slot.links);
        self.set_links(node, links);
        self.version += 1;
        id
    }

    pub fn knows_device(&self, node: NodeId, identity: &DeviceIdentity) -> bool {
        self.identities.contains_key(&(node, identity.clone()))
    }

    pub fn set_links(&mut self, node: NodeId, links: Vec<Link>) {
        let gpu_ids: Vec<GpuId> = self.node(node).devices.iter().map(|d| self.device(*d).gpu_id).collect();
        self.nodes[node.index()].set_links(links, &gpu_ids);
    }

    /// Works out kinds and indexes, where facts changed since.
    pub fn refresh(&mut self) {
        if self.kinds_version == self.version {
            return;
        }
        self.kinds_version = self.version;
        (self.shapes, self.kinds) = work_out(&mut self.nodes, &mut self.devices);
        self.indexes = self.kinds.iter().map(|kind| KindIndex::new(&kind.members, &self.devices)).collect();
    }

    /// Whether kinds and indexes are those of the current facts.
    fn is_fresh(&self) -> bool {
        self.kinds_version == self.version
    }

    /// Changes what is promised of a node's host, or whether it is up.
    pub fn touch_node(&mut self, id: NodeId, change: impl FnOnce(&mut NodeSlot)) {
        change(&mut self.nodes[id.index()]);
        self.mark_changed(id);
    }

    fn mark_changed(&mut self, id: NodeId) {
        let node = &mut self.nodes[id.index()];
        if !node.changed {
            node.changed = true;
            self.changed.push(id);
        }
    }

    /// The next node that changed since it was last taken from here.
    pub fn take_changed(&mut self) -> Option<NodeId> {
        let id = self.changed.pop()?;
        self.nodes[id.index()].changed = false;
        Some(id)
    }

    /// Changes a device and keeps its node's counts and the indexes in step.
    pub fn touch<R>(&mut self, id: DeviceId, change: impl FnOnce(&mut DeviceSlot) -> R) -> R {
        self.mark_changed(self.device(id).node);
        let slot = &mut self.devices[id.index()];
        let node = &mut self.nodes[slot.node.index()];
        if self.kinds_version != self.version {
            let (free, whole) = (slot.free_share(), slot.is_untouched());
            let result = change(slot);
            node.recount(free, whole, slot);
            return result;
        }
        let index = &mut self.indexes[slot.kind.0 as usize];
        let (free, whole, keys) = (slot.free_share(), slot.is_untouched(), index.keys_of(id, slot));
        let result = change(slot);
        node.recount(free, whole, slot);
        index.update(id, slot, keys);
        result
    }

    pub fn index_of(&self, kind: KindId) -> &KindIndex {
        &self.indexes[kind.0 as usize]
    }

    /// Makes `order` ready in the indexes of all kinds.
    pub fn prepare(&mut self, order: Order) {
        for (kind, index) in self.kinds.iter().zip(&mut self.indexes) {
            index.prepare(order, &kind.members, &self.devices);
        }
    }

    /// Whether all indexes and counts say what the slots say; for tests.
    pub fn check(&self) -> Result<(), String> {
        for (number, node) in self.nodes.iter().enumerate() {
            let slots = || node.devices.iter().map(|d| self.device(*d));
            let free = slots().map(|slot| slot.free_share().0).sum::<u32>();
            let untouched = slots().filter(|slot| slot.is_untouched()).count();
            if (node.free_share, usize::from(node.untouched)) != (free, untouched) {
                return Err(format!(
                    "node {number} counts {}/{}, not {free}/{untouched}",
                    node.free_share, node.untouched
                ));
            }
        }
        if self.is_fresh() {
            for index in &self.indexes {
                index.check(&self.devices)?;
            }
        }
        Ok(())
    }
}

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
    /// Whether it is in [`Inventory::changed`].
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

/// A kind's number, valid for one version of the facts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct KindId(pub u32);

/// A node shape's number, valid for one version of the facts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ShapeId(pub u32);

/// Devices that are alike to every selector.
#[derive(Debug)]
pub(crate) struct Kind {
    /// The facts of one of them; all but the identity are those of each.
    pub facts: Arc<DeviceFacts>,
    /// By rising number.
    pub members: Vec<DeviceId>,
}

/// Nodes that are alike to every selector and have the same devices.
#[derive(Debug)]
pub(crate) struct NodeShape {
    pub cpus: MilliCpus,
    pub memory: Bytes,
    pub labels: Labels,
    pub nodes: Vec<NodeId>,
    /// Its kinds, and how many of each a node has.
    pub kinds: Vec<(KindId, u16)>,
}

/// Everything of a device that a selector can see.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Traits<'a> {
    vendor: Vendor,
    model: &'a str,
    memory: Option<DeviceMemory>,
    isolation: IsolationSupport,
    profile: Option<&'a str>,
    labels: &'a Labels,
}

impl<'a> Traits<'a> {
    fn of(facts: &'a DeviceFacts) -> Self {
        Self {
            vendor: facts.vendor,
            model: &facts.model,
            memory: facts.memory,
            isolation: facts.isolation,
            profile: facts.partition.as_ref().map(|Partition { profile, .. }| &**profile),
            labels: &facts.labels,
        }
    }
}

/// Sorts nodes into shapes and devices into kinds, and tells each slot which it is.
pub(super) fn work_out(nodes: &mut [NodeSlot], devices: &mut [DeviceSlot]) -> (Vec<NodeShape>, Vec<Kind>) {
    let traits_of: Vec<u32> = {
        let mut known: BTreeMap<Traits<'_>, u32> = BTreeMap::new();
        let mut number = |slot| {
            let next = known.len() as u32;
            *known.entry(Traits::of(slot)).or_insert(next)
        };
        devices.iter().map(|slot| number(&slot.facts)).collect()
    };

    let mut shapes: Vec<NodeShape> = Vec::new();
    let mut kinds: Vec<Kind> = Vec::new();
    let mut kind_ids: BTreeMap<(ShapeId, u32), KindId> = BTreeMap::new();
    let mut known: BTreeMap<(MilliCpus, Bytes, Labels, Vec<u32>), ShapeId> = BTreeMap::new();
    for (number, node) in nodes.iter_mut().enumerate() {
        let mut parts: Vec<u32> = node.devices.iter().map(|device| traits_of[device.index()]).collect();
        parts.sort_unstable();
        let key = (node.facts.cpus, node.facts.memory, node.facts.labels.clone(), parts);
        let shape = *known.entry(key).or_insert_with(|| {
            shapes.push(NodeShape {
                cpus: node.facts.cpus,
                memory: node.facts.memory,
                labels: node.facts.labels.clone(),
                nodes: Vec::new(),
                kinds: Vec::new(),
            });
            ShapeId(shapes.len() as u32 - 1)
        });
        node.shape = shape;
        let first_of_shape = shapes[shape.0 as usize].nodes.is_empty();
        shapes[shape.0 as usize].nodes.push(NodeId(number as u32));
        for &device in &node.devices {
            let kind = *kind_ids.entry((shape, traits_of[device.index()])).or_insert_with(|| {
                kinds.push(Kind { facts: devices[device.index()].facts.clone(), members: Vec::new() });
                KindId(kinds.len() as u32 - 1)
            });
            devices[device.index()].kind = kind;
            if first_of_shape {
                let counts = &mut shapes[shape.0 as usize].kinds;
                match counts.iter_mut().find(|(known, _)| *known == kind) {
                    Some((_, count)) => *count += 1,
                    None => counts.push((kind, 1)),
                }
            }
        }
    }
    for (number, slot) in devices.iter_mut().enumerate() {
        let members = &mut kinds[slot.kind.0 as usize].members;
        slot.position = members.len() as u32;
        members.push(DeviceId(number as u32));
    }
    (shapes, kinds)
}

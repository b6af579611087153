//! Nodes and devices, the amounts promised of them, and indexes that find devices without a scan.
//!
//! Devices that are alike (same facts, on nodes that are alike) form a [`DeviceKind`]: a selector is assessed once per
//! kind, not once per device. After a change of facts, which is rare, kinds are computed again when they are next
//! needed: at most once per batch. Changes of promises, health and readings update the indexes in place, through
//! [`DeviceInventory::update_device`] only.

mod index;
mod slot_table;

pub(crate) use index::{IndexOrder, mean_load, percent_used};

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::device::{
    CordonState, DeviceFacts, DeviceHealth, DeviceIdentity, DeviceLink, DeviceMemory, IsolationSupport, NodeFacts,
    PartitionFacts, Vendor,
};
use crate::ids::{DeviceId, GpuId, Labels, LeaseId, NodeId};
use crate::lease::DevicePromise;
use crate::limits;
use crate::outcome::DeviceClosure;
use crate::reading::{ForeignLoad, ReadingField};
use crate::request::LoadThresholds;
use crate::units::{Bytes, MilliCpus, Percent, PoolTime, Share};
use index::{DeviceKindIndex, LinkDistances};
pub(crate) use slot_table::SlotTable;

/// All nodes and devices of a pool.
#[derive(Debug, Default)]
pub(crate) struct DeviceInventory {
    pub nodes: SlotTable<NodeSlot>,
    pub devices: SlotTable<DeviceSlot>,
    pub kinds: Vec<DeviceKind>,
    pub shapes: Vec<NodeShape>,
    indexes: Vec<DeviceKindIndex>,
    node_names: BTreeMap<Arc<str>, NodeId>,
    identities: BTreeMap<(NodeId, DeviceIdentity), DeviceId>,
    gpu_ids: BTreeMap<(NodeId, GpuId), DeviceId>,
    /// Grows with every change of facts; derived data compares it.
    pub version: u64,
    /// Version for which the kinds were computed.
    kinds_version: u64,
    /// Nodes that changed since the scorer emptied this list, each once.
    changed_nodes: Vec<NodeId>,
    touched: TouchedDevices,
}

/// Devices that changed since this list was last taken, each once.
#[derive(Debug, Default)]
struct TouchedDevices {
    list: Vec<DeviceId>,
    /// For each device number, whether it is in the list.
    is_listed: Vec<bool>,
}

impl TouchedDevices {
    fn add(&mut self, id: DeviceId) {
        if self.is_listed.len() <= id.index() {
            self.is_listed.resize(id.index() + 1, false);
        }
        if !std::mem::replace(&mut self.is_listed[id.index()], true) {
            self.list.push(id);
        }
    }

    fn take(&mut self) -> Vec<DeviceId> {
        let list = std::mem::take(&mut self.list);
        list.iter().for_each(|id| self.is_listed[id.index()] = false);
        list
    }
}

impl DeviceInventory {
    pub fn node(&self, id: NodeId) -> &NodeSlot {
        &self.nodes[id.0]
    }

    pub fn device(&self, id: DeviceId) -> &DeviceSlot {
        &self.devices[id.0]
    }

    /// Returns the sum of promises in thousandths of whole GPUs.
    pub fn gpu_share(&self, promises: &[DevicePromise]) -> u64 {
        let share_of_gpu = |promise: &DevicePromise| u64::from(self.device(promise.device).facts.share_of_gpu().0);
        promises.iter().map(|promise| share_of_gpu(promise) * u64::from(promise.share.0) / 1000).sum()
    }

    pub fn node_by_name(&self, name: &str) -> Option<NodeId> {
        self.node_names.get(name).copied()
    }

    pub fn device_by_identity(&self, node: NodeId, identity: &DeviceIdentity) -> Option<DeviceId> {
        self.identities.get(&(node, identity.clone())).copied()
    }

    pub fn device_with_gpu_id(&self, node: NodeId, gpu_id: GpuId) -> Option<DeviceId> {
        self.gpu_ids.get(&(node, gpu_id)).copied()
    }

    /// Adds a node or updates its facts. Returns whether anything changed.
    pub fn upsert_node(&mut self, facts: NodeFacts) -> (NodeId, bool) {
        let Some(id) = self.node_by_name(&facts.name) else {
            let id = NodeId(self.nodes.next_number());
            self.insert_node(id, facts);
            return (id, true);
        };
        let slot = &mut self.nodes[id.0];
        let changed = slot.facts != facts;
        if changed {
            slot.facts = facts;
            self.version += 1;
        }
        (id, changed)
    }

    /// Adds a node under a vacant number and a unique name.
    pub fn insert_node(&mut self, id: NodeId, facts: NodeFacts) {
        self.node_names.insert(facts.name.clone(), id);
        self.nodes.insert(id.0, NodeSlot::new(facts));
        self.version += 1;
    }

    /// Adds a device under the wanted number on its node or the next free one, or updates its facts. Returns whether
    /// anything changed.
    pub fn upsert_device(&mut self, node: NodeId, facts: DeviceFacts, wanted: Option<GpuId>) -> (DeviceId, bool) {
        let Some(id) = self.device_by_identity(node, &facts.identity) else {
            let is_free =
                |gpu_id: &GpuId| gpu_id.0 <= limits::MAX_GPU_ID && self.device_with_gpu_id(node, *gpu_id).is_none();
            let gpu_id = wanted.filter(is_free).unwrap_or_else(|| self.free_gpu_id(node));
            let id = DeviceId(self.devices.next_number());
            self.insert_device(id, node, gpu_id, Arc::new(facts));
            return (id, true);
        };
        let slot = &mut self.devices[id.0];
        let changed = *slot.facts != facts;
        if changed {
            slot.facts = Arc::new(facts);
            self.version += 1;
            self.touched.add(id);
        }
        (id, changed)
    }

    /// Returns the number after the node's highest, or the lowest free number if the highest is taken.
    fn free_gpu_id(&self, node: NodeId) -> GpuId {
        let taken = || self.gpu_ids.range((node, GpuId(0))..=(node, GpuId(u32::MAX))).map(|((_, gpu_id), _)| gpu_id.0);
        match taken().next_back() {
            None => GpuId(0),
            Some(highest) if highest < limits::MAX_GPU_ID => GpuId(highest + 1),
            Some(highest) => {
                let first_gap = (0..).zip(taken()).find(|(number, taken)| number != taken);
                GpuId(first_gap.map_or(highest + 1, |(number, _)| number))
            }
        }
    }

    /// Adds a device under a vacant number and a unique number on its node.
    pub fn insert_device(&mut self, id: DeviceId, node: NodeId, gpu_id: GpuId, facts: Arc<DeviceFacts>) {
        self.identities.insert((node, facts.identity.clone()), id);
        self.gpu_ids.insert((node, gpu_id), id);
        let mut slot = DeviceSlot::new(node, gpu_id, facts);
        let node = &mut self.nodes[node.0];
        slot.node_up = node.up;
        self.devices.insert(id.0, slot);
        // A vacant number may be lower than those of the node's other devices.
        let at = node.devices.partition_point(|before| *before < id);
        node.devices.insert(at, id);
        node.distances_are_stale = true;
        self.version += 1;
        self.touched.add(id);
    }

    /// Removes a device without leases. Both its numbers become free for new devices.
    pub fn forget_device(&mut self, id: DeviceId) {
        let Some(slot) = self.devices.remove(id.0) else { return };
        debug_assert!(slot.leases.is_empty() && slot.closure().is_some(), "device {id} is in use: {slot:?}");
        self.identities.remove(&(slot.node, slot.facts.identity.clone()));
        self.gpu_ids.remove(&(slot.node, slot.gpu_id));
        let node = &mut self.nodes[slot.node.0];
        node.devices.retain(|device| *device != id);
        node.links.retain(|link| link.a != slot.gpu_id && link.b != slot.gpu_id);
        node.distances_are_stale = true;
        self.version += 1;
        self.touched.add(id);
        self.mark_changed(slot.node);
    }

    /// Removes a node without devices.
    pub fn forget_node(&mut self, id: NodeId) {
        let Some(slot) = self.nodes.remove(id.0) else { return };
        debug_assert!(slot.devices.is_empty(), "node {id} still has devices: {slot:?}");
        self.node_names.remove(&slot.facts.name);
        self.changed_nodes.retain(|changed| *changed != id);
        self.version += 1;
    }

    /// Returns the devices that changed or were removed since the last call, each once.
    pub fn take_touched(&mut self) -> Vec<DeviceId> {
        self.touched.take()
    }

    pub fn set_links(&mut self, node: NodeId, links: Vec<DeviceLink>) {
        let slot = &mut self.nodes[node.0];
        slot.links = links;
        slot.refresh_distances(&self.devices);
    }

    /// Computes kinds and indexes again if facts have changed.
    pub fn refresh(&mut self) {
        if self.kinds_version == self.version {
            return;
        }
        self.kinds_version = self.version;
        (self.shapes, self.kinds) = classify(&mut self.nodes, &mut self.devices);
        for (_, node) in self.nodes.iter_mut().filter(|(_, node)| node.distances_are_stale) {
            node.refresh_distances(&self.devices);
        }
        self.indexes = self.kinds.iter().map(|kind| DeviceKindIndex::new(&kind.members, &self.devices)).collect();
    }

    /// Whether kinds and indexes match the current facts.
    fn is_fresh(&self) -> bool {
        self.kinds_version == self.version
    }

    /// Changes a node's host promises or whether it is up.
    pub fn update_node(&mut self, id: NodeId, change: impl FnOnce(&mut NodeSlot)) {
        change(&mut self.nodes[id.0]);
        self.mark_changed(id);
    }

    fn mark_changed(&mut self, id: NodeId) {
        let node = &mut self.nodes[id.0];
        if !node.is_listed {
            node.is_listed = true;
            self.changed_nodes.push(id);
        }
    }

    /// Removes one node from the list of changed nodes.
    pub fn pop_changed_node(&mut self) -> Option<NodeId> {
        let id = self.changed_nodes.pop()?;
        self.nodes[id.0].is_listed = false;
        Some(id)
    }

    /// Changes a device and updates the counts of its node and the indexes.
    pub fn update_device<R>(&mut self, id: DeviceId, change: impl FnOnce(&mut DeviceSlot) -> R) -> R {
        self.touched.add(id);
        self.mark_changed(self.device(id).node);
        let slot = &mut self.devices[id.0];
        let node = &mut self.nodes[slot.node.0];
        if self.kinds_version != self.version {
            let (free, whole) = (slot.free_share(), slot.is_fully_free());
            let result = change(slot);
            node.update_counts(free, whole, slot);
            return result;
        }
        let index = &mut self.indexes[slot.kind.0 as usize];
        let (free, whole, keys) = (slot.free_share(), slot.is_fully_free(), index.index_keys(id, slot));
        let result = change(slot);
        node.update_counts(free, whole, slot);
        index.update(id, slot, keys);
        result
    }

    pub fn kind_index(&self, kind: DeviceKindId) -> &DeviceKindIndex {
        &self.indexes[kind.0 as usize]
    }

    /// Builds `order` in the indexes of all kinds.
    pub fn build_order(&mut self, order: IndexOrder) {
        for (kind, index) in self.kinds.iter().zip(&mut self.indexes) {
            index.build_order(order, &kind.members, &self.devices);
        }
    }

    /// Checks all indexes and counts against the slots, for tests.
    pub fn check(&self) -> Result<(), String> {
        for (number, node) in self.nodes.iter() {
            let slots = || node.devices.iter().map(|d| self.device(*d));
            let free = slots().map(|slot| slot.free_share().0).sum::<u32>();
            let fully_free = slots().filter(|slot| slot.is_fully_free()).count();
            if (node.free_share, node.fully_free as usize) != (free, fully_free) {
                return Err(format!(
                    "node {number} counts {}/{}, not {free}/{fully_free}",
                    node.free_share, node.fully_free
                ));
            }
        }
        let is_known = |id: DeviceId, slot: &DeviceSlot| {
            self.device_by_identity(slot.node, &slot.facts.identity) == Some(id)
                && self.device_with_gpu_id(slot.node, slot.gpu_id) == Some(id)
                && self.node(slot.node).devices.binary_search(&id).is_ok()
                && self.node(slot.node).up == slot.node_up
        };
        if let Some((id, slot)) = self.devices.iter().find(|(id, slot)| !is_known(DeviceId(*id), slot)) {
            return Err(format!("device {id} is not indexed: {slot:?}"));
        }
        let count = self.devices.len();
        let on_nodes: usize = self.nodes.iter().map(|(_, node)| node.devices.len()).sum();
        if [self.identities.len(), self.gpu_ids.len(), on_nodes] != [count; 3] {
            return Err(format!("{count} devices, but indexes contain others: {:?}", self.gpu_ids));
        }
        let is_named = |(id, node): (u32, &NodeSlot)| self.node_by_name(&node.facts.name) == Some(NodeId(id));
        if self.node_names.len() != self.nodes.len() || !self.nodes.iter().all(is_named) {
            return Err(format!("nodes are not indexed by name: {:?}", self.node_names));
        }
        if self.is_fresh() {
            for index in &self.indexes {
                index.check(&self.devices)?;
            }
        }
        Ok(())
    }
}

/// A node with its promises.
#[derive(Debug)]
pub(crate) struct NodeSlot {
    pub facts: NodeFacts,
    pub up: bool,
    pub cpus_promised: MilliCpus,
    pub memory_promised: Bytes,
    /// Its devices by rising number.
    pub devices: Vec<DeviceId>,
    pub shape: NodeShapeId,
    /// Free thousandths over all devices that take new work.
    pub free_share: u32,
    /// Number of devices that take new work and have no promises.
    pub fully_free: u32,
    pub links: Vec<DeviceLink>,
    distances: Option<LinkDistances>,
    /// Whether devices were added or removed since the distances were computed.
    distances_are_stale: bool,
    /// Whether it is in [`DeviceInventory::changed_nodes`].
    pub(super) is_listed: bool,
}

impl NodeSlot {
    pub fn new(facts: NodeFacts) -> Self {
        Self {
            facts,
            up: true,
            cpus_promised: MilliCpus::ZERO,
            memory_promised: Bytes::ZERO,
            devices: Vec::new(),
            shape: NodeShapeId(0),
            free_share: 0,
            fully_free: 0,
            links: Vec::new(),
            distances: None,
            distances_are_stale: false,
            is_listed: false,
        }
    }

    pub fn cpus_free(&self) -> MilliCpus {
        if self.up { self.facts.cpus.saturating_sub(self.cpus_promised) } else { MilliCpus::ZERO }
    }

    pub fn memory_free(&self) -> Bytes {
        if self.up { self.facts.memory.saturating_sub(self.memory_promised) } else { Bytes::ZERO }
    }

    pub(super) fn update_counts(&mut self, free_before: Share, untouched_before: bool, slot: &DeviceSlot) {
        self.free_share = self.free_share + slot.free_share().0 - free_before.0;
        self.fully_free = self.fully_free + u32::from(slot.is_fully_free()) - u32::from(untouched_before);
    }

    fn refresh_distances(&mut self, devices: &SlotTable<DeviceSlot>) {
        self.distances_are_stale = false;
        self.distances = LinkDistances::new(&self.links, self.devices.iter().map(|device| devices[device.0].gpu_id));
    }

    /// Returns the distances between its devices, if links are known.
    pub fn distances(&self) -> Option<&LinkDistances> {
        self.distances.as_ref()
    }
}

/// Last reading of a device, reduced to the fields that placement needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LastReading {
    pub at: PoolTime,
    pub memory_used: ReadingField<Bytes>,
    pub utilization: ReadingField<Percent>,
    pub temperature_c: ReadingField<i16>,
}

/// A device with its promises and its last reading.
#[derive(Debug)]
pub(crate) struct DeviceSlot {
    pub facts: Arc<DeviceFacts>,
    pub node: NodeId,
    pub gpu_id: GpuId,
    pub kind: DeviceKindId,
    /// Position among the members of its kind.
    pub position: u32,
    pub node_up: bool,
    pub seen: bool,
    pub hot: bool,
    pub cordon: CordonState,
    pub health: DeviceHealth,
    /// Number of ended leases whose processes stayed here.
    pub quarantines: u16,
    pub promised: Share,
    pub promised_memory: Bytes,
    /// Leases that hold it or drain on it, oldest first.
    pub leases: Vec<LeaseId>,
    pub leases_changed_at: Option<PoolTime>,
    pub observed: Option<LastReading>,
    /// Foreign load of the last reading after the last change of leases.
    pub foreign: Option<ForeignLoad>,
}

impl DeviceSlot {
    pub fn new(node: NodeId, gpu_id: GpuId, facts: Arc<DeviceFacts>) -> Self {
        Self {
            facts,
            node,
            gpu_id,
            kind: DeviceKindId(0),
            position: 0,
            node_up: true,
            seen: false,
            hot: false,
            cordon: CordonState::Open,
            health: DeviceHealth::Healthy,
            quarantines: 0,
            promised: Share::ZERO,
            promised_memory: Bytes::ZERO,
            leases: Vec::new(),
            leases_changed_at: None,
            observed: None,
            foreign: None,
        }
    }

    /// Returns the reason why it takes no new work, if any.
    pub fn closure(&self) -> Option<DeviceClosure> {
        if !self.node_up {
            return Some(DeviceClosure::NodeLost);
        }
        if !self.seen {
            return Some(DeviceClosure::NotSeen);
        }
        match self.health {
            DeviceHealth::Lost => return Some(DeviceClosure::Lost),
            DeviceHealth::Unhealthy(_) => return Some(DeviceClosure::Unhealthy),
            DeviceHealth::ClaimedElsewhere(_) => return Some(DeviceClosure::ClaimedElsewhere),
            DeviceHealth::Healthy => {}
        }
        if self.hot {
            return Some(DeviceClosure::Hot);
        }
        if self.quarantines > 0 {
            return Some(DeviceClosure::Quarantined);
        }
        (self.cordon == CordonState::Cordoned).then_some(DeviceClosure::Cordoned)
    }

    /// Returns the share that can be promised now; zero if it takes no new work.
    pub fn free_share(&self) -> Share {
        if self.closure().is_some() { Share::ZERO } else { Share::WHOLE.saturating_sub(self.promised) }
    }

    /// Returns the memory that is not promised; zero if it is unknown.
    pub fn unpromised_memory(&self) -> Bytes {
        self.facts.memory_capacity().unwrap_or_default().saturating_sub(self.promised_memory)
    }

    /// Whether its last reading is older than this time.
    pub fn is_stale(&self, before: Option<PoolTime>) -> bool {
        before.is_some_and(|before| self.observed.is_none_or(|observed| observed.at < before))
    }

    /// Converts a foreign load on this device to levels.
    pub fn foreign_levels(&self, foreign: Option<ForeignLoad>) -> ForeignLoadLevels {
        let Some(foreign) = foreign else { return ForeignLoadLevels::UNKNOWN };
        let memory = match (foreign.memory, self.facts.memory) {
            (Some(used), Some(memory)) => i64::from(Percent::of(used, memory.total).0),
            _ => ForeignLoadLevels::NONE,
        };
        let utilization = match foreign.utilization {
            Some(busy) => i64::from(busy.0),
            None if foreign.processes == 0 => ForeignLoadLevels::NONE,
            None => i64::MAX,
        };
        ForeignLoadLevels { memory, utilization }
    }

    /// Whether it takes new work and has no promises.
    pub fn is_fully_free(&self) -> bool {
        self.leases.is_empty() && self.closure().is_none()
    }

    /// Returns the memory % in use, with promises counted as used.
    pub fn memory_percent(&self) -> Percent {
        let Some(memory) = self.facts.memory else { return Percent(0) };
        let foreign = self.foreign.and_then(|foreign| foreign.memory).unwrap_or_default();
        let reported = self.observed.and_then(|observed| observed.memory_used.value()).unwrap_or_default();
        let used = reported.max(self.promised_memory.saturating_add(foreign));
        Percent::of(used, memory.total).min(Percent::FULL)
    }

    /// Returns the utilization %, with promises counted as used.
    pub fn utilization_percent(&self) -> Percent {
        let foreign = self.foreign.and_then(|foreign| foreign.utilization).unwrap_or(Percent(0));
        let promised = Percent::of_share(self.promised);
        self.measured_utilization().max(Percent(promised.0.saturating_add(foreign.0))).min(Percent::FULL)
    }

    /// Returns the reported utilization, or the promised share if it is not reported.
    pub fn measured_utilization(&self) -> Percent {
        let reported = self.observed.and_then(|observed| observed.utilization.value());
        reported.unwrap_or(Percent::of_share(self.promised))
    }
}

/// Foreign load in thousandths of a percent, for comparison with thresholds.
///
/// A device that cannot report memory is below every memory threshold. A device that cannot report utilization is below
/// every utilization threshold unless a foreign process runs. A device that was never assessed is below none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ForeignLoadLevels {
    memory: i64,
    utilization: i64,
}

impl ForeignLoadLevels {
    const UNKNOWN: Self = Self { memory: i64::MAX, utilization: i64::MAX };
    /// Level below every threshold, even 0.
    const NONE: i64 = -1;

    /// Whether both levels are strictly below their thresholds.
    pub fn are_below(self, thresholds: LoadThresholds) -> bool {
        self.memory < i64::from(thresholds.memory.0) && self.utilization < i64::from(thresholds.utilization.0)
    }
}

/// Number of a device kind, valid for one version of the facts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct DeviceKindId(pub u32);

/// Number of a node shape, valid for one version of the facts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeShapeId(pub u32);

/// Devices that are alike to every selector.
#[derive(Debug)]
pub(crate) struct DeviceKind {
    /// Facts of one member; all members share them except for the identity.
    pub facts: Arc<DeviceFacts>,
    /// Members by rising number.
    pub members: Vec<DeviceId>,
}

/// Nodes that are alike to every selector and have the same devices.
#[derive(Debug)]
pub(crate) struct NodeShape {
    pub cpus: MilliCpus,
    pub memory: Bytes,
    pub labels: Labels,
    pub nodes: Vec<NodeId>,
    /// Device kinds with their count per node.
    pub kinds: Vec<(DeviceKindId, u32)>,
}

/// Properties of a device that a selector can see.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct SelectableTraits<'a> {
    vendor: Vendor,
    model: &'a str,
    memory: Option<DeviceMemory>,
    isolation: IsolationSupport,
    profile: Option<&'a str>,
    labels: &'a Labels,
}

impl<'a> SelectableTraits<'a> {
    fn of(facts: &'a DeviceFacts) -> Self {
        Self {
            vendor: facts.vendor,
            model: &facts.model,
            memory: facts.memory,
            isolation: facts.isolation,
            profile: facts.partition.as_ref().map(|PartitionFacts { profile, .. }| &**profile),
            labels: &facts.labels,
        }
    }
}

/// Sorts nodes into shapes and devices into kinds, and stores the result in each slot.
fn classify(nodes: &mut SlotTable<NodeSlot>, devices: &mut SlotTable<DeviceSlot>) -> (Vec<NodeShape>, Vec<DeviceKind>) {
    let mut traits_of = vec![u32::MAX; devices.span() as usize];
    let mut known: BTreeMap<SelectableTraits<'_>, u32> = BTreeMap::new();
    for (id, slot) in devices.iter() {
        let next = known.len() as u32;
        traits_of[id as usize] = *known.entry(SelectableTraits::of(&slot.facts)).or_insert(next);
    }

    let mut shapes: Vec<NodeShape> = Vec::new();
    let mut shape_of = vec![NodeShapeId(u32::MAX); nodes.span() as usize];
    let mut known: BTreeMap<(MilliCpus, Bytes, &Labels, Vec<u32>), NodeShapeId> = BTreeMap::new();
    for (id, node) in nodes.iter() {
        let mut parts: Vec<u32> = node.devices.iter().map(|device| traits_of[device.index()]).collect();
        parts.sort_unstable();
        let NodeFacts { cpus, memory, labels, .. } = &node.facts;
        let shape = *known.entry((*cpus, *memory, labels, parts)).or_insert_with(|| {
            shapes.push(NodeShape {
                cpus: *cpus,
                memory: *memory,
                labels: labels.clone(),
                nodes: Vec::new(),
                kinds: Vec::new(),
            });
            NodeShapeId(shapes.len() as u32 - 1)
        });
        shapes[shape.0 as usize].nodes.push(NodeId(id));
        shape_of[id as usize] = shape;
    }

    let mut kinds: Vec<DeviceKind> = Vec::new();
    let mut kind_ids: BTreeMap<(NodeShapeId, u32), DeviceKindId> = BTreeMap::new();
    for (id, node) in nodes.iter_mut() {
        node.shape = shape_of[id as usize];
        let shape = &mut shapes[node.shape.0 as usize];
        let is_first_of_shape = shape.nodes.first() == Some(&NodeId(id));
        for &device in &node.devices {
            let slot = &mut devices[device.0];
            slot.kind = *kind_ids.entry((node.shape, traits_of[device.index()])).or_insert_with(|| {
                kinds.push(DeviceKind { facts: slot.facts.clone(), members: Vec::new() });
                DeviceKindId(kinds.len() as u32 - 1)
            });
            if is_first_of_shape {
                match shape.kinds.iter_mut().find(|(known, _)| *known == slot.kind) {
                    Some((_, count)) => *count += 1,
                    None => shape.kinds.push((slot.kind, 1)),
                }
            }
        }
    }
    for (id, slot) in devices.iter_mut() {
        let members = &mut kinds[slot.kind.0 as usize].members;
        slot.position = members.len() as u32;
        members.push(DeviceId(id));
    }
    (shapes, kinds)
}

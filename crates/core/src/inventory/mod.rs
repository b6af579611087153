//! Nodes and devices: what they are, what is promised of them, and indexes that find a place without a scan.
//!
//! Devices that are alike (same facts, on nodes that are alike) form a [`Kind`]: a selector is judged once per kind, not
//! once per device. Kinds are worked out anew when facts change, which is rare; promises, health and readings keep the
//! indexes up to date in place, through [`Inventory::touch`] only.

mod index;
mod kinds;
mod links;
mod slots;

pub(crate) use index::{Order, load, used};
pub(crate) use kinds::{Kind, KindId, NodeShape, ShapeId};
pub(crate) use slots::{DeviceSlot, NodeSlot, Observed};

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::device::{DeviceFacts, DeviceIdentity, Link, NodeFacts};
use crate::ids::{DeviceId, GpuId, NodeId};
use crate::lease::Promise;
use crate::limits;
use index::KindIndex;

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
        (self.shapes, self.kinds) = kinds::work_out(&mut self.nodes, &mut self.devices);
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

    /// The index of a kind.
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

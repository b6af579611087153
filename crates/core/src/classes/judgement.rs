//! A shape judged against every kind of device and every shape of node.

use crate::device::DeviceIdentity;
use crate::ids::{DeviceId, labels_match};
use crate::inventory::{DeviceSlot, Inventory, Kind, KindId, NodeShape};
use crate::outcome::Unsatisfiable;
use crate::request::{Amount, Select};
use crate::units::{Bytes, MilliCpus, Share};

use super::{Need, Shape};

pub(super) fn named_devices(select: &Select, inventory: &Inventory) -> Vec<DeviceId> {
    let named = |slot: &DeviceSlot| {
        let by_number = select.gpu_ids.is_empty() || select.gpu_ids.contains(&slot.gpu_id);
        let by_uuid = select.uuids.is_empty()
            || matches!(&slot.facts.identity, DeviceIdentity::Uuid(uuid) if select.uuids.contains(uuid));
        by_number && by_uuid
    };
    let numbered = inventory.devices.iter().enumerate();
    numbered.filter(|(_, slot)| named(slot)).map(|(number, _)| DeviceId(number as u32)).collect()
}

/// What became of a shape at every kind and node shape, so that a refusal can say what was missing.
pub(super) struct Judgement<'a> {
    shape: &'a Shape,
    pub needs: Vec<Need>,
    pub hosts: Vec<bool>,
    any_device: bool,
    any_selected: bool,
    any_isolating: bool,
    any_memory_known: bool,
    /// The largest part of a GPU that devices which are only taken as they are come in; 0 where there are none.
    largest_part: Share,
    most_memory: Bytes,
    most_gpus: u16,
    most_cpus: MilliCpus,
    most_host_memory: Bytes,
}

impl<'a> Judgement<'a> {
    pub fn of(shape: &'a Shape, named: Option<&[DeviceId]>, inventory: &Inventory) -> Self {
        let mut judged = Self {
            shape,
            needs: Vec::new(),
            hosts: vec![false; inventory.shapes.len()],
            any_device: !inventory.devices.is_empty(),
            any_selected: false,
            any_isolating: false,
            any_memory_known: false,
            largest_part: Share::ZERO,
            most_memory: Bytes::ZERO,
            most_gpus: 0,
            most_cpus: MilliCpus::ZERO,
            most_host_memory: Bytes::ZERO,
        };
        let named_kinds = named.map(|named| named.iter().map(|d| inventory.device(*d).kind).collect::<Vec<_>>());
        let is_named = |kind: KindId| named_kinds.as_ref().is_none_or(|kinds| kinds.contains(&kind));
        for (number, node_shape) in inventory.shapes.iter().enumerate() {
            if !labels_match(&node_shape.labels, &shape.node_selector) {
                continue;
            }
            let fitting: Vec<(Need, u16)> = node_shape
                .kinds
                .iter()
                .filter(|(kind, _)| is_named(*kind))
                .filter_map(|&(id, count)| {
                    let kind = &inventory.kinds[id.0 as usize];
                    Some((judged.kind(id, kind, node_shape)?, count))
                })
                .collect();
            judged.node_shape(number, node_shape, fitting);
        }
        judged.needs.sort_unstable_by_key(|need| need.kind);
        judged
    }

    fn kind(&mut self, id: KindId, kind: &Kind, node_shape: &NodeShape) -> Option<Need> {
        let (select, facts) = (&self.shape.select, &kind.facts);
        let label = |key, value| facts.labels.get(key) == Some(value) || node_shape.labels.get(key) == Some(value);
        let selected = select.vendor.is_none_or(|vendor| vendor == facts.vendor)
            && (select.models.is_empty() || select.models.iter().any(|model| facts.is_model(model)))
            && select.min_memory.is_none_or(|least| facts.memory_capacity().is_some_and(|all| all >= least))
            && select.labels.iter().all(|(key, value)| label(key, value));
        if !selected {
            return None;
        }
        self.any_selected = true;
        if !facts.isolation.gives(self.shape.isolation) {
            return None;
        }
        self.any_isolating = true;
        if !facts.is_divisible() {
            self.largest_part = self.largest_part.max(facts.of_gpu());
        }
        self.any_memory_known |= facts.memory.is_some();
        self.most_memory = self.most_memory.max(facts.memory_capacity().unwrap_or_default());
        self.shape.need(id, facts)
    }

    fn node_shape(&mut self, number: usize, node_shape: &NodeShape, fitting: Vec<(Need, u16)>) {
        let gpus: u16 = fitting.iter().map(|(_, count)| count).sum();
        self.most_gpus = self.most_gpus.max(gpus);
        if gpus < self.shape.gpus {
            return;
        }
        self.most_cpus = self.most_cpus.max(node_shape.cpus);
        self.most_host_memory = self.most_host_memory.max(node_shape.memory);
        if self.shape.cpus <= node_shape.cpus && self.shape.host_memory <= node_shape.memory {
            self.hosts[number] = true;
            if self.shape.gpus > 0 {
                self.needs.extend(fitting.into_iter().map(|(need, _)| need));
            }
        }
    }

    pub fn never(&self) -> Option<Unsatisfiable> {
        let shape = self.shape;
        if self.hosts.contains(&true) {
            return None;
        }
        if shape.gpus > 0 {
            if !self.any_device {
                return Some(Unsatisfiable::NoDevices);
            }
            if !self.any_selected {
                return Some(Unsatisfiable::NothingSelected);
            }
            if !self.any_isolating {
                return Some(Unsatisfiable::Isolation(shape.isolation));
            }
            if let Amount::Memory(wanted) | Amount::Both(_, wanted) = shape.amount {
                if !self.any_memory_known {
                    return Some(Unsatisfiable::MemoryUnknown);
                }
                if wanted > self.most_memory {
                    return Some(Unsatisfiable::TooMuchMemory { wanted, most: self.most_memory });
                }
            }
            if self.most_gpus == 0 && !self.largest_part.is_zero() {
                return Some(Unsatisfiable::Indivisible { part: self.largest_part });
            }
            if shape.gpus > self.most_gpus {
                return Some(Unsatisfiable::TooManyGpus { wanted: shape.gpus, most: self.most_gpus });
            }
        }
        if shape.cpus > self.most_cpus {
            return Some(Unsatisfiable::TooManyCpus { wanted: shape.cpus, most: self.most_cpus });
        }
        if shape.host_memory > self.most_host_memory {
            return Some(Unsatisfiable::TooMuchHostMemory { wanted: shape.host_memory, most: self.most_host_memory });
        }
        Some(Unsatisfiable::NotTogether)
    }
}

pub(super) fn models_among(needs: &[Need], inventory: &Inventory) -> usize {
    let mut models: Vec<&str> = needs.iter().map(|need| &*inventory.kinds[need.kind.0 as usize].facts.model).collect();
    models.sort_unstable();
    models.dedup();
    models.len()
}

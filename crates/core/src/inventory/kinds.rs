//! Devices that are alike, on nodes that are alike.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::device::{DeviceFacts, DeviceMemory, IsolationSupport, Partition, Vendor};
use crate::ids::{DeviceId, Labels, NodeId};
use crate::units::{Bytes, MilliCpus};

use super::{DeviceSlot, NodeSlot};

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

//! What a request must leave alone, because somebody who came before could use it.

use crate::classes::Class;
use crate::ids::DeviceId;
use crate::inventory::{DeviceSlot, Inventory, KindId, NodeSlot};
use crate::request::Thresholds;

use super::is_below;

/// Devices and hosts that classes ahead in the queue could use.
///
/// A device above a class's own thresholds is not kept for it: what it does not want now, others may have.
#[derive(Debug, Default)]
pub(crate) struct Guard {
    kinds: Vec<bool>,
    hosts: Vec<bool>,
    choosy: Vec<Choosy>,
    active: bool,
}

/// A class that wants some devices of a kind and not others.
#[derive(Debug)]
struct Choosy {
    kinds: Vec<KindId>,
    named: Option<Vec<DeviceId>>,
    thresholds: Option<Thresholds>,
    /// By node shape; empty where it needs nothing of the host.
    hosts: Vec<bool>,
}

impl Choosy {
    fn wants(&self, id: DeviceId, slot: &DeviceSlot) -> bool {
        self.kinds.contains(&slot.kind)
            && self.named.as_ref().is_none_or(|named| named.contains(&id))
            && self.thresholds.is_none_or(|thresholds| is_below(slot, thresholds, None))
    }
}

impl Guard {
    /// Keeps off everything that `class` could use.
    pub fn add(&mut self, class: &Class, inventory: &Inventory) {
        self.active = true;
        let needs_host = class.shape.needs_host();
        let kinds = || class.needs.iter().map(|need| need.kind);
        let wants_all = class.named.is_none()
            && class
                .shape
                .thresholds
                .is_none_or(|thresholds| kinds().all(|kind| inventory.index_of(kind).all_below(thresholds)));
        if !wants_all {
            self.choosy.push(Choosy {
                kinds: kinds().collect(),
                named: class.named.clone(),
                thresholds: class.shape.thresholds,
                hosts: if needs_host { class.hosts.clone() } else { Vec::new() },
            });
            return;
        }
        kinds().for_each(|kind| set(&mut self.kinds, kind.0 as usize));
        if needs_host {
            let could = class.hosts.iter().enumerate().filter(|(_, could)| **could);
            could.for_each(|(shape, _)| set(&mut self.hosts, shape));
        }
    }

    /// Whether every device of a kind is kept off.
    pub fn bars_kind(&self, kind: KindId) -> bool {
        self.active && self.kinds.get(kind.0 as usize) == Some(&true)
    }

    /// Whether a device is kept off.
    pub fn bars_device(&self, id: DeviceId, slot: &DeviceSlot) -> bool {
        self.active && (self.bars_kind(slot.kind) || self.choosy.iter().any(|choosy| choosy.wants(id, slot)))
    }

    /// Whether the host of a node is kept off.
    pub fn bars_host(&self, node: &NodeSlot, inventory: &Inventory) -> bool {
        let shape = node.shape.0 as usize;
        let wants_one = |choosy: &Choosy| {
            choosy.hosts.get(shape) == Some(&true)
                && node.devices.iter().any(|device| choosy.wants(*device, inventory.device(*device)))
        };
        self.active && (self.hosts.get(shape) == Some(&true) || self.choosy.iter().any(wants_one))
    }
}

fn set(flags: &mut Vec<bool>, index: usize) {
    if flags.len() <= index {
        flags.resize(index + 1, false);
    }
    flags[index] = true;
}

//! What a request must leave alone, because somebody who came before could use it.

use crate::classes::Class;
use crate::ids::DeviceId;
use crate::inventory::KindId;

use crate::inventory::ShapeId;

/// Devices and hosts that classes ahead in the queue could use.
#[derive(Debug, Default)]
pub(crate) struct Guard {
    kinds: Vec<bool>,
    hosts: Vec<bool>,
    devices: Vec<DeviceId>,
    active: bool,
}

impl Guard {
    /// Keeps off everything that `class` could use.
    pub fn add(&mut self, class: &Class) {
        self.active = true;
        match &class.named {
            Some(named) => self.devices.extend(named),
            None => {
                for need in &class.needs {
                    set(&mut self.kinds, need.kind.0);
                }
            }
        }
        if class.shape.needs_host() {
            for (shape, _) in class.hosts.iter().enumerate().filter(|(_, could)| **could) {
                set(&mut self.hosts, shape as u32);
            }
        }
    }

    /// Whether every device of a kind is kept off.
    pub fn bars_kind(&self, kind: KindId) -> bool {
        self.active && self.kinds.get(kind.0 as usize) == Some(&true)
    }

    /// Whether a device is kept off.
    pub fn bars_device(&self, device: DeviceId, kind: KindId) -> bool {
        self.active && (self.bars_kind(kind) || self.devices.contains(&device))
    }

    /// Whether the hosts of a node shape are kept off.
    pub fn bars_host(&self, shape: ShapeId) -> bool {
        self.active && self.hosts.get(shape.0 as usize) == Some(&true)
    }
}

fn set(flags: &mut Vec<bool>, index: u32) {
    let index = index as usize;
    if flags.len() <= index {
        flags.resize(index + 1, false);
    }
    flags[index] = true;
}

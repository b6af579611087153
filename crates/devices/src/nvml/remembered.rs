//! What is kept of the devices beyond a session: who they were, and which errors speak against them.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::found::Found;

/// Every device that was ever opened.
#[derive(Debug, Default)]
pub(super) struct Remembered {
    devices: Vec<Device>,
    /// What Xids said against devices, by UUID.
    judged: BTreeMap<Arc<str>, Arc<str>>,
}

/// A device as it was last seen.
#[derive(Debug)]
pub(super) struct Device {
    pub facts: Found,
    pub instances: Vec<Found>,
    /// Lost, or waiting for a reset, when it was last looked for.
    away: bool,
}

impl Remembered {
    /// Keeps what an opened device is, and tells it who it is where it does not know at the moment.
    pub fn keep(&mut self, facts: &mut Found, instances: Vec<Found>) {
        let nameless = facts.uuid.is_none() && facts.pci.is_none();
        let is_it = |device: &&mut Device| {
            if nameless { device.facts.index == facts.index } else { same(&device.facts, facts) }
        };
        if let Some(device) = self.devices.iter_mut().find(is_it) {
            facts.uuid = facts.uuid.take().or(device.facts.uuid.take());
            facts.name = facts.name.take().or(device.facts.name.take());
            facts.pci = facts.pci.or(device.facts.pci);
            (device.facts, device.instances) = (facts.clone(), instances);
        } else if !nameless {
            self.devices.push(Device { facts: facts.clone(), instances, away: false });
        }
    }

    /// The devices that are not among `present`.
    pub fn missing<'a>(&'a self, present: &'a [&'a Found]) -> impl Iterator<Item = &'a Device> {
        self.devices.iter().filter(|device| !present.iter().any(|facts| same(&device.facts, facts)))
    }

    /// Notes whether a device answers. What Xids said against one that went and came back is forgotten: to come back
    /// it was reset.
    pub fn note(&mut self, facts: &Found, answers: bool) {
        let Some(device) = self.devices.iter_mut().find(|device| same(&device.facts, facts)) else { return };
        if device.away
            && answers
            && let Some(uuid) = &facts.uuid
        {
            self.judged.remove(uuid);
        }
        device.away = !answers;
    }

    /// Notes what an Xid says against a device.
    pub fn judge(&mut self, facts: &Found, text: String) {
        if let Some(uuid) = &facts.uuid {
            self.judged.insert(uuid.clone(), text.into());
        }
    }

    /// What Xids said against a device.
    pub fn judgement(&self, facts: &Found) -> Option<&Arc<str>> {
        self.judged.get(facts.uuid.as_ref()?)
    }

    /// Forgets what Xids said.
    pub fn forget_judgements(&mut self) {
        self.judged.clear();
    }
}

/// Whether two are one device: by UUID, or where one has none by the place on the bus.
fn same(one: &Found, other: &Found) -> bool {
    match (&one.uuid, &other.uuid) {
        (Some(a), Some(b)) => a == b,
        _ => one.pci.is_some() && one.pci == other.pci,
    }
}

//! Applying the samples of nodes to the pool.

use std::collections::HashSet;

use gpupool_core::{
    ApplyOutcome, CommandReply, DeviceClosure, DeviceFacts, DeviceHealth, DeviceId, GpuId, LeaseId, NodeId,
    PoolCommand, ProcessAttribution,
};

use crate::messages::{DeviceSample, NodeSample};

use super::AuthorityThread;

impl AuthorityThread {
    /// Applies a sample, or only stores it while the pool cannot be changed.
    pub(super) fn take_sample(&mut self, sample: Box<NodeSample>, outcome: &mut ApplyOutcome) {
        if self.is_broken() {
            if let Some(node) = self.pool.node_by_name(&sample.node.name) {
                self.samples.insert(node, sample);
            }
            return;
        }
        if let Some(node) = self.apply_sample(&sample, outcome) {
            self.samples.insert(node, sample);
        }
    }

    /// Applies the latest sample of each node, after the pool was rebuilt.
    pub(super) fn apply_latest_samples(&mut self, outcome: &mut ApplyOutcome) {
        for sample in std::mem::take(&mut self.samples).into_values() {
            self.take_sample(sample, outcome);
        }
    }

    /// Applies health and readings of known devices before the node counts as seen, so that no unhealthy device is
    /// granted in between. A new device that is unhealthy is left out until it is healthy. One that another agent leases
    /// is listed as closed.
    fn apply_sample(&mut self, sample: &NodeSample, outcome: &mut ApplyOutcome) -> Option<NodeId> {
        if let Some(node) = self.pool.node_by_name(&sample.node.name) {
            for device in &sample.devices {
                if let Some(id) = self.pool.device_by_identity(node, &device.facts.identity) {
                    self.observe_device(id, device, outcome);
                }
            }
        }
        let node = self.report_node(sample, outcome)?;
        self.apply(PoolCommand::Links { node, links: sample.links.clone() }, outcome).ok();
        if self.real_processes {
            self.occupancy.set_running(node, leases_on_devices(sample));
        }
        Some(node)
    }

    fn observe_device(&mut self, device: DeviceId, sample: &DeviceSample, outcome: &mut ApplyOutcome) {
        if self.pool.device(device).is_some_and(|view| view.health != sample.health) {
            self.apply(PoolCommand::SetHealth { device, health: sample.health.clone() }, outcome).ok();
        }
        if let Some(reading) = &sample.reading {
            self.apply(PoolCommand::Observe { device, reading: reading.clone() }, outcome).ok();
        }
    }

    /// Reports the node to the pool, with its devices that are new or changed.
    fn report_node(&mut self, sample: &NodeSample, outcome: &mut ApplyOutcome) -> Option<NodeId> {
        let known = self.pool.node_by_name(&sample.node.name);
        let (mut devices, mut numbers, mut new) = (Vec::<DeviceFacts>::new(), Vec::<GpuId>::new(), Vec::new());
        let mut claimed_elsewhere = Vec::new();
        for device in &sample.devices {
            let id = known.and_then(|node| self.pool.device_by_identity(node, &device.facts.identity));
            let view = id.and_then(|id| self.pool.device(id));
            let has_changed = match &view {
                Some(view) => *view.facts != *device.facts || view.closed.is_some_and(is_unseen),
                None => device.health == DeviceHealth::Healthy,
            };
            if view.is_none() && matches!(device.health, DeviceHealth::ClaimedElsewhere(_)) {
                claimed_elsewhere.push(device);
            }
            if has_changed {
                new.extend(view.is_none().then_some((devices.len(), device)));
                devices.push((*device.facts).clone());
                numbers.push(device.gpu_id);
            }
        }
        let command = PoolCommand::NodeSeen { facts: sample.node.clone(), devices, numbers };
        let Ok(CommandReply::Node(node, ids)) = self.apply(command, outcome) else { return known };
        for (place, device) in new {
            if let Some(id) = ids.get(place) {
                self.observe_device(*id, device, outcome);
            }
        }
        for device in claimed_elsewhere {
            let (facts, health) = (Box::new((*device.facts).clone()), device.health.clone());
            let command = PoolCommand::DeviceSeen { node, facts, number: device.gpu_id, health };
            if let Ok(CommandReply::Node(_, ids)) = self.apply(command, outcome) {
                ids.iter().for_each(|id| self.observe_device(*id, device, outcome));
            }
        }
        Some(node)
    }
}

fn is_unseen(closed: DeviceClosure) -> bool {
    matches!(closed, DeviceClosure::NotSeen | DeviceClosure::NodeLost)
}

/// Returns the leases with processes on devices.
fn leases_on_devices(sample: &NodeSample) -> HashSet<LeaseId> {
    let readings = sample.devices.iter().filter_map(|device| device.reading.as_ref());
    let processes = readings.filter_map(|reading| reading.processes.as_ref()).flatten();
    let leases = processes.filter_map(|process| match process.attribution {
        ProcessAttribution::Lease(lease) => Some(lease),
        ProcessAttribution::Foreign | ProcessAttribution::Unknown => None,
    });
    leases.collect()
}

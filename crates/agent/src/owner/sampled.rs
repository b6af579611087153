//! What readings mean for the pool: which devices there are, how they are, and who is on them.

use std::collections::HashSet;

use gpupool_api::lease::IfTaken;
use gpupool_confine::process::ProcessId;
use gpupool_core::device::Health;
use gpupool_core::lease::{Holder, LeaseState};
use gpupool_core::reading::Attribution;
use gpupool_core::{Answer, Command, LeaseId, Outcome};

use crate::sampler::{Holding, Holdings, Sample, SampledDevice};

use super::OwnerThread;

impl OwnerThread {
    /// Takes a reading in. Health and readings of known devices come before the node is seen, so that nobody is granted a
    /// sick device in between; a new device that is sick is not taken in before it is well.
    pub(super) fn take_sample(&mut self, sample: Box<Sample>, outcome: &mut Outcome) {
        for device in &sample.devices {
            self.observe(device, outcome);
        }
        self.see_node(&sample, outcome);
        if self.real_processes {
            self.ties.set_running(running(&sample));
        }
        self.sample = Some(sample);
    }

    fn observe(&mut self, sampled: &SampledDevice, outcome: &mut Outcome) {
        let Some(&device) = self.devices.get(&sampled.identity) else { return };
        let known = self.pool.device(device).map(|view| view.health);
        if known.as_ref() != Some(&sampled.health) {
            self.apply(Command::SetHealth { device, health: sampled.health.clone() }, outcome).ok();
        }
        if let Some(reading) = &sampled.reading {
            self.apply(Command::Observe { device, reading: reading.clone() }, outcome).ok();
        }
    }

    /// Says which devices there are, where that changed.
    fn see_node(&mut self, sample: &Sample, outcome: &mut Outcome) {
        let is_known = |device: &&SampledDevice| self.devices.contains_key(&device.identity);
        let taken_in: Vec<&SampledDevice> =
            sample.devices.iter().filter(|device| is_known(device) || device.health == Health::Healthy).collect();
        let changed = |device: &&SampledDevice| {
            let known = self.devices.get(&device.identity).and_then(|device| self.pool.device(*device));
            known.is_none_or(|view| *view.facts != device.facts || view.closed.is_some_and(not_seen))
        };
        let is_up = self.node_id.and_then(|node| self.pool.node(node)).is_some_and(|node| node.up);
        if is_up && !taken_in.iter().any(changed) {
            return self.join(sample, outcome);
        }
        let command = Command::NodeSeen {
            facts: self.node.clone(),
            devices: taken_in.iter().map(|device| device.facts.clone()).collect(),
            numbers: taken_in.iter().map(|device| device.gpu_id).collect(),
        };
        let Ok(Answer::Node(node, devices)) = self.apply(command, outcome) else { return };
        self.node_id = Some(node);
        let identities = taken_in.iter().map(|device| device.identity.clone());
        let new: Vec<_> =
            identities.zip(devices).filter(|(identity, _)| !self.devices.contains_key(identity)).collect();
        for (identity, device) in new {
            self.devices.insert(identity.clone(), device);
            if let Some(sampled) = sample.devices.iter().find(|sampled| sampled.identity == identity) {
                self.observe(sampled, outcome);
            }
        }
        self.join(sample, outcome);
    }

    fn join(&mut self, sample: &Sample, outcome: &mut Outcome) {
        if let Some(node) = self.node_id {
            self.apply(Command::Links { node, links: sample.links.clone() }, outcome).ok();
        }
    }

    /// The holders that rows tell of.
    pub(super) fn tie_holders(&mut self) {
        for lease in self.pool.leases().filter(|lease| !lease.promises.is_empty()) {
            match &lease.holder {
                Some(holder @ (Holder::Process { pid, started } | Holder::Supervisor { pid, started })) => {
                    let tie = self.ties.change(lease.id);
                    tie.process = Some(ProcessId { pid: *pid, started: *started });
                    if matches!(holder, Holder::Supervisor { .. }) {
                        tie.if_taken = IfTaken::EndJobs;
                    }
                }
                Some(Holder::Cgroup(path)) => self.ties.change(lease.id).group = Some(path.to_string()),
                Some(Holder::Connection) | None => {}
            }
        }
    }

    /// What whoever attributes processes has to know of leases.
    pub fn holdings(&self) -> Holdings {
        let holding = |lease: &gpupool_core::lease::Lease| {
            let tie = self.ties.of(lease.id).cloned().unwrap_or_default();
            Some(Holding {
                lease: lease.id,
                token: lease.token?,
                holder_pid: tie.process.map(|process| (process.pid, process.started)),
                devices: self.held(lease.id).to_vec(),
                cgroup: tie.group.as_deref().map(crate::groups::as_processes_tell),
                uid: tie.uid,
            })
        };
        let held = |lease: &&gpupool_core::lease::Lease| lease.state == LeaseState::Active || lease.draining;
        Holdings { leases: self.pool.leases().filter(held).filter_map(holding).collect() }
    }
}

fn not_seen(closed: gpupool_core::outcome::Closed) -> bool {
    use gpupool_core::outcome::Closed;
    matches!(closed, Closed::NotSeen | Closed::NodeLost)
}

/// Leases with processes on devices.
fn running(sample: &Sample) -> HashSet<LeaseId> {
    let readings = sample.devices.iter().filter_map(|device| device.reading.as_ref());
    let processes = readings.filter_map(|reading| reading.processes.as_ref()).flatten();
    let leases = processes.filter_map(|process| match process.attribution {
        Attribution::Lease(lease) => Some(lease),
        Attribution::Foreign | Attribution::Unknown => None,
    });
    leases.collect()
}

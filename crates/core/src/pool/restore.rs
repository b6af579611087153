//! A pool from the rows it left behind.
//!
//! A bad row never stops the service: it is left out and complained of. Counters only ever go forward, whatever the rows
//! say, so that no token and no lease number is used twice.

use std::collections::{BTreeMap, BTreeSet};

use crate::device::{DeviceFacts, DeviceIdentity, IsolationSupport, NodeFacts, Vendor};
use crate::ids::{DeviceId, Labels, LeaseId, NodeId};
use crate::lease::{EndCause, Lease, LeaseState};
use crate::limits;
use crate::policy::Policies;
use crate::row::{Counters, DeviceRow, LeaseRow, NodeRow, Row, UsageRow, WorkloadRow};
use crate::units::{Bytes, MilliCpus, Share, Time};
use crate::workload::TaskClass;

use super::{Pool, Settings};

/// A row that could not be taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// A node's row is missing, or its name is another's.
    #[error("node row {0}: it is missing, or its name or number does not follow on the rows before")]
    Node(NodeId),
    /// A device does not fit in.
    #[error("device row {device}: {why}")]
    Device { device: DeviceId, why: &'static str },
    /// A lease does not fit in.
    #[error("lease row {lease}: {why}")]
    Lease { lease: LeaseId, why: &'static str },
    /// A counter is beyond what any pool counts to; what the other rows say is used.
    #[error("counters row: a number is out of range")]
    Counters,
    /// The rules do not make sense; the given ones are used.
    #[error("policies row: {0}")]
    Policies(#[from] crate::request::FieldError),
}

/// The last row about each thing.
#[derive(Default)]
struct Latest {
    nodes: BTreeMap<NodeId, NodeRow>,
    devices: BTreeMap<DeviceId, DeviceRow>,
    leases: BTreeMap<LeaseId, LeaseRow>,
    counters: Counters,
    policies: Option<Box<Policies>>,
    usage: BTreeMap<std::sync::Arc<str>, UsageRow>,
    workload: BTreeMap<TaskClass, WorkloadRow>,
}

impl Latest {
    fn of(rows: impl IntoIterator<Item = Row>, bad: &mut Vec<RestoreError>) -> Self {
        let mut latest = Self::default();
        for row in rows {
            match row {
                Row::Lease(row) if !counted(&row) => {
                    bad.push(RestoreError::Lease { lease: row.id, why: "a number of it is out of range" });
                }
                Row::Counters(row) if row.next_lease.max(row.next_token).max(row.next_seq) > limits::COUNTED => {
                    bad.push(RestoreError::Counters);
                }
                Row::Node(row) => drop(latest.nodes.insert(row.node, row)),
                Row::Device(row) => drop(latest.devices.insert(row.device, row)),
                Row::Lease(row) => {
                    let counters = &mut latest.counters;
                    counters.next_lease = counters.next_lease.max(row.id.0 + 1);
                    counters.next_seq = counters.next_seq.max(row.seq + 1);
                    let token = row.token.map_or(0, |token| token.0 + 1);
                    counters.next_token = counters.next_token.max(token);
                    latest.leases.insert(row.id, row);
                }
                Row::Forget(lease) => drop(latest.leases.remove(&lease)),
                Row::Counters(row) => {
                    let before = latest.counters;
                    latest.counters = Counters {
                        next_lease: before.next_lease.max(row.next_lease),
                        next_token: before.next_token.max(row.next_token),
                        next_seq: before.next_seq.max(row.next_seq),
                        ..row
                    };
                }
                Row::Policies(row) => latest.policies = Some(row),
                Row::Usage(row) => drop(latest.usage.insert(row.owner.clone(), row)),
                Row::Workload(row) => drop(latest.workload.insert(row.class.clone(), row)),
            }
        }
        latest
    }
}

/// Whether the numbers of a lease are such that counting can go on after them.
fn counted(row: &LeaseRow) -> bool {
    let token = row.token.map_or(0, |token| token.0);
    row.id.0.max(row.seq).max(token) < limits::COUNTED
}

impl Pool {
    /// The pool that left these rows, in the order they were left, and what of them could not be taken.
    ///
    /// Every lease gets one full ttl from `now`. A device takes no new work until its node is seen again: send health and
    /// readings first, so that nobody is granted a sick device in between. `policies` are used where no row holds any.
    pub fn restore(
        settings: Settings,
        policies: Policies,
        now: Time,
        rows: impl IntoIterator<Item = Row>,
    ) -> (Self, Vec<RestoreError>) {
        let mut bad = Vec::new();
        let latest = Latest::of(rows, &mut bad);
        let mut pool = Self::new(settings, policies);
        pool.now = now;
        pool.counters = latest.counters;
        if let Some(policies) = latest.policies {
            match policies.validate() {
                Ok(()) => pool.policies = *policies,
                Err(error) => bad.push(error.into()),
            }
        }
        let counters = latest.counters;
        pool.workload.restore(latest.workload.into_values(), counters.workload_arrivals, counters.turnover);
        for row in latest.usage.values() {
            pool.owners.restore(row, now);
        }
        let mut links = Vec::new();
        for (id, row) in latest.nodes {
            pool.stand_in_for_nodes(id, &mut bad);
            if id.index() != pool.inventory.nodes.len() || pool.inventory.node_named(&row.facts.name).is_some() {
                bad.push(RestoreError::Node(id));
                continue;
            }
            pool.inventory.upsert_node(row.facts);
            pool.inventory.touch_node(id, |slot| slot.up = false);
            links.push((id, row.links));
        }
        for row in latest.devices.into_values() {
            let device = row.device;
            pool.stand_in_for_devices(device, &mut bad);
            if let Err(why) = pool.restore_device(row) {
                bad.push(RestoreError::Device { device, why });
            }
        }
        for (node, links) in links {
            pool.inventory.set_links(node, links);
        }
        if pool.counters.last_device.is_some_and(|last| last.index() >= pool.inventory.devices.len()) {
            pool.counters.last_device = None;
        }
        let mut by_token: Vec<LeaseRow> = latest.leases.into_values().collect();
        by_token.sort_by_key(|row| (row.token, row.id));
        let (mut ended, mut waiting) = (BTreeSet::new(), BTreeSet::new());
        for row in by_token {
            let (lease, ended_at) = (row.id, row.ended_at);
            if row.state == LeaseState::Queued && !waiting.insert(row.seq) {
                bad.push(RestoreError::Lease { lease, why: "its place in the queue is another's" });
                continue;
            }
            match pool.restore_lease(row, now) {
                Ok(state) if state.is_ended() => drop(ended.insert((ended_at, lease))),
                Ok(_) => {}
                Err(why) => bad.push(RestoreError::Lease { lease, why }),
            }
        }
        pool.ended = ended.into_iter().map(|(_, lease)| lease).collect();
        pool.requeue_all();
        for id in pool.leases.keys().copied().collect::<Vec<_>>() {
            pool.set_deadline(id);
        }
        (pool, bad)
    }

    /// Numbers are places: where rows are missing, nodes that are never seen keep them, so that what comes after stays
    /// what it was.
    fn stand_in_for_nodes(&mut self, next: NodeId, bad: &mut Vec<RestoreError>) {
        if next.index() > self.inventory.nodes.len() + limits::ROWS_MISSING {
            return;
        }
        while self.inventory.nodes.len() < next.index() {
            let missing = NodeId(self.inventory.nodes.len() as u32);
            bad.push(RestoreError::Node(missing));
            self.stand_in(missing);
        }
    }

    fn stand_in(&mut self, missing: NodeId) -> NodeId {
        let facts = NodeFacts {
            name: format!("(node {missing}, whose row is missing)").into(),
            cpus: MilliCpus::ZERO,
            memory: Bytes::ZERO,
            labels: Labels::new(),
        };
        let (node, _) = self.inventory.upsert_node(facts);
        self.inventory.touch_node(node, |slot| slot.up = false);
        node
    }

    /// The same for devices, on a node of their own.
    fn stand_in_for_devices(&mut self, next: DeviceId, bad: &mut Vec<RestoreError>) {
        let have = self.inventory.devices.len();
        if next.index() <= have || next.index() > have + limits::ROWS_MISSING {
            return;
        }
        let node = self.stand_in(NodeId(self.inventory.nodes.len() as u32));
        for device in (have as u32..next.0).map(DeviceId) {
            bad.push(RestoreError::Device { device, why: "it is missing" });
            let facts = DeviceFacts {
                identity: DeviceIdentity::Uuid(format!("(device {device}, whose row is missing)").into()),
                vendor: Vendor::Other,
                model: "unknown".into(),
                memory: None,
                partition: None,
                isolation: IsolationSupport::BASIC,
                labels: Labels::new(),
            };
            let (id, _) = self.inventory.upsert_device(node, facts, None);
            self.inventory.touch(id, |slot| slot.node_up = false);
        }
    }

    fn restore_device(&mut self, row: DeviceRow) -> Result<(), &'static str> {
        if row.device.index() != self.inventory.devices.len() {
            return Err("its number does not follow on the one before");
        }
        if row.node.index() >= self.inventory.nodes.len() {
            return Err("its node is not known");
        }
        if row.gpu_id.0 > limits::GPU_ID {
            return Err("its gpu_id is out of range");
        }
        if self.inventory.knows_device(row.node, &row.facts.identity) {
            return Err("its identity is another device's");
        }
        let same_number = |device: &DeviceId| self.inventory.device(*device).gpu_id == row.gpu_id;
        if self.inventory.node(row.node).devices.iter().any(same_number) {
            return Err("its gpu_id is another device's");
        }
        let id = self.inventory.insert_device(row.node, row.gpu_id, row.facts);
        self.inventory.touch(id, |slot| {
            slot.cordon = row.cordon;
            slot.node_up = false;
        });
        Ok(())
    }

    fn restore_lease(&mut self, row: LeaseRow, now: Time) -> Result<LeaseState, &'static str> {
        if row.request.validate().is_err() {
            return Err("its request is not valid");
        }
        check_state(&row)?;
        let state = row.state;
        let holds = state.is_granted() || row.draining;
        if holds {
            self.check_promises(&row)?;
        } else if !row.promises.is_empty() {
            return Err("it holds devices although it is not granted");
        }
        if let Some(key) = &row.key {
            self.keys.entry((row.request.owner.clone(), key.clone())).or_insert(row.id);
        }
        let lease = Lease::from_row(row, now);
        let id = lease.id;
        if holds {
            for promise in lease.promises.iter() {
                self.inventory.touch(promise.device, |slot| {
                    slot.promised += promise.share;
                    slot.promised_memory += promise.memory;
                    slot.leases.push(id);
                    slot.leases_changed_at = Some(now);
                    slot.quarantines += u16::from(lease.quarantined);
                });
            }
            if let Some(node) = lease.node {
                let request = lease.request.clone();
                self.inventory.touch_node(node, |slot| {
                    slot.cpus_promised += request.cpus;
                    slot.memory_promised += request.host_memory;
                });
            }
        }
        if state.is_granted() {
            let owner = self.owners.id(&lease.request.owner, now);
            self.owners.get_mut(owner).held += self.inventory.gpu_share(&lease.promises);
        }
        self.leases.insert(id, Box::new(lease));
        Ok(state)
    }

    /// Whether what a lease holds can be held: known devices of one node, not promised beyond the whole already.
    fn check_promises(&self, row: &LeaseRow) -> Result<(), &'static str> {
        let node = row.node.filter(|node| node.index() < self.inventory.nodes.len()).ok_or("its node is not known")?;
        let mut seen = BTreeSet::new();
        for promise in row.promises.iter() {
            if promise.device.index() >= self.inventory.devices.len() {
                return Err("a device of it is not known");
            }
            if self.inventory.device(promise.device).node != node {
                return Err("a device of it is not of its node");
            }
            if !seen.insert(promise.device) {
                return Err("a device of it is named twice");
            }
            let slot = self.inventory.device(promise.device);
            if promise.share.0 == 0 || slot.promised.0.saturating_add(promise.share.0) > Share::WHOLE.0 {
                return Err("a device of it is promised to others already");
            }
            if slot.promised_memory.0.checked_add(promise.memory.0).is_none() {
                return Err("its memory is out of range");
            }
        }
        let slot = self.inventory.node(node);
        let cpus = slot.cpus_promised.0.checked_add(row.request.cpus.0);
        let memory = slot.memory_promised.0.checked_add(row.request.host_memory.0);
        cpus.and(memory).map(|_| ()).ok_or("its host resources are out of range")
    }
}

/// Whether what a row says of a lease can be true together.
fn check_state(row: &LeaseRow) -> Result<(), &'static str> {
    let was_granted = row.token.is_some() && row.granted_at.is_some() && row.decision.is_some();
    if row.state.is_granted() && !was_granted {
        return Err("it is granted without a token, a time or a decision");
    }
    if row.state == LeaseState::Queued && (row.token.is_some() || row.node.is_some()) {
        return Err("it waits and was granted");
    }
    if row.state.is_ended() != row.ended_at.is_some() || row.cause.as_ref().map(EndCause::state) != ended(row.state) {
        return Err("its end, its cause and its state do not agree");
    }
    if (row.draining && !row.state.is_ended()) || (row.quarantined && !row.draining) {
        return Err("it drains and is not over");
    }
    if row.holder.is_some() && row.state != LeaseState::Active {
        return Err("it has a holder and is not active");
    }
    Ok(())
}

fn ended(state: LeaseState) -> Option<LeaseState> {
    Some(state).filter(|state| state.is_ended())
}

//! A pool from the rows it left behind.
//!
//! A bad row never stops the service: it is left out and complained of. Counters only ever go forward, whatever the rows
//! say, so that no token and no lease number is used twice.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{DeviceId, LeaseId, NodeId};
use crate::lease::LeaseState;
use crate::limits;
use crate::policy::Policies;
use crate::row::{Counters, DeviceRow, LeaseRow, NodeRow, Row, UsageRow, WorkloadRow};
use crate::units::{Share, Time};
use crate::workload::TaskClass;

use super::{Pool, Settings};

/// A row that could not be taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// A node's number does not follow on the one before.
    #[error("node row {0}: its number or name does not follow on the rows before")]
    Node(NodeId),
    /// A device does not fit in.
    #[error("device row {device}: {why}")]
    Device {
        /// Which.
        device: DeviceId,
        /// Why.
        why: &'static str,
    },
    /// A lease does not fit in.
    #[error("lease row {lease}: {why}")]
    Lease {
        /// Which.
        lease: LeaseId,
        /// Why.
        why: &'static str,
    },
    /// The counters are out of range; those that the leases show are used.
    #[error("counters row: its numbers are out of range")]
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
    bad_counters: bool,
    policies: Option<Box<Policies>>,
    usage: BTreeMap<std::sync::Arc<str>, UsageRow>,
    workload: BTreeMap<TaskClass, WorkloadRow>,
}

impl Latest {
    fn of(rows: impl IntoIterator<Item = Row>) -> Self {
        let mut latest = Self::default();
        for row in rows {
            match row {
                Row::Node(row) => drop(latest.nodes.insert(row.node, row)),
                Row::Device(row) => drop(latest.devices.insert(row.device, row)),
                Row::Lease(row) => {
                    if in_range(&row) {
                        let counters = &mut latest.counters;
                        counters.next_lease = counters.next_lease.max(row.id.0 + 1);
                        counters.next_seq = counters.next_seq.max(row.seq + 1);
                        let token = row.token.map_or(0, |token| token.0 + 1);
                        counters.next_token = counters.next_token.max(token);
                    }
                    latest.leases.insert(row.id, row);
                }
                Row::Forget(lease) => drop(latest.leases.remove(&lease)),
                Row::Counters(row) if row.next_lease.max(row.next_token).max(row.next_seq) > limits::NUMBERS => {
                    latest.bad_counters = true;
                }
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

impl Pool {
    /// The pool that left these rows, in the order they were left, and what of them could not be taken.
    ///
    /// Every lease gets one full ttl from `now`. A device takes no new work until its node is seen again. `policies` are
    /// used where no row holds any.
    pub fn restore(
        settings: Settings,
        policies: Policies,
        now: Time,
        rows: impl IntoIterator<Item = Row>,
    ) -> (Self, Vec<RestoreError>) {
        let latest = Latest::of(rows);
        let mut pool = Self::new(settings, policies);
        let mut bad = Vec::new();
        pool.now = now;
        pool.counters = latest.counters;
        bad.extend(latest.bad_counters.then_some(RestoreError::Counters));
        if let Some(policies) = latest.policies {
            match policies.validate() {
                Ok(()) => pool.policies = *policies,
                Err(error) => bad.push(error.into()),
            }
        }
        pool.workload.restore(latest.workload.into_values(), latest.counters.workload_arrivals);
        for row in latest.usage.values() {
            pool.owners.restore(row);
        }
        let mut links = Vec::new();
        for (id, row) in latest.nodes {
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
        let mut ended = BTreeSet::new();
        let mut places = BTreeSet::new();
        for row in by_token {
            let (lease, ended_at) = (row.id, row.ended_at);
            if row.state == LeaseState::Queued && !places.insert(row.seq) {
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

    fn restore_device(&mut self, row: DeviceRow) -> Result<(), &'static str> {
        if row.device.index() != self.inventory.devices.len() {
            return Err("its number does not follow on the one before");
        }
        if row.node.index() >= self.inventory.nodes.len() {
            return Err("its node is not known");
        }
        if row.gpu_id.0 > 1 << 20 {
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
        if let Some(why) = contradiction(&row) {
            return Err(why);
        }
        let state = row.state;
        let holds = state.is_granted() || row.draining;
        if holds {
            self.check_promises(&row)?;
        } else if !row.promises.is_empty() {
            return Err("it holds devices although it is not granted");
        }
        if let Some(key) = &row.key {
            self.keys.insert((row.request.owner.clone(), key.clone()), row.id);
        }
        let lease = row.into_lease(now);
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
            self.owners.get_mut(owner).held += u64::from(lease.held_share().0);
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

fn in_range(row: &LeaseRow) -> bool {
    row.id.0 < limits::NUMBERS && row.seq < limits::NUMBERS && row.token.is_none_or(|token| token.0 < limits::NUMBERS)
}

/// What a row says that cannot all be true.
fn contradiction(row: &LeaseRow) -> Option<&'static str> {
    let (ended, granted) = (row.state.is_ended(), row.state.is_granted());
    if !in_range(row) {
        return Some("its numbers are out of range");
    }
    if ended != row.ended_at.is_some() || ended != row.cause.is_some() {
        return Some("it ended without a cause or time, or has one and did not end");
    }
    if granted && (row.token.is_none() || row.granted_at.is_none()) {
        return Some("it is granted without a token or time");
    }
    if (row.draining && !ended) || (row.quarantined && !row.draining) {
        return Some("it drains although it did not end, or is quarantined although it does not drain");
    }
    None
}

//! Restoring a pool from its rows.
//!
//! A bad row never stops the service: it is skipped and reported. A number without a row is vacant: a node or device
//! was removed, or its row was lost; only a lease that refers to it is reported. Counters never go back, so that no
//! token and no lease number is used twice.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{DeviceId, LeaseId, NodeId};
use crate::lease::{EndCause, Lease, LeaseState};
use crate::limits;
use crate::policy::Policies;
use crate::row::{DeviceRow, LeaseRow, NodeRow, PoolCounters, PoolRow, UsageRow, WorkloadRow};
use crate::units::{PoolTime, Share};
use crate::workload::TaskClass;

use super::{Pool, PoolSettings};

/// Row that could not be restored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    #[error("node row {0}: its name is taken, or its number is far beyond the others")]
    Node(NodeId),
    #[error("device row {device}: {why}")]
    Device { device: DeviceId, why: &'static str },
    #[error("lease row {lease}: {why}")]
    Lease { lease: LeaseId, why: &'static str },
    /// A counter is beyond any reachable count; the other rows provide it.
    #[error("counters row: a number is out of range")]
    Counters,
    /// The policies are inconsistent; the given ones are used.
    #[error("policies row: {0}")]
    Policies(#[from] crate::request::FieldError),
}

/// Last row of each entity.
#[derive(Default)]
struct LatestRows {
    nodes: BTreeMap<NodeId, NodeRow>,
    devices: BTreeMap<DeviceId, DeviceRow>,
    leases: BTreeMap<LeaseId, LeaseRow>,
    counters: PoolCounters,
    policies: Option<Box<Policies>>,
    usage: BTreeMap<std::sync::Arc<str>, UsageRow>,
    workload: BTreeMap<TaskClass, WorkloadRow>,
}

impl LatestRows {
    fn collect(rows: impl IntoIterator<Item = PoolRow>, bad: &mut Vec<RestoreError>) -> Self {
        let mut latest = Self::default();
        for row in rows {
            match row {
                PoolRow::Lease(row) if !has_valid_numbers(&row) => {
                    bad.push(RestoreError::Lease { lease: row.id, why: "a number is out of range" });
                }
                PoolRow::Counters(row) if row.next_lease.max(row.next_token).max(row.next_seq) > limits::MAX_COUNT => {
                    bad.push(RestoreError::Counters);
                }
                PoolRow::Node(row) => drop(latest.nodes.insert(row.node, row)),
                PoolRow::Device(row) => drop(latest.devices.insert(row.device, row)),
                PoolRow::Lease(row) => {
                    let counters = &mut latest.counters;
                    counters.next_lease = counters.next_lease.max(row.id.0 + 1);
                    counters.next_seq = counters.next_seq.max(row.seq + 1);
                    let token = row.token.map_or(0, |token| token.0 + 1);
                    counters.next_token = counters.next_token.max(token);
                    latest.leases.insert(row.id, row);
                }
                PoolRow::Forget(lease) => drop(latest.leases.remove(&lease)),
                PoolRow::ForgetNode(node) => drop(latest.nodes.remove(&node)),
                PoolRow::ForgetDevice(device) => drop(latest.devices.remove(&device)),
                PoolRow::Counters(row) => {
                    let before = latest.counters;
                    latest.counters = PoolCounters {
                        next_lease: before.next_lease.max(row.next_lease),
                        next_token: before.next_token.max(row.next_token),
                        next_seq: before.next_seq.max(row.next_seq),
                        ..row
                    };
                }
                PoolRow::Policies(row) => latest.policies = Some(row),
                PoolRow::Usage(row) => drop(latest.usage.insert(row.owner.clone(), row)),
                PoolRow::Workload(row) => drop(latest.workload.insert(row.class.clone(), row)),
            }
        }
        latest
    }
}

/// Whether the numbers of a lease are far enough from an overflow.
fn has_valid_numbers(row: &LeaseRow) -> bool {
    let token = row.token.map_or(0, |token| token.0);
    row.id.0.max(row.seq).max(token) < limits::MAX_COUNT
}

impl Pool {
    /// Restores a pool from its rows, in the order they were written, and returns the rows that could not be restored.
    ///
    /// Every lease gets one full ttl from `now`. A device takes no new work until its node is seen again: send health
    /// and readings first, so that no lease is granted an unhealthy device in between. `policies` apply if no row holds
    /// any.
    pub fn restore(
        settings: PoolSettings,
        policies: Policies,
        now: PoolTime,
        rows: impl IntoIterator<Item = PoolRow>,
    ) -> (Self, Vec<RestoreError>) {
        let mut bad = Vec::new();
        let latest = LatestRows::collect(rows, &mut bad);
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
            let is_far = id.0 > pool.inventory.nodes.span().saturating_add(limits::MAX_VACANT_NUMBERS);
            if is_far || pool.inventory.node_by_name(&row.facts.name).is_some() {
                bad.push(RestoreError::Node(id));
                continue;
            }
            pool.inventory.insert_node(id, row.facts);
            pool.inventory.update_node(id, |slot| slot.up = false);
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
        pool.counters.last_device = pool.counters.last_device.filter(|last| pool.inventory.devices.contains(last.0));
        pool.written_counters = pool.counters;
        let mut by_token: Vec<LeaseRow> = latest.leases.into_values().collect();
        by_token.sort_by_key(|row| (row.token, row.id));
        let (mut ended, mut waiting) = (BTreeSet::new(), BTreeSet::new());
        for row in by_token {
            let (lease, ended_at) = (row.id, row.ended_at);
            if row.state == LeaseState::Queued && !waiting.insert(row.seq) {
                bad.push(RestoreError::Lease { lease, why: "another lease has its queue position" });
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
        if row.device.0 > self.inventory.devices.span().saturating_add(limits::MAX_VACANT_NUMBERS) {
            return Err("its number is far beyond the others");
        }
        if !self.inventory.nodes.contains(row.node.0) {
            return Err("its node is unknown");
        }
        if row.gpu_id.0 > limits::MAX_GPU_ID {
            return Err("its gpu_id is out of range");
        }
        if self.inventory.device_by_identity(row.node, &row.facts.identity).is_some() {
            return Err("another device has its identity");
        }
        if self.inventory.device_with_gpu_id(row.node, row.gpu_id).is_some() {
            return Err("another device has its gpu_id");
        }
        self.inventory.insert_device(row.device, row.node, row.gpu_id, row.facts);
        self.inventory.update_device(row.device, |slot| slot.cordon = row.cordon);
        Ok(())
    }

    fn restore_lease(&mut self, row: LeaseRow, now: PoolTime) -> Result<LeaseState, &'static str> {
        if row.request.validate().is_err() {
            return Err("its request is invalid");
        }
        check_state(&row)?;
        let state = row.state;
        let holds = state.is_granted() || row.draining;
        if holds {
            self.check_promises(&row)?;
        } else if !row.promises.is_empty() {
            return Err("it holds devices but is not granted");
        }
        if let Some(key) = &row.key {
            self.keys.entry((row.request.owner.clone(), key.clone())).or_insert(row.id);
        }
        let lease = Lease::from_row(row, now);
        let id = lease.id;
        if holds {
            for promise in lease.promises.iter() {
                self.inventory.update_device(promise.device, |slot| {
                    slot.promised += promise.share;
                    slot.promised_memory += promise.memory;
                    slot.leases.push(id);
                    slot.leases_changed_at = Some(now);
                    slot.quarantines += u16::from(lease.quarantined);
                });
            }
            if let Some(node) = lease.node {
                let request = lease.request.clone();
                self.inventory.update_node(node, |slot| {
                    slot.cpus_promised += request.cpus;
                    slot.memory_promised += request.host_memory;
                });
            }
        }
        if state.is_granted() {
            let owner = self.owners.get_or_open(&lease.request.owner, now);
            self.owners.get_mut(owner).held += self.inventory.gpu_share(&lease.promises);
        }
        self.leases.insert(id, Box::new(lease));
        Ok(state)
    }

    /// Checks that the promises of a lease are possible: known devices of one node, not promised beyond a whole.
    fn check_promises(&self, row: &LeaseRow) -> Result<(), &'static str> {
        let node = row.node.filter(|node| self.inventory.nodes.contains(node.0)).ok_or("its node is unknown")?;
        let mut seen = BTreeSet::new();
        for promise in row.promises.iter() {
            if !self.inventory.devices.contains(promise.device.0) {
                return Err("a device is unknown");
            }
            if self.inventory.device(promise.device).node != node {
                return Err("a device is on another node");
            }
            if !seen.insert(promise.device) {
                return Err("a device is listed twice");
            }
            let slot = self.inventory.device(promise.device);
            if promise.share.0 == 0 || slot.promised.0.saturating_add(promise.share.0) > Share::WHOLE.0 {
                return Err("a device is already promised to others");
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

/// Checks that the fields of a row are consistent.
fn check_state(row: &LeaseRow) -> Result<(), &'static str> {
    let was_granted = row.token.is_some() && row.granted_at.is_some() && row.decision.is_some();
    if row.state.is_granted() && !was_granted {
        return Err("it is granted without a token, a time or a decision");
    }
    if row.state == LeaseState::Queued && (row.token.is_some() || row.node.is_some()) {
        return Err("it waits but was granted");
    }
    let is_ended = row.state.is_ended();
    let end_state = row.cause.as_ref().map(EndCause::state);
    if is_ended != row.ended_at.is_some() || end_state != is_ended.then_some(row.state) {
        return Err("its end, cause and state are inconsistent");
    }
    if (row.draining && !is_ended) || (row.quarantined && !row.draining) {
        return Err("it drains but has not ended");
    }
    if row.holder.is_some() && row.state != LeaseState::Active {
        return Err("it has a holder but is not active");
    }
    Ok(())
}

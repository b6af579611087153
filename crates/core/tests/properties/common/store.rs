//! Store of the last row of each entity.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_core::{DeviceId, LeaseId, LeaseRow, NodeId, Pool, PoolCounters, PoolRow};

use super::model::ensure;

#[derive(Debug, Clone, Default)]
pub struct ModelStore {
    nodes: BTreeMap<NodeId, PoolRow>,
    devices: BTreeMap<DeviceId, PoolRow>,
    leases: BTreeMap<LeaseId, LeaseRow>,
    counters: Option<PoolCounters>,
    policies: Option<PoolRow>,
    usage: BTreeMap<Arc<str>, PoolRow>,
    workload: Vec<PoolRow>,
}

impl ModelStore {
    pub fn commit(&mut self, rows: &[PoolRow]) {
        for row in rows.iter().cloned() {
            match row {
                PoolRow::Node(ref node) => drop(self.nodes.insert(node.node, row)),
                PoolRow::Device(ref device) => drop(self.devices.insert(device.device, row)),
                PoolRow::Lease(lease) => drop(self.leases.insert(lease.id, lease)),
                PoolRow::Forget(lease) => drop(self.leases.remove(&lease)),
                PoolRow::ForgetNode(node) => drop(self.nodes.remove(&node)),
                PoolRow::ForgetDevice(device) => drop(self.devices.remove(&device)),
                PoolRow::Counters(counters) => self.counters = Some(counters),
                PoolRow::Policies(_) => self.policies = Some(row),
                PoolRow::Usage(ref usage) => drop(self.usage.insert(usage.owner.clone(), row)),
                PoolRow::Workload(ref class) => {
                    let same = |kept: &PoolRow| matches!(kept, PoolRow::Workload(kept) if kept.class == class.class);
                    self.workload.retain(|kept| !same(kept));
                    self.workload.push(row);
                }
            }
        }
    }

    /// Returns all rows as a store reads them back: by table.
    pub fn rows(&self) -> Vec<PoolRow> {
        let mut rows: Vec<PoolRow> = self.counters.map(PoolRow::Counters).into_iter().collect();
        rows.extend(self.rows_without_counters());
        rows
    }

    pub fn rows_without_counters(&self) -> Vec<PoolRow> {
        let mut rows: Vec<PoolRow> = self.policies.iter().cloned().collect();
        rows.extend(self.nodes.values().chain(self.devices.values()).cloned());
        rows.extend(self.leases.values().cloned().map(PoolRow::Lease));
        rows.extend(self.usage.values().chain(&self.workload).cloned());
        rows
    }

    /// Checks that the rows contain exactly the pool's leases, devices and nodes.
    pub fn check_against(&self, pool: &Pool) -> Result<(), String> {
        let leases: Vec<LeaseRow> = pool.leases().map(|lease| lease.row().clone()).collect();
        let kept = self.leases.values();
        if !leases.iter().eq(kept) {
            let differing = leases.iter().find(|lease| self.leases.get(&lease.id) != Some(lease));
            let row = differing.map(|lease| self.leases.get(&lease.id));
            return Err(format!("rule 2: {differing:?} is not what the rows keep: {row:?}"));
        }
        let seen = |row: &PoolRow| if let PoolRow::Workload(class) = row { class.seen } else { 0 };
        let (kept, counted) =
            (self.workload.iter().map(seen).sum::<u64>(), self.counters.map_or(0, |c| c.workload_arrivals));
        ensure!(counted == kept, "rule 2: {counted} arrivals are counted, {kept} are kept");
        let known = (pool.devices().count(), pool.nodes().count());
        let kept = (self.devices.len(), self.nodes.len());
        ensure!(known == kept, "rule 2: {known:?} devices and nodes are known, {kept:?} are kept");
        for view in pool.devices() {
            let kept = self.devices.get(&view.device);
            let same = |row: &PoolRow| {
                matches!(row, PoolRow::Device(row) if row.facts == view.facts && row.cordon == view.cordon
                    && row.gpu_id == view.gpu_id && row.node == view.node)
            };
            ensure!(kept.is_some_and(same), "rule 2: device {} is kept as {kept:?}", view.device);
        }
        for view in pool.nodes() {
            let kept = self.nodes.get(&view.node);
            let same = |row: &PoolRow| matches!(row, PoolRow::Node(row) if row.facts == view.facts);
            ensure!(kept.is_some_and(same), "rule 2: node {} is kept as {kept:?}", view.node);
        }
        Ok(())
    }
}

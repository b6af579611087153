//! Looking at a pool without changing it.

use std::sync::Arc;

use crate::device::{Cordon, DeviceFacts, Health, NodeFacts};
use crate::ids::{DeviceId, GpuId, LeaseId, NodeId, Token};
use crate::lease::Lease;
use crate::outcome::Closed;
use crate::policy::Policies;
use crate::reading::Foreign;
use crate::row::UsageRow;
use crate::units::{Bytes, MilliCpus, Percent, Share, Time};

use super::Pool;

/// A device, as it is now.
#[derive(Debug, Clone)]
pub struct DeviceView {
    /// Its number in the pool.
    pub device: DeviceId,
    /// Its node.
    pub node: NodeId,
    /// Its number on the node.
    pub gpu_id: GpuId,
    /// What it is.
    pub facts: Arc<DeviceFacts>,
    /// Its health.
    pub health: Health,
    /// Whether an administrator stopped it.
    pub cordon: Cordon,
    /// Why it takes no new work, if so.
    pub closed: Option<Closed>,
    /// What is promised of it.
    pub promised: Share,
    /// What is promised of its memory.
    pub promised_memory: Bytes,
    /// Who holds it, or drains on it.
    pub leases: Vec<LeaseId>,
    /// What no lease explains.
    pub foreign: Option<Foreign>,
    /// Memory % in use, promises counted as used.
    pub memory_percent: Percent,
    /// Utilization %, promises counted as used.
    pub utilization_percent: Percent,
    /// Its temperature in °C, where it reports one.
    pub temperature_c: Option<i16>,
    /// When it was last read.
    pub read_at: Option<Time>,
}

/// A node, as it is now.
#[derive(Debug, Clone)]
pub struct NodeView {
    /// Its number.
    pub node: NodeId,
    /// What it is.
    pub facts: NodeFacts,
    /// Whether it is reachable.
    pub up: bool,
    /// Its devices.
    pub devices: Vec<DeviceId>,
    /// Host CPUs promised.
    pub cpus_promised: MilliCpus,
    /// Host memory promised.
    pub memory_promised: Bytes,
}

impl Pool {
    /// A lease, if it is live or still remembered.
    pub fn lease(&self, id: LeaseId) -> Option<&Lease> {
        self.leases.get(&id).map(|lease| &**lease)
    }

    /// The lease that an owner's request with this key became.
    pub fn lease_of_key(&self, owner: &Arc<str>, key: &Arc<str>) -> Option<&Lease> {
        self.lease(*self.keys.get(&(owner.clone(), key.clone()))?)
    }

    /// All leases, by number.
    pub fn leases(&self) -> impl Iterator<Item = &Lease> {
        self.leases.values().map(|lease| &**lease)
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// A device.
    pub fn device(&self, id: DeviceId) -> Option<DeviceView> {
        let slot = self.inventory.devices.get(id.index())?;
        Some(DeviceView {
            device: id,
            node: slot.node,
            gpu_id: slot.gpu_id,
            facts: slot.facts.clone(),
            health: slot.health.clone(),
            cordon: slot.cordon,
            closed: slot.closed(),
            promised: slot.promised,
            promised_memory: slot.promised_memory,
            leases: slot.leases.clone(),
            foreign: slot.foreign,
            memory_percent: slot.memory_percent(),
            utilization_percent: slot.utilization_percent(),
            temperature_c: slot.observed.and_then(|observed| observed.temperature_c.value()),
            read_at: slot.observed.map(|observed| observed.at),
        })
    }

    /// All devices, by number.
    pub fn devices(&self) -> impl Iterator<Item = DeviceView> {
        (0..self.inventory.devices.len() as u32).filter_map(|number| self.device(DeviceId(number)))
    }

    /// A node.
    pub fn node(&self, id: NodeId) -> Option<NodeView> {
        let slot = self.inventory.nodes.get(id.index())?;
        Some(NodeView {
            node: id,
            facts: slot.facts.clone(),
            up: slot.up,
            devices: slot.devices.clone(),
            cpus_promised: slot.cpus_promised,
            memory_promised: slot.memory_promised,
        })
    }

    /// All nodes, by number.
    pub fn nodes(&self) -> impl Iterator<Item = NodeView> {
        (0..self.inventory.nodes.len() as u32).filter_map(|number| self.node(NodeId(number)))
    }

    /// The token the next grant gets: every one before it was given out.
    pub fn next_token(&self) -> Token {
        Token(self.counters.next_token)
    }

    /// Grows whenever strategies that look ahead take over a new workload.
    pub fn workload_version(&self) -> u64 {
        self.workload.version
    }

    /// The rules in force.
    pub fn policies(&self) -> &Policies {
        &self.policies
    }

    /// What each owner used in its period, up to the last change of what it holds.
    pub fn usage(&self) -> impl Iterator<Item = UsageRow> {
        self.owners.all().iter().map(crate::owners::Account::row)
    }
}

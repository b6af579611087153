//! Model of a pool that sees only commands, effects and rows: plain maps and scans, no index.
//!
//! It predicts the state of the pool, and [`super::effects`] rejects every effect that the state does not call for.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_core::{
    Bytes, CordonState, DeviceClosure, DeviceFacts, DeviceHealth, DeviceId, DeviceLink, DevicePromise, DeviceReading,
    DrainMode, EndCause, GpuId, Lease, LeaseId, LeaseState, Millis, NodeFacts, NodeId, Policies, Pool, PoolSettings,
    PoolTime, ProcessAttribution, ReadingField, Request, Token,
};

pub const WAITER_PATIENCE: Millis = Millis::from_secs(15);
pub const OFFER_LIFETIME: Millis = Millis::from_secs(5);

/// Fails a check with a message.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}
pub(crate) use ensure;

#[derive(Debug)]
pub struct ModelNode {
    pub facts: NodeFacts,
    pub up: bool,
    pub links: Vec<DeviceLink>,
}

#[derive(Debug)]
pub struct ModelDevice {
    pub node: NodeId,
    pub gpu_id: GpuId,
    pub facts: DeviceFacts,
    pub seen: bool,
    pub health: DeviceHealth,
    pub cordon: CordonState,
    pub hot: bool,
    pub reading: Option<DeviceReading>,
    pub foreign: Option<ModelForeignLoad>,
    pub leases_changed_at: Option<PoolTime>,
    /// Closure as the effects reported it.
    pub reported: Option<DeviceClosure>,
}

/// Foreign part of a reading: bytes, thousandths of a percent, processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelForeignLoad {
    pub memory: Option<u64>,
    pub utilization: Option<u32>,
    pub processes: usize,
}

#[derive(Debug, Clone)]
pub struct ModelLease {
    pub id: LeaseId,
    pub request: Arc<Request>,
    pub state: LeaseState,
    pub token: Option<Token>,
    pub node: Option<NodeId>,
    pub promises: Vec<DevicePromise>,
    /// Share held at first, for GPU-hours.
    pub granted_share: u64,
    pub draining: bool,
    pub quarantined: bool,
    pub has_holder: bool,
    pub created_at: PoolTime,
    pub granted_at: Option<PoolTime>,
    pub ended_at: Option<PoolTime>,
    pub revoke_at: Option<PoolTime>,
    pub hard_end: Option<PoolTime>,
    pub expires_at: Option<PoolTime>,
    pub followed_at: PoolTime,
}

#[derive(Debug)]
pub struct PoolModel {
    pub settings: PoolSettings,
    pub policies: Policies,
    pub now: PoolTime,
    pub nodes: BTreeMap<NodeId, ModelNode>,
    pub devices: BTreeMap<DeviceId, ModelDevice>,
    pub leases: BTreeMap<LeaseId, ModelLease>,
    pub keys: BTreeMap<(Arc<str>, Arc<str>), LeaseId>,
    pub last_token: Option<Token>,
    pub configured_workload: bool,
}

impl ModelLease {
    pub fn new(id: LeaseId, request: Arc<Request>, now: PoolTime) -> Self {
        Self {
            id,
            request,
            state: LeaseState::Queued,
            token: None,
            node: None,
            promises: Vec::new(),
            granted_share: 0,
            draining: false,
            quarantined: false,
            has_holder: false,
            created_at: now,
            granted_at: None,
            ended_at: None,
            revoke_at: None,
            hard_end: None,
            expires_at: None,
            followed_at: now,
        }
    }

    /// Whether it holds capacity.
    pub fn holds_capacity(&self) -> bool {
        self.state.is_granted() || self.draining
    }

    /// Returns every deadline that can end it, with the cause.
    pub fn ends(&self) -> Vec<(PoolTime, EndCause)> {
        let mut ends = Vec::new();
        match self.state {
            LeaseState::Queued => {
                ends.push((self.followed_at.after(WAITER_PATIENCE), EndCause::Abandoned));
                ends.extend(self.request.wait_limit.map(|l| (self.created_at.after(l), EndCause::WaitLimitPassed)));
            }
            LeaseState::Offered => {
                ends.extend(self.granted_at.map(|at| (at.after(OFFER_LIFETIME), EndCause::OfferLapsed)));
                ends.extend(self.hard_end.map(|at| (at, EndCause::OfferLapsed)));
            }
            LeaseState::Active => {
                ends.extend(self.expires_at.map(|at| (at, EndCause::TtlPassed)));
                ends.extend(self.hard_end.map(|at| (at, EndCause::MaxDurationPassed)));
                ends.extend(self.revoke_at.map(|at| (at, EndCause::Revoked)));
            }
            _ => {}
        }
        ends
    }

    /// Returns the time at which its devices are quarantined if it still drains.
    pub fn quarantine_at(&self, settings: PoolSettings) -> Option<PoolTime> {
        match settings.drain {
            DrainMode::WhenGone { patience } if self.draining && !self.quarantined => {
                self.ended_at.map(|at| at.after(patience))
            }
            _ => None,
        }
    }

    fn agrees_with(&self, lease: &Lease) -> bool {
        self.state == lease.state
            && self.token == lease.token
            && self.node == lease.node
            && self.promises[..] == lease.promises[..]
            && (self.draining, self.quarantined) == (lease.draining, lease.quarantined)
            && self.has_holder == lease.holder.is_some()
            && (self.created_at, self.granted_at) == (lease.created_at, lease.granted_at)
            && (self.ended_at, self.revoke_at) == (lease.ended_at, lease.revoke_at)
            && (self.hard_end, self.expires_at) == (lease.hard_end, lease.expires_at)
    }
}

impl ModelDevice {
    pub fn capacity(&self) -> u64 {
        self.facts.memory.map_or(0, |memory| memory.total.0.saturating_sub(memory.reserved.0))
    }
}

impl PoolModel {
    pub fn new(settings: PoolSettings, policies: Policies) -> Self {
        Self {
            settings,
            policies,
            now: PoolTime(0),
            nodes: BTreeMap::new(),
            devices: BTreeMap::new(),
            leases: BTreeMap::new(),
            keys: BTreeMap::new(),
            last_token: None,
            configured_workload: false,
        }
    }

    /// Returns the leases that hold capacity of a device, with their promises.
    pub fn leases_on(&self, device: DeviceId) -> impl Iterator<Item = (&ModelLease, DevicePromise)> {
        let of_device = move |promise: &&DevicePromise| promise.device == device;
        let held = self.leases.values().filter(|entry| entry.holds_capacity());
        held.filter_map(move |entry| entry.promises.iter().find(of_device).map(|promise| (entry, *promise)))
    }

    pub fn promised(&self, device: DeviceId) -> (u64, u64) {
        self.leases_on(device).fold((0, 0), |(share, memory), (_, promise)| {
            (share + u64::from(promise.share.0), memory + promise.memory.0)
        })
    }

    pub fn host_promised(&self, node: NodeId) -> (u64, u64) {
        let here = self.leases.values().filter(|entry| entry.node == Some(node) && entry.holds_capacity());
        here.fold((0, 0), |(cpus, memory), entry| (cpus + entry.request.cpus.0, memory + entry.request.host_memory.0))
    }

    pub fn waiting(&self) -> impl Iterator<Item = &ModelLease> {
        // A request that does not wait is never a waiter, not even while it is decided.
        self.leases.values().filter(|entry| entry.state == LeaseState::Queued && entry.request.queue)
    }

    pub fn devices_of(&self, node: NodeId) -> impl Iterator<Item = (DeviceId, &ModelDevice)> {
        self.devices.iter().filter(move |(_, device)| device.node == node).map(|(id, device)| (*id, device))
    }

    pub fn closure(&self, id: DeviceId) -> Option<DeviceClosure> {
        let device = &self.devices[&id];
        if !self.nodes[&device.node].up {
            return Some(DeviceClosure::NodeLost);
        }
        if !device.seen {
            return Some(DeviceClosure::NotSeen);
        }
        match device.health {
            DeviceHealth::Lost => return Some(DeviceClosure::Lost),
            DeviceHealth::Unhealthy(_) => return Some(DeviceClosure::Unhealthy),
            DeviceHealth::ClaimedElsewhere(_) => return Some(DeviceClosure::ClaimedElsewhere),
            DeviceHealth::Healthy => {}
        }
        if device.hot {
            return Some(DeviceClosure::Hot);
        }
        if self.leases_on(id).any(|(entry, _)| entry.quarantined) {
            return Some(DeviceClosure::Quarantined);
        }
        (device.cordon == CordonState::Cordoned).then_some(DeviceClosure::Cordoned)
    }

    /// Applies a reading, and returns the draining leases whose processes are gone from the device.
    pub fn observe(&mut self, id: DeviceId, reading: &DeviceReading) -> Vec<LeaseId> {
        if self.devices[&id].reading.as_ref().is_some_and(|last| reading.at < last.at) {
            return Vec::new();
        }
        let gone = self.drained_by(id, reading);
        for lease in &gone {
            self.free_device_of(*lease, id);
        }
        let judged = self.assess_foreign_load(id, reading);
        let now = self.devices.get_mut(&id).expect("known");
        if now.leases_changed_at.is_none_or(|changed| reading.at > changed && includes_change_at(reading, changed)) {
            now.foreign = judged;
        }
        match reading.temperature_c {
            ReadingField::Value(temperature) => now.hot = temperature > 90,
            ReadingField::Unsupported => now.hot = false,
            ReadingField::Failed => {}
        }
        now.reading = Some(reading.clone());
        gone
    }

    fn drained_by(&self, id: DeviceId, reading: &DeviceReading) -> Vec<LeaseId> {
        let Some(processes) = &reading.processes else { return Vec::new() };
        if processes.iter().any(|process| process.attribution == ProcessAttribution::Unknown) {
            return Vec::new();
        }
        let runs = |lease| processes.iter().any(|process| process.attribution == ProcessAttribution::Lease(lease));
        let is_newer = |ended: PoolTime| reading.at > ended && includes_change_at(reading, ended);
        let drained = |entry: &ModelLease| entry.draining && !runs(entry.id) && entry.ended_at.is_some_and(is_newer);
        self.leases_on(id).filter(|(entry, _)| drained(entry)).map(|(entry, _)| entry.id).collect()
    }

    fn assess_foreign_load(&self, id: DeviceId, reading: &DeviceReading) -> Option<ModelForeignLoad> {
        let list = reading.processes.clone().unwrap_or_default();
        let count = |whose| list.iter().filter(|process| process.attribution == whose).count();
        let no_unknown = reading.processes.is_some() && count(ProcessAttribution::Unknown) == 0;
        let measured_all = no_unknown && list.iter().all(|process| process.memory.is_some());
        let (mut memory, mut share) = (0, 0);
        for (entry, promise) in self.leases_on(id) {
            let own = list.iter().filter(|process| process.attribution == ProcessAttribution::Lease(entry.id));
            let measured: u64 = own.map(|process| process.memory.map_or(0, |memory| memory.0)).sum();
            memory += if measured_all { measured } else { measured.max(promise.memory.0) };
            share += promise.share.0 * 100;
        }
        let mut foreign = ModelForeignLoad {
            memory: reading.memory_used.value().map(|used| used.0.saturating_sub(memory)),
            utilization: reading.utilization.value().map(|busy| busy.0.saturating_sub(share)),
            processes: list.iter().filter(|process| self.is_foreign(id, process.attribution)).count(),
        };
        if no_unknown && foreign.processes == 0 {
            foreign.utilization = foreign.utilization.map(|_| 0);
        }
        let before = self.devices[&id].foreign;
        if reading.memory_used == ReadingField::Failed {
            foreign.memory = before?.memory;
        }
        if reading.utilization == ReadingField::Failed {
            foreign.utilization = before?.utilization;
        }
        if reading.processes.is_none() {
            foreign.processes = before.map_or(0, |before| before.processes);
        }
        Some(foreign)
    }

    /// A lease explains load only on devices that it holds.
    fn is_foreign(&self, id: DeviceId, whose: ProcessAttribution) -> bool {
        match whose {
            ProcessAttribution::Foreign => true,
            ProcessAttribution::Lease(lease) => self.leases_on(id).all(|(entry, _)| entry.id != lease),
            ProcessAttribution::Unknown => false,
        }
    }

    /// Whether a device may be forgotten: it holds nothing and is gone.
    pub fn can_forget_device(&self, id: DeviceId) -> bool {
        let is_gone =
            matches!(self.closure(id), Some(DeviceClosure::NodeLost | DeviceClosure::NotSeen | DeviceClosure::Lost));
        is_gone && self.leases_on(id).next().is_none()
    }

    /// Whether a node may be forgotten: it holds nothing and is down.
    pub fn can_forget_node(&self, id: NodeId) -> bool {
        !self.nodes[&id].up && !self.leases.values().any(|entry| entry.node == Some(id) && entry.holds_capacity())
    }

    /// Returns the number of the next new device: the lowest free one.
    pub fn next_device(&self) -> DeviceId {
        (0..).map(DeviceId).find(|id| !self.devices.contains_key(id)).expect("some number is free")
    }

    pub fn node_by_name(&self, name: &str) -> Option<NodeId> {
        self.nodes.iter().find(|(_, node)| &*node.facts.name == name).map(|(id, _)| *id)
    }

    /// Frees a device of a lease.
    pub fn free_device_of(&mut self, lease: LeaseId, device: DeviceId) {
        let entry = self.leases.get_mut(&lease).expect("known");
        entry.promises.retain(|promise| promise.device != device);
        self.devices.get_mut(&device).expect("known").leases_changed_at = Some(self.now);
    }

    /// Resets the state that rows do not contain, after a restore.
    pub fn restart(&mut self) {
        let now = self.now;
        for node in self.nodes.values_mut() {
            node.up = false;
        }
        let held: Vec<DeviceId> = self
            .leases
            .values()
            .filter(|entry| entry.holds_capacity())
            .flat_map(|e| &e.promises)
            .map(|p| p.device)
            .collect();
        for (id, device) in &mut self.devices {
            device.seen = false;
            device.health = DeviceHealth::Healthy;
            device.hot = false;
            device.reading = None;
            device.foreign = None;
            device.leases_changed_at = held.contains(id).then_some(now);
            device.reported = Some(DeviceClosure::NodeLost);
        }
        for entry in self.leases.values_mut() {
            entry.followed_at = now;
            entry.expires_at = (entry.state == LeaseState::Active).then(|| now.after(entry.request.ttl));
        }
        self.configured_workload = false;
    }

    /// Checks that the pool is in the predicted state.
    pub fn agrees_with(&self, pool: &Pool) -> Result<(), String> {
        let known: Vec<LeaseId> = pool.leases().map(|lease| lease.id).collect();
        ensure!(known.iter().eq(self.leases.keys()), "the pool knows leases {known:?}, the model {:?}", self.leases);
        for lease in pool.leases() {
            let entry = &self.leases[&lease.id];
            ensure!(entry.agrees_with(lease), "lease {}: the model says {entry:?}, the pool {lease:?}", lease.id);
        }
        ensure!(pool.devices().map(|view| view.device).eq(self.devices.keys().copied()), "other devices are known");
        ensure!(pool.nodes().map(|view| view.node).eq(self.nodes.keys().copied()), "other nodes are known");
        for view in pool.devices() {
            let (share, memory) = self.promised(view.device);
            let device = &self.devices[&view.device];
            let here = (u64::from(view.promised.0), view.promised_memory) == (share, Bytes(memory));
            ensure!(here, "rule 1: device {}: the model says {share}/{memory} are promised, not {view:?}", view.device);
            let closed = self.closure(view.device);
            ensure!(view.closed == closed, "device {}: closed for {closed:?}, not {:?}", view.device, view.closed);
            ensure!(
                device.reported == closed,
                "device {}: configured {:?}, is {closed:?}",
                view.device,
                device.reported
            );
            let foreign = view.foreign.map(|foreign| ModelForeignLoad {
                memory: foreign.memory.map(|memory| memory.0),
                utilization: foreign.utilization.map(|busy| busy.0),
                processes: foreign.processes as usize,
            });
            ensure!(foreign == device.foreign, "device {}: foreign {foreign:?}, not {device:?}", view.device);
        }
        for view in pool.nodes() {
            let (cpus, memory) = self.host_promised(view.node);
            let here = (view.cpus_promised.0, view.memory_promised.0) == (cpus, memory);
            ensure!(here, "rule 1: node {}: the model says {cpus}/{memory} are promised, not {view:?}", view.node);
        }
        Ok(())
    }
}

/// Whether the attribution of a reading includes a change at this time.
fn includes_change_at(reading: &DeviceReading, change: PoolTime) -> bool {
    reading.leases_as_of.is_none_or(|as_of| as_of >= change)
}

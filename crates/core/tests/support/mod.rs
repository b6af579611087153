//! A pool for tests: add nodes, request, advance the clock, report readings, and check.
//!
//! Every command is followed by the pool's own invariant check, and all its rows are stored, so that any test can
//! restart the pool.

// Each test crate uses its own part of this.
#![allow(dead_code)]

pub mod fuzzed;

use std::sync::Arc;

use gpupool_core::{
    Bytes, CommandDenied, CommandReply, DeviceFacts, DeviceId, DeviceIdentity, DeviceMemory, DeviceReading,
    DeviceSelector, DeviceView, DrainMode, EndCause, GpuId, IsolationSupport, Lease, LeaseId, LeaseState,
    LoadThresholds, MilliCpus, Millis, NodeFacts, NodeId, Percent, PlacementDecision, PlacementStrategy, Policies,
    Pool, PoolCommand, PoolEffect, PoolRow, PoolSettings, PoolTime, ProcessAttribution, ProcessUsage, ReadingField,
    Request, RequestPolicy, RequestedAmount, RestoreError, Share, Token, Vendor,
};

pub const HALF: Share = Share(500);
pub const MINUTE: Millis = Millis::from_mins(1);
pub const HOUR: Millis = Millis::from_mins(60);

pub fn gib(n: u64) -> Bytes {
    Bytes(n << 30)
}

pub fn cpus(n: u64) -> MilliCpus {
    MilliCpus(n * 1000)
}

pub fn secs(n: u64) -> Millis {
    Millis::from_secs(n)
}

pub fn mins(n: u64) -> Millis {
    Millis::from_mins(n)
}

/// Request for one whole GPU, without thresholds.
pub fn whole() -> Request {
    Request::default()
}

/// Request for several whole GPUs.
pub fn gpus(n: u16) -> Request {
    Request { gpus: n, ..whole() }
}

/// Request for thousandths of a GPU.
pub fn part(share: u32) -> Request {
    Request { amount: RequestedAmount::Share(Share(share)), ..whole() }
}

/// Request for a part of a GPU by memory.
pub fn memory(bytes: Bytes) -> Request {
    Request { amount: RequestedAmount::Memory(bytes), ..whole() }
}

/// Request for host CPUs only.
pub fn host(cpus: MilliCpus) -> Request {
    Request { gpus: 0, cpus, ..whole() }
}

/// Selector of the device with this number.
pub fn named(gpu_id: u32) -> Arc<DeviceSelector> {
    Arc::new(DeviceSelector { gpu_ids: vec![GpuId(gpu_id)], ..DeviceSelector::default() })
}

/// Selector of this model.
pub fn model(name: &str) -> Arc<DeviceSelector> {
    Arc::new(DeviceSelector { models: vec![name.into()], ..DeviceSelector::default() })
}

/// Adds the default thresholds: 80 % memory, 90 % utilization.
pub fn careful(request: Request) -> Request {
    Request { thresholds: Some(LoadThresholds::default()), ..request }
}

pub fn by(strategy: PlacementStrategy, request: Request) -> Request {
    Request { strategy: Some(strategy), ..request }
}

pub fn owned(owner: &str, request: Request) -> Request {
    Request { owner: owner.into(), ..request }
}

/// Returns an NVIDIA device with this memory and no driver reserve.
pub fn device(uuid: &str, model: &str, memory_gib: u64) -> DeviceFacts {
    DeviceFacts {
        identity: DeviceIdentity::Uuid(uuid.into()),
        vendor: Vendor::Nvidia,
        model: model.into(),
        memory: Some(DeviceMemory { total: gib(memory_gib), reserved: Bytes::ZERO }),
        partition: None,
        isolation: IsolationSupport::BASIC,
        labels: Default::default(),
    }
}

/// Returns equal devices of a node, with 80 GiB each.
pub fn devices(node: &str, count: usize) -> Vec<DeviceFacts> {
    (0..count).map(|i| device(&format!("GPU-{node}-{i}"), "NVIDIA H100 80GB HBM3", 80)).collect()
}

pub fn node(name: &str) -> NodeFacts {
    NodeFacts { name: name.into(), cpus: cpus(64), memory: gib(512), labels: Default::default() }
}

/// Returns a policy without rules, for the test to add one.
pub fn policy(name: &str) -> RequestPolicy {
    RequestPolicy { name: name.into(), ..RequestPolicy::unlimited() }
}

/// Returns these policies, without rules for other requests.
pub fn policies(policies: impl IntoIterator<Item = RequestPolicy>) -> Policies {
    Policies { policies: policies.into_iter().collect(), ..Policies::unlimited() }
}

pub fn percent(n: u32) -> Percent {
    Percent(n * 1000)
}

pub fn foreign_process(memory: Bytes) -> ProcessUsage {
    ProcessUsage { attribution: ProcessAttribution::Foreign, memory: Some(memory) }
}

pub fn process_of(lease: LeaseId, memory: Bytes) -> ProcessUsage {
    ProcessUsage { attribution: ProcessAttribution::Lease(lease), memory: Some(memory) }
}

/// A pool and its clock.
pub struct PoolFixture {
    pub pool: Pool,
    pub now: PoolTime,
    pub settings: PoolSettings,
    /// All rows so far, in order.
    pub rows: Vec<PoolRow>,
    /// Effects of the last command.
    pub effects: Vec<PoolEffect>,
}

impl PoolFixture {
    /// Creates an empty pool without rules.
    pub fn empty() -> Self {
        Self::with(PoolSettings::default(), Policies::unlimited())
    }

    pub fn with(settings: PoolSettings, policies: Policies) -> Self {
        // Above zero, so that earlier times exist.
        let now = PoolTime(HOUR.0);
        Self { pool: Pool::new(settings, policies), now, settings, rows: Vec::new(), effects: Vec::new() }
    }

    /// Creates one node with equal devices, each read as idle.
    pub fn of(count: usize) -> Self {
        let mut test = Self::empty();
        test.add_node(node("a"), devices("a", count));
        test
    }

    pub fn under(policies: Policies, count: usize) -> Self {
        let mut test = Self::with(PoolSettings::default(), policies);
        test.add_node(node("a"), devices("a", count));
        test
    }

    /// Same as [`PoolFixture::of`], with devices that are free only once processes are gone.
    pub fn draining(count: usize, patience: Millis) -> Self {
        let mut test = Self::with(
            PoolSettings { drain: DrainMode::WhenGone { patience }, ..PoolSettings::default() },
            Policies::unlimited(),
        );
        test.add_node(node("a"), devices("a", count));
        test
    }

    /// Adds a node with each of its devices read as idle.
    pub fn add_node(&mut self, facts: NodeFacts, devices: Vec<DeviceFacts>) -> NodeId {
        let (node, ids) = self.register_node(facts, devices);
        for device in ids {
            self.report_idle(device.0);
        }
        node
    }

    /// Adds a node; its devices were never read.
    pub fn register_node(&mut self, facts: NodeFacts, devices: Vec<DeviceFacts>) -> (NodeId, Vec<DeviceId>) {
        match self.apply_ok(PoolCommand::NodeSeen { facts, devices, numbers: Vec::new() }) {
            CommandReply::Node(node, ids) => (node, ids),
            other => panic!("a node was seen, and the reply is {other:?}"),
        }
    }

    pub fn apply(&mut self, command: PoolCommand) -> Result<CommandReply, CommandDenied> {
        let text = format!("{command:?}");
        let (reply, outcome) = self.pool.apply(self.now, command);
        if let Err(broken) = self.pool.check_invariants() {
            panic!("after {text}: {broken}");
        }
        self.rows.extend(outcome.rows);
        self.effects = outcome.effects;
        reply
    }

    /// Applies a command that must not be denied.
    pub fn apply_ok(&mut self, command: PoolCommand) -> CommandReply {
        let text = format!("{command:?}");
        self.apply(command).unwrap_or_else(|denied| panic!("{text}: {denied}"))
    }

    pub fn try_request(&mut self, request: Request) -> Result<LeaseId, CommandDenied> {
        match self.apply(PoolCommand::Request { request: Arc::new(request), key: None, by_admin: false })? {
            CommandReply::Lease(lease) => Ok(lease),
            other => panic!("something was asked for, and the reply is {other:?}"),
        }
    }

    pub fn request(&mut self, request: Request) -> LeaseId {
        self.try_request(request).unwrap_or_else(|denied| panic!("{denied}"))
    }

    /// Requests, and returns the granted devices.
    pub fn place(&mut self, request: Request) -> Vec<u32> {
        let lease = self.request(request);
        self.devices_of(lease)
    }

    /// Requests, and returns the denial.
    pub fn expect_denied(&mut self, request: Request) -> CommandDenied {
        self.try_request(request).expect_err("the request must be refused")
    }

    pub fn release(&mut self, lease: LeaseId) {
        self.apply_ok(PoolCommand::Release { lease });
    }

    /// Advances the clock, applying each deadline on time.
    pub fn advance(&mut self, time: Millis) {
        let end = self.now.after(time);
        let mut effects = Vec::new();
        while let Some(due) = self.pool.next_deadline().filter(|due| *due <= end) {
            self.now = self.now.max(due);
            self.apply_ok(PoolCommand::Tick);
            effects.append(&mut self.effects);
        }
        self.now = end;
        self.apply_ok(PoolCommand::Tick);
        effects.append(&mut self.effects);
        self.effects = effects;
    }

    /// Advances the clock while waiters send heartbeats and holders renew.
    pub fn advance_with_heartbeats(&mut self, time: Millis) {
        let end = self.now.after(time);
        while self.now < end {
            let step = secs(10).min(end.since(self.now));
            self.advance(step);
            let live: Vec<(LeaseId, LeaseState, Option<Token>)> =
                self.pool.leases().map(|lease| (lease.id, lease.state, lease.token)).collect();
            for (lease, state, token) in live {
                match (state, token) {
                    (LeaseState::Queued, _) => drop(self.apply_ok(PoolCommand::Follow { lease })),
                    (LeaseState::Active, Some(token)) => drop(self.apply_ok(PoolCommand::Renew { lease, token })),
                    _ => {}
                }
            }
        }
    }

    /// Reports a reading one millisecond later than anything before.
    pub fn report(&mut self, device: u32, change: impl FnOnce(&mut DeviceReading)) {
        self.now = self.now.after(Millis(1));
        let mut reading = DeviceReading::idle(self.now);
        change(&mut reading);
        self.apply_ok(PoolCommand::Observe { device: DeviceId(device), reading });
    }

    pub fn report_idle(&mut self, device: u32) {
        self.report(device, |_| {});
    }

    /// Reports this load without a process list.
    pub fn report_load(&mut self, device: u32, used: Bytes, busy: Percent) {
        self.report(device, |reading| {
            reading.memory_used = ReadingField::Value(used);
            reading.utilization = ReadingField::Value(busy);
            reading.processes = None;
        });
    }

    pub fn lease(&self, lease: LeaseId) -> &Lease {
        self.pool.lease(lease).unwrap_or_else(|| panic!("lease {lease} is not known"))
    }

    pub fn state(&self, lease: LeaseId) -> LeaseState {
        self.lease(lease).state
    }

    pub fn cause(&self, lease: LeaseId) -> Option<EndCause> {
        self.lease(lease).cause.clone()
    }

    pub fn token(&self, lease: LeaseId) -> Token {
        self.lease(lease).token.expect("a granted lease has a token")
    }

    pub fn decision(&self, lease: LeaseId) -> Arc<PlacementDecision> {
        self.lease(lease).decision.clone().expect("a granted lease has a decision")
    }

    /// Returns the devices that a lease holds or drains.
    pub fn devices_of(&self, lease: LeaseId) -> Vec<u32> {
        self.lease(lease).promises.iter().map(|promise| promise.device.0).collect()
    }

    pub fn is_queued(&self, lease: LeaseId) -> bool {
        self.state(lease) == LeaseState::Queued
    }

    pub fn is_active(&self, lease: LeaseId) -> bool {
        self.state(lease) == LeaseState::Active
    }

    /// Returns the explanation of a wait as text.
    pub fn wait_reason(&self, lease: LeaseId) -> String {
        self.pool.explain(lease).unwrap_or_else(|| panic!("lease {lease} does not wait")).to_string()
    }

    pub fn device(&self, device: u32) -> DeviceView {
        self.pool.device(DeviceId(device)).unwrap_or_else(|| panic!("device {device} is not known"))
    }

    /// Restarts the pool from its rows, written as JSON; its nodes are not seen yet.
    pub fn restart(&mut self) -> Vec<RestoreError> {
        let written: Vec<String> =
            self.rows.iter().map(|row| serde_json::to_string(row).expect("a row is JSON")).collect();
        let rows: Vec<PoolRow> =
            written.iter().map(|text| serde_json::from_str(text).expect("a row comes back from JSON")).collect();
        assert_eq!(rows, self.rows, "rows change on their way through JSON");
        let (pool, bad) = Pool::restore(self.settings, Policies::unlimited(), self.now, rows);
        self.pool = pool;
        if let Err(broken) = self.pool.check_invariants() {
            panic!("after the restart: {broken}");
        }
        bad
    }
}

//! The pool: nodes, devices, readings, leases, queue and policies, and the one function that changes them.
//!
//! Commands come in batches: deadlines apply first, then each command, then one pass serves the queue.
//!
//! Each command has one function: facts in `facts.rs`, the life of a lease in `leases.rs`. `schedule.rs` decides which
//! request is next, [`crate::placement`] chooses its devices, `view.rs` shows the pool and explains waits, and
//! `restore.rs` rebuilds a pool from rows.

mod facts;
mod leases;
mod restore;
mod schedule;
mod view;

pub use restore::RestoreError;
pub use view::{DeviceView, NodeView, WaitExplanation, WaitReason};

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::classes::{RequestClasses, RequestShape};
use crate::device::{CordonState, DeviceFacts, DeviceHealth, DeviceLink, NodeFacts};
use crate::ids::{DeviceId, GpuId, LeaseId, NodeId, Token};
use crate::inventory::DeviceInventory;
use crate::lease::{Lease, LeaseHolder, LeaseState, Revocation};
use crate::outcome::{ApplyOutcome, CommandDenied, CommandReply};
use crate::placement::scored;
use crate::policy::Policies;
use crate::queue::{LaneKey, OwnerAccounts, RequestQueue, WaitingNeeds};
use crate::reading::DeviceReading;
use crate::request::Request;
use crate::row::{PoolCounters, PoolRow};
use crate::units::{Bytes, MilliCpus, Millis, PoolTime, Share};
use crate::workload::{TaskClass, WorkloadEstimate};

/// Command to a pool: facts, requests and an administrator's orders.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolCommand {
    /// Time has passed.
    Tick,

    /// A node reports. The list contains devices that are new, changed, or seen for the first time since a restart;
    /// every other device stays as it is. A report without devices only shows that the node is there.
    NodeSeen {
        facts: NodeFacts,
        devices: Vec<DeviceFacts>,
        /// Number of each device on the node, for a node that numbers its devices itself. A device beyond the list's
        /// end, or with a number in use, gets the next free number; a known device keeps its number.
        numbers: Vec<GpuId>,
    },
    /// A device of a known node is seen, with its health: for a device that must not be granted in between.
    DeviceSeen { node: NodeId, facts: Box<DeviceFacts>, number: GpuId, health: DeviceHealth },
    /// A node is not reachable: no new work until it is seen again.
    NodeLost { node: NodeId },
    /// Remove a device that is gone and has no lease. If it returns, it is a new device.
    ForgetDevice { device: DeviceId },
    /// Remove a node that is down and has no lease, with its devices. If it returns, it is a new node.
    ForgetNode { node: NodeId },
    /// Links between the devices of a node; replaces the known ones.
    Links { node: NodeId, links: Vec<DeviceLink> },
    /// A reading of a device.
    Observe { device: DeviceId, reading: DeviceReading },
    /// A device's health changed.
    SetHealth { device: DeviceId, health: DeviceHealth },

    /// A request. Repeated with the same key and owner, it is granted once.
    Request {
        request: Arc<Request>,
        key: Option<Arc<str>>,
        /// Whether an administrator makes the request. Then `max_priority` does not limit its priority.
        #[serde(default)]
        by_admin: bool,
    },
    /// A heartbeat of a waiter, which keeps it in the queue.
    Follow { lease: LeaseId },
    /// Accept an offer.
    Confirm { lease: LeaseId, token: Token },
    /// A heartbeat of a granted lease.
    Renew { lease: LeaseId, token: Token },
    /// A process or connection keeps the lease alive from now on, without heartbeats. Denied while another one does.
    Attach { lease: LeaseId, token: Token, holder: LeaseHolder },
    /// The holder of a lease is gone; it may return within the grace period.
    HolderGone { lease: LeaseId, grace: Millis },
    /// The owner releases the lease or stops waiting. Repeating it is harmless.
    Release { lease: LeaseId },
    /// No process of an ended lease is left on its devices.
    Drained { lease: LeaseId },
    /// A fault ends a lease.
    Fail { lease: LeaseId, why: Arc<str> },

    /// Revoke a lease after a grace period, in which its holder can finish.
    Revoke { lease: LeaseId, grace: Millis, revocation: Option<Arc<Revocation>> },
    /// Stop or allow new work on a device.
    Cordon { device: DeviceId, cordon: CordonState },
    /// Stop new work on a device and revoke its leases; holders have the grace period to finish.
    Drain { device: DeviceId, grace: Millis },
    /// Replace all policies.
    SetPolicies { policies: Box<Policies> },
    /// Configure the expected tasks instead of learning them; an empty list returns to learning. Not part of the rows:
    /// it is configuration, to be set again after a restore.
    SetWorkload { classes: Vec<(TaskClass, u64)> },
}

/// Handling of a lease's devices when it ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DrainMode {
    /// Devices are free at once: for pools without known processes (simulation, a client of statistics servers).
    #[default]
    AtOnce,
    /// Devices are free once the processes are gone, by [`PoolCommand::Drained`] or a complete reading (without
    /// devices, by the command only). If processes stay longer than `patience`, the devices are quarantined.
    WhenGone {
        /// Time that processes may stay.
        patience: Millis,
    },
}

/// Settings of a pool apart from its policies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolSettings {
    /// Handling of a lease's devices when it ends.
    pub drain: DrainMode,
    /// Age from which a reading is ignored for thresholds; `None` for no limit.
    pub reading_max_age: Option<Millis>,
}

/// The pool; see the documentation of the crate.
#[derive(Debug, Default)]
pub struct Pool {
    settings: PoolSettings,
    now: PoolTime,
    inventory: DeviceInventory,
    leases: BTreeMap<LeaseId, Box<Lease>>,
    /// Leases by (owner, key) of requests that must not be granted twice.
    keys: BTreeMap<(Arc<str>, Arc<str>), LeaseId>,
    /// Ended leases that are still remembered, oldest first.
    ended: VecDeque<LeaseId>,
    /// Deadline of each lease that has one.
    deadlines: BTreeSet<(PoolTime, LeaseId)>,
    /// Earliest change of a quota that holds back a waiter.
    quota_deadline: Option<PoolTime>,
    policies: Policies,
    owners: OwnerAccounts,
    classes: RequestClasses,
    queue: RequestQueue,
    waiting_needs: WaitingNeeds,
    workload: WorkloadEstimate,
    scorer: scored::NodeScorer,
    counters: PoolCounters,
    /// Counters in the last row.
    written_counters: PoolCounters,
    /// Whether a change may let a waiter start.
    needs_pass: bool,
}

impl Pool {
    pub fn new(settings: PoolSettings, policies: Policies) -> Self {
        Self { settings, policies, ..Self::default() }
    }

    /// Applies a batch of one command.
    pub fn apply(
        &mut self,
        now: PoolTime,
        command: PoolCommand,
    ) -> (Result<CommandReply, CommandDenied>, ApplyOutcome) {
        let mut outcome = ApplyOutcome::default();
        self.begin_batch(now, &mut outcome);
        let answer = self.apply_in_batch(command, &mut outcome);
        self.finish_batch(&mut outcome);
        (answer, outcome)
    }

    /// Applies commands that came at the same time, and serves the queue once after all of them.
    pub fn apply_all(
        &mut self,
        now: PoolTime,
        commands: impl IntoIterator<Item = PoolCommand>,
    ) -> (Vec<Result<CommandReply, CommandDenied>>, ApplyOutcome) {
        let mut outcome = ApplyOutcome::default();
        self.begin_batch(now, &mut outcome);
        let answers = commands.into_iter().map(|command| self.apply_in_batch(command, &mut outcome)).collect();
        self.finish_batch(&mut outcome);
        (answers, outcome)
    }

    /// Begins a batch: sets the clock and applies all deadlines. The parts of a batch are for callers that read the
    /// pool between its commands; [`Pool::apply_all`] runs all of them.
    pub fn begin_batch(&mut self, now: PoolTime, out: &mut ApplyOutcome) {
        self.now = self.now.max(now);
        self.apply_deadlines(out);
    }

    /// Applies one command of a batch. Waiting requests are served when the batch finishes.
    pub fn apply_in_batch(
        &mut self,
        command: PoolCommand,
        out: &mut ApplyOutcome,
    ) -> Result<CommandReply, CommandDenied> {
        match command {
            PoolCommand::Tick => Ok(CommandReply::Done),
            PoolCommand::NodeSeen { facts, devices, numbers } => Ok(self.register_node(facts, devices, &numbers, out)),
            PoolCommand::DeviceSeen { node, facts, number, health } => {
                self.register_device(node, *facts, number, health, out)
            }
            PoolCommand::NodeLost { node } => self.lose_node(node, out),
            PoolCommand::ForgetDevice { device } => self.forget_device(device, out),
            PoolCommand::ForgetNode { node } => self.forget_node(node, out),
            PoolCommand::Links { node, links } => self.set_links(node, links, out),
            PoolCommand::Observe { device, reading } => self.observe_device(device, &reading, out),
            PoolCommand::SetHealth { device, health } => self.set_health(device, health, out),
            PoolCommand::Request { request, key, by_admin } => self.request_lease(request, key, by_admin, out),
            PoolCommand::Follow { lease } => self.follow_lease(lease),
            PoolCommand::Confirm { lease, token } => self.confirm_offer(lease, token, out),
            PoolCommand::Renew { lease, token } => self.renew_lease(lease, token),
            PoolCommand::Attach { lease, token, holder } => self.attach_holder(lease, token, holder, out),
            PoolCommand::HolderGone { lease, grace } => self.detach_holder(lease, grace, out),
            PoolCommand::Release { lease } => self.release_lease(lease, out),
            PoolCommand::Drained { lease } => self.finish_drain(lease, out),
            PoolCommand::Fail { lease, why } => self.fail_lease(lease, why, out),
            PoolCommand::Revoke { lease, grace, revocation } => self.revoke_lease(lease, grace, revocation, out),
            PoolCommand::Cordon { device, cordon } => self.set_cordon(device, cordon, out),
            PoolCommand::Drain { device, grace } => self.drain_device(device, grace, out),
            PoolCommand::SetPolicies { policies } => self.set_policies(*policies, out),
            PoolCommand::SetWorkload { classes } => {
                self.workload.configure(classes);
                Ok(CommandReply::Done)
            }
        }
    }

    /// Finishes a batch: grants every waiting request that can start, and writes the counters if they changed.
    pub fn finish_batch(&mut self, out: &mut ApplyOutcome) {
        self.serve_waiters(out);
        self.counters.workload_arrivals = self.workload.arrivals();
        self.counters.turnover = self.workload.turnover_counts();
        if self.counters != self.written_counters {
            self.written_counters = self.counters;
            out.rows.push(PoolRow::Counters(self.counters));
        }
    }

    /// Returns the latest time at which the pool must be called again.
    pub fn next_deadline(&self) -> Option<PoolTime> {
        let lease = self.deadlines.first().map(|(at, _)| *at);
        let quota = self.quota_deadline.filter(|_| !self.queue.is_empty());
        [lease, quota].into_iter().flatten().min()
    }

    fn set_policies(&mut self, policies: Policies, out: &mut ApplyOutcome) -> Result<CommandReply, CommandDenied> {
        policies.validate()?;
        out.rows.push(PoolRow::Policies(Box::new(policies.clone())));
        self.policies = policies;
        for id in self.requeue_all() {
            self.set_deadline(id);
        }
        self.needs_pass = true;
        Ok(CommandReply::Done)
    }

    /// Returns the time before which readings are stale for thresholds.
    fn stale_before(&self) -> Option<PoolTime> {
        self.settings.reading_max_age.map(|age| PoolTime(self.now.0.saturating_sub(age.0)))
    }

    fn known_node(&self, node: NodeId) -> Result<NodeId, CommandDenied> {
        self.inventory.nodes.contains(node.0).then_some(node).ok_or(CommandDenied::UnknownNode(node))
    }

    fn known_device(&self, device: DeviceId) -> Result<DeviceId, CommandDenied> {
        self.inventory.devices.contains(device.0).then_some(device).ok_or(CommandDenied::UnknownDevice(device))
    }

    fn known_lease(&mut self, lease: LeaseId) -> Result<&mut Lease, CommandDenied> {
        self.leases.get_mut(&lease).map(|lease| &mut **lease).ok_or(CommandDenied::UnknownLease(lease))
    }

    fn lease_mut(&mut self, lease: LeaseId) -> &mut Lease {
        match self.leases.get_mut(&lease) {
            Some(lease) => lease,
            None => unreachable!("lease {lease} exists while anything refers to it"),
        }
    }

    /// Writes the row of a lease.
    fn push_lease_row(&self, lease: LeaseId, out: &mut ApplyOutcome) {
        if let Some(lease) = self.leases.get(&lease) {
            out.rows.push(PoolRow::Lease(lease.row().clone()));
        }
    }

    /// Updates the deadline of a lease from its state.
    fn set_deadline(&mut self, id: LeaseId) {
        let settings = self.settings;
        let Some(lease) = self.leases.get_mut(&id) else { return };
        let deadline = leases::deadline_of(lease, settings);
        if deadline != lease.deadline {
            if let Some(before) = lease.deadline {
                self.deadlines.remove(&(before, id));
            }
            self.deadlines.extend(deadline.map(|at| (at, id)));
            lease.deadline = deadline;
        }
    }

    /// Returns the owner and class under which a waiting lease is queued.
    fn lane_key(&mut self, id: LeaseId) -> LaneKey {
        let request = self.lease_mut(id).request.clone();
        let policy = self.policies.policy_for(&request);
        let shape = RequestShape::of(&request, policy);
        let class = self.classes.intern(shape, &self.inventory);
        (self.owners.get_or_open(&request.owner, self.now), class)
    }
}

impl Pool {
    /// Checks every invariant; the error names the broken one. Tests call it after every step.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.check_devices()?;
        self.check_hosts()?;
        self.check_leases()?;
        self.inventory.check()
    }

    fn check_devices(&self) -> Result<(), String> {
        let mut expected: BTreeMap<DeviceId, (Share, Bytes, Vec<LeaseId>)> = BTreeMap::new();
        for lease in self.leases.values() {
            for promise in lease.promises.iter() {
                let entry = expected.entry(promise.device).or_default();
                entry.0 += promise.share;
                entry.1 += promise.memory;
                entry.2.push(lease.id);
            }
        }
        for (number, slot) in self.inventory.devices.iter() {
            let (share, memory, mut leases) = expected.remove(&DeviceId(number)).unwrap_or_default();
            let mut listed = slot.leases.clone();
            leases.sort_unstable();
            listed.sort_unstable();
            if (slot.promised, slot.promised_memory) != (share, memory) || listed != leases {
                return Err(format!("device {number}: expected {share}/{memory} to {leases:?}, slot {slot:?}"));
            }
            if slot.promised > Share::WHOLE {
                return Err(format!("device {number}: {} promised of one GPU", slot.promised));
            }
        }
        match expected.is_empty() {
            true => Ok(()),
            false => Err(format!("promises on unknown devices: {expected:?}")),
        }
    }

    fn check_hosts(&self) -> Result<(), String> {
        for (number, slot) in self.inventory.nodes.iter() {
            let here = self
                .leases
                .values()
                .filter(|lease| lease.node == Some(NodeId(number)) && (lease.state.is_granted() || lease.draining));
            let (cpus, memory) = here.fold((MilliCpus::ZERO, Bytes::ZERO), |(cpus, memory), lease| {
                (cpus + lease.request.cpus, memory + lease.request.host_memory)
            });
            if (slot.cpus_promised, slot.memory_promised) != (cpus, memory) {
                return Err(format!("node {number}: expected {cpus}/{memory} of the host, slot {slot:?}"));
            }
        }
        Ok(())
    }

    fn check_leases(&self) -> Result<(), String> {
        let mut held: BTreeMap<&str, u64> = BTreeMap::new();
        let (mut waiting, mut deadlines) = (0, 0);
        for lease in self.leases.values() {
            let id = lease.id;
            if lease.state.is_granted() {
                *held.entry(&lease.request.owner).or_default() += self.inventory.gpu_share(&lease.promises);
            }
            if !lease.state.is_granted() && !lease.draining && !lease.promises.is_empty() {
                return Err(format!("lease {id} is {:?} and still holds {:?}", lease.state, lease.promises));
            }
            if lease.state.is_ended() != lease.cause.is_some() || lease.state.is_ended() != lease.ended_at.is_some() {
                return Err(format!("lease {id} is {:?} and ended for {:?}", lease.state, lease.cause));
            }
            waiting += usize::from(lease.state == LeaseState::Queued);
            let queue_priority = self.policies.queue_priority(&lease.request, lease.created_at, self.now);
            if lease.state == LeaseState::Queued && lease.queue_priority != queue_priority {
                return Err(format!("lease {id} waits with {:?}, not {queue_priority:?}", lease.queue_priority));
            }
            if lease.deadline != leases::deadline_of(lease, self.settings) {
                return Err(format!("lease {id} has the wrong deadline {:?}", lease.deadline));
            }
            if let Some(at) = lease.deadline {
                deadlines += 1;
                if !self.deadlines.contains(&(at, id)) {
                    return Err(format!("the deadline of lease {id} is not listed"));
                }
            }
        }
        if (waiting, deadlines) != (self.queue.len(), self.deadlines.len()) {
            return Err(format!("{waiting} wait, {} are queued; {deadlines} deadlines", self.queue.len()));
        }
        for account in self.owners.accounts() {
            if account.held != held.remove(&*account.name).unwrap_or(0) {
                return Err(format!("{} does not hold {}", account.name, account.held));
            }
        }
        match held.values().all(|held| *held == 0) {
            true => Ok(()),
            false => Err(format!("owners without an account: {held:?}")),
        }
    }
}

//! The pool: nodes, devices, readings, leases, queue and policies, and the one function that changes them.
//!
//! Each command has one function: facts in `facts.rs`, wishes in `wishes.rs`, ends in `ending.rs`; `schedule.rs` decides
//! whose turn it is, `certain.rs` when somebody is certain to start, [`crate::placement`] where, `explain.rs` says why not,
//! and `restore.rs` brings a pool back from rows.

mod certain;
mod check;
mod ending;
mod explain;
mod facts;
mod restore;
mod schedule;
mod view;
mod wishes;

pub use explain::{Explanation, Reason};
pub use restore::RestoreError;
pub use view::{DeviceView, NodeView};

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use crate::classes::{ClassId, Classes};
use crate::command::Command;
use crate::ids::{DeviceId, LeaseId, NodeId};
use crate::inventory::Inventory;
use crate::lease::Lease;
use crate::outcome::{Answer, Denied, Outcome};
use crate::owners::{OwnerId, Owners};
use crate::placement::scored;
use crate::policy::Policies;
use crate::queue::Queue;
use crate::row::{Counters, Row};
use crate::units::{Millis, Time};
use crate::workload::Workload;

/// What becomes of a lease's devices when it ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Drain {
    /// They are free at once: where no processes are known (simulation, a client's own books).
    #[default]
    AtOnce,
    /// They are free when its processes are gone, as [`Command::Drained`] or a complete reading tells (for a lease
    /// without devices, the command alone); if they stay longer than this, the devices are quarantined.
    WhenGone {
        /// How long they may stay.
        patience: Millis,
    },
}

/// How a pool works, apart from its policies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Settings {
    /// What becomes of a lease's devices when it ends.
    pub drain: Drain,
    /// Age beyond which a reading says nothing about thresholds; `None` for no limit.
    pub reading_max_age: Option<Millis>,
}

/// Everything that decides. See the crate's documentation.
#[derive(Debug, Default)]
pub struct Pool {
    settings: Settings,
    now: Time,
    inventory: Inventory,
    leases: BTreeMap<LeaseId, Box<Lease>>,
    /// (owner, key) of requests that must not be granted twice.
    keys: BTreeMap<(Arc<str>, Arc<str>), LeaseId>,
    /// Ended leases that are still remembered, oldest first.
    ended: VecDeque<LeaseId>,
    /// When each lease wants to hear the clock.
    deadlines: BTreeSet<(Time, LeaseId)>,
    /// When a quota that stands in somebody's way starts anew.
    quota_deadline: Option<Time>,
    policies: Policies,
    owners: Owners,
    classes: Classes,
    queue: Queue,
    /// Waiting requests that may go though others claim every GPU.
    waiting_past_gpus: usize,
    workload: Workload,
    scorer: scored::Scorer,
    counters: Counters,
    /// Something changed that may let a waiter go.
    stirred: bool,
}

impl Pool {
    /// An empty pool.
    pub fn new(settings: Settings, policies: Policies) -> Self {
        Self { settings, policies, ..Self::default() }
    }

    /// Applies a command, and everything that was due before it.
    pub fn apply(&mut self, now: Time, command: Command) -> (Result<Answer, Denied>, Outcome) {
        let mut outcome = Outcome::default();
        let answer = self.apply_into(now, command, &mut outcome);
        (answer, outcome)
    }

    /// As [`Pool::apply`], adding to an outcome that is used again: what one transaction commits.
    pub fn apply_into(&mut self, now: Time, command: Command, out: &mut Outcome) -> Result<Answer, Denied> {
        let counters = self.counters;
        self.now = self.now.max(now);
        self.expire(out);
        self.serve_waiters(out);
        let answer = self.dispatch(command, out);
        self.serve_waiters(out);
        self.counters.workload_arrivals = self.workload.arrivals();
        self.counters.turnover = self.workload.turnover_counts();
        if self.counters != counters {
            out.rows.push(Row::Counters(self.counters));
        }
        answer
    }

    /// When the pool wants to hear the clock again at the latest.
    pub fn next_deadline(&self) -> Option<Time> {
        let lease = self.deadlines.first().map(|(at, _)| *at);
        match (lease, self.quota_deadline.filter(|_| !self.queue.is_empty())) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    fn dispatch(&mut self, command: Command, out: &mut Outcome) -> Result<Answer, Denied> {
        match command {
            Command::Tick => Ok(Answer::Done),
            Command::NodeSeen { facts, devices, numbers } => Ok(self.node_seen(facts, devices, &numbers, out)),
            Command::NodeLost { node } => self.node_lost(node, out),
            Command::Links { node, links } => self.set_links(node, links, out),
            Command::Observe { device, reading } => self.observe(device, &reading, out),
            Command::SetHealth { device, health } => self.set_health(device, health, out),
            Command::Request { request, key } => self.request(request, key, out),
            Command::Follow { lease } => self.follow(lease),
            Command::Confirm { lease, token } => self.confirm(lease, token, out),
            Command::Renew { lease, token } => self.renew(lease, token),
            Command::Attach { lease, token, holder } => self.attach(lease, token, holder, out),
            Command::HolderGone { lease, grace } => self.holder_gone(lease, grace, out),
            Command::Release { lease } => self.release(lease, out),
            Command::Drained { lease } => self.drained(lease, out),
            Command::Fail { lease, why } => self.fail(lease, why, out),
            Command::Revoke { lease, grace } => self.revoke(lease, grace, out),
            Command::Cordon { device, cordon } => self.cordon(device, cordon, out),
            Command::Drain { device, grace } => self.drain(device, grace, out),
            Command::SetPolicies { policies } => self.set_policies(*policies, out),
            Command::SetWorkload { classes } => {
                self.workload.tell(classes);
                Ok(Answer::Done)
            }
        }
    }

    fn set_policies(&mut self, policies: Policies, out: &mut Outcome) -> Result<Answer, Denied> {
        policies.validate()?;
        out.rows.push(Row::Policies(Box::new(policies.clone())));
        self.policies = policies;
        self.requeue_all();
        self.stirred = true;
        Ok(Answer::Done)
    }

    /// Readings from before this say nothing about thresholds.
    fn stale_before(&self) -> Option<Time> {
        self.settings.reading_max_age.map(|age| Time(self.now.0.saturating_sub(age.0)))
    }

    fn known_node(&self, node: NodeId) -> Result<NodeId, Denied> {
        (node.index() < self.inventory.nodes.len()).then_some(node).ok_or(Denied::UnknownNode(node))
    }

    fn known_device(&self, device: DeviceId) -> Result<DeviceId, Denied> {
        (device.index() < self.inventory.devices.len()).then_some(device).ok_or(Denied::UnknownDevice(device))
    }

    fn known_lease(&mut self, lease: LeaseId) -> Result<&mut Lease, Denied> {
        self.leases.get_mut(&lease).map(|lease| &mut **lease).ok_or(Denied::UnknownLease(lease))
    }

    fn lease_mut(&mut self, lease: LeaseId) -> &mut Lease {
        match self.leases.get_mut(&lease) {
            Some(lease) => lease,
            None => unreachable!("lease {lease} is kept while anything refers to it"),
        }
    }

    /// Keeps a lease as it now is.
    fn keep(&self, lease: LeaseId, out: &mut Outcome) {
        if let Some(lease) = self.leases.get(&lease) {
            out.rows.push(Row::Lease(lease.row().clone()));
        }
    }

    /// Sets when a lease wants to hear the clock, from the state it is in.
    fn set_deadline(&mut self, id: LeaseId) {
        let settings = self.settings;
        let Some(lease) = self.leases.get_mut(&id) else { return };
        let deadline = ending::deadline_of(lease, settings);
        if deadline != lease.deadline {
            if let Some(before) = lease.deadline {
                self.deadlines.remove(&(before, id));
            }
            self.deadlines.extend(deadline.map(|at| (at, id)));
            lease.deadline = deadline;
        }
    }

    /// The owner and class a waiting lease is queued under.
    fn wish_of(&mut self, id: LeaseId) -> (OwnerId, ClassId, i32) {
        let request = self.lease_mut(id).request.clone();
        let policy = self.policies.policy_for(&request);
        let shape = crate::classes::Shape::of(&request, policy);
        let priority = request.priority.saturating_add(policy.priority_boost);
        let class = self.classes.intern(shape, &self.inventory);
        (self.owners.id(&request.owner, self.now), class, priority)
    }
}

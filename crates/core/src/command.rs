//! Everything that can happen to a pool: facts, wishes and an administrator's orders.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::device::{Cordon, DeviceFacts, Health, Link, NodeFacts};
use crate::ids::{DeviceId, GpuId, LeaseId, NodeId, Token};
use crate::lease::Holder;
use crate::policy::Policies;
use crate::reading::Reading;
use crate::request::Request;
use crate::units::Millis;
use crate::workload::TaskClass;

/// Something that happens to a pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// Time has passed.
    Tick,

    /// A node is there, with these devices; those it had before and are not listed stay known.
    NodeSeen {
        /// What it is.
        facts: NodeFacts,
        /// What it has.
        devices: Vec<DeviceFacts>,
        /// The small number of each, for a node that numbers its devices itself; a device beyond the list's end, or with
        /// a number that is another's, gets the next free one. One that is known keeps the number it has.
        numbers: Vec<GpuId>,
    },
    /// A node is not reachable: no new work until it is seen again.
    NodeLost {
        /// Which.
        node: NodeId,
    },
    /// How the devices of a node are joined; replaces what was known.
    Links {
        /// Which node.
        node: NodeId,
        /// Its links.
        links: Vec<Link>,
    },
    /// A device reported.
    Observe {
        /// Which.
        device: DeviceId,
        /// What.
        reading: Reading,
    },
    /// A device's health changed.
    SetHealth {
        /// Which.
        device: DeviceId,
        /// To what.
        health: Health,
    },

    /// Somebody wants something.
    Request {
        /// What.
        request: Arc<Request>,
        /// Asked twice with the same key and owner, it is granted once.
        key: Option<Arc<str>>,
    },
    /// A waiter asks for its lease, which keeps it in the queue.
    Follow {
        /// Which.
        lease: LeaseId,
    },
    /// An offer is taken.
    Confirm {
        /// Which.
        lease: LeaseId,
        /// The token it was offered with.
        token: Token,
    },
    /// A heartbeat.
    Renew {
        /// Which.
        lease: LeaseId,
        /// Its token.
        token: Token,
    },
    /// A process or connection now keeps the lease alive, in place of heartbeats.
    Attach {
        /// Which.
        lease: LeaseId,
        /// Its token.
        token: Token,
        /// Who.
        holder: Holder,
    },
    /// That process or connection is gone.
    HolderGone {
        /// Which.
        lease: LeaseId,
        /// How long it may take to come back.
        grace: Millis,
    },
    /// The owner gives it back, or stops waiting. Twice is harmless.
    Release {
        /// Which.
        lease: LeaseId,
    },
    /// No process of an ended lease is left on its devices.
    Drained {
        /// Which.
        lease: LeaseId,
    },
    /// A fault ended it.
    Fail {
        /// Which.
        lease: LeaseId,
        /// What fault.
        why: Arc<str>,
    },

    /// Take a lease back after a grace period.
    Revoke {
        /// Which.
        lease: LeaseId,
        /// How long its holder has to finish.
        grace: Millis,
    },
    /// Stop or allow new work on a device.
    Cordon {
        /// Which.
        device: DeviceId,
        /// Which of the two.
        cordon: Cordon,
    },
    /// Stop new work on a device and revoke what runs there.
    Drain {
        /// Which.
        device: DeviceId,
        /// How long holders have to finish.
        grace: Millis,
    },
    /// Replace all rules.
    SetPolicies {
        /// By these.
        policies: Box<Policies>,
    },
    /// Tell what tasks are to be expected, in place of learning it; empty goes back to learning. Not kept in rows: it is
    /// configuration, and whoever restores the pool tells it again.
    SetWorkload {
        /// How many of each class.
        classes: Vec<(TaskClass, u64)>,
    },
}

//! Telling what was committed: events, waiters, and whoever watches.

use std::sync::Arc;
use std::time::Duration;

use gpupool_api::events::Event;
use gpupool_api::view::{cause_words, closed_name};
use gpupool_core::lease::LeaseState;
use gpupool_core::{DeviceId, Effect, GpuId, LeaseId, Pool};

use crate::clock;

use super::batch::is_taken_back;
use super::{OwnerThread, Refusal, StoreState, Tie};

/// Somebody who is told of what was committed, on the owner's thread: must not wait for anything.
pub trait Watcher: Send {
    /// Events, in order.
    fn events(&mut self, events: Vec<Event>);
    /// An effect, with the pool after its batch and the devices of the lease it is about.
    fn effect(&mut self, effect: &Effect, pool: &Pool, gpu_ids: &[GpuId]);
    /// A lease is over, and something of it may still run.
    fn leaves(&mut self, lease: LeaseId, tie: Tie, was_taken: bool);
    /// The store works differently than before.
    fn store(&mut self, state: &StoreState);
    /// So many rows were made durable together, in that time.
    fn committed(&mut self, rows: usize, took: Duration);
    /// A request for GPUs was refused.
    fn refused(&mut self, refusal: &Refusal);
    /// Whoever asked for something in this batch was answered.
    fn answered(&mut self);
}

impl OwnerThread {
    /// Works out from the pool what is otherwise followed by effects.
    pub(super) fn take_stock(&mut self) {
        self.held.clear();
        let holding: Vec<LeaseId> =
            self.pool.leases().filter(|lease| !lease.promises.is_empty()).map(|lease| lease.id).collect();
        for lease in holding {
            self.note_held(lease);
        }
        self.devices = self.pool.devices().map(|view| (view.facts.identity.clone(), view.device)).collect();
        self.node_id = self.pool.nodes().find(|node| node.facts.name == self.node.name).map(|node| node.node);
        self.waiters.recount(&self.pool);
        self.tie_holders();
    }

    pub(super) fn publish(&mut self, effects: &[Effect]) {
        let mut events = Vec::new();
        for effect in effects {
            if let Effect::Granted { lease, .. } | Effect::Offered { lease, .. } = effect {
                self.note_held(*lease);
            }
            self.waiters.follow(effect, &self.pool);
            let of_lease = lease_of(effect).and_then(|lease| self.held.get(&lease).cloned()).unwrap_or_default();
            self.watcher.effect(effect, &self.pool, &of_lease);
            if let Effect::Draining { lease } = effect {
                self.let_leave(*lease);
            }
            events.push(self.event(effect, &of_lease));
            if let Effect::Freed { lease } = effect {
                self.held.remove(lease);
                self.ties.forget(*lease);
            }
        }
        if !events.is_empty() {
            self.watcher.events(events);
        }
    }

    /// Says who has to go, where a lease drains.
    pub(super) fn let_leave(&mut self, lease: LeaseId) {
        let Some(known) = self.pool.lease(lease).filter(|known| known.draining) else { return };
        let was_taken = known.cause.as_ref().is_some_and(is_taken_back);
        self.watcher.leaves(lease, self.ties.of(lease).cloned().unwrap_or_default(), was_taken);
    }

    fn note_held(&mut self, lease: LeaseId) {
        let Some(row) = self.pool.lease(lease) else { return };
        let numbers: Arc<[GpuId]> = row.promises.iter().filter_map(|promise| self.number(promise.device)).collect();
        // A lease that ended and was freed in the batch that granted it holds nothing any more, and its events still
        // tell what it held where the rows did.
        if !numbers.is_empty() || row.state != LeaseState::Queued {
            self.held.insert(lease, numbers);
        }
    }

    fn number(&self, device: DeviceId) -> Option<GpuId> {
        self.pool.device(device).map(|view| view.gpu_id)
    }

    fn event(&self, effect: &Effect, of_lease: &[GpuId]) -> Event {
        let lease = lease_of(effect);
        let row = lease.and_then(|lease| self.pool.lease(lease));
        let mut gpu_ids: Vec<u32> = of_lease.iter().map(|gpu| gpu.0).collect();
        let (kind, reason) = match effect {
            Effect::Queued { lease } => ("queued", self.pool.explain(*lease).map(|why| why.to_string())),
            Effect::Offered { .. } => ("offered", None),
            Effect::Granted { .. } => ("granted", None),
            Effect::Revoking { at, .. } => ("revoking", Some(format!("ends at {}", clock::iso_of(*at, self.at)))),
            Effect::Ended { cause, .. } => ("ended", Some(cause_words(cause))),
            Effect::Draining { .. } => ("draining", None),
            Effect::Freed { .. } => ("freed", None),
            Effect::Quarantined { device, .. } => {
                gpu_ids = self.number(*device).map(|gpu| gpu.0).into_iter().collect();
                ("quarantined", Some("processes of an ended lease stayed on it".into()))
            }
            Effect::DeviceOpen { device, closed } => {
                gpu_ids = self.number(*device).map(|gpu| gpu.0).into_iter().collect();
                match closed {
                    None => ("device_open", None),
                    Some(why) => ("device_closed", Some(closed_name(*why).into())),
                }
            }
        };
        Event {
            kind: kind.into(),
            at: clock::iso(self.at.wall),
            lease: lease.map(|lease| lease.0),
            owner: row.map(|row| row.request.owner.to_string()),
            worker_id: row.and_then(|row| row.request.worker_id.as_ref()).map(ToString::to_string),
            gpu_ids,
            node: self.node_id.map(|_| self.node.name.to_string()),
            reason,
        }
    }
}

fn lease_of(effect: &Effect) -> Option<LeaseId> {
    match effect {
        Effect::Queued { lease }
        | Effect::Offered { lease, .. }
        | Effect::Granted { lease, .. }
        | Effect::Revoking { lease, .. }
        | Effect::Ended { lease, .. }
        | Effect::Draining { lease }
        | Effect::Freed { lease }
        | Effect::Quarantined { lease, .. } => Some(*lease),
        Effect::DeviceOpen { .. } => None,
    }
}

//! Who is told of what the owner thread committed: events, metrics, logs, simulated load, holders and leaving leases.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gpupool_api::events::Event;
use gpupool_core::{Effect, GpuId, LeaseId, Pool};
use tokio::sync::mpsc::UnboundedSender;

use crate::events::Events;
use crate::holders::Holders;
use crate::leaving::Leave;
use crate::metrics::Metrics;
use crate::owner::{Refusal, StoreState, Tie, Watcher};
use crate::simulation::Simulation;

/// Everybody who is told. The holders come to know later: they need the owner, who needs this.
#[derive(Clone)]
pub struct Watching {
    events: Arc<Events>,
    metrics: Arc<Metrics>,
    simulation: Option<Arc<Simulation>>,
    leaves: UnboundedSender<Leave>,
    holders: Arc<OnceLock<Holders>>,
    /// What is in the log only when nobody waits for an answer any more.
    unlogged: Vec<Arc<Event>>,
}

impl Watching {
    /// All but the holders.
    pub fn new(
        events: Arc<Events>,
        metrics: Arc<Metrics>,
        simulation: Option<Arc<Simulation>>,
        leaves: UnboundedSender<Leave>,
    ) -> Self {
        Self { events, metrics, simulation, leaves, holders: Arc::default(), unlogged: Vec::new() }
    }

    /// The holders, once there are some.
    pub fn know(&self, holders: Holders) {
        // Set once, at the start.
        let _ = self.holders.set(holders);
    }

    /// The owner's end of it.
    pub fn watcher(&self) -> Box<dyn Watcher> {
        Box::new(self.clone())
    }

    fn load(&self, effect: &Effect, pool: &Pool) {
        let Some(simulation) = &self.simulation else { return };
        match effect {
            Effect::Granted { lease, .. } => {
                let Some(row) = pool.lease(*lease) else { return };
                let load = |promise: &gpupool_core::lease::Promise| {
                    let identity = pool.device(promise.device)?.facts.identity.clone();
                    Some((identity, promise.share, promise.memory))
                };
                let loads: Vec<_> = row.promises.iter().filter_map(load).collect();
                simulation.lease_started(*lease, &loads);
            }
            Effect::Ended { lease, .. } => simulation.lease_gone(*lease),
            _ => {}
        }
    }
}

impl Watcher for Watching {
    fn events(&mut self, events: Vec<Event>) {
        let before = self.unlogged.len();
        self.unlogged.extend(events.into_iter().map(Arc::new));
        self.events.add(self.unlogged[before..].iter().cloned());
    }

    fn answered(&mut self) {
        for event in self.unlogged.drain(..) {
            log(&event);
        }
    }

    fn effect(&mut self, effect: &Effect, pool: &Pool, _gpu_ids: &[GpuId]) {
        self.metrics.effect(effect, pool);
        self.load(effect, pool);
        if let (Effect::Ended { lease, .. }, Some(holders)) = (effect, self.holders.get()) {
            holders.forget(*lease);
        }
    }

    fn leaves(&mut self, lease: LeaseId, tie: Tie, was_taken: bool) {
        // The receiver lives as long as the agent.
        let _ = self.leaves.send(Leave { lease, tie, was_taken });
    }

    fn store(&mut self, state: &StoreState) {
        self.metrics.store(state);
    }

    fn committed(&mut self, rows: usize, took: Duration) {
        self.metrics.committed(rows, took);
    }

    fn refused(&mut self, refusal: &Refusal) {
        self.metrics.refused(refusal);
    }
}

fn log(event: &Event) {
    let devices = event.gpu_ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let (kind, lease, owner) = (event.kind.as_str(), event.lease, event.owner.as_deref());
    let (worker, reason) = (event.worker_id.as_deref(), event.reason.as_deref());
    match kind {
        "quarantined" | "device_closed" => {
            tracing::warn!(target: "pool", lease, owner, worker, devices, reason, "{kind}")
        }
        "draining" | "freed" | "queued" => {
            tracing::debug!(target: "pool", lease, owner, worker, devices, reason, "{kind}")
        }
        _ => tracing::info!(target: "pool", lease, owner, worker, devices, reason, "{kind}"),
    }
}

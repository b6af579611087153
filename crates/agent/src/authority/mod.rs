//! The authority: the one thread that owns the pool and the store.
//!
//! It decides, commits, publishes and replies, in that order. Messages arrive on a bounded channel and are applied in
//! batches ([`batch`]). The changed rows of a batch are committed in one transaction ([`commit`]). Only then does the
//! authority publish a [`Snapshot`], events and orders to nodes ([`publish`]) and reply to its callers ([`waiters`]). If
//! the commit fails, the pool is rebuilt from the store and the batch is refused, so uncommitted state is never visible.
//!
//! The authority knows nodes by id and name. It touches no process, control group or device: nodes report facts and
//! carry out orders ([`crate::messages`]). Readers that must not wait for the disk use the latest snapshot. History and
//! usage are read on a thread of their own ([`trail`]).

mod batch;
mod commit;
mod handle;
mod housekeeping;
mod occupancy;
mod publish;
mod reports;
mod samples;
mod snapshot;
#[cfg(test)]
pub(crate) mod tests;
mod trail;
mod waiters;

pub(crate) use commit::StoreState;
pub(crate) use handle::{Authority, Refusal, Reply};
pub(crate) use housekeeping::{run_housekeeping, save_clock};
pub(crate) use snapshot::{DeviceState, NodeSummary, Snapshot};
pub(crate) use trail::TrailHandle;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use gpupool_core::{
    GpuId, LeaseHolder, LeaseId, Millis, NodeId, Policies, Pool, PoolCommand, PoolRow, PoolSettings, PoolTime,
    WaitExplanation,
};
use gpupool_store::{ClockReading, LeaseStore, TokenOwners};

use crate::abort_on_panic::AbortOnPanic;
use crate::clock;
use crate::events::Events;
use crate::limits::{AUTHORITY_BEAT, BATCH, FLUSH_WAIT, MESSAGES, ORDER_RETRY, STORE_RETRY};
use crate::messages::{FencedLease, NodeLink, NodeOrder, NodeSample};
use crate::metrics::Metrics;

use handle::AuthorityMessage;
use occupancy::Occupancy;
use publish::OrderQueue;
use snapshot::SnapshotCell;
use waiters::Waiters;

/// Everything that an authority starts with.
pub(crate) struct AuthoritySpec {
    /// The store.
    pub store: Box<dyn LeaseStore>,
    /// The rows that the store holds.
    pub rows: Vec<PoolRow>,
    /// The owners of the tokens that the store holds.
    pub tokens: TokenOwners,
    /// The settings of the pool.
    pub settings: PoolSettings,
    /// The rules in force.
    pub policies: Policies,
    /// The links to the nodes, by node name.
    pub links: Vec<(Arc<str>, Box<dyn NodeLink>)>,
    /// The number of requests of one owner that may wait.
    pub waiters_per_owner: usize,
    /// The time in which a lease held by a connection can reconnect after a restart.
    pub reconnect_grace: Millis,
    /// Whether readings show real processes rather than simulated ones.
    pub real_processes: bool,
    /// The events that streams read.
    pub events: Arc<Events>,
    /// The metrics that the authority updates.
    pub metrics: Arc<Metrics>,
}

/// The state of the authority. Only its thread touches it; [`Authority::query`] shows it to others.
pub(crate) struct AuthorityThread {
    pool: Pool,
    store: Box<dyn LeaseStore>,
    store_state: StoreState,
    settings: PoolSettings,
    policies: Policies,
    links: BTreeMap<Arc<str>, OrderQueue>,
    /// The latest sample of each node, applied again after the pool was rebuilt.
    samples: HashMap<NodeId, Box<NodeSample>>,
    samples_are_due: bool,
    /// Commands without a caller that could not be committed yet.
    postponed: Vec<batch::UnattendedCommand>,
    waiters: Waiters,
    occupancy: Occupancy,
    /// The devices that each lease holds, until they are free again.
    held: HashMap<LeaseId, Arc<[GpuId]>>,
    waiters_per_owner: usize,
    real_processes: bool,
    /// The reasons why requests wait, for the event and the reply of one batch.
    explained: HashMap<LeaseId, Arc<WaitExplanation>>,
    events: Arc<Events>,
    metrics: Arc<Metrics>,
    /// Events that are not in the log yet.
    unlogged: Vec<Arc<gpupool_api::events::EventBody>>,
    snapshot: Snapshot,
    cell: Arc<SnapshotCell>,
    /// The time at which the patience of waiting requests with an open call was last extended.
    followed_at: PoolTime,
    retried_at: Instant,
    /// The instant, on both clocks, at which the current batch is applied.
    at: ClockReading,
}

/// Starts the authority with the rows of a store. The returned strings describe invalid rows.
pub(crate) fn start(spec: AuthoritySpec) -> io::Result<(Authority, JoinHandle<()>, Vec<String>)> {
    let (messages, inbox) = sync_channel(MESSAGES);
    let (mut thread, complaints) = AuthorityThread::new(spec, clock::both());
    let cell = thread.cell.clone();
    let trail = TrailHandle::start(thread.store.trail_reader())?;
    let handle = thread::Builder::new().name("authority".into()).spawn(move || {
        let _guard = AbortOnPanic("authority");
        thread.run(&inbox);
    })?;
    Ok((Authority::new(messages, cell, trail), handle, complaints))
}

impl AuthorityThread {
    fn new(spec: AuthoritySpec, at: ClockReading) -> (Self, Vec<String>) {
        let (pool, bad_rows) = Pool::restore(spec.settings, spec.policies.clone(), at.pool, spec.rows);
        let links = spec.links.into_iter().map(|(node, link)| (node, OrderQueue::new(link))).collect();
        let snapshot = Snapshot::new(at, Arc::new(spec.tokens));
        let mut thread = Self {
            pool,
            store: spec.store,
            store_state: StoreState::Fine,
            settings: spec.settings,
            policies: spec.policies,
            links,
            samples: HashMap::new(),
            samples_are_due: false,
            postponed: Vec::new(),
            waiters: Waiters::default(),
            occupancy: Occupancy::default(),
            held: HashMap::new(),
            waiters_per_owner: spec.waiters_per_owner,
            real_processes: spec.real_processes,
            explained: HashMap::new(),
            events: spec.events,
            metrics: spec.metrics,
            unlogged: Vec::new(),
            cell: Arc::new(SnapshotCell::new(snapshot.clone())),
            snapshot,
            followed_at: at.pool,
            retried_at: Instant::now(),
            at,
        };
        thread.rebuild_indexes();
        thread.take_over_leases(spec.reconnect_grace);
        (thread, bad_rows.iter().map(ToString::to_string).collect())
    }

    /// Takes over the leases of the previous authority. Their processes and control groups are unknown here, so the
    /// nodes are ordered to end them when the leases end.
    fn take_over_leases(&mut self, reconnect_grace: Millis) {
        let mut fences: BTreeMap<NodeId, Vec<FencedLease>> = BTreeMap::new();
        let mut draining = Vec::new();
        for lease in self.pool.leases().filter(|lease| lease.state.is_granted() || lease.draining) {
            self.occupancy.assume_occupied(lease.id);
            if let Some(node) = lease.node {
                fences.entry(node).or_default().push(FencedLease { lease: lease.id, holder: lease.holder.clone() });
            }
            match &lease.holder {
                Some(holder @ LeaseHolder::Connection) => {
                    let command = PoolCommand::HolderGone { lease: lease.id, grace: reconnect_grace };
                    self.postponed
                        .push(batch::UnattendedCommand { command, held_by: Some((lease.id, holder.clone())) });
                }
                _ if lease.draining => draining.push(lease.id),
                _ => {}
            }
        }
        for (node, queue) in &mut self.links {
            let leases = self.pool.node_by_name(node).and_then(|node| fences.remove(&node)).unwrap_or_default();
            queue.push(NodeOrder::Fence { leases });
        }
        for lease in draining {
            self.order_end(lease, false);
        }
        if self.pool.policies() != &self.policies {
            let policies = Box::new(self.policies.clone());
            self.postponed
                .push(batch::UnattendedCommand { command: PoolCommand::SetPolicies { policies }, held_by: None });
        }
    }

    fn run(&mut self, inbox: &Receiver<AuthorityMessage>) {
        loop {
            self.cell.confirm();
            let first = match inbox.recv_timeout(self.time_until_due()) {
                Ok(message) => Some(message),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            // Read before the messages, so that every message sent before the stop is handled.
            let stops = self.cell.is_stopping();
            let batch: Vec<AuthorityMessage> = first.into_iter().chain(inbox.try_iter()).take(BATCH).collect();
            let is_last = stops && batch.len() < BATCH;
            self.retry_store();
            self.process_batch(clock::both(), batch);
            if is_last {
                self.flush_store(true);
                return;
            }
        }
    }

    /// Returns how long the thread may wait for a message before something else is due.
    fn time_until_due(&self) -> Duration {
        let until = |time: PoolTime| Duration::from_millis(time.since(clock::now()).0);
        let mut wait = AUTHORITY_BEAT;
        if self.links.values().any(OrderQueue::has_backlog) {
            wait = wait.min(ORDER_RETRY);
        }
        if self.store_state != StoreState::Fine {
            wait = wait.min(STORE_RETRY.saturating_sub(self.retried_at.elapsed()));
        } else if self.store.unflushed_batches() > 0 {
            wait = wait.min(FLUSH_WAIT);
        }
        if self.cell.is_stopping() {
            return Duration::ZERO;
        }
        if self.is_broken() {
            return wait;
        }
        let is_fine = self.store_state == StoreState::Fine;
        if self.samples_are_due || (is_fine && !self.postponed.is_empty()) {
            return Duration::ZERO;
        }
        let deadlines = [self.pool.next_deadline(), self.waiters.next_deadline(), self.follow_due()];
        deadlines.into_iter().flatten().map(until).fold(wait, Duration::min)
    }

    fn is_broken(&self) -> bool {
        matches!(self.store_state, StoreState::Broken(_))
    }

    /// Returns the pool as it was last committed.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }
}

//! The state that the authority publishes after each batch, for readers that must not wait for it.
//!
//! A snapshot is immutable and shares its unchanged parts with the previous one, so the cost of publishing grows with
//! the changes only. It names the last event that it includes; readers can query its age.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use gpupool_core::{
    Bytes, DeviceId, DeviceView, LeaseId, LeaseRow, MilliCpus, Millis, NodeFacts, NodeId, NodeView, PoolTime, Token,
};
use gpupool_store::{ClockReading, TokenOwners};
use rpds::RedBlackTreeMapSync;

use crate::clock;
use crate::limits::AUTHORITY_SILENCE;

use super::StoreState;
use super::samples::LatestSamples;

/// The published state: devices with their promises, granted and draining leases, and a summary of the queue.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// The instant of the batch after which it was published, on both clocks.
    pub at: ClockReading,
    /// The number of the last event that it includes.
    pub event: u64,
    /// The state of the store.
    pub store: StoreState,
    /// The tokens that are valid.
    pub tokens: Arc<TokenOwners>,
    /// The token that the next grant gets.
    pub next_token: Token,
    /// The number of waiting requests.
    pub queued: usize,
    /// The time at which the oldest waiting request was made.
    pub oldest_request_at: Option<PoolTime>,
    devices: RedBlackTreeMapSync<DeviceId, Arc<DeviceState>>,
    nodes: RedBlackTreeMapSync<NodeId, Arc<NodeSummary>>,
    leases: RedBlackTreeMapSync<LeaseId, Arc<LeaseRow>>,
}

/// A device in the pool.
#[derive(Debug)]
pub struct DeviceState {
    /// The device.
    pub view: DeviceView,
    /// The time at which a change of its leases was last published. An earlier reading shows a mixture.
    pub leases_published_at: PoolTime,
}

/// A node in the pool, without its devices.
#[derive(Debug, Clone)]
pub struct NodeSummary {
    /// Its properties.
    pub facts: NodeFacts,
    /// Its promised host CPUs.
    pub cpus_promised: MilliCpus,
    /// Its promised host memory.
    pub memory_promised: Bytes,
}

impl From<NodeView> for NodeSummary {
    fn from(view: NodeView) -> Self {
        Self { facts: view.facts, cpus_promised: view.cpus_promised, memory_promised: view.memory_promised }
    }
}

impl Snapshot {
    pub(crate) fn new(at: ClockReading, tokens: Arc<TokenOwners>) -> Self {
        Self {
            at,
            event: 0,
            store: StoreState::Fine,
            tokens,
            next_token: Token(0),
            queued: 0,
            oldest_request_at: None,
            devices: RedBlackTreeMapSync::new_sync(),
            nodes: RedBlackTreeMapSync::new_sync(),
            leases: RedBlackTreeMapSync::new_sync(),
        }
    }

    /// Returns the devices by id.
    pub fn devices(&self) -> impl Iterator<Item = &DeviceState> {
        self.devices.values().map(|state| &**state)
    }

    /// Returns the devices of the node with this name.
    pub fn devices_of<'a>(&'a self, node: &'a str) -> impl Iterator<Item = &'a DeviceState> {
        self.devices().filter(move |state| self.node_name(state.view.node) == node)
    }

    /// Returns a node.
    pub fn node(&self, node: NodeId) -> Option<&NodeSummary> {
        self.nodes.get(&node).map(|summary| &**summary)
    }

    /// Returns the nodes by id.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeSummary> {
        self.nodes.values().map(|summary| &**summary)
    }

    /// Returns the name of a node; empty if the node is unknown.
    pub fn node_name(&self, node: NodeId) -> &str {
        self.node(node).map_or("", |node| &*node.facts.name)
    }

    /// Returns a lease that is granted or still drains.
    pub fn lease(&self, lease: LeaseId) -> Option<&LeaseRow> {
        self.leases.get(&lease).map(|row| &**row)
    }

    /// Returns the leases that are granted or still drain, by id.
    pub fn leases(&self) -> impl Iterator<Item = &LeaseRow> {
        self.leases.values().map(|row| &**row)
    }

    /// Empties the snapshot, before it is rebuilt from a pool.
    pub(super) fn clear(&mut self) {
        *self = Self { store: self.store.clone(), event: self.event, ..Self::new(self.at, self.tokens.clone()) };
    }

    pub(crate) fn set_device(&mut self, device: DeviceId, view: Option<DeviceView>) {
        let Some(view) = view else {
            self.devices.remove_mut(&device);
            return;
        };
        let before = self.devices.get(&device);
        let unchanged =
            before.filter(|before| (&before.view.leases, before.view.promised) == (&view.leases, view.promised));
        let leases_published_at = unchanged.map_or_else(clock::now, |before| before.leases_published_at);
        self.devices.insert_mut(device, Arc::new(DeviceState { view, leases_published_at }));
    }

    pub(crate) fn set_node(&mut self, node: NodeId, summary: Option<NodeSummary>) {
        match summary {
            Some(summary) => self.nodes.insert_mut(node, Arc::new(summary)),
            None => drop(self.nodes.remove_mut(&node)),
        }
    }

    pub(super) fn set_lease(&mut self, row: &LeaseRow) {
        if row.state.is_granted() || row.draining {
            self.leases.insert_mut(row.id, Arc::new(row.clone()));
        } else {
            self.leases.remove_mut(&row.id);
        }
    }

    pub(super) fn remove_lease(&mut self, lease: LeaseId) {
        self.leases.remove_mut(&lease);
    }
}

/// The latest snapshot, the samples for the authority, and its liveness.
#[derive(Debug)]
pub(super) struct SnapshotCell {
    /// A lock rather than a channel: it is held for the copy of a pointer.
    latest: RwLock<Arc<Snapshot>>,
    /// The pool time at which the authority last confirmed that the snapshot is current.
    confirmed_at: AtomicU64,
    /// The number of store calls in progress.
    store_calls: AtomicU64,
    /// Whether the authority must end.
    is_stopping: AtomicBool,
    /// The samples that the authority has not taken yet.
    pub samples: LatestSamples,
}

impl SnapshotCell {
    pub(super) fn new(snapshot: Snapshot) -> Self {
        Self {
            latest: RwLock::new(Arc::new(snapshot)),
            confirmed_at: AtomicU64::new(clock::now().0),
            store_calls: AtomicU64::new(0),
            is_stopping: AtomicBool::new(false),
            samples: LatestSamples::default(),
        }
    }

    /// Requests the end of the authority.
    pub(super) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    pub(super) fn latest(&self) -> Arc<Snapshot> {
        self.latest.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn publish(&self, snapshot: &Snapshot) {
        let new = Arc::new(snapshot.clone());
        let mut latest = self.latest.write().unwrap_or_else(PoisonError::into_inner);
        let old = std::mem::replace(&mut *latest, new);
        drop(latest);
        // Freed outside of the lock: readers wait for the copy of a pointer only.
        drop(old);
    }

    /// Confirms that the latest snapshot is current.
    pub(super) fn confirm(&self) {
        self.confirmed_at.store(clock::now().0, Ordering::Relaxed);
    }

    pub(super) fn age(&self) -> Millis {
        clock::now().since(PoolTime(self.confirmed_at.load(Ordering::Relaxed)))
    }

    /// Marks a call of the store as in progress, until the returned guard is dropped.
    pub(super) fn enter_store(self: &Arc<Self>) -> StoreCall {
        self.store_calls.fetch_add(1, Ordering::Relaxed);
        StoreCall(self.clone())
    }

    /// Whether the authority works or waits for its disk. A disk that hangs is no reason to end the agent: statistics and
    /// running jobs continue.
    pub(super) fn is_alive(&self) -> bool {
        self.store_calls.load(Ordering::Relaxed) > 0 || self.age() < AUTHORITY_SILENCE
    }
}

/// A call of the store in progress.
pub(super) struct StoreCall(Arc<SnapshotCell>);

impl Drop for StoreCall {
    fn drop(&mut self) {
        self.0.store_calls.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_authority_is_alive_only_while_it_calls_the_store() {
        let at = clock::both();
        let cell = Arc::new(SnapshotCell::new(Snapshot::new(at, Arc::default())));
        assert!(cell.is_alive());
        cell.confirmed_at.store(at.pool.0.saturating_sub(AUTHORITY_SILENCE.0), Ordering::Relaxed);
        assert!(!cell.is_alive());
        let call = cell.enter_store();
        assert!(cell.is_alive());
        drop(call);
        assert!(!cell.is_alive());
    }
}

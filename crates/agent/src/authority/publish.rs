//! Publishing a committed batch: the snapshot, events, orders to nodes, and the callers that wait.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use gpupool_api::events::EventBody;
use gpupool_api::view::{self, closure_name, end_cause_text, end_reason};
use gpupool_core::{
    ApplyOutcome, CommandDenied, DeviceId, DevicePromise, GpuId, Lease, LeaseId, LeaseState, NodeId, PoolEffect,
    PoolRow, WaitExplanation,
};
use gpupool_store::TokenOwners;

use crate::clock;
use crate::identity::Caller;
use crate::messages::{NodeLink, NodeOrder, PreparedDevice};
use crate::visibility::ProcessDetail;

use super::handle::{Refusal, Reply};
use super::{AuthorityThread, NodeSummary};

/// The orders to one node, including those that it could not take yet. Their number is bounded by that of live leases.
pub(super) struct OrderQueue {
    link: Box<dyn NodeLink>,
    backlog: VecDeque<NodeOrder>,
}

impl OrderQueue {
    pub(super) fn new(link: Box<dyn NodeLink>) -> Self {
        Self { link, backlog: VecDeque::new() }
    }

    /// Sends an order after those that wait.
    pub(super) fn push(&mut self, order: NodeOrder) {
        self.backlog.push_back(order);
        self.send_backlog();
    }

    /// Sends the orders that the node can take now.
    pub(super) fn send_backlog(&mut self) {
        while let Some(order) = self.backlog.pop_front() {
            if let Err(order) = self.link.send(order) {
                self.backlog.push_front(order);
                return;
            }
        }
    }

    pub(super) fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }
}

impl AuthorityThread {
    /// Rebuilds from the pool the indexes that effects otherwise update.
    pub(super) fn rebuild_indexes(&mut self) {
        self.held.clear();
        let holding: Vec<LeaseId> =
            self.pool.leases().filter(|lease| !lease.promises.is_empty()).map(|lease| lease.id).collect();
        for lease in holding {
            self.note_held(lease);
        }
        self.waiters.recount(&self.pool);
        self.pool.take_touched_devices();
        self.snapshot.clear();
        for node in self.pool.nodes() {
            self.snapshot.set_node(node.node, Some(NodeSummary::from(node)));
        }
        for view in self.pool.devices() {
            self.snapshot.set_device(view.device, Some(view));
        }
        for lease in self.pool.leases() {
            self.snapshot.set_lease(lease.row());
        }
        self.snapshot.next_token = self.pool.next_token();
        self.publish_snapshot(self.events.last());
    }

    /// Publishes a batch that was committed.
    pub(super) fn publish(&mut self, outcome: &ApplyOutcome) {
        self.update_snapshot(&outcome.rows);
        let logged = self.unlogged.len();
        for effect in &outcome.effects {
            self.publish_effect(effect);
        }
        for queue in self.links.values_mut() {
            queue.send_backlog();
        }
        let new: Vec<_> = self.unlogged[logged..].to_vec();
        let events = self.events.clone();
        events.add(new, |last| self.publish_snapshot(last));
    }

    fn publish_effect(&mut self, effect: &PoolEffect) {
        if let PoolEffect::Granted { lease, .. } | PoolEffect::Offered { lease, .. } = effect {
            self.note_held(*lease);
        }
        self.waiters.follow(effect, &self.pool);
        self.metrics.effect(effect, &self.pool);
        match effect {
            PoolEffect::Granted { lease, .. } => self.order_prepare(*lease),
            PoolEffect::Ended { lease, .. } => self.order_end(*lease, self.was_taken_back(*lease)),
            _ => {}
        }
        let event = self.event(effect);
        self.unlogged.push(Arc::new(event));
        if let PoolEffect::Freed { lease } = effect {
            self.held.remove(lease);
            self.occupancy.forget(*lease);
        }
    }

    fn order_prepare(&mut self, lease: LeaseId) {
        let node = self.pool.lease(lease).and_then(|row| row.node);
        if !self.queue_of(node).is_some_and(|queue| queue.link.prepares_devices()) {
            return;
        }
        let prepared = |promise: &DevicePromise| {
            let identity = self.pool.device(promise.device)?.facts.identity.clone();
            Some(PreparedDevice { identity, share: promise.share, memory: promise.memory })
        };
        let promises = self.pool.lease(lease).map(|row| row.promises.clone()).unwrap_or_default();
        let devices = promises.iter().filter_map(prepared).collect();
        if let Some(queue) = self.queue_of(node) {
            queue.push(NodeOrder::Prepare { lease, devices });
        }
    }

    /// Orders the node of an ended lease to end its processes, if it may have any.
    pub(super) fn order_end(&mut self, lease: LeaseId, taken_back: bool) {
        let Some(row) = self.pool.lease(lease) else { return };
        let (node, awaited) = (row.node, row.draining);
        let is_attached = self.occupancy.is_attached(lease);
        let Some(queue) = self.queue_of(node) else { return };
        if awaited || is_attached || queue.link.prepares_devices() {
            queue.push(NodeOrder::End { lease, taken_back, awaited });
        }
    }

    fn queue_of(&mut self, node: Option<NodeId>) -> Option<&mut OrderQueue> {
        let name = &self.snapshot.node(node?)?.facts.name;
        self.links.get_mut(name)
    }

    fn note_held(&mut self, lease: LeaseId) {
        let Some(row) = self.pool.lease(lease) else { return };
        let gpu_ids: Arc<[GpuId]> = row.promises.iter().filter_map(|promise| self.gpu_id_of(promise.device)).collect();
        // A lease that was granted and freed within one batch has no devices in the pool any more.
        if !gpu_ids.is_empty() || row.state != LeaseState::Queued {
            self.held.insert(lease, gpu_ids);
        }
    }

    fn gpu_id_of(&self, device: DeviceId) -> Option<GpuId> {
        self.pool.device(device).map(|view| view.gpu_id)
    }

    fn event(&mut self, effect: &PoolEffect) -> EventBody {
        let lease = lease_of(effect);
        let held = lease.and_then(|lease| self.held.get(&lease)).cloned().unwrap_or_default();
        let mut gpu_ids: Vec<u32> = held.iter().map(|gpu| gpu.0).collect();
        let mut node = lease.and_then(|lease| self.pool.lease(lease)).and_then(|row| row.node);
        if let PoolEffect::Quarantined { device, .. } | PoolEffect::DeviceOpen { device, .. } = effect
            && let Some(view) = self.pool.device(*device)
        {
            gpu_ids = vec![view.gpu_id.0];
            node = Some(view.node);
        }
        let (kind, reason) = match effect {
            PoolEffect::Queued { lease } => ("queued", self.explain(*lease).map(|why| why.to_string())),
            PoolEffect::Offered { .. } => ("offered", None),
            PoolEffect::Granted { .. } => ("granted", None),
            PoolEffect::Revoking { at, lease } => {
                let end = format!("ends at {}", clock::iso_of(*at, self.at));
                let revocation = self.pool.lease(*lease).and_then(|row| row.revocation.clone());
                (
                    "revoking",
                    Some(match revocation {
                        Some(revocation) => format!("{end}, {revocation}"),
                        None => end,
                    }),
                )
            }
            PoolEffect::Ended { cause, lease } => {
                let reason = self.pool.lease(*lease).and_then(|row| end_reason(row));
                ("ended", Some(reason.unwrap_or_else(|| end_cause_text(cause))))
            }
            PoolEffect::Draining { .. } => ("draining", None),
            PoolEffect::Freed { .. } => ("freed", None),
            PoolEffect::Quarantined { .. } => ("quarantined", Some("processes of an ended lease stayed on it".into())),
            PoolEffect::DeviceOpen { closed: None, .. } => ("device_open", None),
            PoolEffect::DeviceOpen { closed: Some(why), .. } => ("device_closed", Some(closure_name(*why).into())),
        };
        let row = lease.and_then(|lease| self.pool.lease(lease));
        EventBody {
            kind: kind.into(),
            at: clock::iso(self.at.wall),
            lease: lease.map(|lease| lease.0),
            owner: row.map(|row| row.request.owner.to_string()),
            worker_id: row.and_then(|row| row.request.worker_id.as_ref()).map(ToString::to_string),
            gpu_ids,
            node: node.and_then(|node| self.snapshot.node(node)).map(|node| node.facts.name.to_string()),
            reason,
        }
    }

    /// Explains why a lease waits. Within a batch the event and the reply share one explanation.
    pub(super) fn explain(&mut self, lease: LeaseId) -> Option<Arc<WaitExplanation>> {
        if let Some(known) = self.explained.get(&lease) {
            return Some(known.clone());
        }
        let explanation = Arc::new(self.pool.explain(lease)?);
        self.explained.insert(lease, explanation.clone());
        Some(explanation)
    }

    /// Returns a lease in the form of the API, with its token for callers that may act for its owner.
    pub(super) fn lease_reply(&mut self, lease: LeaseId, caller: &Caller) -> Result<Reply, Refusal> {
        let explanation = self.explain(lease);
        let known = self.pool.lease(lease).ok_or(CommandDenied::UnknownLease(lease))?;
        Ok(Reply::Lease(Box::new(self.lease_body(known, explanation.as_deref(), caller))))
    }

    /// Returns a lease in the form of the API. Its node adds the variables that show devices to a job.
    pub(crate) fn lease_body(
        &self,
        lease: &Lease,
        explanation: Option<&WaitExplanation>,
        caller: &Caller,
    ) -> gpupool_api::lease::LeaseBody {
        let is_owners = caller.may_act_for(&lease.request.owner);
        let iso = |time| clock::iso_of(time, self.at);
        let mut body = view::lease_body(&self.pool, lease, explanation, iso, |_| Default::default(), is_owners);
        let detail = ProcessDetail::of(caller, Some(&lease.request.owner));
        body.holder.iter_mut().for_each(|holder| detail.limit_holder(holder));
        body
    }

    /// Applies the changes of a committed batch to the snapshot. The cost grows with the changes only.
    fn update_snapshot(&mut self, rows: &[PoolRow]) {
        let mut nodes = BTreeSet::new();
        for row in rows {
            match row {
                PoolRow::Lease(row) => {
                    let takes_host = !row.request.cpus.is_zero() || !row.request.host_memory.is_zero();
                    nodes.extend(row.node.filter(|_| takes_host));
                    self.snapshot.set_lease(row);
                }
                PoolRow::Forget(lease) => self.snapshot.remove_lease(*lease),
                PoolRow::Node(row) => drop(nodes.insert(row.node)),
                PoolRow::ForgetNode(node) => {
                    nodes.insert(*node);
                    self.samples.remove(node);
                    self.occupancy.forget_node(*node);
                }
                _ => {}
            }
        }
        for device in self.pool.take_touched_devices() {
            self.snapshot.set_device(device, self.pool.device(device));
        }
        for node in nodes {
            self.snapshot.set_node(node, self.pool.node(node).map(NodeSummary::from));
        }
        self.snapshot.next_token = self.pool.next_token();
    }

    fn publish_snapshot(&mut self, last_event: u64) {
        self.snapshot.at = self.at;
        self.snapshot.event = last_event;
        self.snapshot.queued = self.waiters.queued();
        self.snapshot.oldest_request_at = self.waiters.oldest_request_at();
        self.cell.publish(&self.snapshot);
    }

    pub(super) fn publish_store_state(&mut self) {
        self.snapshot.store = self.store_state.clone();
        self.cell.publish(&self.snapshot);
    }

    pub(super) fn publish_tokens(&mut self) {
        let owners = self.store.token_owners().unwrap_or_else(|error| {
            // A revoked token must not be accepted, so no token is until the store can be read.
            tracing::error!(%error, "no token is accepted until the tokens can be read again");
            TokenOwners::default()
        });
        self.snapshot.tokens = Arc::new(owners);
        self.cell.publish(&self.snapshot);
    }

    /// Writes the events of the batch to the log, after the replies to its callers.
    pub(super) fn log_events(&mut self) {
        for event in self.unlogged.drain(..) {
            log_event(&event);
        }
    }
}

fn log_event(event: &EventBody) {
    let devices = event.gpu_ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let (kind, lease, owner) = (event.kind.as_str(), event.lease, event.owner.as_deref());
    let (worker, reason, node) = (event.worker_id.as_deref(), event.reason.as_deref(), event.node.as_deref());
    match kind {
        "quarantined" | "device_closed" => {
            tracing::warn!(target: "pool", lease, owner, worker, node, devices, reason, "{kind}");
        }
        "draining" | "freed" | "queued" => {
            tracing::debug!(target: "pool", lease, owner, worker, node, devices, reason, "{kind}");
        }
        _ => tracing::info!(target: "pool", lease, owner, worker, node, devices, reason, "{kind}"),
    }
}

fn lease_of(effect: &PoolEffect) -> Option<LeaseId> {
    match effect {
        PoolEffect::Queued { lease }
        | PoolEffect::Offered { lease, .. }
        | PoolEffect::Granted { lease, .. }
        | PoolEffect::Revoking { lease, .. }
        | PoolEffect::Ended { lease, .. }
        | PoolEffect::Draining { lease }
        | PoolEffect::Freed { lease }
        | PoolEffect::Quarantined { lease, .. } => Some(*lease),
        PoolEffect::DeviceOpen { .. } => None,
    }
}

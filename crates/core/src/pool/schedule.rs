//! Order in which waiting requests are served.
//!
//! A pass visits waiting requests in order, by lanes. A request that finds devices is granted. One that does not is
//! *passed*: for the rest of the pass, every device and host it could use is reserved, so no later request can delay
//! it. The one exception is a lease that is certain to end, by its `max_duration`, before the passed request is certain
//! to start. A request held back by its owner's quota reserves nothing.
//!
//! Each batch ends with such a pass. A new request within a batch is placed at once if it avoids everything that
//! earlier waiters could use, available or not: some of them may start only when the batch ends, because of an earlier
//! command of the batch.

use std::sync::Arc;

use crate::classes::{DeviceNeed, RequestClass, RequestClassId, RequestShape};
use crate::ids::{DeviceId, LeaseId, NodeId};
use crate::inventory::{DeviceInventory, DeviceKindId, DeviceSlot};
use crate::lease::{Lease, LeaseState, PlacementDecision, QueueTurn};
use crate::limits;
use crate::outcome::{ApplyOutcome, PoolEffect};
use crate::placement::{PlacementChoice, PlacementSearch, ReservedCapacity, is_below};
use crate::queue::{OwnerId, QuotaExcess, RequestQueue, WaitingNeeds};
use crate::request::PlacementStrategy;
use crate::units::{Millis, PoolTime, Share};

use super::Pool;

/// Terms under which a request is queued and granted.
#[derive(Debug, Clone)]
pub(super) struct RequestTerms {
    pub class: RequestClassId,
    pub owner: OwnerId,
    pub priority: i32,
    pub max_duration: Option<Millis>,
    pub policy: Arc<str>,
}

/// Classes that found no place in a pass, and the capacity reserved for them.
#[derive(Default)]
struct PassedClasses {
    classes: Vec<RequestClassId>,
    reserved: ReservedCapacity,
    /// Certain start of each class, if it was computed since the last grant.
    starts: Vec<Option<Option<PoolTime>>>,
}

impl PassedClasses {
    fn add(&mut self, id: RequestClassId, class: &RequestClass, inventory: &DeviceInventory) {
        self.classes.push(id);
        self.starts.push(None);
        self.reserved.add_class(class, inventory);
    }
}

impl Pool {
    /// Finds a placement for a new request that delays no earlier one.
    pub(super) fn find_on_arrival(
        &mut self,
        terms: &RequestTerms,
        fairness: (u64, u64),
    ) -> Option<(PlacementChoice, QueueTurn)> {
        if self.quota_excess(terms.owner, terms.class).is_some() {
            return None;
        }
        if self.queue.is_empty() {
            let placement = self.search(terms.class, &ReservedCapacity::default())?;
            return Some((placement, QueueTurn::OnArrival));
        }
        if !self.may_have_free_device(terms.class) {
            return None;
        }
        let ahead: Vec<(RequestClassId, OwnerId)> = self
            .queue
            .lanes_ahead(terms.priority, fairness)
            .map(|lane| (lane.class, lane.owner))
            .take(limits::MAX_LANES_PER_PASS + 1)
            .collect();
        if ahead.len() > limits::MAX_LANES_PER_PASS {
            // Too many lanes to check on arrival; a pass does not count those that a quota holds back.
            self.needs_pass = true;
            return None;
        }
        let mut passed = PassedClasses::default();
        for (class, owner) in ahead {
            // The last pass may have ended before it reached this class, and facts may have changed since.
            self.classes.refresh(class, &self.inventory);
            if !passed.classes.contains(&class) && self.quota_excess(owner, class).is_none() {
                passed.add(class, self.classes.get(class), &self.inventory);
            }
        }
        self.find_past_waiters(terms.class, &mut passed, terms.max_duration, QueueTurn::OnArrival)
    }

    /// Grants every waiting request that can start now.
    pub(super) fn serve_waiters(&mut self, out: &mut ApplyOutcome) {
        // A pass requests another one only if a grant changed a quota or the order, so the loop ends at the latest when
        // the queue is empty.
        while std::mem::take(&mut self.needs_pass) && !self.queue.is_empty() {
            self.run_pass(out);
        }
    }

    fn run_pass(&mut self, out: &mut ApplyOutcome) {
        self.inventory.refresh();
        let mut passed = PassedClasses::default();
        let mut at = None;
        let mut lanes_checked = 0;
        while let Some(key) = self.queue.next_lane(at) {
            at = Some(key);
            let lane = self.queue.lane(key.3);
            let (class, owner) = (lane.class, lane.owner);
            let Some(id) = lane.head() else { continue };
            self.classes.refresh(class, &self.inventory);
            if self.quota_excess(owner, class).is_some() {
                continue;
            }
            lanes_checked += 1;
            let is_check_due = passed.classes.len() % 16 == 1;
            if lanes_checked > limits::MAX_LANES_PER_PASS || (is_check_due && self.is_all_reserved(&passed)) {
                break;
            }
            let is_passed = passed.classes.contains(&class);
            if is_passed && self.classes.get(class).shape.gpus > 0 {
                // A passed request of this class already claims everything that this one could use.
                continue;
            }
            let terms = self.current_terms(id, class, owner);
            if is_passed && terms.max_duration.is_none() {
                continue;
            }
            match self.find_past_waiters(class, &mut passed, terms.max_duration, QueueTurn::Next) {
                Some((placement, turn)) => {
                    self.dequeue(id);
                    self.grant(id, &terms, placement, turn, out);
                    passed.starts.fill(None);
                    if self.owners.fairness_of(owner, &self.policies) < key.1 {
                        // A new period began: this owner's lanes moved ahead, perhaps to a part that was already
                        // visited.
                        self.needs_pass = true;
                        return;
                    }
                }
                None if !is_passed => {
                    passed.add(class, self.classes.get(class), &self.inventory);
                    if passed.classes.len() == self.waiting_needs.classes && self.waiting_needs.host_only == 0 {
                        break;
                    }
                }
                None => {}
            }
        }
    }

    /// Finds a placement for `class` that avoids everything the passed classes could use. If there is none, ignores
    /// passed classes that cannot start before the lease is certain to end.
    fn find_past_waiters(
        &mut self,
        class: RequestClassId,
        passed: &mut PassedClasses,
        max_duration: Option<Millis>,
        turn: QueueTurn,
    ) -> Option<(PlacementChoice, QueueTurn)> {
        if let Some(placement) = self.search(class, &passed.reserved) {
            return Some((placement, if passed.classes.is_empty() { turn } else { QueueTurn::PassedOthers }));
        }
        let end = self.now.after(max_duration.filter(|_| !passed.classes.is_empty())?);
        if !self.may_have_free_device(class) || self.promise_count() > limits::MAX_BACKFILL_PROMISES {
            return None;
        }
        let mut blocking = PassedClasses::default();
        for (&id, start) in passed.classes.iter().zip(&mut passed.starts) {
            if id == class || start.get_or_insert_with(|| self.certain_start(id)).is_none_or(|start| start < end) {
                blocking.add(id, self.classes.get(id), &self.inventory);
            }
        }
        if blocking.classes.len() == passed.classes.len() {
            return None;
        }
        Some((self.search(class, &blocking.reserved)?, QueueTurn::EndsBeforeOthersStart))
    }

    /// Whether any device has enough free share for the class; a quick check that ignores everything else.
    fn may_have_free_device(&self, id: RequestClassId) -> bool {
        let class = self.classes.get(id);
        let room = |need: &DeviceNeed| self.inventory.kind_index(need.kind).max_free_share() >= need.share;
        class.shape.gpus == 0 || class.needs.iter().any(room)
    }

    fn search(&mut self, id: RequestClassId, reserved: &ReservedCapacity) -> Option<PlacementChoice> {
        self.inventory.refresh();
        self.classes.refresh(id, &self.inventory);
        let generation = self.classes.generation;
        let stale_before = self.stale_before();
        let class = self.classes.get(id);
        let strategy = class.shape.strategy;
        let mut search = PlacementSearch {
            inventory: &mut self.inventory,
            scorer: &mut self.scorer,
            id,
            class,
            reserved,
            last_device: self.counters.last_device.filter(|_| strategy == PlacementStrategy::RoundRobin),
            stale_before,
        };
        if strategy.scores_nodes() {
            search.refresh_scores(&self.workload, generation);
        }
        search.find()
    }

    /// Whether every kind of device with free share is reserved for the passed classes.
    fn is_all_reserved(&self, passed: &PassedClasses) -> bool {
        self.waiting_needs.gpu_optional == 0
            && (0..self.inventory.kinds.len() as u32).map(DeviceKindId).all(|kind| {
                self.inventory.kind_index(kind).max_free_share().is_zero() || passed.reserved.contains_kind(kind)
            })
    }

    /// Grants a placement to a waiting or new lease.
    pub(super) fn grant(
        &mut self,
        id: LeaseId,
        terms: &RequestTerms,
        placement: PlacementChoice,
        turn: QueueTurn,
        out: &mut ApplyOutcome,
    ) {
        let token = self.allocate_token();
        let now = self.now;
        let strategy = self.classes.get(terms.class).shape.strategy;
        for promise in &placement.promises {
            debug_assert!(self.inventory.device(promise.device).free_share() >= promise.share);
            self.change_device(promise.device, out, |slot| {
                slot.promised += promise.share;
                slot.promised_memory += promise.memory;
                slot.leases.push(id);
                slot.leases_changed_at = Some(now);
            });
        }
        if let Some(last) = placement.promises.last() {
            self.counters.last_device = Some(last.device);
        }
        let lease = self.lease_mut(id);
        let (cpus, memory) = (lease.request.cpus, lease.request.host_memory);
        let decision = Arc::new(PlacementDecision { policy: terms.policy.clone(), strategy, turn });
        lease.token = Some(token);
        lease.node = Some(placement.node);
        lease.promises = placement.promises.into();
        lease.granted_at = Some(now);
        lease.hard_end = terms.max_duration.map(|most| now.after(most));
        lease.decision = Some(decision.clone());
        if lease.request.hedged {
            lease.state = LeaseState::Offered;
            // Other requests rely on the certain end, so an offer is not held beyond it either.
            let held = now.after(limits::OFFER_LIFETIME);
            let until = lease.hard_end.map_or(held, |end| end.min(held));
            out.effects.push(PoolEffect::Offered { lease: id, token, until, decision });
        } else {
            lease.state = LeaseState::Active;
            lease.expires_at = Some(now.after(lease.request.ttl));
            out.effects.push(PoolEffect::Granted { lease: id, token, decision });
        }
        if !cpus.is_zero() || !memory.is_zero() {
            self.inventory.update_node(placement.node, |slot| {
                slot.cpus_promised += cpus;
                slot.memory_promised += memory;
            });
        }
        if strategy.looks_ahead() {
            self.workload.record_grant();
        }
        self.update_account(id, |held, share| held + share, out);
        self.set_deadline(id);
        self.push_lease_row(id, out);
    }

    pub(super) fn enqueue(&mut self, id: LeaseId, terms: &RequestTerms, seq: u64) {
        let fairness = self.owners.fairness_of(terms.owner, &self.policies);
        let lease = &self.leases[&id];
        let queue_priority = self.policies.queue_priority(&lease.request, lease.created_at, self.now);
        self.lease_mut(id).queue_priority = queue_priority;
        self.queue.push(id, (terms.owner, terms.class), queue_priority.priority, seq, fairness);
        self.waiting_needs.gpu_optional += usize::from(self.is_free_gpu_optional(id, terms.class));
        let class = self.classes.get_mut(terms.class);
        if class.waiter_count == 0 {
            self.waiting_needs.add(&class.shape);
        }
        class.waiter_count += 1;
    }

    /// Whether a request may start although all free GPUs are reserved: it needs none, or its lease is certain to end.
    fn is_free_gpu_optional(&self, id: LeaseId, class: RequestClassId) -> bool {
        let request = &self.leases[&id].request;
        self.classes.get(class).shape.gpus == 0 || self.policies.policy_for(request).hold_limit(request).is_some()
    }

    pub(super) fn dequeue(&mut self, id: LeaseId) {
        let (owner, class) = self.lane_key(id);
        let lease = self.lease_mut(id);
        let (priority, seq) = (lease.queue_priority.priority, lease.seq);
        self.queue.remove((owner, class), priority, seq);
        self.waiting_needs.gpu_optional -= usize::from(self.is_free_gpu_optional(id, class));
        let class = self.classes.get_mut(class);
        class.waiter_count -= 1;
        if class.waiter_count == 0 {
            self.waiting_needs.remove(&class.shape);
        }
    }

    /// Queues all waiters again after a change of policies, and returns them.
    pub(super) fn requeue_all(&mut self) -> Vec<LeaseId> {
        let waiting: Vec<LeaseId> =
            self.leases.values().filter(|lease| lease.state == LeaseState::Queued).map(|lease| lease.id).collect();
        self.queue = RequestQueue::default();
        self.waiting_needs = WaitingNeeds::default();
        self.classes.clear_waiters();
        self.inventory.refresh();
        for &id in &waiting {
            let (owner, class) = self.lane_key(id);
            let terms = self.current_terms(id, class, owner);
            let seq = self.lease_mut(id).seq;
            self.enqueue(id, &terms, seq);
        }
        waiting
    }

    fn current_terms(&mut self, id: LeaseId, class: RequestClassId, owner: OwnerId) -> RequestTerms {
        let lease = self.lease_mut(id);
        let (request, priority) = (lease.request.clone(), lease.queue_priority.priority);
        let policy = self.policies.policy_for(&request);
        let max_duration = policy.hold_limit(&request);
        RequestTerms { class, owner, priority, max_duration, policy: policy.name.clone() }
    }

    pub(super) fn quota_excess(&mut self, owner: OwnerId, class: RequestClassId) -> Option<QuotaExcess> {
        let more = self.classes.get(class).max_held;
        let account = self.owners.get(owner);
        let quota = self.policies.quota_of(&account.name);
        let over = account.quota_excess(quota, more, self.now, self.policies.period);
        let changes_at = match over {
            Some(QuotaExcess::ShareHours { until }) => Some(until),
            Some(QuotaExcess::Held) => None,
            None if more.is_zero() => None,
            None => account.exhausted_at(quota, self.now, self.policies.period),
        };
        if let Some(at) = changes_at {
            self.quota_deadline = Some(self.quota_deadline.map_or(at, |before| before.min(at)));
        }
        over
    }

    fn promise_count(&self) -> usize {
        self.leases.len() - self.queue.len()
    }
}

// Certain starts of waiting classes, which backfill must not delay.
//
// Only promised ends count (`max_duration`, an announced revocation), not the ttl, which heartbeats extend.

impl Pool {
    /// Returns the time at which a class is certain to find a place, by certain ends only; `None` if there is none.
    ///
    /// Devices that drain, or are closed for a reason that may pass at any moment, count as free now. Devices above the
    /// class's own thresholds do not count.
    fn certain_start(&self, id: RequestClassId) -> Option<PoolTime> {
        let class = self.classes.get(id);
        let hosts = self.inventory.nodes.iter().filter(|(_, slot)| class.fits_shape(slot.shape));
        hosts.filter_map(|(node, _)| self.certain_start_on(&class.shape, id, NodeId(node))).min()
    }

    fn certain_start_on(&self, shape: &RequestShape, id: RequestClassId, node: NodeId) -> Option<PoolTime> {
        let class = self.classes.get(id);
        let slot = self.inventory.node(node);
        let free_at = |&device: &DeviceId| {
            let slot = self.inventory.device(device);
            let need = class.need_on_device(device, slot.kind)?;
            let judged = shape.thresholds.is_none_or(|thresholds| is_below(slot, thresholds, None));
            if judged { self.device_free_at(need, device, slot) } else { None }
        };
        let mut device_times: Vec<PoolTime> = slot.devices.iter().filter_map(free_at).collect();
        device_times.sort_unstable();
        let devices = match usize::from(shape.gpus) {
            0 => self.now,
            gpus => *device_times.get(gpus - 1)?,
        };
        Some(devices.max(self.host_free_at(shape, node)?))
    }

    /// Returns the time at which a device is certain to have room for a need.
    pub(super) fn device_free_at(&self, need: &DeviceNeed, device: DeviceId, slot: &DeviceSlot) -> Option<PoolTime> {
        let free = (u64::from((Share::WHOLE - slot.promised).0), slot.unpromised_memory().0);
        let mut ends = Vec::new();
        for lease in slot.leases.iter().filter_map(|lease| self.leases.get(lease)) {
            for promise in lease.promises.iter().filter(|promise| promise.device == device) {
                ends.extend(self.certain_end(lease).map(|end| (end, u64::from(promise.share.0), promise.memory.0)));
            }
        }
        self.enough_at(free, (u64::from(need.share.0), need.memory.0), ends)
    }

    fn host_free_at(&self, shape: &RequestShape, node: NodeId) -> Option<PoolTime> {
        if !shape.needs_host() {
            return Some(self.now);
        }
        let slot = self.inventory.node(node);
        let cpus = slot.facts.cpus.saturating_sub(slot.cpus_promised);
        let memory = slot.facts.memory.saturating_sub(slot.memory_promised);
        let here = self
            .leases
            .values()
            .filter(|lease| lease.node == Some(node) && (lease.state.is_granted() || lease.draining));
        let ends = here
            .filter_map(|lease| Some((self.certain_end(lease)?, lease.request.cpus.0, lease.request.host_memory.0)))
            .collect();
        self.enough_at((cpus.0, memory.0), (shape.cpus.0, shape.host_memory.0), ends)
    }

    /// Returns the time at which two free amounts, with the amounts that return at each end, reach the need.
    fn enough_at(&self, free: (u64, u64), need: (u64, u64), mut ends: Vec<(PoolTime, u64, u64)>) -> Option<PoolTime> {
        ends.sort_unstable();
        let (mut at, mut free, mut ends) = (self.now, free, ends.into_iter());
        while free.0 < need.0 || free.1 < need.1 {
            let (end, first, second) = ends.next()?;
            at = end;
            free = (free.0 + first, free.1 + second);
        }
        Some(at)
    }

    pub(super) fn certain_end(&self, lease: &Lease) -> Option<PoolTime> {
        if lease.draining { Some(self.now) } else { lease.certain_end() }
    }
}

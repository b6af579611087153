//! Life of a lease: request, renewal, confirmation and attachment; its end by release, expiry, revocation or fault;
//! then draining, or quarantine if processes stay.

use std::sync::Arc;

use crate::classes::RequestShape;
use crate::ids::{DeviceId, LeaseId, Token};
use crate::lease::{DevicePromise, EndCause, Lease, LeaseHolder, LeaseState, Revocation};
use crate::limits;
use crate::outcome::{ApplyOutcome, CommandDenied, CommandReply, PoolEffect, Unsatisfiable};
use crate::policy::QueueOrder;
use crate::request::{FieldError, Request};
use crate::row::{LeaseRow, PoolRow};
use crate::units::{Millis, PoolTime};

use super::schedule::RequestTerms;
use super::{DrainMode, Pool, PoolSettings};

impl Pool {
    pub(super) fn request_lease(
        &mut self,
        request: Arc<Request>,
        key: Option<Arc<str>>,
        by_admin: bool,
        out: &mut ApplyOutcome,
    ) -> Result<CommandReply, CommandDenied> {
        request.validate()?;
        if let Some(key) = &key {
            if key.is_empty() || key.len() > limits::MAX_NAME_BYTES {
                return Err(FieldError::new("Idempotency-Key", key, "1..=253 bytes").into());
            }
            if let Some(&lease) = self.keys.get(&(request.owner.clone(), key.clone())) {
                return Ok(CommandReply::Lease(lease));
            }
        }
        let is_new = self.owners.find(&request.owner).is_none();
        let terms = self.resolve_terms(&request, by_admin, out)?;
        let fairness = self.owners.fairness_of(terms.owner, &self.policies);
        let waiters_may_go = self.needs_pass && !self.queue.is_empty();
        let mut placement = self.find_on_arrival(&terms, fairness);
        let wait_denial = |pool: &Self| {
            if !request.queue {
                Some(CommandDenied::NoCapacity)
            } else if pool.queue.len() >= limits::MAX_WAITERS {
                Some(CommandDenied::QueueFull { limit: limits::MAX_WAITERS })
            } else {
                None
            }
        };
        if placement.is_none() && waiters_may_go && wait_denial(self).is_some() {
            // Changes in this batch may let earlier waiters start, and a waiter that has started claims nothing more.
            self.serve_waiters(out);
            let fairness = self.owners.fairness_of(terms.owner, &self.policies);
            placement = self.find_on_arrival(&terms, fairness);
        }
        if let Some(denied) = wait_denial(self).filter(|_| placement.is_none()) {
            if is_new {
                self.owners.close_newest(terms.owner);
            }
            return Err(denied);
        }

        let id = self.new_lease(request, key);
        match placement {
            Some((placement, turn)) => self.grant(id, &terms, placement, turn, out),
            None => {
                let seq = self.lease_mut(id).seq;
                self.enqueue(id, &terms, seq);
                self.set_deadline(id);
                self.push_lease_row(id, out);
                out.effects.push(PoolEffect::Queued { lease: id });
            }
        }
        Ok(CommandReply::Lease(id))
    }

    /// Resolves the policy and class of a request, or returns the reason why it can never be served.
    fn resolve_terms(
        &mut self,
        request: &Arc<Request>,
        by_admin: bool,
        out: &mut ApplyOutcome,
    ) -> Result<RequestTerms, CommandDenied> {
        self.inventory.refresh();
        let policy = self.policies.policy_for(request);
        let priority_violation = if by_admin { None } else { policy.find_priority_violation(request) };
        if let Some(rule) = policy.find_violation(request).or(priority_violation) {
            return Err(CommandDenied::Policy { policy: policy.name.clone(), rule });
        }
        let shape = RequestShape::of(request, policy);
        let looks_ahead = shape.strategy.looks_ahead();
        let priority = request.priority.saturating_add(policy.priority_boost);
        let max_duration = policy.hold_limit(request);
        let policy_name = policy.name.clone();
        let class = self.classes.intern(shape, &self.inventory);
        let assessed = self.classes.get(class);
        if looks_ahead {
            let task = assessed.task_class();
            self.workload.record_arrival(task, &mut |row| out.rows.push(PoolRow::Workload(row)));
        }
        if let Some(unsatisfiable) = &assessed.unsatisfiable {
            return Err(CommandDenied::Unsatisfiable(unsatisfiable.clone()));
        }
        let quota = self.policies.quota_of(&request.owner).held;
        if let Some(quota) = quota.filter(|quota| assessed.max_held > *quota) {
            return Err(CommandDenied::Unsatisfiable(Unsatisfiable::OverQuota { wanted: assessed.max_held, quota }));
        }
        let owner = self.owners.get_or_open(&request.owner, self.now);
        Ok(RequestTerms { class, owner, priority, max_duration, policy: policy_name })
    }

    fn new_lease(&mut self, request: Arc<Request>, key: Option<Arc<str>>) -> LeaseId {
        let id = LeaseId(self.counters.next_lease);
        self.counters.next_lease += 1;
        let seq = self.counters.next_seq;
        self.counters.next_seq += 1;
        if let Some(key) = &key {
            self.keys.insert((request.owner.clone(), key.clone()), id);
        }
        let lease = Lease::from_row(LeaseRow::new(id, seq, request, key, self.now), self.now);
        self.leases.insert(id, Box::new(lease));
        id
    }

    pub(super) fn follow_lease(&mut self, lease: LeaseId) -> Result<CommandReply, CommandDenied> {
        let now = self.now;
        self.known_lease(lease)?.followed_at = now;
        self.set_deadline(lease);
        Ok(CommandReply::Lease(lease))
    }

    pub(super) fn confirm_offer(
        &mut self,
        id: LeaseId,
        token: Token,
        out: &mut ApplyOutcome,
    ) -> Result<CommandReply, CommandDenied> {
        let now = self.now;
        let lease = self.granted_lease(id, token)?;
        if lease.state == LeaseState::Offered {
            lease.state = LeaseState::Active;
            lease.expires_at = Some(now.after(lease.request.ttl));
            let effect = lease.decision.clone().map(|decision| PoolEffect::Granted { lease: id, token, decision });
            out.effects.extend(effect);
            self.set_deadline(id);
            self.push_lease_row(id, out);
        }
        Ok(CommandReply::Lease(id))
    }

    pub(super) fn renew_lease(&mut self, id: LeaseId, token: Token) -> Result<CommandReply, CommandDenied> {
        let now = self.now;
        let lease = self.granted_lease(id, token)?;
        if lease.state == LeaseState::Offered {
            return Err(CommandDenied::NotGranted(id));
        }
        if lease.expires_at.is_some() {
            lease.expires_at = Some(now.after(lease.request.ttl));
            self.set_deadline(id);
        }
        Ok(CommandReply::Lease(id))
    }

    pub(super) fn attach_holder(
        &mut self,
        id: LeaseId,
        token: Token,
        holder: LeaseHolder,
        out: &mut ApplyOutcome,
    ) -> Result<CommandReply, CommandDenied> {
        let lease = self.granted_lease(id, token)?;
        if lease.state == LeaseState::Offered {
            return Err(CommandDenied::NotGranted(id));
        }
        if let Some(by) = lease.holder.clone().filter(|by| !by.may_be_followed_by(&holder)) {
            return Err(CommandDenied::Held { lease: id, by });
        }
        lease.holder = Some(holder);
        lease.expires_at = None;
        self.set_deadline(id);
        self.push_lease_row(id, out);
        Ok(CommandReply::Lease(id))
    }

    /// Returns a granted lease if the token matches.
    fn granted_lease(&mut self, id: LeaseId, presented: Token) -> Result<&mut Lease, CommandDenied> {
        let lease = self.known_lease(id)?;
        match lease.token {
            Some(token) if token != presented => Err(CommandDenied::Stale { lease: id, presented }),
            _ if lease.state.is_ended() => Err(CommandDenied::Ended(id)),
            None => Err(CommandDenied::NotGranted(id)),
            Some(_) => Ok(lease),
        }
    }

    /// Allocates the next token. The counters row with it is committed before the token is published.
    pub(super) fn allocate_token(&mut self) -> Token {
        let token = Token(self.counters.next_token);
        self.counters.next_token += 1;
        token
    }

    /// Changes the share that an owner holds.
    pub(super) fn update_account(&mut self, id: LeaseId, change: impl FnOnce(u64, u64) -> u64, out: &mut ApplyOutcome) {
        let Some(lease) = self.leases.get(&id) else { return };
        let (owner, share) = (lease.request.owner.clone(), self.inventory.gpu_share(&lease.promises));
        let owner = self.owners.get_or_open(&owner, self.now);
        let row = self.owners.set_held(owner, self.now, self.policies.period, |held| change(held, share));
        out.rows.push(PoolRow::Usage(row));
        // A reached quota removes the claims of the owner's waiters, and a quota with room lets them start. Fair share
        // changes the order.
        let quota = self.policies.quota_of(&self.owners.get(owner).name);
        self.needs_pass |= quota.held.is_some() || quota.share_hours.is_some();
        if self.policies.queue == QueueOrder::FairShare {
            let fairness = self.owners.fairness_of(owner, &self.policies);
            self.queue.set_fairness(owner, fairness);
            self.needs_pass = true;
        }
    }

    /// Ends or quarantines leases whose deadline has passed.
    pub(super) fn apply_deadlines(&mut self, out: &mut ApplyOutcome) {
        while let Some(&(at, id)) = self.deadlines.first().filter(|(at, _)| *at <= self.now) {
            let lease = self.lease_mut(id);
            let cause = match lease.state {
                LeaseState::Queued if lease.followed_at.after(limits::WAITER_PATIENCE) <= at => EndCause::Abandoned,
                LeaseState::Queued if lease.wait_end().is_some_and(|end| end <= at) => EndCause::WaitLimitPassed,
                LeaseState::Queued => {
                    self.raise_priority(id);
                    continue;
                }
                LeaseState::Offered => EndCause::OfferLapsed,
                LeaseState::Active if lease.revoke_at.is_some_and(|end| end <= at) => EndCause::Revoked,
                LeaseState::Active if lease.hard_end.is_some_and(|end| end <= at) => EndCause::MaxDurationPassed,
                LeaseState::Active => EndCause::TtlPassed,
                _ => {
                    self.quarantine_devices(id, out);
                    continue;
                }
            };
            self.end_lease(id, cause, out);
        }
        if self.quota_deadline.is_some_and(|at| at <= self.now) {
            self.quota_deadline = None;
            self.needs_pass = true;
        }
    }

    /// Moves a waiting request to the priority that it has gained by waiting.
    fn raise_priority(&mut self, id: LeaseId) {
        let lane_key = self.lane_key(id);
        let (now, seq) = (self.now, self.lease_mut(id).seq);
        let lease = &self.leases[&id];
        let before = lease.queue_priority.priority;
        let after = self.policies.queue_priority(&lease.request, lease.created_at, now);
        self.lease_mut(id).queue_priority = after;
        self.set_deadline(id);
        // A request that goes ahead of another one may start on devices that the other one could use.
        self.needs_pass |= self.queue.set_priority(lane_key, seq, before, after.priority);
    }

    pub(super) fn release_lease(&mut self, id: LeaseId, out: &mut ApplyOutcome) -> Result<CommandReply, CommandDenied> {
        if !self.known_lease(id)?.state.is_ended() {
            self.end_lease(id, EndCause::ByOwner, out);
        }
        Ok(CommandReply::Lease(id))
    }

    pub(super) fn fail_lease(
        &mut self,
        id: LeaseId,
        why: Arc<str>,
        out: &mut ApplyOutcome,
    ) -> Result<CommandReply, CommandDenied> {
        if !self.known_lease(id)?.state.is_ended() {
            self.end_lease(id, EndCause::Fault(why), out);
        }
        Ok(CommandReply::Lease(id))
    }

    pub(super) fn detach_holder(
        &mut self,
        id: LeaseId,
        grace: Millis,
        out: &mut ApplyOutcome,
    ) -> Result<CommandReply, CommandDenied> {
        let now = self.now;
        let lease = self.known_lease(id)?;
        if lease.state.is_ended() || lease.holder.is_none() {
            return Ok(CommandReply::Lease(id));
        }
        if grace.is_zero() {
            self.end_lease(id, EndCause::HolderGone, out);
        } else {
            lease.holder = None;
            lease.expires_at = Some(now.after(grace));
            self.set_deadline(id);
            self.push_lease_row(id, out);
        }
        Ok(CommandReply::Lease(id))
    }

    pub(super) fn revoke_lease(
        &mut self,
        id: LeaseId,
        grace: Millis,
        revocation: Option<Arc<Revocation>>,
        out: &mut ApplyOutcome,
    ) -> Result<CommandReply, CommandDenied> {
        let at = self.now.after(grace);
        let lease = self.known_lease(id)?;
        match lease.state {
            LeaseState::Active if !grace.is_zero() => {
                let at = lease.revoke_at.map_or(at, |before| before.min(at));
                if lease.revoke_at != Some(at) {
                    lease.revoke_at = Some(at);
                    lease.revocation = revocation;
                    // A certain end may let a short lease start before the requests that wait for this lease.
                    self.needs_pass = true;
                    out.effects.push(PoolEffect::Revoking { lease: id, at });
                    self.set_deadline(id);
                    self.push_lease_row(id, out);
                }
            }
            state if state.is_ended() => return Err(CommandDenied::Ended(id)),
            _ => {
                lease.revocation = revocation;
                self.end_lease(id, EndCause::Revoked, out);
            }
        }
        Ok(CommandReply::Lease(id))
    }

    /// Ends a lease; its devices start draining in the same step.
    pub(super) fn end_lease(&mut self, id: LeaseId, cause: EndCause, out: &mut ApplyOutcome) {
        let was = self.lease_mut(id).state;
        debug_assert!(!was.is_ended());
        if was == LeaseState::Queued {
            self.dequeue(id);
            self.needs_pass = true;
        } else {
            self.update_account(id, |held, share| held.saturating_sub(share), out);
        }
        if self.lease_mut(id).decision.as_ref().is_some_and(|decision| decision.strategy.looks_ahead()) {
            self.workload.record_end();
        }
        let now = self.now;
        let drains = was == LeaseState::Active && self.settings.drain != DrainMode::AtOnce;
        let lease = self.lease_mut(id);
        lease.state = cause.state();
        lease.cause = Some(cause.clone());
        lease.ended_at = Some(now);
        lease.expires_at = None;
        lease.holder = None;
        lease.draining = was.is_granted();
        out.effects.push(PoolEffect::Ended { lease: id, cause });
        if was.is_granted() {
            if drains {
                out.effects.push(PoolEffect::Draining { lease: id });
            } else {
                self.free_all_devices(id, out);
            }
        }
        self.set_deadline(id);
        self.push_lease_row(id, out);
        self.ended.push_back(id);
        self.forget_oldest_ended(out);
    }

    pub(super) fn finish_drain(&mut self, id: LeaseId, out: &mut ApplyOutcome) -> Result<CommandReply, CommandDenied> {
        if self.known_lease(id)?.draining {
            self.free_all_devices(id, out);
            self.set_deadline(id);
            self.push_lease_row(id, out);
            self.forget_oldest_ended(out);
        }
        Ok(CommandReply::Lease(id))
    }

    fn free_all_devices(&mut self, id: LeaseId, out: &mut ApplyOutcome) {
        let promises = self.lease_mut(id).promises.clone();
        for promise in promises.iter() {
            self.free_promise(id, promise, out);
        }
        self.free_lease(id, out);
    }

    /// Frees one device of a draining lease; the last one frees the lease.
    pub(super) fn free_device(&mut self, id: LeaseId, device: DeviceId, out: &mut ApplyOutcome) {
        let promises = self.lease_mut(id).promises.clone();
        let (gone, left): (Vec<DevicePromise>, Vec<DevicePromise>) =
            promises.iter().partition(|promise| promise.device == device);
        for promise in &gone {
            self.free_promise(id, promise, out);
        }
        if left.is_empty() {
            self.free_lease(id, out);
        } else {
            self.lease_mut(id).promises = left.into();
        }
        self.set_deadline(id);
        self.push_lease_row(id, out);
    }

    fn free_promise(&mut self, id: LeaseId, promise: &DevicePromise, out: &mut ApplyOutcome) {
        let now = self.now;
        let quarantined = self.lease_mut(id).quarantined;
        self.change_device(promise.device, out, |slot| {
            slot.promised -= promise.share;
            slot.promised_memory -= promise.memory;
            slot.leases.retain(|lease| *lease != id);
            slot.leases_changed_at = Some(now);
            slot.quarantines -= u16::from(quarantined);
        });
        self.needs_pass = true;
    }

    fn free_lease(&mut self, id: LeaseId, out: &mut ApplyOutcome) {
        let lease = self.lease_mut(id);
        lease.draining = false;
        lease.quarantined = false;
        lease.promises = Arc::from([]);
        let (cpus, memory) = (lease.request.cpus, lease.request.host_memory);
        if let Some(node) = lease.node {
            self.inventory.update_node(node, |slot| {
                slot.cpus_promised -= cpus;
                slot.memory_promised -= memory;
            });
        }
        self.needs_pass = true;
        out.effects.push(PoolEffect::Freed { lease: id });
    }

    fn quarantine_devices(&mut self, id: LeaseId, out: &mut ApplyOutcome) {
        let lease = self.lease_mut(id);
        lease.quarantined = true;
        let promises = lease.promises.clone();
        for promise in promises.iter() {
            self.change_device(promise.device, out, |slot| slot.quarantines += 1);
            out.effects.push(PoolEffect::Quarantined { device: promise.device, lease: id });
        }
        self.set_deadline(id);
        self.push_lease_row(id, out);
    }

    /// Removes the oldest ended leases beyond the limit, except those that still drain.
    fn forget_oldest_ended(&mut self, out: &mut ApplyOutcome) {
        let mut draining = 0;
        while self.ended.len() > limits::MAX_ENDED_LEASES + draining {
            let Some(id) = self.ended.pop_front() else { return };
            if self.lease_mut(id).draining {
                self.ended.push_back(id);
                draining += 1;
                continue;
            }
            if let Some(lease) = self.leases.remove(&id) {
                if let Some(key) = &lease.key {
                    self.keys.remove(&(lease.request.owner.clone(), key.clone()));
                }
                out.rows.push(PoolRow::Forget(id));
            }
        }
    }
}

/// Returns the next deadline of a lease in its current state.
pub(super) fn deadline_of(lease: &Lease, settings: PoolSettings) -> Option<PoolTime> {
    let earliest = |times: [Option<PoolTime>; 3]| times.into_iter().flatten().min();
    match lease.state {
        LeaseState::Queued => earliest([
            Some(lease.followed_at.after(limits::WAITER_PATIENCE)),
            lease.wait_end(),
            lease.queue_priority.rises_at,
        ]),
        LeaseState::Offered => {
            earliest([lease.granted_at.map(|at| at.after(limits::OFFER_LIFETIME)), lease.hard_end, None])
        }
        LeaseState::Active => earliest([lease.expires_at, lease.hard_end, lease.revoke_at]),
        _ => match settings.drain {
            DrainMode::WhenGone { patience } if lease.draining && !lease.quarantined => {
                lease.ended_at.map(|at| at.after(patience))
            }
            _ => None,
        },
    }
}

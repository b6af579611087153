//! Wishes: asking, following, confirming, renewing, attaching.

use std::sync::Arc;

use crate::classes::Shape;
use crate::ids::{LeaseId, Token};
use crate::lease::{Holder, Lease, LeaseState};
use crate::limits;
use crate::outcome::{Answer, Denied, Effect, Outcome, Unsatisfiable};
use crate::policy::QueueOrder;
use crate::request::Request;
use crate::row::{LeaseRow, Row};

use super::Pool;
use super::schedule::Wish;

impl Pool {
    pub(super) fn request(
        &mut self,
        request: Arc<Request>,
        key: Option<Arc<str>>,
        out: &mut Outcome,
    ) -> Result<Answer, Denied> {
        request.validate()?;
        if let Some(key) = &key {
            if key.is_empty() || key.len() > limits::NAME_BYTES {
                return Err(crate::request::FieldError::new("Idempotency-Key", key, "1..=253 bytes").into());
            }
            if let Some(&lease) = self.keys.get(&(request.owner.clone(), key.clone())) {
                return Ok(Answer::Lease(lease));
            }
        }
        let is_new = self.owners.find(&request.owner).is_none();
        let wish = self.judge(&request, out)?;
        let fair = self.owners.fair_key(wish.owner, &self.policies);
        let place = self.find_on_arrival(&wish, fair);
        let denied = match place {
            None if !request.queue => Some(Denied::NoCapacity),
            None if self.queue.len() >= limits::WAITERS => Some(Denied::QueueFull { limit: limits::WAITERS }),
            _ => None,
        };
        if let Some(denied) = denied {
            if is_new {
                self.owners.close_last(wish.owner);
            }
            return Err(denied);
        }

        let id = self.new_lease(request, key);
        match place {
            Some((place, turn)) => self.grant(id, &wish, place, turn, out),
            None => {
                let seq = self.lease_mut(id).seq;
                self.enqueue(id, &wish, seq);
                self.set_deadline(id);
                self.keep(id, out);
                out.effects.push(Effect::Queued { lease: id });
            }
        }
        Ok(Answer::Lease(id))
    }

    /// Under which policy and class a request comes, or why it never can be served.
    fn judge(&mut self, request: &Arc<Request>, out: &mut Outcome) -> Result<Wish, Denied> {
        self.inventory.refresh();
        let policy = self.policies.policy_for(request);
        if let Some(rule) = policy.broken_by(request) {
            return Err(Denied::Policy { policy: policy.name.clone(), rule });
        }
        let shape = Shape::of(request, policy);
        let looks_ahead = shape.strategy.looks_ahead();
        let priority = request.priority.saturating_add(policy.priority_boost);
        let max_duration = policy.held_at_most(request);
        let policy_name = policy.name.clone();
        let class = self.classes.intern(shape, &self.inventory);
        let judged = self.classes.get(class);
        if looks_ahead {
            let task = judged.task_class();
            self.workload.arrived(task, &mut |row| out.rows.push(Row::Workload(row)));
        }
        if let Some(never) = &judged.never {
            return Err(Denied::Unsatisfiable(never.clone()));
        }
        let quota = self.policies.quota_of(&request.owner).held;
        if let Some(quota) = quota.filter(|quota| judged.most_held > *quota) {
            return Err(Denied::Unsatisfiable(Unsatisfiable::OverQuota { wanted: judged.most_held, quota }));
        }
        let owner = self.owners.id(&request.owner, self.now);
        Ok(Wish { class, owner, priority, max_duration, policy: policy_name })
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

    pub(super) fn follow(&mut self, lease: LeaseId) -> Result<Answer, Denied> {
        let now = self.now;
        self.known_lease(lease)?.asked_at = now;
        self.set_deadline(lease);
        Ok(Answer::Lease(lease))
    }

    pub(super) fn confirm(&mut self, id: LeaseId, token: Token, out: &mut Outcome) -> Result<Answer, Denied> {
        let now = self.now;
        let lease = self.granted_with(id, token)?;
        if lease.state == LeaseState::Offered {
            lease.state = LeaseState::Active;
            lease.expires_at = Some(now.after(lease.request.ttl));
            let effect = lease.decision.clone().map(|decision| Effect::Granted { lease: id, token, decision });
            out.effects.extend(effect);
            self.set_deadline(id);
            self.keep(id, out);
        }
        Ok(Answer::Lease(id))
    }

    pub(super) fn renew(&mut self, id: LeaseId, token: Token) -> Result<Answer, Denied> {
        let now = self.now;
        let lease = self.granted_with(id, token)?;
        if lease.state == LeaseState::Offered {
            return Err(Denied::NotGranted(id));
        }
        if lease.expires_at.is_some() {
            lease.expires_at = Some(now.after(lease.request.ttl));
            self.set_deadline(id);
        }
        Ok(Answer::Lease(id))
    }

    pub(super) fn attach(
        &mut self,
        id: LeaseId,
        token: Token,
        holder: Holder,
        out: &mut Outcome,
    ) -> Result<Answer, Denied> {
        let lease = self.granted_with(id, token)?;
        if lease.state == LeaseState::Offered {
            return Err(Denied::NotGranted(id));
        }
        lease.holder = Some(holder);
        lease.expires_at = None;
        self.set_deadline(id);
        self.keep(id, out);
        Ok(Answer::Lease(id))
    }

    /// A granted lease, if that is its token.
    fn granted_with(&mut self, id: LeaseId, presented: Token) -> Result<&mut Lease, Denied> {
        let lease = self.known_lease(id)?;
        match lease.token {
            Some(token) if token != presented => Err(Denied::Stale { lease: id, presented }),
            _ if lease.state.is_ended() => Err(Denied::Ended(id)),
            None => Err(Denied::NotGranted(id)),
            Some(_) => Ok(lease),
        }
    }

    /// Takes the next token. It is kept with the counters before anybody sees it.
    pub(super) fn take_token(&mut self) -> Token {
        let token = Token(self.counters.next_token);
        self.counters.next_token += 1;
        token
    }

    /// Counts what an owner holds, more or less.
    pub(super) fn account(&mut self, id: LeaseId, change: impl FnOnce(u64, u64) -> u64, out: &mut Outcome) {
        let Some(lease) = self.leases.get(&id) else { return };
        let (owner, share) = (lease.request.owner.clone(), self.inventory.gpu_share(&lease.promises));
        let owner = self.owners.id(&owner, self.now);
        let row = self.owners.hold(owner, self.now, self.policies.period, |held| change(held, share));
        out.rows.push(Row::Usage(row));
        // A quota reached takes the claims of its owner's waiters away, a quota left lets them go; fair share changes the
        // order.
        let quota = self.policies.quota_of(&self.owners.get(owner).name);
        self.stirred |= quota.held.is_some() || quota.share_hours.is_some();
        if self.policies.queue == QueueOrder::FairShare {
            let fair = self.owners.fair_key(owner, &self.policies);
            self.queue.set_fair(owner, fair);
            self.stirred = true;
        }
    }
}

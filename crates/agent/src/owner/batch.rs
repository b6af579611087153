//! One batch: apply, commit, then tell.

use std::sync::Arc;

use gpupool_core::lease::EndCause;
use gpupool_core::request::FieldError;
use gpupool_core::{Answer, Command, Effect, LeaseId, Outcome, Request};
use gpupool_store::Clock;
use tokio::sync::oneshot;

use crate::clock;
use crate::identity::{Caller, Role};
use crate::sampler::Sample;

use super::message::{Asked, Fact, Message, Refusal, Reply};
use super::{OwnerThread, StoreState};

/// A wish that was applied, and is answered once it is known what became of it.
struct Applied {
    reply: Option<oneshot::Sender<Result<Reply, Refusal>>>,
    caller: Option<Caller>,
    /// Whether only this answer can lead whoever asked to what comes of it.
    only_way: bool,
    result: Result<Answer, Refusal>,
    /// Whether it asks for GPUs.
    is_request: bool,
    /// What gives back is tried once more by itself where the whole batch could not be kept.
    again: Option<Command>,
    /// What happened has happened, kept or not: it is told again until it is kept.
    fact: Option<Fact>,
}

impl OwnerThread {
    pub(super) fn process(&mut self, batch: Vec<Message>) {
        self.mend_store();
        self.process_at(clock::both(), batch);
    }

    pub(super) fn process_at(&mut self, at: Clock, batch: Vec<Message>) {
        self.at = at;
        let is_idle = batch.is_empty();
        let mut outcome = Outcome::default();
        let mut applied = Vec::with_capacity(batch.len());
        let (mut looks, mut works, mut calls, mut ends) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        self.catch_up(&mut outcome, &mut applied);
        for message in batch {
            match message {
                Message::Asked(asked) => applied.push(self.asked(asked, &mut outcome)),
                Message::Fact(fact) => applied.extend(self.fact(fact, &mut outcome)),
                Message::Sample(sample) => self.sampled(sample, &mut outcome),
                Message::Follow(call) => {
                    self.keep_followed(&call, &mut outcome);
                    calls.push(call);
                }
                Message::WaitForEnd(lease, waiter) => ends.push((lease, waiter)),
                Message::Look(look) => looks.push(look),
                Message::Work(work) => works.push(work),
                Message::Tie(lease, change) => self.tie_to(lease, change),
                Message::TieGranted(lease, change, reply) => {
                    let is_granted = self.pool.lease(lease).is_some_and(|known| known.state.is_granted());
                    if is_granted {
                        self.tie_to(lease, change);
                    }
                    // Whoever asked may have gone.
                    let _ = reply.send(is_granted);
                }
                Message::Gone(lease) => applied.extend(self.gone(lease, &mut outcome)),
                Message::Stop => {}
            }
        }
        self.free_unbound(&mut outcome);
        let outcome = self.commit_or_undo(outcome, &mut applied);
        self.publish(&outcome.effects);
        for applied in applied {
            self.answer(applied);
        }
        self.tell_followers(calls);
        for (lease, waiter) in ends {
            self.waiters.wait_for_end(lease, waiter, &self.pool);
        }
        for work in works {
            work(&mut *self.store);
        }
        for look in looks {
            look(self);
        }
        self.watcher.answered();
        self.hear_notes(is_idle);
    }

    /// What comes before anything that is asked: what the pool has yet to hear, and what the clock brought about.
    fn catch_up(&mut self, outcome: &mut Outcome, applied: &mut Vec<Applied>) {
        if self.is_broken() {
            return;
        }
        if std::mem::take(&mut self.sample_is_due)
            && let Some(sample) = self.sample.take()
        {
            self.take_sample(sample, outcome);
        }
        self.follow_awaited(outcome);
        self.apply(Command::Tick, outcome).ok();
        for lease in std::mem::take(&mut self.unwanted) {
            let release = Fact { command: Command::Release { lease }, held_by: None };
            applied.extend(self.fact(release, outcome));
        }
        for fact in std::mem::take(&mut self.postponed) {
            applied.extend(self.fact(fact, outcome));
        }
    }

    /// Takes a reading in, or keeps it for when the pool can hear of it.
    fn sampled(&mut self, sample: Box<Sample>, outcome: &mut Outcome) {
        if self.is_broken() {
            self.sample = Some(sample);
        } else {
            self.take_sample(sample, outcome);
        }
    }

    fn asked(&mut self, asked: Asked, outcome: &mut Outcome) -> Applied {
        let Asked { command, caller, reply } = asked;
        let again = gives_back(&command).then(|| command.clone());
        let is_request = matches!(command, Command::Request { .. });
        let only_way = matches!(command, Command::Request { key: None, .. });
        let result = self
            .allowed(&caller, &command)
            .and_then(|()| self.kept_now(&command))
            .and_then(|()| self.apply(command, outcome));
        Applied { reply: Some(reply), caller: Some(caller), only_way, result, is_request, again, fact: None }
    }

    /// What runs under a lease is known only while the lease is.
    fn tie_to(&mut self, lease: LeaseId, change: impl FnOnce(&mut super::Tie)) {
        if self.pool.lease(lease).is_some_and(|known| known.state.is_granted() || known.draining) {
            change(self.ties.change(lease));
        }
    }

    fn gone(&mut self, lease: LeaseId, outcome: &mut Outcome) -> Option<Applied> {
        self.ties.untie(lease);
        let drains = self.pool.lease(lease).is_some_and(|known| known.draining);
        let drained = Fact { command: Command::Drained { lease }, held_by: None };
        if drains && !self.ties.binds(lease, true) { self.fact(drained, outcome) } else { None }
    }

    fn fact(&mut self, fact: Fact, outcome: &mut Outcome) -> Option<Applied> {
        if !self.is_broken() && !self.is_meant(&fact) {
            return None;
        }
        let command = fact.command.clone();
        let result = self.kept_now(&command).and_then(|()| self.apply(command.clone(), outcome));
        Some(Applied {
            reply: None,
            caller: None,
            only_way: false,
            result,
            is_request: false,
            again: Some(command),
            fact: Some(fact),
        })
    }

    /// Whether who is gone is who holds the lease.
    fn is_meant(&self, fact: &Fact) -> bool {
        let Some((lease, gone)) = &fact.held_by else { return true };
        self.pool.lease(*lease).and_then(|known| known.holder.as_ref()) == Some(gone)
    }

    pub(super) fn apply(&mut self, command: Command, outcome: &mut Outcome) -> Result<Answer, Refusal> {
        self.pool.begin_batch(self.at.pool, outcome);
        let answer = self.pool.apply_in_batch(command, outcome);
        self.pool.finish_batch(outcome);
        answer.map_err(Refusal::Denied)
    }

    /// Whether the caller may say that.
    fn allowed(&self, caller: &Caller, command: &Command) -> Result<(), Refusal> {
        let forbidden = |why: String| Err(Refusal::Forbidden(why.into()));
        match command {
            Command::Request { request, key } => {
                if caller.role == Role::Reader {
                    return forbidden("taking GPUs from the network needs a token (gpupool token create)".into());
                }
                let before = key.as_ref().and_then(|key| self.pool.lease_of_key(&request.owner, key));
                if let (Some(key), Some(before)) = (key, before) {
                    return same_request(key, request, &before.request);
                }
                let limit = self.waiters_per_owner;
                if request.queue && self.waiters.of_owner(&request.owner) >= limit {
                    return Err(Refusal::TooManyWaiting { owner: request.owner.clone(), limit });
                }
                Ok(())
            }
            Command::Follow { lease }
            | Command::Confirm { lease, .. }
            | Command::Renew { lease, .. }
            | Command::Attach { lease, .. }
            | Command::HolderGone { lease, .. }
            | Command::Release { lease } => match self.pool.lease(*lease) {
                Some(known) if !caller.may_act_for(&known.request.owner) => {
                    forbidden(format!("lease {lease} belongs to {}, not to {}", known.request.owner, caller.owner))
                }
                // The pool says that there is none.
                _ => Ok(()),
            },
            _ if caller.role == Role::Admin => Ok(()),
            _ => forbidden(format!("{} is no administrator here", caller.owner)),
        }
    }

    /// Whether what comes of it could be kept, as far as is known.
    fn kept_now(&self, command: &Command) -> Result<(), Refusal> {
        match &self.store_state {
            StoreState::Fine => Ok(()),
            StoreState::Full(_) if gives_back(command) => Ok(()),
            StoreState::Full(why) => Err(Refusal::DiskFull(why.clone())),
            StoreState::Broken(why) => Err(Refusal::NotDurable(why.clone())),
        }
    }

    /// Frees at once what nothing is known to run on.
    pub(super) fn free_unbound(&mut self, outcome: &mut Outcome) {
        let mut looked_at = 0;
        while looked_at < outcome.effects.len() {
            let draining = outcome.effects[looked_at..].iter().position(|e| matches!(e, Effect::Draining { .. }));
            let Some(place) = draining.map(|place| place + looked_at) else { return };
            looked_at = place + 1;
            let Effect::Draining { lease } = outcome.effects[place] else { continue };
            let was_taken = self.pool.lease(lease).and_then(|known| known.cause.as_ref()).is_some_and(is_taken_back);
            if !self.ties.binds(lease, was_taken) {
                self.apply(Command::Drained { lease }, outcome).ok();
            }
        }
    }

    /// Keeps the batch; or undoes it, keeps what only gives back, and refuses the rest.
    fn commit_or_undo(&mut self, outcome: Outcome, applied: &mut [Applied]) -> Outcome {
        let Err(refusal) = self.keep(&outcome) else { return outcome };
        let mut outcome = Outcome::default();
        for applied in applied.iter_mut() {
            applied.result = match applied.again.take() {
                Some(command) if matches!(self.store_state, StoreState::Full(_)) => self.apply(command, &mut outcome),
                _ => Err(refusal.clone()),
            };
        }
        self.free_unbound(&mut outcome);
        if let Err(refusal) = self.keep(&outcome) {
            for applied in applied.iter_mut() {
                applied.result = Err(refusal.clone());
            }
            return Outcome::default();
        }
        outcome
    }

    fn answer(&mut self, applied: Applied) {
        if let (true, Err(refusal)) = (applied.is_request, &applied.result) {
            self.watcher.refused(refusal);
        }
        let Some(reply) = applied.reply else {
            if let Err(Refusal::NotDurable(_) | Refusal::DiskFull(_)) = applied.result {
                self.postponed.extend(applied.fact);
            }
            return;
        };
        let answer = applied.result.and_then(|answer| match answer {
            Answer::Lease(lease) => self.lease_reply(lease, applied.caller.as_ref()),
            Answer::Done | Answer::Node(..) => Ok(Reply::Done),
        });
        // Whoever asked may have gone, and then nobody wants what was granted or waits.
        if let Err(Ok(Reply::Lease(unheard))) = reply.send(answer)
            && applied.only_way
        {
            self.unwanted.push(LeaseId(unheard.id));
        }
    }

    fn lease_reply(&self, lease: LeaseId, caller: Option<&Caller>) -> Result<Reply, Refusal> {
        let body = self.pool.lease(lease).map(|known| super::lease_body(self, known, caller));
        let gone = || Refusal::Denied(gpupool_core::Denied::UnknownLease(lease));
        body.map(|body| Reply::Lease(Box::new(body))).ok_or_else(gone)
    }
}

/// A key makes a retried request the same request; for another one it is a mistake that must not go unnoticed.
fn same_request(key: &str, request: &Request, before: &Request) -> Result<(), Refusal> {
    // How it waits is not what it asks for: whoever gives up asks once more without waiting, to take it back.
    let Request { queue, hedged, wait_limit, .. } = *before;
    if *before == (Request { queue, hedged, wait_limit, ..request.clone() }) {
        return Ok(());
    }
    let allowed = "a key that no other request was made with";
    Err(Refusal::Denied(FieldError::new("Idempotency-Key", key, allowed).into()))
}

/// Whether a command only gives back: it may be kept with the last space there is.
fn gives_back(command: &Command) -> bool {
    matches!(
        command,
        Command::Release { .. }
            | Command::Drained { .. }
            | Command::HolderGone { .. }
            | Command::Fail { .. }
            | Command::Revoke { .. }
            | Command::Renew { .. }
            | Command::Follow { .. }
            | Command::Tick
    )
}

/// Whether the holder may not know that its lease is over.
pub(super) fn is_taken_back(cause: &EndCause) -> bool {
    matches!(cause, EndCause::Revoked | EndCause::MaxDurationPassed | EndCause::Fault(_))
}

/// Words that several refusals share.
pub(super) fn shared(words: impl ToString) -> Arc<str> {
    words.to_string().into()
}

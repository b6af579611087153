//! One batch of messages: apply, commit, publish, reply.

use std::sync::Arc;

use gpupool_core::{
    ApplyOutcome, CommandReply, EndCause, FieldError, LeaseHolder, LeaseId, Millis, PoolCommand, PoolEffect, Request,
    Revocation,
};
use gpupool_store::ClockReading;

use crate::identity::{Caller, Role};
use crate::limits::RELEASE_GRACE;
use crate::messages::{LeaseAttachment, NodeReport};

use super::handle::{
    AuthorityMessage, CallId, CallerCommand, FollowCall, PoolQuery, Refusal, Reply, ReplySender, StoreTask,
};
use super::{AuthorityThread, StoreState};

/// A command without a caller. It is applied again until it is committed.
#[derive(Clone, PartialEq)]
pub(super) struct UnattendedCommand {
    pub command: PoolCommand,
    /// The holder that must still hold the lease; otherwise the command is obsolete.
    pub held_by: Option<(LeaseId, LeaseHolder)>,
}

impl UnattendedCommand {
    fn new(command: PoolCommand) -> Self {
        Self { command, held_by: None }
    }
}

/// A command that was applied and gets its reply after the commit.
pub(super) struct AppliedCommand {
    result: Result<CommandReply, Refusal>,
    /// The command if it only frees resources: it is tried again on its own if the disk has no space for the batch.
    retry: Option<PoolCommand>,
    origin: CommandOrigin,
}

/// The sender of an applied command.
enum CommandOrigin {
    Caller { caller: Caller, reply: ReplySender, request: Option<RequestFollowUp> },
    Node { lease: LeaseId, caller: Caller, reply: ReplySender },
    Unattended(UnattendedCommand),
}

/// The part of a caller's request for GPUs that matters for its reply.
struct RequestFollowUp {
    /// Whether the caller can find the lease again by its idempotency key.
    has_key: bool,
    wait_until: Option<(CallId, gpupool_core::PoolTime)>,
}

/// Messages of a batch that are served after the commit.
#[derive(Default)]
struct DeferredMessages {
    follows: Vec<FollowCall>,
    hung_up: Vec<CallId>,
    ends: Vec<(LeaseId, tokio::sync::oneshot::Sender<()>)>,
    queries: Vec<PoolQuery>,
    store_tasks: Vec<StoreTask>,
    reply_to_open_calls: bool,
}

impl AuthorityThread {
    /// Applies the messages as one batch, commits it, publishes it, and replies.
    pub(super) fn process_batch(&mut self, at: ClockReading, messages: Vec<AuthorityMessage>) {
        self.at = at;
        let is_idle = messages.is_empty();
        let (mut outcome, mut applied, mut deferred) =
            (ApplyOutcome::default(), Vec::new(), DeferredMessages::default());
        self.begin_batch(&mut outcome, &mut applied);
        for message in messages {
            self.apply_message(message, &mut outcome, &mut applied, &mut deferred);
        }
        self.finish_batch(&mut outcome);
        let outcome = self.commit_or_undo(outcome, &mut applied);
        self.publish(&outcome);
        self.reply_to_callers(applied, deferred);
        self.flush_store(is_idle);
    }

    /// Applies what is due before the messages: expired deadlines, waiting calls, samples and commands of earlier batches.
    fn begin_batch(&mut self, outcome: &mut ApplyOutcome, applied: &mut Vec<AppliedCommand>) {
        if self.is_broken() {
            return;
        }
        self.pool.begin_batch(self.at.pool, outcome);
        if std::mem::take(&mut self.samples_are_due) {
            self.apply_latest_samples(outcome);
        }
        self.extend_followed_patience(outcome);
        for command in std::mem::take(&mut self.postponed) {
            applied.extend(self.apply_unattended(command, outcome));
        }
    }

    fn apply_message(
        &mut self,
        message: AuthorityMessage,
        outcome: &mut ApplyOutcome,
        applied: &mut Vec<AppliedCommand>,
        deferred: &mut DeferredMessages,
    ) {
        match message {
            AuthorityMessage::Command(command) => applied.push(self.apply_caller_command(command, outcome)),
            AuthorityMessage::Attach(attachment, caller, reply) => {
                let LeaseAttachment { lease, token, holder, has_process, has_cgroup } = attachment;
                let result = self.apply_allowed(&caller, PoolCommand::Attach { lease, token, holder }, outcome);
                if result.is_ok() {
                    // Recorded before the commit, because the lease may end in this batch. If the commit fails, the
                    // node gets a needless order.
                    self.occupancy.attach(lease, has_process, has_cgroup);
                }
                applied.push(AppliedCommand {
                    result,
                    retry: None,
                    origin: CommandOrigin::Node { lease, caller, reply },
                });
            }
            AuthorityMessage::Report(NodeReport::Sampled(sample)) => self.take_sample(sample, outcome),
            AuthorityMessage::Report(NodeReport::HolderGone { lease, holder }) => {
                let command = PoolCommand::HolderGone { lease, grace: Millis(0) };
                applied.extend(
                    self.apply_unattended(UnattendedCommand { command, held_by: Some((lease, holder)) }, outcome),
                );
            }
            AuthorityMessage::Report(NodeReport::Drained { lease }) => {
                self.occupancy.drained(lease);
                applied.extend(self.apply_unattended(UnattendedCommand::new(PoolCommand::Drained { lease }), outcome));
            }
            AuthorityMessage::Sampled => {
                for sample in self.cell.samples.take() {
                    self.take_sample(sample, outcome);
                }
            }
            AuthorityMessage::Follow(call) => {
                self.extend_patience(&call, outcome);
                deferred.follows.push(call);
            }
            AuthorityMessage::HungUp(call) => deferred.hung_up.push(call),
            AuthorityMessage::WaitForEnd(lease, waiter) => deferred.ends.push((lease, waiter)),
            AuthorityMessage::Query(query) => deferred.queries.push(query),
            AuthorityMessage::StoreTask(work) => deferred.store_tasks.push(work),
            AuthorityMessage::ReplyToCalls => deferred.reply_to_open_calls = true,
            AuthorityMessage::Stop => {}
        }
    }

    /// Frees the devices of ended leases without processes, and serves the queue once.
    fn finish_batch(&mut self, outcome: &mut ApplyOutcome) {
        if self.is_broken() {
            return;
        }
        let mut seen = 0;
        while seen < outcome.effects.len() {
            if let PoolEffect::Draining { lease } = outcome.effects[seen]
                && !self.occupancy.occupies(lease, self.was_taken_back(lease))
            {
                self.apply(PoolCommand::Drained { lease }, outcome).ok();
            }
            seen += 1;
        }
        self.pool.finish_batch(outcome);
    }

    pub(super) fn apply(&mut self, command: PoolCommand, outcome: &mut ApplyOutcome) -> Result<CommandReply, Refusal> {
        self.pool.apply_in_batch(command, outcome).map_err(Refusal::Denied)
    }

    fn apply_caller_command(&mut self, message: CallerCommand, outcome: &mut ApplyOutcome) -> AppliedCommand {
        let CallerCommand { command, caller, wait_until, reply } = message;
        let mut command = self.revocation_for_release(&caller, command);
        if let PoolCommand::Request { by_admin, .. } = &mut command {
            *by_admin = caller.role == Role::Admin;
        }
        let retry = only_gives_back(&command).then(|| command.clone());
        let request = match &command {
            PoolCommand::Request { key, .. } => Some(RequestFollowUp { has_key: key.is_some(), wait_until }),
            _ => None,
        };
        let result = self.apply_allowed(&caller, command, outcome);
        AppliedCommand { result, retry, origin: CommandOrigin::Caller { caller, reply, request } }
    }

    /// Turns an administrator's release of another owner's lease into a revocation, so that a job has time to end.
    fn revocation_for_release(&self, caller: &Caller, command: PoolCommand) -> PoolCommand {
        let PoolCommand::Release { lease } = command else { return command };
        let is_anothers = |known: &gpupool_core::Lease| {
            let request = &known.request;
            !known.state.is_ended()
                && request.owner != caller.owner
                && request.requested_by.as_ref() != Some(&caller.owner)
        };
        if caller.role != Role::Admin || !self.pool.lease(lease).is_some_and(is_anothers) {
            return command;
        }
        let revocation = Revocation { by: caller.owner.clone(), reason: None };
        PoolCommand::Revoke { lease, grace: RELEASE_GRACE, revocation: Some(Arc::new(revocation)) }
    }

    fn apply_allowed(
        &mut self,
        caller: &Caller,
        command: PoolCommand,
        outcome: &mut ApplyOutcome,
    ) -> Result<CommandReply, Refusal> {
        self.check_rights(caller, &command)?;
        self.check_store(&command)?;
        self.apply(command, outcome)
    }

    fn apply_unattended(
        &mut self,
        unattended: UnattendedCommand,
        outcome: &mut ApplyOutcome,
    ) -> Option<AppliedCommand> {
        if !self.is_broken() && self.is_obsolete(&unattended) {
            return None;
        }
        let command = unattended.command.clone();
        let result = self.check_store(&command).and_then(|()| self.apply(command.clone(), outcome));
        Some(AppliedCommand { result, retry: Some(command), origin: CommandOrigin::Unattended(unattended) })
    }

    /// Whether a command no longer has an effect, because the pool has changed since.
    fn is_obsolete(&self, unattended: &UnattendedCommand) -> bool {
        if let Some((lease, holder)) = &unattended.held_by {
            return self.pool.lease(*lease).and_then(|known| known.holder.as_ref()) != Some(holder);
        }
        match unattended.command {
            PoolCommand::Drained { lease } => {
                self.pool.lease(lease).is_none_or(|known| !known.draining) || self.occupancy.occupies(lease, true)
            }
            _ => false,
        }
    }

    /// Stores a command to be applied again, unless it is stored already.
    fn postpone(&mut self, command: UnattendedCommand) {
        if !self.postponed.contains(&command) {
            self.postponed.push(command);
        }
    }

    /// Checks whether the caller may send this command.
    fn check_rights(&self, caller: &Caller, command: &PoolCommand) -> Result<(), Refusal> {
        let forbidden = |why: String| Err(Refusal::Forbidden(why.into()));
        match command {
            PoolCommand::Request { request, key, .. } => {
                if matches!(caller.role, Role::Reader | Role::ReadOnly) {
                    return forbidden(
                        "leasing over the network needs a token; create one with gpupool token create".into(),
                    );
                }
                let before = key.as_ref().and_then(|key| self.pool.lease_by_key(&request.owner, key));
                if let (Some(key), Some(before)) = (key, before) {
                    return same_request(key, request, &before.request);
                }
                let limit = self.waiters_per_owner;
                if request.queue && self.waiters.of_owner(&request.owner) >= limit {
                    return Err(Refusal::TooManyWaiting { owner: request.owner.clone(), limit });
                }
                Ok(())
            }
            PoolCommand::Follow { lease }
            | PoolCommand::Confirm { lease, .. }
            | PoolCommand::Renew { lease, .. }
            | PoolCommand::Attach { lease, .. }
            | PoolCommand::HolderGone { lease, .. }
            | PoolCommand::Release { lease } => match self.pool.lease(*lease) {
                Some(known) if !caller.may_act_for(&known.request.owner) => {
                    forbidden(format!("lease {lease} belongs to {}, not to {}", known.request.owner, caller.owner))
                }
                // The pool reports an unknown lease itself.
                _ => Ok(()),
            },
            _ if caller.role == Role::Admin => Ok(()),
            _ => forbidden(format!("{} is not an administrator", caller.owner)),
        }
    }

    /// Checks whether the store could commit the result, as far as is known.
    fn check_store(&self, command: &PoolCommand) -> Result<(), Refusal> {
        match &self.store_state {
            StoreState::Fine => Ok(()),
            StoreState::Full(_) if only_gives_back(command) => Ok(()),
            StoreState::Full(why) => Err(Refusal::DiskFull(why.clone())),
            StoreState::Broken(why) => Err(Refusal::NotDurable(why.clone())),
        }
    }

    /// Commits the batch. If that fails, commits the commands that only free resources, and refuses the others.
    fn commit_or_undo(&mut self, outcome: ApplyOutcome, applied: &mut [AppliedCommand]) -> ApplyOutcome {
        let Err(refusal) = self.commit(&outcome) else { return outcome };
        let mut outcome = ApplyOutcome::default();
        let has_some_space = matches!(self.store_state, StoreState::Full(_));
        if has_some_space {
            self.pool.begin_batch(self.at.pool, &mut outcome);
        }
        for applied in applied.iter_mut() {
            applied.result = match applied.retry.take() {
                Some(command) if has_some_space => self.apply(command, &mut outcome),
                _ => Err(refusal.clone()),
            };
        }
        self.finish_batch(&mut outcome);
        if let Err(refusal) = self.commit(&outcome) {
            for applied in applied.iter_mut() {
                applied.result = Err(refusal.clone());
            }
            return ApplyOutcome::default();
        }
        outcome
    }

    fn reply_to_callers(&mut self, applied: Vec<AppliedCommand>, deferred: DeferredMessages) {
        for applied in applied {
            self.reply_to_command(applied);
        }
        if deferred.reply_to_open_calls {
            self.waiters.stop_waiting();
        }
        self.reply_to_followers(deferred.follows);
        for call in deferred.hung_up {
            self.waiters.hang_up(call);
        }
        for lease in self.waiters.take_abandoned() {
            self.postpone(UnattendedCommand::new(PoolCommand::Release { lease }));
        }
        for (lease, waiter) in deferred.ends {
            self.waiters.wait_for_end(lease, waiter, &self.pool);
        }
        if !deferred.store_tasks.is_empty() {
            let call = self.cell.enter_store();
            let replies: Vec<_> = deferred.store_tasks.into_iter().map(|task| task(&mut *self.store)).collect();
            drop(call);
            // A revoked token is invalid before the reply to its revocation.
            self.publish_tokens();
            replies.into_iter().for_each(|reply| reply());
        }
        for query in deferred.queries {
            query(self);
        }
        self.explained.clear();
        self.log_events();
    }

    fn reply_to_command(&mut self, applied: AppliedCommand) {
        let AppliedCommand { result, origin, .. } = applied;
        match origin {
            CommandOrigin::Unattended(command) => {
                if let Err(Refusal::NotDurable(_) | Refusal::DiskFull(_)) = result {
                    self.postpone(command);
                }
            }
            CommandOrigin::Node { lease, caller, reply } => {
                // The node waits for this reply, unless the agent is ending.
                let _ = reply.send(result.and_then(|_| self.lease_reply(lease, &caller)));
            }
            CommandOrigin::Caller { caller, reply, request } => self.reply_to_caller(result, caller, reply, request),
        }
    }

    fn reply_to_caller(
        &mut self,
        result: Result<CommandReply, Refusal>,
        caller: Caller,
        reply: ReplySender,
        request: Option<RequestFollowUp>,
    ) {
        if let (Some(_), Err(refusal)) = (&request, &result) {
            self.metrics.refused(refusal.outcome_name());
        }
        let has_key = request.as_ref().is_none_or(|request| request.has_key);
        let wait_until = request.and_then(|request| request.wait_until);
        if let (Ok(CommandReply::Lease(lease)), Some((id, until))) = (&result, wait_until)
            && self.waiters.is_queued(*lease)
        {
            let leases = [*lease].into();
            let call =
                FollowCall { id, caller, leases, until, is_single: true, is_poll: true, releases: !has_key, reply };
            return self.reply_or_wait(call);
        }
        let result = result.and_then(|outcome| match outcome {
            CommandReply::Lease(lease) => self.lease_reply(lease, &caller),
            CommandReply::Done | CommandReply::Node(..) => Ok(Reply::Done),
        });
        // The caller may have hung up. Without a key it cannot find its lease again.
        if let Err(Ok(Reply::Lease(lease))) = reply.send(result)
            && !has_key
        {
            self.postpone(UnattendedCommand::new(PoolCommand::Release { lease: LeaseId(lease.id) }));
        }
    }

    /// Whether an ended lease was taken from its holder, which may not have noticed yet.
    pub(super) fn was_taken_back(&self, lease: LeaseId) -> bool {
        let cause = self.pool.lease(lease).and_then(|known| known.cause.as_ref());
        matches!(cause, Some(EndCause::Revoked | EndCause::MaxDurationPassed | EndCause::Fault(_)))
    }
}

/// Checks that a repeated idempotency key repeats the same request. A different request would be lost unnoticed.
fn same_request(key: &str, request: &Request, before: &Request) -> Result<(), Refusal> {
    // A client that gives up repeats its request without waiting, in order to withdraw it.
    let Request { queue, hedged, wait_limit, .. } = *before;
    if *before == (Request { queue, hedged, wait_limit, ..request.clone() }) {
        return Ok(());
    }
    let allowed = "a key that no other request was made with";
    Err(Refusal::Denied(FieldError::new("Idempotency-Key", key, allowed).into()))
}

/// Whether a command only frees resources. Such a command may use the last space on the disk for its commit.
fn only_gives_back(command: &PoolCommand) -> bool {
    matches!(
        command,
        PoolCommand::Release { .. }
            | PoolCommand::Drained { .. }
            | PoolCommand::HolderGone { .. }
            | PoolCommand::Fail { .. }
            | PoolCommand::Revoke { .. }
            | PoolCommand::Renew { .. }
            | PoolCommand::Follow { .. }
            | PoolCommand::Tick
    )
}

/// Returns the text of an error, to be shared by several refusals.
pub(super) fn shared_words(error: impl ToString) -> Arc<str> {
    error.to_string().into()
}

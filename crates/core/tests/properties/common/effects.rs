//! Effects that a command must and may have; every other effect is rejected.

use std::collections::{BTreeMap, BTreeSet};

use gpupool_core::{
    ApplyOutcome, CommandDenied, CommandReply, CordonState, DeviceClosure, DeviceHealth, DeviceId, DrainMode, EndCause,
    GpuId, LeaseId, LeaseState, Millis, NodeId, PolicyViolation, PoolCommand, PoolEffect, PoolRow, PoolTime, Token,
    Unsatisfiable,
};

use super::model::{ModelDevice, ModelLease, ModelNode, PoolModel, ensure};

/// Effects that a command must have. It may also grant leases.
#[derive(Debug, Default)]
struct ExpectedEffects {
    ends: BTreeMap<LeaseId, Vec<EndCause>>,
    revoking: BTreeMap<LeaseId, PoolTime>,
    draining: BTreeSet<LeaseId>,
    freed: BTreeSet<LeaseId>,
    quarantined: BTreeSet<(LeaseId, DeviceId)>,
    confirmed: Option<LeaseId>,
    new: Option<LeaseId>,
}

impl PoolModel {
    /// Applies a command with its outcome, or returns the rule that it breaks. Deadlines before the command must have
    /// been applied by a tick at the same time.
    pub fn check_command(
        &mut self,
        command: &PoolCommand,
        reply: &Result<CommandReply, CommandDenied>,
        outcome: &ApplyOutcome,
    ) -> Result<(), String> {
        let mut due = ExpectedEffects::default();
        let expected = self.apply_command(command, reply, &mut due)?;
        ensure!(expected.as_ref().is_none_or(|e| e == reply), "the reply must be {expected:?}, not {reply:?}");
        self.check_effects(outcome, due)
    }

    /// Checks the outcome of serving the queue: grants and nothing else.
    pub fn check_service(&mut self, outcome: &ApplyOutcome) -> Result<(), String> {
        self.check_effects(outcome, ExpectedEffects::default())
    }

    fn check_effects(&mut self, outcome: &ApplyOutcome, mut due: ExpectedEffects) -> Result<(), String> {
        for effect in &outcome.effects {
            self.check_effect(effect, outcome, &mut due)?;
        }
        let ExpectedEffects { ends, revoking, draining, freed, quarantined, confirmed, new } = &due;
        ensure!(ends.is_empty(), "rule 5: these did not end: {ends:?}");
        let left = draining.is_empty() && freed.is_empty() && quarantined.is_empty() && revoking.is_empty();
        ensure!(left && confirmed.is_none() && new.is_none(), "rule 5: this did not happen: {due:?}");
        Ok(())
    }

    /// Applies the direct changes of a command, and returns the required reply if there is only one.
    fn apply_command(
        &mut self,
        command: &PoolCommand,
        reply: &Result<CommandReply, CommandDenied>,
        due: &mut ExpectedEffects,
    ) -> Result<Option<Result<CommandReply, CommandDenied>>, String> {
        let done = Some(Ok(CommandReply::Done));
        if let Some(unknown) = self.unknown(command) {
            return Ok(Some(Err(unknown)));
        }
        Ok(match command {
            PoolCommand::Tick => {
                self.apply_tick(due);
                done
            }
            PoolCommand::NodeSeen { facts, devices, .. } => {
                let Ok(CommandReply::Node(node, ids)) = reply else { return Err(format!("a node is not {reply:?}")) };
                let entry = self.nodes.entry(*node).or_insert_with(|| ModelNode {
                    facts: facts.clone(),
                    up: true,
                    links: Vec::new(),
                });
                entry.facts = facts.clone();
                entry.up = true;
                for (id, facts) in ids.iter().zip(devices) {
                    let highest = self.devices_of(*node).map(|(_, device)| device.gpu_id.0 + 1).max();
                    let gpu_id = GpuId(highest.unwrap_or(0));
                    let next = self.next_device();
                    ensure!(self.devices.contains_key(id) || *id == next, "device {id} is new and should be {next}");
                    let device = self.devices.entry(*id).or_insert_with(|| new_device(*node, gpu_id, facts));
                    ensure!(device.facts.identity == facts.identity, "device {id} is another one");
                    device.facts = facts.clone();
                    device.seen = true;
                }
                None
            }
            PoolCommand::DeviceSeen { node, facts, health, number } => {
                let Ok(CommandReply::Node(_, ids)) = reply else { return Err(format!("a device is not {reply:?}")) };
                let [id] = ids[..] else { return Err(format!("one device is not {ids:?}")) };
                let device = self.devices.entry(id).or_insert_with(|| new_device(*node, *number, facts));
                ensure!(device.facts.identity == facts.identity, "device {id} is another one");
                (device.facts, device.seen, device.health) = ((**facts).clone(), true, health.clone());
                None
            }
            PoolCommand::NodeLost { node } => {
                if let Some(node) = self.nodes.get_mut(node) {
                    node.up = false;
                }
                done
            }
            PoolCommand::ForgetDevice { device } => {
                let may = self.can_forget_device(*device);
                ensure!(may == reply.is_ok(), "device {device} may be forgotten: {may}; the reply is {reply:?}");
                if may {
                    self.forget_device(*device);
                }
                done.filter(|_| may)
            }
            PoolCommand::ForgetNode { node } => {
                let may = self.can_forget_node(*node);
                ensure!(may == reply.is_ok(), "node {node} may be forgotten: {may}; the reply is {reply:?}");
                if may {
                    let devices: Vec<DeviceId> = self.devices_of(*node).map(|(id, _)| id).collect();
                    devices.into_iter().for_each(|device| self.forget_device(device));
                    self.nodes.remove(node);
                }
                done.filter(|_| may)
            }
            PoolCommand::Links { node, links } => {
                self.nodes.get_mut(node).expect("known").links = links.clone();
                done
            }
            PoolCommand::Observe { device, reading } => {
                for lease in self.observe(*device, reading) {
                    if self.leases[&lease].promises.is_empty() {
                        due.freed.insert(lease);
                    }
                }
                done
            }
            PoolCommand::SetHealth { device, health } => {
                self.devices.get_mut(device).expect("known").health = health.clone();
                done
            }
            PoolCommand::Cordon { device, cordon } => {
                self.devices.get_mut(device).expect("known").cordon = *cordon;
                done
            }
            PoolCommand::Drain { device, grace } => {
                self.devices.get_mut(device).expect("known").cordon = CordonState::Cordoned;
                for lease in self.leases_on(*device).map(|(entry, _)| entry.id).collect::<Vec<_>>() {
                    self.apply_revocation(lease, *grace, due);
                }
                done
            }
            PoolCommand::SetPolicies { policies } => {
                self.policies = (**policies).clone();
                done
            }
            PoolCommand::SetWorkload { classes } => {
                self.configured_workload = !classes.is_empty();
                done
            }
            PoolCommand::Request { request, key, by_admin } => {
                let known = key.as_ref().and_then(|key| self.keys.get(&(request.owner.clone(), key.clone())));
                if let Some(lease) = known {
                    return Ok(Some(Ok(CommandReply::Lease(*lease))));
                }
                let most = self.policies.policy_for(request).max_priority;
                let is_priority_denied = request.priority > most && !by_admin;
                match reply {
                    Ok(CommandReply::Lease(id)) => {
                        ensure!(!is_priority_denied, "{request:?} is above the highest priority {most}");
                        ensure!(self.leases.last_key_value().is_none_or(|(last, _)| last < id), "{id} is used again");
                        self.leases.insert(*id, ModelLease::new(*id, request.clone(), self.now));
                        self.keys.extend(key.clone().map(|key| ((request.owner.clone(), key), *id)));
                        due.new = Some(*id);
                        ensure!(
                            !self.eligible_nodes(request).is_empty(),
                            "{request:?} can never be had, and is not refused"
                        );
                    }
                    Ok(reply) => return Err(format!("a request is not answered by {reply:?}")),
                    Err(CommandDenied::Policy {
                        rule: PolicyViolation::MaxPriority { asked, most: named }, ..
                    }) => {
                        let is_right = is_priority_denied && (*asked, *named) == (request.priority, most);
                        ensure!(is_right, "{request:?} is refused for its priority; {most} is allowed");
                    }
                    Err(denied) => self.check_denial(request, denied)?,
                }
                None
            }
            PoolCommand::Follow { lease }
            | PoolCommand::Confirm { lease, .. }
            | PoolCommand::Renew { lease, .. }
            | PoolCommand::Attach { lease, .. }
            | PoolCommand::HolderGone { lease, .. }
            | PoolCommand::Release { lease }
            | PoolCommand::Drained { lease }
            | PoolCommand::Fail { lease, .. }
            | PoolCommand::Revoke { lease, .. } => Some(match self.leases.contains_key(lease) {
                true => self.apply_lease_command(*lease, command, due),
                false => Err(CommandDenied::UnknownLease(*lease)),
            }),
        })
    }

    /// Returns the denial of a command about an unknown device or node.
    fn unknown(&self, command: &PoolCommand) -> Option<CommandDenied> {
        match command {
            PoolCommand::Observe { device, .. }
            | PoolCommand::SetHealth { device, .. }
            | PoolCommand::Cordon { device, .. }
            | PoolCommand::Drain { device, .. }
            | PoolCommand::ForgetDevice { device }
                if !self.devices.contains_key(device) =>
            {
                Some(CommandDenied::UnknownDevice(*device))
            }
            PoolCommand::NodeLost { node }
            | PoolCommand::DeviceSeen { node, .. }
            | PoolCommand::Links { node, .. }
            | PoolCommand::ForgetNode { node }
                if !self.nodes.contains_key(node) =>
            {
                Some(CommandDenied::UnknownNode(*node))
            }
            _ => None,
        }
    }

    fn forget_device(&mut self, id: DeviceId) {
        let Some(device) = self.devices.remove(&id) else { return };
        let links = self.nodes.get_mut(&device.node).map(|node| &mut node.links);
        links.into_iter().for_each(|links| links.retain(|link| ![link.a, link.b].contains(&device.gpu_id)));
    }

    fn apply_tick(&mut self, due: &mut ExpectedEffects) {
        for entry in self.leases.values() {
            let ends: Vec<_> = entry.ends().into_iter().filter(|(at, _)| *at <= self.now).collect();
            if let Some(first) = ends.iter().map(|(at, _)| *at).min() {
                let causes = ends.into_iter().filter(|(at, _)| *at == first).map(|(_, cause)| cause);
                due.ends.insert(entry.id, causes.collect());
            }
            if entry.quarantine_at(self.settings).is_some_and(|at| at <= self.now) {
                due.quarantined.extend(entry.promises.iter().map(|promise| (entry.id, promise.device)));
            }
        }
        for entry in self.leases.values_mut() {
            entry.quarantined |= entry.quarantine_at(self.settings).is_some_and(|at| at <= self.now);
        }
    }

    /// Applies a command about a known lease.
    fn apply_lease_command(
        &mut self,
        id: LeaseId,
        command: &PoolCommand,
        due: &mut ExpectedEffects,
    ) -> Result<CommandReply, CommandDenied> {
        let now = self.now;
        let entry = self.leases.get_mut(&id).expect("known");
        let ended = entry.state.is_ended();
        let holds = |token: Token| match entry.token {
            Some(own) if own != token => Err(CommandDenied::Stale { lease: id, presented: token }),
            _ if ended => Err(CommandDenied::Ended(id)),
            None => Err(CommandDenied::NotGranted(id)),
            Some(_) => Ok(()),
        };
        match command {
            PoolCommand::Follow { .. } => entry.followed_at = now,
            PoolCommand::Confirm { token, .. } => {
                holds(*token)?;
                due.confirmed = (entry.state == LeaseState::Offered).then_some(id);
            }
            PoolCommand::Renew { token, .. } | PoolCommand::Attach { token, .. } => {
                holds(*token)?;
                if entry.state == LeaseState::Offered {
                    return Err(CommandDenied::NotGranted(id));
                }
                if matches!(command, PoolCommand::Attach { .. }) {
                    entry.has_holder = true;
                    entry.expires_at = None;
                } else if entry.expires_at.is_some() {
                    entry.expires_at = Some(now.after(entry.request.ttl));
                }
            }
            PoolCommand::HolderGone { grace, .. } if entry.has_holder && grace.0 == 0 => {
                due.ends.insert(id, vec![EndCause::HolderGone]);
            }
            PoolCommand::HolderGone { grace, .. } if entry.has_holder => {
                entry.has_holder = false;
                entry.expires_at = Some(now.after(*grace));
            }
            PoolCommand::Release { .. } if !ended => drop(due.ends.insert(id, vec![EndCause::ByOwner])),
            PoolCommand::Fail { why, .. } if !ended => drop(due.ends.insert(id, vec![EndCause::Fault(why.clone())])),
            PoolCommand::Drained { .. } if entry.draining => drop(due.freed.insert(id)),
            PoolCommand::Revoke { .. } if ended => return Err(CommandDenied::Ended(id)),
            PoolCommand::Revoke { grace, .. } => self.apply_revocation(id, *grace, due),
            _ => {}
        }
        Ok(CommandReply::Lease(id))
    }

    fn apply_revocation(&mut self, id: LeaseId, grace: Millis, due: &mut ExpectedEffects) {
        let at = self.now.after(grace);
        let entry = self.leases.get_mut(&id).expect("known");
        if entry.state == LeaseState::Active && grace.0 > 0 {
            if entry.revoke_at.is_none_or(|before| at < before) {
                entry.revoke_at = Some(at);
                due.revoking.insert(id, at);
            }
        } else if !entry.state.is_ended() {
            due.ends.insert(id, vec![EndCause::Revoked]);
        }
    }

    fn check_denial(&self, request: &gpupool_core::Request, denied: &CommandDenied) -> Result<(), String> {
        let quota = self.policies.quota_of(&request.owner).held;
        let over = quota.is_some_and(|quota| self.most_held(request) > u64::from(quota.0));
        match denied {
            CommandDenied::NoCapacity => {
                ensure!(!request.queue, "a request that would wait is sent away: {request:?}");
                self.check_no_place(LeaseId(u64::MAX), request)?;
            }
            CommandDenied::Unsatisfiable(Unsatisfiable::OverQuota { .. }) => {
                ensure!(over, "{request:?} is refused for a quota it keeps")
            }
            CommandDenied::Unsatisfiable(why) => {
                ensure!(self.eligible_nodes(request).is_empty(), "{request:?} is refused ({why}), but it could be had")
            }
            CommandDenied::Policy { rule, .. } => {
                let rules = self.policies.policy_for(request);
                let refuses = rules.min_share.is_some() || rules.gpu_required || rules.max_duration.is_some();
                ensure!(refuses, "no policy refuses {request:?} ({rule:?})")
            }
            other => return Err(format!("{request:?} is denied by {other:?}")),
        }
        Ok(())
    }

    fn check_effect(
        &mut self,
        effect: &PoolEffect,
        outcome: &ApplyOutcome,
        due: &mut ExpectedEffects,
    ) -> Result<(), String> {
        let now = self.now;
        match effect {
            PoolEffect::Queued { lease } => {
                ensure!(due.new.take() == Some(*lease), "lease {lease} was not requested by this command");
                self.check_no_place(*lease, &self.leases[lease].request)?;
            }
            PoolEffect::Granted { lease, token, .. } if due.confirmed == Some(*lease) => {
                let entry = self.leases.get_mut(lease).expect("known");
                ensure!(entry.token == Some(*token), "rule 3: lease {lease} is confirmed with another token");
                entry.state = LeaseState::Active;
                entry.expires_at = Some(now.after(entry.request.ttl));
                due.confirmed = None;
            }
            PoolEffect::Granted { lease, token, .. } | PoolEffect::Offered { lease, token, .. } => {
                let offered = match effect {
                    PoolEffect::Offered { until, .. } => Some(*until),
                    _ => None,
                };
                due.new.take_if(|new| new == lease);
                let row = outcome.rows.iter().find_map(|row| match row {
                    PoolRow::Lease(row) if row.id == *lease && row.token == Some(*token) => Some(row),
                    _ => None,
                });
                let row = row.ok_or(format!("rule 2: the grant of lease {lease} is not in the rows"))?;
                let node = row.node.ok_or(format!("lease {lease} is granted nowhere"))?;
                self.check_grant(*lease, *token, node, &row.promises, offered)?;
            }
            PoolEffect::Revoking { lease, at } => {
                ensure!(due.revoking.remove(lease) == Some(*at), "lease {lease} is not to be revoked at {at:?}");
            }
            PoolEffect::Ended { lease, cause } => {
                let expected = due.ends.remove(lease).unwrap_or_default();
                ensure!(expected.contains(cause), "rule 5: lease {lease} ends for {cause:?}, not for {expected:?}");
                let entry = self.leases.get_mut(lease).expect("known");
                let was = entry.state;
                entry.state = cause.state();
                entry.ended_at = Some(now);
                entry.expires_at = None;
                entry.has_holder = false;
                entry.draining = was.is_granted();
                match was {
                    LeaseState::Active if self.settings.drain != DrainMode::AtOnce => drop(due.draining.insert(*lease)),
                    LeaseState::Active | LeaseState::Offered => drop(due.freed.insert(*lease)),
                    _ => {}
                }
            }
            PoolEffect::Draining { lease } => {
                ensure!(due.draining.remove(lease), "lease {lease} does not drain just now");
            }
            PoolEffect::Freed { lease } => {
                ensure!(due.freed.remove(lease), "rule 5: lease {lease} is freed too early");
                let entry = self.leases.get_mut(lease).expect("known");
                entry.draining = false;
                entry.quarantined = false;
                for promise in entry.promises.clone() {
                    self.free_device_of(*lease, promise.device);
                }
            }
            PoolEffect::Quarantined { device, lease } => {
                let expected = due.quarantined.remove(&(*lease, *device));
                ensure!(expected, "device {device} is quarantined for lease {lease} too early");
            }
            PoolEffect::DeviceOpen { device, closed } => {
                let known = self.devices.get_mut(device).expect("known");
                ensure!(known.reported != *closed, "device {device} is configured to be {closed:?} twice");
                known.reported = *closed;
            }
        }
        Ok(())
    }
}

fn new_device(node: NodeId, gpu_id: GpuId, facts: &gpupool_core::DeviceFacts) -> ModelDevice {
    ModelDevice {
        node,
        gpu_id,
        facts: facts.clone(),
        seen: false,
        health: DeviceHealth::Healthy,
        cordon: CordonState::Open,
        hot: false,
        reading: None,
        foreign: None,
        leases_changed_at: None,
        reported: Some(DeviceClosure::NotSeen),
    }
}

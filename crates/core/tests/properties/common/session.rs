//! A pool, its model and its store: every step goes to all three, followed by all checks.

use gpupool_core::{
    ApplyOutcome, Bytes, CommandDenied, CommandReply, DeviceId, DeviceReading, LeaseHolder, LeaseId, LeaseState,
    MilliCpus, Millis, NodeId, Percent, Pool, PoolCommand, PoolEffect, PoolRow, PoolTime, ProcessAttribution,
    ProcessUsage, QueueOrder, ReadingField, Share, TaskClass, Token,
};
use proptest::sample::Index;
use proptest::test_runner::TestCaseError;

use super::model::{ModelLease, PoolModel, ensure};
use super::store::ModelStore;
use super::world::{
    self, LeasePick, NodeChange, NodeSpec, ProcessListing, RandomWorld, ReadingSpec, StepDelay, TokenChoice,
    WorldAction, WorldStep,
};

pub struct PoolSession {
    pub pool: Pool,
    pub model: PoolModel,
    pub store: ModelStore,
    pub nodes: Vec<NodeSpec>,
    /// Clock of the caller; the pool's own never goes back.
    pub clock: PoolTime,
    /// All commands, for a replay.
    pub log: Vec<LoggedCommand>,
    /// Repeating sizes of batches; empty if each command comes alone, after a tick.
    batches: Vec<usize>,
    batches_begun: usize,
    /// Number of commands missing in the open batch.
    missing_in_batch: usize,
    /// Whether a returning node lists its devices: a restored pool has not seen them, but the original has.
    pub lists_devices_on_return: bool,
    initial_policies: usize,
}

/// One command and its outcome.
#[derive(Debug)]
pub struct LoggedCommand {
    pub now: PoolTime,
    pub command: PoolCommand,
    pub reply: Result<CommandReply, CommandDenied>,
    pub outcome: ApplyOutcome,
}

impl PoolSession {
    pub fn start(world: &RandomWorld) -> Result<Self, String> {
        let rules = world::policies(world.policies);
        let mut session = Self {
            pool: Pool::new(world.settings, rules.clone()),
            model: PoolModel::new(world.settings, rules),
            store: ModelStore::default(),
            nodes: world.nodes.clone(),
            clock: PoolTime(1_000),
            log: Vec::new(),
            batches: Vec::new(),
            batches_begun: 0,
            missing_in_batch: 0,
            lists_devices_on_return: false,
            initial_policies: world.policies,
        };
        for number in 0..session.nodes.len() {
            session.send(session.node_seen(number))?;
        }
        Ok(session)
    }

    /// Same as [`PoolSession::run`], with the commands in batches of these sizes.
    pub fn run_in_batches(world: &RandomWorld, sizes: Vec<usize>) -> Result<Self, String> {
        let mut session = Self::start(world)?;
        session.batches = sizes;
        for (number, step) in world.steps.iter().enumerate() {
            session.step(step).map_err(|broken| format!("step {number}, {step:?}: {broken}"))?;
        }
        session.finish_batch()?;
        session.check()?;
        Ok(session)
    }

    /// Takes all steps of a world, or returns the first broken rule.
    pub fn run(world: &RandomWorld) -> Result<Self, String> {
        let mut session = Self::start(world)?;
        for (number, step) in world.steps.iter().enumerate() {
            session.step(step).map_err(|broken| format!("step {number}, {step:?}: {broken}"))?;
        }
        Ok(session)
    }

    pub fn step(&mut self, step: &WorldStep) -> Result<(), String> {
        self.clock = self.after(step.wait);
        if matches!(step.act, WorldAction::Restart) {
            return self.restart();
        }
        for command in self.commands(&step.act) {
            self.send(command)?;
        }
        Ok(())
    }

    fn after(&self, wait: StepDelay) -> PoolTime {
        let deadline = || self.pool.next_deadline().filter(|at| *at < self.model.now.after(Millis::from_secs(200)));
        match wait {
            StepDelay::None => self.clock,
            StepDelay::Millis(millis) => self.clock.after(Millis(millis)),
            StepDelay::ToDeadline => deadline().map_or(self.clock, |at| at.max(self.clock)),
            StepDelay::JustBefore => deadline().map_or(self.clock, |at| PoolTime(at.0 - 1).max(self.clock)),
            StepDelay::Back(millis) => PoolTime(self.clock.0.saturating_sub(millis)),
        }
    }

    /// Applies a command after a tick for all deadlines before it, or within a batch.
    pub fn send(&mut self, command: PoolCommand) -> Result<(), String> {
        if !self.batches.is_empty() {
            return self.send_in_batch(command);
        }
        let now = self.clock.max(self.model.now);
        let quiet = self.pool.next_deadline().is_none_or(|at| at > now);
        self.apply(PoolCommand::Tick)?;
        let last = self.log.last().expect("just logged");
        ensure!(!quiet || last.outcome.effects.is_empty(), "nothing was due, and this happened: {last:?}");
        let overdue = self.pool.next_deadline().filter(|at| *at <= now);
        ensure!(overdue.is_none(), "rule 5: {overdue:?} is over and nothing happened");
        self.apply(command)
    }

    fn apply(&mut self, command: PoolCommand) -> Result<(), String> {
        let (reply, outcome) = self.pool.apply(self.clock, command.clone());
        self.model.now = self.model.now.max(self.clock);
        self.store.commit(&outcome.rows);
        let followed = self.model.check_command(&command, &reply, &outcome);
        self.log.push(LoggedCommand { now: self.clock, command, reply, outcome });
        let checked = followed.and_then(|()| self.check());
        checked.map_err(|broken| format!("{broken}\nafter {:?}", self.log.last()))
    }

    fn send_in_batch(&mut self, command: PoolCommand) -> Result<(), String> {
        if self.missing_in_batch == 0 {
            self.missing_in_batch = self.batches[self.batches_begun % self.batches.len()];
            self.batches_begun += 1;
            let mut outcome = ApplyOutcome::default();
            self.pool.begin_batch(self.clock, &mut outcome);
            self.model.now = self.model.now.max(self.clock);
            self.store.commit(&outcome.rows);
            let followed = self.model.check_command(&PoolCommand::Tick, &Ok(CommandReply::Done), &outcome);
            followed.and_then(|()| self.check_books()).map_err(|broken| format!("{broken}\nas a batch began"))?;
        }
        let mut outcome = ApplyOutcome::default();
        let reply = self.pool.apply_in_batch(command.clone(), &mut outcome);
        self.store.commit(&outcome.rows);
        let followed = self.model.check_command(&command, &reply, &outcome);
        let checked = followed.and_then(|()| self.check_books());
        checked.map_err(|broken| format!("{broken}\nafter {command:?}, {reply:?}, {outcome:?} in a batch"))?;
        self.missing_in_batch -= 1;
        if self.missing_in_batch == 0 { self.finish_batch() } else { Ok(()) }
    }

    /// Finishes the batch, full or not.
    fn finish_batch(&mut self) -> Result<(), String> {
        self.missing_in_batch = 0;
        let mut outcome = ApplyOutcome::default();
        self.pool.finish_batch(&mut outcome);
        self.store.commit(&outcome.rows);
        let followed = self.model.check_service(&outcome).and_then(|()| self.check());
        followed.map_err(|broken| format!("{broken}\nas a batch finished: {outcome:?}"))
    }

    fn check_books(&self) -> Result<(), String> {
        self.pool.check_invariants()?;
        self.model.agrees_with(&self.pool)
    }

    fn check(&self) -> Result<(), String> {
        self.check_books()?;
        self.store.check_against(&self.pool)?;
        for entry in self.model.waiting() {
            self.check_waiter(entry)?;
        }
        Ok(())
    }

    /// Checks that a waiter could not start without delaying an earlier one, and that its reported position is right.
    fn check_waiter(&self, entry: &ModelLease) -> Result<(), String> {
        let (model, id, request) = (&self.model, entry.id, &entry.request);
        if !model.over_quota(request) {
            let place = model.node_outside(request, &model.claims_before(id, request));
            ensure!(place.is_none(), "rule 4: lease {id} ({request:?}) fits on node {place:?} and is left waiting");
        }
        let explained = self.pool.explain(id).ok_or(format!("lease {id} waits without an explanation"))?;
        if model.policies.queue == QueueOrder::Fifo {
            let ahead = model.waiting().filter(|other| model.is_before((other.id, &other.request), (id, request)));
            let position = ahead.count() + 1;
            ensure!(explained.position == position, "lease {id} is number {position}, not {explained:?}");
            let priority = model.queue_priority(id, request);
            ensure!(explained.priority == priority, "lease {id} has priority {priority}, not {explained:?}");
        }
        Ok(())
    }

    /// Kills the pool and restores it from the store; its nodes are seen again.
    pub fn restart(&mut self) -> Result<(), String> {
        if self.missing_in_batch > 0 {
            self.finish_batch()?;
        }
        self.send(PoolCommand::Tick)?;
        if self.missing_in_batch > 0 {
            self.finish_batch()?;
        }
        self.pool = self.restored(self.store.rows())?;
        self.model.restart();
        self.check()?;
        for number in 0..self.nodes.len() {
            self.send(self.node_seen(number))?;
        }
        Ok(())
    }

    /// Restores another pool from these rows.
    pub fn restored(&self, rows: Vec<PoolRow>) -> Result<Pool, String> {
        let rules = world::policies(self.initial_policies);
        let (pool, bad) = Pool::restore(self.model.settings, rules, self.model.now, rows);
        ensure!(bad.is_empty(), "rule 2: good rows are refused: {bad:?}");
        Ok(pool)
    }

    pub fn node_seen(&self, number: usize) -> PoolCommand {
        let spec = &self.nodes[number];
        PoolCommand::NodeSeen { facts: spec.facts(number), devices: spec.devices(number), numbers: Vec::new() }
    }

    /// Returns the pool's number of a node, while the pool knows it.
    pub fn node_id(&self, number: usize) -> Option<NodeId> {
        self.model.node_by_name(&self.nodes[number].facts(number).name)
    }

    /// Returns commands by which every waiter sends a heartbeat and every holder renews.
    pub fn renewal_commands(&self) -> Vec<PoolCommand> {
        let entries = self.model.leases.values();
        entries
            .filter_map(|entry| match (entry.state, entry.token) {
                (LeaseState::Queued, _) => Some(PoolCommand::Follow { lease: entry.id }),
                (LeaseState::Active, Some(token)) if !entry.has_holder => {
                    Some(PoolCommand::Renew { lease: entry.id, token })
                }
                _ => None,
            })
            .collect()
    }

    /// Returns the commands for an action in the current state.
    pub fn commands(&mut self, act: &WorldAction) -> Vec<PoolCommand> {
        let devices: Vec<DeviceId> = self.model.devices.keys().copied().collect();
        let device = |pick: &Index| if devices.is_empty() { DeviceId(77) } else { *pick.get(&devices) };
        let node = |pick: &Index| pick.index(self.nodes.len());
        let node_id = |pick: &Index| self.node_id(node(pick)).unwrap_or(NodeId(77));
        let granted = |entry: &ModelLease| entry.state.is_granted();
        let active = |entry: &ModelLease| entry.state == LeaseState::Active;
        let command = match act {
            WorldAction::Request(request, key) => {
                let by_admin = &*request.0.owner == "owner-2";
                PoolCommand::Request {
                    request: request.0.clone(),
                    key: key.map(|key| format!("key-{key}").into()),
                    by_admin,
                }
            }
            WorldAction::Follow(pick) => {
                PoolCommand::Follow { lease: self.pick(pick, |e| e.state == LeaseState::Queued) }
            }
            WorldAction::Confirm(pick, shown) => {
                let (lease, token) = self.pick_token(pick, *shown, |e| e.state == LeaseState::Offered);
                PoolCommand::Confirm { lease, token }
            }
            WorldAction::Renew(pick, shown) => {
                let (lease, token) = self.pick_token(pick, *shown, active);
                PoolCommand::Renew { lease, token }
            }
            WorldAction::Attach(pick, shown) => {
                let (lease, token) = self.pick_token(pick, *shown, active);
                PoolCommand::Attach { lease, token, holder: LeaseHolder::Connection }
            }
            WorldAction::HolderGone(pick, grace) => {
                PoolCommand::HolderGone { lease: self.pick(pick, |e| e.has_holder), grace: Millis(*grace) }
            }
            WorldAction::Release(pick) => PoolCommand::Release { lease: self.pick(pick, |e| !e.state.is_ended()) },
            WorldAction::Drained(pick) => PoolCommand::Drained { lease: self.pick(pick, |e| e.draining) },
            WorldAction::Fail(pick) => {
                PoolCommand::Fail { lease: self.pick(pick, granted), why: "it fell over".into() }
            }
            WorldAction::Revoke(pick, grace) => {
                PoolCommand::Revoke { lease: self.pick(pick, granted), grace: Millis(*grace), revocation: None }
            }
            WorldAction::RenewAll => return self.renewal_commands(),
            WorldAction::Observe(pick, spec) => {
                let device = device(pick);
                PoolCommand::Observe { device, reading: self.reading(device, spec) }
            }
            WorldAction::SetHealth(pick, health) => {
                PoolCommand::SetHealth { device: device(pick), health: health.clone() }
            }
            WorldAction::Cordon(pick, cordon) => PoolCommand::Cordon { device: device(pick), cordon: *cordon },
            WorldAction::Drain(pick, grace) => PoolCommand::Drain { device: device(pick), grace: Millis(*grace) },
            WorldAction::NodeLost(pick) => PoolCommand::NodeLost { node: node_id(pick) },
            WorldAction::ForgetDevice(pick) => {
                let gone: Vec<DeviceId> =
                    devices.iter().copied().filter(|device| self.model.can_forget_device(*device)).collect();
                PoolCommand::ForgetDevice { device: if gone.is_empty() { device(pick) } else { *pick.get(&gone) } }
            }
            WorldAction::ForgetNode(pick) => PoolCommand::ForgetNode { node: node_id(pick) },
            WorldAction::NodeSeen(pick, change) => {
                let number = node(pick);
                let is_up = self.node_id(number).is_some_and(|id| self.model.nodes[&id].up);
                let spec = &mut self.nodes[number];
                match change {
                    NodeChange::Nothing => {}
                    NodeChange::Heartbeat if self.lists_devices_on_return && !is_up => {}
                    NodeChange::Heartbeat => {
                        let facts = spec.facts(number);
                        return vec![PoolCommand::NodeSeen { facts, devices: Vec::new(), numbers: Vec::new() }];
                    }
                    NodeChange::OneMoreDevice(kind) if spec.kinds.len() < 5 => spec.kinds.push(*kind),
                    NodeChange::OneMoreDevice(_) => {}
                    NodeChange::Zone => spec.zone = !spec.zone,
                    NodeChange::Cpus(cpus) => spec.cpus = *cpus,
                }
                self.node_seen(number)
            }
            WorldAction::Links(pick, picks) => PoolCommand::Links { node: node_id(pick), links: world::links(picks) },
            WorldAction::SetPolicies(number) => {
                PoolCommand::SetPolicies { policies: Box::new(world::policies(*number)) }
            }
            WorldAction::SetWorkload(configured) => {
                PoolCommand::SetWorkload { classes: configured_workload(*configured) }
            }
            WorldAction::Restart => return Vec::new(),
        };
        vec![command]
    }

    fn pick(&self, pick: &LeasePick, fits: impl Fn(&ModelLease) -> bool) -> LeaseId {
        let all: Vec<LeaseId> = self.model.leases.keys().copied().collect();
        let fitting: Vec<LeaseId> = self.model.leases.values().filter(|e| fits(e)).map(|e| e.id).collect();
        match pick {
            LeasePick::Fitting(index) if !fitting.is_empty() => *index.get(&fitting),
            LeasePick::Fitting(index) | LeasePick::Any(index) if !all.is_empty() => *index.get(&all),
            _ => LeaseId(1_000_000),
        }
    }

    fn pick_token(&self, pick: &LeasePick, shown: TokenChoice, fits: impl Fn(&ModelLease) -> bool) -> (LeaseId, Token) {
        let lease = self.pick(pick, fits);
        let token = self.model.leases.get(&lease).and_then(|entry| entry.token).unwrap_or(Token(0));
        match shown {
            TokenChoice::Right => (lease, token),
            TokenChoice::Older => (lease, Token(token.0.wrapping_sub(1))),
            TokenChoice::Newer => (lease, Token(token.0 + 1)),
        }
    }

    fn reading(&self, id: DeviceId, spec: &ReadingSpec) -> DeviceReading {
        let memory = self.model.devices.get(&id).and_then(|device| device.facts.memory);
        let eighth = memory.map_or(0, |memory| memory.total.0 / 8);
        let process = |attribution| ProcessUsage { attribution, memory: Some(Bytes(eighth)) };
        let squatters = |some: bool| some.then(|| process(ProcessAttribution::Foreign));
        let processes = match spec.processes {
            ProcessListing::NotListed => None,
            ProcessListing::Gone { squatter, unknown } => {
                let unknown = unknown.then(|| process(ProcessAttribution::Unknown));
                Some(squatters(squatter).into_iter().chain(unknown).collect())
            }
            ProcessListing::AllRun { squatter } => {
                let leases = self.model.leases_on(id).map(|(entry, _)| process(ProcessAttribution::Lease(entry.id)));
                Some(leases.chain(squatters(squatter)).collect())
            }
        };
        let at = PoolTime(self.model.now.0.saturating_sub(spec.age));
        DeviceReading {
            at,
            memory_used: map(spec.memory_eighths, |eighths| Bytes(eighths * eighth)),
            utilization: map(spec.busy_tens, |tens| Percent(tens * 10_000)),
            temperature_c: spec.temperature,
            processes,
            leases_as_of: spec.attributed.map(|age| PoolTime(self.model.now.0.saturating_sub(age))),
        }
    }

    /// Returns the grants since `from` in the log, in order.
    pub fn granted_since(&self, from: usize) -> Vec<LeaseId> {
        let effects = self.log[from..].iter().flat_map(|logged| &logged.outcome.effects);
        let granted = |effect: &PoolEffect| match effect {
            PoolEffect::Granted { lease, .. } | PoolEffect::Offered { lease, .. } => Some(*lease),
            _ => None,
        };
        effects.filter_map(granted).collect()
    }
}

pub fn configured_workload(configured: bool) -> Vec<(TaskClass, u64)> {
    let class = |cpus, share| TaskClass { cpus: MilliCpus(cpus), share: Share(share), gpus: 1, models: "".into() };
    if configured { vec![(class(1000, 500), 3), (class(0, 1000), 2)] } else { Vec::new() }
}

/// Turns a broken rule into a failed case.
pub fn case_result<T>(result: Result<T, String>) -> Result<T, TestCaseError> {
    result.map_err(TestCaseError::fail)
}

fn map<T, U>(field: ReadingField<T>, change: impl FnOnce(T) -> U) -> ReadingField<U> {
    match field {
        ReadingField::Value(value) => ReadingField::Value(change(value)),
        ReadingField::Unsupported => ReadingField::Unsupported,
        ReadingField::Failed => ReadingField::Failed,
    }
}

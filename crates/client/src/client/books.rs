//! The books of a server that only tells statistics: who holds which of its GPUs, decided here by the same [`Pool`] that
//! decides in an agent. Only this process knows of them: other clients of that server show as foreign load.
//!
//! [`Books::take_in`] is told what the server says, everything else asks or gives back. There is no task and no thread: every
//! call first lets happen what was due, and whoever waits wakes when something is.
//!
//! `told` judges what the server says.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use gpupool_api::lease::{FollowResponse, LeaseBody};
use gpupool_api::stats::{StatsBody, SummaryBody};
use gpupool_api::{RequestBody, SelectBody, view};
use gpupool_core::{
    Bytes, CommandDenied, CommandReply, DeviceHealth, DeviceId, DeviceView, DrainMode, GpuId, Labels, LeaseHolder,
    LeaseId, LeaseState, MilliCpus, Millis, NodeFacts, NodeId, Percent, Policies, Pool, PoolCommand, PoolEffect,
    PoolSettings, PoolTime, Request, Token, Vendor, limits::WAITER_PATIENCE,
};
use jiff::Timestamp;
use tokio::time::{Instant, sleep_until};
use told::Told;

use super::balance::ObservedGpu;
use super::running::{Changes, Follower};
use crate::{ClientError, IdempotencyKey};

#[cfg(test)]
mod tests;
mod told;

/// Who holds which GPU of one server.
#[derive(Debug)]
pub(crate) struct Books {
    /// A lock and not a task with a channel, because status calls are synchronous. Never held across an await.
    state: Mutex<State>,
}

impl Books {
    /// Empty books: what the server has is told by [`Books::take_in`]. `node` names it, `owner` is who asks where a request
    /// does not say; a reading older than `reading_max_age` says nothing about who else uses a GPU, so nobody gets it.
    pub(super) fn new(node: &str, owner: &str, reading_max_age: Duration) -> Self {
        let max_age = Millis(u64::try_from(reading_max_age.as_millis()).unwrap_or(u64::MAX));
        let settings = PoolSettings { drain: DrainMode::AtOnce, reading_max_age: Some(max_age) };
        let state = State {
            pool: Pool::new(settings, Policies::default()),
            begun: Instant::now(),
            max_age,
            owner: owner.into(),
            node: node.into(),
            node_id: None,
            devices: BTreeMap::new(),
            told: BTreeMap::new(),
            changes: Arc::default(),
        };
        Self { state: Mutex::new(state) }
    }

    /// A look at the server: GPUs that are new, gone or back, and a reading of each. `stats`, where they were asked for, tell
    /// sizes, UUIDs and health, which hold until the next ones. What the server itself calls stale or failed says nothing.
    pub(super) fn take_in(&self, summary: &SummaryBody, stats: Option<&StatsBody>) {
        self.lock().take_in(summary, stats);
    }

    /// The server does not answer: no new work there until it is seen again. What is held stays held.
    pub(super) fn away(&self) {
        self.lock().close();
    }

    /// Asks. The answer is active, offered (a hedged request), or waits and must be followed; asked again with the same key it
    /// is the same lease. Refusals carry the codes of an agent, or `not_seen` before the server was first looked at.
    pub(super) fn request(&self, body: &RequestBody, key: &IdempotencyKey) -> Result<LeaseBody, ClientError> {
        let mut state = self.lock();
        if state.node_id.is_none() {
            return Err(not_seen(&state.node));
        }
        let mut body = body.clone();
        body.owner.get_or_insert_with(|| Arc::clone(&state.owner));
        state.select_by_number(&mut body.select);
        let request = Request::try_from(body).map_err(|error| refused(error.into()))?;
        let key = Some(key.as_str().into());
        state.ask(PoolCommand::Request { request: Arc::new(request), key })
    }

    /// Keeps waiting requests in the queue, and answers as soon as any of them does not wait; after `wait` at the latest.
    /// Nobody asking for a request for 15 s takes it out of the queue.
    pub(super) async fn follow_leases(&self, leases: &[u64], wait: Duration) -> FollowResponse {
        let now = Instant::now();
        let until = now.checked_add(wait).unwrap_or(now + FAR);
        let mut changes = self.lock().changes.follow();
        loop {
            changes.mark_seen();
            let (followed, due) = self.lock().follow(leases);
            let now = Instant::now();
            if !followed.changed.is_empty() || !followed.unknown.is_empty() || now >= until {
                return followed;
            }
            let again = until.min(now + Duration::from_millis(WAITER_PATIENCE.0 / 3));
            change_or(&mut changes, due.map_or(again, |due| due.min(again))).await;
        }
    }

    /// Takes an offer.
    pub(super) fn confirm(&self, lease: u64, token: u64) -> Result<LeaseBody, ClientError> {
        self.lock().ask(PoolCommand::Confirm { lease: LeaseId(lease), token: Token(token) })
    }

    /// Gives a lease back, or stops waiting. Twice is harmless; `None` where there is no such lease.
    pub(super) fn release(&self, lease: u64) -> Option<LeaseBody> {
        self.lock().ask(PoolCommand::Release { lease: LeaseId(lease) }).ok()
    }

    /// A lease as it is now; `None` where there is no such lease, or it is long over.
    pub(super) fn lease(&self, lease: u64) -> Option<LeaseBody> {
        let mut state = self.lock();
        state.tick();
        state.body(LeaseId(lease))
    }

    /// Waits for the end of a lease (such as after its `max_duration_secs`); `None` where it is not known any more.
    pub(super) async fn ended(&self, lease: u64) -> Option<LeaseBody> {
        let mut changes = self.lock().changes.follow();
        loop {
            changes.mark_seen();
            let due = {
                let mut state = self.lock();
                state.tick();
                let known = state.pool.lease(LeaseId(lease))?;
                if known.state.is_ended() {
                    return state.body(LeaseId(lease));
                }
                state.due()
            };
            change_or(&mut changes, due.unwrap_or_else(|| Instant::now() + FAR)).await;
        }
    }

    /// Every GPU the server was seen to have, by number.
    pub(super) fn gpus(&self) -> Vec<ObservedGpu> {
        let mut state = self.lock();
        state.tick();
        all_gpus(&state)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under the lock is known to panic; should it, one caller's panic is not made everybody's.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Later than anybody waits in one go.
const FAR: Duration = Duration::from_secs(86_400);

async fn change_or(changes: &mut Follower, due: Instant) {
    tokio::select! {
        biased;
        () = changes.changed() => {}
        () = sleep_until(due) => {}
    }
}

#[derive(Debug)]
struct State {
    pool: Pool,
    /// When the pool's clock stood at zero.
    begun: Instant,
    max_age: Millis,
    owner: Arc<str>,
    node: Arc<str>,
    /// The server in the pool, once it was looked at.
    node_id: Option<NodeId>,
    /// Its GPUs in the pool, by its numbers.
    devices: BTreeMap<u32, DeviceId>,
    /// What it told of them.
    told: BTreeMap<u32, Told>,
    /// Wakes whoever waits when a lease is granted, offered or over.
    changes: Arc<Changes>,
}

impl State {
    fn now(&self) -> PoolTime {
        PoolTime(u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// When the pool wants to hear the clock.
    fn due(&self) -> Option<Instant> {
        let at = self.pool.next_deadline()?;
        Some(self.begun.checked_add(Duration::from_millis(at.0)).unwrap_or_else(|| Instant::now() + FAR))
    }

    fn tick(&mut self) {
        self.tell(PoolCommand::Tick);
    }

    /// A command that is never denied.
    fn tell(&mut self, command: PoolCommand) {
        let told = self.apply(command);
        debug_assert!(told.is_ok(), "{told:?}");
    }

    /// A command about a lease.
    fn ask(&mut self, command: PoolCommand) -> Result<LeaseBody, ClientError> {
        let lease = match self.apply(command).map_err(refused)? {
            CommandReply::Lease(lease) => lease,
            CommandReply::Done | CommandReply::Node(..) => {
                unreachable!("a command about a lease is answered with the lease")
            }
        };
        self.body(lease).ok_or_else(|| refused(CommandDenied::UnknownLease(lease)))
    }

    fn apply(&mut self, command: PoolCommand) -> Result<CommandReply, CommandDenied> {
        let now = self.now();
        let (answer, outcome) = self.pool.apply(now, command);
        let mut is_change = false;
        for effect in outcome.effects {
            is_change |=
                matches!(effect, PoolEffect::Granted { .. } | PoolEffect::Offered { .. } | PoolEffect::Ended { .. });
            if let PoolEffect::Granted { lease, token, .. } = effect {
                // It lives in this process, so there is nobody whose heartbeat could stop. It may be over already.
                let _ = self.pool.apply(now, PoolCommand::Attach { lease, token, holder: LeaseHolder::Connection });
            }
        }
        if is_change {
            self.changes.tell();
        }
        answer
    }

    fn follow(&mut self, leases: &[u64]) -> (FollowResponse, Option<Instant>) {
        self.tick();
        let mut followed = FollowResponse::default();
        for &lease in leases {
            match self.apply(PoolCommand::Follow { lease: LeaseId(lease) }) {
                Err(_) => followed.unknown.push(lease),
                Ok(_) => {
                    let known = self.pool.lease(LeaseId(lease));
                    let waits_no_more = known.filter(|known| known.state != LeaseState::Queued);
                    followed.changed.extend(waits_no_more.map(|known| lease_body(self, known)));
                }
            }
        }
        (followed, self.due())
    }

    fn body(&self, lease: LeaseId) -> Option<LeaseBody> {
        Some(lease_body(self, self.pool.lease(lease)?))
    }
}

// A look at the server becomes facts for the pool: which GPUs there are, whether each can be given, and what it read.

impl State {
    fn take_in(&mut self, summary: &SummaryBody, stats: Option<&StatsBody>) {
        self.tick();
        if summary.stale || summary.error.is_some() {
            return;
        }
        // Closed while facts change one by one: nobody is granted what is new beside what is not true any more.
        self.close();
        told::take_summary(&mut self.told, summary);
        if let Some(stats) = stats {
            told::take_stats(&mut self.told, stats);
        }
        let is_held = |number| {
            let view = self.devices.get(&number).and_then(|device| self.pool.device(*device));
            view.is_some_and(|view| !view.leases.is_empty())
        };
        told::settle(&mut self.told, is_held);

        let (known, new): (Vec<u32>, Vec<u32>) =
            self.told.keys().partition(|number| self.devices.contains_key(*number));
        known.into_iter().for_each(|number| self.observe(number));
        self.open();
        // A GPU that was never read is nobody's yet.
        new.into_iter().for_each(|number| self.observe(number));
    }

    /// Takes no new work from now on.
    fn close(&mut self) {
        match self.node_id {
            Some(node) => self.tell(PoolCommand::NodeLost { node }),
            None => self.tick(),
        }
    }

    fn observe(&mut self, number: u32) {
        let (Some(&device), Some(told)) = (self.devices.get(&number), self.told.get(&number)) else { return };
        let (health, reading) = (told.health(), told.reading(self.now()));
        let is_readable = health == DeviceHealth::Healthy;
        if self.pool.device(device).is_none_or(|view| view.health != health) {
            self.tell(PoolCommand::SetHealth { device, health });
        }
        if is_readable {
            self.tell(PoolCommand::Observe { device, reading });
        }
    }

    /// Takes new work again, on every GPU that is listed and well.
    fn open(&mut self) {
        let listed: Vec<(&u32, &told::Told)> = self.told.iter().filter(|(_, told)| told.is_listed()).collect();
        let numbers: Vec<u32> = listed.iter().map(|(number, _)| **number).collect();
        let command = PoolCommand::NodeSeen {
            // Such a server tells nothing of CPUs and memory of its host, so none can be promised.
            facts: NodeFacts {
                name: self.node.clone(),
                cpus: MilliCpus::ZERO,
                memory: Bytes::ZERO,
                labels: Labels::new(),
            },
            devices: listed.iter().map(|(number, told)| told.facts(&self.node, **number)).collect(),
            numbers: numbers.iter().map(|number| GpuId(*number)).collect(),
        };
        if let Ok(CommandReply::Node(node, devices)) = self.apply(command) {
            self.node_id = Some(node);
            self.devices.extend(numbers.into_iter().zip(devices));
        }
    }

    /// The pool knows GPUs by number only; here is known which have the UUIDs that are asked for. Where none has, the pool
    /// is left to say so.
    fn select_by_number(&self, select: &mut SelectBody) {
        let is_asked_for = |number: u32, told: &told::Told| {
            let uuid = told.uuid.clone().unwrap_or_else(|| told::name_of(&self.node, number));
            let by_number = select.gpu_ids.is_empty() || select.gpu_ids.contains(&GpuId(number));
            by_number && select.uuids.contains(&uuid)
        };
        let found: Vec<GpuId> =
            self.told.iter().filter(|(number, told)| is_asked_for(**number, told)).map(|(n, _)| GpuId(*n)).collect();
        if !found.is_empty() {
            select.gpu_ids = found;
            select.uuids.clear();
        }
    }
}

// The books in words: leases, GPUs and refusals as an agent would tell them.

/// A lease, with what its job is to find in its environment.
fn lease_body(state: &State, lease: &gpupool_core::Lease) -> LeaseBody {
    let (now, wall) = (state.now(), SystemTime::now());
    let iso = |time: PoolTime| iso(time, now, wall);
    let explanation = state.pool.explain(lease.id);
    let mut body = view::lease_body(&state.pool, lease, explanation.as_ref(), iso, |given| visible(state, given), true);
    for device in &mut body.devices {
        if let Some(uuid) = state.told.get(&device.gpu_id).and_then(|told| told.uuid.as_ref()) {
            device.uuid = uuid.to_string();
        }
    }
    body
}

/// What lets a job see the GPUs it was given, and no other: by UUID where the server tells each one's, else by number.
fn visible(state: &State, given: &[DeviceView]) -> BTreeMap<String, Option<String>> {
    let uuid = |view: &DeviceView| state.told.get(&view.gpu_id.0)?.uuid.as_ref().map(ToString::to_string);
    let by_uuid: Option<Vec<String>> = given.iter().map(uuid).collect();
    let list = by_uuid.unwrap_or_else(|| given.iter().map(|view| view.gpu_id.to_string()).collect()).join(",");
    let is_amd = !given.is_empty() && given.iter().all(|view| view.facts.vendor == Vendor::Amd);
    // ROCm's list is applied before HIP's and CUDA's, which would choose among what it left.
    let (cuda, order, rocm) =
        if is_amd { (None, None, Some(list)) } else { (Some(list), Some("PCI_BUS_ID".to_owned()), None) };
    let variables = [
        ("CUDA_VISIBLE_DEVICES", cuda),
        ("CUDA_DEVICE_ORDER", order),
        ("ROCR_VISIBLE_DEVICES", rocm),
        ("HIP_VISIBLE_DEVICES", None),
        ("GPU_DEVICE_ORDINAL", None),
    ];
    variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Every GPU that was ever listed, by number.
fn all_gpus(state: &State) -> Vec<ObservedGpu> {
    let views = state.devices.iter().filter_map(|(number, device)| Some((*number, state.pool.device(*device)?)));
    views.map(|(number, view)| gpu(state, number, &view)).collect()
}

fn gpu(state: &State, number: u32, view: &DeviceView) -> ObservedGpu {
    let told = state.told.get(&number);
    let total = view.facts.memory.map(|memory| memory.total);
    let foreign_memory = view.foreign.and_then(|foreign| foreign.memory).zip(total);
    let oldest = PoolTime(state.now().0.saturating_sub(state.max_age.0));
    let is_unread = view.read_at.is_none_or(|at| at < oldest);
    let closed = view.closed.map(view::closure_name).or_else(|| is_unread.then_some("stale"));
    ObservedGpu {
        gpu_id: number,
        uuid: told.and_then(|told| told.uuid.as_ref()).map(ToString::to_string),
        vendor: view.facts.vendor.name().into(),
        name: view.facts.model.to_string(),
        memory_mib: view.facts.memory_capacity().map(|memory| memory.as_mib()),
        memory_usage_percent: told.and_then(|told| told.memory_used.value()).map(Percent::as_number),
        utilization_percent: told.and_then(|told| told.utilization.value()).map(Percent::as_number),
        foreign_memory_percent: foreign_memory.map(|(used, total)| Percent::of(used, total).as_number()),
        foreign_utilization_percent: view.foreign.and_then(|foreign| foreign.utilization).map(Percent::as_number),
        promised: view.promised.as_fraction(),
        promised_memory_mib: view.promised_memory.as_mib(),
        holders: view.leases.len(),
        closed: closed.map(Into::into),
        labels: view.facts.labels.clone(),
    }
}

/// A refusal, as an agent would put it.
fn refused(denied: CommandDenied) -> ClientError {
    match denied {
        CommandDenied::Invalid(error) => ClientError::invalid(error.field, &error.value, error.allowed),
        denied => {
            let (status, code) = view::denial_status_and_code(&denied);
            ClientError::refused(status, code, denied.to_string())
        }
    }
}

/// The refusal of a server that was never looked at: nobody knows what it has.
fn not_seen(node: &str) -> ClientError {
    ClientError::refused(503, "not_seen", format!("the GPUs of {node} have not been seen yet; try again"))
}

/// A time of the pool for people, by an instant on both clocks.
fn iso(time: PoolTime, now: PoolTime, wall: SystemTime) -> String {
    let apart = |millis| Duration::from_millis(millis);
    let at = match time >= now {
        true => wall.checked_add(apart(time.since(now).0)),
        false => wall.checked_sub(apart(now.since(time).0)),
    };
    let at = at.and_then(|at| Timestamp::try_from(at).ok()).unwrap_or(Timestamp::MAX);
    format!("{}+00:00", at.strftime("%Y-%m-%dT%H:%M:%S%.3f"))
}

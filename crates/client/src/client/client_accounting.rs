//! Client-side accounting for a server that only serves statistics: the same [`Pool`] as in an agent decides which
//! lease gets which of its GPUs. Only this process knows these leases: other clients of the server show as foreign
//! load.
//!
//! [`ClientAccounting::apply_statistics`] takes the server's statistics. There is no task and no thread: every call
//! first applies what was due, and waiting calls wake at the next change or deadline.
//!
//! `reported_gpu` checks what the server reports.

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
use reported_gpu::ReportedGpu;
use tokio::time::{Instant, sleep_until};

use super::change_notifier::{ChangeNotifier, ChangeObserver};
use super::load_balancer::ObservedGpu;
use crate::{ClientError, IdempotencyKey};

mod reported_gpu;
#[cfg(test)]
mod tests;

/// Leases on the GPUs of one server.
#[derive(Debug)]
pub(crate) struct ClientAccounting {
    /// A lock rather than a task with a channel, because status calls are synchronous. Never held across an await.
    state: Mutex<AccountingState>,
}

impl ClientAccounting {
    /// Creates accounting without GPUs; [`Self::apply_statistics`] adds them. `node` names the server, `owner` is the
    /// owner of requests that name none. A GPU whose reading is older than `reading_max_age` takes no new work.
    pub(super) fn new(node: &str, owner: &str, reading_max_age: Duration) -> Self {
        let max_age = Millis(u64::try_from(reading_max_age.as_millis()).unwrap_or(u64::MAX));
        let settings = PoolSettings { drain: DrainMode::AtOnce, reading_max_age: Some(max_age) };
        let state = AccountingState {
            pool: Pool::new(settings, Policies::default()),
            started_at: Instant::now(),
            max_age,
            owner: owner.into(),
            node: node.into(),
            node_id: None,
            devices: BTreeMap::new(),
            reported: BTreeMap::new(),
            changes: Arc::default(),
        };
        Self { state: Mutex::new(state) }
    }

    /// Applies a poll of the server: new, missing and returned GPUs, and a reading of each. `stats`, if polled, give
    /// sizes, UUIDs and health, which hold until the next ones. Stale or failed statistics are ignored.
    pub(super) fn apply_statistics(&self, summary: &SummaryBody, stats: Option<&StatsBody>) {
        self.lock().apply_statistics(summary, stats);
    }

    /// Stops new grants while the server does not respond. Leases stay held.
    pub(super) fn suspend_grants(&self) {
        self.lock().suspend_placement();
    }

    /// Requests GPUs. The lease is active, offered (a hedged request) or queued, and must then be followed; the same
    /// key returns the same lease. Refusals have the codes of an agent, or `not_seen` before the first poll of the
    /// server.
    pub(super) fn request(&self, body: &RequestBody, key: &IdempotencyKey) -> Result<LeaseBody, ClientError> {
        let mut state = self.lock();
        if state.node_id.is_none() {
            return Err(not_polled_error(&state.node));
        }
        let mut body = body.clone();
        body.owner.get_or_insert_with(|| Arc::clone(&state.owner));
        state.replace_uuids_by_numbers(&mut body.select);
        let request = Request::try_from(body).map_err(|error| refusal_of(error.into()))?;
        let key = Some(key.as_str().into());
        // Only this client uses the pool, so its priorities need no limit.
        state.apply_to_lease(PoolCommand::Request { request: Arc::new(request), key, by_admin: true })
    }

    /// Keeps waiting requests in the queue and returns as soon as one of them no longer waits, but after `wait` at the
    /// latest. A request that is not followed for 15 s leaves the queue.
    pub(super) async fn follow_leases(&self, leases: &[u64], wait: Duration) -> FollowResponse {
        let now = Instant::now();
        let until = now.checked_add(wait).unwrap_or(now + FAR_FUTURE);
        let mut changes = self.lock().changes.observe();
        loop {
            changes.mark_seen();
            let (followed, due) = self.lock().follow_now(leases);
            let now = Instant::now();
            if !followed.changed.is_empty() || !followed.unknown.is_empty() || now >= until {
                return followed;
            }
            let again = until.min(now + Duration::from_millis(WAITER_PATIENCE.0 / 3));
            wait_for_change_or(&mut changes, due.map_or(again, |due| due.min(again))).await;
        }
    }

    /// Confirms an offer.
    pub(super) fn confirm(&self, lease: u64, token: u64) -> Result<LeaseBody, ClientError> {
        self.lock().apply_to_lease(PoolCommand::Confirm { lease: LeaseId(lease), token: Token(token) })
    }

    /// Releases a lease or leaves the queue. Idempotent; `None` for an unknown lease.
    pub(super) fn release(&self, lease: u64) -> Option<LeaseBody> {
        self.lock().apply_to_lease(PoolCommand::Release { lease: LeaseId(lease) }).ok()
    }

    /// Returns a lease; `None` if it is unknown or ended long ago.
    pub(super) fn lease(&self, lease: u64) -> Option<LeaseBody> {
        let mut state = self.lock();
        state.tick();
        state.body_of(LeaseId(lease))
    }

    /// Waits for the end of a lease (such as after its `max_duration_secs`); `None` if it is no longer known.
    pub(super) async fn wait_until_ended(&self, lease: u64) -> Option<LeaseBody> {
        let mut changes = self.lock().changes.observe();
        loop {
            changes.mark_seen();
            let due = {
                let mut state = self.lock();
                state.tick();
                let known = state.pool.lease(LeaseId(lease))?;
                if known.state.is_ended() {
                    return state.body_of(LeaseId(lease));
                }
                state.next_deadline_instant()
            };
            wait_for_change_or(&mut changes, due.unwrap_or_else(|| Instant::now() + FAR_FUTURE)).await;
        }
    }

    /// Returns every GPU that the server ever listed, by number.
    pub(super) fn gpus(&self) -> Vec<ObservedGpu> {
        let mut state = self.lock();
        state.tick();
        all_observed_gpus(&state)
    }

    fn lock(&self) -> MutexGuard<'_, AccountingState> {
        // No code under the lock is known to panic; if one caller does, the others continue.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Later than any single wait.
const FAR_FUTURE: Duration = Duration::from_secs(86_400);

async fn wait_for_change_or(changes: &mut ChangeObserver, due: Instant) {
    tokio::select! {
        biased;
        () = changes.changed() => {}
        () = sleep_until(due) => {}
    }
}

#[derive(Debug)]
struct AccountingState {
    pool: Pool,
    /// Instant of the zero of the pool's clock.
    started_at: Instant,
    max_age: Millis,
    owner: Arc<str>,
    node: Arc<str>,
    /// Id of the server in the pool, after its first poll.
    node_id: Option<NodeId>,
    /// Device ids of the GPUs, by the server's numbers.
    devices: BTreeMap<u32, DeviceId>,
    /// Reports of the GPUs, by the server's numbers.
    reported: BTreeMap<u32, ReportedGpu>,
    /// Notifies waiting calls when a lease is granted, offered or ended.
    changes: Arc<ChangeNotifier>,
}

impl AccountingState {
    fn now(&self) -> PoolTime {
        PoolTime(u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// Returns the instant of the pool's next deadline.
    fn next_deadline_instant(&self) -> Option<Instant> {
        let at = self.pool.next_deadline()?;
        Some(self.started_at.checked_add(Duration::from_millis(at.0)).unwrap_or_else(|| Instant::now() + FAR_FUTURE))
    }

    fn tick(&mut self) {
        self.apply_accepted(PoolCommand::Tick);
    }

    /// Applies a command that is never denied.
    fn apply_accepted(&mut self, command: PoolCommand) {
        let applied = self.apply(command);
        debug_assert!(applied.is_ok(), "{applied:?}");
    }

    /// Applies a command about a lease.
    fn apply_to_lease(&mut self, command: PoolCommand) -> Result<LeaseBody, ClientError> {
        let lease = match self.apply(command).map_err(refusal_of)? {
            CommandReply::Lease(lease) => lease,
            CommandReply::Done | CommandReply::Node(..) => {
                unreachable!("a command about a lease returns the lease")
            }
        };
        self.body_of(lease).ok_or_else(|| refusal_of(CommandDenied::UnknownLease(lease)))
    }

    fn apply(&mut self, command: PoolCommand) -> Result<CommandReply, CommandDenied> {
        let now = self.now();
        let (reply, outcome) = self.pool.apply(now, command);
        let mut has_changed = false;
        for effect in outcome.effects {
            has_changed |=
                matches!(effect, PoolEffect::Granted { .. } | PoolEffect::Offered { .. } | PoolEffect::Ended { .. });
            if let PoolEffect::Granted { lease, token, .. } = effect {
                // The lease lives in this process, so no heartbeat can be missed. It may have ended already.
                let _ = self.pool.apply(now, PoolCommand::Attach { lease, token, holder: LeaseHolder::Connection });
            }
        }
        if has_changed {
            self.changes.notify();
        }
        reply
    }

    fn follow_now(&mut self, leases: &[u64]) -> (FollowResponse, Option<Instant>) {
        self.tick();
        let mut followed = FollowResponse::default();
        for &lease in leases {
            match self.apply(PoolCommand::Follow { lease: LeaseId(lease) }) {
                Err(_) => followed.unknown.push(lease),
                Ok(_) => {
                    let known = self.pool.lease(LeaseId(lease));
                    let no_longer_queued = known.filter(|known| known.state != LeaseState::Queued);
                    followed.changed.extend(no_longer_queued.map(|known| lease_body(self, known)));
                }
            }
        }
        (followed, self.next_deadline_instant())
    }

    fn body_of(&self, lease: LeaseId) -> Option<LeaseBody> {
        Some(lease_body(self, self.pool.lease(lease)?))
    }
}

// Statistics as facts for the pool: the GPUs, their health and their readings.

impl AccountingState {
    fn apply_statistics(&mut self, summary: &SummaryBody, stats: Option<&StatsBody>) {
        self.tick();
        if summary.stale || summary.error.is_some() {
            return;
        }
        // Suspended while facts change one by one, so that no grant mixes new facts with outdated ones.
        self.suspend_placement();
        reported_gpu::apply_summary(&mut self.reported, summary);
        if let Some(stats) = stats {
            reported_gpu::apply_stats(&mut self.reported, stats);
        }
        let is_held = |number| {
            let view = self.devices.get(&number).and_then(|device| self.pool.device(*device));
            view.is_some_and(|view| !view.leases.is_empty())
        };
        reported_gpu::resolve_identities(&mut self.reported, is_held);

        let (known, new): (Vec<u32>, Vec<u32>) =
            self.reported.keys().partition(|number| self.devices.contains_key(*number));
        known.into_iter().for_each(|number| self.observe(number));
        self.resume_placement();
        // New GPUs without a reading are not granted yet.
        new.into_iter().for_each(|number| self.observe(number));
    }

    /// Stops placements on this server.
    fn suspend_placement(&mut self) {
        match self.node_id {
            Some(node) => self.apply_accepted(PoolCommand::NodeLost { node }),
            None => self.tick(),
        }
    }

    fn observe(&mut self, number: u32) {
        let (Some(&device), Some(reported)) = (self.devices.get(&number), self.reported.get(&number)) else { return };
        let (health, reading) = (reported.health(), reported.reading(self.now()));
        let is_readable = health == DeviceHealth::Healthy;
        if self.pool.device(device).is_none_or(|view| view.health != health) {
            self.apply_accepted(PoolCommand::SetHealth { device, health });
        }
        if is_readable {
            self.apply_accepted(PoolCommand::Observe { device, reading });
        }
    }

    /// Allows placements again, on every listed and healthy GPU.
    fn resume_placement(&mut self) {
        let listed: Vec<(&u32, &ReportedGpu)> = self.reported.iter().filter(|(_, gpu)| gpu.is_listed()).collect();
        let numbers: Vec<u32> = listed.iter().map(|(number, _)| **number).collect();
        let command = PoolCommand::NodeSeen {
            // The server reports no CPUs and no host memory, so none can be promised.
            facts: NodeFacts {
                name: self.node.clone(),
                cpus: MilliCpus::ZERO,
                memory: Bytes::ZERO,
                labels: Labels::new(),
            },
            devices: listed.iter().map(|(number, gpu)| gpu.facts(&self.node, **number)).collect(),
            numbers: numbers.iter().map(|number| GpuId(*number)).collect(),
        };
        if let Ok(CommandReply::Node(node, devices)) = self.apply(command) {
            self.node_id = Some(node);
            self.devices.extend(numbers.into_iter().zip(devices));
        }
    }

    /// Replaces UUIDs of a selection by GPU numbers, because the pool knows numbers only. If none matches, the pool
    /// refuses the request.
    fn replace_uuids_by_numbers(&self, select: &mut SelectBody) {
        let is_selected = |number: u32, gpu: &ReportedGpu| {
            let uuid = gpu.uuid.clone().unwrap_or_else(|| reported_gpu::placeholder_uuid(&self.node, number));
            let by_number = select.gpu_ids.is_empty() || select.gpu_ids.contains(&GpuId(number));
            by_number && select.uuids.contains(&uuid)
        };
        let selected = self.reported.iter().filter(|(number, gpu)| is_selected(**number, gpu));
        let found: Vec<GpuId> = selected.map(|(number, _)| GpuId(*number)).collect();
        if !found.is_empty() {
            select.gpu_ids = found;
            select.uuids.clear();
        }
    }
}

// Leases, GPUs and refusals in the form of an agent's responses.

/// Converts a lease, with the environment of its job.
fn lease_body(state: &AccountingState, lease: &gpupool_core::Lease) -> LeaseBody {
    let (now, wall) = (state.now(), SystemTime::now());
    let iso = |time: PoolTime| format_time(time, now, wall);
    let explanation = state.pool.explain(lease.id);
    let mut body = view::lease_body(&state.pool, lease, explanation.as_ref(), iso, |given| job_env(state, given), true);
    for device in &mut body.devices {
        if let Some(uuid) = state.reported.get(&device.gpu_id).and_then(|reported| reported.uuid.as_ref()) {
            device.uuid = uuid.to_string();
        }
    }
    body
}

/// Returns the environment that shows a job its GPUs and no others: by UUID if the server reports all of them, else by
/// number.
fn job_env(state: &AccountingState, given: &[DeviceView]) -> BTreeMap<String, Option<String>> {
    let uuid = |view: &DeviceView| state.reported.get(&view.gpu_id.0)?.uuid.as_ref().map(ToString::to_string);
    let by_uuid: Option<Vec<String>> = given.iter().map(uuid).collect();
    let list = by_uuid.unwrap_or_else(|| given.iter().map(|view| view.gpu_id.to_string()).collect()).join(",");
    let is_amd = !given.is_empty() && given.iter().all(|view| view.facts.vendor == Vendor::Amd);
    // ROCm applies its list before those of HIP and CUDA, which would select from the rest.
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

/// Returns every GPU that was ever listed, by number.
fn all_observed_gpus(state: &AccountingState) -> Vec<ObservedGpu> {
    let views = state.devices.iter().filter_map(|(number, device)| Some((*number, state.pool.device(*device)?)));
    views.map(|(number, view)| observed_gpu(state, number, &view)).collect()
}

fn observed_gpu(state: &AccountingState, number: u32, view: &DeviceView) -> ObservedGpu {
    let reported = state.reported.get(&number);
    let total = view.facts.memory.map(|memory| memory.total);
    let foreign_memory = view.foreign.and_then(|foreign| foreign.memory).zip(total);
    let oldest = PoolTime(state.now().0.saturating_sub(state.max_age.0));
    let is_unread = view.read_at.is_none_or(|at| at < oldest);
    let closed = view.closed.map(view::closure_name).or_else(|| is_unread.then_some("stale"));
    ObservedGpu {
        gpu_id: number,
        uuid: reported.and_then(|reported| reported.uuid.as_ref()).map(ToString::to_string),
        vendor: view.facts.vendor.name().into(),
        name: view.facts.model.to_string(),
        memory_mib: view.facts.memory_capacity().map(|memory| memory.as_mib()),
        memory_usage_percent: reported.and_then(|reported| reported.memory_used.value()).map(Percent::as_number),
        utilization_percent: reported.and_then(|reported| reported.utilization.value()).map(Percent::as_number),
        foreign_memory_percent: foreign_memory.map(|(used, total)| Percent::of(used, total).as_number()),
        foreign_utilization_percent: view.foreign.and_then(|foreign| foreign.utilization).map(Percent::as_number),
        promised: view.promised.as_fraction(),
        promised_memory_mib: view.promised_memory.as_mib(),
        holders: view.leases.len(),
        closed: closed.map(Into::into),
        labels: view.facts.labels.clone(),
    }
}

/// Converts a denied command to an agent's refusal.
fn refusal_of(denied: CommandDenied) -> ClientError {
    match denied {
        CommandDenied::Invalid(error) => ClientError::invalid(error.field, &error.value, error.allowed),
        denied => {
            let (status, code) = view::denial_status_and_code(&denied);
            ClientError::refused(status, code, denied.to_string())
        }
    }
}

/// Returns the refusal before the first poll of the server.
fn not_polled_error(node: &str) -> ClientError {
    ClientError::refused(503, "not_seen", format!("the GPUs of {node} have not been read yet; try again"))
}

/// Formats a time of the pool, given the same instant on both clocks.
fn format_time(time: PoolTime, now: PoolTime, wall: SystemTime) -> String {
    let distance = |millis| Duration::from_millis(millis);
    let at = match time >= now {
        true => wall.checked_add(distance(time.since(now).0)),
        false => wall.checked_sub(distance(now.since(time).0)),
    };
    let at = at.and_then(|at| Timestamp::try_from(at).ok()).unwrap_or(Timestamp::MAX);
    format!("{}+00:00", at.strftime("%Y-%m-%dT%H:%M:%S%.3f"))
}

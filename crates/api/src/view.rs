//! Conversion of a pool's leases and devices into bodies. The agent uses it, and a client that does its own accounting.

use std::collections::BTreeMap;

use gpupool_core::{
    CommandDenied, CordonState, DeviceClosure, DeviceHealth, DevicePromise, DeviceView, EndCause, Lease, LeaseHolder,
    LeaseId, LeaseRow, LeaseState, Pool, PoolTime, Request, RequestedAmount, Share, WaitExplanation,
};

use crate::job_environment as job;
use crate::lease::{self, LeaseDevice};
use crate::pool;

/// Converts a lease. `explanation` holds the reasons for waiting, `iso` formats times, and `env` adds variables to those that
/// every job gets. Token and environment are included only if `is_owners` is true.
pub fn lease_body(
    pool: &Pool,
    lease: &Lease,
    explanation: Option<&WaitExplanation>,
    iso: impl Fn(PoolTime) -> String,
    env: impl FnOnce(&[DeviceView]) -> BTreeMap<String, Option<String>>,
    is_owners: bool,
) -> lease::LeaseBody {
    let is_granted = lease.state.is_granted();
    let held: &[DevicePromise] = if is_granted { &lease.promises } else { &[] };
    let explanation = explanation.filter(|_| lease.state == LeaseState::Queued);
    let why_waiting = explanation.map(|why| {
        let reasons: Vec<String> = why.reasons.iter().map(ToString::to_string).collect();
        reasons.join("; ")
    });
    lease::LeaseBody {
        id: lease.id.0,
        state: lease.state,
        owner: lease.request.owner.to_string(),
        worker_id: lease.request.worker_id.as_ref().map(ToString::to_string),
        request: (&*lease.request).into(),
        devices: held.iter().filter_map(|promise| device_of(pool, promise)).collect(),
        env: if is_granted && is_owners { job_environment(pool, lease, env) } else { BTreeMap::new() },
        token: lease.token.filter(|_| is_owners).map(|token| token.0),
        queue_position: explanation.map(|why| why.position),
        reason: why_waiting.or_else(|| end_reason(lease)),
        cause: lease.cause.as_ref().map(|cause| end_cause_name(cause).into()),
        created_at: iso(lease.created_at),
        granted_at: lease.granted_at.map(&iso),
        expires_at: lease.expires_at.into_iter().chain(lease.hard_end.filter(|_| is_granted)).min().map(&iso),
        revoke_at: lease.revoke_at.map(&iso),
        ended_at: lease.ended_at.map(&iso),
        ttl_secs: lease.request.ttl.0 as f64 / 1000.0,
        priority: lease.request.priority,
        queue_priority: explanation.map(|why| why.priority),
        holder: lease.holder.as_ref().map(holder),
        draining: lease.draining,
        labels: lease.request.labels.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect(),
    }
}

impl From<&Request> for lease::RequestSummary {
    fn from(request: &Request) -> Self {
        let (fraction, memory) = request.amount.share_and_memory();
        Self {
            gpus: request.gpus,
            fraction: fraction.map(Share::as_fraction),
            memory_mib: memory.map(|memory| memory.as_mib()),
            sharing: request.amount == RequestedAmount::Shared,
        }
    }
}

fn holder(holder: &LeaseHolder) -> lease::HolderBody {
    match holder {
        LeaseHolder::Process { pid, .. } | LeaseHolder::Supervisor { pid, .. } => {
            lease::HolderBody::Process { pid: Some(*pid) }
        }
        LeaseHolder::Cgroup(path) => lease::HolderBody::Cgroup { path: Some(path.to_string()) },
        LeaseHolder::Connection => lease::HolderBody::Connection,
    }
}

fn device_of(pool: &Pool, promise: &DevicePromise) -> Option<LeaseDevice> {
    let view = pool.device(promise.device)?;
    Some(LeaseDevice {
        gpu_id: view.gpu_id.0,
        node: pool.node(view.node).map(|node| node.facts.name.to_string()).unwrap_or_default(),
        uuid: view.facts.identity.to_string(),
        vendor: view.facts.vendor.name().into(),
        name: view.facts.model.to_string(),
        fraction: promise.share.as_fraction(),
        memory_mib: view.facts.memory.map(|_| promise.memory.as_mib()),
    })
}

/// Returns the environment variables for a job of this lease.
fn job_environment(
    pool: &Pool,
    lease: &Lease,
    vendors: impl FnOnce(&[DeviceView]) -> BTreeMap<String, Option<String>>,
) -> BTreeMap<String, Option<String>> {
    let views: Vec<DeviceView> = lease.promises.iter().filter_map(|promise| pool.device(promise.device)).collect();
    let mut env = vendors(&views);
    let numbers: Vec<String> = views.iter().map(|view| view.gpu_id.to_string()).collect();
    let mut set = |name: &str, value: String| env.insert(name.to_owned(), Some(value));
    set(job::LEASE, lease.id.to_string());
    set(job::GPU_IDS, numbers.join(","));
    if let Some(token) = lease.token {
        set(job::FENCING_TOKEN, token.to_string());
    }
    if let (Some(promise), Some(view)) = (lease.promises.first(), views.first()) {
        set(job::FRACTION, promise.share.as_fraction().to_string());
        if view.facts.memory.is_some() {
            set(job::MEMORY_MIB, promise.memory.as_mib().to_string());
        }
    }
    env
}

/// Converts a device with its leases, which `lease` looks up. The caller fills in the readings.
pub fn device_body<'a>(
    view: &DeviceView,
    node: &str,
    lease: impl Fn(LeaseId) -> Option<&'a LeaseRow>,
    iso: impl Fn(PoolTime) -> String,
) -> pool::DeviceBody {
    let (health, health_reason) = health_and_reason(&view.health);
    let leases = view.leases.iter().filter_map(|id| {
        let lease = lease(*id)?;
        let promise = lease.promises.iter().find(|promise| promise.device == view.device)?;
        Some(pool::DeviceLease {
            id: id.0,
            owner: lease.request.owner.to_string(),
            worker_id: lease.request.worker_id.as_ref().map(ToString::to_string),
            fraction: promise.share.as_fraction(),
            memory_mib: view.facts.memory.map(|_| promise.memory.as_mib()),
            draining: lease.draining,
            granted_at: lease.granted_at.map(&iso),
        })
    });
    pool::DeviceBody {
        gpu_id: view.gpu_id.0,
        node: node.into(),
        uuid: view.facts.identity.to_string(),
        vendor: view.facts.vendor.name().into(),
        name: view.facts.model.to_string(),
        memory_mib: view.facts.memory_capacity().map(|bytes| bytes.as_mib()),
        memory_used_mib: None,
        utilization_percent: None,
        temperature_c: view.temperature_c.map(i32::from),
        power_w: None,
        health: health.into(),
        health_reason,
        cordoned: view.cordon == CordonState::Cordoned,
        closed: view.closed.map(|why| closure_name(why).into()),
        promised: view.promised.as_fraction(),
        promised_memory_mib: view.promised_memory.as_mib(),
        leases: leases.collect(),
        foreign: view.foreign.map(|foreign| pool::ForeignLoadBody {
            memory_mib: foreign.memory.map(|bytes| bytes.as_mib()),
            utilization_percent: foreign.utilization.map(|percent| percent.as_number()),
            processes: foreign.processes,
        }),
        processes: Vec::new(),
        processes_complete: false,
        partition: view.facts.partition.as_ref().map(|partition| partition.profile.to_string()),
        labels: view.facts.labels.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect(),
        timestamp: view.read_at.map(&iso),
        stale: false,
    }
}

/// Returns the name of a health state and its reason.
pub fn health_and_reason(health: &DeviceHealth) -> (&'static str, Option<String>) {
    match health {
        DeviceHealth::Healthy => ("healthy", None),
        DeviceHealth::Unhealthy(why) => ("unhealthy", Some(why.to_string())),
        DeviceHealth::Lost => ("lost", Some("the device disappeared".into())),
        DeviceHealth::ClaimedElsewhere(agent) => ("healthy", Some(format!("leased by {agent}"))),
    }
}

/// Returns the published name of the reason that closes a device.
pub fn closure_name(closed: DeviceClosure) -> &'static str {
    match closed {
        DeviceClosure::NodeLost => "node_lost",
        DeviceClosure::NotSeen => "not_seen",
        DeviceClosure::Lost => "lost",
        DeviceClosure::Unhealthy => "unhealthy",
        DeviceClosure::Hot => "hot",
        DeviceClosure::Cordoned => "cordoned",
        DeviceClosure::Quarantined => "quarantined",
        DeviceClosure::ClaimedElsewhere => "claimed_elsewhere",
    }
}

/// Returns the reason for the end of a lease as text; a revocation names its author.
pub fn end_reason(lease: &LeaseRow) -> Option<String> {
    match (lease.cause.as_ref()?, &lease.revocation) {
        (EndCause::Revoked, Some(revocation)) => Some(revocation.to_string()),
        (cause, _) => Some(end_cause_text(cause)),
    }
}

/// Returns the reason for a lease's end as text.
pub fn end_cause_text(cause: &EndCause) -> String {
    match cause {
        EndCause::ByOwner => "released by its owner".into(),
        EndCause::HolderGone => "its process or connection ended".into(),
        EndCause::TtlPassed => "the lease was not renewed in time".into(),
        EndCause::MaxDurationPassed => "the lease reached its maximum duration".into(),
        EndCause::WaitLimitPassed => "the request reached its wait limit".into(),
        EndCause::Abandoned => "no client polled the request while it waited".into(),
        EndCause::OfferLapsed => "the offer was not confirmed in time".into(),
        EndCause::Revoked => "revoked by an administrator".into(),
        EndCause::Fault(why) => why.to_string(),
    }
}

/// Returns the stable name of the reason for a lease's end.
pub fn end_cause_name(cause: &EndCause) -> &'static str {
    match cause {
        EndCause::ByOwner => "by_owner",
        EndCause::HolderGone => "holder_gone",
        EndCause::TtlPassed => "ttl_passed",
        EndCause::MaxDurationPassed => "max_duration_passed",
        EndCause::WaitLimitPassed => "wait_limit_passed",
        EndCause::Abandoned => "abandoned",
        EndCause::OfferLapsed => "offer_lapsed",
        EndCause::Revoked => "revoked",
        EndCause::Fault(_) => "fault",
    }
}

/// Returns the HTTP status and the problem code of a denied command.
pub const fn denial_status_and_code(denied: &CommandDenied) -> (u16, &'static str) {
    match denied {
        CommandDenied::Invalid(_) => (422, "invalid"),
        CommandDenied::Policy { .. } => (422, "policy"),
        CommandDenied::Unsatisfiable(_) => (422, "unsatisfiable"),
        CommandDenied::NoCapacity => (409, "no_capacity"),
        CommandDenied::QueueFull { .. } => (503, "queue_full"),
        CommandDenied::UnknownLease(_) => (404, "unknown_lease"),
        CommandDenied::Stale { .. } => (409, "stale"),
        CommandDenied::Ended(_) => (409, "ended"),
        CommandDenied::NotGranted(_) => (409, "not_granted"),
        CommandDenied::Held { .. } => (409, "held"),
        CommandDenied::UnknownDevice(_) => (404, "unknown_device"),
        CommandDenied::UnknownNode(_) => (404, "unknown_node"),
        CommandDenied::DeviceInUse { .. } | CommandDenied::NodeInUse { .. } => (409, "in_use"),
    }
}

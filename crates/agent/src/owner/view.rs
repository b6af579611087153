//! Leases and devices in the words of the API.

use std::collections::BTreeMap;

use gpupool_api::job_environment as job;
use gpupool_api::lease::{self, LeaseDevice, State};
use gpupool_api::pool;
use gpupool_core::device::{Cordon, Health, Vendor};
use gpupool_core::lease::{Holder, Lease, LeaseState, Promise};
use gpupool_core::outcome::Closed;
use gpupool_core::pool::DeviceView;
use gpupool_core::{Amount, Request, Share};
use gpupool_devices::environment::JobEnvironment;

use crate::clock;
use crate::identity::Caller;

use super::OwnerThread;
use super::publish::{cause_name, cause_words};

/// A lease, with its token and environment for those who may act for its owner.
pub fn lease_body(owner: &OwnerThread, lease: &Lease, caller: Option<&Caller>) -> lease::Lease {
    let iso = |time| clock::iso_of(time, owner.at);
    let is_granted = lease.state.is_granted();
    let held: &[Promise] = if is_granted { &lease.promises } else { &[] };
    let knows = caller.is_some_and(|caller| caller.may_act_for(&lease.request.owner));
    let explanation = if lease.state == LeaseState::Queued { owner.pool.explain(lease.id) } else { None };
    let why_waiting = explanation.as_ref().map(|why| {
        let reasons: Vec<String> = why.reasons.iter().map(ToString::to_string).collect();
        reasons.join("; ")
    });
    let env = if is_granted && knows { environment(owner, lease) } else { BTreeMap::new() };
    lease::Lease {
        id: lease.id.0,
        state: state(lease.state),
        owner: lease.request.owner.to_string(),
        worker_id: lease.request.worker_id.as_ref().map(ToString::to_string),
        wish: wish(&lease.request),
        devices: held.iter().filter_map(|promise| device_of(owner, promise)).collect(),
        env,
        token: lease.token.filter(|_| knows).map(|token| token.0),
        queue_position: explanation.as_ref().map(|why| why.position),
        reason: why_waiting.or_else(|| lease.cause.as_ref().map(cause_words)),
        cause: lease.cause.as_ref().map(|cause| cause_name(cause).into()),
        created_at: iso(lease.created_at),
        granted_at: lease.granted_at.map(iso),
        expires_at: lease.expires_at.map(iso),
        revoke_at: lease.revoke_at.map(iso),
        ended_at: lease.ended_at.map(iso),
        ttl_secs: lease.request.ttl.0 as f64 / 1000.0,
        priority: lease.request.priority,
        holder: lease.holder.as_ref().map(holder),
        draining: lease.draining,
        labels: lease.request.labels.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect(),
    }
}

fn wish(request: &Request) -> lease::Wish {
    let (fraction, memory) = match request.amount {
        Amount::Whole | Amount::Shared => (None, None),
        Amount::Share(share) => (Some(share), None),
        Amount::Memory(memory) => (None, Some(memory)),
        Amount::Both(share, memory) => (Some(share), Some(memory)),
    };
    lease::Wish {
        gpus: request.gpus,
        fraction: fraction.map(Share::as_fraction),
        memory_mib: memory.map(|memory| memory.as_mib()),
        sharing: request.amount == Amount::Shared,
    }
}

fn state(state: LeaseState) -> State {
    match state {
        LeaseState::Queued => State::Queued,
        LeaseState::Offered => State::Offered,
        LeaseState::Active => State::Active,
        LeaseState::Released => State::Released,
        LeaseState::Expired => State::Expired,
        LeaseState::Revoked => State::Revoked,
        LeaseState::Failed => State::Failed,
    }
}

fn holder(holder: &Holder) -> lease::Holder {
    match holder {
        Holder::Process { pid, .. } => lease::Holder::Process { pid: *pid },
        Holder::Cgroup(path) => lease::Holder::Cgroup { path: path.to_string() },
        Holder::Connection => lease::Holder::Connection,
    }
}

fn device_of(owner: &OwnerThread, promise: &Promise) -> Option<LeaseDevice> {
    let view = owner.pool.device(promise.device)?;
    Some(LeaseDevice {
        gpu_id: view.gpu_id.0,
        uuid: view.facts.identity.to_string(),
        vendor: vendor_name(view.facts.vendor).into(),
        name: view.facts.model.to_string(),
        fraction: promise.share.as_fraction(),
        memory_mib: view.facts.memory.map(|_| promise.memory.as_mib()),
    })
}

/// What to set before a job of this lease starts.
fn environment(owner: &OwnerThread, lease: &Lease) -> BTreeMap<String, Option<String>> {
    let mut env = BTreeMap::new();
    let views: Vec<DeviceView> =
        lease.promises.iter().filter_map(|promise| owner.pool.device(promise.device)).collect();
    if let Some(sample) = &owner.sample {
        let place = |view: &DeviceView| sample.all_ids.iter().position(|gpu_id| *gpu_id == view.gpu_id);
        let given: Vec<usize> = views.iter().filter_map(place).collect();
        let visible = JobEnvironment::new(&sample.all, &given);
        env.extend(visible.variables.into_iter().map(|(name, value)| (name.to_owned(), value)));
    }
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

/// A device with who holds it; what it reads is filled in from the statistics.
pub fn device_body(owner: &OwnerThread, view: &DeviceView, node: &str) -> pool::Device {
    let iso = |time| clock::iso_of(time, owner.at);
    let (health, health_reason) = health_words(&view.health);
    let leases = view.leases.iter().filter_map(|id| {
        let lease = owner.pool.lease(*id)?;
        let promise = lease.promises.iter().find(|promise| promise.device == view.device)?;
        Some(pool::DeviceLease {
            id: id.0,
            owner: lease.request.owner.to_string(),
            worker_id: lease.request.worker_id.as_ref().map(ToString::to_string),
            fraction: promise.share.as_fraction(),
            memory_mib: view.facts.memory.map(|_| promise.memory.as_mib()),
            draining: lease.draining,
            granted_at: lease.granted_at.map(iso),
        })
    });
    pool::Device {
        gpu_id: view.gpu_id.0,
        node: node.into(),
        uuid: view.facts.identity.to_string(),
        vendor: vendor_name(view.facts.vendor).into(),
        name: view.facts.model.to_string(),
        memory_mib: view.facts.memory_capacity().map(|bytes| bytes.as_mib()),
        memory_used_mib: None,
        utilization_percent: None,
        temperature_c: view.temperature_c.map(i32::from),
        power_w: None,
        health: health.into(),
        health_reason,
        cordoned: view.cordon == Cordon::Cordoned,
        closed: view.closed.map(|why| closed_name(why).into()),
        promised: view.promised.as_fraction(),
        promised_memory_mib: view.promised_memory.as_mib(),
        leases: leases.collect(),
        foreign: view.foreign.map(|foreign| pool::Foreign {
            memory_mib: foreign.memory.map(|bytes| bytes.as_mib()),
            utilization_percent: foreign.utilization.map(|percent| percent.as_number()),
            processes: foreign.processes,
        }),
        processes: Vec::new(),
        processes_complete: false,
        partition: view.facts.partition.as_ref().map(|partition| partition.profile.to_string()),
        labels: view.facts.labels.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect(),
        timestamp: view.read_at.map(iso),
        stale: false,
    }
}

/// A vendor's name.
pub fn vendor_name(vendor: Vendor) -> &'static str {
    match vendor {
        Vendor::Nvidia => "nvidia",
        Vendor::Amd => "amd",
        Vendor::Intel => "intel",
        Vendor::Other => "other",
    }
}

/// Health by name, and what is wrong.
pub fn health_words(health: &Health) -> (&'static str, Option<String>) {
    match health {
        Health::Healthy => ("healthy", None),
        Health::Unhealthy(why) => ("unhealthy", Some(why.to_string())),
        Health::Lost => ("lost", Some("it is not there any more".into())),
    }
}

/// Why a device takes no new work, by name.
pub fn closed_name(closed: Closed) -> &'static str {
    match closed {
        Closed::NodeLost => "node_lost",
        Closed::NotSeen => "not_seen",
        Closed::Lost => "lost",
        Closed::Unhealthy => "unhealthy",
        Closed::Hot => "hot",
        Closed::Cordoned => "cordoned",
        Closed::Quarantined => "quarantined",
    }
}

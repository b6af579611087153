//! The books in words: leases, GPUs and refusals as an agent would tell them.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use gpupool_api::lease::Lease;
use gpupool_api::problem::Problem;
use gpupool_api::view;
use gpupool_core::device::Vendor;
use gpupool_core::pool::DeviceView;
use gpupool_core::{Denied, Percent, Time};
use http::StatusCode;
use jiff::Timestamp;

use super::State;
use crate::ClientError;
use crate::client::capacity::Gpu;

/// A lease, with what its job is to find in its environment.
pub(super) fn lease(state: &State, lease: &gpupool_core::lease::Lease) -> Lease {
    let (now, wall) = (state.now(), SystemTime::now());
    let iso = |time: Time| iso(time, now, wall);
    let mut body = view::lease_body(&state.pool, lease, iso, |given| visible(state, given), true);
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
pub(super) fn gpus(state: &State) -> Vec<Gpu> {
    let views = state.devices.iter().filter_map(|(number, device)| Some((*number, state.pool.device(*device)?)));
    views.map(|(number, view)| gpu(state, number, &view)).collect()
}

fn gpu(state: &State, number: u32, view: &DeviceView) -> Gpu {
    let told = state.told.get(&number);
    let total = view.facts.memory.map(|memory| memory.total);
    let foreign_memory = view.foreign.and_then(|foreign| foreign.memory).zip(total);
    let oldest = Time(state.now().0.saturating_sub(state.max_age.0));
    let is_unread = view.read_at.is_none_or(|at| at < oldest);
    let closed = view.closed.map(view::closed_name).or_else(|| is_unread.then_some("stale"));
    Gpu {
        gpu_id: number,
        uuid: told.and_then(|told| told.uuid.as_ref()).map(ToString::to_string),
        vendor: view::vendor_name(view.facts.vendor).into(),
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
pub(super) fn refused(denied: Denied) -> ClientError {
    let (status, code) = view::denied_code(&denied);
    let mut problem = problem(status, code, denied.to_string());
    if let Denied::Invalid(error) = denied {
        problem.detail = format!("{} is {}, and must be {}", error.field, error.value, error.allowed);
        problem.field = Some(error.field.into());
        problem.value = Some(error.value);
        problem.allowed = Some(error.allowed.into());
    }
    ClientError::Problem(Box::new(problem))
}

/// The refusal of a server that was never looked at: nobody knows what it has.
pub(super) fn not_seen(node: &str) -> ClientError {
    let detail = format!("the GPUs of {node} have not been seen yet; try again");
    ClientError::Problem(Box::new(problem(StatusCode::SERVICE_UNAVAILABLE.as_u16(), "not_seen", detail)))
}

fn problem(status: u16, code: &str, detail: String) -> Problem {
    let title = StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason());
    Problem {
        kind: "about:blank".into(),
        title: title.unwrap_or("Error").into(),
        status,
        code: code.into(),
        detail,
        field: None,
        value: None,
        allowed: None,
    }
}

/// A time of the pool for people, by an instant on both clocks.
fn iso(time: Time, now: Time, wall: SystemTime) -> String {
    let apart = |millis| Duration::from_millis(millis);
    let at = match time >= now {
        true => wall.checked_add(apart(time.since(now).0)),
        false => wall.checked_sub(apart(now.since(time).0)),
    };
    let at = at.and_then(|at| Timestamp::try_from(at).ok()).unwrap_or(Timestamp::MAX);
    format!("{}+00:00", at.strftime("%Y-%m-%dT%H:%M:%S%.3f"))
}

//! The pool as a whole, and each device with its leases: from the snapshot that the authority published last.

use std::collections::HashMap;

use axum::extract::State;
use gpupool_api::API_VERSION;
use gpupool_api::pool::{DeviceBody, DeviceList, PoolBody, PromisedAmount};
use gpupool_api::problem::ProblemBody;
use gpupool_api::view;
use gpupool_core::{DeviceHealth, DeviceId, GpuId, LeaseId, LeaseState};
use serde::Deserialize;

use crate::authority::{DeviceState, NodeSummary, Snapshot};
use crate::clock;
use crate::events::EventId;
use crate::identity::Caller;
use crate::node::statistics::{CurrentStatistics, ListedDevice};
use crate::visibility::ProcessDetail;

use super::caller::ReadAccess;
use super::extract::QueryParameters;
use super::problem::Problem;
use super::{AppState, SharedState};

/// The pool
///
/// `authority` is `agent`: this server decides about leases.
#[utoipa::path(
    get, path = "/v1/pool", tag = "pool",
    responses(
        (status = 200, description = "The state of the pool", body = PoolBody),
        (status = "default", description = "Not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn pool(State(app): State<SharedState>) -> axum::Json<PoolBody> {
    let snapshot = app.authority.snapshot();
    let (mut devices, mut open, mut free, mut promised) = (0, 0, 0, 0.0);
    for DeviceState { view, .. } in snapshot.devices() {
        devices += 1;
        promised += view.promised.as_fraction();
        if view.closed.is_none() {
            open += 1;
            free += usize::from(view.promised.is_zero());
        }
    }
    let sum = |promised: fn(&NodeSummary) -> f64, total: fn(&NodeSummary) -> f64| PromisedAmount {
        promised: snapshot.nodes().map(promised).sum(),
        total: snapshot.nodes().map(total).sum(),
    };
    axum::Json(PoolBody {
        authority: "agent".into(),
        api_version: API_VERSION.into(),
        version: env!("CARGO_PKG_VERSION").into(),
        node_id: app.node_id.clone(),
        node: app.node.name().into(),
        run_id: app.events.run().to_string(),
        simulated: app.node.simulation().is_some(),
        devices,
        open_devices: open,
        free_devices: free,
        promised,
        active: snapshot.leases().filter(|lease| lease.state == LeaseState::Active).count(),
        waiting: snapshot.queued,
        next_token: snapshot.next_token.0,
        cpus: sum(|node| node.cpus_promised.0 as f64 / 1000.0, |node| node.facts.cpus.0 as f64 / 1000.0),
        host_memory_mib: sum(|node| node.memory_promised.as_mib() as f64, |node| node.facts.memory.as_mib() as f64),
        confinement: app.node.confinement(),
        timestamp: clock::iso(snapshot.at.wall),
        event_id: Some(last_event_id(&app, &snapshot)),
        age_secs: pool_age_secs(&app),
    })
}

/// Devices
///
/// Each with its readings, its leases and the processes on it. Command lines and pids are for the owner of the lease,
/// administrators and users of this machine; other callers see the names of programs.
#[utoipa::path(
    get, path = "/v1/devices", tag = "pool",
    params(("node" = Option<String>, Query, description = "Only devices of the node with this name")),
    responses(
        (status = 200, description = "Devices, by node and number", body = DeviceList),
        (status = "default", description = "The node is unknown, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn devices(
    State(app): State<SharedState>,
    ReadAccess(caller): ReadAccess,
    QueryParameters(node): QueryParameters<NodeParameter>,
) -> Result<axum::Json<DeviceList>, Problem> {
    let snapshot = app.authority.snapshot();
    let current = app.node.statistics().current();
    let node = node.known(&app, &snapshot)?;
    let listed: HashMap<GpuId, &ListedDevice> =
        current.round.devices.iter().map(|device| (device.gpu_id, device)).collect();
    let states = snapshot.devices().filter(|state| node.is_none_or(|node| snapshot.node_name(state.view.node) == node));
    let body = |state: &DeviceState| {
        build_body(&app, &caller, &snapshot, &current, state, |gpu_id| listed.get(&gpu_id).copied())
    };
    let mut devices: Vec<DeviceBody> = states.map(body).collect();
    devices.sort_by(|a, b| (&a.node, a.gpu_id).cmp(&(&b.node, b.gpu_id)));
    let (event_id, age_secs) = (Some(last_event_id(&app, &snapshot)), pool_age_secs(&app));
    let timestamp = clock::iso(std::time::SystemTime::now());
    Ok(axum::Json(DeviceList { devices, timestamp, event_id, age_secs }))
}

/// The query parameter that names a node.
#[derive(Deserialize)]
pub(super) struct NodeParameter {
    node: Option<String>,
}

impl NodeParameter {
    /// Returns the name of the node, if one is given. An unknown node is a problem.
    pub(super) fn known(&self, app: &AppState, snapshot: &Snapshot) -> Result<Option<&str>, Problem> {
        check_node(self.node.as_deref(), app, snapshot)
    }
}

/// Checks the given name of a node and returns it. An unknown node is a problem.
pub(super) fn check_node<'a>(
    node: Option<&'a str>,
    app: &AppState,
    snapshot: &Snapshot,
) -> Result<Option<&'a str>, Problem> {
    let is_known = |name: &str| name == app.node.name() || snapshot.nodes().any(|node| *node.facts.name == *name);
    match node {
        Some(name) if !is_known(name) => {
            let own = app.node.name();
            let others = snapshot.nodes().map(|node| &*node.facts.name).filter(|name| *name != own);
            let known: Vec<&str> = [own].into_iter().chain(others).take(NODES_IN_A_PROBLEM).collect();
            let detail = format!("node is {name:?}; it must be the name of a node here, such as {}", known.join(", "));
            Err(Problem::not_found("unknown_node", detail))
        }
        node => Ok(node),
    }
}

/// The names of nodes in the detail of a problem.
const NODES_IN_A_PROBLEM: usize = 5;

/// Returns the body of one device, as far as the caller may see it.
pub(super) fn device_body(app: &AppState, caller: &Caller, device: DeviceId) -> Option<DeviceBody> {
    let snapshot = app.authority.snapshot();
    let current = app.node.statistics().current();
    let state = snapshot.devices().find(|state| state.view.device == device)?;
    let find = |gpu_id| current.round.devices.iter().find(|device| device.gpu_id == gpu_id);
    Some(build_body(app, caller, &snapshot, &current, state, find))
}

fn last_event_id(app: &AppState, snapshot: &Snapshot) -> String {
    EventId { run: app.events.run().clone(), place: snapshot.event }.to_string()
}

/// Returns the seconds since the authority last confirmed its snapshot.
pub(super) fn pool_age_secs(app: &AppState) -> f64 {
    app.authority.snapshot_age().0 as f64 / 1000.0
}

fn build_body<'a>(
    app: &AppState,
    caller: &Caller,
    snapshot: &Snapshot,
    current: &'a CurrentStatistics,
    state: &DeviceState,
    find_listed: impl Fn(GpuId) -> Option<&'a ListedDevice>,
) -> DeviceBody {
    let node = snapshot.node_name(state.view.node);
    let iso = |time| clock::iso_of(time, snapshot.at);
    let mut body = view::device_body(&state.view, node, |lease| snapshot.lease(lease), iso);
    // Only the devices of this node are read here.
    match find_listed(state.view.gpu_id).filter(|_| node == app.node.name()) {
        Some(device) => add_readings(&mut body, device, current.round.is_stale(device)),
        None => body.stale = true,
    }
    for process in &mut body.processes {
        let lease = process.lease.and_then(|lease| snapshot.lease(LeaseId(lease)));
        ProcessDetail::of(caller, lease.map(|lease| &*lease.request.owner)).limit_process(process);
    }
    let names_process = matches!(state.view.health, DeviceHealth::ClaimedElsewhere(_));
    if names_process && ProcessDetail::of(caller, None) == ProcessDetail::ProgramName {
        body.health_reason = Some("leased by another agent of this machine".into());
    }
    body
}

fn add_readings(body: &mut DeviceBody, device: &ListedDevice, is_stale: bool) {
    let found = &device.found;
    body.memory_used_mib = found.memory.used_by_programs().value().map(|bytes| bytes.as_mib());
    body.utilization_percent = found.utilization.value().map(|percent| percent.as_number());
    body.power_w = found.power.value().map(|watts| watts.as_number());
    body.processes = device.processes.to_vec();
    body.processes_complete = found.processes.value().is_some();
    body.stale = is_stale;
}

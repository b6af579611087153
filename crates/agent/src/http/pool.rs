//! The pool as a whole, and each device with the leases on it: from the snapshot that the authority published last.

use axum::extract::State;
use gpupool_api::API_VERSION;
use gpupool_api::pool::{DeviceBody, DeviceList, PoolBody, PromisedAmount};
use gpupool_api::problem::ProblemBody;
use gpupool_api::view;
use gpupool_core::{DeviceId, LeaseState};
use serde::Deserialize;

use crate::authority::{DeviceState, NodeSummary, Snapshot};
use crate::clock;
use crate::events::EventId;
use crate::node::statistics::{CurrentStatistics, ListedDevice};

use super::problem::Problem;
use super::read::Query;
use super::{App, Shared};

/// The pool
///
/// `authority` is `agent`: this server decides who holds what.
#[utoipa::path(
    get, path = "/v1/pool", tag = "pool",
    responses(
        (status = 200, description = "How things stand", body = PoolBody),
        (status = "default", description = "Not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn pool(State(app): State<Shared>) -> axum::Json<PoolBody> {
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
        event_id: Some(event_id(&app, &snapshot)),
        age_secs: age_secs(&app),
    })
}

/// Devices
///
/// Each with what it reads, who holds it, and who uses it without holding it.
#[utoipa::path(
    get, path = "/v1/devices", tag = "pool",
    params(("node" = Option<String>, Query, description = "Only those of the node of this name")),
    responses(
        (status = 200, description = "Devices, by number", body = DeviceList),
        (status = "default", description = "Not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn devices(
    State(app): State<Shared>,
    Query(query): Query<DevicesQuery>,
) -> Result<axum::Json<DeviceList>, Problem> {
    let snapshot = app.authority.snapshot();
    let current = app.node.statistics().current();
    let is_wanted =
        |state: &&DeviceState| query.node.as_deref().is_none_or(|node| snapshot.node_name(state.view.node) == node);
    let wanted = snapshot.devices().filter(is_wanted);
    let mut devices: Vec<DeviceBody> = wanted.map(|state| body(&app, &snapshot, &current, state)).collect();
    devices.sort_by(|a, b| (&a.node, a.gpu_id).cmp(&(&b.node, b.gpu_id)));
    let (event_id, age_secs) = (Some(event_id(&app, &snapshot)), age_secs(&app));
    let timestamp = clock::iso(std::time::SystemTime::now());
    Ok(axum::Json(DeviceList { devices, timestamp, event_id, age_secs }))
}

#[derive(Deserialize)]
pub(super) struct DevicesQuery {
    node: Option<String>,
}

/// Returns one device as it is now.
pub(super) fn device_body(app: &App, device: DeviceId) -> Option<DeviceBody> {
    let snapshot = app.authority.snapshot();
    let state = snapshot.devices().find(|state| state.view.device == device)?;
    Some(body(app, &snapshot, &app.node.statistics().current(), state))
}

fn event_id(app: &App, snapshot: &Snapshot) -> String {
    EventId { run: app.events.run().clone(), place: snapshot.event }.to_string()
}

fn age_secs(app: &App) -> f64 {
    app.authority.snapshot_age().0 as f64 / 1000.0
}

fn body(app: &App, snapshot: &Snapshot, current: &CurrentStatistics, state: &DeviceState) -> DeviceBody {
    let node = snapshot.node_name(state.view.node);
    let iso = |time| clock::iso_of(time, snapshot.at);
    let mut body = view::device_body(&state.view, node, |lease| snapshot.lease(lease), iso);
    let listed = current.round.devices.iter().filter(|_| node == app.node.name());
    match listed.into_iter().find(|device| device.gpu_id == state.view.gpu_id) {
        Some(device) => add_readings(&mut body, device, current.round.is_stale(device)),
        None => body.stale = true,
    }
    body
}

/// Adds what the device itself reports.
fn add_readings(body: &mut DeviceBody, device: &ListedDevice, is_stale: bool) {
    let found = &device.found;
    body.memory_used_mib = found.memory.used_by_programs().value().map(|bytes| bytes.as_mib());
    body.utilization_percent = found.utilization.value().map(|percent| percent.as_number());
    body.power_w = found.power.value().map(|watts| watts.as_number());
    body.processes = device.processes.to_vec();
    body.processes_complete = found.processes.value().is_some();
    body.stale = is_stale;
}

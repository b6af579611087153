//! Who decides here, how things stand, and each device with who holds it.

use axum::extract::State;
use gpupool_api::API_VERSION;
use gpupool_api::pool::{Amount, Device, Devices, Pool};
use gpupool_api::problem::Problem as ProblemBody;
use gpupool_core::lease::LeaseState;

use crate::clock;
use crate::owner::{OwnerThread, device_body};
use crate::stats::Seen;

use super::problem::Problem;
use super::{App, Shared};

/// The pool
///
/// `authority` is `agent`: this server decides who holds what.
#[utoipa::path(
    get, path = "/v1/pool", tag = "pool",
    responses(
        (status = 200, description = "How things stand", body = Pool),
        (status = "default", description = "Not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn pool(State(app): State<Shared>) -> Result<axum::Json<Pool>, Problem> {
    let mut pool = app.owner.look(summed).await?;
    pool.node_id.clone_from(&app.node_id);
    pool.node.clone_from(&app.config.server.node_name);
    pool.run_id = app.events.run().to_string();
    pool.simulated = app.simulation.is_some();
    pool.confinement = app.groups.describe();
    Ok(axum::Json(pool))
}

fn summed(owner: &OwnerThread) -> Pool {
    let pool = owner.pool();
    let (mut devices, mut open, mut free, mut promised) = (0, 0, 0, 0.0);
    for view in pool.devices() {
        devices += 1;
        promised += view.promised.as_fraction();
        if view.closed.is_none() {
            open += 1;
            free += usize::from(view.promised.is_zero());
        }
    }
    let node = owner.node_id().and_then(|node| pool.node(node));
    let amount = |promised: f64, total: f64| Amount { promised, total };
    Pool {
        authority: "agent".into(),
        api_version: API_VERSION.into(),
        version: env!("CARGO_PKG_VERSION").into(),
        node_id: String::new(),
        node: String::new(),
        run_id: String::new(),
        simulated: false,
        devices,
        open_devices: open,
        free_devices: free,
        promised,
        active: pool.leases().filter(|lease| lease.state == LeaseState::Active).count(),
        waiting: pool.waiting(),
        next_token: pool.next_token().0,
        cpus: node.as_ref().map_or(amount(0.0, 0.0), |node| {
            amount(node.cpus_promised.0 as f64 / 1000.0, node.facts.cpus.0 as f64 / 1000.0)
        }),
        host_memory_mib: node.as_ref().map_or(amount(0.0, 0.0), |node| {
            amount(node.memory_promised.as_mib() as f64, node.facts.memory.as_mib() as f64)
        }),
        confinement: String::new(),
        timestamp: clock::iso(owner.at().wall),
        event_id: None,
        age_secs: 0.0,
    }
}

/// Devices
///
/// Each with what it reads, who holds it, and who uses it without holding it.
#[utoipa::path(
    get, path = "/v1/devices", tag = "pool",
    responses(
        (status = 200, description = "Devices, by number", body = Devices),
        (status = "default", description = "Not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn devices(State(app): State<Shared>) -> Result<axum::Json<Devices>, Problem> {
    let devices = device_bodies(&app).await?;
    Ok(axum::Json(Devices {
        devices,
        timestamp: clock::iso(std::time::SystemTime::now()),
        event_id: None,
        age_secs: 0.0,
    }))
}

pub(super) async fn device_bodies(app: &App) -> Result<Vec<Device>, Problem> {
    let bodies = app.owner.look(|owner| {
        let name = |node| owner.pool().node(node).map(|node| node.facts.name.to_string()).unwrap_or_default();
        let mut bodies: Vec<Device> =
            owner.pool().devices().map(|view| device_body(owner, &view, &name(view.node))).collect();
        bodies.sort_by_key(|body| body.gpu_id);
        bodies
    });
    let mut bodies = bodies.await?;
    let current = app.statistics.current();
    for body in &mut bodies {
        match current.round.devices.iter().find(|seen| seen.gpu_id.0 == body.gpu_id) {
            Some(seen) => read_in(body, seen, current.round.is_stale(seen)),
            None => body.stale = true,
        }
    }
    Ok(bodies)
}

/// What the device itself reports.
fn read_in(body: &mut Device, seen: &Seen, is_stale: bool) {
    let found = &seen.found;
    body.memory_used_mib = found.memory.used_by_programs().value().map(|bytes| bytes.as_mib());
    body.utilization_percent = found.utilization.value().map(|percent| percent.as_number());
    body.power_w = found.power.value().map(|watts| watts.as_number());
    body.processes = seen.processes.to_vec();
    body.processes_complete = found.processes.value().is_some();
    body.stale = is_stale;
}

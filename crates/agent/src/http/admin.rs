//! Routes for administrators: revoking leases, cordoning devices, and faults of simulated devices.

use axum::extract::State;
use axum::http::StatusCode;
use gpupool_api::lease::{LeaseBody, RevokeBody};
use gpupool_api::pool::DeviceBody;
use gpupool_api::problem::ProblemBody;
use gpupool_api::simulate::{FaultBody, FaultList};
use gpupool_core::{CordonState, DeviceIdentity, GpuId, Millis, PoolCommand};

use crate::identity::Caller;
use crate::node::{Simulation, SimulationError};

use super::caller::WriteAccess;
use super::extract::{JsonBody, LeasePath, NumberPath, QueryParameters};
use super::leases::ask_about_lease;
use super::pool::{NodeParameter, device_body};
use super::problem::Problem;
use super::tokens::check_is_admin;
use super::{AppState, SharedState};

/// The longest grace of a revoked lease.
const MAX_GRACE_SECS: f64 = 7.0 * 86_400.0;

/// Revoke a lease
///
/// For administrators. With a grace, the holder is informed and has that long to finish.
#[utoipa::path(
    post, path = "/v1/leases/{id}/revoke", operation_id = "revoke_lease", tag = "admin", request_body = RevokeBody,
    params(("id" = u64, Path, description = "The lease")),
    responses(
        (status = 200, description = "The lease", body = LeaseBody),
        (status = 409, description = "`ended`: it has ended already", body = ProblemBody, content_type = "application/problem+json"),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn revoke(
    State(app): State<SharedState>,
    WriteAccess(caller): WriteAccess,
    LeasePath(lease): LeasePath,
    JsonBody(body): JsonBody<RevokeBody>,
) -> Result<axum::Json<LeaseBody>, Problem> {
    if !(0.0..=MAX_GRACE_SECS).contains(&body.grace_secs) {
        return Err(Problem::field("grace_secs", body.grace_secs, format!("0..={MAX_GRACE_SECS}")));
    }
    let grace = Millis((body.grace_secs * 1000.0).round() as u64);
    ask_about_lease(&app, caller, PoolCommand::Revoke { lease, grace }).await.map(axum::Json)
}

/// Stop new work on a device
///
/// For administrators. Running work continues.
#[utoipa::path(
    post, path = "/v1/devices/{gpu_id}/cordon", tag = "admin",
    params(
        ("gpu_id" = u32, Path, description = "The device's number"),
        ("node" = Option<String>, Query, description = "The name of its node; the agent's own by default"),
    ),
    responses(
        (status = 200, description = "The device", body = DeviceBody),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn cordon(
    State(app): State<SharedState>,
    WriteAccess(caller): WriteAccess,
    NumberPath(number): NumberPath,
    QueryParameters(node): QueryParameters<NodeParameter>,
) -> Result<axum::Json<DeviceBody>, Problem> {
    set_cordon(&app, caller, number, &node, CordonState::Cordoned).await
}

/// Allow new work on a device again
///
/// For administrators.
#[utoipa::path(
    post, path = "/v1/devices/{gpu_id}/uncordon", tag = "admin",
    params(
        ("gpu_id" = u32, Path, description = "The device's number"),
        ("node" = Option<String>, Query, description = "The name of its node; the agent's own by default"),
    ),
    responses(
        (status = 200, description = "The device", body = DeviceBody),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn uncordon(
    State(app): State<SharedState>,
    WriteAccess(caller): WriteAccess,
    NumberPath(number): NumberPath,
    QueryParameters(node): QueryParameters<NodeParameter>,
) -> Result<axum::Json<DeviceBody>, Problem> {
    set_cordon(&app, caller, number, &node, CordonState::Open).await
}

async fn set_cordon(
    app: &AppState,
    caller: Caller,
    number: u64,
    node: &NodeParameter,
    cordon: CordonState,
) -> Result<axum::Json<DeviceBody>, Problem> {
    let snapshot = app.authority.snapshot();
    let node = node.known(app, &snapshot)?.unwrap_or(app.node.name());
    let unknown =
        || Problem::not_found("unknown_device", format!("there is no GPU {number} on {node}; see /v1/devices"));
    let gpu_id = GpuId(u32::try_from(number).map_err(|_| unknown())?);
    let device = snapshot.devices_of(node).find(|state| state.view.gpu_id == gpu_id).ok_or_else(unknown)?.view.device;
    app.authority.ask(caller.clone(), PoolCommand::Cordon { device, cordon }).await?;
    device_body(app, &caller, device).map(axum::Json).ok_or_else(unknown)
}

/// Faults in force
///
/// Only with simulated devices.
#[utoipa::path(
    get, path = "/v1/simulate/faults", operation_id = "list_faults", tag = "simulate",
    responses(
        (status = 200, description = "The faults in force, and all known faults", body = FaultList),
        (status = "default", description = "Devices are not simulated", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn list_faults(State(app): State<SharedState>) -> Result<axum::Json<FaultList>, Problem> {
    Ok(axum::Json(faults_in_force(&app, simulation_of(&app)?)))
}

/// Set or clear a fault
///
/// Only with simulated devices. The fault `null` clears.
#[utoipa::path(
    post, path = "/v1/simulate/faults", tag = "simulate", request_body = FaultBody,
    responses(
        (status = 200, description = "The faults in force", body = FaultList),
        (status = "default", description = "Devices are not simulated, there is no such fault or device, or not allowed", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn fault(
    State(app): State<SharedState>,
    WriteAccess(caller): WriteAccess,
    JsonBody(body): JsonBody<FaultBody>,
) -> Result<axum::Json<FaultList>, Problem> {
    let simulation = simulation_of(&app)?;
    check_is_admin(&caller)?;
    let current = app.node.statistics().current();
    let identity_of = |gpu_id: GpuId| -> Option<DeviceIdentity> {
        current.round.devices.iter().find(|device| device.gpu_id == gpu_id).map(|device| device.identity.clone())
    };
    simulation.fault(&body, identity_of).map_err(|error| match error {
        SimulationError::NoSuchGpu(_) => Problem::not_found("unknown_device", error.to_string()),
        _ => Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid", error.to_string()),
    })?;
    Ok(axum::Json(faults_in_force(&app, simulation)))
}

fn simulation_of(app: &AppState) -> Result<&Simulation, Problem> {
    let detail = "the devices of this agent are real; start an agent with gpupool serve --simulate to set faults";
    app.node.simulation().ok_or_else(|| Problem::not_found("not_simulated", detail))
}

fn faults_in_force(app: &AppState, simulation: &Simulation) -> FaultList {
    let current = app.node.statistics().current();
    let devices = &current.round.devices;
    simulation.faults(|identity| devices.iter().find(|device| device.identity == *identity).map(|device| device.gpu_id))
}

//! Routes for administrators: revoking leases, cordoning and forgetting devices, and faults of simulated devices.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use gpupool_api::lease::{LeaseBody, RevokeBody};
use gpupool_api::pool::DeviceBody;
use gpupool_api::problem::ProblemBody;
use gpupool_api::simulate::{FaultBody, FaultList};
use gpupool_core::{CordonState, DeviceId, DeviceIdentity, GpuId, Millis, PoolCommand, Revocation};

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
/// The longest reason of a revocation.
const MAX_REASON_BYTES: usize = 500;

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
    let reason = body.reason.as_deref().map(str::trim).filter(|reason| !reason.is_empty());
    if let Some(reason) =
        reason.filter(|reason| reason.len() > MAX_REASON_BYTES || reason.chars().any(char::is_control))
    {
        let allowed = format!("1..={MAX_REASON_BYTES} bytes without control characters");
        return Err(Problem::field("reason", format!("{reason:?}"), allowed));
    }
    let revocation = Revocation { by: caller.owner.clone(), reason: reason.map(Into::into) };
    let command = PoolCommand::Revoke { lease, grace, revocation: Some(Arc::new(revocation)) };
    ask_about_lease(&app, caller, command).await.map(axum::Json)
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
    let device = find_device(app, number, node)?;
    app.authority.ask(caller.clone(), PoolCommand::Cordon { device, cordon }).await?;
    device_body(app, &caller, device).map(axum::Json).ok_or_else(|| unknown_device(number, app.node.name()))
}

/// Returns the device with a number on a node.
fn find_device(app: &AppState, number: u64, node: &NodeParameter) -> Result<DeviceId, Problem> {
    let snapshot = app.authority.snapshot();
    let node = node.known(app, &snapshot)?.unwrap_or(app.node.name());
    let gpu_id = u32::try_from(number).ok().map(GpuId);
    let found = snapshot.devices_of(node).find(|state| Some(state.view.gpu_id) == gpu_id);
    found.map(|state| state.view.device).ok_or_else(|| unknown_device(number, node))
}

fn unknown_device(number: u64, node: &str) -> Problem {
    Problem::not_found("unknown_device", format!("there is no GPU {number} on {node}; see /v1/devices"))
}

/// Forget a device
///
/// For administrators. Only a device that is gone and holds no lease; if it returns, it is a new device.
#[utoipa::path(
    delete, path = "/v1/devices/{gpu_id}", operation_id = "forget_device", tag = "admin",
    params(
        ("gpu_id" = u32, Path, description = "The device's number"),
        ("node" = Option<String>, Query, description = "The name of its node; the agent's own by default"),
    ),
    responses(
        (status = 204, description = "The device is forgotten"),
        (status = 409, description = "`in_use`: it is present, or a lease holds it", body = ProblemBody, content_type = "application/problem+json"),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn forget(
    State(app): State<SharedState>,
    WriteAccess(caller): WriteAccess,
    NumberPath(number): NumberPath,
    QueryParameters(node): QueryParameters<NodeParameter>,
) -> Result<StatusCode, Problem> {
    check_is_admin(&caller)?;
    let device = find_device(&app, number, &node)?;
    app.authority.ask(caller, PoolCommand::ForgetDevice { device }).await?;
    Ok(StatusCode::NO_CONTENT)
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

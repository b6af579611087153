//! Faults on simulated devices.

use axum::extract::State;
use axum::http::StatusCode;
use gpupool_api::problem::ProblemBody;
use gpupool_api::simulate::{FaultBody, FaultList};
use gpupool_core::{DeviceIdentity, GpuId};

use crate::identity::Role;
use crate::node::{Simulation, SimulationError};

use super::caller::Changes;
use super::problem::Problem;
use super::read::Json;
use super::{App, Shared};

/// Faults in force
///
/// Only with simulated devices.
#[utoipa::path(
    get, path = "/v1/simulate/faults", operation_id = "list_faults", tag = "simulate",
    responses(
        (status = 200, description = "What is wrong, and what could be", body = FaultList),
        (status = "default", description = "Devices are not simulated", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn list(State(app): State<Shared>) -> Result<axum::Json<FaultList>, Problem> {
    Ok(axum::Json(faults(&app, simulation(&app)?)))
}

/// Let something go wrong, or mend it
///
/// Only with simulated devices. The fault `null` mends.
#[utoipa::path(
    post, path = "/v1/simulate/faults", tag = "simulate", request_body = FaultBody,
    responses(
        (status = 200, description = "What is wrong now", body = FaultList),
        (status = "default", description = "Devices are not simulated, there is no such fault or device, or not allowed", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn fault(
    State(app): State<Shared>,
    Changes(caller): Changes,
    Json(body): Json<FaultBody>,
) -> Result<axum::Json<FaultList>, Problem> {
    let simulation = simulation(&app)?;
    if caller.role != Role::Admin {
        return Err(Problem::forbidden("not_allowed", format!("{} is no administrator here", caller.owner)));
    }
    let devices = app.node.statistics().current();
    let identity_of = |gpu_id: GpuId| -> Option<DeviceIdentity> {
        devices.round.devices.iter().find(|seen| seen.gpu_id == gpu_id).map(|seen| seen.identity.clone())
    };
    simulation.fault(&body, identity_of).map_err(|error| match error {
        SimulationError::NoSuchGpu(_) => Problem::not_found("unknown_device", error.to_string()),
        _ => Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid", error.to_string()),
    })?;
    Ok(axum::Json(faults(&app, simulation)))
}

fn simulation(app: &App) -> Result<&Simulation, Problem> {
    let real =
        || Problem::not_found("not_simulated", "the devices of this agent are real (serve --simulate has others)");
    app.node.simulation().ok_or_else(real)
}

fn faults(app: &App, simulation: &Simulation) -> FaultList {
    let devices = app.node.statistics().current();
    simulation
        .faults(|identity| devices.round.devices.iter().find(|seen| seen.identity == *identity).map(|seen| seen.gpu_id))
}

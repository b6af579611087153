//! What administrators do: take leases back, stop and allow new work on devices.

use axum::extract::State;
use gpupool_api::lease::{LeaseBody, RevokeBody};
use gpupool_api::pool::DeviceBody;
use gpupool_api::problem::ProblemBody;
use gpupool_core::{CordonState, DeviceId, GpuId, Millis, PoolCommand};
use serde::Deserialize;

use crate::identity::Caller;

use super::caller::Changes;
use super::leases::ask;
use super::problem::Problem;
use super::read::{Json, LeaseInPath, NumberInPath, Query};
use super::{App, Shared, pool};

/// Longest time a holder can be given to finish.
const GRACE_SECS: f64 = 7.0 * 86_400.0;

/// Take a lease back
///
/// For administrators. With a grace its holder is told and has that long to finish.
#[utoipa::path(
    post, path = "/v1/leases/{id}/revoke", operation_id = "revoke_lease", tag = "admin", request_body = RevokeBody,
    params(("id" = u64, Path, description = "The lease")),
    responses(
        (status = 200, description = "The lease", body = LeaseBody),
        (status = 409, description = "`ended`: it is over already", body = ProblemBody, content_type = "application/problem+json"),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn revoke(
    State(app): State<Shared>,
    Changes(caller): Changes,
    LeaseInPath(lease): LeaseInPath,
    Json(body): Json<RevokeBody>,
) -> Result<axum::Json<LeaseBody>, Problem> {
    if !(0.0..=GRACE_SECS).contains(&body.grace_secs) {
        return Err(Problem::field("grace_secs", body.grace_secs, format!("0..={GRACE_SECS}")));
    }
    let grace = Millis((body.grace_secs * 1000.0).round() as u64);
    ask(&app, caller, PoolCommand::Revoke { lease, grace }).await.map(axum::Json)
}

/// Stop new work on a device
///
/// For administrators. What runs there goes on.
#[utoipa::path(
    post, path = "/v1/devices/{gpu_id}/cordon", tag = "admin",
    params(
        ("gpu_id" = u32, Path, description = "The device's number"),
        ("node" = Option<String>, Query, description = "The name of its node; the agent's own unless said"),
    ),
    responses(
        (status = 200, description = "The device", body = DeviceBody),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn cordon(
    State(app): State<Shared>,
    Changes(caller): Changes,
    NumberInPath(number): NumberInPath,
    Query(of): Query<NodeQuery>,
) -> Result<axum::Json<DeviceBody>, Problem> {
    set(&app, caller, number, of.node.as_deref(), CordonState::Cordoned).await
}

/// Allow new work on a device again
///
/// For administrators.
#[utoipa::path(
    post, path = "/v1/devices/{gpu_id}/uncordon", tag = "admin",
    params(
        ("gpu_id" = u32, Path, description = "The device's number"),
        ("node" = Option<String>, Query, description = "The name of its node; the agent's own unless said"),
    ),
    responses(
        (status = 200, description = "The device", body = DeviceBody),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn uncordon(
    State(app): State<Shared>,
    Changes(caller): Changes,
    NumberInPath(number): NumberInPath,
    Query(of): Query<NodeQuery>,
) -> Result<axum::Json<DeviceBody>, Problem> {
    set(&app, caller, number, of.node.as_deref(), CordonState::Open).await
}

/// The node of a device.
#[derive(Deserialize)]
pub(super) struct NodeQuery {
    node: Option<String>,
}

async fn set(
    app: &App,
    caller: Caller,
    number: u64,
    node: Option<&str>,
    cordon: CordonState,
) -> Result<axum::Json<DeviceBody>, Problem> {
    let node = node.unwrap_or(app.node.name());
    let unknown = || Problem::not_found("unknown_device", format!("there is no GPU {number} on {node}"));
    let gpu_id = GpuId(u32::try_from(number).map_err(|_| unknown())?);
    let device = find_device(app, node, gpu_id).ok_or_else(unknown)?;
    app.authority.ask(caller, PoolCommand::Cordon { device, cordon }).await?;
    pool::device_body(app, device).map(axum::Json).ok_or_else(unknown)
}

fn find_device(app: &App, node: &str, gpu_id: GpuId) -> Option<DeviceId> {
    let snapshot = app.authority.snapshot();
    let found = snapshot.devices_of(node).find(|state| state.view.gpu_id == gpu_id);
    found.map(|state| state.view.device)
}

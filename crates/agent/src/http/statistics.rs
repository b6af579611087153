//! The statistics routes: bodies that were prepared when the devices were last read. Also `/health` and `/config`.

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use gpupool_api::stats::{GpuCountBody, GpuFiltering, GpuHistoryBody, HealthBody, StatsBody, SummaryBody};
use serde::Serialize;

use crate::authority::StoreState;
use crate::limits::SNAPSHOT_OLD;
use crate::node::statistics::{HealthStatus, PreparedResponse};

use super::SharedState;
use super::pool::pool_age_secs;

/// GPUs in detail
#[utoipa::path(
    get, path = "/gpu/stats", tag = "statistics",
    responses(
        (status = 200, description = "All listed GPUs", body = StatsBody),
        (status = 503, description = "GPUs could not be read; see `error`", body = StatsBody),
    )
)]
pub(super) async fn stats(State(app): State<SharedState>) -> Response {
    prepared_response(app.node.statistics().stats())
}

/// Number of GPUs
#[utoipa::path(
    get, path = "/gpu/count", tag = "statistics",
    responses(
        (status = 200, description = "The number of listed GPUs", body = GpuCountBody),
        (status = 503, description = "GPUs could not be read", body = GpuCountBody),
    )
)]
pub(super) async fn count(State(app): State<SharedState>) -> Response {
    prepared_response(app.node.statistics().count())
}

/// Summary of GPUs
#[utoipa::path(
    get, path = "/gpu/summary", tag = "statistics",
    responses(
        (status = 200, description = "Sums, and a summary of each GPU", body = SummaryBody),
        (status = 503, description = "GPUs could not be read; see `error`", body = SummaryBody),
    )
)]
pub(super) async fn summary(State(app): State<SharedState>) -> Response {
    prepared_response(app.node.statistics().summary())
}

/// Recent readings
#[utoipa::path(
    get, path = "/gpu/history", tag = "statistics",
    responses(
        (status = 200, description = "The recent readings of each GPU, oldest first", body = GpuHistoryBody),
        (status = 503, description = "GPUs could not be read", body = GpuHistoryBody),
    )
)]
pub(super) async fn history(State(app): State<SharedState>) -> Response {
    prepared_response(app.node.statistics().history())
}

fn prepared_response(prepared: PreparedResponse) -> Response {
    let mut response = Response::new(Body::from(prepared.body));
    *response.status_mut() = StatusCode::from_u16(prepared.status).unwrap_or(StatusCode::OK);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Health of the agent
#[utoipa::path(
    get, path = "/health", tag = "statistics",
    responses(
        (status = 200, description = "Healthy, or degraded: see `problems`", body = HealthBody),
        (status = 503, description = "Unhealthy: no device can be read, or no lease can be stored", body = HealthBody),
    )
)]
pub(super) async fn health(State(app): State<SharedState>) -> (StatusCode, axum::Json<HealthBody>) {
    let devices = app.node.statistics().health();
    let mut problems = devices.problems;
    let age = app.authority.snapshot_age();
    let state = app.authority.snapshot().store.clone();
    let store = if age >= SNAPSHOT_OLD { "unknown" } else { state.name() };
    match state {
        _ if store == "unknown" => problems.push(format!(
            "the authority has not responded for {age}; it may be waiting for its disk, and no lease can be granted or released"
        )),
        StoreState::Fine => {}
        StoreState::Full(reason) => problems.push(format!("the disk is full, leases can only be released: {reason}")),
        StoreState::Broken(reason) => problems.push(format!("leases cannot be stored: {reason}")),
    }
    let status = match (devices.status, store) {
        (HealthStatus::Unhealthy, _) | (_, "broken") => HealthStatus::Unhealthy,
        (HealthStatus::Degraded, _) | (_, "full" | "unknown") => HealthStatus::Degraded,
        (HealthStatus::Healthy, _) => HealthStatus::Healthy,
    };
    let code = if status == HealthStatus::Unhealthy { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    let body = HealthBody {
        status: status.name().into(),
        nvidia_smi_available: devices.nvidia_smi_available,
        timestamp: devices.timestamp,
        problems,
        sources: devices.sources,
        reading_age_secs: devices.reading_age_secs,
        store: store.into(),
        pool_age_secs: pool_age_secs(&app),
        open: app.config.server.open,
        version: env!("CARGO_PKG_VERSION").into(),
        uptime_secs: app.started.elapsed().as_secs_f64(),
    };
    (code, axum::Json(body))
}

/// The body of `GET /config`.
#[derive(Serialize, utoipa::ToSchema)]
pub(super) struct ConfigBody {
    /// The listeners and the log.
    #[schema(value_type = Object)]
    server: serde_json::Value,
    /// The HTTP interface.
    #[schema(value_type = Object)]
    api: serde_json::Value,
    /// The readings of GPUs.
    #[schema(value_type = Object)]
    monitoring: serde_json::Value,
    /// The filter of listed GPUs.
    gpu_filtering: GpuFiltering,
}

/// Configuration of the agent
#[utoipa::path(
    get, path = "/config", tag = "statistics",
    responses((status = 200, description = "The settings in force", body = ConfigBody))
)]
pub(super) async fn config(State(app): State<SharedState>) -> axum::Json<ConfigBody> {
    let mut contract = app.config.to_contract_config(app.port, env!("CARGO_PKG_VERSION"));
    axum::Json(ConfigBody {
        server: contract["server"].take(),
        api: contract["api"].take(),
        monitoring: contract["monitoring"].take(),
        gpu_filtering: app.node.statistics().gpu_filtering(),
    })
}

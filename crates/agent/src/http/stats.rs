//! The statistics routes: what was prepared when devices were last read.

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use gpupool_api::stats::{GpuCountBody, GpuFiltering, GpuHistoryBody, HealthBody, StatsBody, SummaryBody};
use serde::Serialize;

use crate::authority::StoreState;
use crate::limits::SNAPSHOT_OLD;
use crate::node::statistics::{HealthStatus, PreparedResponse};

use super::Shared;

/// GPUs in full
#[utoipa::path(
    get, path = "/gpu/stats", tag = "statistics",
    responses(
        (status = 200, description = "Every GPU that is listed", body = StatsBody),
        (status = 503, description = "GPUs could not be read; `error` says why", body = StatsBody),
    )
)]
pub(super) async fn stats(State(app): State<Shared>) -> Response {
    handed(app.node.statistics().stats())
}

/// How many GPUs
#[utoipa::path(
    get, path = "/gpu/count", tag = "statistics",
    responses(
        (status = 200, description = "How many are listed", body = GpuCountBody),
        (status = 503, description = "GPUs could not be read", body = GpuCountBody),
    )
)]
pub(super) async fn count(State(app): State<Shared>) -> Response {
    handed(app.node.statistics().count())
}

/// GPUs in short
#[utoipa::path(
    get, path = "/gpu/summary", tag = "statistics",
    responses(
        (status = 200, description = "Sums, and every GPU in short", body = SummaryBody),
        (status = 503, description = "GPUs could not be read; `error` says why", body = SummaryBody),
    )
)]
pub(super) async fn summary(State(app): State<Shared>) -> Response {
    handed(app.node.statistics().summary())
}

/// The last readings
#[utoipa::path(
    get, path = "/gpu/history", tag = "statistics",
    responses(
        (status = 200, description = "The last readings of each GPU, oldest first", body = GpuHistoryBody),
        (status = 503, description = "GPUs could not be read", body = GpuHistoryBody),
    )
)]
pub(super) async fn history(State(app): State<Shared>) -> Response {
    handed(app.node.statistics().history())
}

fn handed(prepared: PreparedResponse) -> Response {
    let mut response = Response::new(Body::from(prepared.body));
    *response.status_mut() = StatusCode::from_u16(prepared.status).unwrap_or(StatusCode::OK);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// How the agent is
#[utoipa::path(
    get, path = "/health", tag = "statistics",
    responses(
        (status = 200, description = "Healthy, or degraded: it answers, and says what is wrong", body = HealthBody),
        (status = 503, description = "Unhealthy: nothing can be read, or nothing can be kept", body = HealthBody),
    )
)]
pub(super) async fn health(State(app): State<Shared>) -> (StatusCode, axum::Json<HealthBody>) {
    let read = app.node.statistics().health();
    let mut problems = read.problems.clone();
    let age = app.authority.snapshot_age();
    let store = match &app.authority.snapshot().store {
        _ if age >= SNAPSHOT_OLD => {
            let why = "the authority has not answered for";
            problems.push(format!("{why} {age}; it may wait for its disk, and no lease can be granted or released"));
            "unknown"
        }
        StoreState::Fine => "ok",
        StoreState::Full(why) => {
            problems.push(format!("the disk is full, GPUs are only given back: {why}"));
            "full"
        }
        StoreState::Broken(why) => {
            problems.push(format!("leases cannot be kept: {why}"));
            "broken"
        }
    };
    let status = match (read.status, store) {
        (HealthStatus::Unhealthy, _) | (_, "broken") => HealthStatus::Unhealthy,
        (HealthStatus::Degraded, _) | (_, "full" | "unknown") => HealthStatus::Degraded,
        (HealthStatus::Healthy, _) => HealthStatus::Healthy,
    };
    let code = if status == HealthStatus::Unhealthy { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    let body = HealthBody {
        status: status.name().into(),
        nvidia_smi_available: read.nvidia_smi_available,
        timestamp: read.timestamp,
        problems,
        sources: read.sources,
        reading_age_secs: read.reading_age_secs,
        store: store.into(),
        open: app.config.server.open,
        version: env!("CARGO_PKG_VERSION").into(),
        uptime_secs: app.started.elapsed().as_secs_f64(),
    };
    (code, axum::Json(body))
}

/// The body of `GET /config`.
#[derive(Serialize, utoipa::ToSchema)]
pub(super) struct ConfigBody {
    /// Where and how it listens.
    #[schema(value_type = Object)]
    server: serde_json::Value,
    /// What it answers.
    #[schema(value_type = Object)]
    api: serde_json::Value,
    /// How GPUs are read.
    #[schema(value_type = Object)]
    monitoring: serde_json::Value,
    /// Which GPUs are listed.
    gpu_filtering: GpuFiltering,
}

/// How the agent was set up
#[utoipa::path(
    get, path = "/config", tag = "statistics",
    responses((status = 200, description = "What is in force", body = ConfigBody))
)]
pub(super) async fn config(State(app): State<Shared>) -> axum::Json<ConfigBody> {
    let mut contract = app.config.to_contract_config(app.port, env!("CARGO_PKG_VERSION"));
    axum::Json(ConfigBody {
        server: contract["server"].take(),
        api: contract["api"].take(),
        monitoring: contract["monitoring"].take(),
        gpu_filtering: app.node.statistics().gpu_filtering(),
    })
}

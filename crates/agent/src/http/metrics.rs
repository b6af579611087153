//! Metrics for Prometheus.

use axum::extract::State;

use super::Shared;

/// Metrics
///
/// In the text form of Prometheus.
#[utoipa::path(
    get, path = "/metrics", tag = "statistics",
    responses((status = 200, description = "Metrics", body = String, content_type = "text/plain"))
)]
pub(super) async fn metrics(State(app): State<Shared>) -> String {
    app.metrics.encode()
}

//! Metrics for Prometheus.

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::IntoResponse;

use crate::clock;
use crate::metrics::{Form, Scrape};

use super::Shared;

/// Metrics
///
/// For Prometheus: OpenMetrics where `Accept` names it, else the older text form. Every name is explained in
/// `docs/metrics.md`.
#[utoipa::path(
    get, path = "/metrics", tag = "statistics",
    responses((status = 200, description = "Metrics", content(
        (String = "text/plain"),
        (String = "application/openmetrics-text"),
    )))
)]
pub(super) async fn metrics(State(app): State<Shared>, headers: HeaderMap) -> impl IntoResponse {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let form = Form::accepted(accept.unwrap_or_default());
    let scrape = Scrape {
        metrics: app.metrics.clone(),
        current: app.node.statistics().current(),
        snapshot: Some(app.authority.snapshot()),
        node: app.node.name().to_owned(),
        now: clock::now(),
    };
    ([(header::CONTENT_TYPE, form.media_type()), (header::VARY, "accept")], scrape.encode(form))
}

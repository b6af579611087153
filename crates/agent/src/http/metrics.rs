//! Metrics for Prometheus.

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::IntoResponse;

use crate::clock;
use crate::limits::SCRAPE_PATIENCE;
use crate::metrics::{Form, Scrape, Stand};

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
    // While a disk hangs, the rest can still be told: that is when it is needed most.
    let stand = tokio::time::timeout(SCRAPE_PATIENCE, app.owner.look(Stand::of)).await;
    let scrape = Scrape {
        metrics: app.metrics.clone(),
        current: app.statistics.current(),
        stand: stand.ok().and_then(Result::ok),
        node: app.config.server.node_name.clone(),
        now: clock::now(),
    };
    ([(header::CONTENT_TYPE, form.media_type()), (header::VARY, "accept")], scrape.encode(form))
}

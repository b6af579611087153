//! The front door: what can be asked, for programs; a page for people.

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{Html, IntoResponse, Response};
use gpupool_api::stats::Root;

use super::Shared;

/// What this is
///
/// A list of routes for programs, a page for browsers (`Accept: text/html`).
#[utoipa::path(
    get, path = "/", tag = "statistics",
    responses((status = 200, description = "What can be asked", body = Root))
)]
pub(super) async fn root(State(app): State<Shared>, headers: HeaderMap) -> Response {
    let wants_page = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    if wants_page.is_some_and(|accept| accept.contains("text/html")) {
        return Html(include_str!("page.html")).into_response();
    }
    let endpoints = app.routes.iter().map(|(route, what)| (route.clone(), what.clone())).collect();
    let message = format!("{}: statistics and leases of GPUs", app.config.api.title);
    axum::Json(Root { message, version: env!("CARGO_PKG_VERSION").into(), endpoints }).into_response()
}

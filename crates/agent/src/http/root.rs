//! The front door: what can be asked, for programs; a page for people.

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use gpupool_api::stats::RootBody;

use super::Shared;
use super::browser::page;

/// Stands in the page where the one word stands that lets its own script and style run.
const NONCE: &str = "NONCE";

/// What this is
///
/// A list of routes for programs, a page for browsers (`Accept: text/html`).
#[utoipa::path(
    get, path = "/", tag = "statistics",
    responses((status = 200, description = "What can be asked", content(
        (RootBody = "application/json"),
        (String = "text/html"),
    )))
)]
pub(super) async fn root(State(app): State<Shared>, headers: HeaderMap) -> Response {
    let wants_page = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    if wants_page.is_some_and(|accept| accept.contains("text/html")) {
        return front_page();
    }
    let endpoints = app.routes.iter().map(|(route, what)| (route.clone(), what.clone())).collect();
    let message = format!("{}: statistics and leases of GPUs", app.config.api.title);
    let body = axum::Json(RootBody { message, version: env!("CARGO_PKG_VERSION").into(), endpoints });
    ([(header::VARY, "accept")], body).into_response()
}

/// The page, which may run and load nothing but what is in it and what this agent answers.
fn front_page() -> Response {
    let nonce = nonce();
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let html = include_str!("page.html").replace(NONCE, &nonce);
    // Letters, digits and signs only, so it is a header.
    page(html, HeaderValue::from_str(&policy).unwrap_or(HeaderValue::from_static("default-src 'none'")))
}

fn nonce() -> String {
    let mut bytes = [0_u8; 16];
    // The page shows nothing that others wrote as markup: without random bytes it is as safe, only less guarded.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    format!("{:032x}", u128::from_le_bytes(bytes))
}

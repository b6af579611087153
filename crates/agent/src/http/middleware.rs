//! The layer around every request: its number, the refusal of foreign pages, CORS headers, counters, and the access log.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use tracing::Instrument;
use tracing::field::Empty;

use crate::net::{Peer, PeerTransport};

use super::browser::check_request;
use super::{AppState, SharedState};

pub(super) fn add(router: Router<SharedState>, app: &SharedState) -> Router<SharedState> {
    router.layer(from_fn_with_state(app.clone(), handle))
}

/// The number of the next request.
static NEXT_REQUEST: AtomicU64 = AtomicU64::new(1);

async fn handle(State(app): State<SharedState>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let _in_flight = app.metrics.begin();
    let route = request.extensions().get::<MatchedPath>().cloned();
    let method = request.method().clone();
    let allows_cors = app.config.api.enable_cors && route.as_ref().is_some_and(|route| is_public(route.as_str(), &app));
    let log_entry = app.config.server.access_log.then(|| AccessLogEntry::new(&request));
    // Every log line of the request carries its number, and the lease once it is known.
    let number = NEXT_REQUEST.fetch_add(1, Ordering::Relaxed);
    let span = tracing::info_span!("request", request = number, lease = Empty);
    let checked = check_request(&request, route.as_ref().map(MatchedPath::as_str), &app);
    let mut response = match checked {
        Err(problem) => problem.into_response(),
        Ok(()) if allows_cors && method == Method::OPTIONS => StatusCode::NO_CONTENT.into_response(),
        Ok(()) => next.run(request).instrument(span.clone()).await,
    };
    if allows_cors {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        if method == Method::OPTIONS {
            headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, HEAD, OPTIONS"));
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("*"));
        }
    }
    let took = started.elapsed();
    let name = route.as_ref().map_or("unknown", MatchedPath::as_str);
    app.metrics.answered(&method, name, response.status(), took);
    if let Some(entry) = log_entry {
        let _entered = span.entered();
        let (status, micros) = (response.status().as_u16(), u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
        tracing::info!(target: "access", %method, path = entry.path, from = entry.from, status, micros);
    }
    response
}

/// Whether pages of other sites may read the route: only statistics, which are public anyway.
fn is_public(route: &str, app: &Arc<AppState>) -> bool {
    let route = route.strip_prefix(app.config.api.api_prefix.as_str()).unwrap_or(route);
    route.starts_with("/gpu/") || route == "/health" || route == "/openapi.json"
}

/// The logged part of a request: never its query or headers, which could hold secrets.
struct AccessLogEntry {
    path: String,
    from: String,
}

impl AccessLogEntry {
    fn new(request: &Request) -> Self {
        let from = match request.extensions().get::<Peer>().map(Peer::transport) {
            Some(PeerTransport::Tcp { remote, .. }) => remote.to_string(),
            Some(PeerTransport::Unix) => "unix".into(),
            None => "unknown".into(),
        };
        Self { path: request.uri().path().to_owned(), from }
    }
}

//! The frame around every request: its number, headers for browsers, counting, and the access log.

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

use crate::net::{Peer, Transport};

use super::{App, Shared};

pub(super) fn add(router: Router<Shared>, app: &Shared) -> Router<Shared> {
    router.layer(from_fn_with_state(app.clone(), around))
}

/// The number of the next request.
static REQUESTS: AtomicU64 = AtomicU64::new(1);

async fn around(State(app): State<Shared>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let _running = app.metrics.begin();
    let route = request.extensions().get::<MatchedPath>().cloned();
    let method = request.method().clone();
    let shares = app.config.api.enable_cors && route.as_ref().is_some_and(|route| is_shared(route.as_str(), &app));
    let logged = app.config.server.access_log.then(|| Logged::of(&request));
    // Everything that is logged on behalf of the request carries its number, and the lease once that is known.
    let number = REQUESTS.fetch_add(1, Ordering::Relaxed);
    let span = tracing::info_span!("request", request = number, lease = Empty);
    let mut response = if shares && method == Method::OPTIONS {
        StatusCode::NO_CONTENT.into_response()
    } else {
        next.run(request).instrument(span.clone()).await
    };
    if shares {
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
    if let Some(logged) = logged {
        let _entered = span.entered();
        let (status, micros) = (response.status().as_u16(), u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
        tracing::info!(target: "access", %method, path = logged.path, from = logged.from, status, micros);
    }
    response
}

/// Whether pages of other sites may read it: statistics, which everybody may.
fn is_shared(route: &str, app: &Arc<App>) -> bool {
    let route = route.strip_prefix(app.config.api.api_prefix.as_str()).unwrap_or(route);
    route.starts_with("/gpu/") || route == "/health" || route == "/openapi.json"
}

/// What the log says of a request: never its query or headers, where secrets could be.
struct Logged {
    path: String,
    from: String,
}

impl Logged {
    fn of(request: &Request) -> Self {
        let from = match request.extensions().get::<Peer>().map(Peer::transport) {
            Some(Transport::Tcp { remote, .. }) => remote.to_string(),
            Some(Transport::Unix) => "unix".into(),
            None => "unknown".into(),
        };
        Self { path: request.uri().path().to_owned(), from }
    }
}

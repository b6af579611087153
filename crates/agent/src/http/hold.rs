//! A connection that is the lease: while it is open the lease lives, when it closes the lease is released.

use std::convert::Infallible;
use std::pin::Pin;

use axum::body::Body;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream::unfold;
use gpupool_api::lease::Lease;
use gpupool_api::problem::Problem as ProblemBody;
use gpupool_core::lease::Holder;
use gpupool_core::{Command, LeaseId, Millis, Token};
use serde::Deserialize;

use crate::identity::Caller;
use crate::limits::HOLD_BEAT;

use super::Shared;
use super::caller::Changes;
use super::leases::{ask, look_at};
use super::problem::Problem;
use super::read::{LeaseInPath, Query};

/// Hold a lease by a connection
///
/// The answer is a stream of lines that stays open: the lease as JSON first, an empty line every few seconds, and the lease
/// once more when it is over. While the stream is open the lease needs no renewal. Closing it releases the lease; when
/// the agent is restarted, there is a short grace to hold it again.
#[utoipa::path(
    get, path = "/v1/leases/{id}/hold", tag = "leases",
    params(
        ("id" = u64, Path, description = "The lease"),
        ("token" = u64, Query, description = "The token the lease was granted with"),
    ),
    responses(
        (status = 200, description = "Lines of JSON, as long as the lease lives", body = Lease, content_type = "application/x-ndjson"),
        (status = 409, description = "`stale`, `ended` or `not_granted`", body = ProblemBody, content_type = "application/problem+json"),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn hold(
    State(app): State<Shared>,
    Changes(caller): Changes,
    LeaseInPath(lease): LeaseInPath,
    Query(query): Query<HoldQuery>,
) -> Result<Response, Problem> {
    let attach = Command::Attach { lease, token: Token(query.token), holder: Holder::Connection };
    let held = Held::new(app.clone(), lease);
    let first = ask(&app, caller.clone(), attach).await?;
    let owner = app.owner.clone();
    let ended = Box::pin(async move { drop(owner.wait_for_end(lease).await) });
    let lines = Lines { held, caller, ended, first: Some(first), over: false };
    let stream = Box::pin(unfold(lines, Lines::next));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(stream)).into_response())
}

#[derive(Deserialize)]
pub(super) struct HoldQuery {
    token: u64,
}

/// One open connection; the last one of a lease to close releases it, unless the agent itself is going.
struct Held {
    app: Shared,
    lease: LeaseId,
}

impl Held {
    fn new(app: Shared, lease: LeaseId) -> Self {
        app.holders.connection_opened(lease);
        Self { app, lease }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let was_last = self.app.holders.connection_closed(self.lease);
        if was_last && !self.app.shutdown.has_begun() {
            // Also where it was refused: another connection may have closed meanwhile. A lease that something else
            // holds is left alone.
            self.app.holders.gone(self.lease, Holder::Connection, Millis(0));
        }
    }
}

struct Lines {
    held: Held,
    caller: Caller,
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
    first: Option<Lease>,
    over: bool,
}

impl Lines {
    async fn next(mut self) -> Option<(Result<Bytes, Infallible>, Self)> {
        if self.over {
            return None;
        }
        if let Some(first) = self.first.take() {
            return Some((Ok(line(&first)), self));
        }
        let app = self.held.app.clone();
        tokio::select! {
            () = tokio::time::sleep(HOLD_BEAT) => return Some((Ok(Bytes::from_static(b"\n")), self)),
            () = app.shutdown.begun() => return None,
            () = &mut self.ended => {}
        }
        self.over = true;
        let lease = look_at(&app, &self.caller, self.held.lease).await.ok()?;
        Some((Ok(line(&lease)), self))
    }
}

fn line(lease: &Lease) -> Bytes {
    let mut line = serde_json::to_vec(lease).unwrap_or_default();
    line.push(b'\n');
    line.into()
}

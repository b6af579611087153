//! A connection that is the lease: while it is open the lease lives, when it closes the lease is released.

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream::unfold;
use gpupool_api::lease::LeaseBody;
use gpupool_api::problem::ProblemBody;
use gpupool_core::{LeaseHolder, LeaseId, Token};
use serde::Deserialize;

use crate::authority::Refusal;
use crate::identity::Caller;
use crate::limits::HOLD_BEAT;
use crate::messages::{LeaseAttachment, NodeReport};

use super::Shared;
use super::caller::Changes;
use super::leases::with_environment;
use super::problem::Problem;
use super::read::{LeaseInPath, Query};

/// The number of open connections that hold each lease.
#[derive(Clone, Default)]
pub struct HeldConnections {
    /// A lock: it is held for one look.
    open: Arc<Mutex<HashMap<LeaseId, usize>>>,
}

impl HeldConnections {
    fn open(&self, lease: LeaseId) {
        *self.lock().entry(lease).or_default() += 1;
    }

    /// Notes that a connection closed. Returns whether it was the last one of its lease.
    fn close(&self, lease: LeaseId) -> bool {
        let mut open = self.lock();
        let Some(count) = open.get_mut(&lease) else { return false };
        *count -= 1;
        if *count > 0 {
            return false;
        }
        open.remove(&lease);
        true
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<LeaseId, usize>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

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
        (status = 200, description = "Lines of JSON, as long as the lease lives", body = LeaseBody, content_type = "application/x-ndjson"),
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
    let attachment = LeaseAttachment {
        lease,
        token: Token(query.token),
        holder: LeaseHolder::Connection,
        has_process: false,
        has_cgroup: false,
    };
    let held = Held::new(app.clone(), lease);
    let first = with_environment(&app, app.authority.attach(caller.clone(), attachment).await?);
    let authority = app.authority.clone();
    let ended = Box::pin(async move { drop(authority.wait_for_end(lease).await) });
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
        app.held_connections.open(lease);
        Self { app, lease }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let was_last = self.app.held_connections.close(self.lease);
        if !was_last || self.app.shutdown.has_begun() {
            return;
        }
        // Also where the attachment was refused: another connection may have closed meanwhile. A lease with another holder is
        // left alone.
        let report = NodeReport::HolderGone { lease: self.lease, holder: LeaseHolder::Connection };
        let authority = self.app.authority.clone();
        if authority.report(report.clone()) == Err(Refusal::Busy) {
            // Ends as soon as the authority has room for the report, or has ended.
            tokio::spawn(async move {
                while authority.report(report.clone()) == Err(Refusal::Busy) {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            });
        }
    }
}

struct Lines {
    held: Held,
    caller: Caller,
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
    first: Option<LeaseBody>,
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
        let (caller, lease) = (self.caller.clone(), self.held.lease);
        let lease = app.authority.follow_lease(caller, lease, Duration::ZERO).await.ok()?;
        Some((Ok(line(&lease)), self))
    }
}

fn line(lease: &LeaseBody) -> Bytes {
    let mut line = serde_json::to_vec(lease).unwrap_or_default();
    line.push(b'\n');
    line.into()
}

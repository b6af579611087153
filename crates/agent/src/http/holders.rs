//! Ways to keep a lease without renewals: an open connection, or a process of this machine.

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream::unfold;
use gpupool_api::lease::{AttachBody, AttachResponse, FencingTokenBody, LeaseBody};
use gpupool_api::problem::ProblemBody;
use gpupool_core::{LeaseHolder, LeaseId, Token};

use crate::authority::Refusal;
use crate::identity::Caller;
use crate::limits::HOLD_BEAT;
use crate::messages::{LeaseAttachment, NodeReport};
use crate::net::Peer;
use crate::node::AttachError;

use super::SharedState;
use super::caller::WriteAccess;
use super::extract::{JsonBody, LeasePath};
use super::leases::with_environment;
use super::problem::Problem;

/// The pause before a message is sent again to an authority that was busy.
const BUSY_PAUSE: Duration = Duration::from_millis(50);

/// The number of open connections that hold each lease.
#[derive(Clone, Default)]
pub(crate) struct HeldConnections {
    /// A lock rather than a channel: it is held for one access to the map.
    open: Arc<Mutex<HashMap<LeaseId, usize>>>,
}

impl HeldConnections {
    fn open(&self, lease: LeaseId) {
        *self.lock().entry(lease).or_default() += 1;
    }

    /// Counts a closed connection. Returns whether it was the last one of its lease.
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
/// The response is a stream of lines that stays open: first the lease as JSON, then an empty line every few seconds,
/// and the lease again when it has ended. While the stream is open the lease needs no renewal. Closing it releases the
/// lease; after a restart of the agent there is a short grace to hold it again. A lease that a
/// process or its jobs hold cannot be held by a connection.
#[utoipa::path(
    post, path = "/v1/leases/{id}/hold", tag = "leases", request_body = FencingTokenBody,
    params(("id" = u64, Path, description = "The lease")),
    responses(
        (status = 200, description = "Lines of JSON until the lease ends", body = LeaseBody, content_type = "application/x-ndjson"),
        (status = 409, description = "`stale`, `ended`, `not_granted` or `held`", body = ProblemBody, content_type = "application/problem+json"),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn hold(
    State(app): State<SharedState>,
    WriteAccess(caller): WriteAccess,
    LeasePath(lease): LeasePath,
    JsonBody(body): JsonBody<FencingTokenBody>,
) -> Result<Response, Problem> {
    let attachment = LeaseAttachment {
        lease,
        token: Token(body.token),
        holder: LeaseHolder::Connection,
        has_process: false,
        has_cgroup: false,
    };
    let holder = ConnectionHolder::new(app.clone(), lease);
    let first = with_environment(&app, app.authority.attach(caller.clone(), attachment).await?);
    let stream =
        HoldStream { ended: Box::pin(wait_for_end(app, caller, lease)), holder, first: Some(first), over: false };
    let lines = Box::pin(unfold(stream, HoldStream::next));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response())
}

/// Waits until a lease has ended, and returns it. Repeats the call while the authority is busy: the connection holds
/// the lease meanwhile.
async fn wait_for_end(app: SharedState, caller: Caller, lease: LeaseId) -> Result<LeaseBody, Refusal> {
    let authority = &app.authority;
    while_busy(|| authority.wait_for_end(lease)).await?;
    while_busy(|| authority.follow_lease(caller.clone(), lease, Duration::ZERO)).await
}

/// Repeats a call until the authority is not busy.
async fn while_busy<T, F: Future<Output = Result<T, Refusal>>>(mut send: impl FnMut() -> F) -> Result<T, Refusal> {
    loop {
        match send().await {
            Err(Refusal::Busy) => tokio::time::sleep(BUSY_PAUSE).await,
            outcome => return outcome,
        }
    }
}

/// An open connection that holds a lease. The last one of a lease to close releases it, unless the agent is stopping.
struct ConnectionHolder {
    app: SharedState,
    lease: LeaseId,
}

impl ConnectionHolder {
    fn new(app: SharedState, lease: LeaseId) -> Self {
        app.held_connections.open(lease);
        Self { app, lease }
    }
}

impl Drop for ConnectionHolder {
    fn drop(&mut self) {
        let was_last = self.app.held_connections.close(self.lease);
        if !was_last || self.app.shutdown.has_begun() {
            return;
        }
        // Also after a refused attachment: another connection may have closed meanwhile. The authority ignores the report if
        // the lease has another holder.
        let report = NodeReport::HolderGone { lease: self.lease, holder: LeaseHolder::Connection };
        let authority = self.app.authority.clone();
        if authority.report(report.clone()) == Err(Refusal::Busy) {
            // Ends as soon as the authority has room for the report, or has ended.
            tokio::spawn(async move { while_busy(|| std::future::ready(authority.report(report.clone()))).await });
        }
    }
}

/// The lines of a response that holds a lease.
struct HoldStream {
    holder: ConnectionHolder,
    ended: Pin<Box<dyn Future<Output = Result<LeaseBody, Refusal>> + Send>>,
    first: Option<LeaseBody>,
    over: bool,
}

impl HoldStream {
    async fn next(mut self) -> Option<(Result<Bytes, Infallible>, Self)> {
        if self.over {
            return None;
        }
        if let Some(first) = self.first.take() {
            return Some((Ok(json_line(&first)), self));
        }
        let lease = tokio::select! {
            () = tokio::time::sleep(HOLD_BEAT) => return Some((Ok(Bytes::from_static(b"\n")), self)),
            () = self.holder.app.shutdown.begun() => return None,
            ended = &mut self.ended => ended.ok()?,
        };
        self.over = true;
        Some((Ok(json_line(&lease)), self))
    }
}

fn json_line(lease: &LeaseBody) -> Bytes {
    let mut line = serde_json::to_vec(lease).unwrap_or_default();
    line.push(b'\n');
    line.into()
}

/// Attach a lease to the calling process
///
/// Only over the Unix socket, where the kernel identifies the process. After that the lease needs no renewal: it ends
/// when that process ends, or when the control group of its job is empty (`until: job`). A job that has not started yet
/// can be put into such a group.
#[utoipa::path(
    post, path = "/v1/leases/{id}/attach", tag = "leases", request_body = AttachBody,
    params(("id" = u64, Path, description = "The lease")),
    responses(
        (status = 200, description = "The lease, and the control group of its job", body = AttachResponse),
        (status = 409, description = "`stale`, `ended`, `not_granted`, `held` or `no_group`", body = ProblemBody, content_type = "application/problem+json"),
        (status = "default", description = "Not over the Unix socket, unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn attach(
    State(app): State<SharedState>,
    WriteAccess(caller): WriteAccess,
    peer: axum::Extension<Peer>,
    LeasePath(lease): LeasePath,
    JsonBody(body): JsonBody<AttachBody>,
) -> Result<axum::Json<AttachResponse>, Problem> {
    let process = peer.process().map_err(|error| Problem::forbidden("no_process", error.to_string()))?;
    let mut attached = app.node.attach(caller, process, lease, body).await?;
    attached.lease = with_environment(&app, attached.lease);
    Ok(axum::Json(attached))
}

impl From<AttachError> for Problem {
    fn from(error: AttachError) -> Self {
        match error {
            AttachError::Refused(refusal) => refusal.into(),
            AttachError::NoJob => Self::field("until", "job", "caller, or job with a job_pid"),
            AttachError::NoCgroup(_) => Self::new(StatusCode::CONFLICT, "no_group", error.to_string()),
            AttachError::Unwatchable(_) => Self::forbidden("no_process", error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    #[tokio::test]
    async fn a_busy_authority_is_asked_again_until_it_replies() {
        let mut replies = [Err(Refusal::Busy), Err(Refusal::Busy), Ok(7)].into_iter();
        assert_eq!(while_busy(|| ready(replies.next().unwrap())).await, Ok(7));
        assert_eq!(while_busy(|| ready(Err::<(), _>(Refusal::Stopping))).await, Err(Refusal::Stopping));
    }

    #[test]
    fn only_the_last_connection_of_a_lease_releases_it() {
        let (connections, lease) = (HeldConnections::default(), LeaseId(1));
        connections.open(lease);
        connections.open(lease);
        assert!(!connections.close(lease));
        assert!(connections.close(lease));
        assert!(!connections.close(lease));
    }
}

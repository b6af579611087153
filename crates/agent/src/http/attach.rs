//! Tying a lease to a process of this machine. The node does it; only the Unix socket says which process asks.

use axum::extract::State;
use axum::http::StatusCode;
use gpupool_api::lease::{AttachBody, AttachResponse};
use gpupool_api::problem::ProblemBody;

use crate::net::Peer;
use crate::node::AttachError;

use super::Shared;
use super::caller::Changes;
use super::leases::with_environment;
use super::problem::Problem;
use super::read::{Json, LeaseInPath};

/// Tie a lease to the calling process
///
/// Only over the Unix socket, where the kernel says who calls. From then on the lease needs no renewal: it ends when that
/// process does, or when nothing runs in its job's control group any more (`until: job`). A job that has not started yet
/// can be put into such a group.
#[utoipa::path(
    post, path = "/v1/leases/{id}/attach", tag = "leases", request_body = AttachBody,
    params(("id" = u64, Path, description = "The lease")),
    responses(
        (status = 200, description = "The lease, and where its job runs", body = AttachResponse),
        (status = 409, description = "`stale`, `ended` or `not_granted`", body = ProblemBody, content_type = "application/problem+json"),
        (status = "default", description = "Not over the Unix socket, unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn attach(
    State(app): State<Shared>,
    Changes(caller): Changes,
    peer: axum::Extension<Peer>,
    LeaseInPath(lease): LeaseInPath,
    Json(body): Json<AttachBody>,
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

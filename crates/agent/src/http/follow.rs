//! Following leases, one or many: asking keeps a waiting request in the queue, and tells when its turn has come.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use gpupool_api::lease::{FollowBody, FollowResponse, LeaseBody};
use gpupool_api::problem::ProblemBody;
use gpupool_core::LeaseId;
use serde::Deserialize;

use crate::limits::{FOLLOWED_BY_CALL, WAIT_SECS};

use super::Shared;
use super::caller::Looks;
use super::leases::with_environment;
use super::problem::Problem;
use super::read::{Json, LeaseInPath, Query};

/// Follow a lease
///
/// Waits up to `wait_secs` for a queued lease to be granted. Asking is also how a waiter stays in the queue.
#[utoipa::path(
    get, path = "/v1/leases/{id}", tag = "leases",
    params(
        ("id" = u64, Path, description = "The lease"),
        ("wait_secs" = Option<f64>, Query, description = "How long the answer may take, 0..=300"),
    ),
    responses(
        (status = 200, description = "The lease", body = LeaseBody),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn follow(
    State(app): State<Shared>,
    Looks(caller): Looks,
    LeaseInPath(lease): LeaseInPath,
    Query(query): Query<WaitQuery>,
) -> Result<axum::Json<LeaseBody>, Problem> {
    let wait = wait_of(query.wait_secs.unwrap_or(0.0))?;
    let lease = app.authority.follow_lease(caller, lease, wait).await?;
    Ok(axum::Json(with_environment(&app, lease)))
}

#[derive(Deserialize)]
pub(super) struct WaitQuery {
    wait_secs: Option<f64>,
}

/// Follow many leases at once
///
/// Waits up to `wait_secs` until the first of them leaves the queue, and tells of all that did. Asking is also how they stay
/// in the queue. Those that are unknown, or not the caller's, are named and not waited for.
#[utoipa::path(
    post, path = "/v1/leases/follow", operation_id = "follow_leases", tag = "leases", request_body = FollowBody,
    responses(
        (status = 200, description = "Those that do not wait (any more); none where all still do", body = FollowResponse),
        (status = 422, description = "A field is wrong", body = ProblemBody, content_type = "application/problem+json"),
        (status = "default", description = "Not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn follow_all(
    State(app): State<Shared>,
    Looks(caller): Looks,
    Json(body): Json<FollowBody>,
) -> Result<axum::Json<FollowResponse>, Problem> {
    let wait = wait_of(body.wait_secs)?;
    let leases = different(&body.leases)?;
    let FollowResponse { changed, unknown } = app.authority.follow_leases(caller, leases, wait).await?;
    let changed = changed.into_iter().map(|lease| with_environment(&app, lease)).collect();
    Ok(axum::Json(FollowResponse { changed, unknown }))
}

fn different(ids: &[u64]) -> Result<Arc<[LeaseId]>, Problem> {
    let wrong = |found: String| {
        Err(Problem::field("leases", found, format!("1..={FOLLOWED_BY_CALL} different numbers of leases")))
    };
    if !(1..=FOLLOWED_BY_CALL).contains(&ids.len()) {
        return wrong(format!("a list of {}", ids.len()));
    }
    let mut seen = HashSet::with_capacity(ids.len());
    match ids.iter().find(|id| !seen.insert(**id)) {
        Some(twice) => wrong(format!("a list with {twice} in it twice")),
        None => Ok(ids.iter().copied().map(LeaseId).collect()),
    }
}

/// Returns how long an answer may take.
pub(super) fn wait_of(secs: f64) -> Result<Duration, Problem> {
    if (0.0..=WAIT_SECS).contains(&secs) {
        Ok(Duration::from_secs_f64(secs))
    } else {
        Err(Problem::field("wait_secs", secs, format!("0..={WAIT_SECS}")))
    }
}

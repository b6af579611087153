//! Following leases, one or many: a call keeps requests in the queue, and returns when one leaves it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use gpupool_api::lease::{FollowBody, FollowResponse, LeaseBody};
use gpupool_api::problem::ProblemBody;
use gpupool_core::LeaseId;
use serde::Deserialize;

use crate::limits::{FOLLOWED_BY_CALL, WAIT_SECS};

use super::SharedState;
use super::browser::is_from_browser;
use super::caller::ReadAccess;
use super::extract::{JsonBody, LeasePath, QueryParameters};
use super::leases::with_environment;
use super::problem::Problem;

/// Follow a lease
///
/// Waits up to `wait_secs` for a queued lease to be granted. The call also keeps the request in the queue, unless a browser
/// sends it: then it changes nothing and is answered at once.
#[utoipa::path(
    get, path = "/v1/leases/{id}", tag = "leases",
    params(
        ("id" = u64, Path, description = "The lease"),
        ("wait_secs" = Option<f64>, Query, description = "The longest time that the response may take, 0..=300"),
    ),
    responses(
        (status = 200, description = "The lease", body = LeaseBody),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn follow(
    State(app): State<SharedState>,
    ReadAccess(caller): ReadAccess,
    LeasePath(lease): LeasePath,
    QueryParameters(query): QueryParameters<WaitParameter>,
    headers: HeaderMap,
) -> Result<axum::Json<LeaseBody>, Problem> {
    let wait = parse_wait(query.wait_secs.unwrap_or(0.0))?;
    let lease = if is_from_browser(&headers) {
        app.authority.read_lease(caller, lease).await?
    } else {
        app.authority.follow_lease(caller, lease, wait).await?
    };
    Ok(axum::Json(with_environment(&app, lease)))
}

#[derive(Deserialize)]
pub(super) struct WaitParameter {
    wait_secs: Option<f64>,
}

/// Follow many leases at once
///
/// Waits up to `wait_secs` until the first lease leaves the queue, and returns all that have left it. The call also keeps the
/// requests in the queue. Leases that are unknown, or belong to another owner, are listed and not waited for.
#[utoipa::path(
    post, path = "/v1/leases/follow", operation_id = "follow_leases", tag = "leases", request_body = FollowBody,
    responses(
        (status = 200, description = "The leases that are not queued; empty if all of them are", body = FollowResponse),
        (status = 422, description = "A field is wrong", body = ProblemBody, content_type = "application/problem+json"),
        (status = "default", description = "Not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn follow_all(
    State(app): State<SharedState>,
    ReadAccess(caller): ReadAccess,
    JsonBody(body): JsonBody<FollowBody>,
) -> Result<axum::Json<FollowResponse>, Problem> {
    let wait = parse_wait(body.wait_secs)?;
    let leases = check_leases(&body.leases)?;
    let FollowResponse { changed, unknown } = app.authority.follow_leases(caller, leases, wait).await?;
    let changed = changed.into_iter().map(|lease| with_environment(&app, lease)).collect();
    Ok(axum::Json(FollowResponse { changed, unknown }))
}

fn check_leases(ids: &[u64]) -> Result<Arc<[LeaseId]>, Problem> {
    let wrong =
        |value: String| Err(Problem::field("leases", value, format!("1..={FOLLOWED_BY_CALL} different ids of leases")));
    if !(1..=FOLLOWED_BY_CALL).contains(&ids.len()) {
        return wrong(format!("a list of {}", ids.len()));
    }
    let mut seen = HashSet::with_capacity(ids.len());
    match ids.iter().find(|id| !seen.insert(**id)) {
        Some(twice) => wrong(format!("a list with {twice} in it twice")),
        None => Ok(ids.iter().copied().map(LeaseId).collect()),
    }
}

/// Returns the time that a response may take.
pub(super) fn parse_wait(secs: f64) -> Result<Duration, Problem> {
    if (0.0..=WAIT_SECS).contains(&secs) {
        Ok(Duration::from_secs_f64(secs))
    } else {
        Err(Problem::field("wait_secs", secs, format!("0..={WAIT_SECS}")))
    }
}

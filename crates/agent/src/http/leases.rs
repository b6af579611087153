//! Requesting, renewing and releasing leases.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use gpupool_api::lease::{FencingTokenBody, LeaseBody, LeaseList, LeaseState};
use gpupool_api::problem::ProblemBody;
use gpupool_api::{IDEMPOTENCY_KEY, RequestBody};
use gpupool_core::{GpuId, PoolCommand, Request, Token, check_plain_text};
use serde::Deserialize;

use crate::authority::{Refusal, Reply};
use crate::identity::Caller;
use crate::limits::LEASES_AT_ONCE;

use super::caller::{ReadAccess, WriteAccess};
use super::extract::{JsonBody, LeasePath, QueryParameters};
use super::follow::parse_wait;
use super::pool::check_node;
use super::problem::Problem;
use super::{AppState, SharedState};

/// Request GPUs
///
/// The response comes when it is durable: a lease that is active, or queued after `wait_secs` (then follow it, at least
/// every 15 s). A retry with the same `Idempotency-Key` is the same request.
#[utoipa::path(
    post, path = "/v1/leases", operation_id = "create_lease", tag = "leases", request_body = RequestBody,
    params(("Idempotency-Key" = Option<String>, Header, description = "Identifies a retried request")),
    responses(
        (status = 201, description = "Granted (or offered, to a request that waits at several servers)", body = LeaseBody),
        (status = 202, description = "Queued, with position and reason", body = LeaseBody),
        (status = 200, description = "The same request was made before, and its lease has ended", body = LeaseBody),
        (status = 409, description = "`no_capacity`: the request does not queue", body = ProblemBody, content_type = "application/problem+json"),
        (status = 422, description = "Never satisfiable here, or a field is wrong", body = ProblemBody, content_type = "application/problem+json"),
        (status = "default", description = "Not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn create(
    State(app): State<SharedState>,
    WriteAccess(caller): WriteAccess,
    headers: HeaderMap,
    JsonBody(mut body): JsonBody<RequestBody>,
) -> Result<Response, Problem> {
    let wait = parse_wait(body.wait_secs.unwrap_or(0.0))?;
    body.owner.as_deref().map_or(Ok(()), |owner| check_plain_text("owner", owner))?;
    let owner = caller.account(body.owner.as_ref())?;
    let requested_by = (owner != caller.owner).then(|| caller.owner.clone());
    body.owner = Some(owner);
    body.ttl_secs = Some(body.ttl_secs.unwrap_or(app.config.leases.default_ttl_secs.as_secs_f64()));
    let max_ttl = app.config.leases.max_ttl_secs.as_secs_f64();
    if let Some(ttl) = body.ttl_secs.filter(|ttl| *ttl > max_ttl) {
        return Err(Problem::field("ttl_secs", ttl, format!("at most {max_ttl}")));
    }
    let key = parse_key(&headers)?;
    let request = Arc::new(Request { requested_by, ..Request::try_from(body)? });
    // A client that hangs up while it waits cancels its request, unless a key lets it return.
    let reply =
        app.authority.ask_and_wait(caller, PoolCommand::Request { request, key, by_admin: false }, wait).await?;
    let lease = lease_in(reply)?;
    tracing::Span::current().record("lease", lease.id);
    Ok(created_response(with_environment(&app, lease)))
}

fn created_response(lease: LeaseBody) -> Response {
    let status = match lease.state {
        LeaseState::Queued => StatusCode::ACCEPTED,
        LeaseState::Active | LeaseState::Offered => StatusCode::CREATED,
        _ => StatusCode::OK,
    };
    (status, axum::Json(lease)).into_response()
}

/// Leases
#[utoipa::path(
    get, path = "/v1/leases", operation_id = "list_leases", tag = "leases",
    params(
        ("state" = Option<String>, Query, description = "Only leases in this state; `live` (the default) for those that have not ended, `all` for all that are remembered"),
        ("owner" = Option<String>, Query, description = "Only leases of this owner"),
        ("node" = Option<String>, Query, description = "Only leases on the node with this name"),
        ("after" = Option<u64>, Query, description = "Only leases with a larger number"),
        ("limit" = Option<usize>, Query, description = "The largest number of leases, 1..=1000"),
    ),
    responses(
        (status = 200, description = "Leases, by number", body = LeaseList),
        (status = "default", description = "A parameter is wrong, the node is unknown, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn list(
    State(app): State<SharedState>,
    ReadAccess(caller): ReadAccess,
    QueryParameters(query): QueryParameters<LeaseListParameters>,
) -> Result<axum::Json<LeaseList>, Problem> {
    let filter = LeaseStateFilter::parse(query.state.as_deref())?;
    check_node(query.node.as_deref(), &app, &app.authority.snapshot())?;
    let limit = query.limit.unwrap_or(LEASES_AT_ONCE);
    if !(1..=LEASES_AT_ONCE).contains(&limit) {
        return Err(Problem::field("limit", limit, format!("1..={LEASES_AT_ONCE}")));
    }
    let list = app.authority.query(move |authority| {
        let after = query.after.map_or(0, |after| after.saturating_add(1));
        let pool = authority.pool();
        let is_on_node = |lease: &gpupool_core::Lease| {
            let Some(name) = &query.node else { return true };
            lease.node.and_then(|node| pool.node(node)).is_some_and(|node| *node.facts.name == **name)
        };
        let mut found = pool.leases().filter(|lease| {
            lease.id.0 >= after
                && filter.matches(lease.state)
                && query.owner.as_ref().is_none_or(|name| **name == *lease.request.owner)
                && is_on_node(lease)
        });
        let body = |lease: &gpupool_core::Lease| {
            let explanation = pool.explain(lease.id);
            authority.lease_body(lease, explanation.as_ref(), &caller)
        };
        let leases: Vec<LeaseBody> = found.by_ref().take(limit).map(body).collect();
        let next = leases.last().map(|lease| lease.id).filter(|_| found.next().is_some());
        (leases, next)
    });
    let (leases, next) = list.await?;
    let leases = leases.into_iter().map(|lease| with_environment(&app, lease)).collect();
    Ok(axum::Json(LeaseList { leases, next }))
}

#[derive(Deserialize)]
pub(super) struct LeaseListParameters {
    state: Option<String>,
    owner: Option<String>,
    node: Option<String>,
    after: Option<u64>,
    limit: Option<usize>,
}

/// The states of leases in a list.
enum LeaseStateFilter {
    All,
    Live,
    Only(gpupool_core::LeaseState),
}

impl LeaseStateFilter {
    fn parse(text: Option<&str>) -> Result<Self, Problem> {
        match text {
            None | Some("live") => Ok(Self::Live),
            Some("all") => Ok(Self::All),
            Some(name) => serde_json::from_value(name.into()).map(Self::Only).map_err(|_| {
                let allowed = "live, all, queued, offered, active, released, expired, revoked or failed";
                Problem::field("state", format!("{name:?}"), allowed)
            }),
        }
    }

    fn matches(&self, state: gpupool_core::LeaseState) -> bool {
        match self {
            Self::All => true,
            Self::Live => !state.is_ended(),
            Self::Only(only) => *only == state,
        }
    }
}

/// Renew a lease
///
/// Every third of its ttl. A token of another lease is `409 stale`.
#[utoipa::path(
    post, path = "/v1/leases/{id}/renew", tag = "leases", request_body = FencingTokenBody,
    params(("id" = u64, Path, description = "The lease")),
    responses(
        (status = 200, description = "The lease, with its new expiry", body = LeaseBody),
        (status = 409, description = "`stale`, `ended` or `not_granted`", body = ProblemBody, content_type = "application/problem+json"),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn renew(
    State(app): State<SharedState>,
    WriteAccess(caller): WriteAccess,
    LeasePath(lease): LeasePath,
    JsonBody(body): JsonBody<FencingTokenBody>,
) -> Result<axum::Json<LeaseBody>, Problem> {
    ask_about_lease(&app, caller, PoolCommand::Renew { lease, token: Token(body.token) }).await.map(axum::Json)
}

/// Confirm an offer
///
/// A request that waits at several servers is offered its devices and has 5 s to confirm.
#[utoipa::path(
    post, path = "/v1/leases/{id}/confirm", tag = "leases", request_body = FencingTokenBody,
    params(("id" = u64, Path, description = "The lease")),
    responses(
        (status = 200, description = "The lease, active", body = LeaseBody),
        (status = 409, description = "`stale`, `ended` or `not_granted`", body = ProblemBody, content_type = "application/problem+json"),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn confirm(
    State(app): State<SharedState>,
    WriteAccess(caller): WriteAccess,
    LeasePath(lease): LeasePath,
    JsonBody(body): JsonBody<FencingTokenBody>,
) -> Result<axum::Json<LeaseBody>, Problem> {
    ask_about_lease(&app, caller, PoolCommand::Confirm { lease, token: Token(body.token) }).await.map(axum::Json)
}

/// Release a lease, or stop waiting
///
/// Releasing a lease twice is harmless. An administrator who releases another owner's lease revokes it; a running job has 10 s.
#[utoipa::path(
    delete, path = "/v1/leases/{id}", tag = "leases",
    params(("id" = u64, Path, description = "The lease")),
    responses(
        (status = 200, description = "The lease, which has ended, or is revoked after a grace", body = LeaseBody),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn release(
    State(app): State<SharedState>,
    WriteAccess(caller): WriteAccess,
    LeasePath(lease): LeasePath,
) -> Result<axum::Json<LeaseBody>, Problem> {
    ask_about_lease(&app, caller, PoolCommand::Release { lease }).await.map(axum::Json)
}

/// Sends a command about a lease to the authority.
pub(super) async fn ask_about_lease(
    app: &AppState,
    caller: Caller,
    command: PoolCommand,
) -> Result<LeaseBody, Problem> {
    let reply = app.authority.ask(caller, command).await?;
    Ok(with_environment(app, lease_in(reply)?))
}

fn lease_in(reply: Reply) -> Result<LeaseBody, Problem> {
    match reply {
        Reply::Lease(lease) => Ok(*lease),
        Reply::Followed(_) | Reply::Done => Err(Refusal::Stopping.into()),
    }
}

/// Adds the variables that show a job its devices, if the lease is of this node and its environment is visible.
pub(super) fn with_environment(app: &AppState, mut lease: LeaseBody) -> LeaseBody {
    let is_here = lease.devices.iter().all(|device| device.node == app.node.name());
    if !lease.env.is_empty() && is_here {
        let gpu_ids: Vec<GpuId> = lease.devices.iter().map(|device| GpuId(device.gpu_id)).collect();
        lease.env.extend(app.node.environment(&gpu_ids));
    }
    lease
}

fn parse_key(headers: &HeaderMap) -> Result<Option<Arc<str>>, Problem> {
    let Some(key) = headers.get(IDEMPOTENCY_KEY) else { return Ok(None) };
    let allowed = "1..=253 printable characters";
    let text = key.to_str().map_err(|_| Problem::field("Idempotency-Key", format!("{key:?}"), allowed))?;
    Ok(Some(text.into()))
}

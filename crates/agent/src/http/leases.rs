//! Asking for GPUs, renewing and giving back.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use gpupool_api::lease::{FencingTokenBody, LeaseBody, LeaseList, LeaseState};
use gpupool_api::problem::ProblemBody;
use gpupool_api::{IDEMPOTENCY_KEY, RequestBody};
use gpupool_core::{GpuId, PoolCommand, Request, Token};
use serde::Deserialize;

use crate::authority::{Refusal, Reply};
use crate::identity::Caller;
use crate::limits::LEASES_AT_ONCE;

use super::caller::{Changes, Looks};
use super::follow::wait_of;
use super::problem::Problem;
use super::read::{Json, LeaseInPath, Query};
use super::{App, Shared};

/// Ask for GPUs
///
/// The answer comes when it is durable: a lease that is active, or queued after `wait_secs` (follow it then, at least every
/// 15 s). A request that is retried with the same `Idempotency-Key` is the same request.
#[utoipa::path(
    post, path = "/v1/leases", operation_id = "create_lease", tag = "leases", request_body = RequestBody,
    params(("Idempotency-Key" = Option<String>, Header, description = "Makes a retried request the same request")),
    responses(
        (status = 201, description = "Granted (or offered, to a request that waits elsewhere too)", body = LeaseBody),
        (status = 202, description = "Waits its turn, with position and reason", body = LeaseBody),
        (status = 200, description = "The same request was made before, and its lease is over", body = LeaseBody),
        (status = 409, description = "`no_capacity`, and the request does not wait", body = ProblemBody, content_type = "application/problem+json"),
        (status = 422, description = "Never satisfiable here, or a field is wrong", body = ProblemBody, content_type = "application/problem+json"),
        (status = "default", description = "Not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn create(
    State(app): State<Shared>,
    Changes(caller): Changes,
    headers: HeaderMap,
    Json(mut body): Json<RequestBody>,
) -> Result<Response, Problem> {
    let wait = wait_of(body.wait_secs.unwrap_or(0.0))?;
    names_are_printable(&body)?;
    body.owner = Some(caller.account(body.owner.as_ref())?);
    body.ttl_secs = Some(body.ttl_secs.unwrap_or(app.config.leases.default_ttl_secs.as_secs_f64()));
    let most = app.config.leases.max_ttl_secs.as_secs_f64();
    if let Some(ttl) = body.ttl_secs.filter(|ttl| *ttl > most) {
        return Err(Problem::field("ttl_secs", ttl, format!("at most {most}")));
    }
    let key = key_of(&headers)?;
    let request = Arc::new(Request::try_from(body)?);
    // A client that hangs up while it waits wants its request no longer, unless a key lets it come back.
    let reply = app.authority.ask_and_wait(caller, PoolCommand::Request { request, key }, wait).await?;
    let lease = lease_of(reply)?;
    tracing::Span::current().record("lease", lease.id);
    Ok(created(with_environment(&app, lease)))
}

fn created(lease: LeaseBody) -> Response {
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
        ("state" = Option<String>, Query, description = "Only in this state; `live` for those that are not over (the default), `all` for all that are remembered"),
        ("owner" = Option<String>, Query, description = "Only this owner's"),
        ("node" = Option<String>, Query, description = "Only those on the node of this name"),
        ("after" = Option<u64>, Query, description = "Only those with a larger number"),
        ("limit" = Option<usize>, Query, description = "At most so many, 1..=1000"),
    ),
    responses(
        (status = 200, description = "Leases, by number", body = LeaseList),
        (status = "default", description = "A parameter is wrong, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn list(
    State(app): State<Shared>,
    Looks(caller): Looks,
    Query(query): Query<ListQuery>,
) -> Result<axum::Json<LeaseList>, Problem> {
    let wanted = Wanted::of(query.state.as_deref())?;
    let limit = query.limit.unwrap_or(LEASES_AT_ONCE);
    if !(1..=LEASES_AT_ONCE).contains(&limit) {
        return Err(Problem::field("limit", limit, format!("1..={LEASES_AT_ONCE}")));
    }
    let list = app.authority.query(move |authority| {
        let after = query.after.map_or(0, |after| after.saturating_add(1));
        let pool = authority.pool();
        let is_on_node = |lease: &gpupool_core::Lease| {
            let Some(wanted) = &query.node else { return true };
            lease.node.and_then(|node| pool.node(node)).is_some_and(|node| *node.facts.name == **wanted)
        };
        let mut found = pool.leases().filter(|lease| {
            lease.id.0 >= after
                && wanted.is(lease.state)
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
pub(super) struct ListQuery {
    state: Option<String>,
    owner: Option<String>,
    node: Option<String>,
    after: Option<u64>,
    limit: Option<usize>,
}

enum Wanted {
    All,
    Live,
    Only(gpupool_core::LeaseState),
}

impl Wanted {
    fn of(text: Option<&str>) -> Result<Self, Problem> {
        match text {
            None | Some("live") => Ok(Self::Live),
            Some("all") => Ok(Self::All),
            Some(name) => serde_json::from_value(name.into()).map(Self::Only).map_err(|_| {
                let allowed = "live, all, queued, offered, active, released, expired, revoked or failed";
                Problem::field("state", format!("{name:?}"), allowed)
            }),
        }
    }

    fn is(&self, state: gpupool_core::LeaseState) -> bool {
        match self {
            Self::All => true,
            Self::Live => !state.is_ended(),
            Self::Only(wanted) => *wanted == state,
        }
    }
}

/// Renew a lease
///
/// Every third of its ttl. A token that is not the lease's own is `409 stale`.
#[utoipa::path(
    post, path = "/v1/leases/{id}/renew", tag = "leases", request_body = FencingTokenBody,
    params(("id" = u64, Path, description = "The lease")),
    responses(
        (status = 200, description = "The lease, with its new end", body = LeaseBody),
        (status = 409, description = "`stale`, `ended` or `not_granted`", body = ProblemBody, content_type = "application/problem+json"),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn renew(
    State(app): State<Shared>,
    Changes(caller): Changes,
    LeaseInPath(lease): LeaseInPath,
    Json(body): Json<FencingTokenBody>,
) -> Result<axum::Json<LeaseBody>, Problem> {
    ask(&app, caller, PoolCommand::Renew { lease, token: Token(body.token) }).await.map(axum::Json)
}

/// Confirm an offer
///
/// A request that waits at several servers is offered its devices and has 5 s to take them.
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
    State(app): State<Shared>,
    Changes(caller): Changes,
    LeaseInPath(lease): LeaseInPath,
    Json(body): Json<FencingTokenBody>,
) -> Result<axum::Json<LeaseBody>, Problem> {
    ask(&app, caller, PoolCommand::Confirm { lease, token: Token(body.token) }).await.map(axum::Json)
}

/// Release a lease, or stop waiting
///
/// Twice is harmless.
#[utoipa::path(
    delete, path = "/v1/leases/{id}", tag = "leases",
    params(("id" = u64, Path, description = "The lease")),
    responses(
        (status = 200, description = "The lease, over", body = LeaseBody),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn release(
    State(app): State<Shared>,
    Changes(caller): Changes,
    LeaseInPath(lease): LeaseInPath,
) -> Result<axum::Json<LeaseBody>, Problem> {
    ask(&app, caller, PoolCommand::Release { lease }).await.map(axum::Json)
}

/// Asks the authority for something about a lease.
pub(super) async fn ask(app: &App, caller: Caller, command: PoolCommand) -> Result<LeaseBody, Problem> {
    let reply = app.authority.ask(caller, command).await?;
    Ok(with_environment(app, lease_of(reply)?))
}

fn lease_of(reply: Reply) -> Result<LeaseBody, Problem> {
    match reply {
        Reply::Lease(lease) => Ok(*lease),
        Reply::Followed(_) | Reply::Done => Err(Refusal::Stopping.into()),
    }
}

/// Adds the variables that show its devices to a job, for a lease of this node that shows its environment at all.
pub(super) fn with_environment(app: &App, mut lease: LeaseBody) -> LeaseBody {
    let is_here = lease.devices.iter().all(|device| device.node == app.node.name());
    if !lease.env.is_empty() && is_here {
        let gpu_ids: Vec<GpuId> = lease.devices.iter().map(|device| GpuId(device.gpu_id)).collect();
        lease.env.extend(app.node.environment(&gpu_ids));
    }
    lease
}

/// Names are shown on terminals and in logs, where control characters would do something.
fn names_are_printable(body: &RequestBody) -> Result<(), Problem> {
    let named = [("owner", body.owner.as_deref()), ("worker_id", body.worker_id.as_deref())].into_iter();
    let named = named.filter_map(|(field, text)| Some((field, text?)));
    let labels = body.labels.iter().flat_map(|(key, value)| [("labels", &**key), ("labels", &**value)]);
    match named.chain(labels).find(|(_, text)| text.chars().any(char::is_control)) {
        Some((field, text)) => Err(Problem::field(field, format!("{text:?}"), "text without control characters")),
        None => Ok(()),
    }
}

fn key_of(headers: &HeaderMap) -> Result<Option<Arc<str>>, Problem> {
    let Some(key) = headers.get(IDEMPOTENCY_KEY) else { return Ok(None) };
    let text =
        key.to_str().map_err(|_| Problem::field("Idempotency-Key", "not text", "1..=253 printable characters"))?;
    Ok(Some(text.into()))
}

//! Asking for GPUs, renewing and giving back.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use gpupool_api::lease::{AttachBody, Attached, Lease, LeaseList, State as LeaseState, TokenBody, Until};
use gpupool_api::problem::Problem as ProblemBody;
use gpupool_api::{IDEMPOTENCY_KEY, RequestBody};
use gpupool_confine::process::ProcessId;
use gpupool_core::lease::Holder;
use gpupool_core::{Command, Denied, LeaseId, Request, Token};
use serde::Deserialize;

use crate::groups::Confined;
use crate::identity::Caller;
use crate::leaving;
use crate::limits::LEASES_AT_ONCE;
use crate::net::{Peer, PeerProcess};
use crate::owner::{Owner, Refusal, Reply, lease_body};

use super::caller::{Changes, Looks};
use super::following::{wait_for, wait_of};
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
        (status = 201, description = "Granted (or offered, to a request that waits elsewhere too)", body = Lease),
        (status = 202, description = "Waits its turn, with position and reason", body = Lease),
        (status = 200, description = "The same request was made before, and its lease is over", body = Lease),
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
    let is_retriable = key.is_some();
    let request = Arc::new(Request::try_from(body)?);
    let lease = ask(&app, caller.clone(), Command::Request { request, key }).await?;
    if lease.state != LeaseState::Queued || wait.is_zero() {
        return Ok(created(lease));
    }
    // Whoever hangs up while it waits wants it no longer, unless it can come back for it.
    let mut abandoned = Abandoned { app: &app, lease: (!is_retriable).then_some(LeaseId(lease.id)) };
    let lease = wait_for(&app, caller, LeaseId(lease.id), wait).await;
    abandoned.lease = None;
    lease.map(created)
}

struct Abandoned<'a> {
    app: &'a App,
    lease: Option<LeaseId>,
}

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.filter(|_| !self.app.shutdown.has_begun()) {
            // If the owner is busy, nobody follows the lease and it leaves the queue by itself.
            let _ = self.app.owner.tell(Command::Release { lease });
        }
    }
}

fn created(lease: Lease) -> Response {
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
    let list = app.owner.look(move |owner| {
        let after = query.after.map_or(0, |after| after.saturating_add(1));
        let mut found = owner.pool().leases().filter(|lease| {
            lease.id.0 >= after
                && wanted.is(lease.state)
                && query.owner.as_ref().is_none_or(|name| **name == *lease.request.owner)
        });
        let leases: Vec<Lease> =
            found.by_ref().take(limit).map(|lease| lease_body(owner, lease, Some(&caller))).collect();
        let next = leases.last().map(|lease| lease.id).filter(|_| found.next().is_some());
        LeaseList { leases, next }
    });
    Ok(axum::Json(list.await?))
}

#[derive(Deserialize)]
pub(super) struct ListQuery {
    state: Option<String>,
    owner: Option<String>,
    after: Option<u64>,
    limit: Option<usize>,
}

enum Wanted {
    All,
    Live,
    Only(gpupool_core::lease::LeaseState),
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

    fn is(&self, state: gpupool_core::lease::LeaseState) -> bool {
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
    post, path = "/v1/leases/{id}/renew", tag = "leases", request_body = TokenBody,
    params(("id" = u64, Path, description = "The lease")),
    responses(
        (status = 200, description = "The lease, with its new end", body = Lease),
        (status = 409, description = "`stale`, `ended` or `not_granted`", body = ProblemBody, content_type = "application/problem+json"),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn renew(
    State(app): State<Shared>,
    Changes(caller): Changes,
    LeaseInPath(lease): LeaseInPath,
    Json(body): Json<TokenBody>,
) -> Result<axum::Json<Lease>, Problem> {
    ask(&app, caller, Command::Renew { lease, token: Token(body.token) }).await.map(axum::Json)
}

/// Confirm an offer
///
/// A request that waits at several servers is offered its devices and has 5 s to take them.
#[utoipa::path(
    post, path = "/v1/leases/{id}/confirm", tag = "leases", request_body = TokenBody,
    params(("id" = u64, Path, description = "The lease")),
    responses(
        (status = 200, description = "The lease, active", body = Lease),
        (status = 409, description = "`stale`, `ended` or `not_granted`", body = ProblemBody, content_type = "application/problem+json"),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn confirm(
    State(app): State<Shared>,
    Changes(caller): Changes,
    LeaseInPath(lease): LeaseInPath,
    Json(body): Json<TokenBody>,
) -> Result<axum::Json<Lease>, Problem> {
    ask(&app, caller, Command::Confirm { lease, token: Token(body.token) }).await.map(axum::Json)
}

/// Tie a lease to the calling process
///
/// Only over the Unix socket, where the kernel says who calls. From then on the lease needs no renewal: it ends when that
/// process does, or when nothing runs in its job's control group any more (`until: job`). A job that has not started yet
/// can be put into such a group.
#[utoipa::path(
    post, path = "/v1/leases/{id}/attach", tag = "leases", request_body = AttachBody,
    params(("id" = u64, Path, description = "The lease")),
    responses(
        (status = 200, description = "The lease, and where its job runs", body = Attached),
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
) -> Result<axum::Json<Attached>, Problem> {
    let process = peer.process().map_err(|error| Problem::forbidden("no_process", error.to_string()))?;
    // In a task of its own: a caller that dies now would leave a lease whose holder nobody watches.
    let attached = tokio::spawn(async move { tie_to(&app, caller, process, lease, body).await });
    attached.await.unwrap_or_else(|_| Err(Refusal::Stopping.into())).map(axum::Json)
}

async fn tie_to(
    app: &App,
    caller: Caller,
    process: PeerProcess,
    lease: LeaseId,
    body: AttachBody,
) -> Result<Attached, Problem> {
    let (holder, watched) = app.holders.of(&process, body.if_taken);
    let (uid, token, if_taken) = (caller.uid, Token(body.token), body.if_taken);
    if body.until == Until::Job && body.job_pid.is_none() {
        return Err(Problem::field("until", "job", "caller, or job with a job_pid"));
    }
    let mut attached = ask(app, caller.clone(), Command::Attach { lease, token, holder: holder.clone() }).await?;
    app.owner.tie(lease, move |tie| {
        tie.process = Some(watched);
        tie.if_taken = if_taken;
        tie.uid = uid;
    })?;
    app.holders.watch(lease, holder, process);
    let confined = match body.job_pid {
        Some(pid) => app.groups.take_in(lease, pid, watched, body.host_memory_mib),
        None => Confined::default(),
    };
    if let Some(job) = confined.job
        && !is_tied(&app.owner, lease, job, confined.group.as_ref()).await?
    {
        // It ended meanwhile, and was let go without what was just put into its group.
        leaving::remove_group(lease, &app.groups).await;
        return Err(Denied::Ended(lease).into());
    }
    if body.until == Until::Job {
        let holder = Holder::Cgroup(held_by_group(&confined)?.into());
        attached = ask(app, caller, Command::Attach { lease, token, holder: holder.clone() }).await?;
        app.holders.watch_group(lease, holder, app.groups.clone());
    }
    Ok(Attached {
        lease: attached,
        cgroup: confined.group,
        memory_limited: confined.memory_limited,
        caveat: confined.caveat,
    })
}

/// Notes what runs under a lease, unless it is over. A busy owner is told again: nobody would see to the job otherwise.
async fn is_tied(owner: &Owner, lease: LeaseId, job: ProcessId, group: Option<&String>) -> Result<bool, Refusal> {
    loop {
        let group = group.cloned();
        let tied = owner.tie_granted(lease, move |tie| {
            tie.add_job(job);
            tie.group = group.or(tie.group.take());
        });
        match tied.await {
            Err(Refusal::Busy) => tokio::time::sleep(leaving::TELL_AGAIN).await,
            other => return other,
        }
    }
}

/// The group that is to hold a lease; where there is none, the caller goes on holding it.
fn held_by_group(confined: &Confined) -> Result<&str, Problem> {
    let why = confined.caveat.as_deref().unwrap_or("no control group can be made here");
    let detail = || format!("the lease stays tied to the caller: it can only be tied to a control group, and {why}");
    confined.group.as_deref().ok_or_else(|| Problem::new(StatusCode::CONFLICT, "no_group", detail()))
}

/// Release a lease, or stop waiting
///
/// Twice is harmless.
#[utoipa::path(
    delete, path = "/v1/leases/{id}", tag = "leases",
    params(("id" = u64, Path, description = "The lease")),
    responses(
        (status = 200, description = "The lease, over", body = Lease),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn release(
    State(app): State<Shared>,
    Changes(caller): Changes,
    LeaseInPath(lease): LeaseInPath,
) -> Result<axum::Json<Lease>, Problem> {
    ask(&app, caller, Command::Release { lease }).await.map(axum::Json)
}

/// Asks the owner for something about a lease.
pub(super) async fn ask(app: &App, caller: Caller, command: Command) -> Result<Lease, Problem> {
    match app.owner.ask(caller, command).await? {
        Reply::Lease(lease) => Ok(*lease),
        Reply::Done => Err(Refusal::Stopping.into()),
    }
}

/// Looks at a lease without following it.
pub(super) async fn look_at(app: &App, caller: &Caller, lease: LeaseId) -> Result<Lease, Problem> {
    let caller = caller.clone();
    let found =
        app.owner.look(move |owner| owner.pool().lease(lease).map(|known| lease_body(owner, known, Some(&caller))));
    found.await?.ok_or_else(|| Denied::UnknownLease(lease).into())
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

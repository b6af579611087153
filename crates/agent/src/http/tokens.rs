//! Access tokens: administrators create, list and revoke them.

use std::time::SystemTime;

use axum::extract::State;
use axum::http::StatusCode;
use gpupool_api::problem::ProblemBody;
use gpupool_api::tokens::{AccessToken, AccessTokenList, NewToken, TokenCreated};
use gpupool_core::check_plain_text;
use gpupool_core::limits::MAX_NAME_BYTES;
use gpupool_store::{CommitError, TokenId, TokenRole};

use crate::clock::iso;
use crate::identity::{ANONYMOUS, Caller, Role};

use super::SharedState;
use super::caller::{ReadAccess, WriteAccess};
use super::extract::{JsonBody, NumberPath};
use super::history::store_problem;
use super::problem::Problem;

/// Create a token
///
/// For administrators. The response alone shows the secret; the agent stores only its hash.
#[utoipa::path(
    post, path = "/v1/tokens", operation_id = "create_token", tag = "admin", request_body = NewToken,
    responses(
        (status = 201, description = "The token with its secret", body = TokenCreated),
        (status = "default", description = "Not allowed, a field is wrong, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn create(
    State(app): State<SharedState>,
    WriteAccess(caller): WriteAccess,
    JsonBody(body): JsonBody<NewToken>,
) -> Result<(StatusCode, axum::Json<TokenCreated>), Problem> {
    check_is_admin(&caller)?;
    let name = body.owner.trim();
    check_plain_text("owner", name)?;
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.starts_with(ANONYMOUS) {
        let allowed = format!("a name of 1..={MAX_NAME_BYTES} bytes that does not start with {ANONYMOUS:?}");
        return Err(Problem::field("owner", format!("{:?}", body.owner), allowed));
    }
    let NewToken { admin, read_only, .. } = body;
    let role = match (admin, read_only) {
        (true, true) => return Err(Problem::field("read_only", true, "false for a token with admin: true")),
        (true, false) => TokenRole::Admin,
        (false, true) => TokenRole::ReadOnly,
        (false, false) => TokenRole::User,
    };
    let owner = name.to_owned();
    let created = app.authority.with_store(move |store| {
        store.create_token(&owner, role, SystemTime::now()).map(|(id, secret)| (id, secret, owner))
    });
    let (id, secret, owner) = created.await?.map_err(|error| not_durable(&error))?;
    let secret = secret.reveal().to_owned();
    Ok((StatusCode::CREATED, axum::Json(TokenCreated { id: id.0, owner, admin, read_only, secret })))
}

/// Tokens
///
/// For administrators. The list has no secrets.
#[utoipa::path(
    get, path = "/v1/tokens", operation_id = "list_tokens", tag = "admin",
    responses(
        (status = 200, description = "All tokens, including revoked ones", body = AccessTokenList),
        (status = "default", description = "Not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn list(
    State(app): State<SharedState>,
    ReadAccess(caller): ReadAccess,
) -> Result<axum::Json<AccessTokenList>, Problem> {
    check_is_admin(&caller)?;
    let tokens = app.authority.read_store(|store| store.tokens()).await?.map_err(store_problem)?;
    let body = |line: gpupool_store::TokenMetadata| AccessToken {
        id: line.token.id.0,
        owner: line.token.owner,
        admin: line.token.role == TokenRole::Admin,
        read_only: line.token.role == TokenRole::ReadOnly,
        created_at: iso(line.created_at),
        revoked_at: line.revoked_at.map(iso),
    };
    Ok(axum::Json(AccessTokenList { tokens: tokens.into_iter().map(body).collect() }))
}

/// Revoke a token
///
/// For administrators. Its leases continue.
#[utoipa::path(
    delete, path = "/v1/tokens/{id}", operation_id = "revoke_token", tag = "admin",
    params(("id" = u64, Path, description = "The id of the token")),
    responses(
        (status = 204, description = "The token is revoked"),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn revoke(
    State(app): State<SharedState>,
    WriteAccess(caller): WriteAccess,
    NumberPath(number): NumberPath,
) -> Result<StatusCode, Problem> {
    check_is_admin(&caller)?;
    let revoked = app.authority.with_store(move |store| store.revoke_token(TokenId(number), SystemTime::now()));
    let was_revoked = revoked.await?.map_err(|error| not_durable(&error))?;
    if was_revoked {
        Ok(StatusCode::NO_CONTENT)
    } else {
        Err(Problem::not_found(
            "unknown_token",
            format!("there is no token {number}, or it is revoked already; see GET /v1/tokens"),
        ))
    }
}

/// Refuses callers that are not administrators.
pub(super) fn check_is_admin(caller: &Caller) -> Result<(), Problem> {
    if caller.role == Role::Admin {
        return Ok(());
    }
    Err(Problem::forbidden(
        "not_allowed",
        format!(
            "{} is not an administrator; root and the user of the agent are, or use a token of gpupool token create --admin",
            caller.owner
        ),
    ))
}

fn not_durable(error: &CommitError) -> Problem {
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "not_durable", error.to_string())
}

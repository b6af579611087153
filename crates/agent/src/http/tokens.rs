//! Tokens: made, listed and revoked by administrators.

use std::time::SystemTime;

use axum::extract::State;
use axum::http::StatusCode;
use gpupool_api::problem::ProblemBody;
use gpupool_api::tokens::{AccessToken, AccessTokenList, NewToken, TokenCreated};
use gpupool_core::limits::MAX_NAME_BYTES;
use gpupool_store::{CommitError, TokenId, TokenRole};

use crate::clock::iso;
use crate::identity::{ANONYMOUS, Caller, Role};

use super::Shared;
use super::caller::{Changes, Looks};
use super::history::unreadable;
use super::problem::Problem;
use super::read::{Json, NumberInPath};

/// Make a token
///
/// For administrators. The secret is shown this once; only its hash is kept.
#[utoipa::path(
    post, path = "/v1/tokens", operation_id = "create_token", tag = "admin", request_body = NewToken,
    responses(
        (status = 201, description = "The token with its secret", body = TokenCreated),
        (status = "default", description = "Not allowed, a field is wrong, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn create(
    State(app): State<Shared>,
    Changes(caller): Changes,
    Json(body): Json<NewToken>,
) -> Result<(StatusCode, axum::Json<TokenCreated>), Problem> {
    only_admins(&caller)?;
    let name = body.owner.trim();
    if name.is_empty()
        || name.len() > MAX_NAME_BYTES
        || name.starts_with(ANONYMOUS)
        || name.chars().any(char::is_control)
    {
        let allowed = format!(
            "a name of 1..={MAX_NAME_BYTES} bytes without control characters that does not start with {ANONYMOUS:?}"
        );
        return Err(Problem::field("owner", format!("{:?}", body.owner), allowed));
    }
    let (owner, admin) = (name.to_owned(), body.admin);
    let role = if admin { TokenRole::Admin } else { TokenRole::User };
    let made = app.authority.with_store(move |store| {
        store.create_token(&owner, role, SystemTime::now()).map(|(id, secret)| (id, secret, owner))
    });
    let (id, secret, owner) = made.await?.map_err(|error| not_kept(&error))?;
    Ok((StatusCode::CREATED, axum::Json(TokenCreated { id: id.0, owner, admin, secret: secret.reveal().to_owned() })))
}

/// Tokens
///
/// For administrators. Without their secrets.
#[utoipa::path(
    get, path = "/v1/tokens", operation_id = "list_tokens", tag = "admin",
    responses(
        (status = 200, description = "Every token, revoked ones too", body = AccessTokenList),
        (status = "default", description = "Not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn list(
    State(app): State<Shared>,
    Looks(caller): Looks,
) -> Result<axum::Json<AccessTokenList>, Problem> {
    only_admins(&caller)?;
    let tokens = app.authority.read_store(|store| store.tokens()).await?.map_err(unreadable)?;
    let line = |line: gpupool_store::TokenMetadata| AccessToken {
        id: line.token.id.0,
        owner: line.token.owner,
        admin: line.token.role == TokenRole::Admin,
        created_at: iso(line.created_at),
        revoked_at: line.revoked_at.map(iso),
    };
    Ok(axum::Json(AccessTokenList { tokens: tokens.into_iter().map(line).collect() }))
}

/// Revoke a token
///
/// For administrators. Leases it took stay.
#[utoipa::path(
    delete, path = "/v1/tokens/{id}", operation_id = "revoke_token", tag = "admin",
    params(("id" = u64, Path, description = "The token's number")),
    responses(
        (status = 204, description = "It is worth nothing any more"),
        (status = "default", description = "Unknown, not allowed, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn revoke(
    State(app): State<Shared>,
    Changes(caller): Changes,
    NumberInPath(number): NumberInPath,
) -> Result<StatusCode, Problem> {
    only_admins(&caller)?;
    let revoked = app.authority.with_store(move |store| store.revoke_token(TokenId(number), SystemTime::now()));
    let was_there = revoked.await?.map_err(|error| not_kept(&error))?;
    if was_there {
        Ok(StatusCode::NO_CONTENT)
    } else {
        Err(Problem::not_found("unknown_token", format!("there is no token {number} that could be revoked")))
    }
}

fn only_admins(caller: &Caller) -> Result<(), Problem> {
    if caller.role == Role::Admin {
        return Ok(());
    }
    Err(Problem::forbidden("not_allowed", format!("{} is no administrator here", caller.owner)))
}

fn not_kept(error: &CommitError) -> Problem {
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "not_durable", error.to_string())
}

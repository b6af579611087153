//! The caller of a request: the owner of a token, a local user named by the kernel, or an anonymous client.
//!
//! Local users own the leases that they took. Network clients may read, and need a token for every change unless the agent
//! is open. Tokens count only over TLS or loopback, unless plain HTTP is allowed. A request of a browser has no rights from
//! the user that runs the browser, because the user did not write it: it counts as one from the network.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use gpupool_store::TokenRole;

use crate::identity::{Caller, Role};
use crate::net::{Peer, PeerTransport};
use crate::users;

use super::browser::{is_from_browser, is_local_peer};
use super::problem::Problem;
use super::{AppState, SharedState};

/// The address of an anonymous caller on this machine.
const LOCAL_ADDRESS: &str = "local";

/// The caller of a request that reads.
pub(super) struct ReadAccess(pub Caller);

/// The caller of a request that changes something.
pub(super) struct WriteAccess(pub Caller);

impl FromRequestParts<SharedState> for ReadAccess {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &SharedState) -> Result<Self, Problem> {
        identify(parts, app).map(Self)
    }
}

impl FromRequestParts<SharedState> for WriteAccess {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &SharedState) -> Result<Self, Problem> {
        let caller = identify(parts, app)?;
        if caller.role == Role::Reader {
            let detail = "changes over the network, or by a browser, need a token: run gpupool token create on the \
                          node, then set GPUPOOL_TOKEN (or send Authorization: Bearer …) here";
            return Err(Problem::new(StatusCode::UNAUTHORIZED, "token_needed", detail));
        }
        if caller.role == Role::ReadOnly {
            let detail = format!(
                "the token of {} may only read; use a token that was created without --read-only",
                caller.owner
            );
            return Err(Problem::forbidden("not_allowed", detail));
        }
        Ok(Self(caller))
    }
}

fn identify(parts: &Parts, app: &AppState) -> Result<Caller, Problem> {
    let Some(peer) = parts.extensions.get::<Peer>() else {
        return Ok(Caller::reader());
    };
    if let Some(secret) = bearer_token(&parts.headers)? {
        return token_caller(peer, secret, app);
    }
    if !is_local_peer(peer, &parts.headers) || is_from_browser(&parts.headers) {
        return Ok(network_caller(peer, app));
    }
    if peer.is_gone() {
        // The user is unknown, so the request must not be carried out. The same user may send it again.
        let detail = "the connection was closed before its user was known; send the request again";
        return Err(Problem::new(StatusCode::UNAUTHORIZED, "gone", detail));
    }
    Ok(local_caller(peer))
}

fn local_caller(peer: &Peer) -> Caller {
    let Some(uid) = peer.uid() else {
        return Caller::anonymous(LOCAL_ADDRESS);
    };
    let is_admin = uid == 0 || uid == rustix::process::geteuid().as_raw();
    let role = if is_admin { Role::Admin } else { Role::User };
    Caller { owner: users::name_of(uid), role, uid: Some(uid) }
}

fn network_caller(peer: &Peer, app: &AppState) -> Caller {
    if !app.config.server.open {
        return Caller::reader();
    }
    match peer.transport() {
        PeerTransport::Tcp { remote, .. } => Caller::anonymous(&remote.ip().to_canonical().to_string()),
        PeerTransport::Unix => Caller::anonymous(LOCAL_ADDRESS),
    }
}

fn bearer_token(headers: &HeaderMap) -> Result<Option<&str>, Problem> {
    let Some(value) = headers.get(header::AUTHORIZATION) else { return Ok(None) };
    let unreadable =
        || Problem::new(StatusCode::UNAUTHORIZED, "token_unreadable", "the Authorization header must be: Bearer TOKEN");
    let (scheme, secret) = value.to_str().ok().and_then(|text| text.split_once(' ')).ok_or_else(unreadable)?;
    if !scheme.eq_ignore_ascii_case("bearer") {
        return Err(unreadable());
    }
    Ok(Some(secret.trim()))
}

fn token_caller(peer: &Peer, secret: &str, app: &AppState) -> Result<Caller, Problem> {
    let can_be_read = matches!(peer.transport(), PeerTransport::Tcp { loopback: false, tls: false, .. });
    if can_be_read && !app.config.server.allow_plain_http {
        let detail = "the token came over plain HTTP, where others can read it: revoke it, and use https (--tls-cert, \
                      --tls-key) or start the agent with --allow-plain-http";
        return Err(Problem::forbidden("token_over_plain_http", detail));
    }
    let unknown = || {
        Problem::new(
            StatusCode::UNAUTHORIZED,
            "token_unknown",
            "the token is unknown or was revoked; ask an administrator for a new one",
        )
    };
    let snapshot = app.authority.snapshot();
    let token = snapshot.tokens.find(secret).ok_or_else(unknown)?;
    let role = match token.role {
        TokenRole::Admin => Role::Admin,
        TokenRole::User => Role::User,
        TokenRole::ReadOnly => Role::ReadOnly,
    };
    Ok(Caller { owner: token.owner.as_str().into(), role, uid: None })
}

impl Caller {
    /// Returns the owner of a request: the caller itself, or any owner that an administrator names. An anonymous caller may
    /// choose a name, which follows its address so that it differs from every known owner and from names at other addresses.
    pub(super) fn account(&self, named: Option<&Arc<str>>) -> Result<Arc<str>, Problem> {
        let Some(named) = named else { return Ok(self.owner.clone()) };
        if self.may_act_for(named) {
            return Ok(named.clone());
        }
        if self.is_anonymous() {
            return Ok(format!("{}/{named}", self.owner).into());
        }
        let detail = format!("owner is {named}, and {} may request GPUs only as {}", self.owner, self.owner);
        Err(Problem::forbidden("not_your_account", detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_administrators_may_name_another_owner() {
        let caller = |owner: &str, role, uid| Caller { owner: owner.into(), role, uid };
        let bob: Arc<str> = "bob".into();
        assert_eq!(&*caller("alice", Role::User, Some(1)).account(None).unwrap(), "alice");
        assert!(caller("alice", Role::User, Some(1)).account(Some(&bob)).is_err());
        assert_eq!(&*caller("root", Role::Admin, Some(0)).account(Some(&bob)).unwrap(), "bob");
    }

    #[test]
    fn the_name_of_an_anonymous_caller_follows_its_address() {
        let named = |name: &str| Caller::anonymous("192.0.2.7").account(Some(&name.into())).unwrap();
        assert_eq!(&*Caller::anonymous("192.0.2.7").account(None).unwrap(), "anonymous:192.0.2.7");
        assert_eq!(&*named("bob"), "anonymous:192.0.2.7/bob");
        assert_eq!(&*named("192.0.2.8"), "anonymous:192.0.2.7/192.0.2.8");
        assert_eq!(&*named("anonymous:192.0.2.8/bob"), "anonymous:192.0.2.7/anonymous:192.0.2.8/bob");
        assert_eq!(&*named("anonymous:192.0.2.7/bob"), "anonymous:192.0.2.7/bob", "a lease's own owner is no new name");
    }
}

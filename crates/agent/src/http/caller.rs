//! Who asks: by token, by the kernel's word for local users, or nobody in particular.
//!
//! Local users are known and own what they took. Over the network anybody may look, and only a token may change things
//! (unless the agent is open); a token counts only where nobody can listen in, unless plain HTTP is allowed. What a web
//! page makes a browser send is refused: a local user's word counts only under a name of this machine, and an `Origin`
//! must be that very address.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use gpupool_config::Config;
use gpupool_store::TokenRole;

use crate::identity::{ANONYMOUS, Caller, Role};
use crate::net::{Peer, Transport};
use crate::users;

use super::problem::Problem;
use super::{App, Shared};

/// Whoever asks, to look at things.
pub(super) struct Looks(pub Caller);

/// Whoever asks, to change things.
pub(super) struct Changes(pub Caller);

impl FromRequestParts<Shared> for Looks {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, Problem> {
        identify(parts, app).map(Self)
    }
}

impl FromRequestParts<Shared> for Changes {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, Problem> {
        let caller = identify(parts, app)?;
        if caller.role == Role::Reader {
            let detail = "changing anything over the network needs a token: gpupool token create on the node, then \
                          GPUPOOL_TOKEN (or Authorization: Bearer …) here";
            return Err(Problem::new(StatusCode::UNAUTHORIZED, "token_needed", detail));
        }
        check_origin(&parts.headers, &app.config)?;
        Ok(Self(caller))
    }
}

fn identify(parts: &Parts, app: &App) -> Result<Caller, Problem> {
    let Some(peer) = parts.extensions.get::<Peer>() else {
        return Ok(Caller::reader());
    };
    if let Some(secret) = bearer(&parts.headers)? {
        return by_token(peer, secret, app);
    }
    if !is_here(peer, &parts.headers) {
        return Ok(stranger(peer, app));
    }
    if !matches!(peer.transport(), Transport::Unix) {
        check_host(&parts.headers, &app.config)?;
    }
    if peer.is_gone() {
        // Nobody reads this. What was asked must not be done in the name of nobody: the same user may ask again.
        return Err(Problem::new(StatusCode::UNAUTHORIZED, "gone", "the connection was closed before it was heard"));
    }
    Ok(local(peer))
}

/// Whether the peer itself is on this machine; one that forwards for others is not.
fn is_here(peer: &Peer, headers: &HeaderMap) -> bool {
    let forwards = ["forwarded", "x-forwarded-for", "x-real-ip"].iter().any(|name| headers.contains_key(*name));
    peer.is_local() && !forwards
}

fn local(peer: &Peer) -> Caller {
    let Some(uid) = peer.uid() else {
        return Caller { owner: format!("{ANONYMOUS}:local").into(), role: Role::User, uid: None };
    };
    let is_admin = uid == 0 || uid == rustix::process::geteuid().as_raw();
    let role = if is_admin { Role::Admin } else { Role::User };
    Caller { owner: users::name_of(uid), role, uid: Some(uid) }
}

fn stranger(peer: &Peer, app: &App) -> Caller {
    if !app.config.server.open {
        return Caller::reader();
    }
    let from = match peer.transport() {
        Transport::Tcp { remote, .. } => remote.ip().to_string(),
        Transport::Unix => "local".into(),
    };
    Caller { owner: format!("{ANONYMOUS}:{from}").into(), role: Role::User, uid: None }
}

fn bearer(headers: &HeaderMap) -> Result<Option<&str>, Problem> {
    let Some(value) = headers.get(header::AUTHORIZATION) else { return Ok(None) };
    let unreadable =
        || Problem::new(StatusCode::UNAUTHORIZED, "token_unreadable", "Authorization must be: Bearer TOKEN");
    let (scheme, secret) = value.to_str().ok().and_then(|text| text.split_once(' ')).ok_or_else(unreadable)?;
    if !scheme.eq_ignore_ascii_case("bearer") {
        return Err(unreadable());
    }
    Ok(Some(secret.trim()))
}

fn by_token(peer: &Peer, secret: &str, app: &App) -> Result<Caller, Problem> {
    let heard_by_others = matches!(peer.transport(), Transport::Tcp { loopback: false, tls: false, .. });
    if heard_by_others && !app.config.server.allow_plain_http {
        let detail = "a token came over plain HTTP, where others can read it: revoke it, and use https (--tls-cert, \
                      --tls-key) or start the agent with --allow-plain-http";
        return Err(Problem::forbidden("token_over_plain_http", detail));
    }
    let unknown = || Problem::new(StatusCode::UNAUTHORIZED, "token_unknown", "this token is unknown or was revoked");
    let snapshot = app.authority.snapshot();
    let token = snapshot.tokens.find(secret).ok_or_else(unknown)?;
    let role = match token.role {
        TokenRole::Admin => Role::Admin,
        TokenRole::User => Role::User,
    };
    Ok(Caller { owner: token.owner.as_str().into(), role, uid: None })
}

/// A local user's word counts only where the request was meant for this machine by name: a page that a browser loaded
/// from elsewhere can be made to point at us, but not under a name of ours.
fn check_host(headers: &HeaderMap, config: &Config) -> Result<(), Problem> {
    let Some(host) = headers.get(header::HOST) else { return Ok(()) };
    let host = host.to_str().unwrap_or("");
    if is_ours(host, config) {
        return Ok(());
    }
    let detail = format!("{host:?} is not a name of this machine; use localhost, or add it to server.allowed_hosts");
    Err(Problem::forbidden("host_not_allowed", detail))
}

/// Whoever sends an `Origin` is a browser: it may only be our own page.
fn check_origin(headers: &HeaderMap, config: &Config) -> Result<(), Problem> {
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let origin = origin.to_str().unwrap_or("");
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("");
    let is_same = origin.split_once("://").is_some_and(|(_, of)| of.eq_ignore_ascii_case(host));
    if is_same && is_ours(host, config) {
        return Ok(());
    }
    Err(Problem::forbidden("origin_not_allowed", format!("a page of {origin:?} may not change anything here")))
}

fn is_ours(host: &str, config: &Config) -> bool {
    let name = without_port(host);
    let is_address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok();
    let server = &config.server;
    let names = [server.host.as_str(), server.node_name.as_str()].into_iter();
    let known = names.chain(server.allowed_hosts.iter().map(String::as_str));
    is_address || is_localhost(name) || known.into_iter().any(|known| known.eq_ignore_ascii_case(name))
}

fn is_localhost(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name == "localhost" || name.ends_with(".localhost")
}

fn without_port(host: &str) -> &str {
    if host.starts_with('[') {
        return host.split_inclusive(']').next().unwrap_or(host);
    }
    host.rsplit_once(':').map_or(host, |(name, _)| name)
}

impl Caller {
    /// The account a request goes to: one's own; an administrator names any, and those nobody vouches for name
    /// themselves as they like, as long as they cannot be taken for somebody known.
    pub(super) fn account(&self, named: Option<&Arc<str>>) -> Result<Arc<str>, Problem> {
        let Some(named) = named else { return Ok(self.owner.clone()) };
        if self.role == Role::Admin || *named == self.owner {
            return Ok(named.clone());
        }
        if self.uid.is_none() && self.owner.starts_with(ANONYMOUS) {
            return Ok(format!("{ANONYMOUS}:{named}").into());
        }
        let detail = format!("{} cannot take GPUs on the account of {named}", self.owner);
        Err(Problem::forbidden("not_your_account", detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_compared_without_their_port() {
        for (host, name) in
            [("a:1", "a"), ("a", "a"), ("[::1]:80", "[::1]"), ("[::1]", "[::1]"), ("1.2.3.4:5", "1.2.3.4")]
        {
            assert_eq!(without_port(host), name);
        }
        assert!(is_localhost("LOCALHOST") && is_localhost("a.localhost") && !is_localhost("localhost.evil"));
    }

    #[test]
    fn an_account_is_ones_own_unless_one_is_an_administrator() {
        let caller = |owner: &str, role, uid| Caller { owner: owner.into(), role, uid };
        let bob: Arc<str> = "bob".into();
        assert_eq!(&*caller("alice", Role::User, Some(1)).account(None).unwrap(), "alice");
        assert!(caller("alice", Role::User, Some(1)).account(Some(&bob)).is_err());
        assert_eq!(&*caller("root", Role::Admin, Some(0)).account(Some(&bob)).unwrap(), "bob");
        assert_eq!(&*caller("anonymous:1.2.3.4", Role::User, None).account(Some(&bob)).unwrap(), "anonymous:bob");
    }
}

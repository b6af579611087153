//! A client of one agent: where it is, who asks, how long to wait. Connections are kept open and used again.
//!
//! [`routes`] has a call for each route; [`call`] asks and judges answers, [`streams`] reads those that do not end, [`guard`] keeps
//! a lease, [`waiting`] waits for one.

mod call;
mod guard;
mod routes;
mod streams;
mod waiting;

pub use guard::LeaseGuard;
pub(crate) use guard::ended;
pub use routes::{HistoryQuery, IdempotencyKey, LeaseQuery, UsageGrouping};
pub use streams::{EventId, EventStream, LeaseHold, LeaseHoldEnd};
pub use waiting::{WaitOptions, WaitProgress};

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gpupool_config::{LoadedConfig, SecretString};
use http::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue, USER_AGENT};

use crate::limits::{ANSWER, CONNECT, RETRIES};
use crate::transport::{Http, Transport};
use crate::wire::Wire;
use crate::{ClientError, Endpoint, transport};

use guard::Young;

/// Asks one agent. Cheap to clone; clones share connections.
#[derive(Debug, Clone)]
pub struct AgentClient {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub endpoint: Endpoint,
    pub transport: Arc<dyn Transport>,
    /// Carries answers that do not end; not there where somebody else carries the questions.
    pub http: Option<Http>,
    /// How long an answer may take, beyond what it was asked to wait.
    pub answer: Duration,
    /// Times a question is asked again after a passing fault.
    pub retries: u32,
    /// Leases that need no renewal yet.
    pub young: Young,
}

impl AgentClient {
    /// A client without a token, with the usual timeouts.
    pub fn new(endpoint: Endpoint) -> Result<Self, ClientError> {
        Self::builder(endpoint).build()
    }

    /// A client to be set up.
    pub fn builder(endpoint: Endpoint) -> AgentClientBuilder {
        AgentClientBuilder {
            endpoint,
            token: None,
            ca_file: None,
            proxy: None,
            connect: CONNECT,
            answer: ANSWER,
            retries: RETRIES,
        }
    }

    /// A client with what is configured for clients on this machine.
    pub fn from_config(endpoint: Endpoint, loaded: &LoadedConfig) -> Result<Self, ClientError> {
        let settings = &loaded.config.client;
        // Over the socket the kernel says who we are; a token for some other server would only be unknown there.
        let token = settings.token.clone().filter(|_| endpoint.socket().is_none());
        let (ca_file, answer) = (settings.ca_file.clone(), settings.endpoint_timeout);
        AgentClientBuilder { token, ca_file, answer, ..Self::builder(endpoint) }.build()
    }

    /// Where its agent answers.
    pub fn endpoint(&self) -> &Endpoint {
        &self.inner.endpoint
    }
}

/// Sets up a [`AgentClient`].
#[derive(Debug, Clone)]
#[must_use = "nothing happens before build()"]
pub struct AgentClientBuilder {
    pub(crate) endpoint: Endpoint,
    pub(crate) token: Option<SecretString>,
    pub(crate) ca_file: Option<PathBuf>,
    pub(crate) proxy: Option<String>,
    pub(crate) connect: Duration,
    pub(crate) answer: Duration,
    pub(crate) retries: u32,
}

impl AgentClientBuilder {
    /// Shows this token with every question.
    pub fn token(self, token: SecretString) -> Self {
        Self { token: Some(token), ..self }
    }

    /// Trusts only the certificates of this file (PEM), in place of those the system trusts.
    pub fn ca_file(self, path: impl Into<PathBuf>) -> Self {
        Self { ca_file: Some(path.into()), ..self }
    }

    /// Reaches it through this proxy, in place of what the environment says; not asked for what is on this machine.
    pub fn proxy(self, address: impl Into<String>) -> Self {
        Self { proxy: Some(address.into()), ..self }
    }

    /// How long making a connection may take.
    pub fn connect_timeout(self, connect: Duration) -> Self {
        Self { connect, ..self }
    }

    /// How long an answer may take, beyond what it was asked to wait.
    pub fn response_timeout(self, answer: Duration) -> Self {
        Self { answer, ..self }
    }

    /// How often a question is asked again after a fault that may pass.
    pub fn retries(self, retries: u32) -> Self {
        Self { retries, ..self }
    }

    /// The client. Nothing is sent yet.
    pub fn build(self) -> Result<AgentClient, ClientError> {
        let headers = headers(self.token.as_ref())?;
        let http = self.http(&headers)?;
        let transport: Arc<dyn Transport> = match Wire::to(&self.endpoint, headers, self.connect) {
            Some(wire) => Arc::new(wire),
            None => Arc::new(http.clone()),
        };
        Ok(self.finish(transport, Some(http)))
    }

    /// The client, whose questions somebody else carries. Events and held connections cannot be had over it.
    pub fn build_with_transport(self, transport: Arc<dyn Transport>) -> AgentClient {
        self.finish(transport, None)
    }

    fn finish(self, transport: Arc<dyn Transport>, http: Option<Http>) -> AgentClient {
        let Self { endpoint, answer, retries, .. } = self;
        AgentClient { inner: Arc::new(Inner { endpoint, transport, http, answer, retries, young: Young::default() }) }
    }

    fn http(&self, headers: &HeaderMap) -> Result<Http, ClientError> {
        let tls = transport::tls_config(&self.endpoint, self.ca_file.as_deref())?;
        let mut builder = reqwest::Client::builder()
            .default_headers(headers.clone())
            .connect_timeout(self.connect)
            .redirect(reqwest::redirect::Policy::none())
            .tls_backend_preconfigured(tls);
        if self.endpoint.is_local() {
            // A proxy of the network cannot reach this machine's own loopback.
            builder = builder.no_proxy();
        } else if let Some(proxy) = &self.proxy {
            let proxy = reqwest::Proxy::all(proxy).map_err(|error| {
                let value = format!("{proxy:?} ({error})");
                ClientError::setting("proxy", value, "an address such as http://proxy:3128")
            })?;
            builder = builder.proxy(proxy);
        }
        if let Some(path) = self.endpoint.socket() {
            builder = builder.unix_socket(path);
        }
        if self.token.is_some() && !self.endpoint.is_local() && !self.endpoint.is_encrypted() {
            tracing::warn!(endpoint = %self.endpoint, "the token goes over plain HTTP, where others can read it; use https");
        }
        let unusable = |error| ClientError::setting("client", error, "settings this machine can use");
        let client = builder.build().map_err(unusable)?;
        Ok(Http { endpoint: self.endpoint.clone(), client })
    }
}

fn headers(token: Option<&SecretString>) -> Result<HeaderMap, ClientError> {
    let mut headers = HeaderMap::new();
    headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
    headers.insert(USER_AGENT, HeaderValue::from_static(concat!("gpupool/", env!("CARGO_PKG_VERSION"))));
    let Some(token) = token else { return Ok(headers) };
    let refused = || {
        let allowed = "the secret that `gpupool token create` printed: one line of printable ASCII";
        ClientError::setting("token", "(not shown)", allowed)
    };
    if token.expose().is_empty() {
        return Err(refused());
    }
    let mut value = HeaderValue::from_str(&format!("Bearer {}", token.expose())).map_err(|_| refused())?;
    value.set_sensitive(true);
    headers.insert(AUTHORIZATION, value);
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_not_shown() {
        let secret = SecretString::new(" abc\n");
        assert_eq!(secret.expose(), "abc");
        assert!(!format!("{secret:?}").contains("abc"));
    }

    #[test]
    fn a_token_is_never_shown_by_what_carries_it() {
        let builder = AgentClient::builder("http://127.0.0.1:1".parse().unwrap()).token(SecretString::new("hush"));
        assert!(!format!("{builder:?}").contains("hush"));
        assert!(!format!("{:?}", builder.build().unwrap()).contains("hush"));
    }

    #[test]
    fn a_token_that_cannot_be_sent_is_refused_without_being_shown() {
        for bad in ["", "a\nb"] {
            let endpoint = "http://127.0.0.1:1".parse().unwrap();
            let error = AgentClient::builder(endpoint).token(SecretString::new(bad)).build().unwrap_err().to_string();
            assert!(error.contains("token is (not shown)") && error.contains("gpupool token create"), "{error}");
        }
    }
}

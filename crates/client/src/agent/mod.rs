//! Client of one agent: its address, token and time limits. Connections are pooled.
//!
//! [`routes`] has a call for each route, [`api_call`] sends them, [`streams`] reads streaming responses,
//! [`lease_guard`] holds a lease (with [`renewal_timer`]), [`wait_until_granted`] waits for one.

mod api_call;
mod lease_guard;
mod renewal_timer;
mod routes;
mod streams;
mod wait_until_granted;

pub use lease_guard::LeaseGuard;
pub(crate) use lease_guard::ended_loss;
pub use routes::{HistoryQuery, IdempotencyKey, LeaseQuery, UsageGrouping};
pub use streams::{EventId, EventStream, LeaseHold, LeaseHoldEnd};
pub use wait_until_granted::{WaitOptions, WaitProgress};

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gpupool_config::{LoadedConfig, SecretString};
use http::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue, USER_AGENT};

use crate::limits::{CONNECT_TIMEOUT, MAX_CALL_RETRIES, RESPONSE_TIMEOUT};
use crate::local_transport::LocalTransport;
use crate::transport::{ReqwestTransport, Transport};
use crate::{ClientError, Endpoint, transport};

use renewal_timer::RenewalTimer;

/// Client of one agent. Cheap to clone; clones share connections.
#[derive(Debug, Clone)]
pub struct AgentClient {
    pub(crate) inner: Arc<AgentClientInner>,
}

#[derive(Debug)]
pub(crate) struct AgentClientInner {
    pub endpoint: Endpoint,
    pub transport: Arc<dyn Transport>,
    /// Transport for streaming responses. `None` with a transport of the caller.
    pub http: Option<ReqwestTransport>,
    /// Time limit for a response, beyond the wait requested from the agent.
    pub response_timeout: Duration,
    /// Maximum number of retries after transient failures.
    pub retries: u32,
    /// Leases that need no renewal yet.
    pub renewal_timer: RenewalTimer,
}

impl AgentClient {
    /// Creates a client without a token and with default time limits.
    pub fn new(endpoint: Endpoint) -> Result<Self, ClientError> {
        Self::builder(endpoint).build()
    }

    /// Returns a builder with default settings.
    pub fn builder(endpoint: Endpoint) -> AgentClientBuilder {
        AgentClientBuilder {
            endpoint,
            token: None,
            ca_file: None,
            proxy: None,
            connect_timeout: CONNECT_TIMEOUT,
            response_timeout: RESPONSE_TIMEOUT,
            retries: MAX_CALL_RETRIES,
        }
    }

    /// Creates a client with the configuration for clients on this machine.
    pub fn from_config(endpoint: Endpoint, loaded: &LoadedConfig) -> Result<Self, ClientError> {
        let settings = &loaded.config.client;
        // Over the socket the kernel identifies the caller; a token for another server would be rejected there.
        let token = settings.token.clone().filter(|_| endpoint.socket().is_none());
        let (ca_file, response_timeout) = (settings.ca_file.clone(), settings.endpoint_timeout);
        AgentClientBuilder { token, ca_file, response_timeout, ..Self::builder(endpoint) }.build()
    }

    /// Address of the agent.
    pub fn endpoint(&self) -> &Endpoint {
        &self.inner.endpoint
    }
}

/// Builder of an [`AgentClient`].
#[derive(Debug, Clone)]
#[must_use = "nothing happens before build()"]
pub struct AgentClientBuilder {
    pub(crate) endpoint: Endpoint,
    pub(crate) token: Option<SecretString>,
    pub(crate) ca_file: Option<PathBuf>,
    pub(crate) proxy: Option<String>,
    pub(crate) connect_timeout: Duration,
    pub(crate) response_timeout: Duration,
    pub(crate) retries: u32,
}

impl AgentClientBuilder {
    /// Sends this token with every request.
    pub fn token(self, token: SecretString) -> Self {
        Self { token: Some(token), ..self }
    }

    /// Trusts only the certificates of this file (PEM) in place of those of the system.
    pub fn ca_file(self, path: impl Into<PathBuf>) -> Self {
        Self { ca_file: Some(path.into()), ..self }
    }

    /// Uses this proxy in place of the one from the environment; never for endpoints on this machine.
    pub fn proxy(self, address: impl Into<String>) -> Self {
        Self { proxy: Some(address.into()), ..self }
    }

    /// Sets the time limit for opening a connection.
    pub fn connect_timeout(self, connect_timeout: Duration) -> Self {
        Self { connect_timeout, ..self }
    }

    /// Sets the time limit for a response, beyond the wait requested from the agent.
    pub fn response_timeout(self, response_timeout: Duration) -> Self {
        Self { response_timeout, ..self }
    }

    /// Sets the maximum number of retries after transient failures.
    pub fn retries(self, retries: u32) -> Self {
        Self { retries, ..self }
    }

    /// Builds the client without sending a request.
    pub fn build(self) -> Result<AgentClient, ClientError> {
        let headers = default_headers(self.token.as_ref())?;
        let http = self.build_reqwest(&headers)?;
        let transport: Arc<dyn Transport> =
            match LocalTransport::for_endpoint(&self.endpoint, headers, self.connect_timeout) {
                Some(local_transport) => Arc::new(local_transport),
                None => Arc::new(http.clone()),
            };
        Ok(self.finish(transport, Some(http)))
    }

    /// Builds the client with a transport of the caller. It supports neither events nor held connections.
    pub fn build_with_transport(self, transport: Arc<dyn Transport>) -> AgentClient {
        self.finish(transport, None)
    }

    fn finish(self, transport: Arc<dyn Transport>, http: Option<ReqwestTransport>) -> AgentClient {
        let Self { endpoint, response_timeout, retries, .. } = self;
        AgentClient {
            inner: Arc::new(AgentClientInner {
                endpoint,
                transport,
                http,
                response_timeout,
                retries,
                renewal_timer: RenewalTimer::default(),
            }),
        }
    }

    fn build_reqwest(&self, headers: &HeaderMap) -> Result<ReqwestTransport, ClientError> {
        let tls = transport::tls_config(&self.endpoint, self.ca_file.as_deref())?;
        let mut builder = reqwest::Client::builder()
            .default_headers(headers.clone())
            .connect_timeout(self.connect_timeout)
            .redirect(reqwest::redirect::Policy::none())
            .tls_backend_preconfigured(tls);
        if self.endpoint.is_local() {
            // A network proxy cannot reach this machine's loopback.
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
            tracing::warn!(endpoint = %self.endpoint, "the token is sent over plain HTTP, where others can read it; use https");
        }
        let unusable = |error| ClientError::setting("client", error, "settings this machine can use");
        let client = builder.build().map_err(unusable)?;
        Ok(ReqwestTransport { endpoint: self.endpoint.clone(), client })
    }
}

fn default_headers(token: Option<&SecretString>) -> Result<HeaderMap, ClientError> {
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
    fn debug_output_never_shows_a_token() {
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

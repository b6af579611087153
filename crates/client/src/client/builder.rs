//! Builder of a client, empty or from the environment and the configuration file.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gpupool_config::{ConfigConsumer, ConfigInputs, FlagValues, LoadedConfig, SettingOrigin};

use super::change_notifier::{ChangeNotifier, PendingWork};
use super::endpoint_state::EndpointState;
use super::running_client::ClientCore;
use super::{Balancing, Client};
use crate::endpoint::{endpoint_ids, matches_endpoint, split_endpoint_list};
use crate::limits::MAX_ENDPOINTS;
use crate::transport::Transport;
use crate::{AgentClient, AgentClientBuilder, ClientError, DEFAULT_ENDPOINT, Endpoint, SecretString};

type TransportFactory = Arc<dyn Fn(&Endpoint) -> Arc<dyn Transport> + Send + Sync>;

/// Builder of a [`Client`].
#[derive(Clone, Default)]
#[must_use = "nothing happens before build()"]
pub struct ClientBuilder {
    endpoints: Vec<String>,
    token: Option<SecretString>,
    tokens: BTreeMap<String, SecretString>,
    ca_file: Option<PathBuf>,
    proxy: Option<String>,
    settings: ClientSettings,
    transport_factory: Option<TransportFactory>,
}

impl ClientBuilder {
    /// Reads the environment and the configuration file; later calls override them.
    pub fn from_environment() -> Result<Self, ClientError> {
        let inputs = ConfigInputs::from_system(FlagValues::default(), None, ConfigConsumer::Client)
            .map_err(configuration_error)?;
        Self::from_config(&gpupool_config::load_config(&inputs).map_err(configuration_error)?)
    }

    /// Takes the settings of a configuration; later calls override them.
    pub fn from_config(loaded: &LoadedConfig) -> Result<Self, ClientError> {
        let (client, servers) = (&loaded.config.client, loaded.client_endpoints());
        let settings = ClientSettings {
            is_multi_endpoint: servers.urls.len() > 1,
            strategy: client.load_balancing_strategy,
            memory_threshold: client.memory_threshold_percent.as_number(),
            utilization_threshold: client.utilization_threshold_percent.as_number(),
            polling_interval: client.polling_interval,
            health_check_interval: client.endpoint_health_check_interval,
            endpoint_timeout: client.endpoint_timeout,
            max_retries: client.endpoint_max_retries,
            ..ClientSettings::default()
        };
        let endpoints = if servers.origin == SettingOrigin::Default { Vec::new() } else { servers.urls };
        let (token, ca_file) = (client.token.clone(), client.ca_file.clone());
        Ok(Self { endpoints, token, ca_file, settings, ..Self::default() })
    }

    /// Uses a single endpoint and replaces earlier ones.
    pub fn endpoint(mut self, endpoint: impl Into<String>) -> Self {
        self.endpoints = vec![endpoint.into()];
        self.settings.is_multi_endpoint = false;
        self
    }

    /// Uses a comma-separated list of endpoints and replaces earlier ones. Blanks, duplicates and trailing slashes are
    /// removed.
    pub fn endpoints(mut self, list: impl AsRef<str>) -> Self {
        self.endpoints = split_endpoint_list(list.as_ref()).into_iter().map(ToOwned::to_owned).collect();
        self.settings.is_multi_endpoint = true;
        self
    }

    /// Uses the agent that listens on one of these sockets if no endpoint is set.
    pub fn or_local_agent(mut self, sockets: &[PathBuf]) -> Result<Self, ClientError> {
        if self.endpoints.is_empty() {
            self.endpoints = vec![Endpoint::local_agent(sockets)?.to_string()];
        }
        Ok(self)
    }

    /// Sends this token to every endpoint without a token of its own.
    pub fn token(self, token: SecretString) -> Self {
        Self { token: Some(token), ..self }
    }

    /// Sends this token to one endpoint, given by its id, its host and port, or its address.
    pub fn token_for(mut self, endpoint_id: impl Into<String>, token: SecretString) -> Self {
        self.tokens.insert(endpoint_id.into(), token);
        self
    }

    /// Trusts only the certificates of this file (PEM) in place of those of the system.
    pub fn ca_file(self, path: impl Into<PathBuf>) -> Self {
        Self { ca_file: Some(path.into()), ..self }
    }

    /// Uses this proxy for endpoints of other machines in place of the one from the environment.
    pub fn proxy(self, address: impl Into<String>) -> Self {
        Self { proxy: Some(address.into()), ..self }
    }

    /// Sets the load-balancing strategy.
    pub fn strategy(mut self, strategy: Balancing) -> Self {
        self.settings.strategy = strategy;
        self
    }

    /// Sets the memory usage in percent below which a GPU is available; default 80.
    pub fn memory_threshold(mut self, percent: f64) -> Self {
        self.settings.memory_threshold = percent;
        self
    }

    /// Sets the utilization in percent below which a GPU is available; default 90.
    pub fn utilization_threshold(mut self, percent: f64) -> Self {
        self.settings.utilization_threshold = percent;
        self
    }

    /// Sets the time between two polls of an endpoint; default 5 s.
    pub fn polling_interval(mut self, interval: Duration) -> Self {
        self.settings.polling_interval = interval;
        self
    }

    /// Sets the time between two health checks of an endpoint; default 30 s.
    pub fn health_check_interval(mut self, interval: Duration) -> Self {
        self.settings.health_check_interval = interval;
        self
    }

    /// Sets the time limit for a response; default 10 s.
    pub fn endpoint_timeout(mut self, timeout: Duration) -> Self {
        self.settings.endpoint_timeout = timeout;
        self
    }

    /// Sets the number of retries of a request that failed at every endpoint; default 3.
    pub fn max_retries(mut self, retries: u32) -> Self {
        self.settings.max_retries = retries;
        self
    }

    /// Sets the wait limit of requests that name none; default 300 s.
    pub fn worker_timeout(mut self, timeout: Duration) -> Self {
        self.settings.worker_timeout = timeout;
        self
    }

    /// Sets the maximum duration of leases whose request names none; default unlimited.
    pub fn stale_age(mut self, age: Duration) -> Self {
        self.settings.stale_age = Some(age);
        self
    }

    /// Uses transports of the caller in place of HTTP.
    pub fn transport(self, factory: impl Fn(&Endpoint) -> Arc<dyn Transport> + Send + Sync + 'static) -> Self {
        Self { transport_factory: Some(Arc::new(factory)), ..self }
    }

    /// Builds the client. It sends no request before it is started.
    pub fn build(self) -> Result<Client, ClientError> {
        self.check_settings()?;
        let endpoints = self.parse_endpoints()?;
        let ids = endpoint_ids(&endpoints);
        let availability = Arc::new(ChangeNotifier::default());
        let pending_work = Arc::new(PendingWork::default());
        let mut states = Vec::new();
        for (index, (endpoint, id)) in endpoints.into_iter().zip(ids).enumerate() {
            let agent = self.build_agent(&id, endpoint)?;
            states.push(Arc::new(EndpointState::new(index, id, agent, availability.clone(), pending_work.clone())));
        }
        self.check_token_endpoints(&states)?;
        Ok(Client::new(ClientCore::new(self.settings, states, availability, pending_work)))
    }

    fn parse_endpoints(&self) -> Result<Vec<Endpoint>, ClientError> {
        if self.endpoints.is_empty() && self.settings.is_multi_endpoint {
            return Err(ClientError::setting("endpoints", "empty", "at least one endpoint"));
        }
        if self.endpoints.len() > MAX_ENDPOINTS {
            return Err(ClientError::setting("endpoints", self.endpoints.len(), format!("at most {MAX_ENDPOINTS}")));
        }
        let listed = if self.endpoints.is_empty() { &[DEFAULT_ENDPOINT.to_owned()][..] } else { &self.endpoints[..] };
        let mut endpoints: Vec<Endpoint> = Vec::new();
        for text in listed {
            let endpoint: Endpoint = text.parse()?;
            if !endpoints.contains(&endpoint) {
                endpoints.push(endpoint);
            }
        }
        Ok(endpoints)
    }

    fn build_agent(&self, id: &str, endpoint: Endpoint) -> Result<AgentClient, ClientError> {
        let own = self.tokens.iter().find(|(name, _)| matches_endpoint(name, id, &endpoint)).map(|(_, token)| token);
        let token = own.or(self.token.as_ref().filter(|_| endpoint.socket().is_none())).cloned();
        let transport = self.transport_factory.as_ref().map(|transport_factory| transport_factory(&endpoint));
        let builder = AgentClientBuilder {
            token,
            ca_file: self.ca_file.clone(),
            proxy: self.proxy.clone(),
            response_timeout: self.settings.endpoint_timeout,
            retries: 0,
            ..AgentClient::builder(endpoint)
        };
        match transport {
            Some(transport) => Ok(builder.build_with_transport(transport)),
            None => builder.build(),
        }
    }

    fn check_token_endpoints(&self, endpoints: &[Arc<EndpointState>]) -> Result<(), ClientError> {
        let is_used = |name: &str| {
            endpoints.iter().any(|endpoint| matches_endpoint(name, &endpoint.id, endpoint.agent.endpoint()))
        };
        match self.tokens.keys().find(|name| !is_used(name)) {
            Some(name) => {
                Err(ClientError::setting("token_for", format!("{name:?}"), "the id or address of one of the endpoints"))
            }
            None => Ok(()),
        }
    }

    fn check_settings(&self) -> Result<(), ClientError> {
        let settings = &self.settings;
        let percents = [
            ("memory_threshold", settings.memory_threshold),
            ("utilization_threshold", settings.utilization_threshold),
        ];
        if let Some((field, value)) = percents.into_iter().find(|(_, value)| !(0.0..=100.0).contains(value)) {
            return Err(ClientError::setting(field, value, "a number from 0 to 100"));
        }
        let times = [
            ("polling_interval", settings.polling_interval),
            ("endpoint_timeout", settings.endpoint_timeout),
            ("health_check_interval", settings.health_check_interval),
        ];
        let least = Duration::from_millis(10);
        if let Some((field, value)) = times.into_iter().find(|(_, value)| *value < least) {
            return Err(ClientError::setting(field, format!("{} s", value.as_secs_f64()), "at least 0.01 s"));
        }
        Ok(())
    }
}

impl fmt::Debug for ClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientBuilder")
            .field("endpoints", &self.endpoints)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

fn configuration_error(problems: gpupool_config::ConfigProblems) -> ClientError {
    ClientError::Configuration(problems.to_string())
}

/// Settings of a client.
#[derive(Debug, Clone)]
pub(super) struct ClientSettings {
    /// Whether several endpoints were configured.
    pub is_multi_endpoint: bool,
    pub strategy: Balancing,
    /// In percent; for requests without thresholds of their own.
    pub memory_threshold: f64,
    pub utilization_threshold: f64,
    pub polling_interval: Duration,
    pub health_check_interval: Duration,
    /// Time limit for a response.
    pub endpoint_timeout: Duration,
    /// Number of retries of a request that failed at every endpoint.
    pub max_retries: u32,
    /// Wait limit of requests that name none.
    pub worker_timeout: Duration,
    /// Maximum duration of leases whose request names none.
    pub stale_age: Option<Duration>,
}

impl Default for ClientSettings {
    fn default() -> Self {
        Self {
            is_multi_endpoint: false,
            strategy: Balancing::Availability,
            memory_threshold: 80.0,
            utilization_threshold: 90.0,
            polling_interval: Duration::from_secs(5),
            health_check_interval: Duration::from_secs(30),
            endpoint_timeout: Duration::from_secs(10),
            max_retries: 3,
            worker_timeout: Duration::from_secs(300),
            stale_age: None,
        }
    }
}

//! Setting up a client: by hand, or from the environment and the configuration file with changes by hand.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gpupool_config::{ConfigConsumer, ConfigInputs, FlagValues, LoadedConfig, SettingOrigin};

use super::place::Place;
use super::running::{Changes, Core, Returns};
use super::{Balancing, Client};
use crate::endpoint::{is_meant, listed, names};
use crate::limits::ENDPOINTS;
use crate::transport::Transport;
use crate::{AgentClient, AgentClientBuilder, ClientError, DEFAULT_ENDPOINT, Endpoint, SecretString};

type Carriers = Arc<dyn Fn(&Endpoint) -> Arc<dyn Transport> + Send + Sync>;

/// Sets up a [`Client`].
#[derive(Clone, Default)]
#[must_use = "nothing happens before build()"]
pub struct ClientBuilder {
    endpoints: Vec<String>,
    token: Option<SecretString>,
    tokens: BTreeMap<String, SecretString>,
    ca_file: Option<PathBuf>,
    proxy: Option<String>,
    settings: Settings,
    carriers: Option<Carriers>,
}

impl ClientBuilder {
    /// What the environment and the configuration file say; what is set afterwards beats it.
    pub fn from_environment() -> Result<Self, ClientError> {
        let inputs =
            ConfigInputs::from_system(FlagValues::default(), None, ConfigConsumer::Client).map_err(unusable)?;
        Self::from_config(&gpupool_config::load_config(&inputs).map_err(unusable)?)
    }

    /// What a configuration says; what is set afterwards beats it.
    pub fn from_config(loaded: &LoadedConfig) -> Result<Self, ClientError> {
        let (client, servers) = (&loaded.config.client, loaded.client_endpoints());
        let settings = Settings {
            is_multi_endpoint: servers.urls.len() > 1,
            strategy: client.load_balancing_strategy,
            memory_threshold: client.memory_threshold_percent.as_number(),
            utilization_threshold: client.utilization_threshold_percent.as_number(),
            polling_interval: client.polling_interval,
            health_check_interval: client.endpoint_health_check_interval,
            endpoint_timeout: client.endpoint_timeout,
            max_retries: client.endpoint_max_retries,
            ..Settings::default()
        };
        let endpoints = if servers.origin == SettingOrigin::Default { Vec::new() } else { servers.urls };
        let (token, ca_file) = (client.token.clone(), client.ca_file.clone());
        Ok(Self { endpoints, token, ca_file, settings, ..Self::default() })
    }

    /// The one endpoint to ask, in place of any named before.
    pub fn endpoint(mut self, endpoint: impl Into<String>) -> Self {
        self.endpoints = vec![endpoint.into()];
        self.settings.is_multi_endpoint = false;
        self
    }

    /// The endpoints to ask, with commas between, in place of any named before. Blanks, duplicates and slashes at the end do
    /// not count.
    pub fn endpoints(mut self, list: impl AsRef<str>) -> Self {
        self.endpoints = listed(list.as_ref()).into_iter().map(ToOwned::to_owned).collect();
        self.settings.is_multi_endpoint = true;
        self
    }

    /// Asks the agent that listens on one of these sockets, where no endpoint was named.
    pub fn or_local_agent(mut self, sockets: &[PathBuf]) -> Result<Self, ClientError> {
        if self.endpoints.is_empty() {
            self.endpoints = vec![Endpoint::local_agent(sockets)?.to_string()];
        }
        Ok(self)
    }

    /// Shows this token to every endpoint that has none of its own.
    pub fn token(self, token: SecretString) -> Self {
        Self { token: Some(token), ..self }
    }

    /// Shows this token to one endpoint, named by its id, its host and port, or its address.
    pub fn token_for(mut self, endpoint_id: impl Into<String>, token: SecretString) -> Self {
        self.tokens.insert(endpoint_id.into(), token);
        self
    }

    /// Trusts only the certificates of this file (PEM), in place of those the system trusts.
    pub fn ca_file(self, path: impl Into<PathBuf>) -> Self {
        Self { ca_file: Some(path.into()), ..self }
    }

    /// Reaches endpoints of other machines through this proxy, in place of what the environment says.
    pub fn proxy(self, address: impl Into<String>) -> Self {
        Self { proxy: Some(address.into()), ..self }
    }

    /// How one of several endpoints is chosen.
    pub fn strategy(mut self, strategy: Balancing) -> Self {
        self.settings.strategy = strategy;
        self
    }

    /// Memory in use, in percent, from which on a GPU does not do; 80 unless said.
    pub fn memory_threshold(mut self, percent: f64) -> Self {
        self.settings.memory_threshold = percent;
        self
    }

    /// Utilization in percent from which on a GPU does not do; 90 unless said.
    pub fn utilization_threshold(mut self, percent: f64) -> Self {
        self.settings.utilization_threshold = percent;
        self
    }

    /// Time between two looks at an endpoint; 5 s unless said.
    pub fn polling_interval(mut self, interval: Duration) -> Self {
        self.settings.polling_interval = interval;
        self
    }

    /// Time between two looks at the health of an endpoint; 30 s unless said.
    pub fn health_check_interval(mut self, interval: Duration) -> Self {
        self.settings.health_check_interval = interval;
        self
    }

    /// How long an answer may take; 10 s unless said.
    pub fn endpoint_timeout(mut self, timeout: Duration) -> Self {
        self.settings.endpoint_timeout = timeout;
        self
    }

    /// How often a request that failed at every endpoint is tried again; 3 unless said.
    pub fn max_retries(mut self, retries: u32) -> Self {
        self.settings.max_retries = retries;
        self
    }

    /// How long requests wait that do not say; 300 s unless said.
    pub fn worker_timeout(mut self, timeout: Duration) -> Self {
        self.settings.worker_timeout = timeout;
        self
    }

    /// How long anything may be held that says nothing about it; for ever unless said.
    pub fn stale_age(mut self, age: Duration) -> Self {
        self.settings.stale_age = Some(age);
        self
    }

    /// Lets others carry the questions, in place of HTTP.
    pub fn transport(self, carriers: impl Fn(&Endpoint) -> Arc<dyn Transport> + Send + Sync + 'static) -> Self {
        Self { carriers: Some(Arc::new(carriers)), ..self }
    }

    /// The client. Nothing is asked before it is started.
    pub fn build(self) -> Result<Client, ClientError> {
        self.check()?;
        let endpoints = self.parsed()?;
        let ids = names(&endpoints);
        let weather = Arc::new(Changes::default());
        let returns = Arc::new(Returns::default());
        let mut places = Vec::new();
        for (number, (endpoint, id)) in endpoints.into_iter().zip(ids).enumerate() {
            let agent = self.agent(&id, endpoint)?;
            places.push(Arc::new(Place::new(number, id, agent, weather.clone(), returns.clone())));
        }
        self.tokens_are_used(&places)?;
        Ok(Client::new(Core::new(self.settings, places, weather, returns)))
    }

    fn parsed(&self) -> Result<Vec<Endpoint>, ClientError> {
        if self.endpoints.is_empty() && self.settings.is_multi_endpoint {
            return Err(ClientError::setting("endpoints", "empty", "one endpoint at least"));
        }
        if self.endpoints.len() > ENDPOINTS {
            return Err(ClientError::setting("endpoints", self.endpoints.len(), format!("at most {ENDPOINTS}")));
        }
        let named = if self.endpoints.is_empty() { &[DEFAULT_ENDPOINT.to_owned()][..] } else { &self.endpoints[..] };
        let mut endpoints: Vec<Endpoint> = Vec::new();
        for text in named {
            let endpoint: Endpoint = text.parse()?;
            if !endpoints.contains(&endpoint) {
                endpoints.push(endpoint);
            }
        }
        Ok(endpoints)
    }

    fn agent(&self, id: &str, endpoint: Endpoint) -> Result<AgentClient, ClientError> {
        let own = self.tokens.iter().find(|(said, _)| is_meant(said, id, &endpoint)).map(|(_, token)| token);
        let token = own.or(self.token.as_ref().filter(|_| endpoint.socket().is_none())).cloned();
        let carrier = self.carriers.as_ref().map(|carriers| carriers(&endpoint));
        let builder = AgentClientBuilder {
            token,
            ca_file: self.ca_file.clone(),
            proxy: self.proxy.clone(),
            answer: self.settings.endpoint_timeout,
            retries: 0,
            ..AgentClient::builder(endpoint)
        };
        match carrier {
            Some(carrier) => Ok(builder.build_with_transport(carrier)),
            None => builder.build(),
        }
    }

    fn tokens_are_used(&self, places: &[Arc<Place>]) -> Result<(), ClientError> {
        let is_used = |said: &str| places.iter().any(|place| is_meant(said, &place.id, place.agent.endpoint()));
        match self.tokens.keys().find(|said| !is_used(said)) {
            Some(said) => {
                Err(ClientError::setting("token_for", format!("{said:?}"), "the id or address of one of the endpoints"))
            }
            None => Ok(()),
        }
    }

    fn check(&self) -> Result<(), ClientError> {
        let settings = &self.settings;
        let percents = [
            ("memory_threshold", settings.memory_threshold),
            ("utilization_threshold", settings.utilization_threshold),
        ];
        if let Some((what, value)) = percents.into_iter().find(|(_, value)| !(0.0..=100.0).contains(value)) {
            return Err(ClientError::setting(what, value, "a number from 0 to 100"));
        }
        let times = [
            ("polling_interval", settings.polling_interval),
            ("endpoint_timeout", settings.endpoint_timeout),
            ("health_check_interval", settings.health_check_interval),
        ];
        let least = Duration::from_millis(10);
        if let Some((what, value)) = times.into_iter().find(|(_, value)| *value < least) {
            return Err(ClientError::setting(what, format!("{} s", value.as_secs_f64()), "at least 0.01 s"));
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

fn unusable(problems: gpupool_config::ConfigProblems) -> ClientError {
    ClientError::Configuration(problems.to_string())
}

// How a client of many endpoints is set up.

/// What a client was set up with.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    /// Whether it was told of several endpoints.
    pub is_multi_endpoint: bool,
    pub strategy: Balancing,
    /// In percent, as the thresholds of requests that name none.
    pub memory_threshold: f64,
    pub utilization_threshold: f64,
    pub polling_interval: Duration,
    pub health_check_interval: Duration,
    /// How long an answer may take.
    pub endpoint_timeout: Duration,
    /// How often a request that failed everywhere is tried again.
    pub max_retries: u32,
    /// How long requests wait that do not say.
    pub worker_timeout: Duration,
    /// How long anything may be held that says nothing about it.
    pub stale_age: Option<Duration>,
}

impl Default for Settings {
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

//! The endpoint that a command talks to, and its credentials.
//!
//! In order of precedence: `--endpoint`; the environment or the configuration file; the Unix socket of the agent in the
//! state directory of this user, then of the machine; the default URL.
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use gpupool_client::local::LocalAgent;
use gpupool_client::{AgentClient, ClientBuilder, ClientError, Endpoint};
use gpupool_config::{
    ConfigConsumer, ConfigInputs, FlagValues, LoadedConfig, Setting, SettingOrigin, load_config, socket_path,
};

use crate::output::UsageError;

/// Endpoint options.
#[derive(Args, Clone, Default)]
pub(crate) struct EndpointArgs {
    /// Endpoint to use: http://HOST:PORT, https://HOST:PORT, or the path of an agent's Unix socket.
    ///
    /// The default is GPU_STATS_SERVICE_ENDPOINTS (several, separated by commas), then GPU_SERVICE_ENDPOINT, then the
    /// Unix socket of this machine's agent, then http://localhost:8000.
    #[arg(long, value_name = "URL")]
    pub endpoint: Option<String>,
    #[arg(long, value_name = "FILE", help = Setting::find("--ca-file").map_or_else(String::new, Setting::help))]
    pub ca_file: Option<PathBuf>,
}

impl EndpointArgs {
    /// Returns a client for the endpoint, with the configured token. Sends no request.
    pub fn client(&self) -> anyhow::Result<AgentClient> {
        let loaded = self.load()?;
        let endpoint = self.resolve_endpoint(&loaded).map_err(UsageError::new)?;
        client_for(endpoint, &loaded)
    }

    /// Returns one client per configured endpoint, or the default agent's client if none is configured.
    pub fn clients(&self) -> anyhow::Result<Vec<AgentClient>> {
        let loaded = self.load()?;
        let endpoints = self.configured_endpoints(&loaded).map_err(UsageError::new)?;
        if endpoints.len() > 1 {
            return endpoints.into_iter().map(|endpoint| client_for(endpoint, &loaded)).collect();
        }
        Ok(vec![self.client()?])
    }

    /// Prepares a client for several endpoints; `None` if fewer than two are configured.
    pub fn several_endpoints(&self) -> anyhow::Result<Option<ClientBuilder>> {
        let loaded = self.load()?;
        let is_several = self.configured_endpoints(&loaded).map_err(UsageError::new)?.len() > 1;
        Ok(is_several.then(|| ClientBuilder::from_config(&loaded)).transpose().map_err(UsageError::new)?)
    }

    /// Returns the client and the state directory that an agent of this user would use. There is no client if no
    /// endpoint is configured and no agent listens on a socket. A given `state_dir` selects its own agent only.
    pub fn client_or_state(&self, state_dir: Option<&Path>) -> anyhow::Result<(Option<AgentClient>, PathBuf)> {
        let loaded = self.load()?;
        let dir = state_dir.unwrap_or(&loaded.config.server.state_dir).to_owned();
        let endpoint = match state_dir {
            Some(dir) => Endpoint::choose(None, None, Some(&socket_path(dir))),
            None => self.resolve_endpoint(&loaded),
        };
        let endpoint = endpoint.map_err(UsageError::new)?;
        let is_configured = state_dir.is_none()
            && (self.endpoint.is_some() || loaded.client_endpoints().origin != SettingOrigin::Default);
        let client =
            (is_configured || endpoint.socket().is_some()).then(|| client_for(endpoint, &loaded)).transpose()?;
        Ok((client, dir))
    }

    /// Finds an agent of this machine for a command that starts processes here. `starts` is the subject of the error
    /// message, such as ``"`gpupool run` starts its command"``.
    pub async fn local_agent(&self, starts: &'static str) -> anyhow::Result<LocalAgent> {
        let loaded = self.load()?;
        let endpoints = self.configured_endpoints(&loaded).map_err(UsageError::new)?;
        LocalAgent::find(endpoints, &loaded, starts).await.map_err(with_hint)
    }

    /// Loads the client configuration of this machine.
    fn load(&self) -> anyhow::Result<LoadedConfig> {
        let flags = FlagValues::default().set("--ca-file", self.ca_file.as_ref().map(|path| path.display()));
        let inputs = ConfigInputs::from_system(flags, None, ConfigConsumer::Client).map_err(UsageError::new)?;
        Ok(load_config(&inputs).map_err(UsageError::new)?)
    }

    /// Returns the endpoints named on the command line, in the environment or in the file.
    fn configured_endpoints(&self, loaded: &LoadedConfig) -> Result<Vec<Endpoint>, ClientError> {
        if let Some(endpoint) = &self.endpoint {
            return Ok(vec![Endpoint::choose(Some(endpoint), None, None)?]);
        }
        let servers = loaded.client_endpoints();
        if servers.origin == SettingOrigin::Default {
            return Ok(Vec::new());
        }
        servers.urls.iter().map(|url| Endpoint::choose(None, Some(url), None)).collect()
    }

    fn resolve_endpoint(&self, loaded: &LoadedConfig) -> Result<Endpoint, ClientError> {
        let mut endpoints = self.configured_endpoints(loaded)?;
        if endpoints.len() > 1 {
            let urls: Vec<String> = endpoints.iter().map(ToString::to_string).collect();
            return Endpoint::choose(None, Some(&urls.join(",")), None);
        }
        if let Some(endpoint) = endpoints.pop() {
            return Ok(endpoint);
        }
        Endpoint::local_agent(&loaded.agent_sockets())
    }
}

/// Creates a client with the client settings of the configuration.
fn client_for(endpoint: Endpoint, loaded: &LoadedConfig) -> anyhow::Result<AgentClient> {
    AgentClient::from_config(endpoint, loaded).map_err(with_hint)
}

/// Runs a future on a new runtime. Tasks it leaves behind are cancelled.
pub(crate) fn block_on<T>(conversation: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start a runtime to call the agent")?.block_on(conversation)
}

/// Sends one request to an agent.
pub(crate) fn call_agent<T>(request: impl Future<Output = Result<T, ClientError>>) -> anyhow::Result<T> {
    block_on(async { request.await.map_err(with_hint) })
}

/// Adds the next step to an agent's error.
pub(crate) fn with_hint(error: ClientError) -> anyhow::Error {
    let hint = match error.code() {
        Some("not_allowed" | "not_your_account") => "run this as root or as the agent's user, or set GPUPOOL_TOKEN",
        Some("no_capacity") => "omit --no-wait to wait, or run `gpupool status` to see the leases",
        Some("token_unknown") => "create one on the agent's machine: gpupool token create --owner NAME",
        // The message contains its causes already.
        _ => return anyhow::anyhow!("{error}"),
    };
    anyhow::anyhow!("{error}; {hint}")
}

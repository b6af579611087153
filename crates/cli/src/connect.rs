//! Which agent a command asks, and as whom.
//!
//! `--endpoint`, else what the environment or the configuration file names, else the agent that listens on the Unix socket
//! of this user's or the machine's state directory, else the usual address.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use gpupool_client::local::LocalAgent;
use gpupool_client::{AgentClient, ClientBuilder, ClientError, Endpoint};
use gpupool_config::{
    ConfigConsumer, ConfigInputs, FlagValues, LoadedConfig, Setting, SettingOrigin, load_config, socket_path,
};

use crate::output::WrongUsage;

/// Which agent to ask.
#[derive(Args, Clone, Default)]
pub(crate) struct Connect {
    /// The agent to ask: http://HOST:PORT, https://HOST:PORT, or the path of its Unix socket.
    ///
    /// Unless given: GPU_STATS_SERVICE_ENDPOINTS (several, with commas between), GPU_SERVICE_ENDPOINT, then the Unix socket of this machine's agent, then http://localhost:8000.
    #[arg(long, value_name = "URL")]
    pub endpoint: Option<String>,
    #[arg(long, value_name = "FILE", help = Setting::find("--ca-file").map(Setting::help))]
    pub ca_file: Option<PathBuf>,
}

impl Connect {
    /// A client of that agent, with the token of the environment or the file. Nothing is asked yet.
    pub fn client(&self) -> anyhow::Result<AgentClient> {
        let loaded = self.load()?;
        let endpoint = self.endpoint_of(&loaded).map_err(WrongUsage::of)?;
        client_of(endpoint, &loaded)
    }

    /// A client of each agent somebody named; of the one that is asked anyway, where nobody named several.
    pub fn clients(&self) -> anyhow::Result<Vec<AgentClient>> {
        let loaded = self.load()?;
        let named = self.named(&loaded).map_err(WrongUsage::of)?;
        if named.len() > 1 {
            return named.into_iter().map(|endpoint| client_of(endpoint, &loaded)).collect();
        }
        Ok(vec![self.client()?])
    }

    /// Sets up a client of several agents, where somebody named several.
    pub fn several(&self) -> anyhow::Result<Option<ClientBuilder>> {
        let loaded = self.load()?;
        let is_several = self.named(&loaded).map_err(WrongUsage::of)?.len() > 1;
        Ok(is_several.then(|| ClientBuilder::from_config(&loaded)).transpose().map_err(WrongUsage::of)?)
    }

    /// The same, or no client where nobody named an agent and none listens on a socket; and the state directory an agent of
    /// this user would use. A named directory leaves no other agent than its own.
    pub fn client_or_state(&self, named: Option<&Path>) -> anyhow::Result<(Option<AgentClient>, PathBuf)> {
        let loaded = self.load()?;
        let dir = named.unwrap_or(&loaded.config.server.state_dir).to_owned();
        let endpoint = match named {
            Some(dir) => Endpoint::choose(None, None, Some(&socket_path(dir))),
            None => self.endpoint_of(&loaded),
        };
        let endpoint = endpoint.map_err(WrongUsage::of)?;
        let is_named =
            named.is_none() && (self.endpoint.is_some() || loaded.client_endpoints().origin != SettingOrigin::Default);
        let client = (is_named || endpoint.socket().is_some()).then(|| client_of(endpoint, &loaded)).transpose()?;
        Ok((client, dir))
    }

    /// An agent of this machine, for who starts something here; says so in a refusal (``"`gpupool run` starts its command"``).
    pub async fn local_agent(&self, starts: &'static str) -> anyhow::Result<LocalAgent> {
        let loaded = self.load()?;
        let named = self.named(&loaded).map_err(WrongUsage::of)?;
        LocalAgent::find(named, &loaded, starts).await.map_err(explained)
    }

    /// What is configured for clients on this machine.
    fn load(&self) -> anyhow::Result<LoadedConfig> {
        let flags = FlagValues::default().set("--ca-file", self.ca_file.as_ref().map(|path| path.display()));
        let inputs = ConfigInputs::from_system(flags, None, ConfigConsumer::Client).map_err(WrongUsage::of)?;
        Ok(load_config(&inputs).map_err(WrongUsage::of)?)
    }

    /// The agents somebody named, on the command line, in the environment or in the file; none where nobody did.
    fn named(&self, loaded: &LoadedConfig) -> Result<Vec<Endpoint>, ClientError> {
        if let Some(named) = &self.endpoint {
            return Ok(vec![Endpoint::choose(Some(named), None, None)?]);
        }
        let servers = loaded.client_endpoints();
        if servers.origin == SettingOrigin::Default {
            return Ok(Vec::new());
        }
        servers.urls.iter().map(|url| Endpoint::choose(None, Some(url), None)).collect()
    }

    fn endpoint_of(&self, loaded: &LoadedConfig) -> Result<Endpoint, ClientError> {
        let mut named = self.named(loaded)?;
        if named.len() > 1 {
            let urls: Vec<String> = named.iter().map(ToString::to_string).collect();
            return Endpoint::choose(None, Some(&urls.join(",")), None);
        }
        if let Some(endpoint) = named.pop() {
            return Ok(endpoint);
        }
        Endpoint::local_agent(&loaded.agent_sockets())
    }
}

/// A client with what is configured for clients.
fn client_of(endpoint: Endpoint, loaded: &LoadedConfig) -> anyhow::Result<AgentClient> {
    AgentClient::from_config(endpoint, loaded).map_err(explained)
}

/// Runs a conversation with an agent to its end. Tasks of it that are still running then get no more time.
pub(crate) fn converse<T>(talk: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start a runtime to ask the agent")?.block_on(talk)
}

/// Asks an agent one thing.
pub(crate) fn ask<T>(question: impl Future<Output = Result<T, ClientError>>) -> anyhow::Result<T> {
    converse(async { question.await.map_err(explained) })
}

/// What an agent's refusal means for whoever sits at this terminal, beside what the agent says.
pub(crate) fn explained(error: ClientError) -> anyhow::Error {
    let hint = match error.code() {
        Some("not_allowed" | "not_your_account") => {
            "ask as root, as the user the agent runs as, or with the token of an administrator in GPUPOOL_TOKEN"
        }
        Some("no_capacity") => "wait for it without --no-wait; gpupool status shows who holds what",
        Some("token_unknown") => "make one on the agent's machine with: gpupool token create --owner NAME",
        // Its words tell its causes already.
        _ => return anyhow::anyhow!("{error}"),
    };
    anyhow::anyhow!("{error}; {hint}")
}

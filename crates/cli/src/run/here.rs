//! Which agent to ask: one of this machine, and over its Unix socket if there is a way, because there it knows us.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use gpupool_api::node::this_machine;
use gpupool_api::pool::Pool;
use gpupool_client::{Client, ClientError, Endpoint, Secret};
use gpupool_config::{Loaded, Machine, Origin};

use super::limits::SOCKET_PATIENCE;

/// An agent of this machine.
#[derive(Debug)]
pub(super) struct Agent {
    pub client: Client,
}

impl Agent {
    /// Whether it knows our process, so that it can tie a lease to it.
    pub fn knows_us(&self) -> bool {
        self.client.endpoint().socket().is_some()
    }
}

/// The first of the servers that is an agent of this machine, or why none is.
pub(super) async fn find(loaded: &Loaded) -> anyhow::Result<Agent> {
    let servers = loaded.servers();
    let sockets = sockets(loaded);
    if servers.origin == Origin::Default
        && let Some(client) = sockets.iter().find_map(|path| listening(path, loaded))
    {
        return Ok(Agent { client });
    }
    let mut refusals = Vec::new();
    for url in &servers.urls {
        match at(url, &sockets, loaded).await {
            Ok(agent) => return Ok(agent),
            Err(error) => refusals.push(format!("{error:#}")),
        }
    }
    bail!("{}", refusals.join("\n"))
}

async fn at(url: &str, sockets: &[PathBuf], loaded: &Loaded) -> anyhow::Result<Agent> {
    let client = client(endpoint(url)?, loaded)?;
    if client.endpoint().socket().is_some() {
        return Ok(Agent { client });
    }
    let pool = client.pool().await?;
    check_is_here(&pool, client.endpoint())?;
    for path in sockets {
        // Another agent may listen there; the run's id tells.
        if let Some(way) = listening(path, loaded)
            && let Ok(Ok(same)) = tokio::time::timeout(SOCKET_PATIENCE, way.pool()).await
            && same.run_id == pool.run_id
        {
            return Ok(Agent { client: way });
        }
    }
    Ok(Agent { client })
}

fn check_is_here(pool: &Pool, endpoint: &Endpoint) -> anyhow::Result<()> {
    const WHAT_TO_DO: &str = "run this command there, or take a GPU of this machine: gpupool serve here, without --endpoint \
                              and GPU_SERVICE_ENDPOINT";
    let Some(here) = this_machine() else {
        bail!(
            "this machine has no id (/etc/machine-id), so nobody can tell whether {endpoint} is an agent of it: use its \
             Unix socket, --endpoint unix:/PATH/agent.sock"
        );
    };
    if pool.node_id != here {
        bail!(
            "{endpoint} is the agent of another machine ({}), and `gpupool run` starts its command on this one, where that \
             machine's GPUs are not: {WHAT_TO_DO}",
            pool.node
        );
    }
    Ok(())
}

/// Where agents of this machine listen unless told otherwise: this user's, and the machine's.
fn sockets(loaded: &Loaded) -> Vec<PathBuf> {
    let machine = Machine { root: true, host_name: String::new(), state_home: None };
    let mut folders = vec![loaded.config.server.state_dir.clone(), machine.state_dir()];
    folders.dedup();
    folders.iter().map(|folder| gpupool_agent::net::socket_path(folder)).collect()
}

/// A client of whoever listens on this socket, if anybody does.
fn listening(path: &Path, loaded: &Loaded) -> Option<Client> {
    std::os::unix::net::UnixStream::connect(path).ok()?;
    client(Endpoint::unix(path).ok()?, loaded).ok()
}

/// The settings write `unix:/PATH`.
fn endpoint(url: &str) -> Result<Endpoint, ClientError> {
    match url.strip_prefix("unix:") {
        Some(path) => Endpoint::unix(path.strip_prefix("//").unwrap_or(path)),
        None => url.parse(),
    }
}

fn client(endpoint: Endpoint, loaded: &Loaded) -> anyhow::Result<Client> {
    let settings = &loaded.config.client;
    let is_socket = endpoint.socket().is_some();
    let mut builder = Client::builder(endpoint).answer_timeout(settings.endpoint_timeout);
    // Over the socket the kernel says who we are; a token for some other server would only be unknown there.
    if let Some(token) = settings.token.as_ref().filter(|_| !is_socket) {
        builder = builder.token(Secret::new(token.expose()));
    }
    if let Some(file) = &settings.ca_file {
        builder = builder.ca_file(file);
    }
    builder.build().context("cannot set up a client")
}

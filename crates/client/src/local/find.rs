//! Which agent to ask: one of this machine, and over its Unix socket if there is a way, because there it knows us.

use std::path::{Path, PathBuf};

use gpupool_api::node::this_machine;
use gpupool_api::pool::Pool;
use gpupool_config::Loaded;

use crate::limits::SOCKET_PATIENCE;
use crate::{AgentClient, ClientError, Endpoint};

/// An agent of this machine.
#[derive(Debug, Clone)]
pub struct LocalAgent {
    client: AgentClient,
}

impl LocalAgent {
    /// The first of the named servers that is an agent of this machine, or why none is. Where none is named it is the one
    /// that listens on a socket of this machine, or else at the usual address.
    ///
    /// `starts` is what a refusal says is started on this machine, as in "`gpupool run` starts its command".
    pub async fn find(named: Vec<Endpoint>, loaded: &Loaded, starts: &'static str) -> Result<Self, ClientError> {
        let sockets = loaded.sockets();
        if named.is_empty()
            && let Some(client) = sockets.iter().find_map(|path| listening(path, loaded))
        {
            return Ok(Self { client });
        }
        let usual = Endpoint::choose(None, None, None)?;
        let mut refusals = Vec::new();
        for endpoint in if named.is_empty() { vec![usual] } else { named } {
            match Self::at(endpoint, &sockets, loaded, starts).await {
                Ok(agent) => return Ok(agent),
                Err(error) => refusals.push(error),
            }
        }
        Err(ClientError::NoLocalAgent(refusals))
    }

    /// The agent behind a client, which the caller knows to be of this machine.
    pub const fn known(client: AgentClient) -> Self {
        Self { client }
    }

    /// Its client.
    pub const fn client(&self) -> &AgentClient {
        &self.client
    }

    /// Whether it knows our process, so that it can tie a lease to it.
    pub fn knows_us(&self) -> bool {
        self.client.endpoint().socket().is_some()
    }

    async fn at(
        endpoint: Endpoint,
        sockets: &[PathBuf],
        loaded: &Loaded,
        starts: &'static str,
    ) -> Result<Self, ClientError> {
        let client = AgentClient::configured(endpoint, loaded)?;
        if client.endpoint().socket().is_some() {
            return Ok(Self { client });
        }
        let pool = client.pool().await?;
        check_is_here(&pool, client.endpoint(), starts)?;
        for path in sockets {
            // Another agent may listen there; the run's id tells.
            if let Some(way) = listening(path, loaded)
                && let Ok(Ok(same)) = tokio::time::timeout(SOCKET_PATIENCE, way.pool()).await
                && same.run_id == pool.run_id
            {
                return Ok(Self { client: way });
            }
        }
        Ok(Self { client })
    }
}

fn check_is_here(pool: &Pool, endpoint: &Endpoint, starts: &'static str) -> Result<(), ClientError> {
    let endpoint = endpoint.clone();
    let Some(here) = this_machine() else { return Err(ClientError::NoMachineId { endpoint }) };
    if pool.node_id != here {
        return Err(ClientError::AnotherMachine { endpoint, node: pool.node.clone(), starts });
    }
    Ok(())
}

/// A client of whoever listens on this socket, if anybody does.
fn listening(path: &Path, loaded: &Loaded) -> Option<AgentClient> {
    std::os::unix::net::UnixStream::connect(path).ok()?;
    AgentClient::configured(Endpoint::unix(path).ok()?, loaded).ok()
}

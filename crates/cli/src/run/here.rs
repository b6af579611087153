//! Which agent to ask: one of this machine, and over its Unix socket if there is a way, because there it knows us.

use std::path::{Path, PathBuf};

use anyhow::bail;
use gpupool_api::node::this_machine;
use gpupool_api::pool::Pool;
use gpupool_client::{AgentClient, Endpoint};
use gpupool_config::Loaded;

use crate::connect::{Connect, client_of, state_dirs};
use crate::output::WrongUsage;

use super::limits::SOCKET_PATIENCE;

/// An agent of this machine.
#[derive(Debug)]
pub(super) struct Agent {
    pub client: AgentClient,
}

impl Agent {
    /// Whether it knows our process, so that it can tie a lease to it.
    pub fn knows_us(&self) -> bool {
        self.client.endpoint().socket().is_some()
    }
}

/// The first of the servers that is an agent of this machine, or why none is.
pub(super) async fn find(connect: &Connect) -> anyhow::Result<Agent> {
    let loaded = connect.load()?;
    let sockets = sockets(&loaded);
    let named = connect.named(&loaded).map_err(WrongUsage::of)?;
    if named.is_empty()
        && let Some(client) = sockets.iter().find_map(|path| listening(path, &loaded))
    {
        return Ok(Agent { client });
    }
    let usual = Endpoint::choose(None, None, None)?;
    let mut refusals = Vec::new();
    for endpoint in if named.is_empty() { vec![usual] } else { named } {
        match at(endpoint, &sockets, &loaded).await {
            Ok(agent) => return Ok(agent),
            Err(error) => refusals.push(format!("{error:#}")),
        }
    }
    bail!("{}", refusals.join("\n"))
}

async fn at(endpoint: Endpoint, sockets: &[PathBuf], loaded: &Loaded) -> anyhow::Result<Agent> {
    let client = client_of(endpoint, loaded)?;
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
    state_dirs(loaded).into_iter().map(gpupool_agent::socket_path).collect()
}

/// A client of whoever listens on this socket, if anybody does.
fn listening(path: &Path, loaded: &Loaded) -> Option<AgentClient> {
    std::os::unix::net::UnixStream::connect(path).ok()?;
    client_of(Endpoint::unix(path).ok()?, loaded).ok()
}

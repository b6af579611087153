//! GPUs for processes that are started on this machine: an agent of this machine, and leases that are this process' own.
//!
//! [`LocalAgent`] is such an agent, asked over its Unix socket where there is a way, because there it knows our process.
//! [`LeaseBinding`] ties a lease to us, so that it ends with us in whatever way we end, and says when it is lost.

use std::path::{Path, PathBuf};
use std::time::Duration;

use gpupool_api::lease::{AttachBody, AttachResponse, LeaseBody, LeaseState, RevocationAction};
use gpupool_api::node::machine_id;
use gpupool_api::pool::PoolBody;
use gpupool_config::LoadedConfig;

use crate::limits::{AWAY_PAUSE, SOCKET_PATIENCE};
use crate::{AgentClient, ClientError, Endpoint, EventStream, LeaseHold, LeaseHoldEnd};

// Which agent to ask: one of this machine, and over its Unix socket if there is a way, because there it knows us.

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
    pub async fn find(named: Vec<Endpoint>, loaded: &LoadedConfig, starts: &'static str) -> Result<Self, ClientError> {
        let sockets = loaded.agent_sockets();
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
    pub const fn from_client(client: AgentClient) -> Self {
        Self { client }
    }

    /// Its client.
    pub const fn client(&self) -> &AgentClient {
        &self.client
    }

    /// Whether it knows our process, so that it can tie a lease to it.
    pub fn sees_our_process(&self) -> bool {
        self.client.endpoint().socket().is_some()
    }

    async fn at(
        endpoint: Endpoint,
        sockets: &[PathBuf],
        loaded: &LoadedConfig,
        starts: &'static str,
    ) -> Result<Self, ClientError> {
        let client = AgentClient::from_config(endpoint, loaded)?;
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

fn check_is_here(pool: &PoolBody, endpoint: &Endpoint, starts: &'static str) -> Result<(), ClientError> {
    let endpoint = endpoint.clone();
    let Some(here) = machine_id() else { return Err(ClientError::NoMachineId { endpoint }) };
    if pool.node_id != here {
        return Err(ClientError::AnotherMachine { endpoint, node: pool.node.clone(), starts });
    }
    Ok(())
}

/// A client of whoever listens on this socket, if anybody does.
fn listening(path: &Path, loaded: &LoadedConfig) -> Option<AgentClient> {
    std::os::unix::net::UnixStream::connect(path).ok()?;
    AgentClient::from_config(Endpoint::unix(path).ok()?, loaded).ok()
}

// What ties a lease to us while work runs under it, and how we learn that it is lost.
//
// Over the Unix socket the agent watches our process: no renewals, and our end, in whatever way, releases. An agent that
// was restarted watches us again by itself; we attach once more, so that it also knows what runs under the lease. Over
// TCP an open connection is the lease, made anew when it breaks. An agent that is away does not end the work.
//
// Has no task of its own: the loss is noticed by whoever waits for it.

/// A lease that is ours for as long as we live.
#[derive(Debug)]
pub struct LeaseBinding {
    client: AgentClient,
    lease: u64,
    token: u64,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// The agent watches our process.
    Process(RevocationAction),
    /// The agent watches this connection.
    Connection(Box<LeaseHold>),
}

/// What happens to a lease that is still ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseNotice {
    /// The agent is away; how it does not answer. Told once until it is back.
    AgentAway(String),
    /// The agent is back.
    AgentReturned,
    /// The lease will be taken back soon; why.
    RevocationAnnounced(Option<String>),
}

impl LocalAgent {
    /// Ties a granted lease to us: to our process where the agent knows it, which then also puts a job of the body into a
    /// group, where it can make one; else to a connection. The token of the body is that of the lease, whatever it says.
    pub async fn bind_lease(
        &self,
        lease: &LeaseBody,
        body: AttachBody,
    ) -> Result<(LeaseBinding, Option<AttachResponse>), ClientError> {
        let (client, token) = (self.client().clone(), lease.token.unwrap_or_default());
        if self.sees_our_process() {
            let body = AttachBody { token, ..body };
            match client.attach(lease.id, &body).await {
                Ok(attached) => {
                    let kind = Kind::Process(body.on_revocation);
                    return Ok((LeaseBinding { client, lease: lease.id, token, kind }, Some(attached)));
                }
                // An agent in another container sees the connection, not the process.
                Err(error) if error.code() == Some("no_process") => {}
                Err(error) => return Err(error),
            }
        }
        let hold = client.hold_lease(lease.id, token).await?;
        Ok((LeaseBinding { client, lease: lease.id, token, kind: Kind::Connection(Box::new(hold)) }, None))
    }
}

impl LeaseBinding {
    /// Waits until the lease is lost, and says why. Can be dropped and waited for again.
    pub async fn wait_until_lost(&mut self, notices: impl FnMut(LeaseNotice)) -> String {
        let mut away = Away { notices, is_said: false };
        match &mut self.kind {
            Kind::Process(on_revocation) => {
                let body = AttachBody { token: self.token, on_revocation: *on_revocation, ..AttachBody::default() };
                watch(&self.client, self.lease, &body, &mut away).await
            }
            Kind::Connection(hold) => keep(&self.client, hold, self.token, &mut away).await,
        }
    }

    /// Whether the agent watches our process; else it watches a connection.
    pub const fn is_bound_to_process(&self) -> bool {
        matches!(self.kind, Kind::Process(_))
    }
}

/// Follows what happens to the lease.
async fn watch(
    client: &AgentClient,
    lease: u64,
    again: &AttachBody,
    away: &mut Away<impl FnMut(LeaseNotice)>,
) -> String {
    let mut events: Option<EventStream> = None;
    let mut has_restarted = false;
    loop {
        let step = match &mut events {
            // Listened to first and looked at then, so that nothing falls between.
            None => match client.events(None).await {
                Ok(opened) => {
                    events = Some(opened);
                    look(client, lease, has_restarted.then_some(again)).await
                }
                Err(error) => Err(error),
            },
            Some(open) => match open.next().await {
                Ok((_, event)) if event.kind == "reset" => look(client, lease, Some(again)).await,
                Ok((_, event)) if event.lease == Some(lease) && event.kind == "ended" => {
                    look(client, lease, None).await
                }
                Ok((_, event)) if event.lease == Some(lease) && event.kind == "revoking" => {
                    (away.notices)(LeaseNotice::RevocationAnnounced(event.reason));
                    Ok(None)
                }
                Ok(_) => Ok(None),
                Err(error) => Err(error),
            },
        };
        match step {
            Ok(Some(lost)) => return lost,
            Ok(None) => away.is_back(),
            Err(error) => {
                (events, has_restarted) = (None, true);
                away.pause(&error).await;
            }
        }
    }
}

/// Whether the lease is lost. After a restart of the agent it is tied to us again.
async fn look(client: &AgentClient, lease: u64, again: Option<&AttachBody>) -> Result<Option<String>, ClientError> {
    let now = match again {
        Some(body) => client.attach(lease, body).await.map(|attached| attached.lease),
        None => client.follow(lease, Duration::ZERO).await,
    };
    match now {
        Ok(now) => Ok(lost(&now)),
        Err(error) if error.is_lease_lost() => Ok(Some(why(client, lease, &error).await)),
        Err(error) => Err(error),
    }
}

/// Keeps a connection open that is the lease.
async fn keep(
    client: &AgentClient,
    hold: &mut LeaseHold,
    token: u64,
    away: &mut Away<impl FnMut(LeaseNotice)>,
) -> String {
    let lease = hold.lease().id;
    loop {
        if let LeaseHoldEnd::Ended(now) = hold.wait_until_ended().await {
            return lost(&now).unwrap_or_else(|| "the agent ended it".into());
        }
        loop {
            match client.hold_lease(lease, token).await {
                Ok(again) => {
                    *hold = again;
                    away.is_back();
                    break;
                }
                Err(error) if error.is_lease_lost() => return why(client, lease, &error).await,
                Err(error) => away.pause(&error).await,
            }
        }
    }
}

/// Why a lease that is over is over; `None` for one that is not.
fn lost(lease: &LeaseBody) -> Option<String> {
    let what = lease.state.name();
    lease.state.is_ended().then(|| match &lease.reason {
        Some(reason) => format!("{what}: {reason}"),
        None => what.to_owned(),
    })
}

/// Why a lease that was to be given back had been lost before; `None` where it was not.
pub fn loss_before_release(lease: &LeaseBody) -> Option<String> {
    if lease.state == LeaseState::Released { None } else { lost(lease) }
}

/// The agent says that it is over; it may remember why.
async fn why(client: &AgentClient, lease: u64, error: &ClientError) -> String {
    let told = client.follow(lease, Duration::ZERO).await.ok().and_then(|lease| lost(&lease));
    told.unwrap_or_else(|| error.to_string())
}

/// Says once that the agent is away, and once that it is back.
struct Away<F> {
    notices: F,
    is_said: bool,
}

impl<F: FnMut(LeaseNotice)> Away<F> {
    async fn pause(&mut self, error: &ClientError) {
        if !std::mem::replace(&mut self.is_said, true) {
            (self.notices)(LeaseNotice::AgentAway(error.to_string()));
        }
        tokio::time::sleep(AWAY_PAUSE).await;
    }

    fn is_back(&mut self) {
        if std::mem::take(&mut self.is_said) {
            (self.notices)(LeaseNotice::AgentReturned);
        }
    }
}

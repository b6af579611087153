//! Leases for processes that are started on this machine.
//!
//! [`LocalAgent`] is an agent of this machine, reached over its Unix socket if possible, because the agent then knows
//! the calling process. [`LeaseBinding`] ties a lease to this process, so that the lease ends with the process in every
//! case, and reports its loss.

use std::path::{Path, PathBuf};
use std::time::Duration;

use gpupool_api::lease::{AttachBody, AttachResponse, LeaseBody, LeaseState, RevocationAction};
use gpupool_api::node::machine_id;
use gpupool_api::pool::PoolBody;
use gpupool_config::LoadedConfig;

use crate::limits::{RECONNECT_PAUSE, SOCKET_PROBE_TIMEOUT};
use crate::{AgentClient, ClientError, Endpoint, EventStream, LeaseHold, LeaseHoldEnd};

/// An agent of this machine.
#[derive(Debug, Clone)]
pub struct LocalAgent {
    client: AgentClient,
}

impl LocalAgent {
    /// Finds the first of the named servers that is an agent of this machine. If none is named, uses the agent that
    /// listens on a socket of this machine, or else the default address.
    ///
    /// `starts` completes the error message, as in "`gpupool run` starts its command".
    pub async fn find(named: Vec<Endpoint>, loaded: &LoadedConfig, starts: &'static str) -> Result<Self, ClientError> {
        let sockets = loaded.agent_sockets();
        if named.is_empty()
            && let Some(client) = sockets.iter().find_map(|path| client_of_socket(path, loaded))
        {
            return Ok(Self { client });
        }
        let default = Endpoint::choose(None, None, None)?;
        let mut refusals = Vec::new();
        for endpoint in if named.is_empty() { vec![default] } else { named } {
            match Self::connect(endpoint, &sockets, loaded, starts).await {
                Ok(agent) => return Ok(agent),
                Err(error) => refusals.push(error),
            }
        }
        Err(ClientError::NoLocalAgent(refusals))
    }

    /// Wraps a client whose agent is known to be on this machine.
    pub const fn from_client(client: AgentClient) -> Self {
        Self { client }
    }

    /// Returns the client of the agent.
    pub const fn client(&self) -> &AgentClient {
        &self.client
    }

    /// Whether the agent knows the calling process, so that a lease can be tied to it.
    pub fn sees_our_process(&self) -> bool {
        self.client.endpoint().socket().is_some()
    }

    async fn connect(
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
        check_same_machine(&pool, client.endpoint(), starts)?;
        for path in sockets {
            // Another agent may listen there; the run id identifies the agent.
            if let Some(socket_client) = client_of_socket(path, loaded)
                && let Ok(Ok(same)) = tokio::time::timeout(SOCKET_PROBE_TIMEOUT, socket_client.pool()).await
                && same.run_id == pool.run_id
            {
                return Ok(Self { client: socket_client });
            }
        }
        Ok(Self { client })
    }
}

fn check_same_machine(pool: &PoolBody, endpoint: &Endpoint, starts: &'static str) -> Result<(), ClientError> {
    let endpoint = endpoint.clone();
    let Some(here) = machine_id() else { return Err(ClientError::NoMachineId { endpoint }) };
    if pool.node_id != here {
        return Err(ClientError::AnotherMachine { endpoint, node: pool.node.clone(), starts });
    }
    Ok(())
}

/// Returns a client of the agent that listens on this socket, if any.
fn client_of_socket(path: &Path, loaded: &LoadedConfig) -> Option<AgentClient> {
    std::os::unix::net::UnixStream::connect(path).ok()?;
    AgentClient::from_config(Endpoint::unix(path).ok()?, loaded).ok()
}

// The binding of a lease to this process while work runs under it.
//
// Over the Unix socket the agent watches this process: no renewals are needed, and the end of the process releases the
// lease. A restarted agent resumes watching the process; the binding attaches once more, so that the agent also
// knows the processes under the lease. Over TCP an open connection holds the lease and is reopened after it breaks. An
// absent agent does not end the work.
//
// The binding has no task of its own: a loss is noticed while a caller waits for it.

/// A lease that lives as long as this process.
#[derive(Debug)]
pub struct LeaseBinding {
    client: AgentClient,
    lease: u64,
    token: u64,
    kind: BindingKind,
}

#[derive(Debug)]
enum BindingKind {
    /// The agent watches this process.
    Process(RevocationAction),
    /// The agent watches this connection.
    Connection(Box<LeaseHold>),
}

/// Event of a lease that is still held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseNotice {
    /// The agent is away, with the error. Reported once until the agent returns.
    AgentAway(String),
    /// The agent is back.
    AgentReturned,
    /// The lease will be revoked soon, with the reason.
    RevocationAnnounced(Option<String>),
}

impl LocalAgent {
    /// Ties a granted lease to this process if the agent knows it, else to a connection. Tied to a process, a job named
    /// by the body is also placed in a control group if possible. The token of the lease replaces that of the body.
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
                    let kind = BindingKind::Process(body.on_revocation);
                    return Ok((LeaseBinding { client, lease: lease.id, token, kind }, Some(attached)));
                }
                // An agent in another container sees the connection, not the process.
                Err(error) if error.code() == Some("no_process") => {}
                Err(error) => return Err(error),
            }
        }
        let hold = client.hold_lease(lease.id, token).await?;
        Ok((LeaseBinding { client, lease: lease.id, token, kind: BindingKind::Connection(Box::new(hold)) }, None))
    }
}

impl LeaseBinding {
    /// Waits until the lease is lost and returns the reason. Cancel safe.
    pub async fn wait_until_lost(&mut self, notices: impl FnMut(LeaseNotice)) -> String {
        let mut absence = AbsenceNotifier { notices, is_reported: false };
        match &mut self.kind {
            BindingKind::Process(on_revocation) => {
                let body = AttachBody { token: self.token, on_revocation: *on_revocation, ..AttachBody::default() };
                observe_until_lost(&self.client, self.lease, &body, &mut absence).await
            }
            BindingKind::Connection(hold) => hold_until_lost(&self.client, hold, self.token, &mut absence).await,
        }
    }

    /// Whether the agent watches this process rather than a connection.
    pub const fn is_bound_to_process(&self) -> bool {
        matches!(self.kind, BindingKind::Process(_))
    }
}

/// Observes the events of the lease until it is lost.
async fn observe_until_lost(
    client: &AgentClient,
    lease: u64,
    attach_body: &AttachBody,
    absence: &mut AbsenceNotifier<impl FnMut(LeaseNotice)>,
) -> String {
    let mut events: Option<EventStream> = None;
    let mut has_restarted = false;
    loop {
        let step = match &mut events {
            // Subscribes before it checks, so that no event is missed.
            None => match client.events(None).await {
                Ok(opened) => {
                    events = Some(opened);
                    check_lease(client, lease, has_restarted.then_some(attach_body)).await
                }
                Err(error) => Err(error),
            },
            Some(open) => match open.next().await {
                Ok((_, event)) if event.kind == "reset" => check_lease(client, lease, Some(attach_body)).await,
                Ok((_, event)) if event.lease == Some(lease) && event.kind == "ended" => {
                    check_lease(client, lease, None).await
                }
                Ok((_, event)) if event.lease == Some(lease) && event.kind == "revoking" => {
                    (absence.notices)(LeaseNotice::RevocationAnnounced(event.reason));
                    Ok(None)
                }
                Ok(_) => Ok(None),
                Err(error) => Err(error),
            },
        };
        match step {
            Ok(Some(lost)) => return lost,
            Ok(None) => absence.report_return(),
            Err(error) => {
                (events, has_restarted) = (None, true);
                absence.report_and_pause(&error).await;
            }
        }
    }
}

/// Returns the reason if the lease is lost. After a restart of the agent, attaches again.
async fn check_lease(
    client: &AgentClient,
    lease: u64,
    attach_body: Option<&AttachBody>,
) -> Result<Option<String>, ClientError> {
    let now = match attach_body {
        Some(body) => client.attach(lease, body).await.map(|attached| attached.lease),
        None => client.follow(lease, Duration::ZERO).await,
    };
    match now {
        Ok(now) => Ok(loss_reason(&now)),
        Err(error) if error.is_lease_lost() => Ok(Some(fetch_loss_reason(client, lease, &error).await)),
        Err(error) => Err(error),
    }
}

/// Keeps the connection open that holds the lease.
async fn hold_until_lost(
    client: &AgentClient,
    hold: &mut LeaseHold,
    token: u64,
    absence: &mut AbsenceNotifier<impl FnMut(LeaseNotice)>,
) -> String {
    let lease = hold.lease().id;
    loop {
        if let LeaseHoldEnd::Ended(now) = hold.wait_until_ended().await {
            return loss_reason(&now).unwrap_or_else(|| "the agent ended it".into());
        }
        loop {
            match client.hold_lease(lease, token).await {
                Ok(reopened) => {
                    *hold = reopened;
                    absence.report_return();
                    break;
                }
                Err(error) if error.is_lease_lost() => return fetch_loss_reason(client, lease, &error).await,
                Err(error) => absence.report_and_pause(&error).await,
            }
        }
    }
}

/// Returns the reason for the end of a lease; `None` if it has not ended.
fn loss_reason(lease: &LeaseBody) -> Option<String> {
    let state = lease.state.name();
    lease.state.is_ended().then(|| match &lease.reason {
        Some(reason) => format!("{state}: {reason}"),
        None => state.to_owned(),
    })
}

/// Returns the reason for the loss of a lease before its release; `None` if it was not lost.
pub fn loss_before_release(lease: &LeaseBody) -> Option<String> {
    if lease.state == LeaseState::Released { None } else { loss_reason(lease) }
}

/// Fetches the reason of the end from the agent; if that fails, returns the error.
async fn fetch_loss_reason(client: &AgentClient, lease: u64, error: &ClientError) -> String {
    let reason = client.follow(lease, Duration::ZERO).await.ok().and_then(|lease| loss_reason(&lease));
    reason.unwrap_or_else(|| error.to_string())
}

/// Reports once that the agent is away, and once that it is back.
struct AbsenceNotifier<F> {
    notices: F,
    is_reported: bool,
}

impl<F: FnMut(LeaseNotice)> AbsenceNotifier<F> {
    async fn report_and_pause(&mut self, error: &ClientError) {
        if !std::mem::replace(&mut self.is_reported, true) {
            (self.notices)(LeaseNotice::AgentAway(error.to_string()));
        }
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }

    fn report_return(&mut self) {
        if std::mem::take(&mut self.is_reported) {
            (self.notices)(LeaseNotice::AgentReturned);
        }
    }
}

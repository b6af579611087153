//! What ties the lease to us while the command runs, and how we learn that it is lost.
//!
//! Over the Unix socket the agent watches our process: no renewals, and our end, in whatever way, releases. An agent that
//! was restarted watches us again by itself; we attach once more, so that it also knows what runs under the lease. Over
//! TCP an open connection is the lease, made anew when it breaks. An agent that is away does not end the command.

use std::time::Duration;

use gpupool_api::lease::{AttachBody, Attached, Lease, State};
use gpupool_client::{AgentClient, ClientError, Events, Hold, HoldEnd};

use super::limits::AWAY_PAUSE;
use super::say::Voice;

/// A lease that is ours for as long as we live.
#[derive(Debug)]
pub(super) struct Tether {
    client: AgentClient,
    lease: u64,
    token: u64,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// The agent watches our process.
    Process,
    /// The agent watches this connection.
    Connection(Box<Hold>),
}

/// Why the lease is not ours any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Lost(pub String);

impl Tether {
    /// Ties the lease to our process, and has the command put into a group of the agent, where it can make one.
    pub async fn to_process(
        client: &AgentClient,
        lease: &Lease,
        job_pid: u32,
        host_memory_mib: Option<u64>,
    ) -> Result<(Self, Attached), ClientError> {
        let token = lease.token.unwrap_or_default();
        let body = AttachBody { token, job_pid: Some(job_pid), host_memory_mib, ..AttachBody::default() };
        let attached = client.attach(lease.id, &body).await?;
        Ok((Self { client: client.clone(), lease: lease.id, token, kind: Kind::Process }, attached))
    }

    /// Ties the lease to a connection.
    pub async fn to_connection(client: &AgentClient, lease: &Lease) -> Result<Self, ClientError> {
        let token = lease.token.unwrap_or_default();
        let hold = client.hold(lease.id, token).await?;
        Ok(Self { client: client.clone(), lease: lease.id, token, kind: Kind::Connection(Box::new(hold)) })
    }

    /// Waits until the lease is lost.
    pub async fn lost(&mut self, voice: Voice) -> Lost {
        let mut away = Away { voice, is_said: false };
        match &mut self.kind {
            Kind::Process => watch(&self.client, self.lease, self.token, &mut away).await,
            Kind::Connection(hold) => keep(&self.client, hold, self.token, &mut away).await,
        }
    }
}

/// Follows what happens to the lease.
async fn watch(client: &AgentClient, lease: u64, token: u64, away: &mut Away) -> Lost {
    let mut events: Option<Events> = None;
    let mut has_restarted = false;
    loop {
        let step = match &mut events {
            // Listened to first and looked at then, so that nothing falls between.
            None => match client.events(None).await {
                Ok(opened) => {
                    events = Some(opened);
                    look(client, lease, token, has_restarted).await
                }
                Err(error) => Err(error),
            },
            Some(open) => match open.next().await {
                Ok((_, event)) if event.kind == "reset" => look(client, lease, token, true).await,
                Ok((_, event)) if event.lease == Some(lease) && event.kind == "ended" => {
                    look(client, lease, token, false).await
                }
                Ok((_, event)) if event.lease == Some(lease) && event.kind == "revoking" => {
                    away.voice.warn(announced(event.reason.as_deref()));
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

fn announced(reason: Option<&str>) -> String {
    let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
    format!("the lease will be taken back soon{reason}")
}

/// Whether the lease is lost. After a restart of the agent it is tied to us again.
async fn look(client: &AgentClient, lease: u64, token: u64, again: bool) -> Result<Option<Lost>, ClientError> {
    let now = if again {
        let body = AttachBody { token, ..AttachBody::default() };
        client.attach(lease, &body).await.map(|attached| attached.lease)
    } else {
        client.follow(lease, Duration::ZERO).await
    };
    match now {
        Ok(now) => Ok(lost(&now)),
        Err(error) if means_lost(&error) => Ok(Some(why(client, lease, &error).await)),
        Err(error) => Err(error),
    }
}

/// Keeps a connection open that is the lease.
async fn keep(client: &AgentClient, hold: &mut Hold, token: u64, away: &mut Away) -> Lost {
    let lease = hold.lease().id;
    loop {
        if let HoldEnd::Ended(now) = hold.ended().await {
            return lost(&now).unwrap_or_else(|| Lost("the agent ended it".into()));
        }
        loop {
            match client.hold(lease, token).await {
                Ok(again) => {
                    *hold = again;
                    away.is_back();
                    break;
                }
                Err(error) if means_lost(&error) => return why(client, lease, &error).await,
                Err(error) => away.pause(&error).await,
            }
        }
    }
}

/// Why a lease that is over is over; `None` for one that is not.
fn lost(lease: &Lease) -> Option<Lost> {
    let what = match lease.state {
        State::Queued | State::Offered | State::Active => return None,
        state => state.name(),
    };
    Some(Lost(match &lease.reason {
        Some(reason) => format!("{what}: {reason}"),
        None => what.to_owned(),
    }))
}

/// The same for a lease that was to be given back: `None` where that is what happened.
pub(super) fn lost_by_others(lease: &Lease) -> Option<Lost> {
    if lease.state == State::Released { None } else { lost(lease) }
}

fn means_lost(error: &ClientError) -> bool {
    matches!(error.code(), Some("stale" | "ended" | "not_granted" | "unknown_lease"))
}

/// The agent says that it is over; it may remember why.
async fn why(client: &AgentClient, lease: u64, error: &ClientError) -> Lost {
    let told = client.follow(lease, Duration::ZERO).await.ok().and_then(|lease| lost(&lease));
    told.unwrap_or_else(|| Lost(error.to_string()))
}

/// Says once that the agent is away, and once that it is back.
struct Away {
    voice: Voice,
    is_said: bool,
}

impl Away {
    async fn pause(&mut self, error: &ClientError) {
        if !self.is_said {
            self.voice.note(format_args!("the agent is away, the command goes on ({error})"));
            self.is_said = true;
        }
        tokio::time::sleep(AWAY_PAUSE).await;
    }

    fn is_back(&mut self) {
        if std::mem::take(&mut self.is_said) {
            self.voice.note("the agent is back");
        }
    }
}

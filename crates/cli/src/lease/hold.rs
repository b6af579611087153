//! Holding a lease by an open connection until this command is ended. Killed without a chance to say so, the connection
//! closes and the agent takes the lease back.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use gpupool_api::lease::Lease;
use gpupool_client::limits::AWAY;
use gpupool_client::{AgentClient, Hold, HoldEnd, LeaseGuard};
use tokio::time::Instant;

use crate::connect::explained;
use crate::output::note;
use crate::signals::Ending;
use crate::text::clean;

/// Between two tries to take hold again.
const PAUSE: Duration = Duration::from_millis(250);

/// Tells of the lease once it is held, and holds it.
pub(super) async fn hold(
    client: &AgentClient,
    guard: LeaseGuard,
    ending: &mut Ending,
    tell: impl FnOnce(&Lease) -> anyhow::Result<()>,
) -> anyhow::Result<ExitCode> {
    let lease = guard.lease();
    let token = lease.token.context("the agent does not say the lease's token")?;
    let mut held = client.hold(lease.id, token).await.map_err(explained)?;
    // From here on the connection keeps it.
    let lease = guard.let_go_on();
    tell(&lease)?;
    note(&format!("lease {} is held until this command ends", lease.id));
    loop {
        let end = tokio::select! {
            end = held.ended() => end,
            () = ending.told() => return give_back(client, lease.id).await,
        };
        if let HoldEnd::Ended(lease) = end {
            bail!("lease {} {}", lease.id, why(&lease));
        }
        note(&format!("the connection broke; taking hold of lease {} again", lease.id));
        held = tokio::select! {
            held = again(client, lease.id, token) => held?,
            () = ending.told() => return give_back(client, lease.id).await,
        };
    }
}

async fn give_back(client: &AgentClient, lease: u64) -> anyhow::Result<ExitCode> {
    client.release(lease).await.map_err(explained)?;
    note(&format!("lease {lease} released"));
    Ok(ExitCode::SUCCESS)
}

/// Takes hold again after the agent was away, for as long as a client waits for one. Once it is back, the agent waits for its
/// holders too.
async fn again(client: &AgentClient, lease: u64, token: u64) -> anyhow::Result<Hold> {
    let since = Instant::now();
    loop {
        match client.hold(lease, token).await {
            Err(error) if error.is_passing() && since.elapsed() < AWAY => tokio::time::sleep(PAUSE).await,
            answer => return answer.map_err(explained),
        }
    }
}

fn why(lease: &Lease) -> String {
    let reason = lease.reason.as_deref().unwrap_or("the agent does not say why");
    format!("{}: {}", lease.state.name(), clean(reason))
}

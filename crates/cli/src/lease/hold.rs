//! Holding a lease by an open connection until this command is ended. Killed without a chance to say so, the connection
//! closes and the agent takes the lease back.

use std::process::ExitCode;

use anyhow::{Context, bail};
use gpupool_api::lease::Lease;
use gpupool_client::{Client, Hold, HoldEnd, LeaseGuard};

use crate::connect::explained;
use crate::signals::Ending;
use crate::text::clean;

/// Tells of the lease once it is held, and holds it.
pub(super) async fn hold(
    client: &Client,
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
    eprintln!("lease {} is held until this command ends", lease.id);
    loop {
        let end = tokio::select! {
            end = held.ended() => end,
            () = ending.told() => {
                drop(held);
                client.release(lease.id).await.map_err(explained)?;
                eprintln!("lease {} released", lease.id);
                return Ok(ExitCode::SUCCESS);
            }
        };
        held = match end {
            HoldEnd::Ended(lease) => bail!("lease {} {}", lease.id, why(&lease)),
            HoldEnd::Disconnected => again(client, lease.id, token).await?,
        };
    }
}

/// Takes hold again after the agent was away. The client tries for a while; the agent waits for as long for its holders.
async fn again(client: &Client, lease: u64, token: u64) -> anyhow::Result<Hold> {
    eprintln!("the connection broke; taking hold of lease {lease} again");
    // A plain question is asked again until the agent answers, so that holding finds it there.
    client.follow(lease, std::time::Duration::ZERO).await.map_err(explained)?;
    client.hold(lease, token).await.map_err(explained)
}

fn why(lease: &Lease) -> String {
    let reason = lease.reason.as_deref().unwrap_or("the agent does not say why");
    format!("{}: {}", lease.state.name(), clean(reason))
}

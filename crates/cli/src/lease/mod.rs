//! `gpupool lease`: taking, keeping, giving back and listing leases by hand or in a script.

mod acquire;
mod export;
mod hold;
mod list;

use std::process::ExitCode;

use anyhow::bail;
use clap::{Args, Subcommand};
use gpupool_api::job_environment as job;
use gpupool_api::lease::Lease;

use crate::connect::{Connect, converse, explained};
use crate::output::{WrongUsage, write_json, write_text};

/// Leases by hand.
#[derive(Subcommand)]
pub(crate) enum Leases {
    /// Take GPUs, and print the lease in JSON.
    ///
    /// It ends with its ttl unless it is renewed, or held with --hold. `gpupool run` does all of it around a command.
    Acquire(Box<acquire::Acquire>),
    /// Keep a lease for another ttl.
    Renew(Renew),
    /// Give leases back, or stop waiting. Twice is harmless.
    Release(Release),
    /// Leases that are held or wait.
    List(list::List),
}

/// Which lease, and what shows that it is ours.
#[derive(Args)]
pub(crate) struct Renew {
    /// The number of the lease; GPUPOOL_LEASE unless given.
    id: Option<u64>,
    /// The token it was granted with; GPUPOOL_FENCING_TOKEN unless given.
    #[arg(long, value_name = "TOKEN")]
    token: Option<u64>,
    /// Answer in JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: Connect,
}

/// Which leases.
#[derive(Args)]
pub(crate) struct Release {
    /// The numbers of the leases.
    #[arg(required = true)]
    ids: Vec<u64>,
    /// Answer in JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: Connect,
}

pub(crate) fn run(command: &Leases) -> anyhow::Result<ExitCode> {
    match command {
        Leases::Acquire(arguments) => acquire::run(arguments),
        Leases::Renew(arguments) => renew(arguments),
        Leases::Release(arguments) => release(arguments),
        Leases::List(arguments) => list::run(arguments),
    }
}

fn renew(arguments: &Renew) -> anyhow::Result<ExitCode> {
    let id = given_or_variable(arguments.id, job::LEASE, "the number of the lease")?;
    let token = given_or_variable(arguments.token, job::FENCING_TOKEN, "--token")?;
    let client = of_lease(&arguments.connect, &[id]).client()?;
    let lease = converse(async { client.renew(id, token).await.map_err(explained) })?;
    if arguments.json {
        write_json(&lease)?;
    } else {
        write_text(&format!("lease {id} {}\n", lasts(&lease)))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn release(arguments: &Release) -> anyhow::Result<ExitCode> {
    let client = of_lease(&arguments.connect, &arguments.ids).client()?;
    let mut released = Vec::new();
    let mut unknown = Vec::new();
    converse(async {
        for id in &arguments.ids {
            match client.release(*id).await.map_err(explained)? {
                Some(lease) => released.push(lease),
                None => unknown.push(id.to_string()),
            }
        }
        Ok(())
    })?;
    if arguments.json {
        write_json(&released)?;
    } else {
        let line = |lease: &Lease| format!("lease {} {}\n", lease.id, lease.state.name());
        write_text(&released.iter().map(line).collect::<String>())?;
    }
    if !unknown.is_empty() {
        bail!("there is no lease {}; see: gpupool lease list --all", unknown.join(", "));
    }
    Ok(ExitCode::SUCCESS)
}

/// The agent that granted the lease of this environment, where it is that lease and nobody named another agent.
fn of_lease(connect: &Connect, ids: &[u64]) -> Connect {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let is_ours = ids.iter().all(|id| set(job::LEASE).is_some_and(|ours| ours == id.to_string()));
    match set(job::LEASE_ENDPOINT) {
        Some(endpoint) if is_ours && connect.endpoint.is_none() => {
            Connect { endpoint: Some(endpoint), ..connect.clone() }
        }
        _ => connect.clone(),
    }
}

/// Until when a lease lasts unless it is renewed.
fn lasts(lease: &Lease) -> String {
    match &lease.expires_at {
        Some(at) => format!("lasts until {at} unless it is renewed"),
        None => "lasts as long as its holder".to_owned(),
    }
}

fn given_or_variable(given: Option<u64>, variable: &str, what: &str) -> anyhow::Result<u64> {
    if let Some(given) = given {
        return Ok(given);
    }
    let set = std::env::var(variable).ok().filter(|value| !value.is_empty());
    let Some(set) = set else {
        return Err(WrongUsage::of(format!("{what} is missing: give it, or set {variable}")).into());
    };
    Ok(set.parse().map_err(|_| WrongUsage::of(format!("{variable} is {set:?}, and must be a whole number")))?)
}

//! `gpupool status`: every GPU, who holds it, who uses one without holding it, who waits and why.
//!
//! Against a server that only tells statistics it shows those, and says that nobody decides there.

mod leases;
mod page;
mod statistics;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use futures_util::future::join_all;
use gpupool_api::lease::Lease;
use gpupool_api::pool::{Device, Pool};
use gpupool_api::stats::Stats;
use gpupool_client::{AgentClient, ClientError};
use serde::Serialize;

use crate::connect::{Connect, converse, explained};
use crate::output::{write_json, write_text};
use crate::terminal::Screen;
use crate::units;

pub(crate) use leases::all_leases;
pub(crate) use page::{past, wish};

/// Which agent, and how to answer.
#[derive(Args)]
pub(crate) struct Status {
    #[command(flatten)]
    connect: Connect,
    /// Answer in JSON.
    #[arg(long)]
    json: bool,
    /// Show it again and again, every 2 s or so often, until Ctrl-C.
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "2s",
          value_parser = units::some_time, conflicts_with = "json")]
    watch: Option<Duration>,
}

/// How things stand, as `--json` tells it.
#[derive(Debug, Serialize)]
#[serde(tag = "authority", rename_all = "snake_case")]
pub(crate) enum Standing {
    /// The server decides who holds what.
    Agent {
        endpoint: String,
        pool: Box<Pool>,
        devices: Vec<Device>,
        /// In the order of the queue.
        waiting: Vec<Lease>,
    },
    /// The server only tells what GPUs read.
    None { endpoint: String, stats: Stats },
    /// One of several that does not answer.
    Unknown { endpoint: String, error: String },
}

pub(crate) fn run(arguments: &Status) -> anyhow::Result<ExitCode> {
    let clients = arguments.connect.clients()?;
    converse(async {
        match (arguments.watch, clients.as_slice()) {
            (Some(every), clients) => watch(clients, every).await.map(|()| ExitCode::SUCCESS),
            (None, [client]) => {
                let standing = standing(client).await.map_err(explained)?;
                if arguments.json { write_json(&standing) } else { write_text(&page::of(&standing, Screen::here())) }?;
                Ok(ExitCode::SUCCESS)
            }
            (None, clients) => {
                let standings = standings(clients).await;
                if arguments.json { write_json(&standings) } else { write_text(&pages(&standings)) }?;
                let answers = standings.iter().any(|one| !matches!(one, Standing::Unknown { .. }));
                Ok(if answers { ExitCode::SUCCESS } else { ExitCode::FAILURE })
            }
        }
    })
}

/// All of several at once; one that does not answer takes nothing from the others.
async fn standings(clients: &[AgentClient]) -> Vec<Standing> {
    let asked = clients.iter().map(|client| async move {
        standing(client).await.unwrap_or_else(|error| {
            let error = explained(error).to_string();
            Standing::Unknown { endpoint: client.endpoint().to_string(), error }
        })
    });
    join_all(asked).await
}

fn pages(standings: &[Standing]) -> String {
    let pages: Vec<String> = standings.iter().map(|one| page::of(one, Screen::here())).collect();
    pages.join("\n")
}

/// Shows it until it cannot be shown; an agent that is away for a moment is said to be.
async fn watch(clients: &[AgentClient], every: Duration) -> anyhow::Result<()> {
    // Home, and clear what was below: less flicker than clearing first.
    let (home, rest) = if std::io::stdout().is_terminal() { ("\x1b[H", "\x1b[J") } else { ("", "\n") };
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let text = match clients {
            [client] => match standing(client).await {
                Ok(standing) => page::of(&standing, Screen::here()),
                Err(error) if error.is_passing() => format!("{error}\n"),
                Err(error) => return Err(explained(error)),
            },
            several => pages(&standings(several).await),
        };
        let clear_ends = if home.is_empty() { text } else { text.replace('\n', "\x1b[K\n") };
        write_text(&format!("{home}{clear_ends}{rest}"))?;
    }
}

async fn standing(client: &AgentClient) -> Result<Standing, ClientError> {
    let endpoint = client.endpoint().to_string();
    let pool = match client.pool().await {
        // It has no such route: perhaps a server of statistics.
        Err(error @ ClientError::NotOurs { status: 404, .. }) => {
            return match client.stats().await {
                Ok(stats) => Ok(Standing::None { endpoint, stats }),
                Err(_) => Err(error),
            };
        }
        answer => Box::new(answer?),
    };
    let devices = client.devices().await?.devices;
    let mut waiting = all_leases(client, Some("queued"), None).await?;
    waiting.sort_by_key(|lease| (lease.queue_position.unwrap_or(usize::MAX), lease.id));
    Ok(Standing::Agent { endpoint, pool, devices, waiting })
}

//! `gpupool lease`: taking, keeping, giving back and listing leases by hand or in a script.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use gpupool_api::RequestBody;
use gpupool_api::job_environment as job;
use gpupool_api::lease::{HolderBody, LeaseBody, LeaseState};
use gpupool_client::limits::AGENT_AWAY_LIMIT;
use gpupool_client::{
    AgentClient, ClientBuilder, ClientError, IdempotencyKey, LeaseGuard, LeaseHold, LeaseHoldEnd, StatusUpdate,
    WaitOptions, WaitProgress,
};
use gpupool_confine::Signal;
use jiff::Timestamp;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::connect::{Connect, ask, converse, explained};
use crate::output::{WrongUsage, answer, note, write_json, write_text};
use crate::signals::{Signals, exit_code};
use crate::status::{GpuNames, all_leases, past, wish};
use crate::terminal::{Column, Paint, Table, clean};
use crate::units;
use crate::wish::Wish;

/// Longer than anybody waits.
const FOR_EVER: Duration = Duration::from_secs(86_400 * 365);
/// Between two tries to take hold again.
const PAUSE: Duration = Duration::from_millis(250);

#[derive(Subcommand)]
pub(crate) enum Leases {
    /// Take GPUs, and print the lease in JSON.
    ///
    /// It ends with its ttl unless it is renewed, or held with --hold. `gpupool run` does all of it around a command.
    Acquire(Box<Acquire>),
    /// Keep a lease for another ttl.
    Renew(Renew),
    /// Give leases back, or stop waiting. Twice is harmless.
    Release(Release),
    /// Leases that are held or wait.
    List(List),
}

/// What to take, and how to tell.
#[derive(Args)]
pub(crate) struct Acquire {
    #[command(flatten)]
    wish: Wish,
    /// How long it lives without a renewal; what the agent finds right unless given.
    #[arg(long, value_name = "TIME", value_parser = units::some_time)]
    ttl: Option<Duration>,
    /// How long it may be held at all: 2h. Others are let pass sooner by what says so.
    #[arg(long, value_name = "TIME", value_parser = units::some_time)]
    max_duration: Option<Duration>,
    /// Print lines for a shell: eval "$(gpupool lease acquire --export)".
    #[arg(long)]
    export: bool,
    /// Keep it until this command is ended (Ctrl-C, kill), in place of its ttl.
    #[arg(long)]
    hold: bool,
    #[command(flatten)]
    connect: Connect,
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

/// Which leases, and how to answer.
#[derive(Args)]
pub(crate) struct List {
    /// Those that are over too, as far as the agent remembers them.
    #[arg(long)]
    all: bool,
    /// Only this owner's.
    #[arg(long, value_name = "NAME")]
    owner: Option<String>,
    /// Answer in JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: Connect,
}

pub(crate) fn run(command: &Leases) -> anyhow::Result<ExitCode> {
    match command {
        Leases::Acquire(arguments) => acquire(arguments),
        Leases::Renew(arguments) => renew(arguments),
        Leases::Release(arguments) => release(arguments),
        Leases::List(arguments) => list(arguments),
    }
}

fn acquire(arguments: &Acquire) -> anyhow::Result<ExitCode> {
    let body = RequestBody {
        ttl_secs: arguments.ttl.map(|ttl| ttl.as_secs_f64()),
        max_duration_secs: arguments.max_duration.map(|most| most.as_secs_f64()),
        ..arguments.wish.body()?
    };
    if let Some(several) = arguments.connect.several()? {
        return converse(at_any(arguments, several, body));
    }
    let client = arguments.connect.client()?;
    converse(async {
        let mut signals = Signals::listen_for_end()?;
        match take(&client, body, &mut signals).await? {
            Ok(guard) => keep(arguments, &client, guard, &mut signals, None).await,
            Err(signal) => Ok(ExitCode::from(exit_code(signal))),
        }
    })
}

/// From whichever of several agents has room, or first comes to have it.
async fn at_any(arguments: &Acquire, several: ClientBuilder, body: RequestBody) -> anyhow::Result<ExitCode> {
    // Whoever sits here says when to end it.
    let client = several.worker_timeout(FOR_EVER).build().map_err(WrongUsage::of)?;
    let mut signals = Signals::listen_for_end()?;
    client.start().await.map_err(explained)?;
    let mut updates = client.updates();
    // Ends when it is dropped, whichever way out is taken.
    let mut told = JoinSet::new();
    told.spawn(async move {
        while let Some(update) = updates.next().await {
            if matches!(update, StatusUpdate::Blocked { .. }) {
                note("no agent has room; waiting at all of them");
            }
        }
    });
    let granted = tokio::select! {
        granted = client.request(body) => granted.map_err(explained)?,
        signal = signals.next_to_end() => {
            client.stop().await;
            note("not waited for any more");
            return Ok(ExitCode::from(exit_code(signal)));
        }
    };
    drop(told);
    let (agent, guard) = granted.into_guard().map_err(|lease| {
        let endpoint_id = lease.endpoint_id().to_owned();
        anyhow::anyhow!(
            "{endpoint_id} only tells statistics: nobody decides there, and nothing can be taken for longer than \
                         this command runs"
        )
    })?;
    keep(arguments, &agent, guard, &mut signals, Some(agent.endpoint().to_string())).await
}

/// The lease once it is granted; the signal where the wish was taken back because the command was ended.
async fn take(
    client: &AgentClient,
    body: RequestBody,
    signals: &mut Signals,
) -> anyhow::Result<Result<LeaseGuard, Signal>> {
    let key = IdempotencyKey::random();
    // Asked for first without a way out, which takes a moment only: so its number is known when it has to be taken back.
    let asked = client.request_as(&body, &key).await.map_err(explained)?;
    let mut say = progress();
    if asked.state == LeaseState::Queued {
        say(WaitProgress::Waiting { lease: asked.id, position: asked.queue_position, reason: asked.reason.clone() });
    }
    let options = WaitOptions { key: Some(key), ..WaitOptions::default() };
    let granted = tokio::select! {
        granted = client.wait_until_granted(body, options, say) => granted,
        signal = signals.next_to_end() => {
            client.release(asked.id).await.map_err(explained)?;
            note(&format!("lease {} is not waited for any more", asked.id));
            return Ok(Err(signal));
        }
    };
    match granted {
        Ok(guard) => Ok(Ok(guard)),
        Err(ClientError::Ended(lease)) => {
            bail!("nothing was granted: lease {} {} ({})", lease.id, lease.state.name(), reason(&lease))
        }
        Err(error) => Err(explained(error)),
    }
}

/// Tells how the waiting goes, each thing once.
fn progress() -> impl FnMut(WaitProgress) {
    let mut told = String::new();
    move |progress| {
        let line = clean(&progress.to_string());
        if line != told {
            note(&line);
            told = line;
        }
    }
}

/// Tells of the lease, and holds it where that is wanted. `one_of` is the agent, where it is one of several.
async fn keep(
    arguments: &Acquire,
    client: &AgentClient,
    guard: LeaseGuard,
    signals: &mut Signals,
    one_of: Option<String>,
) -> anyhow::Result<ExitCode> {
    let of = one_of.as_ref().map(|endpoint| format!(" of {endpoint}")).unwrap_or_default();
    let tell = |mut lease: LeaseBody| {
        if let Some(endpoint) = one_of {
            lease.env.insert(job::LEASE_ENDPOINT.into(), Some(endpoint));
        }
        if arguments.export { write_text(&exports(&lease)) } else { write_json(&lease) }
    };
    if arguments.hold {
        return hold(client, guard, signals, tell).await;
    }
    let lease = guard.detach();
    tell(lease.clone())?;
    note(&format!("lease {}{of} {}", lease.id, lasts(&lease)));
    Ok(ExitCode::SUCCESS)
}

/// Tells of the lease once it is held, and holds it by an open connection until this command is ended. Killed without a chance
/// to say so, the connection closes and the agent takes the lease back.
async fn hold(
    client: &AgentClient,
    guard: LeaseGuard,
    signals: &mut Signals,
    tell: impl FnOnce(LeaseBody) -> anyhow::Result<()>,
) -> anyhow::Result<ExitCode> {
    let lease = guard.lease();
    let token = lease.token.context("the agent does not say the lease's token")?;
    let mut held = client.hold_lease(lease.id, token).await.map_err(explained)?;
    // From here on the connection keeps it.
    let lease = guard.detach();
    tell(lease.clone())?;
    note(&format!("lease {} is held until this command ends", lease.id));
    loop {
        let end = tokio::select! {
            end = held.wait_until_ended() => end,
            _ = signals.next_to_end() => return give_back(client, lease.id).await,
        };
        if let LeaseHoldEnd::Ended(lease) = end {
            bail!("lease {} {}: {}", lease.id, lease.state.name(), reason(&lease));
        }
        note(&format!("the connection broke; taking hold of lease {} again", lease.id));
        held = tokio::select! {
            held = again(client, lease.id, token) => held?,
            _ = signals.next_to_end() => return give_back(client, lease.id).await,
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
async fn again(client: &AgentClient, lease: u64, token: u64) -> anyhow::Result<LeaseHold> {
    let since = Instant::now();
    loop {
        match client.hold_lease(lease, token).await {
            Err(error) if error.is_transient() && since.elapsed() < AGENT_AWAY_LIMIT => tokio::time::sleep(PAUSE).await,
            answer => return answer.map_err(explained),
        }
    }
}

fn reason(lease: &LeaseBody) -> String {
    clean(lease.reason.as_deref().unwrap_or("the agent does not say why"))
}

fn renew(arguments: &Renew) -> anyhow::Result<ExitCode> {
    let id = given_or_variable(arguments.id, job::LEASE, "the number of the lease")?;
    let token = given_or_variable(arguments.token, job::FENCING_TOKEN, "--token")?;
    let client = of_lease(&arguments.connect, &[id]).client()?;
    let lease = ask(client.renew(id, token))?;
    answer(arguments.json, &lease, || format!("lease {id} {}\n", lasts(&lease)))
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
    let line = |lease: &LeaseBody| format!("lease {} {}\n", lease.id, lease.state.name());
    let done = answer(arguments.json, &released, || released.iter().map(line).collect())?;
    if !unknown.is_empty() {
        bail!("there is no lease {}; see: gpupool lease list --all", unknown.join(", "));
    }
    Ok(done)
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

fn list(arguments: &List) -> anyhow::Result<ExitCode> {
    let client = arguments.connect.client()?;
    let state = arguments.all.then_some("all");
    let leases = ask(all_leases(&client, state, arguments.owner.as_deref()))?;
    answer(arguments.json, &leases, || table(&leases).or("no leases\n"))
}

fn table(leases: &[LeaseBody]) -> Table<8> {
    let now = Timestamp::now();
    let devices = leases.iter().flat_map(|lease| &lease.devices);
    let names = GpuNames::of(devices.map(|device| device.node.as_str()));
    let mut table = Table::new([
        Column::number("LEASE"),
        Column::words("STATE"),
        Column::words("OWNER").at_least(8),
        Column::words("WISH").at_least(14).weighs(4),
        Column::words("GPUS").at_least(4),
        Column::number("AGE").weighs(3),
        Column::words("KEPT BY").weighs(1),
        Column::words("WHY").at_least(16).weighs(2).wraps(),
    ]);
    for lease in leases {
        let gpus: Vec<String> = lease.devices.iter().map(|device| names.name(&device.node, device.gpu_id)).collect();
        let cells = [
            lease.id.to_string(),
            lease.state.name().to_owned(),
            lease.owner.clone(),
            wish(&lease.request),
            gpus.join(","),
            past(&lease.created_at, now).map(units::shown).unwrap_or_default(),
            kept_by(lease),
            lease.reason.clone().unwrap_or_default(),
        ];
        table.row(cells, if lease.state.is_ended() { Paint::Faint } else { Paint::Plain });
    }
    table
}

fn kept_by(lease: &LeaseBody) -> String {
    if lease.state != LeaseState::Active {
        return String::new();
    }
    match &lease.holder {
        None => format!("ttl {}", units::shown(Duration::from_secs_f64(lease.ttl_secs.clamp(0.0, 1e9)))),
        Some(HolderBody::Process { pid }) => format!("process {pid}"),
        Some(HolderBody::Cgroup { .. }) => "its processes".to_owned(),
        Some(HolderBody::Connection) => "a connection".to_owned(),
    }
}

/// `export NAME='value'` and `unset NAME`, one a line. What is no name of a variable is left out: nothing but variables is
/// ever set by these lines, whatever the agent said.
fn exports(lease: &LeaseBody) -> String {
    let mut text = String::new();
    for (name, value) in lease.env.iter().filter(|(name, _)| is_name(name)) {
        text.push_str(&match value {
            Some(value) => format!("export {name}={}\n", quoted(value)),
            None => format!("unset {name}\n"),
        });
    }
    text
}

fn is_name(name: &str) -> bool {
    !name.starts_with(|c: char| c.is_ascii_digit())
        && !name.is_empty()
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// A text that a shell takes as it is.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\0', "").replace('\'', r"'\''"))
}

/// Until when a lease lasts unless it is renewed.
fn lasts(lease: &LeaseBody) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_takes_values_as_they_are_and_names_only_of_variables() {
        assert_eq!(quoted("a'b $(c)"), r"'a'\''b $(c)'");
        assert!(is_name("CUDA_VISIBLE_DEVICES") && is_name("_x1"));
        assert!(!is_name("") && !is_name("1A") && !is_name("A;rm") && !is_name("A B"));
    }
}

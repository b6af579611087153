//! `gpupool lease`: acquires, renews, releases and lists leases by hand or in a script.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use gpupool_api::RequestBody;
use gpupool_api::history::HistoryDevice;
use gpupool_api::job_environment as job;
use gpupool_api::lease::{HolderBody, LeaseBody, LeaseState};
use gpupool_client::limits::AGENT_AWAY_LIMIT;
use gpupool_client::{
    AgentClient, ClientBuilder, ClientError, HistoryQuery, IdempotencyKey, LeaseGuard, LeaseHold, LeaseHoldEnd,
    StatusUpdate, WaitOptions, WaitProgress,
};
use gpupool_confine::Signal;
use jiff::Timestamp;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::admin::lease_end_line;
use crate::endpoint_args::{EndpointArgs, block_on, call_agent, with_hint};
use crate::output::{UsageError, print_json, print_note, print_output, print_text};
use crate::request_args::RequestArgs;
use crate::signals::{SignalListener, exit_code};
use crate::status::{GpuNames, age, describe_request, fetch_leases};
use crate::terminal::{TableColumn, TextStyle, TextTable, sanitize};
use crate::units;

/// Wait limit of a client of several endpoints: the user interrupts the command instead.
const NO_WAIT_LIMIT: Duration = Duration::from_secs(86_400 * 365);
/// Maximum number of pages of the audit trail to read for a list, each of up to a thousand records.
const MAX_HISTORY_PAGES: usize = 20;
/// Pause between two attempts to reconnect a held lease.
const RECONNECT_PAUSE: Duration = Duration::from_millis(250);

/// Examples in the help of `gpupool lease`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  eval \"$(gpupool lease acquire --fraction 0.5 --ttl 1h --export)\"
  gpupool lease renew                      # reads GPUPOOL_LEASE from above
  gpupool lease release \"$GPUPOOL_LEASE\"
  gpupool lease acquire --gpus 2 --hold    # until Ctrl-C
  gpupool lease list --all --owner alice";

#[derive(Subcommand)]
pub(crate) enum LeaseCommand {
    /// Acquire a lease and print it as JSON.
    ///
    /// Waits in the queue until the request is granted. The lease expires after its ttl unless it is renewed, or held
    /// with --hold.
    Acquire(Box<AcquireArgs>),
    /// Renew a lease for another ttl.
    Renew(RenewArgs),
    /// Release leases, or cancel waiting requests.
    ///
    /// Releasing a lease twice is not an error.
    Release(ReleaseArgs),
    /// List active leases and waiting requests.
    List(LeaseListArgs),
}

/// Options of `gpupool lease acquire`.
#[derive(Args)]
pub(crate) struct AcquireArgs {
    #[command(flatten)]
    request_args: RequestArgs,
    /// Lifetime without a renewal, such as 10m [default: set by the agent].
    #[arg(long, value_name = "TIME", value_parser = units::parse_nonzero_duration)]
    ttl: Option<Duration>,
    /// Maximum duration of the lease, such as 2h; requests with a limit can be backfilled sooner.
    #[arg(long, value_name = "TIME", value_parser = units::parse_nonzero_duration)]
    max_duration: Option<Duration>,
    /// Print export lines for a shell instead of JSON.
    #[arg(long)]
    export: bool,
    /// Hold the lease until this command ends (Ctrl-C, kill) instead of for its ttl.
    #[arg(long)]
    hold: bool,
    #[command(flatten)]
    endpoint_args: EndpointArgs,
}

/// Options of `gpupool lease renew`.
#[derive(Args)]
pub(crate) struct RenewArgs {
    /// Id of the lease [default: $GPUPOOL_LEASE].
    id: Option<u64>,
    /// Fencing token of the lease [default: $GPUPOOL_FENCING_TOKEN].
    #[arg(long, value_name = "TOKEN")]
    token: Option<u64>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    endpoint_args: EndpointArgs,
}

/// Options of `gpupool lease release`.
#[derive(Args)]
pub(crate) struct ReleaseArgs {
    /// Ids of the leases.
    #[arg(required = true)]
    ids: Vec<u64>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    endpoint_args: EndpointArgs,
}

/// Options of `gpupool lease list`.
#[derive(Args)]
pub(crate) struct LeaseListArgs {
    /// Include ended leases that the agent still knows.
    #[arg(long)]
    all: bool,
    /// List only leases of this owner.
    #[arg(long, value_name = "NAME")]
    owner: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    endpoint_args: EndpointArgs,
}

pub(crate) fn run(command: &LeaseCommand) -> anyhow::Result<ExitCode> {
    match command {
        LeaseCommand::Acquire(arguments) => acquire(arguments),
        LeaseCommand::Renew(arguments) => renew(arguments),
        LeaseCommand::Release(arguments) => release(arguments),
        LeaseCommand::List(arguments) => list_leases(arguments),
    }
}

fn acquire(arguments: &AcquireArgs) -> anyhow::Result<ExitCode> {
    let body = RequestBody {
        ttl_secs: arguments.ttl.map(|ttl| ttl.as_secs_f64()),
        max_duration_secs: arguments.max_duration.map(|most| most.as_secs_f64()),
        ..arguments.request_args.body()?
    };
    if let Some(several) = arguments.endpoint_args.several_endpoints()? {
        return block_on(acquire_at_any(arguments, several, body));
    }
    let client = arguments.endpoint_args.client()?;
    block_on(async {
        let mut signals = SignalListener::listen_for_termination()?;
        match wait_for_grant(&client, body, &mut signals).await? {
            Ok(guard) => deliver_lease(arguments, &client, guard, &mut signals, None).await,
            Err(signal) => Ok(ExitCode::from(exit_code(signal))),
        }
    })
}

/// Acquires a lease from the first of several agents that can grant it.
async fn acquire_at_any(
    arguments: &AcquireArgs,
    several: ClientBuilder,
    body: RequestBody,
) -> anyhow::Result<ExitCode> {
    // The user decides how long to wait.
    let client = several.worker_timeout(NO_WAIT_LIMIT).build().map_err(UsageError::new)?;
    let mut signals = SignalListener::listen_for_termination()?;
    client.start().await.map_err(with_hint)?;
    let mut updates = client.updates();
    // Dropping the set stops the task on every path.
    let mut update_printer = JoinSet::new();
    update_printer.spawn(async move {
        while let Some(update) = updates.next().await {
            if matches!(update, StatusUpdate::Blocked { .. }) {
                print_note("no agent can grant the request now; waiting at all of them");
            }
        }
    });
    let granted = tokio::select! {
        granted = client.request(body) => granted.map_err(with_hint)?,
        signal = signals.next_termination() => {
            client.stop().await;
            print_note("request cancelled");
            return Ok(ExitCode::from(exit_code(signal)));
        }
    };
    drop(update_printer);
    let (agent, guard) = granted.into_guard().map_err(|lease| {
        let endpoint_id = lease.endpoint_id().to_owned();
        anyhow::anyhow!(
            "{endpoint_id} serves statistics only; a lease there ends with this command, so use `gpupool run` or another endpoint"
        )
    })?;
    deliver_lease(arguments, &agent, guard, &mut signals, Some(agent.endpoint().to_string())).await
}

/// Waits until the lease is granted, or until a signal cancels the request.
async fn wait_for_grant(
    client: &AgentClient,
    body: RequestBody,
    signals: &mut SignalListener,
) -> anyhow::Result<Result<LeaseGuard, Signal>> {
    let key = IdempotencyKey::random();
    // The first request does not wait, so the id of the lease is known when it has to be cancelled.
    let requested = client.request_as(&body, &key).await.map_err(with_hint)?;
    let mut print_progress = progress_printer();
    if requested.state == LeaseState::Queued {
        print_progress(WaitProgress::Waiting {
            lease: requested.id,
            position: requested.queue_position,
            reason: requested.reason.clone(),
        });
    }
    let options = WaitOptions { key: Some(key), ..WaitOptions::default() };
    let granted = tokio::select! {
        granted = client.wait_until_granted(body, options, print_progress) => granted,
        signal = signals.next_termination() => {
            client.release(requested.id).await.map_err(with_hint)?;
            print_note(&format!("request {} cancelled", requested.id));
            return Ok(Err(signal));
        }
    };
    match granted {
        Ok(guard) => Ok(Ok(guard)),
        Err(ClientError::Ended(lease)) => {
            bail!("request {} was not granted: {} ({})", lease.id, lease.state.name(), lease_reason(&lease))
        }
        Err(error) => Err(with_hint(error)),
    }
}

/// Returns a printer of the progress that skips repeated lines.
fn progress_printer() -> impl FnMut(WaitProgress) {
    let mut last_line = String::new();
    move |progress| {
        let line = sanitize(&progress.to_string());
        if line != last_line {
            print_note(&line);
            last_line = line;
        }
    }
}

/// Prints the lease and, with `--hold`, holds it. `endpoint` is the granting agent if there are several.
async fn deliver_lease(
    arguments: &AcquireArgs,
    client: &AgentClient,
    guard: LeaseGuard,
    signals: &mut SignalListener,
    endpoint: Option<String>,
) -> anyhow::Result<ExitCode> {
    let of = endpoint.as_ref().map(|endpoint| format!(" of {endpoint}")).unwrap_or_default();
    let print_lease = |mut lease: LeaseBody| {
        if let Some(endpoint) = endpoint {
            lease.env.insert(job::LEASE_ENDPOINT.into(), Some(endpoint));
        }
        if arguments.export { print_text(&export_lines(&lease)) } else { print_json(&lease) }
    };
    if arguments.hold {
        return hold_lease(client, guard, signals, print_lease).await;
    }
    let lease = guard.detach();
    print_lease(lease.clone())?;
    print_note(&format!("lease {}{of} {}", lease.id, expiry_text(&lease)));
    Ok(ExitCode::SUCCESS)
}

/// Holds the lease by an open connection until this command ends, and prints it once it is held. If the command is
/// killed, the connection closes and the agent releases the lease.
async fn hold_lease(
    client: &AgentClient,
    guard: LeaseGuard,
    signals: &mut SignalListener,
    print_lease: impl FnOnce(LeaseBody) -> anyhow::Result<()>,
) -> anyhow::Result<ExitCode> {
    let lease = guard.lease();
    let token = lease.token.context("the agent did not send the lease's fencing token")?;
    let mut held = client.hold_lease(lease.id, token).await.map_err(with_hint)?;
    // From here on the connection keeps the lease alive.
    let lease = guard.detach();
    print_lease(lease.clone())?;
    print_note(&format!("lease {} held until this command ends", lease.id));
    loop {
        let end = tokio::select! {
            end = held.wait_until_ended() => end,
            _ = signals.next_termination() => return release_lease(client, lease.id).await,
        };
        if let LeaseHoldEnd::Ended(lease) = end {
            bail!("lease {} {}: {}", lease.id, lease.state.name(), lease_reason(&lease));
        }
        print_note(&format!("connection lost; reconnecting to hold lease {}", lease.id));
        held = tokio::select! {
            held = reconnect(client, lease.id, token) => held?,
            _ = signals.next_termination() => return release_lease(client, lease.id).await,
        };
    }
}

async fn release_lease(client: &AgentClient, lease: u64) -> anyhow::Result<ExitCode> {
    client.release(lease).await.map_err(with_hint)?;
    print_note(&format!("lease {lease} released"));
    Ok(ExitCode::SUCCESS)
}

/// Reconnects to hold the lease while the agent is unreachable. A restarted agent waits as long for its holders.
async fn reconnect(client: &AgentClient, lease: u64, token: u64) -> anyhow::Result<LeaseHold> {
    let since = Instant::now();
    loop {
        match client.hold_lease(lease, token).await {
            Err(error) if error.is_transient() && since.elapsed() < AGENT_AWAY_LIMIT => {
                tokio::time::sleep(RECONNECT_PAUSE).await
            }
            result => return result.map_err(with_hint),
        }
    }
}

fn lease_reason(lease: &LeaseBody) -> String {
    sanitize(lease.reason.as_deref().unwrap_or("no reason given"))
}

fn renew(arguments: &RenewArgs) -> anyhow::Result<ExitCode> {
    let id = argument_or_variable(arguments.id, job::LEASE, "the id of the lease")?;
    let token = argument_or_variable(arguments.token, job::FENCING_TOKEN, "--token")?;
    let client = endpoint_of_lease(&arguments.endpoint_args, &[id]).client()?;
    let lease = call_agent(client.renew(id, token))?;
    print_output(arguments.json, &lease, || format!("lease {id} {}\n", expiry_text(&lease)))
}

fn release(arguments: &ReleaseArgs) -> anyhow::Result<ExitCode> {
    let client = endpoint_of_lease(&arguments.endpoint_args, &arguments.ids).client()?;
    let mut released = Vec::new();
    let mut unknown = Vec::new();
    block_on(async {
        for id in &arguments.ids {
            match client.release(*id).await.map_err(with_hint)? {
                Some(lease) => released.push(lease),
                None => unknown.push(id.to_string()),
            }
        }
        Ok(())
    })?;
    let done = print_output(arguments.json, &released, || released.iter().map(lease_end_line).collect())?;
    if !unknown.is_empty() {
        bail!("no lease {}; to list them: gpupool lease list --all", unknown.join(", "));
    }
    Ok(done)
}

/// Adds the endpoint of the agent that granted the lease of this environment, unless another endpoint is given.
fn endpoint_of_lease(endpoint_args: &EndpointArgs, ids: &[u64]) -> EndpointArgs {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let is_own = ids.iter().all(|id| set(job::LEASE).is_some_and(|ours| ours == id.to_string()));
    match set(job::LEASE_ENDPOINT) {
        Some(endpoint) if is_own && endpoint_args.endpoint.is_none() => {
            EndpointArgs { endpoint: Some(endpoint), ..endpoint_args.clone() }
        }
        _ => endpoint_args.clone(),
    }
}

fn list_leases(arguments: &LeaseListArgs) -> anyhow::Result<ExitCode> {
    let client = arguments.endpoint_args.client()?;
    let state = arguments.all.then_some("all");
    let leases = call_agent(fetch_leases(&client, state, arguments.owner.as_deref()))?;
    if arguments.all && !arguments.json {
        let held = call_agent(fetch_held_devices(&client, &leases))?;
        return print_text(&all_leases_table(&leases, &held).render_or("no leases\n")).map(|()| ExitCode::SUCCESS);
    }
    print_output(arguments.json, &leases, || leases_table(&leases).render_or("no leases\n"))
}

/// Fetches the devices that ended leases held, from the audit trail.
async fn fetch_held_devices(
    client: &AgentClient,
    leases: &[LeaseBody],
) -> Result<BTreeMap<u64, Vec<HistoryDevice>>, ClientError> {
    let ended: BTreeSet<u64> = leases.iter().filter(|lease| lease.state.is_ended()).map(|lease| lease.id).collect();
    let since = leases.iter().filter(|lease| lease.state.is_ended()).filter_map(|lease| lease.granted_at.clone()).min();
    let mut held = BTreeMap::new();
    let Some(since) = since else { return Ok(held) };
    let mut query = HistoryQuery { since: Some(since), ..HistoryQuery::default() };
    for _ in 0..MAX_HISTORY_PAGES {
        let page = client.history(&query).await?;
        let records = page.records.into_iter().filter(|record| ended.contains(&record.lease));
        held.extend(records.map(|record| (record.lease, record.devices)));
        if page.next.is_none() {
            break;
        }
        query.after = page.next;
    }
    Ok(held)
}

/// Returns the table of `lease list --all`.
fn all_leases_table(leases: &[LeaseBody], held: &BTreeMap<u64, Vec<HistoryDevice>>) -> TextTable<8> {
    let now = Timestamp::now();
    let gpus = |lease: &LeaseBody| -> Vec<(String, u32)> {
        let held = held.get(&lease.id).into_iter().flatten().map(|device| (device.node.clone(), device.gpu_id));
        lease.devices.iter().map(|device| (device.node.clone(), device.gpu_id)).chain(held).collect()
    };
    let nodes: Vec<String> = leases.iter().flat_map(gpus).map(|(node, _)| node).collect();
    let names = GpuNames::of(nodes.iter().map(String::as_str));
    let mut table = TextTable::new([
        TableColumn::number("LEASE"),
        TableColumn::text("STATE"),
        TableColumn::text("OWNER").min_width(8),
        TableColumn::text("GPUS").min_width(4),
        TableColumn::text("START").drop_priority(3),
        TableColumn::number("DURATION").drop_priority(4),
        TableColumn::text("WORKER").min_width(6).drop_priority(1),
        TableColumn::text("REASON").min_width(16).drop_priority(2).wrapping(),
    ]);
    for lease in leases {
        let time = |text: &Option<String>| text.as_ref()?.parse::<Timestamp>().ok();
        let start = time(&lease.granted_at);
        let duration =
            start.and_then(|start| time(&lease.ended_at).unwrap_or(now).duration_since(start).try_into().ok());
        let cells = [
            lease.id.to_string(),
            lease.state.name().to_owned(),
            lease.owner.clone(),
            gpus(lease).iter().map(|(node, gpu)| names.name(node, *gpu)).collect::<Vec<_>>().join(","),
            start.map(|start| start.strftime("%Y-%m-%d %H:%MZ").to_string()).unwrap_or_default(),
            duration.map(units::format_duration).unwrap_or_default(),
            lease.worker_id.clone().unwrap_or_default(),
            lease.reason.clone().unwrap_or_default(),
        ];
        table.add_row(cells, if lease.state.is_ended() { TextStyle::Faint } else { TextStyle::Plain });
    }
    table
}

fn leases_table(leases: &[LeaseBody]) -> TextTable<8> {
    let now = Timestamp::now();
    let devices = leases.iter().flat_map(|lease| &lease.devices);
    let names = GpuNames::of(devices.map(|device| device.node.as_str()));
    let mut table = TextTable::new([
        TableColumn::number("LEASE"),
        TableColumn::text("STATE"),
        TableColumn::text("OWNER").min_width(8),
        TableColumn::text("REQUEST").min_width(14).drop_priority(4),
        TableColumn::text("GPUS").min_width(4),
        TableColumn::number("AGE").drop_priority(3),
        TableColumn::text("HELD BY").drop_priority(1),
        TableColumn::text("REASON").min_width(16).drop_priority(2).wrapping(),
    ]);
    for lease in leases {
        let gpus: Vec<String> = lease.devices.iter().map(|device| names.name(&device.node, device.gpu_id)).collect();
        let cells = [
            lease.id.to_string(),
            lease.state.name().to_owned(),
            lease.owner.clone(),
            describe_request(&lease.request),
            gpus.join(","),
            age(&lease.created_at, now).map(units::format_duration).unwrap_or_default(),
            held_by(lease),
            lease.reason.clone().unwrap_or_default(),
        ];
        table.add_row(cells, if lease.state.is_ended() { TextStyle::Faint } else { TextStyle::Plain });
    }
    table
}

fn held_by(lease: &LeaseBody) -> String {
    if lease.state != LeaseState::Active {
        return String::new();
    }
    match &lease.holder {
        None => format!("ttl {}", units::format_duration(Duration::from_secs_f64(lease.ttl_secs.clamp(0.0, 1e9)))),
        Some(HolderBody::Process { pid: Some(pid) }) => format!("process {pid}"),
        Some(HolderBody::Process { pid: None }) => "a process".to_owned(),
        Some(HolderBody::Cgroup { .. }) => "its processes".to_owned(),
        Some(HolderBody::Connection) => "a connection".to_owned(),
    }
}

/// Formats `export NAME='value'` and `unset NAME` lines. Invalid variable names are left out, so the lines can only set
/// variables, even if the agent sends something else.
fn export_lines(lease: &LeaseBody) -> String {
    let mut text = String::new();
    for (name, value) in lease.env.iter().filter(|(name, _)| is_variable_name(name)) {
        text.push_str(&match value {
            Some(value) => format!("export {name}={}\n", shell_quote(value)),
            None => format!("unset {name}\n"),
        });
    }
    text
}

fn is_variable_name(name: &str) -> bool {
    !name.starts_with(|c: char| c.is_ascii_digit())
        && !name.is_empty()
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Quotes a text for a POSIX shell.
fn shell_quote(text: &str) -> String {
    format!("'{}'", text.replace('\0', "").replace('\'', r"'\''"))
}

/// Describes when the lease expires.
fn expiry_text(lease: &LeaseBody) -> String {
    match &lease.expires_at {
        Some(at) => format!("expires at {at} unless it is renewed"),
        None => "lasts as long as its holder".to_owned(),
    }
}

fn argument_or_variable(given: Option<u64>, variable: &str, what: &str) -> anyhow::Result<u64> {
    if let Some(given) = given {
        return Ok(given);
    }
    let set = std::env::var(variable).ok().filter(|value| !value.is_empty());
    let Some(set) = set else {
        return Err(UsageError::new(format!("{what} is missing; pass it or set {variable}")).into());
    };
    Ok(set.parse().map_err(|_| UsageError::new(format!("{variable} is {set:?}; it must be a whole number")))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_quoted_and_only_variable_names_are_exported() {
        assert_eq!(shell_quote("a'b $(c)"), r"'a'\''b $(c)'");
        assert!(is_variable_name("CUDA_VISIBLE_DEVICES") && is_variable_name("_x1"));
        assert!(
            !is_variable_name("") && !is_variable_name("1A") && !is_variable_name("A;rm") && !is_variable_name("A B")
        );
    }
}

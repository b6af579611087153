//! `gpupool status`: every GPU, who holds it, who uses one without holding it, who waits and why.
//!
//! Against a server that only tells statistics it shows those, and says that nobody decides there.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use futures_util::future::join_all;
use gpupool_api::lease::{LeaseBody, RequestSummary};
use gpupool_api::pool::{DeviceBody, PoolBody};
use gpupool_api::stats::{GpuBody, StatsBody};
use gpupool_client::{AgentClient, ClientError, LeaseQuery};
use jiff::Timestamp;
use serde::Serialize;

use crate::connect::{Connect, converse, explained};
use crate::output::{answer, write_text};
use crate::terminal::{Column, Paint, Screen, Table, clean, cut, known, wrap};
use crate::units::{self, count};

/// Waiters that are shown; of the others only how many there are.
const WAITERS_SHOWN: usize = 20;
/// No more pages of leases than this are asked for: a thousand leases each.
const PAGES: usize = 100;

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
        pool: Box<PoolBody>,
        devices: Vec<DeviceBody>,
        /// In the order of the queue.
        waiting: Vec<LeaseBody>,
    },
    /// The server only tells what GPUs read.
    None { endpoint: String, stats: StatsBody },
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
                answer(arguments.json, &standing, || page(&standing, Screen::here()))
            }
            (None, clients) => {
                let standings = standings(clients).await;
                let done = answer(arguments.json, &standings, || pages(&standings))?;
                let answers = standings.iter().any(|one| !matches!(one, Standing::Unknown { .. }));
                Ok(if answers { done } else { ExitCode::FAILURE })
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
    let pages: Vec<String> = standings.iter().map(|one| page(one, Screen::here())).collect();
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
                Ok(standing) => page(&standing, Screen::here()),
                Err(error) if error.is_transient() => format!("{error}\n"),
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
        Err(error @ ClientError::NotAnAgent { status: 404, .. }) => {
            return client.stats().await.map(|stats| Standing::None { endpoint, stats }).map_err(|_| error);
        }
        answer => Box::new(answer?),
    };
    let devices = client.devices().await?.devices;
    let mut waiting = all_leases(client, Some("queued"), None).await?;
    waiting.sort_by_key(|lease| (lease.queue_position.unwrap_or(usize::MAX), lease.id));
    Ok(Standing::Agent { endpoint, pool, devices, waiting })
}

/// The leases in a state (those that are not over unless said), by number.
pub(crate) async fn all_leases(
    client: &AgentClient,
    state: Option<&str>,
    owner: Option<&str>,
) -> Result<Vec<LeaseBody>, ClientError> {
    let mut query = LeaseQuery { state: state.map(Into::into), owner: owner.map(Into::into), ..LeaseQuery::default() };
    let mut leases = Vec::new();
    for _ in 0..PAGES {
        let page = client.leases(&query).await?;
        leases.extend(page.leases);
        if page.next.is_none() {
            break;
        }
        query.after = page.next;
    }
    Ok(leases)
}

fn page(standing: &Standing, screen: Screen) -> String {
    match standing {
        Standing::Agent { pool, devices, waiting, .. } => agent(pool, devices, waiting, screen),
        Standing::None { endpoint, stats } => statistics(endpoint, stats, screen),
        Standing::Unknown { error, .. } => {
            let lines = wrap(&clean(error), screen.width.unwrap_or(usize::MAX));
            format!("{}\n", lines.join("\n"))
        }
    }
}

fn agent(pool: &PoolBody, devices: &[DeviceBody], waiting: &[LeaseBody], screen: Screen) -> String {
    let now = pool.timestamp.parse().unwrap_or_else(|_| Timestamp::now());
    let mut text = wrap(&headline(pool, devices), screen.width.unwrap_or(usize::MAX)).join("\n");
    text.push('\n');
    let names = GpuNames::of(devices.iter().map(|device| device.node.as_str()));
    section(&mut text, "", &gpus(devices, names), screen);
    section(&mut text, "HELD", &held(devices, names, now), screen);
    section(&mut text, "SQUATTERS (processes that use a GPU without a lease)", &squatters(devices, names), screen);
    section(&mut text, "WAITING", &queue(waiting, now), screen);
    if let Some(more) = waiting.len().checked_sub(WAITERS_SHOWN).filter(|more| *more > 0) {
        let _ = writeln!(text, "and {more} more: gpupool lease list");
    }
    text
}

fn headline(pool: &PoolBody, devices: &[DeviceBody]) -> String {
    let squatters: usize = devices.iter().map(squatters_on).sum();
    let is_free =
        |device: &&DeviceBody| device.closed.is_none() && device.leases.is_empty() && squatters_on(device) == 0;
    let free = devices.iter().filter(is_free).count();
    let mut parts = vec![
        format!("{} ({free} free)", count(pool.devices, "GPU")),
        count(pool.active, "lease"),
        format!("{} waiting", pool.waiting),
    ];
    if squatters > 0 {
        parts.push(count(squatters, "squatter"));
    }
    if pool.simulated {
        parts.push("simulated".into());
    }
    format!("{}: {}", clean(&pool.node), parts.join(", "))
}

fn squatters_on(device: &DeviceBody) -> usize {
    device.processes.iter().filter(|process| process.squatter).count()
}

/// Adds a table under its title, where there is anything in it.
fn section<const N: usize>(text: &mut String, title: &str, table: &Table<N>, screen: Screen) {
    if table.is_empty() {
        return;
    }
    text.push('\n');
    if !title.is_empty() {
        let title = cut(title, screen.width.unwrap_or(usize::MAX));
        let _ = writeln!(text, "{}", screen.paint(Paint::Heading, &title));
    }
    text.push_str(&table.render(screen));
}

/// Names of GPUs in a table: their numbers, with their nodes where the table shows several.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuNames {
    has_several_nodes: bool,
}

impl GpuNames {
    /// For a table that shows GPUs of these nodes; an older agent names none.
    pub(crate) fn of<'a>(nodes: impl Iterator<Item = &'a str>) -> Self {
        let named: BTreeSet<&str> = nodes.filter(|node| !node.is_empty()).collect();
        Self { has_several_nodes: named.len() > 1 }
    }

    /// The name of one GPU.
    pub(crate) fn name(self, node: &str, gpu_id: u32) -> String {
        match self.has_several_nodes && !node.is_empty() {
            true => format!("{node}:{gpu_id}"),
            false => gpu_id.to_string(),
        }
    }
}

fn gpus(devices: &[DeviceBody], names: GpuNames) -> Table<8> {
    let mut table = Table::new([
        Column::number("GPU"),
        Column::words("NAME").at_least(12),
        Column::number("BUSY"),
        Column::number("MEMORY GiB").weighs(4),
        Column::number("TEMP").weighs(3),
        Column::number("POWER").weighs(1),
        Column::number("LEASED"),
        Column::words("STATE").at_least(12).wraps(),
    ]);
    for device in devices {
        let (state, paint) = state(device);
        let cells = [
            names.name(&device.node, device.gpu_id),
            name(device),
            known(device.utilization_percent.map(|busy| format!("{busy:.0}%"))),
            memory(device.memory_used_mib, device.memory_mib),
            known(device.temperature_c.map(|degrees| format!("{degrees} °C"))),
            known(device.power_w.map(|watts| format!("{watts:.0} W"))),
            units::share(device.promised),
            state,
        ];
        table.row(cells, paint);
    }
    table
}

fn name(device: &DeviceBody) -> String {
    let name = without_vendor(&device.name);
    match &device.partition {
        Some(part) if !name.contains(part.as_str()) => format!("{name} {part}"),
        _ => name.to_owned(),
    }
}

/// The name of a device without its maker's, which says nothing that the rest does not.
fn without_vendor(name: &str) -> &str {
    let short = ["NVIDIA ", "AMD ", "Intel "].iter().find_map(|vendor| name.strip_prefix(vendor));
    short.map(str::trim_start).filter(|short| !short.is_empty()).unwrap_or(name)
}

/// Used of all, in GiB.
fn memory(used: Option<u64>, all: Option<u64>) -> String {
    let gib = |mib: Option<u64>| known(mib.map(|mib| format!("{:.1}", mib as f64 / 1024.0)));
    format!("{}/{}", gib(used), gib(all))
}

/// Whether it takes new work, and what is odd about it.
fn state(device: &DeviceBody) -> (String, Paint) {
    if let Some(why) = &device.closed {
        let reason = device.health_reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
        return (format!("closed: {}{reason}", why.replace('_', " ")), Paint::Bad);
    }
    if device.stale {
        return ("not read lately".into(), Paint::Faint);
    }
    match squatters_on(device) {
        0 => ("open".into(), Paint::Plain),
        some => (format!("open, {}", count(some, "squatter")), Paint::Odd),
    }
}

fn held(devices: &[DeviceBody], names: GpuNames, now: Timestamp) -> Table<7> {
    let mut table = Table::new([
        Column::number("GPU"),
        Column::number("LEASE"),
        Column::words("OWNER").at_least(8),
        Column::number("PART"),
        Column::number("MEMORY").weighs(2),
        Column::number("SINCE").weighs(3),
        Column::words("WORKER").at_least(6).weighs(1),
    ]);
    for device in devices {
        for lease in &device.leases {
            let since = lease.granted_at.as_deref().and_then(|at| past(at, now));
            let (owner, paint) = match lease.draining {
                true => (format!("{} (ended, still there)", lease.owner), Paint::Odd),
                false => (lease.owner.clone(), Paint::Plain),
            };
            let cells = [
                names.name(&device.node, device.gpu_id),
                lease.id.to_string(),
                owner,
                units::share(lease.fraction),
                lease.memory_mib.map(units::mib).unwrap_or_default(),
                since.map(units::shown).unwrap_or_default(),
                lease.worker_id.clone().unwrap_or_default(),
            ];
            table.row(cells, paint);
        }
    }
    table
}

fn squatters(devices: &[DeviceBody], names: GpuNames) -> Table<5> {
    let mut table = Table::new([
        Column::number("GPU"),
        Column::number("PID"),
        Column::words("USER").at_least(8),
        Column::number("MEMORY").weighs(2),
        Column::words("COMMAND").at_least(8),
    ]);
    for device in devices {
        for process in device.processes.iter().filter(|process| process.squatter) {
            let cells = [
                names.name(&device.node, device.gpu_id),
                process.pid.to_string(),
                known(process.user.clone()),
                known(process.memory_mib.map(units::mib)),
                known(process.command.clone()),
            ];
            table.row(cells, Paint::Odd);
        }
    }
    table
}

fn queue(waiting: &[LeaseBody], now: Timestamp) -> Table<6> {
    let mut table = Table::new([
        Column::number("NO"),
        Column::number("LEASE").weighs(2),
        Column::words("OWNER").at_least(8),
        Column::words("WISH").at_least(8),
        Column::number("WAITS").weighs(3),
        Column::words("WHY").at_least(16).wraps(),
    ]);
    for lease in waiting.iter().take(WAITERS_SHOWN) {
        let cells = [
            known(lease.queue_position),
            lease.id.to_string(),
            lease.owner.clone(),
            wish(&lease.request),
            past(&lease.created_at, now).map(units::shown).unwrap_or_default(),
            lease.reason.clone().unwrap_or_default(),
        ];
        table.row(cells, Paint::Plain);
    }
    table
}

/// What was asked for, in few words.
pub(crate) fn wish(wish: &RequestSummary) -> String {
    let gpus = if wish.gpus == 0 { "no GPU".to_owned() } else { count(wish.gpus, "GPU") };
    match (wish.fraction, wish.memory_mib) {
        (Some(fraction), Some(memory)) => format!("{} of {gpus}, {}", units::share(fraction), units::mib(memory)),
        (Some(fraction), None) => format!("{} of {gpus}", units::share(fraction)),
        (None, Some(memory)) => format!("{} of {gpus}", units::mib(memory)),
        (None, None) if wish.sharing => format!("{gpus}, shared"),
        (None, None) => gpus,
    }
}

/// How long ago something was.
pub(crate) fn past(at: &str, now: Timestamp) -> Option<Duration> {
    let at: Timestamp = at.parse().ok()?;
    Some(Duration::try_from(now.duration_since(at)).unwrap_or_default())
}

fn statistics(endpoint: &str, stats: &StatsBody, screen: Screen) -> String {
    let gpus = count(stats.gpu_count, "GPU");
    let mut text = format!("{endpoint}: {gpus}, statistics only: nobody leases GPUs there\n");
    if let Some(error) = &stats.error {
        let _ = writeln!(text, "{}", screen.paint(Paint::Bad, &format!("error: {}", clean(error))));
    }
    section(&mut text, "", &readings(stats), screen);
    text
}

fn readings(stats: &StatsBody) -> Table<7> {
    let mut table = Table::new([
        Column::number("GPU"),
        Column::words("NAME").at_least(12),
        Column::number("BUSY"),
        Column::number("MEMORY GiB").weighs(4),
        Column::number("TEMP").weighs(3),
        Column::number("POWER").weighs(1),
        Column::words("STATE").at_least(12).weighs(2).wraps(),
    ]);
    for gpu in &stats.gpus {
        let told = |field: &str, value: u64| (!gpu.unsupported.iter().any(|other| other == field)).then_some(value);
        let (state, paint) = reading_state(gpu, stats.stale);
        let busy = told("utilization_percent", gpu.utilization_percent.into());
        let cells = [
            gpu.gpu_id.to_string(),
            without_vendor(&gpu.name).to_owned(),
            known(busy.map(|busy| format!("{busy}%"))),
            memory(told("memory.used_mb", gpu.memory.used_mb), told("memory.total_mb", gpu.memory.total_mb)),
            known(gpu.temperature_c.map(|degrees| format!("{degrees} °C"))),
            known(gpu.power.draw_w.map(|watts| format!("{watts:.0} W"))),
            state,
        ];
        table.row(cells, paint);
    }
    table
}

/// Empty where the server does not tell.
fn reading_state(gpu: &GpuBody, all_stale: bool) -> (String, Paint) {
    if gpu.stale || all_stale {
        return ("not read lately".into(), Paint::Faint);
    }
    match &gpu.health_reason {
        Some(reason) => (format!("{}: {reason}", gpu.health), Paint::Bad),
        None => (gpu.health.clone(), Paint::Plain),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `gpupool status --json` said of an agent, and the page of it at a width.
    fn page_at(width: usize) -> String {
        let said: serde_json::Value = serde_json::from_str(include_str!("../tests/fixtures/status.json")).unwrap();
        let part = |name: &str| said[name].clone();
        let pool: PoolBody = serde_json::from_value(part("pool")).unwrap();
        let devices: Vec<DeviceBody> = serde_json::from_value(part("devices")).unwrap();
        let waiting: Vec<LeaseBody> = serde_json::from_value(part("waiting")).unwrap();
        agent(&pool, &devices, &waiting, Screen { width: Some(width), colours: false })
    }

    #[test]
    fn the_page_fits_the_terminal() {
        let expected = [
            (60, include_str!("../tests/fixtures/status-60.txt")),
            (80, include_str!("../tests/fixtures/status-80.txt")),
            (120, include_str!("../tests/fixtures/status-120.txt")),
        ];
        for (width, expected) in expected {
            let shown = page_at(width);
            assert_eq!(shown, expected, "at {width} columns:\n{shown}");
            assert!(shown.lines().all(|line| crate::terminal::columns(line) <= width), "{shown}");
        }
    }

    #[test]
    fn gpus_of_several_machines_are_told_apart() {
        let named = |nodes: [&str; 3]| {
            let names = GpuNames::of(nodes.into_iter());
            nodes.map(|node| names.name(node, 0))
        };
        assert_eq!(named(["gpu1", "gpu2", ""]), ["gpu1:0", "gpu2:0", "0"]);
        assert_eq!(named(["gpu1", "gpu1", ""]), ["0"; 3]);
    }

    #[test]
    fn a_wish_is_told_in_few_words() {
        let told = |gpus, fraction, memory_mib, sharing| wish(&RequestSummary { gpus, fraction, memory_mib, sharing });
        assert_eq!(told(2, None, None, false), "2 GPUs");
        assert_eq!(told(1, Some(0.5), Some(2048), false), "0.5 of 1 GPU, 2 GiB");
        assert_eq!(told(1, None, Some(512), false), "512 MiB of 1 GPU");
        assert_eq!((told(1, None, None, true), told(0, None, None, false)), ("1 GPU, shared".into(), "no GPU".into()));
    }
}

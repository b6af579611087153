//! `gpupool status`: shows GPUs, leases, squatters and the queue.
//!
//! A server that serves statistics only is shown as such.

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

use crate::endpoint_args::{EndpointArgs, block_on, with_hint};
use crate::output::{print_output, print_text};
use crate::terminal::{TableColumn, TerminalFormat, TextStyle, TextTable, or_unknown, sanitize, truncate, wrap_words};
use crate::units::{self, plural};

/// Number of waiters in the table; the others are counted.
const MAX_SHOWN_WAITERS: usize = 20;
/// Maximum number of lease pages to fetch, each of up to a thousand leases.
const MAX_LEASE_PAGES: usize = 100;

/// Options of `gpupool status`.
#[derive(Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    endpoint_args: EndpointArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Refresh until Ctrl-C [default interval: 2s].
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "2s",
          value_parser = units::parse_nonzero_duration, conflicts_with = "json")]
    watch: Option<Duration>,
}

/// Status of one endpoint, as printed by `--json`.
#[derive(Debug, Serialize)]
#[serde(tag = "authority", rename_all = "snake_case")]
pub(crate) enum StatusReport {
    /// Agent that grants leases.
    Agent {
        endpoint: String,
        pool: Box<PoolBody>,
        devices: Vec<DeviceBody>,
        /// Waiting requests in queue order.
        waiting: Vec<LeaseBody>,
    },
    /// Server without leases that serves statistics only.
    None { endpoint: String, stats: StatsBody },
    /// Endpoint that could not be reached.
    Unknown { endpoint: String, error: String },
}

pub(crate) fn run(arguments: &StatusArgs) -> anyhow::Result<ExitCode> {
    let clients = arguments.endpoint_args.clients()?;
    block_on(async {
        match (arguments.watch, clients.as_slice()) {
            (Some(every), clients) => watch_status(clients, every).await.map(|()| ExitCode::SUCCESS),
            (None, [client]) => {
                let report = fetch_report(client).await.map_err(with_hint)?;
                print_output(arguments.json, &report, || render_report(&report, TerminalFormat::of_stdout()))
            }
            (None, clients) => {
                let reports = fetch_reports(clients).await;
                let done = print_output(arguments.json, &reports, || render_reports(&reports))?;
                let is_any_reachable = reports.iter().any(|one| !matches!(one, StatusReport::Unknown { .. }));
                Ok(if is_any_reachable { done } else { ExitCode::FAILURE })
            }
        }
    })
}

/// Fetches the status of all endpoints concurrently; errors become part of the result.
async fn fetch_reports(clients: &[AgentClient]) -> Vec<StatusReport> {
    let fetches = clients.iter().map(|client| async move {
        fetch_report(client).await.unwrap_or_else(|error| {
            let error = with_hint(error).to_string();
            StatusReport::Unknown { endpoint: client.endpoint().to_string(), error }
        })
    });
    join_all(fetches).await
}

fn render_reports(reports: &[StatusReport]) -> String {
    let pages: Vec<String> = reports.iter().map(|one| render_report(one, TerminalFormat::of_stdout())).collect();
    pages.join("\n")
}

/// Refreshes the status until an error that is not transient.
async fn watch_status(clients: &[AgentClient], every: Duration) -> anyhow::Result<()> {
    // Moves the cursor home and clears the rest afterwards, which flickers less than clearing first.
    let (home, rest) = if std::io::stdout().is_terminal() { ("\x1b[H", "\x1b[J") } else { ("", "\n") };
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let text = match clients {
            [client] => match fetch_report(client).await {
                Ok(report) => render_report(&report, TerminalFormat::of_stdout()),
                Err(error) if error.is_transient() => format!("{error}\n"),
                Err(error) => return Err(with_hint(error)),
            },
            several => render_reports(&fetch_reports(several).await),
        };
        let clear_ends = if home.is_empty() { text } else { text.replace('\n', "\x1b[K\n") };
        print_text(&format!("{home}{clear_ends}{rest}"))?;
    }
}

async fn fetch_report(client: &AgentClient) -> Result<StatusReport, ClientError> {
    let endpoint = client.endpoint().to_string();
    let pool = match client.pool().await {
        // No such route: this may be a statistics server.
        Err(error @ ClientError::NotAnAgent { status: 404, .. }) => {
            return client.stats().await.map(|stats| StatusReport::None { endpoint, stats }).map_err(|_| error);
        }
        response => Box::new(response?),
    };
    let devices = client.devices().await?.devices;
    let mut waiting = fetch_leases(client, Some("queued"), None).await?;
    waiting.sort_by_key(|lease| (lease.queue_position.unwrap_or(usize::MAX), lease.id));
    Ok(StatusReport::Agent { endpoint, pool, devices, waiting })
}

/// Fetches the leases in a state (by default those that have not ended), ordered by id.
pub(crate) async fn fetch_leases(
    client: &AgentClient,
    state: Option<&str>,
    owner: Option<&str>,
) -> Result<Vec<LeaseBody>, ClientError> {
    let mut query = LeaseQuery { state: state.map(Into::into), owner: owner.map(Into::into), ..LeaseQuery::default() };
    let mut leases = Vec::new();
    for _ in 0..MAX_LEASE_PAGES {
        let page = client.leases(&query).await?;
        leases.extend(page.leases);
        if page.next.is_none() {
            break;
        }
        query.after = page.next;
    }
    Ok(leases)
}

fn render_report(report: &StatusReport, format: TerminalFormat) -> String {
    match report {
        StatusReport::Agent { pool, devices, waiting, .. } => render_agent(pool, devices, waiting, format),
        StatusReport::None { endpoint, stats } => render_statistics(endpoint, stats, format),
        StatusReport::Unknown { error, .. } => {
            let lines = wrap_words(&sanitize(error), format.width.unwrap_or(usize::MAX));
            format!("{}\n", lines.join("\n"))
        }
    }
}

fn render_agent(pool: &PoolBody, devices: &[DeviceBody], waiting: &[LeaseBody], format: TerminalFormat) -> String {
    let now = pool.timestamp.parse().unwrap_or_else(|_| Timestamp::now());
    let mut text = wrap_words(&summary_line(pool, devices), format.width.unwrap_or(usize::MAX)).join("\n");
    text.push('\n');
    let names = GpuNames::of(devices.iter().map(|device| device.node.as_str()));
    push_section(&mut text, "", &gpu_table(devices, names), format);
    push_section(&mut text, "LEASES", &lease_table(devices, names, now), format);
    push_section(
        &mut text,
        "SQUATTERS (processes that use a GPU without a lease)",
        &squatter_table(devices, names),
        format,
    );
    push_section(&mut text, "QUEUE", &queue_table(waiting, now), format);
    if let Some(more) = waiting.len().checked_sub(MAX_SHOWN_WAITERS).filter(|more| *more > 0) {
        let _ = writeln!(text, "and {more} more; to list them: gpupool lease list");
    }
    text
}

fn summary_line(pool: &PoolBody, devices: &[DeviceBody]) -> String {
    let squatters: usize = devices.iter().map(count_squatters).sum();
    let is_free =
        |device: &&DeviceBody| device.closed.is_none() && device.leases.is_empty() && count_squatters(device) == 0;
    let free = devices.iter().filter(is_free).count();
    let mut parts = vec![
        format!("{} ({free} free)", plural(pool.devices, "GPU")),
        plural(pool.active, "lease"),
        format!("{} waiting", pool.waiting),
    ];
    if squatters > 0 {
        parts.push(plural(squatters, "squatter"));
    }
    if pool.simulated {
        parts.push("simulated".into());
    }
    format!("{}: {}", sanitize(&pool.node), parts.join(", "))
}

fn count_squatters(device: &DeviceBody) -> usize {
    device.processes.iter().filter(|process| process.squatter).count()
}

/// Appends a table with its title unless it is empty.
fn push_section<const N: usize>(text: &mut String, title: &str, table: &TextTable<N>, format: TerminalFormat) {
    if table.is_empty() {
        return;
    }
    text.push('\n');
    if !title.is_empty() {
        let title = truncate(title, format.width.unwrap_or(usize::MAX));
        let _ = writeln!(text, "{}", format.apply_style(TextStyle::Heading, &title));
    }
    text.push_str(&table.render(format));
}

/// Formats GPU ids in a table, prefixed with the node if the table shows several nodes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuNames {
    has_several_nodes: bool,
}

impl GpuNames {
    /// Creates the formatter for a table with GPUs of these nodes. Older agents send no node.
    pub(crate) fn of<'a>(nodes: impl Iterator<Item = &'a str>) -> Self {
        let named: BTreeSet<&str> = nodes.filter(|node| !node.is_empty()).collect();
        Self { has_several_nodes: named.len() > 1 }
    }

    /// Returns the name of a GPU.
    pub(crate) fn name(self, node: &str, gpu_id: u32) -> String {
        match self.has_several_nodes && !node.is_empty() {
            true => format!("{node}:{gpu_id}"),
            false => gpu_id.to_string(),
        }
    }
}

/// Returns the table of `gpupool device list`.
pub(crate) fn device_table(devices: &[DeviceBody]) -> TextTable<5> {
    let names = GpuNames::of(devices.iter().map(|device| device.node.as_str()));
    let mut table = TextTable::new([
        TableColumn::number("GPU"),
        TableColumn::text("NAME").min_width(12),
        TableColumn::text("UUID").min_width(8).drop_priority(1),
        TableColumn::number("LEASED"),
        TableColumn::text("STATE").min_width(12).wrapping(),
    ]);
    for device in devices {
        let (state, style) = device_state(device);
        let name = names.name(&device.node, device.gpu_id);
        let leased = units::format_share(device.promised);
        table.add_row([name, device_name(device), device.uuid.clone(), leased, state], style);
    }
    table
}

fn gpu_table(devices: &[DeviceBody], names: GpuNames) -> TextTable<8> {
    let mut table = TextTable::new([
        TableColumn::number("GPU"),
        TableColumn::text("NAME").min_width(12),
        TableColumn::number("BUSY"),
        TableColumn::number("MEMORY GiB").drop_priority(4),
        TableColumn::number("TEMP").drop_priority(3),
        TableColumn::number("POWER").drop_priority(1),
        TableColumn::number("LEASED"),
        TableColumn::text("STATE").min_width(12).wrapping(),
    ]);
    for device in devices {
        let (state, style) = device_state(device);
        let cells = [
            names.name(&device.node, device.gpu_id),
            device_name(device),
            or_unknown(device.utilization_percent.map(|busy| format!("{busy:.0}%"))),
            memory_cell(device.memory_used_mib, device.memory_mib),
            or_unknown(device.temperature_c.map(|degrees| format!("{degrees} °C"))),
            or_unknown(device.power_w.map(|watts| format!("{watts:.0} W"))),
            units::format_share(device.promised),
            state,
        ];
        table.add_row(cells, style);
    }
    table
}

fn device_name(device: &DeviceBody) -> String {
    let name = without_vendor(&device.name);
    match &device.partition {
        Some(part) if !name.contains(part.as_str()) => format!("{name} {part}"),
        _ => name.to_owned(),
    }
}

/// Removes the vendor, which the rest of the name implies.
fn without_vendor(name: &str) -> &str {
    let short = ["NVIDIA ", "AMD ", "Intel "].iter().find_map(|vendor| name.strip_prefix(vendor));
    short.map(str::trim_start).filter(|short| !short.is_empty()).unwrap_or(name)
}

/// Formats used and total memory in GiB.
fn memory_cell(used: Option<u64>, all: Option<u64>) -> String {
    let gib = |mib: Option<u64>| or_unknown(mib.map(|mib| format!("{:.1}", mib as f64 / 1024.0)));
    format!("{}/{}", gib(used), gib(all))
}

/// Returns whether the device accepts new work, and anything unusual about it.
fn device_state(device: &DeviceBody) -> (String, TextStyle) {
    if let Some(why) = &device.closed {
        let reason = device.health_reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
        return (format!("closed: {}{reason}", why.replace('_', " ")), TextStyle::Bad);
    }
    if device.stale {
        return ("no recent reading".into(), TextStyle::Faint);
    }
    let state = if device.promised >= 1.0 { "full" } else { "open" };
    match count_squatters(device) {
        0 => (state.into(), TextStyle::Plain),
        some => (format!("{state}, {}", plural(some, "squatter")), TextStyle::Odd),
    }
}

fn lease_table(devices: &[DeviceBody], names: GpuNames, now: Timestamp) -> TextTable<7> {
    let mut table = TextTable::new([
        TableColumn::number("GPU"),
        TableColumn::number("LEASE"),
        TableColumn::text("OWNER").min_width(8),
        TableColumn::number("FRACTION"),
        TableColumn::number("MEMORY").drop_priority(2),
        TableColumn::number("HELD").drop_priority(3),
        TableColumn::text("WORKER").min_width(6).drop_priority(1),
    ]);
    for device in devices {
        for lease in &device.leases {
            let since = lease.granted_at.as_deref().and_then(|at| age(at, now));
            let (owner, style) = match lease.draining {
                true => (format!("{} (draining)", lease.owner), TextStyle::Odd),
                false => (lease.owner.clone(), TextStyle::Plain),
            };
            let cells = [
                names.name(&device.node, device.gpu_id),
                lease.id.to_string(),
                owner,
                units::format_share(lease.fraction),
                lease.memory_mib.map(units::format_mib).unwrap_or_default(),
                since.map(units::format_duration).unwrap_or_default(),
                lease.worker_id.clone().unwrap_or_default(),
            ];
            table.add_row(cells, style);
        }
    }
    table
}

fn squatter_table(devices: &[DeviceBody], names: GpuNames) -> TextTable<5> {
    let mut table = TextTable::new([
        TableColumn::number("GPU"),
        TableColumn::number("PID"),
        TableColumn::text("USER").min_width(8),
        TableColumn::number("MEMORY").drop_priority(2),
        TableColumn::text("COMMAND").min_width(8),
    ]);
    for device in devices {
        for process in device.processes.iter().filter(|process| process.squatter) {
            let cells = [
                names.name(&device.node, device.gpu_id),
                or_unknown(process.pid),
                or_unknown(process.user.clone()),
                or_unknown(process.memory_mib.map(units::format_mib)),
                or_unknown(process.command.clone()),
            ];
            table.add_row(cells, TextStyle::Odd);
        }
    }
    table
}

fn queue_table(waiting: &[LeaseBody], now: Timestamp) -> TextTable<6> {
    let mut table = TextTable::new([
        TableColumn::number("POS"),
        TableColumn::number("LEASE").drop_priority(2),
        TableColumn::text("OWNER").min_width(8),
        TableColumn::text("REQUEST").min_width(8),
        TableColumn::number("WAITED").drop_priority(3),
        TableColumn::text("REASON").min_width(16).wrapping(),
    ]);
    for lease in waiting.iter().take(MAX_SHOWN_WAITERS) {
        let cells = [
            or_unknown(lease.queue_position),
            lease.id.to_string(),
            lease.owner.clone(),
            describe_request(&lease.request),
            age(&lease.created_at, now).map(units::format_duration).unwrap_or_default(),
            lease.reason.clone().unwrap_or_default(),
        ];
        table.add_row(cells, TextStyle::Plain);
    }
    table
}

pub(crate) fn describe_request(request: &RequestSummary) -> String {
    let gpus = if request.gpus == 0 { "no GPU".to_owned() } else { plural(request.gpus, "GPU") };
    match (request.fraction, request.memory_mib) {
        (Some(fraction), Some(memory)) => {
            format!("{} of {gpus}, {}", units::format_share(fraction), units::format_mib(memory))
        }
        (Some(fraction), None) => format!("{} of {gpus}", units::format_share(fraction)),
        (None, Some(memory)) => format!("{} of {gpus}", units::format_mib(memory)),
        (None, None) if request.sharing => format!("{gpus}, shared"),
        (None, None) => gpus,
    }
}

/// Returns the time since a timestamp.
pub(crate) fn age(at: &str, now: Timestamp) -> Option<Duration> {
    let at: Timestamp = at.parse().ok()?;
    Some(Duration::try_from(now.duration_since(at)).unwrap_or_default())
}

fn render_statistics(endpoint: &str, stats: &StatsBody, format: TerminalFormat) -> String {
    let gpus = plural(stats.gpu_count, "GPU");
    let mut text = format!("{endpoint}: {gpus}, statistics only (no leases)\n");
    if let Some(error) = &stats.error {
        let _ = writeln!(text, "{}", format.apply_style(TextStyle::Bad, &format!("error: {}", sanitize(error))));
    }
    push_section(&mut text, "", &statistics_table(stats), format);
    text
}

fn statistics_table(stats: &StatsBody) -> TextTable<7> {
    let mut table = TextTable::new([
        TableColumn::number("GPU"),
        TableColumn::text("NAME").min_width(12),
        TableColumn::number("BUSY"),
        TableColumn::number("MEMORY GiB").drop_priority(4),
        TableColumn::number("TEMP").drop_priority(3),
        TableColumn::number("POWER").drop_priority(1),
        TableColumn::text("STATE").min_width(12).drop_priority(2).wrapping(),
    ]);
    for gpu in &stats.gpus {
        let summary = |field: &str, value: u64| (!gpu.unsupported.iter().any(|other| other == field)).then_some(value);
        let (state, style) = reading_state(gpu, stats.stale);
        let busy = summary("utilization_percent", gpu.utilization_percent.into());
        let cells = [
            gpu.gpu_id.to_string(),
            without_vendor(&gpu.name).to_owned(),
            or_unknown(busy.map(|busy| format!("{busy}%"))),
            memory_cell(summary("memory.used_mb", gpu.memory.used_mb), summary("memory.total_mb", gpu.memory.total_mb)),
            or_unknown(gpu.temperature_c.map(|degrees| format!("{degrees} °C"))),
            or_unknown(gpu.power.draw_w.map(|watts| format!("{watts:.0} W"))),
            state,
        ];
        table.add_row(cells, style);
    }
    table
}

/// Returns the state of a GPU; empty if the server sends none.
fn reading_state(gpu: &GpuBody, all_stale: bool) -> (String, TextStyle) {
    if gpu.stale || all_stale {
        return ("no recent reading".into(), TextStyle::Faint);
    }
    match &gpu.health_reason {
        Some(reason) => (format!("{}: {reason}", gpu.health), TextStyle::Bad),
        None => (gpu.health.clone(), TextStyle::Plain),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Renders a saved `gpupool status --json` at a width.
    fn rendered_at(width: usize) -> String {
        let saved: serde_json::Value = serde_json::from_str(include_str!("../tests/fixtures/status.json")).unwrap();
        let part = |name: &str| saved[name].clone();
        let pool: PoolBody = serde_json::from_value(part("pool")).unwrap();
        let devices: Vec<DeviceBody> = serde_json::from_value(part("devices")).unwrap();
        let waiting: Vec<LeaseBody> = serde_json::from_value(part("waiting")).unwrap();
        render_agent(&pool, &devices, &waiting, TerminalFormat { width: Some(width), colours: false })
    }

    #[test]
    fn the_status_fits_the_terminal() {
        let expected = [
            (60, include_str!("../tests/fixtures/status-60.txt")),
            (80, include_str!("../tests/fixtures/status-80.txt")),
            (120, include_str!("../tests/fixtures/status-120.txt")),
        ];
        for (width, expected) in expected {
            let shown = rendered_at(width);
            assert_eq!(shown, expected, "at {width} columns:\n{shown}");
            assert!(shown.lines().all(|line| crate::terminal::display_width(line) <= width), "{shown}");
        }
    }

    #[test]
    fn gpus_of_several_nodes_have_distinct_names() {
        let named = |nodes: [&str; 3]| {
            let names = GpuNames::of(nodes.into_iter());
            nodes.map(|node| names.name(node, 0))
        };
        assert_eq!(named(["gpu1", "gpu2", ""]), ["gpu1:0", "gpu2:0", "0"]);
        assert_eq!(named(["gpu1", "gpu1", ""]), ["0"; 3]);
    }

    #[test]
    fn a_request_is_summarized() {
        let summary = |gpus, fraction, memory_mib, sharing| {
            describe_request(&RequestSummary { gpus, fraction, memory_mib, sharing })
        };
        assert_eq!(summary(2, None, None, false), "2 GPUs");
        assert_eq!(summary(1, Some(0.5), Some(2048), false), "0.5 of 1 GPU, 2 GiB");
        assert_eq!(summary(1, None, Some(512), false), "512 MiB of 1 GPU");
        assert_eq!(
            (summary(1, None, None, true), summary(0, None, None, false)),
            ("1 GPU, shared".into(), "no GPU".into())
        );
    }
}

//! `/metrics` for Prometheus: the counters of the agent, and the present state of devices, leases and the process.

use std::fmt;
use std::fs;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::IntoResponse;
use gpupool_core::{Millis, PoolTime};
use gpupool_devices::SourceState;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::registry::Registry;
use rustix::process::{Resource, getrlimit};

use crate::authority::Snapshot;
use crate::clock;
use crate::metrics::{Metrics, MetricsWriter};
use crate::node::statistics::CurrentStatistics;

use super::SharedState;
use super::pool_metrics::{PoolTotals, encode_devices, encode_leases};

/// Metrics
///
/// For Prometheus: OpenMetrics if `Accept` names it, else the older text format. `docs/metrics.md` explains every name.
#[utoipa::path(
    get, path = "/metrics", tag = "statistics",
    responses((status = 200, description = "Metrics", content(
        (String = "text/plain"),
        (String = "application/openmetrics-text"),
    )))
)]
pub(super) async fn metrics(State(app): State<SharedState>, headers: HeaderMap) -> impl IntoResponse {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let format = MetricsFormat::accepted(accept.unwrap_or_default());
    let scrape = MetricsScrape {
        metrics: app.metrics.clone(),
        current: app.node.statistics().current(),
        pool: Some((app.authority.snapshot(), app.authority.snapshot_age())),
        node: app.node.name().to_owned(),
        now: clock::now(),
    };
    ([(header::CONTENT_TYPE, format.media_type()), (header::VARY, "accept")], scrape.encode(format))
}

/// Input of one response to Prometheus.
pub struct MetricsScrape {
    /// The counters.
    pub metrics: Arc<Metrics>,
    /// The latest readings of the devices.
    pub current: Arc<CurrentStatistics>,
    /// The published state of the pool, and its age; `None` in tests without a pool.
    pub pool: Option<(Arc<Snapshot>, Millis)>,
    /// The name of this node.
    pub node: String,
    /// The time of the scrape.
    pub now: PoolTime,
}

impl MetricsScrape {
    /// Returns all metrics as text.
    pub fn encode(self, format: MetricsFormat) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        // Writing to a string does not fail.
        let written = prometheus_client::encoding::text::encode(&mut text, &registry);
        debug_assert!(written.is_ok());
        match format {
            MetricsFormat::OpenMetrics => text,
            MetricsFormat::Plain => to_plain_format(&text),
        }
    }
}

impl fmt::Debug for MetricsScrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MetricsScrape").field("now", &self.now).finish_non_exhaustive()
    }
}

impl Collector for MetricsScrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let writer = &mut MetricsWriter(encoder);
        let build = [([("version", env!("CARGO_PKG_VERSION")), ("node", &self.node)], 1.0)];
        writer.gauges("gpupool_build_info", "1, with the version and the name of the node", build)?;
        let snapshot = self.pool.as_ref().map(|(snapshot, _)| &**snapshot);
        let round = &self.current.round;
        encode_devices(writer, round, snapshot, &self.node, self.now)?;
        let present = round.sources.iter().filter(|source| source.problem().is_some() || source.is_ready());
        let up = present
            .map(|source| ([("source", source.kind.name())], f64::from(u8::from(source.state == SourceState::Ready))));
        writer.gauges("gpupool_source_up", "1 if a source responds", up)?;
        encode_leases(writer, snapshot.map(|snapshot| PoolTotals::new(snapshot, self.now)).as_ref())?;
        let age = self.pool.as_ref().map(|(_, age)| age.0 as f64 / 1000.0);
        let help = "Time since the authority last confirmed the published state";
        writer.gauge("gpupool_snapshot_age_seconds", help, age)?;
        self.metrics.encode(writer)?;
        AgentUsage::read().encode(writer, self.metrics.started())
    }
}

/// A text format of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricsFormat {
    /// OpenMetrics 1.0, which Prometheus requests.
    OpenMetrics,
    /// The older text format of Prometheus.
    Plain,
}

impl MetricsFormat {
    /// Returns the format for the `Accept` header of a request.
    pub fn accepted(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") { Self::OpenMetrics } else { Self::Plain }
    }

    /// Returns the media type of the format.
    pub const fn media_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Plain => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Converts OpenMetrics to the older format, in which a counter's family has the same name as its lines.
fn to_plain_format(text: &str) -> String {
    let mut plain = String::with_capacity(text.len() + 512);
    let mut help: Option<(&str, &str)> = None;
    for line in text.lines() {
        if let Some((name, words)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            help = Some((name, words));
            continue;
        }
        if line == "# EOF" {
            continue;
        }
        match (help.take(), line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))) {
            (Some((name, words)), Some((_, kind))) => {
                let suffix = if kind == "counter" { "_total" } else { "" };
                plain.push_str(&format!("# HELP {name}{suffix} {words}\n# TYPE {name}{suffix} {kind}\n"));
            }
            _ => {
                plain.push_str(line);
                plain.push('\n');
            }
        }
    }
    plain
}

/// The kernel counts processor time in hundredths of a second, on every machine.
const TICKS_PER_SECOND: f64 = 100.0;

/// The resources that the agent's process uses; `None` for values that the kernel does not report.
#[derive(Debug, Default)]
struct AgentUsage {
    cpu_seconds: Option<f64>,
    resident_bytes: Option<f64>,
    threads: Option<f64>,
    open_files: Option<f64>,
    max_open_files: Option<f64>,
}

impl AgentUsage {
    fn read() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        Self {
            cpu_seconds: parse_cpu_seconds(&stat),
            resident_bytes: parse_status_number(&status, "VmRSS:").map(|kib| kib * 1024.0),
            threads: parse_status_number(&status, "Threads:"),
            open_files: count_open_files(),
            max_open_files: getrlimit(Resource::Nofile).current.map(|most| most as f64),
        }
    }

    fn encode(&self, writer: &mut MetricsWriter<'_>, started: SystemTime) -> fmt::Result {
        let started = started.duration_since(UNIX_EPOCH).map(|since| since.as_secs_f64()).ok();
        let cpu = self.cpu_seconds.map(ConstCounter::new);
        writer.optional("process_cpu_seconds", "Processor time of the agent", cpu)?;
        writer.gauge("process_resident_memory_bytes", "Memory of the agent", self.resident_bytes)?;
        writer.gauge("process_threads", "Threads of the agent", self.threads)?;
        writer.gauge("process_open_fds", "Open files and connections of the agent", self.open_files)?;
        writer.gauge("process_max_fds", "Largest number of files and connections of the agent", self.max_open_files)?;
        writer.gauge("process_start_time_seconds", "Start time of the agent, since 1970", started)
    }
}

fn parse_status_number(status: &str, name: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Parses the processor time in a `stat` line. The name in brackets may contain brackets, so the numbers are found
/// after the last one.
fn parse_cpu_seconds(stat: &str) -> Option<f64> {
    let (_, after) = stat.rsplit_once(')')?;
    let mut ticks = after.split_whitespace().skip(11).map(str::parse::<f64>);
    let (user, system) = (ticks.next()?.ok()?, ticks.next()?.ok()?);
    Some((user + system) / TICKS_PER_SECOND)
}

/// Counts the open files. Newer kernels report the number as the size of the directory; on older ones the entries are
/// counted.
fn count_open_files() -> Option<f64> {
    let size = fs::metadata("/proc/self/fd").ok()?.len();
    if size > 0 {
        return Some(size as f64);
    }
    // The open directory itself is one of the entries.
    Some(fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1) as f64)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gpupool_store::{ClockReading, TokenOwners};

    use super::*;
    use crate::node::statistics::{DeviceFilter, Statistics};

    #[test]
    fn the_older_format_names_counters_as_their_lines_and_has_no_end_mark() {
        let text = "# HELP a Of a.\n# TYPE a counter\na_total 1\n# HELP b Of b.\n# TYPE b gauge\nb 2\n# EOF\n";
        let plain = "# HELP a_total Of a.\n# TYPE a_total counter\na_total 1\n# HELP b Of b.\n# TYPE b gauge\nb 2\n";
        assert_eq!(to_plain_format(text), plain);
    }

    #[test]
    fn processor_time_is_found_after_any_process_name() {
        let stat = "7 (a) b) R 1 1 1 0 -1 0 0 0 0 0 250 50 0 0 20 0 3 0 99 0 0";
        assert_eq!(parse_cpu_seconds(stat), Some(3.0));
        assert_eq!(parse_cpu_seconds("nonsense"), None);
    }

    #[test]
    fn the_usage_of_this_process_is_read() {
        let usage = AgentUsage::read();
        assert!(usage.resident_bytes > Some(100_000.0), "{usage:?}");
        assert!(usage.threads >= Some(1.0) && usage.open_files >= Some(1.0), "{usage:?}");
        assert!(usage.cpu_seconds.is_some() && usage.max_open_files >= usage.open_files, "{usage:?}");
    }

    #[test]
    fn a_scrape_has_the_age_of_the_published_state() {
        let now = clock::now();
        let at = ClockReading { pool: now, wall: SystemTime::now() };
        let snapshot = Arc::new(Snapshot::new(at, Arc::new(TokenOwners::default())));
        let current = Statistics::new(DeviceFilter::default(), Duration::from_secs(1), 1).current();
        let pool = Some((snapshot, Millis(4_500)));
        let scrape = MetricsScrape { metrics: Arc::default(), current, pool, node: "here".into(), now };
        let text = scrape.encode(MetricsFormat::OpenMetrics);
        assert!(text.contains("\ngpupool_snapshot_age_seconds 4.5\n"), "{text}");
    }
}

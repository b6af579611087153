//! One answer to Prometheus: everything that was counted and everything that stands, in the form that was asked for.

use std::fmt;
use std::fs;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use gpupool_core::PoolTime;
use gpupool_devices::SourceState;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::Registry;
use rustix::process::{Resource, getrlimit};

use crate::authority::Snapshot;
use crate::node::statistics::CurrentStatistics;

use super::Metrics;
use super::stand::{self, Stand};

/// What there is besides what was counted, looked at for one answer.
pub struct Scrape {
    /// What was counted.
    pub metrics: Arc<Metrics>,
    /// What devices read.
    pub current: Arc<CurrentStatistics>,
    /// The state of the pool; `None` in tests that have none.
    pub snapshot: Option<Arc<Snapshot>>,
    /// The name of this node.
    pub node: String,
    /// When it is.
    pub now: PoolTime,
}

impl Scrape {
    /// Everything as text.
    pub fn encode(self, form: Form) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        // A string takes whatever is written to it.
        let written = prometheus_client::encoding::text::encode(&mut text, &registry);
        debug_assert!(written.is_ok());
        match form {
            Form::OpenMetrics => text,
            Form::Plain => plain(&text),
        }
    }
}

impl fmt::Debug for Scrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scrape").field("now", &self.now).finish_non_exhaustive()
    }
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let page = &mut Page(encoder);
        let build = [([("version", env!("CARGO_PKG_VERSION")), ("node", &self.node)], 1.0)];
        page.gauges("gpupool_build_info", "1, with the version and the name of the node", build)?;
        let stand = self.snapshot.as_deref().map(|snapshot| Stand::of(snapshot, self.now));
        let (round, stand) = (&self.current.round, stand.as_ref());
        stand::encode_devices(page, round, stand, &self.node, self.now)?;
        let there = round.sources.iter().filter(|source| source.problem().is_some() || source.is_ready());
        let up = there.map(|source| (source.kind.name(), f64::from(u8::from(source.state == SourceState::Ready))));
        page.gauges("gpupool_source_up", "1 where a source answers", up.map(|(name, up)| ([("source", name)], up)))?;
        stand::encode_leases(stand, page)?;
        self.metrics.encode_counted(page)?;
        Process::look().encode(page, self.metrics.started)
    }
}

/// What families are written to. The registry would add a full stop to each help text, so it gets one collector instead.
pub(super) struct Page<'a>(DescriptorEncoder<'a>);

impl Page<'_> {
    pub fn metric(&mut self, name: &str, help: &str, metric: &impl EncodeMetric) -> fmt::Result {
        metric.encode(self.0.encode_descriptor(name, help, None, metric.metric_type())?)
    }

    /// A metric that has no value where it is not known; its name is told either way, so that what can be told is known
    /// beforehand.
    pub fn optional<M: EncodeMetric + TypedMetric>(
        &mut self,
        name: &str,
        help: &str,
        metric: Option<M>,
    ) -> fmt::Result {
        let family = self.0.encode_descriptor(name, help, None, M::TYPE)?;
        metric.map_or(Ok(()), |metric| metric.encode(family))
    }

    pub fn gauge(&mut self, name: &str, help: &str, value: Option<f64>) -> fmt::Result {
        self.optional(name, help, value.map(ConstGauge::new))
    }

    pub fn gauges<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        lines: impl IntoIterator<Item = (L, f64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        lines.into_iter().try_for_each(|(labels, value)| family.encode_family(&labels)?.encode_gauge(&value))
    }
}

/// How metrics are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// OpenMetrics 1.0, which Prometheus asks for.
    OpenMetrics,
    /// The older text form of Prometheus.
    Plain,
}

impl Form {
    /// What fits the `Accept` header of a request.
    pub fn accepted(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") { Self::OpenMetrics } else { Self::Plain }
    }

    /// Its media type.
    pub const fn media_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Plain => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// The older form of a text of OpenMetrics: there a counter's family is named as its lines are.
fn plain(text: &str) -> String {
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

// What the agent itself uses, read from the kernel when it is asked for.

/// The kernel tells processor time in hundredths of a second, on every machine.
const TICKS_PER_SECOND: f64 = 100.0;

/// What the agent uses; each is `None` where the kernel does not tell.
#[derive(Debug, Default)]
struct Process {
    cpu_seconds: Option<f64>,
    resident_bytes: Option<f64>,
    threads: Option<f64>,
    open_files: Option<f64>,
    most_files: Option<f64>,
}

impl Process {
    fn look() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        Self {
            cpu_seconds: cpu_seconds(&stat),
            resident_bytes: number_of(&status, "VmRSS:").map(|kib| kib * 1024.0),
            threads: number_of(&status, "Threads:"),
            open_files: open_files(),
            most_files: getrlimit(Resource::Nofile).current.map(|most| most as f64),
        }
    }

    fn encode(&self, page: &mut Page<'_>, started: SystemTime) -> fmt::Result {
        let started = started.duration_since(UNIX_EPOCH).map(|since| since.as_secs_f64()).ok();
        let cpu = self.cpu_seconds.map(ConstCounter::new);
        page.optional("process_cpu_seconds", "Processor time the agent used", cpu)?;
        page.gauge("process_resident_memory_bytes", "Memory of the agent", self.resident_bytes)?;
        page.gauge("process_threads", "Threads of the agent", self.threads)?;
        page.gauge("process_open_fds", "Files and connections the agent has open", self.open_files)?;
        page.gauge("process_max_fds", "Files and connections the agent may have open", self.most_files)?;
        page.gauge("process_start_time_seconds", "When the agent started, since 1970", started)
    }
}

fn number_of(status: &str, name: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The name in brackets may hold anything, brackets too; what counts comes after the last one.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let (_, after) = stat.rsplit_once(')')?;
    let mut ticks = after.split_whitespace().skip(11).map(str::parse::<f64>);
    let (user, system) = (ticks.next()?.ok()?, ticks.next()?.ok()?);
    Some((user + system) / TICKS_PER_SECOND)
}

/// Newer kernels tell the number as the size of the directory; older ones have it counted.
fn open_files() -> Option<f64> {
    let told = fs::metadata("/proc/self/fd").ok()?.len();
    if told > 0 {
        return Some(told as f64);
    }
    // The listing itself has the directory open.
    Some(fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_form_names_counters_as_their_lines_and_has_no_end_mark() {
        let text = "# HELP a Of a.\n# TYPE a counter\na_total 1\n# HELP b Of b.\n# TYPE b gauge\nb 2\n# EOF\n";
        let wanted = "# HELP a_total Of a.\n# TYPE a_total counter\na_total 1\n# HELP b Of b.\n# TYPE b gauge\nb 2\n";
        assert_eq!(plain(text), wanted);
    }

    #[test]
    fn processor_time_is_found_after_any_name() {
        let stat = "7 (a) b) R 1 1 1 0 -1 0 0 0 0 0 250 50 0 0 20 0 3 0 99 0 0";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(cpu_seconds("nonsense"), None);
    }

    #[test]
    fn this_process_is_told() {
        let process = Process::look();
        assert!(process.resident_bytes > Some(100_000.0), "{process:?}");
        assert!(process.threads >= Some(1.0) && process.open_files >= Some(1.0), "{process:?}");
        assert!(process.cpu_seconds.is_some() && process.most_files >= process.open_files, "{process:?}");
    }
}

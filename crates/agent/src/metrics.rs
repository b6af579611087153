//! The counters behind `/metrics`. Each part of the agent counts its own events here.
//!
//! This module imports no other part of the agent. `http::metrics` writes the counters, together with the present state of
//! devices and leases, when Prometheus asks. `docs/metrics.md` explains every name.

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::{Duration, SystemTime};

use axum::http::{Method, StatusCode};
use gpupool_api::view::end_cause_name;
use gpupool_core::{EndCause, Pool, PoolEffect, QueueTurn};
use gpupool_devices::SourceKind;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::{MetricType, TypedMetric};

/// Metrics that differ in one label.
type OneLabelFamily<M> = Family<[(&'static str, &'static str); 1], M>;
/// A gauge with a fraction, as Prometheus writes all gauges.
type FractionGauge = Gauge<f64, AtomicU64>;
/// A counter with a fraction, as Prometheus writes counters without labels.
type FractionCounter = Counter<f64, AtomicU64>;

const STORE_STATES: [&str; 3] = ["ok", "full", "broken"];

/// The counters of an agent.
#[derive(Debug)]
pub struct Metrics {
    started: SystemTime,
    routes: OnceLock<HashSet<Arc<str>>>,
    response_seconds: Family<ResponseLabels, Histogram, fn() -> Histogram>,
    requests_in_flight: FractionGauge,
    requests: OneLabelFamily<Counter>,
    grants: OneLabelFamily<Counter>,
    ends: OneLabelFamily<Counter>,
    offers: FractionCounter,
    quarantines: FractionCounter,
    wait_seconds: Histogram,
    held_seconds: Histogram,
    store_state: OneLabelFamily<FractionGauge>,
    commit_seconds: Histogram,
    commit_rows: Histogram,
    samples: FractionCounter,
    source_failures: OneLabelFamily<Counter>,
    /// Whether each source fails now, in the order of [`SourceKind::ALL`].
    failing_sources: [AtomicBool; SourceKind::ALL.len()],
}

/// The labels of a response in the histogram of response times.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResponseLabels {
    route: Arc<str>,
    method: &'static str,
    status: &'static str,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Returns counters that are all zero.
    pub fn new() -> Self {
        let metrics = Self {
            started: SystemTime::now(),
            routes: OnceLock::new(),
            response_seconds: Family::new_with_constructor(|| Histogram::new(RESPONSE_SECONDS)),
            requests_in_flight: FractionGauge::default(),
            requests: counters("outcome", OUTCOMES),
            grants: counters("turn", TURNS),
            ends: counters("cause", CAUSES.iter().map(end_cause_name)),
            offers: FractionCounter::default(),
            quarantines: FractionCounter::default(),
            wait_seconds: Histogram::new(LONG_SECONDS),
            held_seconds: Histogram::new(LONG_SECONDS),
            store_state: OneLabelFamily::default(),
            commit_seconds: Histogram::new(COMMIT_SECONDS),
            commit_rows: Histogram::new(COMMIT_ROWS),
            samples: FractionCounter::default(),
            source_failures: counters("source", SourceKind::ALL.map(SourceKind::name)),
            failing_sources: Default::default(),
        };
        metrics.store(STORE_STATES[0]);
        metrics
    }

    /// Returns the time at which the agent started.
    pub fn started(&self) -> SystemTime {
        self.started
    }

    /// Sets the routes that exist, once. Responses of other routes are counted together.
    pub fn know_routes(&self, routes: impl IntoIterator<Item = String>) {
        let known = self.routes.set(routes.into_iter().map(Arc::from).collect());
        debug_assert!(known.is_ok(), "the routes are set once");
    }

    /// Counts a request as in flight until the returned guard is dropped.
    pub fn begin(&self) -> RequestInFlight<'_> {
        self.requests_in_flight.inc();
        RequestInFlight(&self.requests_in_flight)
    }

    /// Counts a response.
    pub fn answered(&self, method: &Method, route: &str, status: StatusCode, took: Duration) {
        let route = self.routes.get().and_then(|routes| routes.get(route)).unwrap_or(&NO_ROUTE).clone();
        let class = usize::from(status.as_u16() / 100).clamp(1, STATUS_CLASSES.len()) - 1;
        let labels = ResponseLabels { route, method: method_name(method), status: STATUS_CLASSES[class] };
        self.response_seconds.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// Counts a committed effect.
    pub fn effect(&self, effect: &PoolEffect, pool: &Pool) {
        match effect {
            PoolEffect::Queued { .. } => count(&self.requests, "outcome", "queued"),
            PoolEffect::Offered { .. } => drop(self.offers.inc()),
            PoolEffect::Granted { lease, decision, .. } => {
                count(&self.grants, "turn", turn_name(decision.turn));
                if decision.turn == QueueTurn::OnArrival {
                    count(&self.requests, "outcome", "granted");
                }
                if let Some((lease, granted)) = pool.lease(*lease).and_then(|lease| Some((lease, lease.granted_at?))) {
                    self.wait_seconds.observe(granted.since(lease.created_at).0 as f64 / 1000.0);
                }
            }
            PoolEffect::Ended { lease, cause } => {
                count(&self.ends, "cause", end_cause_name(cause));
                let row = pool.lease(*lease);
                if let Some((granted, ended)) = row.and_then(|row| row.granted_at.zip(row.ended_at)) {
                    self.held_seconds.observe(ended.since(granted).0 as f64 / 1000.0);
                }
            }
            PoolEffect::Quarantined { .. } => drop(self.quarantines.inc()),
            PoolEffect::Revoking { .. }
            | PoolEffect::Draining { .. }
            | PoolEffect::Freed { .. }
            | PoolEffect::DeviceOpen { .. } => {}
        }
    }

    /// Counts a refused request for GPUs by the name of its outcome.
    pub fn refused(&self, outcome: &'static str) {
        debug_assert!(OUTCOMES.contains(&outcome), "{outcome} is in the list of outcomes");
        count(&self.requests, "outcome", outcome);
    }

    /// Counts a commit.
    pub fn committed(&self, rows: usize, took: Duration) {
        self.commit_seconds.observe(took.as_secs_f64());
        self.commit_rows.observe(rows as f64);
    }

    /// Counts a sample of the devices, and the sources that began to fail with it.
    pub fn sampled(&self, troubles: &[(SourceKind, gpupool_devices::SourceError)]) {
        self.samples.inc();
        for (kind, failing) in SourceKind::ALL.iter().zip(&self.failing_sources) {
            let fails = troubles.iter().any(|(source, _)| source == kind);
            if fails && !failing.swap(fails, Ordering::Relaxed) {
                count(&self.source_failures, "source", kind.name());
            } else if !fails {
                failing.store(false, Ordering::Relaxed);
            }
        }
    }

    /// Sets the state of the store by its name.
    pub fn store(&self, state: &'static str) {
        debug_assert!(STORE_STATES.contains(&state), "{state} is in the list of store states");
        for name in STORE_STATES {
            self.store_state.get_or_create(&[("state", name)]).set(f64::from(u8::from(name == state)));
        }
    }

    /// Writes every counter.
    pub fn encode(&self, writer: &mut MetricsWriter<'_>) -> fmt::Result {
        writer.metric("gpupool_requests", "Requests for GPUs, by their immediate outcome", &self.requests)?;
        writer.metric("gpupool_grants", "Leases granted, by how their turn came", &self.grants)?;
        writer.metric("gpupool_ends", "Leases ended, by cause", &self.ends)?;
        writer.metric("gpupool_offers", "Leases offered for confirmation", &self.offers)?;
        writer.metric("gpupool_quarantines", "GPUs closed because processes stayed on them", &self.quarantines)?;
        writer.metric("gpupool_wait_seconds", "Time from request to grant", &self.wait_seconds)?;
        writer.metric("gpupool_held_seconds", "Time from grant to end", &self.held_seconds)?;
        writer.metric("gpupool_store_state", "1 for the current state of the store", &self.store_state)?;
        writer.metric("gpupool_commit_seconds", "Time to make a batch durable", &self.commit_seconds)?;
        writer.metric("gpupool_commit_rows", "Rows made durable together", &self.commit_rows)?;
        writer.metric("gpupool_samples", "Samples of the devices", &self.samples)?;
        writer.metric("gpupool_source_failures", "Times that a source began to fail", &self.source_failures)?;
        let help = "Time from the head of a request to its response";
        writer.metric("gpupool_http_request_seconds", help, &self.response_seconds)?;
        writer.metric("gpupool_http_requests_in_flight", "Requests in flight", &self.requests_in_flight)
    }
}

/// A request in flight. Dropping it ends the count.
#[derive(Debug)]
pub struct RequestInFlight<'a>(&'a FractionGauge);

impl Drop for RequestInFlight<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Writer of metric families. The registry would add a full stop to each help text, so it gets one collector instead.
pub struct MetricsWriter<'a>(pub DescriptorEncoder<'a>);

impl MetricsWriter<'_> {
    /// Writes a family.
    pub fn metric(&mut self, name: &str, help: &str, metric: &impl EncodeMetric) -> fmt::Result {
        metric.encode(self.0.encode_descriptor(name, help, None, metric.metric_type())?)
    }

    /// Writes a metric without labels. An unknown value has no line, but its name is written, so that the list of names
    /// is complete.
    pub fn optional<M: EncodeMetric + TypedMetric>(
        &mut self,
        name: &str,
        help: &str,
        metric: Option<M>,
    ) -> fmt::Result {
        let family = self.0.encode_descriptor(name, help, None, M::TYPE)?;
        metric.map_or(Ok(()), |metric| metric.encode(family))
    }

    /// Writes a gauge without labels.
    pub fn gauge(&mut self, name: &str, help: &str, value: Option<f64>) -> fmt::Result {
        self.optional(name, help, value.map(ConstGauge::new))
    }

    /// Writes a family of gauges, one line per set of labels.
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

/// Returns counters that all exist from the start: a counter without events is 0, not missing.
fn counters(label: &'static str, names: impl IntoIterator<Item = &'static str>) -> OneLabelFamily<Counter> {
    let family = OneLabelFamily::default();
    names.into_iter().for_each(|name| drop(family.get_or_create(&[(label, name)])));
    family
}

fn count(family: &OneLabelFamily<Counter>, label: &'static str, name: &'static str) {
    family.get_or_create(&[(label, name)]).inc();
}

/// Buckets of response times in seconds, from a response out of memory to the longest wait.
const RESPONSE_SECONDS: [f64; 15] =
    [0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0, 300.0];

/// Buckets of commit times in seconds, from a fast disk to a hung one.
const COMMIT_SECONDS: [f64; 14] =
    [0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 10.0];

const COMMIT_ROWS: [f64; 13] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1_024.0, 2_048.0, 4_096.0];

const MINUTE: f64 = 60.0;
const HOUR: f64 = 60.0 * MINUTE;

/// Buckets of long times in seconds, from ten milliseconds to a week.
const LONG_SECONDS: [f64; 15] = [
    0.01,
    0.1,
    1.0,
    5.0,
    15.0,
    MINUTE,
    5.0 * MINUTE,
    15.0 * MINUTE,
    HOUR,
    3.0 * HOUR,
    6.0 * HOUR,
    12.0 * HOUR,
    24.0 * HOUR,
    72.0 * HOUR,
    168.0 * HOUR,
];

const STATUS_CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// The label of all requests without a route: a client must not make up labels.
static NO_ROUTE: LazyLock<Arc<str>> = LazyLock::new(|| "none".into());

fn method_name(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}

/// Every cause of an end. The text of a fault does not matter.
static CAUSES: LazyLock<[EndCause; 9]> = LazyLock::new(|| {
    [
        EndCause::ByOwner,
        EndCause::HolderGone,
        EndCause::TtlPassed,
        EndCause::MaxDurationPassed,
        EndCause::WaitLimitPassed,
        EndCause::Abandoned,
        EndCause::OfferLapsed,
        EndCause::Revoked,
        EndCause::Fault("".into()),
    ]
});

const TURNS: [&str; 4] = ["on_arrival", "next", "passed_others", "ends_before_others_start"];

fn turn_name(turn: QueueTurn) -> &'static str {
    match turn {
        QueueTurn::OnArrival => TURNS[0],
        QueueTurn::Next => TURNS[1],
        QueueTurn::PassedOthers => TURNS[2],
        QueueTurn::EndsBeforeOthersStart => TURNS[3],
    }
}

const OUTCOMES: [&str; 11] = [
    "granted",
    "queued",
    "no_capacity",
    "unsatisfiable",
    "invalid",
    "policy",
    "queue_full",
    "too_many_waiting",
    "forbidden",
    "not_kept",
    "other",
];

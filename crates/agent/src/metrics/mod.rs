//! Metrics for Prometheus.
//!
//! Events are counted where they happen. The present state (devices, leases, the process) is read from the authority's
//! snapshot and the statistics when it is asked for. There is no task here. Every name is explained in `docs/metrics.md`.

mod scrape;
mod stand;

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::{Duration, SystemTime};

use axum::http::{Method, StatusCode};
use gpupool_api::view::end_cause_name;
use gpupool_core::{CommandDenied, EndCause, Pool, PoolEffect, QueueTurn};
use gpupool_devices::SourceKind;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::authority::{Refusal, StoreState};

use scrape::Page;

pub use scrape::{Form, Scrape};

/// Metrics that differ in one label.
type Labelled<M> = Family<[(&'static str, &'static str); 1], M>;
/// A number with a fraction, as all gauges and the counters without labels are written.
type Number = Gauge<f64, AtomicU64>;
type Count = Counter<f64, AtomicU64>;

const STORE_STATES: [&str; 3] = ["ok", "full", "broken"];

/// What is counted.
#[derive(Debug)]
pub struct Metrics {
    started: SystemTime,
    routes: OnceLock<HashSet<Arc<str>>>,
    answers: Family<Answer, Histogram, fn() -> Histogram>,
    running: Number,
    asked: Labelled<Counter>,
    grants: Labelled<Counter>,
    ends: Labelled<Counter>,
    offers: Count,
    quarantines: Count,
    waits: Histogram,
    holds: Histogram,
    store: Labelled<Number>,
    commits: Histogram,
    commit_rows: Histogram,
    samples: Count,
    source_failures: Labelled<Counter>,
    /// Which sources fail now, in the order of [`SourceKind::ALL`].
    failing: [AtomicBool; SourceKind::ALL.len()],
}

/// How a request was answered.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answer {
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
    /// Nothing yet.
    pub fn new() -> Self {
        let metrics = Self {
            started: SystemTime::now(),
            routes: OnceLock::new(),
            answers: Family::new_with_constructor(|| Histogram::new(ANSWER_SECONDS)),
            running: Number::default(),
            asked: counters("outcome", OUTCOMES),
            grants: counters("turn", TURNS),
            ends: counters("cause", CAUSES.iter().map(end_cause_name)),
            offers: Count::default(),
            quarantines: Count::default(),
            waits: Histogram::new(LONG_SECONDS),
            holds: Histogram::new(LONG_SECONDS),
            store: Labelled::default(),
            commits: Histogram::new(COMMIT_SECONDS),
            commit_rows: Histogram::new(COMMIT_ROWS),
            samples: Count::default(),
            source_failures: counters("source", SourceKind::ALL.map(SourceKind::name)),
            failing: Default::default(),
        };
        metrics.store(&StoreState::Fine);
        metrics
    }

    /// Says which routes there are, as they are matched; once. Answers of others are counted together.
    pub fn know_routes(&self, routes: impl IntoIterator<Item = String>) {
        let known = self.routes.set(routes.into_iter().map(Arc::from).collect());
        debug_assert!(known.is_ok(), "routes are told once");
    }

    /// A request came; drop what is returned when it was answered, or given up.
    pub fn begin(&self) -> Running<'_> {
        self.running.inc();
        Running(&self.running)
    }

    /// A request was answered.
    pub fn answered(&self, method: &Method, route: &str, status: StatusCode, took: Duration) {
        let route = self.routes.get().and_then(|routes| routes.get(route)).unwrap_or(&NO_ROUTE).clone();
        let class = usize::from(status.as_u16() / 100).clamp(1, STATUS_CLASSES.len()) - 1;
        let answer = Answer { route, method: method_name(method), status: STATUS_CLASSES[class] };
        self.answers.get_or_create(&answer).observe(took.as_secs_f64());
    }

    /// Something was committed.
    pub fn effect(&self, effect: &PoolEffect, pool: &Pool) {
        match effect {
            PoolEffect::Queued { .. } => count(&self.asked, "outcome", "queued"),
            PoolEffect::Offered { .. } => drop(self.offers.inc()),
            PoolEffect::Granted { lease, decision, .. } => {
                count(&self.grants, "turn", turn_name(decision.turn));
                if decision.turn == QueueTurn::OnArrival {
                    count(&self.asked, "outcome", "granted");
                }
                if let Some((lease, granted)) = pool.lease(*lease).and_then(|lease| Some((lease, lease.granted_at?))) {
                    self.waits.observe(granted.since(lease.created_at).0 as f64 / 1000.0);
                }
            }
            PoolEffect::Ended { lease, cause } => {
                count(&self.ends, "cause", end_cause_name(cause));
                let row = pool.lease(*lease);
                if let Some((granted, ended)) = row.and_then(|row| row.granted_at.zip(row.ended_at)) {
                    self.holds.observe(ended.since(granted).0 as f64 / 1000.0);
                }
            }
            PoolEffect::Quarantined { .. } => drop(self.quarantines.inc()),
            PoolEffect::Revoking { .. }
            | PoolEffect::Draining { .. }
            | PoolEffect::Freed { .. }
            | PoolEffect::DeviceOpen { .. } => {}
        }
    }

    /// A request for GPUs was refused.
    pub fn refused(&self, refusal: &Refusal) {
        count(&self.asked, "outcome", outcome_name(refusal));
    }

    /// Rows were made durable.
    pub fn committed(&self, rows: usize, took: Duration) {
        self.commits.observe(took.as_secs_f64());
        self.commit_rows.observe(rows as f64);
    }

    /// Devices were read; these sources do not answer.
    pub fn sampled(&self, troubles: &[(SourceKind, gpupool_devices::SourceError)]) {
        self.samples.inc();
        for (kind, failing) in SourceKind::ALL.iter().zip(&self.failing) {
            let fails = troubles.iter().any(|(source, _)| source == kind);
            if fails && !failing.swap(fails, Ordering::Relaxed) {
                count(&self.source_failures, "source", kind.name());
            } else if !fails {
                failing.store(false, Ordering::Relaxed);
            }
        }
    }

    /// The store works differently than before.
    pub fn store(&self, state: &StoreState) {
        let now = match state {
            StoreState::Fine => STORE_STATES[0],
            StoreState::Full(_) => STORE_STATES[1],
            StoreState::Broken(_) => STORE_STATES[2],
        };
        for name in STORE_STATES {
            self.store.get_or_create(&[("state", name)]).set(f64::from(u8::from(name == now)));
        }
    }

    fn encode_counted(&self, page: &mut Page<'_>) -> fmt::Result {
        page.metric("gpupool_requests", "Requests for GPUs, by what came of them at once", &self.asked)?;
        page.metric("gpupool_grants", "Leases granted, by how their turn came", &self.grants)?;
        page.metric("gpupool_ends", "Leases ended, by cause", &self.ends)?;
        page.metric("gpupool_offers", "Leases offered for confirmation", &self.offers)?;
        page.metric("gpupool_quarantines", "GPUs closed because processes stayed on them", &self.quarantines)?;
        page.metric("gpupool_wait_seconds", "Time from asking to the grant", &self.waits)?;
        page.metric("gpupool_held_seconds", "Time from the grant to the end", &self.holds)?;
        page.metric("gpupool_store_state", "1 for the state the store is in", &self.store)?;
        page.metric("gpupool_commit_seconds", "Time to make a batch durable", &self.commits)?;
        page.metric("gpupool_commit_rows", "Rows made durable together", &self.commit_rows)?;
        page.metric("gpupool_samples", "How often devices were read", &self.samples)?;
        page.metric("gpupool_source_failures", "How often a source began to fail", &self.source_failures)?;
        let help = "Time from the head of a request to its answer";
        page.metric("gpupool_http_request_seconds", help, &self.answers)?;
        page.metric("gpupool_http_requests_in_flight", "Requests that are being answered", &self.running)
    }
}

/// A request that is being answered, until it is dropped.
#[derive(Debug)]
pub struct Running<'a>(&'a Number);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Counters that are all told from the start: one that was never counted is 0, not missing.
fn counters(label: &'static str, names: impl IntoIterator<Item = &'static str>) -> Labelled<Counter> {
    let family = Labelled::default();
    names.into_iter().for_each(|name| drop(family.get_or_create(&[(label, name)])));
    family
}

fn count(family: &Labelled<Counter>, label: &'static str, name: &'static str) {
    family.get_or_create(&[(label, name)]).inc();
}

/// From what is answered from memory to the longest wait of one answer.
const ANSWER_SECONDS: [f64; 15] =
    [0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0, 300.0];

/// From a fast disk to a hung one.
const COMMIT_SECONDS: [f64; 14] =
    [0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 10.0];

const COMMIT_ROWS: [f64; 13] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1_024.0, 2_048.0, 4_096.0];

const MINUTE: f64 = 60.0;
const HOUR: f64 = 60.0 * MINUTE;

/// From at once to a week.
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

/// What is told as the route of a request that no route is for: a client must not make up labels.
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

/// Every cause an end can have; what a fault was makes no difference.
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

fn outcome_name(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::Denied(denied) => match denied {
            CommandDenied::NoCapacity => "no_capacity",
            CommandDenied::Unsatisfiable(_) => "unsatisfiable",
            CommandDenied::Invalid(_) => "invalid",
            CommandDenied::Policy { .. } => "policy",
            CommandDenied::QueueFull { .. } => "queue_full",
            _ => "other",
        },
        Refusal::TooManyWaiting { .. } => "too_many_waiting",
        Refusal::Forbidden(_) => "forbidden",
        Refusal::NotDurable(_) | Refusal::DiskFull(_) => "not_kept",
        Refusal::Busy | Refusal::Stopping => "other",
    }
}

//! What is counted, and how it is told to Prometheus.
//!
//! Whatever happens is counted where it happens, without a lock. What only stands (devices, leases, the process) is
//! looked at when it is asked for: one look at the owner thread, one at the statistics. There is no task here. Every name
//! is explained in `docs/metrics.md`.

mod devices;
mod distribution;
mod page;
mod pool;
mod process;
mod requests;
mod tally;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use axum::http::{Method, StatusCode};
use gpupool_api::view::cause_name;
use gpupool_core::lease::{EndCause, Turn};
use gpupool_core::{Denied, Effect, Pool, Time};
use gpupool_devices::SourceKind;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Registry;

use crate::owner::{Refusal, StoreState};
use crate::sampler::Sample;
use crate::stats::{Current, SourceState};

use distribution::{COMMITS, Distribution, LONG, ROWS};
use page::Page;
use process::Process;
use requests::Requests;
use tally::Tally;

pub use page::Form;
pub use pool::Stand;
pub use requests::Running;

/// How the store is, by name; its place is what is kept.
const STORE_STATES: [&str; 3] = ["ok", "full", "broken"];

/// What is counted.
#[derive(Debug)]
pub struct Metrics {
    started: SystemTime,
    requests: Requests,
    asked: Tally,
    grants: Tally,
    ends: Tally,
    offers: AtomicU64,
    quarantines: AtomicU64,
    waits: Distribution,
    holds: Distribution,
    store: AtomicU8,
    commits: Distribution,
    commit_rows: Distribution,
    samples: AtomicU64,
    source_failures: Tally,
    /// Which sources fail now, in the order of [`SourceKind::ALL`].
    failing: [AtomicBool; SourceKind::ALL.len()],
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Nothing yet.
    pub fn new() -> Self {
        Self {
            started: SystemTime::now(),
            requests: Requests::default(),
            asked: Tally::new(OUTCOMES),
            grants: Tally::new(TURNS),
            ends: Tally::new(CAUSES.iter().map(cause_name)),
            offers: AtomicU64::new(0),
            quarantines: AtomicU64::new(0),
            waits: Distribution::new(&LONG),
            holds: Distribution::new(&LONG),
            store: AtomicU8::new(0),
            commits: Distribution::new(&COMMITS),
            commit_rows: Distribution::new(&ROWS),
            samples: AtomicU64::new(0),
            source_failures: Tally::new(SourceKind::ALL.map(SourceKind::name)),
            failing: Default::default(),
        }
    }

    /// Says which routes there are, as they are matched; once. Answers of others are counted together.
    pub fn know_routes(&self, routes: impl IntoIterator<Item = String>) {
        self.requests.know(routes);
    }

    /// A request came; drop what is returned when it was answered, or given up.
    pub fn begin(&self) -> Running<'_> {
        self.requests.begin()
    }

    /// A request was answered.
    pub fn answered(&self, method: &Method, route: &str, status: StatusCode, took: Duration) {
        self.requests.answered(method, route, status, took);
    }

    /// Something was committed.
    pub fn effect(&self, effect: &Effect, pool: &Pool) {
        match effect {
            Effect::Queued { .. } => self.asked.add("queued"),
            Effect::Offered { .. } => {
                self.offers.fetch_add(1, Ordering::Relaxed);
            }
            Effect::Granted { lease, decision, .. } => {
                self.grants.add(turn_name(decision.turn));
                if decision.turn == Turn::OnArrival {
                    self.asked.add("granted");
                }
                if let Some((lease, granted)) = pool.lease(*lease).and_then(|lease| Some((lease, lease.granted_at?))) {
                    self.waits.add(granted.since(lease.created_at).0);
                }
            }
            Effect::Ended { lease, cause } => {
                self.ends.add(cause_name(cause));
                let row = pool.lease(*lease);
                if let Some((granted, ended)) = row.and_then(|row| row.granted_at.zip(row.ended_at)) {
                    self.holds.add(ended.since(granted).0);
                }
            }
            Effect::Quarantined { .. } => {
                self.quarantines.fetch_add(1, Ordering::Relaxed);
            }
            Effect::Revoking { .. } | Effect::Draining { .. } | Effect::Freed { .. } | Effect::DeviceOpen { .. } => {}
        }
    }

    /// A request for GPUs was refused.
    pub fn refused(&self, refusal: &Refusal) {
        self.asked.add(outcome_name(refusal));
    }

    /// Rows were made durable.
    pub fn committed(&self, rows: usize, took: Duration) {
        self.commits.add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        self.commit_rows.add(rows as u64);
    }

    /// Devices were read.
    pub fn sampled(&self, sample: &Sample) {
        self.samples.fetch_add(1, Ordering::Relaxed);
        for (kind, failing) in SourceKind::ALL.iter().zip(&self.failing) {
            let fails = sample.troubles.iter().any(|(source, _)| source == kind);
            if fails && !failing.swap(fails, Ordering::Relaxed) {
                self.source_failures.add(kind.name());
            } else if !fails {
                failing.store(false, Ordering::Relaxed);
            }
        }
    }

    /// The store works differently than before.
    pub fn store(&self, state: &StoreState) {
        let place = match state {
            StoreState::Fine => 0,
            StoreState::Full(_) => 1,
            StoreState::Broken(_) => 2,
        };
        self.store.store(place, Ordering::Relaxed);
    }

    fn encode_counted(&self, page: &mut Page<'_>) -> fmt::Result {
        let single = |count: &AtomicU64| Some(count.load(Ordering::Relaxed) as f64);
        let by = |label: &'static str, tally: &Tally| -> Vec<([(&str, &str); 1], u64)> {
            tally.lines().map(|(name, count)| ([(label, name)], count)).collect()
        };
        page.counters(
            "gpupool_requests",
            "Requests for GPUs, by what came of them at once",
            by("outcome", &self.asked),
        )?;
        page.counters("gpupool_grants", "Leases granted, by how their turn came", by("turn", &self.grants))?;
        page.counters("gpupool_ends", "Leases ended, by cause", by("cause", &self.ends))?;
        page.counter("gpupool_offers", "Leases offered for confirmation", single(&self.offers))?;
        page.counter("gpupool_quarantines", "GPUs closed because processes stayed on them", single(&self.quarantines))?;
        page.distribution("gpupool_wait_seconds", "Time from asking to the grant", &self.waits)?;
        page.distribution("gpupool_held_seconds", "Time from the grant to the end", &self.holds)?;
        let now = usize::from(self.store.load(Ordering::Relaxed));
        let states = STORE_STATES.iter().enumerate();
        let lines = states.map(|(place, state)| ([("state", *state)], f64::from(u8::from(place == now))));
        page.gauges("gpupool_store_state", "1 for the state the store is in", lines)?;
        page.distribution("gpupool_commit_seconds", "Time to make a batch durable", &self.commits)?;
        page.distribution("gpupool_commit_rows", "Rows made durable together", &self.commit_rows)?;
        page.counter("gpupool_samples", "How often devices were read", single(&self.samples))?;
        page.counters(
            "gpupool_source_failures",
            "How often a source began to fail",
            by("source", &self.source_failures),
        )
    }
}

/// What there is besides what was counted, looked at for one answer.
pub struct Scrape {
    /// What was counted.
    pub metrics: Arc<Metrics>,
    /// What devices read.
    pub current: Arc<Current>,
    /// How the pool stands; `None` where the owner thread did not say in time.
    pub stand: Option<Stand>,
    /// The name of this node.
    pub node: String,
    /// When it is.
    pub now: Time,
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
            Form::Plain => page::plain(&text),
        }
    }
}

impl fmt::Debug for Scrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scrape").field("stand", &self.stand).field("now", &self.now).finish_non_exhaustive()
    }
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let page = &mut Page(encoder);
        let build = [([("version", env!("CARGO_PKG_VERSION")), ("node", &self.node)], 1.0)];
        page.gauges("gpupool_build_info", "1, with the version and the name of the node", build)?;
        let (round, stand) = (&self.current.round, self.stand.as_ref());
        devices::encode(page, round, stand, &self.node, self.now)?;
        let there = round.sources.iter().filter(|source| source.trouble().is_some() || source.answers());
        let up = there.map(|source| (source.kind.name(), f64::from(u8::from(source.state == SourceState::Answers))));
        page.gauges("gpupool_source_up", "1 where a source answers", up.map(|(name, up)| ([("source", name)], up)))?;
        pool::encode(stand, page)?;
        self.metrics.encode_counted(page)?;
        self.metrics.requests.encode(page)?;
        Process::look().encode(page, self.metrics.started)
    }
}

/// Every cause an end can have; what a fault was makes no difference.
static CAUSES: std::sync::LazyLock<[EndCause; 9]> = std::sync::LazyLock::new(|| {
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

fn turn_name(turn: Turn) -> &'static str {
    match turn {
        Turn::OnArrival => TURNS[0],
        Turn::Next => TURNS[1],
        Turn::PassedOthers => TURNS[2],
        Turn::EndsBeforeOthersStart => TURNS[3],
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
            Denied::NoCapacity => "no_capacity",
            Denied::Unsatisfiable(_) => "unsatisfiable",
            Denied::Invalid(_) => "invalid",
            Denied::Policy { .. } => "policy",
            Denied::QueueFull { .. } => "queue_full",
            _ => "other",
        },
        Refusal::TooManyWaiting { .. } => "too_many_waiting",
        Refusal::Forbidden(_) => "forbidden",
        Refusal::NotDurable(_) | Refusal::DiskFull(_) => "not_kept",
        Refusal::Busy | Refusal::Stopping => "other",
    }
}

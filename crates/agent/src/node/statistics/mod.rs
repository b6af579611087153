//! The responses of the statistics routes, prepared once per reading.
//!
//! The sampler publishes a [`SamplingRound`] after each reading and after each round without one; readers take prepared
//! bytes. If the next round is late (the sampler hangs or is gone), the data counts as stale: readers check the clock,
//! so old data never passes as fresh. There is no task or thread here.

mod bodies;
mod filter;
mod round;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use gpupool_api::stats::{GpuFiltering, StatsBody, SummaryBody};
use gpupool_core::{Millis, PoolTime};
use serde::Serialize;

pub use filter::DeviceFilter;
pub(crate) use filter::VisibleDevices;
pub(crate) use round::{HealthStatus, ListedDevice, SamplingRound, StatisticsHealth};

use round::ReadingHistory;

/// A prepared response: the HTTP status, and the body as JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedResponse {
    /// 200, or 503 if there is no data because reading failed.
    pub status: u16,
    /// The body.
    pub body: Bytes,
}

/// The statistics between two rounds.
#[derive(Debug)]
pub struct CurrentStatistics {
    /// The round.
    pub round: SamplingRound,
    /// The body of `/gpu/stats`.
    pub stats: StatsBody,
    /// The body of `/gpu/summary`.
    pub summary: SummaryBody,
    prepared: [PreparedResponse; 3],
    /// Built on demand: it is long and rarely needed.
    history: OnceLock<PreparedResponse>,
}

/// The statistics of the newest round, and their stale form for the time after the next round is overdue.
#[derive(Debug)]
struct PublishedStatistics {
    fresh: Arc<CurrentStatistics>,
    fresh_until: PoolTime,
    stale: OnceLock<Arc<CurrentStatistics>>,
}

/// The statistics of a node.
#[derive(Debug)]
pub struct Statistics {
    filter: DeviceFilter,
    refresh: Millis,
    /// A lock rather than a channel: readers hold it for the copy of a pointer, the one writer once per round.
    published: RwLock<PublishedStatistics>,
    /// Locked by the writer and by requests for history only.
    history: Mutex<ReadingHistory>,
}

impl Statistics {
    /// Returns statistics before the first reading, which count as failed. `refresh` is the time between two rounds.
    pub fn new(filter: DeviceFilter, refresh: Duration, max_history: usize) -> Self {
        let refresh = Millis(u64::try_from(refresh.as_millis()).unwrap_or(u64::MAX).max(1));
        let clock = crate::clock::both();
        let round = SamplingRound {
            clock,
            devices: Vec::new(),
            sources: Vec::new(),
            answered_at: None,
            refresh,
            rivals: Vec::new(),
            stopped: false,
        };
        let published = RwLock::new(PublishedStatistics::new(round));
        Self { filter, refresh, published, history: Mutex::new(ReadingHistory::new(max_history)) }
    }

    /// Publishes a round.
    pub fn publish(&self, round: SamplingRound) {
        lock(&self.history).record_round(&round);
        // Prepared before the lock is taken, and the old one dropped after: readers wait for neither.
        let new = PublishedStatistics::new(round);
        let mut place = self.published.write().unwrap_or_else(PoisonError::into_inner);
        let old = std::mem::replace(&mut *place, new);
        drop(place);
        drop(old);
    }

    /// Returns the response of `GET /gpu/stats`.
    pub fn stats(&self) -> PreparedResponse {
        self.with_current(|current| current.prepared[0].clone())
    }

    /// Returns the response of `GET /gpu/count`.
    pub fn count(&self) -> PreparedResponse {
        self.with_current(|current| current.prepared[1].clone())
    }

    /// Returns the response of `GET /gpu/summary`.
    pub fn summary(&self) -> PreparedResponse {
        self.with_current(|current| current.prepared[2].clone())
    }

    /// Returns the response of `GET /gpu/history`.
    pub fn history(&self) -> PreparedResponse {
        let current = self.current();
        let build = || prepare(current.status(), &lock(&self.history).body(&current.round));
        current.history.get_or_init(build).clone()
    }

    /// Returns the current statistics.
    pub fn current(&self) -> Arc<CurrentStatistics> {
        self.with_current(Arc::clone)
    }

    /// Returns how well the devices can be read.
    pub fn health(&self) -> StatisticsHealth {
        round::health(&self.current().round, crate::clock::now())
    }

    /// Returns the part of `GET /config` about the listed GPUs.
    pub fn gpu_filtering(&self) -> GpuFiltering {
        let current = self.current();
        bodies::filtering(&current.round, &self.filter, &self.visible(&current.round.devices))
    }

    /// Returns the filter of this service.
    pub const fn filter(&self) -> &DeviceFilter {
        &self.filter
    }

    /// Returns the time between two rounds.
    pub const fn refresh(&self) -> Millis {
        self.refresh
    }

    fn visible(&self, devices: &[ListedDevice]) -> VisibleDevices {
        let known: Vec<_> = devices.iter().map(|seen| (seen.gpu_id, &*seen.tracked.found)).collect();
        self.filter.among(&known)
    }

    fn with_current<T>(&self, take: impl FnOnce(&Arc<CurrentStatistics>) -> T) -> T {
        let published = self.published.read().unwrap_or_else(PoisonError::into_inner);
        take(published.at(crate::clock::now()))
    }
}

impl PublishedStatistics {
    fn new(round: SamplingRound) -> Self {
        let fresh_until = fresh_until(&round);
        Self { fresh: Arc::new(CurrentStatistics::new(round)), fresh_until, stale: OnceLock::new() }
    }

    fn at(&self, now: PoolTime) -> &Arc<CurrentStatistics> {
        if now <= self.fresh_until {
            return &self.fresh;
        }
        let stale = || Arc::new(CurrentStatistics::new(SamplingRound { stopped: true, ..self.fresh.round.clone() }));
        self.stale.get_or_init(stale)
    }
}

/// Returns the time until which a round counts as fresh: while its oldest fresh reading is fresh, and at least until the
/// next round is due, which judges each device's age anew.
fn fresh_until(round: &SamplingRound) -> PoolTime {
    let readings = round.listed().filter(|seen| !round.is_stale(seen)).map(|seen| seen.read_at);
    let oldest = readings.min().or(round.answered_at).unwrap_or(round.clock.pool);
    let next = round.clock.pool.after(Millis(round.refresh.0.saturating_mul(3) / 2));
    round.stale_from(oldest).max(next)
}

impl CurrentStatistics {
    fn new(round: SamplingRound) -> Self {
        let stats = bodies::stats(&round);
        let summary = bodies::summary(&round, &stats);
        let status = status(&round);
        let prepared = [prepare(status, &stats), prepare(status, &bodies::count(&stats)), prepare(status, &summary)];
        Self { round, stats, summary, prepared, history: OnceLock::new() }
    }

    fn status(&self) -> u16 {
        status(&self.round)
    }
}

fn status(round: &SamplingRound) -> u16 {
    if round.has_failed() { 503 } else { 200 }
}

fn prepare(status: u16, body: &impl Serialize) -> PreparedResponse {
    // Bodies hold numbers, texts and lists only, so this does not fail.
    match serde_json::to_vec(body) {
        Ok(body) => PreparedResponse { status, body: body.into() },
        Err(error) => {
            tracing::error!(%error, "statistics cannot be written as JSON");
            PreparedResponse { status: 500, body: Bytes::from_static(b"{}") }
        }
    }
}

/// Locks the history, which is consistent after every step even if a thread panics.
fn lock(history: &Mutex<ReadingHistory>) -> MutexGuard<'_, ReadingHistory> {
    history.lock().unwrap_or_else(PoisonError::into_inner)
}

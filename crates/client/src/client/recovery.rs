//! How endpoints fail and come back, and what can be done about it by hand; and the looking at each endpoint by which that is
//! known.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use gpupool_api::stats::StatsBody;
use serde::Serialize;
use tokio::time::Instant;

use super::Client;
use super::balance::{ObservedGpu, Seen};
use super::books::Books;
use super::builder::Settings;
use super::place::{Desk, Place, give_back_remembered};
use super::running::{Core, Follower};
use super::status::StatusUpdate;
use crate::limits::{LOOK_PAUSE, PROBE_PAUSE, ROUND_PAUSE_FIRST, ROUND_PAUSE_MOST};
use crate::random::Backoff;
use crate::{ClientError, random};

/// How many endpoints can be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DegradationLevel {
    /// All.
    None,
    /// Some.
    Partial,
    /// None.
    Full,
}

/// Whether all is well, in short.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PoolHealth {
    /// `healthy`, `degraded` (not every endpoint can be asked, or one is not well) or `unhealthy` (none can be asked).
    pub status: &'static str,
    /// Each endpoint: what its `/health` last said, or `unreachable`.
    pub endpoints: BTreeMap<String, String>,
}

/// How endpoints fail and come back. Prints as a short report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RecoveryStatus {
    /// Endpoints that can be asked.
    pub healthy_endpoints: Vec<String>,
    /// Endpoints that cannot.
    pub degraded_endpoints: Vec<String>,
    /// The breaker of each endpoint.
    pub circuit_breaker_stats: BTreeMap<String, CircuitBreakerStats>,
    /// The endpoints, counted.
    pub endpoint_health_summary: EndpointHealthSummary,
    /// The whole.
    pub degradation_manager: DegradationStatus,
}

/// An endpoint's breaker.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CircuitBreakerStats {
    /// `closed`, `open` or `half_open`.
    pub state: &'static str,
    /// Failures since the last success.
    pub consecutive_failures: u32,
    /// Failures in percent of everything asked.
    pub failure_rate: f64,
    /// Answers since the client was made.
    pub success_count: u64,
    /// Failures since the client was made.
    pub failure_count: u64,
    /// Seconds until it is looked at again; `None` where it is not left alone.
    pub retry_in_secs: Option<f64>,
    /// How much of its share of the work it gets, 0..=1.
    pub traffic_share: f64,
    /// What went wrong last, until something goes right.
    pub last_error: Option<String>,
}

/// The endpoints, counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct EndpointHealthSummary {
    /// How many there are.
    pub total_count: usize,
    /// How many can be asked.
    pub healthy_count: usize,
    /// How many cannot.
    pub unhealthy_count: usize,
}

/// The endpoints as a whole.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DegradationStatus {
    /// How many can be asked, by name.
    pub degradation: DegradationLevel,
    /// Whether none can.
    pub is_fully_degraded: bool,
    /// Endpoints that can be asked.
    pub healthy_endpoints: Vec<String>,
    /// Endpoints that cannot.
    pub degraded_endpoints: Vec<String>,
    /// Calls that wait for endpoints to be well again.
    pub queued_requests: usize,
}

impl Client {
    /// How endpoints fail and come back.
    pub fn error_recovery_status(&self) -> Result<RecoveryStatus, ClientError> {
        let running = self.running("getting error recovery status")?;
        let places = running.places();
        let ids = |is_usable: bool| -> Vec<String> {
            let those = places.iter().filter(|place| place.is_usable() == is_usable);
            those.map(|place| place.id.clone()).collect()
        };
        let (healthy, degraded) = (ids(true), ids(false));
        let degradation = match (healthy.is_empty(), degraded.is_empty()) {
            (_, true) => DegradationLevel::None,
            (false, false) => DegradationLevel::Partial,
            (true, false) => DegradationLevel::Full,
        };
        Ok(RecoveryStatus {
            circuit_breaker_stats: places.iter().map(|place| (place.id.clone(), breaker_stats(place))).collect(),
            endpoint_health_summary: EndpointHealthSummary {
                total_count: places.len(),
                healthy_count: healthy.len(),
                unhealthy_count: degraded.len(),
            },
            degradation_manager: DegradationStatus {
                degradation,
                is_fully_degraded: degradation == DegradationLevel::Full,
                healthy_endpoints: healthy.clone(),
                degraded_endpoints: degraded.clone(),
                queued_requests: running.core.queued_for_retry.count(),
            },
            healthy_endpoints: healthy,
            degraded_endpoints: degraded,
        })
    }

    /// Whether all is well, from what is known.
    pub fn health(&self) -> Result<PoolHealth, ClientError> {
        let running = self.running("getting health")?;
        let health = |place: &Arc<Place>| {
            let known = place.known();
            match &known.health {
                _ if !known.is_usable() => "unreachable".to_owned(),
                Some(said) => said.clone(),
                // It answers, and has no such route or has not been asked yet.
                None => "healthy".to_owned(),
            }
        };
        let endpoints: BTreeMap<String, String> =
            running.places().iter().map(|place| (place.id.clone(), health(place))).collect();
        let status = match (running.core.is_any_usable(), endpoints.values().all(|said| said == "healthy")) {
            (false, _) => "unhealthy",
            (true, true) => "healthy",
            (true, false) => "degraded",
        };
        Ok(PoolHealth { status, endpoints })
    }

    /// Looks at an endpoint now, whatever its breaker says, and waits for what comes of it. `false` where there is no such
    /// endpoint.
    pub async fn trigger_endpoint_recovery(&self, endpoint_id: &str) -> Result<bool, ClientError> {
        let running = self.running("triggering endpoint recovery")?;
        let Some(place) = running.core.place_called(endpoint_id) else { return Ok(false) };
        let before = {
            let mut known = place.known();
            known.breaker.begin_probe();
            known.looks
        };
        place.look_now.notify_one();
        let is_done = || {
            let known = place.known();
            // Half open after one good look: the next one follows at once.
            known.looks > before && known.breaker.state_name() != "half_open"
        };
        running.wait_until(is_done).await;
        Ok(true)
    }

    /// Runs something now where any endpoint can be asked, otherwise as soon as one can, and gives back what comes of it.
    pub async fn queue_request_for_retry<F, T>(&self, call: impl FnOnce() -> F) -> Result<T, ClientError>
    where
        F: Future<Output = Result<T, ClientError>>,
    {
        let running = self.running("queueing a request for retry")?;
        let queued = running.core.queued_for_retry.begin();
        if !running.wait_until(|| running.core.is_any_usable()).await {
            return Err(ClientError::NotStarted { doing: "queueing a request for retry" });
        }
        drop(queued);
        call().await
    }
}

fn breaker_stats(place: &Arc<Place>) -> CircuitBreakerStats {
    let now = Instant::now();
    let known = place.known();
    let (success_count, failure_count) = (known.breaker.successes, known.breaker.failures);
    let asked = (success_count + failure_count).max(1) as f64;
    CircuitBreakerStats {
        state: known.breaker.state_name(),
        consecutive_failures: known.breaker.failures_in_a_row,
        failure_rate: (failure_count as f64 * 10_000.0 / asked).round() / 100.0,
        success_count,
        failure_count,
        retry_in_secs: known.breaker.probe_at().map(|at| at.saturating_duration_since(now).as_secs_f64()),
        traffic_share: known.breaker.share(now),
        last_error: known.error.clone(),
    }
}

impl fmt::Display for RecoveryStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EndpointHealthSummary { total_count, healthy_count, .. } = self.endpoint_health_summary;
        let degradation = match self.degradation_manager.degradation {
            DegradationLevel::None => "None",
            DegradationLevel::Partial => "Partial",
            DegradationLevel::Full => "Full",
        };
        writeln!(f, "=== Error Recovery Status ===")?;
        writeln!(f, "Degradation Status: {degradation} ({healthy_count}/{total_count} endpoints healthy)")?;
        writeln!(f, "Queued Requests: {}", self.degradation_manager.queued_requests)?;
        writeln!(f, "Circuit Breakers:")?;
        for (endpoint_id, breaker) in &self.circuit_breaker_stats {
            write!(f, "  {endpoint_id}: {} ({}% failures", breaker.state, breaker.failure_rate)?;
            if let Some(secs) = breaker.retry_in_secs {
                write!(f, ", looked at again in {secs:.0} s")?;
            }
            if breaker.traffic_share < 1.0 {
                write!(f, ", {:.0}% of its traffic", breaker.traffic_share * 100.0)?;
            }
            writeln!(f, ")")?;
            if let Some(error) = &breaker.last_error {
                writeln!(f, "    {error}")?;
            }
        }
        Ok(())
    }
}

// Looking at an endpoint: who decides there, what its GPUs do, whether it answers at all. What it answers is what balances
// the load; that it answers is what closes its breaker again.

/// Looks again and again, until the client stops.
pub(super) async fn look_on(core: Arc<Core>, place: Arc<Place>, mut stop: Follower) {
    let backoff = Backoff::between(ROUND_PAUSE_FIRST, ROUND_PAUSE_MOST);
    let mut looker = Looker { core, place, checked: None, backoff, was_usable: false };
    loop {
        tokio::select! {
            biased;
            () = stop.changed() => return,
            () = looker.look() => {}
        }
        let next = looker.next_look();
        tokio::select! {
            biased;
            () = stop.changed() => return,
            () = tokio::time::sleep_until(next) => {}
            // Many may want a look at once: one look serves all of them.
            () = looker.place.look_now.notified() => tokio::time::sleep(LOOK_PAUSE).await,
        }
    }
}

struct Looker {
    core: Arc<Core>,
    place: Arc<Place>,
    /// When `/health` was last asked for.
    checked: Option<Instant>,
    backoff: Backoff,
    /// Whether those who follow were told that it can be asked.
    was_usable: bool,
}

impl Looker {
    async fn look(&mut self) {
        let began = Instant::now();
        {
            let mut known = self.place.known();
            match known.breaker.probe_at() {
                Some(at) if began >= at => known.breaker.begin_probe(),
                // Not before its time, unless somebody wants it; then it was made ready.
                Some(_) => {
                    known.looks += 1;
                    drop(known);
                    self.tell_change();
                    return self.place.tell_weather();
                }
                None => {}
            }
            known.asked_since = Some(began);
        }
        let looked = self.see().await;
        self.place.known().asked_since = None;
        self.place.judge(Some(began), looked.as_ref().err());
        let is_seen = looked.is_ok();
        match looked {
            Ok(gpus) => {
                self.backoff.reset();
                self.place.known().seen = Some(Seen { at: Instant::now(), gpus: gpus.clone() });
                self.core.telling.tell(StatusUpdate::Statistics { endpoint_id: self.place.id.clone(), gpus });
            }
            Err(error) => {
                let mut known = self.place.known();
                // Also where it is a clear no, such as a token that is not known: it is no use.
                known.error = Some(error.to_string());
                tracing::debug!(endpoint_id = self.place.id, %error, "endpoint could not be looked at");
            }
        }
        self.place.known().looks += 1;
        self.tell_change();
        self.place.tell_weather();
        if is_seen {
            give_back_remembered(&self.place).await;
            self.check_health().await;
        }
    }

    fn tell_change(&mut self) {
        let endpoint_id = self.place.id.clone();
        let is_usable = self.place.is_usable();
        match (std::mem::replace(&mut self.was_usable, is_usable), is_usable) {
            (false, true) => self.core.telling.tell(StatusUpdate::EndpointUp { endpoint_id }),
            (true, false) => {
                self.core.telling.tell(StatusUpdate::EndpointDown { endpoint_id, error: self.place.trouble() })
            }
            _ => {}
        }
    }

    /// Its GPUs, as whoever decides there has them.
    async fn see(&mut self) -> Result<Vec<ObservedGpu>, ClientError> {
        match self.place.desk() {
            Some(Desk::Agent) => self.agents_gpus().await,
            Some(Desk::Books(books)) => self.read(&books, None).await,
            None => self.learn().await,
        }
    }

    /// Learns who decides. Only a server that has statistics and knows nothing of `/v1` leaves it to this client.
    async fn learn(&mut self) -> Result<Vec<ObservedGpu>, ClientError> {
        let agent = &self.place.agent;
        match agent.pool().await {
            Ok(pool) if pool.authority == "agent" => {
                let gpus = self.agents_gpus().await?;
                self.decides(Desk::Agent);
                Ok(gpus)
            }
            Ok(pool) => {
                let what = format!("/v1/pool says that {:?} decides, which is not known here", pool.authority);
                Err(agent.not_ours(http::StatusCode::OK, what))
            }
            Err(ClientError::NotOurs { status: 404, .. }) => {
                let books = self.new_books();
                // The sizes of memory are only here; a server without them has the rest.
                let stats = agent.stats().await.ok();
                let gpus = self.read(&books, stats.as_ref()).await?;
                self.decides(Desk::Books(books));
                Ok(gpus)
            }
            Err(error) => Err(error),
        }
    }

    fn decides(&self, desk: Desk) {
        let authority = match desk {
            Desk::Agent => "agent",
            Desk::Books(_) => "client",
        };
        tracing::info!(endpoint_id = self.place.id, authority, "endpoint found");
        self.place.known().desk = Some(desk);
    }

    fn new_books(&self) -> Arc<Books> {
        let Settings { polling_interval, endpoint_timeout, .. } = self.core.settings;
        Arc::new(Books::new(&self.place.id, "client", polling_interval * 3 + endpoint_timeout))
    }

    async fn agents_gpus(&self) -> Result<Vec<ObservedGpu>, ClientError> {
        Ok(self.place.agent.devices().await?.devices.into_iter().map(ObservedGpu::from).collect())
    }

    async fn read(&self, books: &Books, stats: Option<&StatsBody>) -> Result<Vec<ObservedGpu>, ClientError> {
        let summary = self.place.agent.summary().await?;
        books.take_in(&summary, stats);
        Ok(books.gpus())
    }

    async fn check_health(&mut self) {
        let now = Instant::now();
        if self.checked.is_some_and(|at| now.duration_since(at) < self.core.settings.health_check_interval) {
            return;
        }
        self.checked = Some(now);
        let health = self.place.agent.health().await.map(|health| health.status).ok();
        self.place.known().health = health;
    }

    fn next_look(&mut self) -> Instant {
        let now = Instant::now();
        let known = self.place.known();
        if let Some(at) = known.breaker.probe_at() {
            return at.max(now);
        }
        let is_half_open = !known.breaker.is_closed();
        let failed = known.error.is_some();
        drop(known);
        let interval = self.core.settings.polling_interval;
        now + match (is_half_open, failed) {
            (true, _) => PROBE_PAUSE,
            // Sooner than usual, to know soon.
            (false, true) => self.backoff.next().min(interval.max(ROUND_PAUSE_FIRST)),
            // A little sooner or later, so that many clients do not look at the same instant.
            (false, false) => interval.mul_f64(0.95 + random::fraction() / 10.0),
        }
    }
}

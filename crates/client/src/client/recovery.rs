//! How endpoints fail and come back, and what can be done about it by hand.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Serialize;
use tokio::time::Instant;

use super::place::Place;
use super::running::told;
use super::{Client, names};
use crate::ClientError;

/// How many endpoints can be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Degradation {
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
    pub circuit_breaker_stats: BTreeMap<String, BreakerStats>,
    /// The endpoints, counted.
    pub endpoint_health_summary: EndpointHealthSummary,
    /// The whole.
    pub degradation_manager: DegradationManager,
}

/// An endpoint's breaker.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BreakerStats {
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
pub struct DegradationManager {
    /// How many can be asked, by name.
    pub degradation: Degradation,
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
            (_, true) => Degradation::None,
            (false, false) => Degradation::Partial,
            (true, false) => Degradation::Full,
        };
        Ok(RecoveryStatus {
            circuit_breaker_stats: places.iter().map(|place| (place.id.clone(), breaker_stats(place))).collect(),
            endpoint_health_summary: EndpointHealthSummary {
                total_count: places.len(),
                healthy_count: healthy.len(),
                unhealthy_count: degraded.len(),
            },
            degradation_manager: DegradationManager {
                degradation,
                is_fully_degraded: degradation == Degradation::Full,
                healthy_endpoints: healthy.clone(),
                degraded_endpoints: degraded.clone(),
                queued_requests: running.core.counts.queued_for_retry.load(Ordering::Relaxed),
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
        let mut places = running.places().iter();
        let place = places.find(|place| names::is_meant(endpoint_id, &place.id, place.agent.endpoint()));
        let Some(place) = place else { return Ok(false) };
        let mut weather = running.weather();
        let mut stopping = running.stopping();
        let before = {
            let mut known = place.known();
            known.breaker.begin_probe();
            known.looks
        };
        place.look_now.notify_one();
        loop {
            let is_done = {
                let known = place.known();
                // Half open after one good look: the next one follows at once.
                known.looks > before && known.breaker.state_name() != "half_open"
            };
            if is_done {
                return Ok(true);
            }
            tokio::select! {
                biased;
                () = told(&mut stopping) => return Ok(true),
                () = weather.changed() => {}
            }
        }
    }

    /// Runs something now where any endpoint can be asked, otherwise as soon as one can, and gives back what comes of it.
    pub async fn queue_request_for_retry<F, T>(&self, call: impl FnOnce() -> F) -> Result<T, ClientError>
    where
        F: Future<Output = Result<T, ClientError>>,
    {
        let running = self.running("queueing a request for retry")?;
        let mut weather = running.weather();
        let mut stopping = running.stopping();
        let queued = Queued::new(&running.core.counts.queued_for_retry);
        while !running.core.is_any_usable() {
            tokio::select! {
                biased;
                () = told(&mut stopping) => {
                    return Err(ClientError::NotStarted { doing: "queueing a request for retry" });
                }
                () = weather.changed() => {}
            }
        }
        drop(queued);
        call().await
    }
}

/// Counted while it waits.
struct Queued<'a>(&'a AtomicUsize);

impl<'a> Queued<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn breaker_stats(place: &Arc<Place>) -> BreakerStats {
    let now = Instant::now();
    let known = place.known();
    let (success_count, failure_count) = known.breaker.counts();
    let asked = (success_count + failure_count).max(1) as f64;
    BreakerStats {
        state: known.breaker.state_name(),
        consecutive_failures: known.breaker.failures_in_a_row(),
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
            Degradation::None => "None",
            Degradation::Partial => "Partial",
            Degradation::Full => "Full",
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

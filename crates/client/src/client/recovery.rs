//! Failure and recovery of endpoints: status, health and manual recovery.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use tokio::time::Instant;

use super::Client;
use super::endpoint_state::EndpointState;
use crate::ClientError;

/// Availability of the endpoints as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DegradationLevel {
    /// All endpoints are available.
    None,
    /// Some endpoints are unavailable.
    Partial,
    /// No endpoint is available.
    Full,
}

/// Summary of the health.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PoolHealth {
    /// `healthy`, `degraded` (an endpoint is unavailable or not healthy) or `unhealthy` (none is available).
    pub status: &'static str,
    /// Status of the last `/health` response of each endpoint, or `unreachable`.
    pub endpoints: BTreeMap<String, String>,
}

/// Failure and recovery of the endpoints. Its `Display` is a short report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RecoveryStatus {
    /// Available endpoints.
    pub healthy_endpoints: Vec<String>,
    /// Unavailable endpoints.
    pub degraded_endpoints: Vec<String>,
    /// Circuit breaker of each endpoint.
    pub circuit_breaker_stats: BTreeMap<String, CircuitBreakerStats>,
    /// Counts of endpoints.
    pub endpoint_health_summary: EndpointHealthSummary,
    /// Summary of the degradation.
    pub degradation_manager: DegradationStatus,
}

/// State of a circuit breaker.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CircuitBreakerStats {
    /// `closed`, `open` or `half_open`.
    pub state: &'static str,
    /// Failures since the last success.
    pub consecutive_failures: u32,
    /// Failures in percent of all calls.
    pub failure_rate: f64,
    /// Successes since the client was created.
    pub success_count: u64,
    /// Failures since the client was created.
    pub failure_count: u64,
    /// Seconds until the next probe; `None` unless the breaker is open.
    pub retry_in_secs: Option<f64>,
    /// Share of its traffic that the endpoint gets, 0..=1.
    pub traffic_share: f64,
    /// Last error since the last success.
    pub last_error: Option<String>,
}

/// Counts of endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct EndpointHealthSummary {
    /// Number of endpoints.
    pub total_count: usize,
    /// Number of available endpoints.
    pub healthy_count: usize,
    /// Number of unavailable endpoints.
    pub unhealthy_count: usize,
}

/// Degradation of the endpoints as a whole.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DegradationStatus {
    /// Level of the degradation.
    pub degradation: DegradationLevel,
    /// Whether no endpoint is available.
    pub is_fully_degraded: bool,
    /// Available endpoints.
    pub healthy_endpoints: Vec<String>,
    /// Unavailable endpoints.
    pub degraded_endpoints: Vec<String>,
    /// Calls of [`Client::queue_request_for_retry`] that wait.
    pub queued_requests: usize,
}

impl Client {
    /// Returns the failure and recovery status of the endpoints.
    pub fn error_recovery_status(&self) -> Result<RecoveryStatus, ClientError> {
        let running = self.require_running("getting error recovery status")?;
        let endpoints = running.endpoints();
        let ids = |is_usable: bool| -> Vec<String> {
            let those = endpoints.iter().filter(|endpoint| endpoint.is_usable() == is_usable);
            those.map(|endpoint| endpoint.id.clone()).collect()
        };
        let (healthy, degraded) = (ids(true), ids(false));
        let degradation = match (healthy.is_empty(), degraded.is_empty()) {
            (_, true) => DegradationLevel::None,
            (false, false) => DegradationLevel::Partial,
            (true, false) => DegradationLevel::Full,
        };
        Ok(RecoveryStatus {
            circuit_breaker_stats: endpoints.iter().map(|state| (state.id.clone(), breaker_stats(state))).collect(),
            endpoint_health_summary: EndpointHealthSummary {
                total_count: endpoints.len(),
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

    /// Returns the health as of the latest polls.
    pub fn health(&self) -> Result<PoolHealth, ClientError> {
        let running = self.require_running("getting health")?;
        let health = |endpoint: &Arc<EndpointState>| {
            let record = endpoint.lock_record();
            match &record.health {
                _ if !record.is_usable() => "unreachable".to_owned(),
                Some(status) => status.clone(),
                // The endpoint responds, but has no such route or was not checked yet.
                None => "healthy".to_owned(),
            }
        };
        let endpoints: BTreeMap<String, String> =
            running.endpoints().iter().map(|state| (state.id.clone(), health(state))).collect();
        let status = match (running.core.is_any_usable(), endpoints.values().all(|status| status == "healthy")) {
            (false, _) => "unhealthy",
            (true, true) => "healthy",
            (true, false) => "degraded",
        };
        Ok(PoolHealth { status, endpoints })
    }

    /// Polls an endpoint now, regardless of its circuit breaker, and waits for the result. `false` for an unknown
    /// endpoint.
    pub async fn trigger_endpoint_recovery(&self, endpoint_id: &str) -> Result<bool, ClientError> {
        let running = self.require_running("triggering endpoint recovery")?;
        let Some(endpoint) = running.core.find_endpoint(endpoint_id) else { return Ok(false) };
        let before = {
            let mut record = endpoint.lock_record();
            record.breaker.begin_probe();
            record.polls
        };
        endpoint.poll_now.notify_one();
        let is_done = || {
            let record = endpoint.lock_record();
            // Half-open after one successful poll: the next one follows at once.
            record.polls > before && record.breaker.state_name() != "half_open"
        };
        running.wait_until(is_done).await;
        Ok(true)
    }

    /// Runs a function as soon as any endpoint is available and returns its result.
    pub async fn queue_request_for_retry<F, T>(&self, call: impl FnOnce() -> F) -> Result<T, ClientError>
    where
        F: Future<Output = Result<T, ClientError>>,
    {
        let running = self.require_running("queueing a request for retry")?;
        let queued = running.core.queued_for_retry.begin();
        if !running.wait_until(|| running.core.is_any_usable()).await {
            return Err(ClientError::NotStarted { doing: "queueing a request for retry" });
        }
        drop(queued);
        call().await
    }
}

fn breaker_stats(endpoint: &Arc<EndpointState>) -> CircuitBreakerStats {
    let now = Instant::now();
    let record = endpoint.lock_record();
    let (success_count, failure_count) = (record.breaker.successes, record.breaker.failures);
    let calls = (success_count + failure_count).max(1) as f64;
    CircuitBreakerStats {
        state: record.breaker.state_name(),
        consecutive_failures: record.breaker.consecutive_failures,
        failure_rate: (failure_count as f64 * 10_000.0 / calls).round() / 100.0,
        success_count,
        failure_count,
        retry_in_secs: record.breaker.next_probe().map(|at| at.saturating_duration_since(now).as_secs_f64()),
        traffic_share: record.breaker.traffic_share(now),
        last_error: record.last_error.clone(),
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
                write!(f, ", next probe in {secs:.0} s")?;
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

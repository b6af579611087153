//! The poller of an endpoint: reads which side decides there, its GPUs and its health. The readings balance the load;
//! the successes close the circuit breaker again.

use std::sync::Arc;

use gpupool_api::stats::StatsBody;
use tokio::time::Instant;

use super::builder::ClientSettings;
use super::change_notifier::ChangeObserver;
use super::client_accounting::ClientAccounting;
use super::endpoint_state::{EndpointAuthority, EndpointState};
use super::load_balancer::{GpuSnapshot, ObservedGpu};
use super::orphaned_grants::release_remembered;
use super::running_client::ClientCore;
use super::status::StatusUpdate;
use crate::limits::{BREAKER_PROBE_PAUSE, MAX_ROUND_PAUSE, MIN_ROUND_PAUSE, POLL_COALESCING_DELAY};
use crate::random::Backoff;
use crate::{ClientError, random};

/// Polls an endpoint until the client stops.
pub(super) async fn poll_endpoint(core: Arc<ClientCore>, endpoint: Arc<EndpointState>, mut stop: ChangeObserver) {
    let backoff = Backoff::with_bounds(MIN_ROUND_PAUSE, MAX_ROUND_PAUSE);
    let mut poller = EndpointPoller { core, endpoint, health_checked_at: None, backoff, was_usable: false };
    loop {
        tokio::select! {
            biased;
            () = stop.changed() => return,
            () = poller.poll() => {}
        }
        let next = poller.next_poll();
        tokio::select! {
            biased;
            () = stop.changed() => return,
            () = tokio::time::sleep_until(next) => {}
            // One poll serves all callers that requested one.
            () = poller.endpoint.poll_now.notified() => tokio::time::sleep(POLL_COALESCING_DELAY).await,
        }
    }
}

struct EndpointPoller {
    core: Arc<ClientCore>,
    endpoint: Arc<EndpointState>,
    /// Instant of the last request to `/health`.
    health_checked_at: Option<Instant>,
    backoff: Backoff,
    /// Availability as last reported to subscribers.
    was_usable: bool,
}

impl EndpointPoller {
    async fn poll(&mut self) {
        let began = Instant::now();
        {
            let mut record = self.endpoint.lock_record();
            match record.breaker.next_probe() {
                Some(at) if began >= at => record.breaker.begin_probe(),
                // Not before the probe time; a manual probe has already made the breaker half-open.
                Some(_) => {
                    record.polls += 1;
                    drop(record);
                    self.publish_change();
                    return self.endpoint.announce_change();
                }
                None => {}
            }
            record.poll_started = Some(began);
        }
        let polled = self.read_gpus().await;
        self.endpoint.lock_record().poll_started = None;
        self.endpoint.record_outcome(Some(began), polled.as_ref().err());
        let was_polled = polled.is_ok();
        match polled {
            Ok(gpus) => {
                self.backoff.reset();
                self.endpoint.lock_record().snapshot = Some(GpuSnapshot { at: Instant::now(), gpus: gpus.clone() });
                self.core.publisher.publish(StatusUpdate::Statistics { endpoint_id: self.endpoint.id.clone(), gpus });
            }
            Err(error) => {
                let mut record = self.endpoint.lock_record();
                // Also for clear refusals, such as of an unknown token: the endpoint cannot be used.
                record.last_error = Some(error.to_string());
                tracing::debug!(endpoint_id = self.endpoint.id, %error, "poll of the endpoint failed");
            }
        }
        self.endpoint.lock_record().polls += 1;
        self.publish_change();
        self.endpoint.announce_change();
        if was_polled {
            release_remembered(&self.endpoint).await;
            self.check_health().await;
        }
    }

    fn publish_change(&mut self) {
        let endpoint_id = self.endpoint.id.clone();
        let is_usable = self.endpoint.is_usable();
        let update = match (std::mem::replace(&mut self.was_usable, is_usable), is_usable) {
            (false, true) => StatusUpdate::EndpointUp { endpoint_id },
            (true, false) => StatusUpdate::EndpointDown { endpoint_id, error: self.endpoint.failure_summary() },
            _ => return,
        };
        self.core.publisher.publish(update);
    }

    /// Reads the GPUs from the side that decides there.
    async fn read_gpus(&mut self) -> Result<Vec<ObservedGpu>, ClientError> {
        match self.endpoint.authority() {
            Some(EndpointAuthority::Agent) => self.read_agent_gpus().await,
            Some(EndpointAuthority::Client(accounting)) => self.read_statistics(&accounting, None).await,
            None => self.detect_authority().await,
        }
    }

    /// Detects which side decides. Only a server that has statistics and no `/v1` leaves the decisions to this client.
    async fn detect_authority(&mut self) -> Result<Vec<ObservedGpu>, ClientError> {
        let agent = &self.endpoint.agent;
        match agent.pool().await {
            Ok(pool) if pool.authority == "agent" => {
                let gpus = self.read_agent_gpus().await?;
                self.set_authority(EndpointAuthority::Agent);
                Ok(gpus)
            }
            Ok(pool) => {
                let reason =
                    format!("/v1/pool names the authority {:?}, which this client does not support", pool.authority);
                Err(agent.not_an_agent(http::StatusCode::OK, reason))
            }
            Err(ClientError::NotAnAgent { status: 404, .. }) => {
                let accounting = self.new_accounting();
                // Only these statistics contain memory sizes; a server without them remains usable.
                let stats = agent.stats().await.ok();
                let gpus = self.read_statistics(&accounting, stats.as_ref()).await?;
                self.set_authority(EndpointAuthority::Client(accounting));
                Ok(gpus)
            }
            Err(error) => Err(error),
        }
    }

    fn set_authority(&self, authority: EndpointAuthority) {
        let name = match authority {
            EndpointAuthority::Agent => "agent",
            EndpointAuthority::Client(_) => "client",
        };
        tracing::info!(endpoint_id = self.endpoint.id, authority = name, "endpoint found");
        self.endpoint.lock_record().authority = Some(authority);
    }

    fn new_accounting(&self) -> Arc<ClientAccounting> {
        let ClientSettings { polling_interval, endpoint_timeout, .. } = self.core.settings;
        Arc::new(ClientAccounting::new(&self.endpoint.id, "client", polling_interval * 3 + endpoint_timeout))
    }

    async fn read_agent_gpus(&self) -> Result<Vec<ObservedGpu>, ClientError> {
        Ok(self.endpoint.agent.devices().await?.devices.into_iter().map(ObservedGpu::from).collect())
    }

    async fn read_statistics(
        &self,
        accounting: &ClientAccounting,
        stats: Option<&StatsBody>,
    ) -> Result<Vec<ObservedGpu>, ClientError> {
        let summary = self.endpoint.agent.summary().await?;
        accounting.apply_statistics(&summary, stats);
        Ok(accounting.gpus())
    }

    async fn check_health(&mut self) {
        let now = Instant::now();
        if self.health_checked_at.is_some_and(|at| now.duration_since(at) < self.core.settings.health_check_interval) {
            return;
        }
        self.health_checked_at = Some(now);
        let health = self.endpoint.agent.health().await.map(|health| health.status).ok();
        self.endpoint.lock_record().health = health;
    }

    fn next_poll(&mut self) -> Instant {
        let now = Instant::now();
        let record = self.endpoint.lock_record();
        if let Some(at) = record.breaker.next_probe() {
            return at.max(now);
        }
        let is_half_open = !record.breaker.is_closed();
        let failed = record.last_error.is_some();
        drop(record);
        let interval = self.core.settings.polling_interval;
        now + match (is_half_open, failed) {
            (true, _) => BREAKER_PROBE_PAUSE,
            // Sooner than usual, to notice a recovery early.
            (false, true) => self.backoff.next_pause().min(interval.max(MIN_ROUND_PAUSE)),
            // Randomized, so that many clients do not poll at the same instant.
            (false, false) => interval.mul_f64(0.95 + random::random_fraction() / 10.0),
        }
    }
}

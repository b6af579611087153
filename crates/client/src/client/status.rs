//! Synchronous status from the latest polls, with its age, and a stream of status updates.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use futures_util::Stream;
use futures_util::stream::unfold;
use gpupool_api::RequestBody;
use serde::Serialize;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;

use super::Client;
use super::builder::ClientSettings;
use super::endpoint_state::{EndpointAuthority, EndpointState};
use super::load_balancer::{GpuRequirements, ObservedGpu};
use super::running_client::{RunningClient, lock_unpoisoned};
use crate::ClientError;
use crate::limits::STATUS_UPDATE_BUFFER;

/// Side that decides about leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseAuthority {
    /// The servers.
    Agent,
    /// This client, because the servers only serve statistics.
    Client,
    /// Some servers, and this client for the others.
    Mixed,
    /// Unknown, because no server has responded yet.
    Unknown,
}

/// An assignment on a GPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GpuAssignment {
    /// Id of the worker.
    pub worker_id: String,
    /// Time of the assignment.
    pub assigned_at: SystemTime,
    /// Number of the lease on its endpoint.
    pub lease: u64,
}

/// Status of the pool of all endpoints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PoolStatus {
    /// GPUs of all available endpoints.
    pub total_gpus: usize,
    /// GPUs that a request for a whole GPU would match, by the client's thresholds.
    pub available_gpus: usize,
    /// Assignments held by this client.
    pub active_workers: usize,
    /// Waiting requests of this client.
    pub blocked_workers: usize,
    /// Assignments of this client by `endpoint_id:gpu_id`.
    pub gpu_assignments: BTreeMap<String, Vec<GpuAssignment>>,
    /// Configured endpoints.
    pub total_endpoints: usize,
    /// Available endpoints.
    pub healthy_endpoints: usize,
    /// Information about each endpoint.
    pub endpoint_details: Vec<EndpointInfo>,
    /// Side that decides about leases.
    pub authority: LeaseAuthority,
    /// Age of the oldest snapshot in seconds; `None` without one.
    pub age_secs: Option<f64>,
}

/// Information about one endpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EndpointInfo {
    /// Id of the endpoint.
    pub endpoint_id: String,
    /// Address of the endpoint.
    pub url: String,
    /// Whether requests can be sent.
    pub is_healthy: bool,
    /// Time of the last response.
    pub last_seen: Option<SystemTime>,
    /// Number of its GPUs.
    pub total_gpus: usize,
    /// Number of its GPUs that a request for a whole GPU would match.
    pub available_gpus: usize,
    /// Average response time.
    pub response_time_ms: f64,
    /// Side that decides there.
    pub authority: LeaseAuthority,
    /// Age of the latest snapshot in seconds.
    pub age_secs: Option<f64>,
    /// Status of the last `/health` response.
    pub health: Option<String>,
    /// Last error since the last success.
    pub error: Option<String>,
}

/// A GPU of the pool of all endpoints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GlobalGpu {
    /// Global id: `endpoint_id:gpu_id`.
    pub global_gpu_id: String,
    /// Id of its endpoint.
    pub endpoint_id: String,
    /// Number on its endpoint.
    pub local_gpu_id: u32,
    /// Whether a request for a whole GPU would match it.
    pub is_available: bool,
    /// The GPU as of the latest poll.
    #[serde(flatten)]
    pub gpu: ObservedGpu,
}

/// All metrics of a client.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DetailedMetrics {
    /// GPUs of all available endpoints.
    pub total_gpus: usize,
    /// GPUs that a request for a whole GPU would match.
    pub available_gpus: usize,
    /// Assignments held by this client.
    pub active_workers: usize,
    /// Waiting requests of this client.
    pub blocked_workers: usize,
    /// Summary of the pool.
    pub pool_summary: PoolSummary,
    /// Metrics of the endpoints.
    pub endpoints: EndpointMetrics,
    /// Statistics of the load balancer.
    pub load_balancer: LoadBalancerStats,
    /// Thresholds for available GPUs.
    pub thresholds: UsageThresholds,
    /// All GPUs of the endpoints.
    pub gpus: Vec<GlobalGpu>,
}

/// Summary of the pool.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PoolSummary {
    /// GPUs of all available endpoints.
    pub total_gpus: usize,
    /// GPUs that a request for a whole GPU would match.
    pub available_gpus: usize,
    /// GPUs with at least one lease, in percent of all.
    pub efficiency_percent: f64,
    /// Assignments held by this client.
    pub active_workers: usize,
    /// Waiting requests of this client.
    pub blocked_workers: usize,
}

/// Metrics of the endpoints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EndpointMetrics {
    /// Number of endpoints.
    pub total: usize,
    /// Number of available endpoints.
    pub healthy: usize,
    /// Details of each endpoint, by its id.
    pub details: BTreeMap<String, EndpointDetail>,
}

/// Metrics of one endpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EndpointDetail {
    /// Number of its GPUs that a request for a whole GPU would match.
    pub available_gpus: usize,
    /// Number of its GPUs.
    pub total_gpus: usize,
    /// Average response time.
    pub avg_response_time_ms: f64,
    /// Whether requests can be sent.
    pub is_healthy: bool,
    /// Requests sent to the endpoint.
    pub requests: u64,
    /// Requests granted by the endpoint.
    pub granted: u64,
}

/// Statistics of the load balancer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LoadBalancerStats {
    /// `availability`, `round_robin` or `weighted`.
    pub strategy_name: &'static str,
    /// Requests since the client was created.
    pub total_requests: u64,
    /// Granted requests.
    pub successful_requests: u64,
    /// Requests that ended without a grant.
    pub failed_requests: u64,
    /// Granted requests in percent of the finished ones; 100 if there are none.
    pub success_rate: f64,
}

/// Usage in percent below which a GPU is available.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct UsageThresholds {
    /// Threshold of the memory usage.
    pub memory_threshold_percent: f64,
    /// Threshold of the utilization.
    pub utilization_threshold_percent: f64,
}

impl Client {
    /// Returns the status of the pool of all endpoints.
    pub fn pool_status(&self) -> Result<PoolStatus, ClientError> {
        let running = self.require_running("getting pool status")?;
        Ok(pool_status(&running))
    }

    /// Returns all metrics.
    pub fn detailed_metrics(&self) -> Result<DetailedMetrics, ClientError> {
        let running = self.require_running("getting metrics")?;
        let settings = &running.core.settings;
        let status = pool_status(&running);
        let gpus = global_gpus(&running);
        let used = gpus.iter().filter(|gpu| gpu.gpu.holders > 0).count();
        let details = running.endpoints().iter().map(|state| (state.id.clone(), endpoint_detail(state, settings)));
        Ok(DetailedMetrics {
            total_gpus: status.total_gpus,
            available_gpus: status.available_gpus,
            active_workers: status.active_workers,
            blocked_workers: status.blocked_workers,
            pool_summary: PoolSummary {
                total_gpus: status.total_gpus,
                available_gpus: status.available_gpus,
                efficiency_percent: percent_of(used, gpus.len(), 0.0),
                active_workers: status.active_workers,
                blocked_workers: status.blocked_workers,
            },
            endpoints: EndpointMetrics {
                total: status.total_endpoints,
                healthy: status.healthy_endpoints,
                details: details.collect(),
            },
            load_balancer: load_balancer_stats(&running),
            thresholds: UsageThresholds {
                memory_threshold_percent: settings.memory_threshold,
                utilization_threshold_percent: settings.utilization_threshold,
            },
            gpus,
        })
    }

    /// Returns information about each endpoint.
    pub fn endpoints_info(&self) -> Result<Vec<EndpointInfo>, ClientError> {
        let running = self.require_running("getting endpoint information")?;
        Ok(endpoint_infos(&running))
    }
}

fn pool_status(running: &RunningClient) -> PoolStatus {
    let endpoints = endpoint_infos(running);
    let healthy: Vec<&EndpointInfo> = endpoints.iter().filter(|endpoint| endpoint.is_healthy).collect();
    let mut gpu_assignments: BTreeMap<String, Vec<GpuAssignment>> = BTreeMap::new();
    let assignments = running.assignments();
    for assignment in assignments.values() {
        let endpoint_id = &running.endpoints()[assignment.endpoint].id;
        for device in &assignment.devices {
            let worker_id = assignment.worker_id.to_string();
            let worker = GpuAssignment { worker_id, assigned_at: assignment.assigned_at, lease: assignment.lease };
            gpu_assignments.entry(format!("{endpoint_id}:{}", device.gpu_id)).or_default().push(worker);
        }
    }
    PoolStatus {
        total_gpus: healthy.iter().map(|endpoint| endpoint.total_gpus).sum(),
        available_gpus: healthy.iter().map(|endpoint| endpoint.available_gpus).sum(),
        active_workers: assignments.len(),
        blocked_workers: running.waiting_count(),
        gpu_assignments,
        total_endpoints: endpoints.len(),
        healthy_endpoints: healthy.len(),
        authority: combined_authority(endpoints.iter().map(|endpoint| endpoint.authority)),
        age_secs: healthy.iter().filter_map(|endpoint| endpoint.age_secs).max_by(f64::total_cmp),
        endpoint_details: endpoints,
    }
}

fn endpoint_infos(running: &RunningClient) -> Vec<EndpointInfo> {
    running.endpoints().iter().map(|endpoint| endpoint_info(endpoint, &running.core.settings)).collect()
}

fn endpoint_info(endpoint: &EndpointState, settings: &ClientSettings) -> EndpointInfo {
    let (total_gpus, available_gpus) = gpu_counts(endpoint, settings);
    let record = endpoint.lock_record();
    EndpointInfo {
        endpoint_id: endpoint.id.clone(),
        url: endpoint.agent.endpoint().to_string(),
        is_healthy: record.is_usable(),
        last_seen: record.last_response.map(|(_, at)| at),
        total_gpus,
        available_gpus,
        response_time_ms: record.response_time.unwrap_or_default().as_secs_f64() * 1000.0,
        authority: match record.authority {
            Some(EndpointAuthority::Agent) => LeaseAuthority::Agent,
            Some(EndpointAuthority::Client(_)) => LeaseAuthority::Client,
            None => LeaseAuthority::Unknown,
        },
        age_secs: record.snapshot.as_ref().map(|snapshot| Instant::now().duration_since(snapshot.at).as_secs_f64()),
        health: record.health.clone(),
        error: record.last_error.clone(),
    }
}

/// Returns the number of GPUs, and of those that a request for a whole GPU would match; the latter is 0 while the
/// endpoint is unavailable.
fn gpu_counts(endpoint: &EndpointState, settings: &ClientSettings) -> (usize, usize) {
    let gpus = endpoint.gpus();
    let available = gpus.iter().filter(|gpu| is_available(gpu, settings)).count();
    (gpus.len(), if endpoint.is_usable() { available } else { 0 })
}

fn is_available(gpu: &ObservedGpu, settings: &ClientSettings) -> bool {
    let whole = RequestBody {
        memory_threshold: Some(settings.memory_threshold),
        utilization_threshold: Some(settings.utilization_threshold),
        ..RequestBody::default()
    };
    GpuRequirements::for_request(&whole).is_met_by(gpu)
}

fn endpoint_detail(endpoint: &EndpointState, settings: &ClientSettings) -> EndpointDetail {
    let (total_gpus, available_gpus) = gpu_counts(endpoint, settings);
    let record = endpoint.lock_record();
    EndpointDetail {
        available_gpus,
        total_gpus,
        avg_response_time_ms: record.response_time.unwrap_or_default().as_secs_f64() * 1000.0,
        is_healthy: record.is_usable(),
        requests: record.requests,
        granted: record.granted,
    }
}

fn global_gpus(running: &RunningClient) -> Vec<GlobalGpu> {
    let gpus_of_endpoint = |endpoint: &std::sync::Arc<EndpointState>| {
        let is_usable = endpoint.is_usable();
        let endpoint_id = endpoint.id.clone();
        let settings = running.core.settings.clone();
        endpoint.gpus().into_iter().map(move |gpu| GlobalGpu {
            global_gpu_id: format!("{endpoint_id}:{}", gpu.gpu_id),
            endpoint_id: endpoint_id.clone(),
            local_gpu_id: gpu.gpu_id,
            is_available: is_usable && is_available(&gpu, &settings),
            gpu,
        })
    };
    running.endpoints().iter().flat_map(gpus_of_endpoint).collect()
}

fn load_balancer_stats(running: &RunningClient) -> LoadBalancerStats {
    let counters = &running.core.counters;
    let granted = counters.granted.load(Ordering::Relaxed);
    let failed = counters.failed.load(Ordering::Relaxed);
    LoadBalancerStats {
        strategy_name: lock_unpoisoned(&running.core.balancer).strategy().name(),
        total_requests: counters.requests.load(Ordering::Relaxed),
        successful_requests: granted,
        failed_requests: failed,
        success_rate: percent_of(granted as usize, (granted + failed) as usize, 100.0),
    }
}

fn combined_authority(all: impl Iterator<Item = LeaseAuthority>) -> LeaseAuthority {
    let known: Vec<LeaseAuthority> = all.filter(|authority| *authority != LeaseAuthority::Unknown).collect();
    match known.first() {
        None => LeaseAuthority::Unknown,
        Some(first) if known.iter().all(|other| other == first) => *first,
        Some(_) => LeaseAuthority::Mixed,
    }
}

/// Returns a percentage with two digits.
fn percent_of(part: usize, whole: usize, if_empty: f64) -> f64 {
    if whole == 0 { if_empty } else { (part as f64 * 10_000.0 / whole as f64).round() / 100.0 }
}

/// Update of the status of endpoints and requests.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum StatusUpdate {
    /// An endpoint was polled.
    Statistics {
        /// Id of the endpoint.
        endpoint_id: String,
        /// GPUs of the endpoint.
        gpus: Vec<ObservedGpu>,
    },
    /// An endpoint became available.
    EndpointUp {
        /// Id of the endpoint.
        endpoint_id: String,
    },
    /// An endpoint became unavailable.
    EndpointDown {
        /// Id of the endpoint.
        endpoint_id: String,
        /// Last error.
        error: String,
    },
    /// A request started to wait.
    Blocked {
        /// Worker of the request.
        worker_id: String,
    },
    /// A waiting request was granted.
    Unblocked {
        /// Worker of the request.
        worker_id: String,
    },
    /// GPUs were assigned.
    Assigned {
        /// Worker that got the GPUs.
        worker_id: String,
        /// Id of the endpoint.
        endpoint_id: String,
        /// GPU numbers on that endpoint.
        gpu_ids: Vec<u32>,
    },
    /// An assignment was released.
    Released {
        /// Worker that held the GPUs.
        worker_id: String,
        /// Id of the endpoint.
        endpoint_id: String,
        /// GPU numbers on that endpoint.
        gpu_ids: Vec<u32>,
    },
    /// An assignment was lost: its GPUs may belong to another lease.
    Lost {
        /// Worker that held the GPUs.
        worker_id: String,
        /// Id of the endpoint.
        endpoint_id: String,
        /// Reason for the loss.
        reason: String,
    },
    /// The reader was too slow, and updates were dropped.
    Missed {
        /// Number of dropped updates.
        count: u64,
    },
}

impl StatusUpdate {
    /// Whether the update follows every poll or every assignment, which the program itself caused.
    fn is_frequent(&self) -> bool {
        matches!(self, Self::Statistics { .. } | Self::Assigned { .. } | Self::Released { .. })
    }
}

/// Sender of status updates.
#[derive(Debug)]
pub(super) struct StatusPublisher {
    updates: broadcast::Sender<StatusUpdate>,
    frequent_updates: FrequentUpdates,
}

/// Enables frequent updates while a clone of it lives.
#[derive(Debug, Clone, Default)]
pub struct FrequentUpdates(Arc<()>);

impl StatusPublisher {
    pub(super) fn new() -> Self {
        Self { updates: broadcast::Sender::new(STATUS_UPDATE_BUFFER), frequent_updates: FrequentUpdates::default() }
    }

    /// Whether a subscriber wants frequent updates.
    pub(super) fn wants_frequent_updates(&self) -> bool {
        Arc::strong_count(&self.frequent_updates.0) > 1
    }

    pub(super) fn publish(&self, update: StatusUpdate) {
        // Sending wakes every subscriber.
        if !update.is_frequent() || self.wants_frequent_updates() {
            // It fails without subscribers.
            let _ = self.updates.send(update);
        }
    }

    pub(super) fn frequent_updates(&self) -> FrequentUpdates {
        self.frequent_updates.clone()
    }

    pub(super) fn subscribe(&self, frequent_updates: Option<FrequentUpdates>) -> StatusUpdateStream {
        StatusUpdateStream { receiver: self.updates.subscribe(), _frequent_updates: frequent_updates }
    }
}

/// Stream of status updates since its creation. It has no task of its own.
#[derive(Debug)]
pub struct StatusUpdateStream {
    receiver: broadcast::Receiver<StatusUpdate>,
    /// Keeps frequent updates enabled.
    _frequent_updates: Option<FrequentUpdates>,
}

impl StatusUpdateStream {
    /// Returns the next update; `None` after the client was dropped.
    pub async fn next(&mut self) -> Option<StatusUpdate> {
        match self.receiver.recv().await {
            Ok(update) => Some(update),
            Err(RecvError::Lagged(count)) => Some(StatusUpdate::Missed { count }),
            Err(RecvError::Closed) => None,
        }
    }

    /// Converts into a `Stream`.
    pub fn into_stream(self) -> impl Stream<Item = StatusUpdate> {
        unfold(self, |mut updates| async move { updates.next().await.map(|update| (update, updates)) })
    }
}

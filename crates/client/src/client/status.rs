//! How things stand, from what is known: answered at once, with the age of what it is made from. And what happens, as it
//! happens.

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
use super::balance::{Need, ObservedGpu};
use super::builder::Settings;
use super::place::{Desk, Place};
use super::running::{Running, locked};
use crate::ClientError;
use crate::limits::UPDATES;

/// Who decides who holds what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseAuthority {
    /// The servers.
    Agent,
    /// This client: the servers only have statistics.
    Client,
    /// Some servers do, for others this client does.
    Mixed,
    /// No server has answered yet.
    Unknown,
}

/// Who holds a GPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GpuAssignment {
    /// The worker.
    pub worker_id: String,
    /// Since when.
    pub assigned_at: SystemTime,
    /// The number of its lease on the endpoint.
    pub lease: u64,
}

/// The pool of all endpoints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PoolStatus {
    /// GPUs of all endpoints that answer.
    pub total_gpus: usize,
    /// GPUs a whole one of which could be had now, by the client's thresholds.
    pub available_gpus: usize,
    /// Assignments this client holds.
    pub active_workers: usize,
    /// Requests of this client that wait.
    pub blocked_workers: usize,
    /// Who of this client holds what, by `endpoint_id:gpu_id`.
    pub gpu_assignments: BTreeMap<String, Vec<GpuAssignment>>,
    /// Endpoints the client was told of.
    pub total_endpoints: usize,
    /// Endpoints that can be asked.
    pub healthy_endpoints: usize,
    /// Each endpoint.
    pub endpoint_details: Vec<EndpointInfo>,
    /// Who decides.
    pub authority: LeaseAuthority,
    /// Seconds since the oldest of the looks this is made from; `None` where there was none.
    pub age_secs: Option<f64>,
}

/// One endpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EndpointInfo {
    /// What it is called.
    pub endpoint_id: String,
    /// Its address.
    pub url: String,
    /// Whether it can be asked.
    pub is_healthy: bool,
    /// When it last answered.
    pub last_seen: Option<SystemTime>,
    /// Its GPUs.
    pub total_gpus: usize,
    /// Those of them a whole one of which could be had now.
    pub available_gpus: usize,
    /// How long its answers take.
    pub response_time_ms: f64,
    /// Who decides there.
    pub authority: LeaseAuthority,
    /// Seconds since it was looked at.
    pub age_secs: Option<f64>,
    /// What its `/health` last said.
    pub health: Option<String>,
    /// What went wrong last, until something goes right.
    pub error: Option<String>,
}

/// A GPU among those of all endpoints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GlobalGpu {
    /// `endpoint_id:gpu_id`.
    pub global_gpu_id: String,
    /// Its endpoint.
    pub endpoint_id: String,
    /// Its number there.
    pub local_gpu_id: u32,
    /// Whether a whole one could be had now.
    pub is_available: bool,
    /// As it was last seen.
    #[serde(flatten)]
    pub gpu: ObservedGpu,
}

/// Everything that is counted.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DetailedMetrics {
    /// GPUs of all endpoints that answer.
    pub total_gpus: usize,
    /// GPUs a whole one of which could be had now.
    pub available_gpus: usize,
    /// Assignments this client holds.
    pub active_workers: usize,
    /// Requests of this client that wait.
    pub blocked_workers: usize,
    /// The pool in short.
    pub pool_summary: PoolSummary,
    /// The endpoints.
    pub endpoints: EndpointMetrics,
    /// How the load is spread.
    pub load_balancer: LoadBalancerStats,
    /// What a GPU must be strictly below.
    pub thresholds: UsageThresholds,
    /// Each GPU.
    pub gpus: Vec<GlobalGpu>,
}

/// The pool in short.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PoolSummary {
    /// GPUs of all endpoints that answer.
    pub total_gpus: usize,
    /// GPUs a whole one of which could be had now.
    pub available_gpus: usize,
    /// GPUs that somebody holds a part of, in percent of all.
    pub efficiency_percent: f64,
    /// Assignments this client holds.
    pub active_workers: usize,
    /// Requests of this client that wait.
    pub blocked_workers: usize,
}

/// The endpoints, counted and one by one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EndpointMetrics {
    /// How many there are.
    pub total: usize,
    /// How many can be asked.
    pub healthy: usize,
    /// Each, by its id.
    pub details: BTreeMap<String, EndpointDetail>,
}

/// What is counted at one endpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EndpointDetail {
    /// Those of its GPUs a whole one of which could be had now.
    pub available_gpus: usize,
    /// Its GPUs.
    pub total_gpus: usize,
    /// How long its answers take.
    pub avg_response_time_ms: f64,
    /// Whether it can be asked.
    pub is_healthy: bool,
    /// Requests sent there.
    pub requests: u64,
    /// Requests it granted.
    pub granted: u64,
}

/// How the load is spread.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LoadBalancerStats {
    /// `availability`, `round_robin` or `weighted`.
    pub strategy_name: &'static str,
    /// Requests since the client was made.
    pub total_requests: u64,
    /// Requests that were granted.
    pub successful_requests: u64,
    /// Requests that ended without a grant.
    pub failed_requests: u64,
    /// Granted requests in percent of those that are over; 100 where none is.
    pub success_rate: f64,
}

/// What a GPU must be strictly below, in percent.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct UsageThresholds {
    /// Memory in use.
    pub memory_threshold_percent: f64,
    /// Utilization.
    pub utilization_threshold_percent: f64,
}

impl Client {
    /// How the pool of all endpoints stands.
    pub fn pool_status(&self) -> Result<PoolStatus, ClientError> {
        let running = self.running("getting pool status")?;
        Ok(pool_status(&running))
    }

    /// Everything that is counted.
    pub fn detailed_metrics(&self) -> Result<DetailedMetrics, ClientError> {
        let running = self.running("getting metrics")?;
        let settings = &running.core.settings;
        let status = pool_status(&running);
        let gpus = global_gpus(&running);
        let used = gpus.iter().filter(|gpu| gpu.gpu.holders > 0).count();
        let details = running.places().iter().map(|place| (place.id.clone(), detail(place, settings)));
        Ok(DetailedMetrics {
            total_gpus: status.total_gpus,
            available_gpus: status.available_gpus,
            active_workers: status.active_workers,
            blocked_workers: status.blocked_workers,
            pool_summary: PoolSummary {
                total_gpus: status.total_gpus,
                available_gpus: status.available_gpus,
                efficiency_percent: percent(used, gpus.len(), 0.0),
                active_workers: status.active_workers,
                blocked_workers: status.blocked_workers,
            },
            endpoints: EndpointMetrics {
                total: status.total_endpoints,
                healthy: status.healthy_endpoints,
                details: details.collect(),
            },
            load_balancer: balance(&running),
            thresholds: UsageThresholds {
                memory_threshold_percent: settings.memory_threshold,
                utilization_threshold_percent: settings.utilization_threshold,
            },
            gpus,
        })
    }

    /// Each endpoint.
    pub fn endpoints_info(&self) -> Result<Vec<EndpointInfo>, ClientError> {
        let running = self.running("getting endpoint information")?;
        Ok(infos(&running))
    }
}

fn pool_status(running: &Running) -> PoolStatus {
    let endpoints = infos(running);
    let healthy: Vec<&EndpointInfo> = endpoints.iter().filter(|endpoint| endpoint.is_healthy).collect();
    let mut gpu_assignments: BTreeMap<String, Vec<GpuAssignment>> = BTreeMap::new();
    let live = running.live();
    for held in live.values() {
        let endpoint_id = &running.places()[held.place].id;
        for device in &held.devices {
            let worker_id = held.worker_id.to_string();
            let worker = GpuAssignment { worker_id, assigned_at: held.assigned_at, lease: held.lease };
            gpu_assignments.entry(format!("{endpoint_id}:{}", device.gpu_id)).or_default().push(worker);
        }
    }
    PoolStatus {
        total_gpus: healthy.iter().map(|endpoint| endpoint.total_gpus).sum(),
        available_gpus: healthy.iter().map(|endpoint| endpoint.available_gpus).sum(),
        active_workers: live.len(),
        blocked_workers: running.waiting(),
        gpu_assignments,
        total_endpoints: endpoints.len(),
        healthy_endpoints: healthy.len(),
        authority: authority_of(endpoints.iter().map(|endpoint| endpoint.authority)),
        age_secs: healthy.iter().filter_map(|endpoint| endpoint.age_secs).max_by(f64::total_cmp),
        endpoint_details: endpoints,
    }
}

fn infos(running: &Running) -> Vec<EndpointInfo> {
    running.places().iter().map(|place| info(place, &running.core.settings)).collect()
}

fn info(place: &Place, settings: &Settings) -> EndpointInfo {
    let (total_gpus, available_gpus) = gpus_of(place, settings);
    let known = place.known();
    EndpointInfo {
        endpoint_id: place.id.clone(),
        url: place.agent.endpoint().to_string(),
        is_healthy: known.is_usable(),
        last_seen: known.answered.map(|(_, at)| at),
        total_gpus,
        available_gpus,
        response_time_ms: known.response.unwrap_or_default().as_secs_f64() * 1000.0,
        authority: match known.desk {
            Some(Desk::Agent) => LeaseAuthority::Agent,
            Some(Desk::Books(_)) => LeaseAuthority::Client,
            None => LeaseAuthority::Unknown,
        },
        age_secs: known.seen.as_ref().map(|seen| Instant::now().duration_since(seen.at).as_secs_f64()),
        health: known.health.clone(),
        error: known.error.clone(),
    }
}

/// How many GPUs it has, and how many whole ones could be had now; none where it cannot be asked.
fn gpus_of(place: &Place, settings: &Settings) -> (usize, usize) {
    let gpus = place.gpus();
    let available = gpus.iter().filter(|gpu| is_available(gpu, settings)).count();
    (gpus.len(), if place.is_usable() { available } else { 0 })
}

fn is_available(gpu: &ObservedGpu, settings: &Settings) -> bool {
    let whole = RequestBody {
        memory_threshold: Some(settings.memory_threshold),
        utilization_threshold: Some(settings.utilization_threshold),
        ..RequestBody::default()
    };
    Need::of(&whole).is_met_by(gpu)
}

fn detail(place: &Place, settings: &Settings) -> EndpointDetail {
    let (total_gpus, available_gpus) = gpus_of(place, settings);
    let known = place.known();
    EndpointDetail {
        available_gpus,
        total_gpus,
        avg_response_time_ms: known.response.unwrap_or_default().as_secs_f64() * 1000.0,
        is_healthy: known.is_usable(),
        requests: known.requests,
        granted: known.granted,
    }
}

fn global_gpus(running: &Running) -> Vec<GlobalGpu> {
    let of_place = |place: &std::sync::Arc<Place>| {
        let is_usable = place.is_usable();
        let endpoint_id = place.id.clone();
        let settings = running.core.settings.clone();
        place.gpus().into_iter().map(move |gpu| GlobalGpu {
            global_gpu_id: format!("{endpoint_id}:{}", gpu.gpu_id),
            endpoint_id: endpoint_id.clone(),
            local_gpu_id: gpu.gpu_id,
            is_available: is_usable && is_available(&gpu, &settings),
            gpu,
        })
    };
    running.places().iter().flat_map(of_place).collect()
}

fn balance(running: &Running) -> LoadBalancerStats {
    let counts = &running.core.counts;
    let granted = counts.granted.load(Ordering::Relaxed);
    let failed = counts.failed.load(Ordering::Relaxed);
    LoadBalancerStats {
        strategy_name: locked(&running.core.balancer).strategy().name(),
        total_requests: counts.requests.load(Ordering::Relaxed),
        successful_requests: granted,
        failed_requests: failed,
        success_rate: percent(granted as usize, (granted + failed) as usize, 100.0),
    }
}

fn authority_of(all: impl Iterator<Item = LeaseAuthority>) -> LeaseAuthority {
    let known: Vec<LeaseAuthority> = all.filter(|authority| *authority != LeaseAuthority::Unknown).collect();
    match known.first() {
        None => LeaseAuthority::Unknown,
        Some(first) if known.iter().all(|other| other == first) => *first,
        Some(_) => LeaseAuthority::Mixed,
    }
}

/// In percent with two digits.
fn percent(part: usize, whole: usize, of_nothing: f64) -> f64 {
    if whole == 0 { of_nothing } else { (part as f64 * 10_000.0 / whole as f64).round() / 100.0 }
}

// What happens to a client's endpoints and requests, as it happens, for whoever wants to follow it.

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum StatusUpdate {
    /// An endpoint was looked at.
    Statistics {
        /// Which.
        endpoint_id: String,
        /// Its GPUs.
        gpus: Vec<ObservedGpu>,
    },
    /// An endpoint can be asked from now on.
    EndpointUp {
        /// Which.
        endpoint_id: String,
    },
    /// An endpoint failed too often, and is left alone for a while.
    EndpointDown {
        /// Which.
        endpoint_id: String,
        /// What went wrong.
        error: String,
    },
    /// A request waits.
    Blocked {
        /// Whose.
        worker_id: String,
    },
    /// A request that waited was granted.
    Unblocked {
        /// Whose.
        worker_id: String,
    },
    /// GPUs were assigned.
    Assigned {
        /// To whom.
        worker_id: String,
        /// Where.
        endpoint_id: String,
        /// Which, on that endpoint.
        gpu_ids: Vec<u32>,
    },
    /// An assignment was given back.
    Released {
        /// By whom.
        worker_id: String,
        /// Where.
        endpoint_id: String,
        /// Which, on that endpoint.
        gpu_ids: Vec<u32>,
    },
    /// An assignment was lost: its GPUs may be somebody else's.
    Lost {
        /// By whom.
        worker_id: String,
        /// Where.
        endpoint_id: String,
        /// Why.
        reason: String,
    },
    /// So many updates came faster than they were read, and are gone.
    Missed {
        /// How many.
        count: u64,
    },
}

impl StatusUpdate {
    /// Whether it comes with every look and every assignment, and is of no news to the program that asked for it.
    fn is_frequent(&self) -> bool {
        matches!(self, Self::Statistics { .. } | Self::Assigned { .. } | Self::Released { .. })
    }
}

/// Where updates are told.
#[derive(Debug)]
pub(super) struct Telling {
    updates: broadcast::Sender<StatusUpdate>,
    frequent_updates: FrequentUpdates,
}

/// While one of these lives, updates that come often are told as well.
#[derive(Debug, Clone, Default)]
pub struct FrequentUpdates(Arc<()>);

impl Telling {
    pub(super) fn new() -> Self {
        Self { updates: broadcast::Sender::new(UPDATES), frequent_updates: FrequentUpdates::default() }
    }

    /// Whether anybody wants to hear of what happens often.
    pub(super) fn wants_frequent_updates(&self) -> bool {
        Arc::strong_count(&self.frequent_updates.0) > 1
    }

    pub(super) fn tell(&self, update: StatusUpdate) {
        // Telling wakes whoever follows, though it be for nothing.
        if !update.is_frequent() || self.wants_frequent_updates() {
            // Nobody need listen.
            let _ = self.updates.send(update);
        }
    }

    pub(super) fn frequent_updates(&self) -> FrequentUpdates {
        self.frequent_updates.clone()
    }

    pub(super) fn follow(&self, frequent_updates: Option<FrequentUpdates>) -> StatusUpdateStream {
        StatusUpdateStream { receiver: self.updates.subscribe(), _frequent_updates: frequent_updates }
    }
}

/// Follows what happens from when it was made. Has no task of its own.
#[derive(Debug)]
pub struct StatusUpdateStream {
    receiver: broadcast::Receiver<StatusUpdate>,
    /// Has what comes often told as well.
    _frequent_updates: Option<FrequentUpdates>,
}

impl StatusUpdateStream {
    /// The next one; `None` once the client is gone.
    pub async fn next(&mut self) -> Option<StatusUpdate> {
        match self.receiver.recv().await {
            Ok(update) => Some(update),
            Err(RecvError::Lagged(count)) => Some(StatusUpdate::Missed { count }),
            Err(RecvError::Closed) => None,
        }
    }

    /// The same as a stream.
    pub fn into_stream(self) -> impl Stream<Item = StatusUpdate> {
        unfold(self, |mut updates| async move { updates.next().await.map(|update| (update, updates)) })
    }
}

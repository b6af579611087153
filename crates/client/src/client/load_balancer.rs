//! Order in which endpoints are tried, from their latest snapshots. Time, network and random numbers are arguments.

use std::cmp::Ordering;
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::pool::DeviceBody;
use gpupool_config::Balancing;
use gpupool_core::{OneOrMany, Vendor, labels_match, model_matches};
use serde::Serialize;
use tokio::time::Instant;

/// An endpoint that could serve a request.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct EndpointCandidate {
    /// Position among the client's endpoints.
    pub endpoint: usize,
    /// Number of GPUs.
    pub total: usize,
    /// Number of GPUs that match the request.
    pub available: usize,
    /// Average response time.
    pub response_time: Duration,
    /// Share of its traffic, 0..=1: less than 1 for a recovered endpoint.
    pub traffic_share: f64,
    /// Whether the endpoint is failing or slow: tried only if no other endpoint is left.
    pub is_suspect: bool,
}

/// Load balancer with the history of its choices.
#[derive(Debug)]
pub(super) struct LoadBalancer {
    strategy: Balancing,
    /// Number of the last choice of each endpoint (round robin), or its credit (weighted).
    credits: Vec<f64>,
    choice_count: f64,
}

impl LoadBalancer {
    /// Creates a balancer. `chance` in 0..1 breaks ties, so that many clients do not start at the same endpoint.
    pub(super) fn new(strategy: Balancing, endpoints: usize, mut chance: impl FnMut() -> f64) -> Self {
        // Between -1 and 0: before any endpoint that was chosen.
        let credits = (0..endpoints).map(|_| -chance()).collect();
        Self { strategy, credits, choice_count: 0.0 }
    }

    pub(super) fn strategy(&self) -> Balancing {
        self.strategy
    }

    /// Returns the candidates, best first. The first counts as chosen unless [`LoadBalancer::charge_instead`] follows.
    pub(super) fn order(&mut self, mut candidates: Vec<EndpointCandidate>, mut rng: impl FnMut() -> f64) -> Vec<usize> {
        let weights: f64 = candidates.iter().map(|candidate| candidate.total as f64).sum();
        if self.strategy == Balancing::Weighted {
            for candidate in &candidates {
                self.credits[candidate.endpoint] += candidate.total as f64 / weights.max(1.0);
            }
        }
        candidates.sort_by(|a, b| {
            a.is_suspect.cmp(&b.is_suspect).then_with(|| self.compare(a, b)).then(a.endpoint.cmp(&b.endpoint))
        });
        if let Some(first) = candidates.first() {
            self.charge(first.endpoint);
        }
        // A recovered endpoint is skipped for some requests, which it does not get later.
        for _ in 1..candidates.len() {
            let is_passed =
                candidates.first().is_some_and(|first| first.traffic_share < 1.0 && rng() >= first.traffic_share);
            if !is_passed {
                break;
            }
            candidates.rotate_left(1);
        }
        candidates.iter().map(|candidate| candidate.endpoint).collect()
    }

    /// Records that another endpoint served the request instead of the chosen one.
    pub(super) fn charge_instead(&mut self, from: usize, to: usize) {
        if self.strategy == Balancing::Weighted {
            self.credits[from] += 1.0;
        }
        self.charge(to);
    }

    fn charge(&mut self, endpoint: usize) {
        self.choice_count += 1.0;
        match self.strategy {
            Balancing::Availability => {}
            Balancing::RoundRobin => self.credits[endpoint] = self.choice_count,
            Balancing::Weighted => self.credits[endpoint] -= 1.0,
        }
    }

    fn compare(&self, a: &EndpointCandidate, b: &EndpointCandidate) -> Ordering {
        match self.strategy {
            Balancing::Availability => {
                // Compares shares without a division: a/A against b/B.
                let share = (b.available * a.total.max(1)).cmp(&(a.available * b.total.max(1)));
                share.then(b.available.cmp(&a.available)).then(a.response_time.cmp(&b.response_time))
            }
            Balancing::RoundRobin => self.credits[a.endpoint].total_cmp(&self.credits[b.endpoint]),
            Balancing::Weighted => self.credits[b.endpoint].total_cmp(&self.credits[a.endpoint]),
        }
    }
}

// Latest view of an endpoint's GPUs. It only guides the choice of an endpoint; the endpoint itself decides.

/// GPUs of an endpoint at the time of a poll.
#[derive(Debug, Clone)]
pub(super) struct GpuSnapshot {
    pub at: Instant,
    pub gpus: Vec<ObservedGpu>,
}

/// A GPU as of the latest poll.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ObservedGpu {
    /// Number on its server.
    pub gpu_id: u32,
    /// UUID, if the server reports it.
    pub uuid: Option<String>,
    /// `nvidia`, `amd`, `intel` or `other`; empty if the server does not report it.
    pub vendor: String,
    /// Model name.
    pub name: String,
    /// Memory in MiB, if known.
    pub memory_mib: Option<u64>,
    /// Memory in use, in percent; `None` if unknown.
    pub memory_usage_percent: Option<f64>,
    /// Utilization in percent; `None` if unknown.
    pub utilization_percent: Option<f64>,
    /// Memory in use without a lease, in percent.
    pub foreign_memory_percent: Option<f64>,
    /// Utilization without a lease, in percent.
    pub foreign_utilization_percent: Option<f64>,
    /// Promised share, 0..=1.
    pub promised: f64,
    /// Promised memory in MiB.
    pub promised_memory_mib: u64,
    /// Number of leases on the GPU.
    pub holders: usize,
    /// Reason why the GPU takes no new work; `None` if it does.
    pub closed: Option<String>,
    /// Labels of the GPU.
    #[serde(skip)]
    pub labels: gpupool_core::Labels,
}

impl From<DeviceBody> for ObservedGpu {
    fn from(device: DeviceBody) -> Self {
        let percent = |part: Option<u64>| match (part, device.memory_mib) {
            (Some(part), Some(all)) if all > 0 => Some(part as f64 * 100.0 / all as f64),
            _ => None,
        };
        let foreign = device.foreign.as_ref();
        Self {
            gpu_id: device.gpu_id,
            memory_usage_percent: percent(device.memory_used_mib),
            utilization_percent: device.utilization_percent,
            foreign_memory_percent: percent(foreign.and_then(|foreign| foreign.memory_mib)),
            foreign_utilization_percent: foreign.and_then(|foreign| foreign.utilization_percent),
            promised: device.promised,
            promised_memory_mib: device.promised_memory_mib,
            holders: device.leases.len(),
            memory_mib: device.memory_mib,
            uuid: Some(device.uuid),
            vendor: device.vendor,
            name: device.name,
            closed: device.closed,
            labels: device.labels.into_iter().map(|(key, value)| (key.into(), value.into())).collect(),
        }
    }
}

/// Parts of a request that a GPU must match.
#[derive(Debug, Clone)]
pub(super) struct GpuRequirements<'a> {
    body: &'a RequestBody,
    memory_threshold: f64,
    utilization_threshold: f64,
}

impl<'a> GpuRequirements<'a> {
    pub(super) fn for_request(body: &'a RequestBody) -> Self {
        Self {
            body,
            memory_threshold: body.memory_threshold.unwrap_or(80.0),
            utilization_threshold: body.utilization_threshold.unwrap_or(90.0),
        }
    }

    /// Returns the number of GPUs of the request.
    pub(super) fn gpus(&self) -> usize {
        self.body.gpus.unwrap_or(1).into()
    }

    /// Whether a GPU matches.
    pub(super) fn is_met_by(&self, gpu: &ObservedGpu) -> bool {
        gpu.closed.is_none() && self.is_below_thresholds(gpu) && self.has_room(gpu) && self.is_selected(gpu)
    }

    fn is_below_thresholds(&self, gpu: &ObservedGpu) -> bool {
        let is_below = |foreign: Option<f64>, threshold: f64| foreign.is_none_or(|percent| percent < threshold);
        is_below(gpu.foreign_memory_percent, self.memory_threshold)
            && is_below(gpu.foreign_utilization_percent, self.utilization_threshold)
    }

    fn has_room(&self, gpu: &ObservedGpu) -> bool {
        let (share, memory) = (self.body.fraction, self.body.memory_mib);
        let is_whole = share.is_none_or(|share| share >= 1.0) && memory.is_none() && !self.body.sharing;
        if is_whole {
            return gpu.holders == 0;
        }
        // Compared in thousandths: ten tenths are one.
        let is_share_free = share.is_none_or(|share| gpu.promised + share < 1.0005);
        let free = gpu.memory_mib.map(|all| all.saturating_sub(gpu.promised_memory_mib));
        is_share_free && gpu.promised < 0.9995 && memory.is_none_or(|memory| free.is_none_or(|free| memory <= free))
    }

    fn is_selected(&self, gpu: &ObservedGpu) -> bool {
        let select = &self.body.select;
        let is_model = match &select.model {
            OneOrMany::One(model) => model_matches(&gpu.name, model),
            OneOrMany::Many(models) => {
                models.is_empty() || models.iter().any(|candidate| model_matches(&gpu.name, candidate))
            }
        };
        let is_vendor = |vendor: Vendor| gpu.vendor.is_empty() || gpu.vendor.eq_ignore_ascii_case(vendor.name());
        is_model
            && select.vendor.is_none_or(is_vendor)
            && select.min_memory_mib.is_none_or(|least| gpu.memory_mib.is_none_or(|memory| memory >= least))
            && (select.gpu_ids.is_empty() || select.gpu_ids.iter().any(|id| id.0 == gpu.gpu_id))
            && (select.uuids.is_empty()
                || gpu.uuid.as_ref().is_none_or(|uuid| select.uuids.iter().any(|wanted| **wanted == **uuid)))
            && labels_match(&gpu.labels, &select.labels)
    }
}

impl GpuSnapshot {
    /// Returns the number of matching GPUs; 0 if the request needs more.
    pub(super) fn count_matching_gpus(&self, requirements: &GpuRequirements<'_>) -> usize {
        let found = self.gpus.iter().filter(|gpu| requirements.is_met_by(gpu)).count();
        if found < requirements.gpus().max(1) { 0 } else { found }
    }

    /// Adjusts the promises of a GPU after a grant or a release, before the next poll.
    pub(super) fn adjust_promises(&mut self, gpu_id: u32, fraction: f64, memory_mib: u64, is_granted: bool) {
        let Some(gpu) = self.gpus.iter_mut().find(|gpu| gpu.gpu_id == gpu_id) else { return };
        if is_granted {
            gpu.promised = (gpu.promised + fraction).min(1.0);
            gpu.promised_memory_mib = gpu.promised_memory_mib.saturating_add(memory_mib);
            gpu.holders += 1;
        } else {
            gpu.promised = (gpu.promised - fraction).max(0.0);
            gpu.promised_memory_mib = gpu.promised_memory_mib.saturating_sub(memory_mib);
            gpu.holders = gpu.holders.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(endpoint: usize, total: usize, available: usize) -> EndpointCandidate {
        let response_time = Duration::from_millis(1);
        EndpointCandidate { endpoint, total, available, response_time, traffic_share: 1.0, is_suspect: false }
    }

    fn split(strategy: Balancing, candidates: &[EndpointCandidate], times: usize) -> Vec<usize> {
        let mut balancer = LoadBalancer::new(strategy, candidates.len(), || 0.5);
        let mut counts = vec![0; candidates.len()];
        for _ in 0..times {
            counts[balancer.order(candidates.to_vec(), || 0.5)[0]] += 1;
        }
        counts
    }

    #[test]
    fn availability_takes_the_highest_share_then_most_then_fastest() {
        let mut balancer = LoadBalancer::new(Balancing::Availability, 4, || 0.0);
        let mut fast = candidate(3, 4, 2);
        fast.response_time = Duration::from_micros(10);
        let order = balancer.order(vec![candidate(0, 8, 2), candidate(1, 8, 4), candidate(2, 4, 2), fast], || 0.0);
        assert_eq!(order, [1, 3, 2, 0]);
    }

    #[test]
    fn round_robin_is_even_and_weighted_follows_the_number_of_gpus() {
        let three = [candidate(0, 8, 8), candidate(1, 4, 4), candidate(2, 4, 4)];
        assert_eq!(split(Balancing::RoundRobin, &three, 999), [333, 333, 333]);
        assert_eq!(split(Balancing::Weighted, &three, 1_000), [500, 250, 250]);
    }

    #[test]
    fn an_endpoint_that_regains_capacity_is_not_flooded() {
        let mut balancer = LoadBalancer::new(Balancing::RoundRobin, 2, || 0.5);
        for _ in 0..100 {
            balancer.order(vec![candidate(0, 1, 1)], || 0.5);
        }
        let both: Vec<usize> =
            (0..4).map(|_| balancer.order(vec![candidate(0, 1, 1), candidate(1, 1, 1)], || 0.5)[0]).collect();
        assert_eq!(both, [1, 0, 1, 0]);
    }

    #[test]
    fn a_recovered_endpoint_gets_its_share_and_a_suspect_comes_last() {
        let mut balancer = LoadBalancer::new(Balancing::RoundRobin, 2, || 0.5);
        let mut back = candidate(0, 4, 4);
        back.traffic_share = 0.25;
        let mut chance = (0..).map(|n| f64::from(n * 37 % 100) / 100.0);
        let mut first = 0;
        for _ in 0..1_000 {
            let order = balancer.order(vec![back.clone(), candidate(1, 4, 4)], || chance.next().unwrap());
            first += usize::from(order[0] == 0);
        }
        // A quarter of its half of the requests.
        assert!((100..=150).contains(&first), "{first}");
        let mut suspect = candidate(0, 4, 4);
        suspect.is_suspect = true;
        assert_eq!(balancer.order(vec![suspect, candidate(1, 4, 1)], || 0.0), [1, 0]);
    }

    #[test]
    fn a_request_is_charged_to_the_endpoint_that_served_it() {
        let mut balancer = LoadBalancer::new(Balancing::Weighted, 2, || 0.5);
        let mut served = [0, 0];
        for _ in 0..100 {
            let order = balancer.order(vec![candidate(0, 1, 1), candidate(1, 1, 1)], || 0.5);
            // The first endpoint refuses every second request.
            let at = if order[0] == 0 && served[0] % 2 == 1 { order[1] } else { order[0] };
            if at != order[0] {
                balancer.charge_instead(order[0], at);
            }
            served[at] += 1;
        }
        assert_eq!(served[0] + served[1], 100);
        assert!(served[1] > 0);
    }

    #[test]
    fn an_unknown_strategy_is_named() {
        let error = "fastest".parse::<Balancing>().unwrap_err().to_string();
        assert!(error.contains("fastest") && error.contains("round_robin"), "{error}");
    }

    fn gpu(gpu_id: u32) -> ObservedGpu {
        ObservedGpu {
            gpu_id,
            uuid: Some(format!("GPU-{gpu_id}")),
            vendor: "nvidia".into(),
            name: "NVIDIA H100 80GB HBM3".into(),
            memory_mib: Some(80_000),
            memory_usage_percent: Some(0.0),
            utilization_percent: Some(0.0),
            foreign_memory_percent: Some(0.0),
            foreign_utilization_percent: Some(0.0),
            promised: 0.0,
            promised_memory_mib: 0,
            holders: 0,
            closed: None,
            labels: Default::default(),
        }
    }

    fn matching_gpus(gpus: &[ObservedGpu], json: &str) -> usize {
        let body: RequestBody = serde_json::from_str(json).unwrap();
        GpuSnapshot { at: Instant::now(), gpus: gpus.to_vec() }
            .count_matching_gpus(&GpuRequirements::for_request(&body))
    }

    #[test]
    fn a_whole_gpu_must_be_unleased_and_strictly_below_both_thresholds() {
        let held = ObservedGpu { promised: 0.1, holders: 1, ..gpu(0) };
        let at_memory = ObservedGpu { foreign_memory_percent: Some(80.0), ..gpu(1) };
        let busy = ObservedGpu { foreign_utilization_percent: Some(90.0), ..gpu(2) };
        let below =
            ObservedGpu { foreign_memory_percent: Some(79.9), foreign_utilization_percent: Some(89.9), ..gpu(3) };
        let closed = ObservedGpu { closed: Some("hot".into()), ..gpu(4) };
        assert_eq!(matching_gpus(&[held, at_memory.clone(), busy, below, closed], "{}"), 1);
        assert_eq!(matching_gpus(&[at_memory], r#"{"memory_threshold":80.1}"#), 1);
    }

    #[test]
    fn promised_parts_count_and_several_gpus_must_all_match() {
        let mut snapshot = GpuSnapshot { at: Instant::now(), gpus: vec![gpu(0)] };
        let body: RequestBody = serde_json::from_str(r#"{"fraction":0.1}"#).unwrap();
        for _ in 0..10 {
            assert_eq!(snapshot.count_matching_gpus(&GpuRequirements::for_request(&body)), 1);
            snapshot.adjust_promises(0, 0.1, 8_000, true);
        }
        assert_eq!(snapshot.count_matching_gpus(&GpuRequirements::for_request(&body)), 0);
        snapshot.adjust_promises(0, 0.1, 8_000, false);
        assert_eq!(snapshot.count_matching_gpus(&GpuRequirements::for_request(&body)), 1);
        assert_eq!(matching_gpus(&[gpu(0), gpu(1)], r#"{"gpus":3}"#), 0);
        assert_eq!(matching_gpus(&[gpu(0), gpu(1)], r#"{"gpus":2}"#), 2);
        assert_eq!(matching_gpus(&[gpu(0)], r#"{"memory_mib":80001}"#), 0);
    }

    #[test]
    fn a_selection_restricts_the_matching_gpus() {
        let gpus = [gpu(0), ObservedGpu { name: "NVIDIA A100".into(), memory_mib: Some(40_000), ..gpu(1) }];
        assert_eq!(matching_gpus(&gpus, r#"{"select":{"model":"H100"}}"#), 1);
        assert_eq!(matching_gpus(&gpus, r#"{"select":{"min_memory_mib":50000}}"#), 1);
        assert_eq!(matching_gpus(&gpus, r#"{"select":{"gpu_ids":[1]}}"#), 1);
        assert_eq!(matching_gpus(&gpus, r#"{"select":{"uuids":["GPU-1"]}}"#), 1);
        assert_eq!(matching_gpus(&gpus, r#"{"select":{"vendor":"amd"}}"#), 0);
        assert_eq!(matching_gpus(&gpus, r#"{"select":{"labels":{"a":"b"}}}"#), 0);
    }
}

//! Scenario of a simulation: trace, order of arrivals, strategy and known workload.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpupool_core::{
    ApplyOutcome, CommandReply, DeviceFacts, DeviceIdentity, DeviceSelector, IsolationSupport, LeaseId, Millis,
    NodeFacts, PlacementStrategy, Policies, Pool, PoolCommand, PoolSettings, PoolTime, Request, RequestedAmount, Share,
    TaskClass, Vendor,
};

use crate::trace::{TaskType, TraceFolder, TraceNode};

/// Numbering of nodes, which decides between equal scores.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NodeOrdering {
    /// By the rank in the trace.
    #[default]
    Trace,
    GpusDesc,
    /// Fewest CPUs per GPU first.
    CpuPerGpuAsc,
}

/// Source of the workload for strategies that consider it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WorkloadSource {
    /// Configured before the first arrival.
    #[default]
    Known,
    /// Learned from the arrivals.
    Learned,
}

/// Simulation to run with [`Scenario::replay`] or [`Scenario::churn`].
#[derive(Debug, Clone)]
pub struct Scenario<'a> {
    pub folder: &'a TraceFolder,
    pub trace: &'a str,
    /// Number of the arrival order.
    pub seed: u64,
    pub strategy: PlacementStrategy,
    pub workload: WorkloadSource,
    pub node_order: NodeOrdering,
}

// The traced cluster as a pool without policies, with tasks as requests.

/// Pool with the nodes of a trace, and the requests of its tasks.
pub(crate) struct SimulatedCluster {
    pool: Pool,
    requests: Vec<Arc<Request>>,
    outcome: ApplyOutcome,
    /// Capacity of all GPUs, in thousandths.
    pub capacity: u64,
    /// Time of decisions, without those that adopted a newly learned workload.
    pub decision_time: Duration,
    pub decisions: u64,
    /// Time of decisions that adopted a newly learned workload.
    pub refresh_time: Duration,
    pub refreshes: u64,
}

impl SimulatedCluster {
    /// Creates the empty cluster of a scenario; `ranks` are those of its nodes in name order.
    pub fn new(scenario: &Scenario<'_>, ranks: &[usize], types: &[TaskType]) -> Self {
        let nodes = &scenario.folder.nodes;
        let mut numbered: Vec<(usize, &TraceNode)> = ranks.iter().copied().zip(nodes).collect();
        numbered.sort_by_key(|(rank, node)| match scenario.node_order {
            NodeOrdering::Trace => (0, *rank),
            NodeOrdering::GpusDesc => (u64::MAX - u64::from(node.gpus), *rank),
            NodeOrdering::CpuPerGpuAsc => (node.cpus.0 / u64::from(node.gpus.max(1)), *rank),
        });
        let mut cluster = Self {
            pool: Pool::new(PoolSettings::default(), Policies::unlimited()),
            requests: types.iter().map(|task| Arc::new(request(task, scenario.strategy))).collect(),
            outcome: ApplyOutcome::default(),
            capacity: nodes.iter().map(|node| u64::from(node.gpus) * u64::from(Share::WHOLE.0)).sum(),
            decision_time: Duration::ZERO,
            decisions: 0,
            refresh_time: Duration::ZERO,
            refreshes: 0,
        };
        for (_, node) in numbered {
            cluster.apply(node_seen(node));
        }
        if scenario.workload == WorkloadSource::Known {
            let mut counts: BTreeMap<TaskClass, u64> = BTreeMap::new();
            for TaskType { cpus, share, gpus, models, count, .. } in types {
                let class = TaskClass { cpus: *cpus, share: *share, gpus: *gpus, models: models.clone() };
                *counts.entry(class).or_default() += count;
            }
            cluster.apply(PoolCommand::SetWorkload { classes: counts.into_iter().collect() });
        }
        cluster
    }

    fn apply(&mut self, command: PoolCommand) -> Option<LeaseId> {
        self.outcome.clear();
        self.pool.begin_batch(PoolTime(0), &mut self.outcome);
        let reply = self.pool.apply_in_batch(command, &mut self.outcome);
        self.pool.finish_batch(&mut self.outcome);
        match reply {
            Ok(CommandReply::Lease(lease)) => Some(lease),
            Ok(_) | Err(_) => None,
        }
    }

    /// Requests a task; `None` if it found no place.
    pub fn place_task(&mut self, task_type: usize) -> Option<LeaseId> {
        let command = PoolCommand::Request { request: self.requests[task_type].clone(), key: None, by_admin: false };
        let version = self.pool.workload_version();
        let start = Instant::now();
        let lease = self.apply(command);
        let took = start.elapsed();
        if self.pool.workload_version() == version {
            self.decision_time += took;
            self.decisions += 1;
        } else {
            self.refresh_time += took;
            self.refreshes += 1;
        }
        lease
    }

    pub fn remove_task(&mut self, lease: LeaseId) {
        self.apply(PoolCommand::Release { lease });
    }

    /// Returns the microseconds per ordinary decision.
    pub fn us_per_decision(&self) -> f64 {
        micros(self.decision_time, self.decisions)
    }

    /// Returns the microseconds per decision that adopted a newly learned workload, or 0 without any.
    pub fn us_per_refresh(&self) -> f64 {
        micros(self.refresh_time, self.refreshes)
    }
}

fn micros(total: Duration, count: u64) -> f64 {
    if count == 0 { 0.0 } else { total.as_secs_f64() * 1e6 / count as f64 }
}

fn node_seen(node: &TraceNode) -> PoolCommand {
    let device = |number: u16| DeviceFacts {
        identity: DeviceIdentity::Uuid(format!("{}-{number}", node.name).into()),
        vendor: Vendor::Other,
        model: node.model.clone(),
        memory: None,
        partition: None,
        isolation: IsolationSupport::BASIC,
        labels: Default::default(),
    };
    let facts = NodeFacts { name: node.name.clone(), cpus: node.cpus, memory: node.memory, labels: Default::default() };
    PoolCommand::NodeSeen { facts, devices: (0..node.gpus).map(device).collect(), numbers: Vec::new() }
}

fn request(task: &TaskType, strategy: PlacementStrategy) -> Request {
    let models = task.models.split('|').filter(|name| !name.is_empty()).map(Arc::from).collect();
    Request {
        gpus: task.gpus,
        amount: if task.gpus == 0 || task.share == Share::WHOLE {
            RequestedAmount::Whole
        } else {
            RequestedAmount::Share(task.share)
        },
        strategy: Some(strategy),
        select: Arc::new(DeviceSelector { models, ..DeviceSelector::default() }),
        cpus: task.cpus,
        host_memory: task.memory,
        queue: false,
        ttl: Millis::from_secs(86_400),
        ..Request::default()
    }
}

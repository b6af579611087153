//! What is simulated: a trace, an order of arrivals, a strategy, and what it knows.

use gpupool_core::Strategy;

use crate::cluster::Cluster;
use crate::trace::{Folder, TaskType};

/// In which order nodes are numbered, which is how equal scores are decided.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NodeOrder {
    /// By the rank the trace gives them.
    #[default]
    Trace,
    /// Most GPUs first.
    GpusDesc,
    /// Fewest CPUs per GPU first.
    CpuPerGpuAsc,
}

/// Where strategies that look ahead know the workload from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WorkloadSource {
    /// Told before the first arrival.
    #[default]
    Known,
    /// Learned from the arrivals.
    Learned,
}

/// What to simulate; [`Scenario::replay`] and [`Scenario::churn`] do.
#[derive(Debug, Clone)]
pub struct Scenario<'a> {
    /// From where.
    pub folder: &'a Folder,
    /// Which trace.
    pub trace: &'a str,
    /// Which order of arrivals.
    pub seed: u64,
    /// By which strategy.
    pub strategy: Strategy,
    /// Where the workload is known from.
    pub workload: WorkloadSource,
    /// How nodes are numbered.
    pub node_order: NodeOrder,
}

impl Scenario<'_> {
    /// The empty cluster, its nodes ranked in name order.
    pub(crate) fn cluster(&self, ranks: &[usize], types: &[TaskType]) -> Cluster {
        Cluster::new(&self.folder.nodes, ranks, self.node_order, types, self.strategy, self.workload)
    }
}

//! Fills an empty cluster with arrivals that never leave, by the protocol of the FGD paper: each is placed or rejected
//! for good.

use serde::Serialize;

use crate::scenario::{Scenario, SimulatedCluster};
use crate::trace::TraceError;

/// Figures of one replay.
#[derive(Debug, Clone, Serialize)]
pub struct ReplayResult {
    pub trace: String,
    pub strategy: &'static str,
    pub seed: u64,
    pub arrivals: u64,
    /// Tasks that found no place.
    pub failed: u64,
    /// GPU thousandths in use just before the arrival that exceeds capacity.
    pub used_gpu_milli_100: u64,
    /// GPU thousandths in use at the end.
    pub used_gpu_milli_end: u64,
    /// Percent of GPU capacity not in use at 100 %.
    pub unallocated_100: f64,
    /// Percent of GPU capacity not in use at the end (130 %).
    pub unallocated_130: f64,
    /// Percent of the multi-GPU tasks refused while arrivals came to at most 95 % of capacity.
    pub refused_multi_gpu_95: f64,
    /// Microseconds per decision.
    pub us_per_decision: f64,
    /// Microseconds per decision that also adopted a newly learned workload.
    pub us_per_refresh: f64,
    /// Percent of capacity not in use for each percent of capacity that has arrived.
    #[serde(skip)]
    pub curve: Vec<f64>,
}

impl Scenario<'_> {
    /// Places the arrivals of the trace in an empty cluster; the seed must exist in the trace.
    pub fn replay(&self) -> Result<ReplayResult, TraceError> {
        let types = self.folder.types(self.trace)?;
        let arrivals = self.folder.arrivals(self.trace, self.seed, types.len())?;
        let mut cluster = SimulatedCluster::new(self, &arrivals.node_ranks, &types);
        let capacity = cluster.capacity;
        let unallocated = |used: u64| 100.0 - 100.0 * used as f64 / capacity as f64;

        let (mut arrived, mut used, mut failed) = (0_u64, 0_u64, 0_u64);
        let (mut multi, mut multi_refused) = (0_u64, 0_u64);
        let mut used_100 = None;
        let mut curve = Vec::new();
        for &task_type in &arrivals.types {
            let task = &types[task_type];
            arrived += task.gpu_milli();
            if arrived > capacity && used_100.is_none() {
                used_100 = Some(used);
            }
            while curve.len() as u64 * capacity <= arrived * 100 {
                curve.push(unallocated(used));
            }
            let placed = cluster.place_task(task_type).is_some();
            if placed {
                used += task.gpu_milli();
            } else {
                failed += 1;
            }
            if task.gpus > 1 && arrived * 100 <= capacity * 95 {
                multi += 1;
                multi_refused += u64::from(!placed);
            }
        }
        let used_100 = used_100.unwrap_or(used);
        Ok(ReplayResult {
            trace: self.trace.to_owned(),
            strategy: self.strategy.name(),
            seed: self.seed,
            arrivals: arrivals.types.len() as u64,
            failed,
            used_gpu_milli_100: used_100,
            used_gpu_milli_end: used,
            unallocated_100: unallocated(used_100),
            unallocated_130: unallocated(used),
            refused_multi_gpu_95: if multi == 0 { 0.0 } else { 100.0 * multi_refused as f64 / multi as f64 },
            us_per_decision: cluster.us_per_decision(),
            us_per_refresh: cluster.us_per_refresh(),
            curve,
        })
    }
}

//! Simulation of tasks that arrive and leave: Poisson arrivals, exponential lifetimes, types as frequent as in the
//! trace.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use gpupool_core::LeaseId;
use serde::Serialize;

use crate::scenario::{Scenario, SimulatedCluster};
use crate::trace::TraceError;

/// Part of the arrivals that only fills the cluster and is not measured.
const WARM_UP: f64 = 1.0 / 3.0;

/// Figures of one simulation.
#[derive(Debug, Clone, Serialize)]
pub struct ChurnResult {
    pub trace: String,
    pub strategy: &'static str,
    pub seed: u64,
    /// Offered load.
    pub load: f64,
    pub arrivals: u64,
    /// Tasks that found no place.
    pub failed: u64,
    /// Percent of GPU capacity in use, averaged over time after the warm-up.
    pub mean_allocated: f64,
    /// Percent of the multi-GPU tasks refused after the warm-up.
    pub refused_multi_gpu: f64,
    /// Microseconds per decision.
    pub us_per_decision: f64,
    /// Microseconds per decision that also adopted a newly learned workload.
    pub us_per_refresh: f64,
}

impl Scenario<'_> {
    /// Simulates arrivals and departures of the trace's task types. `load` is the long-run GPU demand as a part of
    /// capacity, `arrivals` the number of tasks. The seed determines arrivals, lifetimes and node ranks.
    pub fn churn(&self, load: f64, arrivals: u64) -> Result<ChurnResult, TraceError> {
        let types = self.folder.types(self.trace)?;
        let mut rng = SplitMix64::new(self.seed);
        let ranks = shuffled(self.folder.nodes.len(), &mut rng);
        let mut cluster = SimulatedCluster::new(self, &ranks, &types);

        let total: u64 = types.iter().map(|task| task.count).sum();
        let asked: f64 = types.iter().map(|task| task.count as f64 * task.gpu_milli() as f64).sum();
        let mean_interval = asked / total.max(1) as f64 / (load * cluster.capacity as f64);
        let cumulative: Vec<u64> = types
            .iter()
            .scan(0, |sum, task| {
                *sum += task.count;
                Some(*sum)
            })
            .collect();

        // Times are never negative, so their bits have the same order.
        let mut departures: BinaryHeap<Reverse<(u64, LeaseId, usize)>> = BinaryHeap::new();
        let (mut now, mut used, mut failed) = (0.0, 0_u64, 0_u64);
        let (mut multi, mut multi_refused) = (0_u64, 0_u64);
        let (mut area, mut measured_from) = (0.0, None);
        let measure_after = (arrivals as f64 * WARM_UP) as u64;
        for arrival in 0..arrivals {
            let next = now + rng.exponential(mean_interval);
            while departures.peek().is_some_and(|Reverse((at, ..))| f64::from_bits(*at) <= next) {
                let Some(Reverse((at, lease, task_type))) = departures.pop() else { break };
                let at = f64::from_bits(at);
                area += (at - now) * used as f64;
                now = at;
                cluster.remove_task(lease);
                used -= types[task_type].gpu_milli();
            }
            area += (next - now) * used as f64;
            now = next;
            if arrival == measure_after {
                (area, measured_from) = (0.0, Some(now));
            }
            let sample = rng.below(total.max(1));
            let task_type = cumulative.partition_point(|sum| *sum <= sample);
            let placed = cluster.place_task(task_type);
            let lifetime = rng.exponential(1.0);
            if types[task_type].gpus > 1 && measured_from.is_some() {
                multi += 1;
                multi_refused += u64::from(placed.is_none());
            }
            match placed {
                Some(lease) => {
                    used += types[task_type].gpu_milli();
                    departures.push(Reverse(((now + lifetime).to_bits(), lease, task_type)));
                }
                None => failed += 1,
            }
        }
        let measured = now - measured_from.unwrap_or(0.0);
        Ok(ChurnResult {
            trace: self.trace.to_owned(),
            strategy: self.strategy.name(),
            seed: self.seed,
            load,
            arrivals,
            failed,
            mean_allocated: if measured > 0.0 { 100.0 * area / measured / cluster.capacity as f64 } else { 0.0 },
            refused_multi_gpu: if multi == 0 { 0.0 } else { 100.0 * multi_refused as f64 / multi as f64 },
            us_per_decision: cluster.us_per_decision(),
            us_per_refresh: cluster.us_per_refresh(),
        })
    }
}

fn shuffled(count: usize, rng: &mut SplitMix64) -> Vec<usize> {
    let mut ranks: Vec<usize> = (0..count).collect();
    for last in (1..count).rev() {
        ranks.swap(last, rng.below(last as u64 + 1) as usize);
    }
    ranks
}

// Random numbers that are equal on every machine for a seed.

pub(crate) struct SplitMix64(u64);

impl SplitMix64 {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a uniform number from 0 up to, but not including, 1.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns an exponential number with this mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    /// Returns a uniform number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }
}

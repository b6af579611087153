//! The workload to come, prepared for scoring against this inventory.

use crate::inventory::{Inventory, KindId};
use crate::units::Share;
use crate::workload::{self, TaskClass, Workload};

use super::card_value::card_values;
use super::least_fragmentation::{keeps_free, stranding_counts};

/// A class of the target workload.
#[derive(Debug)]
pub(super) struct TargetTask {
    pub cpus: u64,
    pub gpus: u32,
    /// Where its share is among [`Target::sizes`].
    pub size: usize,
    pub part: f64,
    /// Whether each kind of device may serve it.
    allowed: Vec<bool>,
    allowed_everywhere: bool,
}

impl TargetTask {
    /// Whether a kind of device may serve it.
    pub fn allows(&self, kind: KindId) -> bool {
        self.allowed_everywhere || self.allowed[kind.0 as usize]
    }
}

/// What scores are measured against.
#[derive(Debug, Default)]
pub(super) struct Target {
    pub tasks: Vec<TargetTask>,
    /// The distinct shares of the GPU tasks.
    pub sizes: Vec<Share>,
    /// Whether every task may go to every kind.
    pub any_model: bool,
    /// Milli-CPUs that go with a milli-GPU of the workload; 0 where unknown.
    pub cpus_per_gpu: f64,
    /// How much GPUs stranded by CPU count.
    pub stranding_counts: f64,
    /// The worth of a card with so much free, in thousandths of an empty one.
    pub card_value: Vec<f64>,
    /// How much each kind is to be kept free for tasks that name its model.
    pub pressure: Vec<f64>,
}

impl Target {
    pub fn new(workload: &Workload, inventory: &Inventory) -> Self {
        let (counts, turnover) = (&workload.counts(), workload.turnover());
        let target = workload::target(counts);
        let mut sizes: Vec<Share> = target.iter().filter(|t| t.class.gpus > 0).map(|t| t.class.share).collect();
        sizes.sort_unstable();
        sizes.dedup();

        let (mut cpus, mut gpus, mut several) = (0.0, 0.0, 0.0);
        let mut demand = vec![0.0; sizes.len()];
        for task in target.iter().filter(|task| task.class.gpus > 0) {
            let milli = task.part * task.class.gpu_milli() as f64;
            cpus += task.part * task.class.cpus.0 as f64;
            gpus += milli;
            several += if task.class.gpus > 1 { milli } else { 0.0 };
            if let Ok(size) = sizes.binary_search(&task.class.share) {
                demand[size] += task.part * f64::from(task.class.gpus);
            }
        }
        let sized: Vec<(Share, f64)> = sizes.iter().copied().zip(demand).collect();
        let tasks: Vec<TargetTask> = target
            .iter()
            .map(|task| {
                let allowed = allowed_kinds(&task.class, inventory);
                TargetTask {
                    cpus: task.class.cpus.0,
                    gpus: u32::from(task.class.gpus),
                    size: sizes.binary_search(&task.class.share).unwrap_or(0),
                    part: task.part,
                    allowed_everywhere: allowed.iter().all(|allowed| *allowed),
                    allowed,
                }
            })
            .collect();
        Self {
            any_model: tasks.iter().all(|task| task.allowed_everywhere),
            tasks,
            sizes,
            cpus_per_gpu: if gpus > 0.0 { cpus / gpus } else { 0.0 },
            stranding_counts: stranding_counts(if gpus > 0.0 { several / gpus } else { 0.0 }, turnover),
            card_value: card_values(&sized),
            pressure: pressure(counts, inventory).into_iter().map(|demand| keeps_free(demand, turnover)).collect(),
        }
    }
}

fn allowed_kinds(class: &TaskClass, inventory: &Inventory) -> Vec<bool> {
    let allows = |facts: &crate::device::DeviceFacts| {
        class.models.is_empty() || class.model_names().any(|model| facts.is_model(model))
    };
    inventory.kinds.iter().map(|kind| allows(&kind.facts)).collect()
}

/// For each kind, how much of the demand that names models it must share: Σ demand/capacity over the distinct sets of
/// models that contain it, with all demand scaled to fill the pool exactly.
fn pressure(counts: &[(TaskClass, u64)], inventory: &Inventory) -> Vec<f64> {
    let mut pressure = vec![0.0; inventory.kinds.len()];
    let asked: f64 = counts.iter().map(|(class, count)| *count as f64 * class.gpu_milli() as f64).sum();
    if asked <= 0.0 {
        return pressure;
    }
    let milli = |kind: &crate::inventory::Kind| kind.members.len() as f64 * 1000.0;
    let capacity: f64 = inventory.kinds.iter().map(milli).sum();
    let mut by_set: std::collections::BTreeMap<&str, (f64, &TaskClass)> = std::collections::BTreeMap::new();
    for (class, count) in counts.iter().filter(|(class, _)| class.gpus > 0 && !class.models.is_empty()) {
        by_set.entry(&class.models).or_insert((0.0, class)).0 += *count as f64 * class.gpu_milli() as f64;
    }
    for (demand, class) in by_set.values() {
        let allowed = allowed_kinds(class, inventory);
        let of_set = || inventory.kinds.iter().zip(&allowed).filter(|(_, allowed)| **allowed);
        let room: f64 = of_set().map(|(kind, _)| milli(kind)).sum();
        if room > 0.0 {
            let load = demand * capacity / asked / room;
            for (pressure, _) in pressure.iter_mut().zip(&allowed).filter(|(_, allowed)| **allowed) {
                *pressure += load;
            }
        }
    }
    pressure
}

//! The expected workload, prepared for scoring against this inventory, and the scores that consider it: `fgd` and
//! `least-fragmentation`.

use std::collections::BTreeMap;

use crate::classes::RequestClass;
use crate::device::DeviceFacts;
use crate::inventory::{DeviceInventory, DeviceKind, DeviceKindId};
use crate::units::{MilliCpus, Share};
use crate::workload::{self, TaskClass, WorkloadEstimate};

use super::scored::{CardShare, CardState, NodeState};

/// Class of the target workload.
#[derive(Debug)]
pub(super) struct TargetTaskClass {
    pub cpus: u64,
    pub gpus: u32,
    /// Index of its share in [`ScoringTarget::sizes`].
    pub size: usize,
    pub part: f64,
    /// For each device kind, whether it may serve the class.
    allowed: Vec<bool>,
    allowed_everywhere: bool,
}

impl TargetTaskClass {
    /// Whether a device kind may serve the class.
    pub fn allows(&self, kind: DeviceKindId) -> bool {
        self.allowed_everywhere || self.allowed[kind.0 as usize]
    }
}

/// Workload against which placements are scored.
#[derive(Debug, Default)]
pub(super) struct ScoringTarget {
    pub tasks: Vec<TargetTaskClass>,
    /// Distinct shares of the GPU tasks.
    pub sizes: Vec<Share>,
    /// Whether every task may go to every kind.
    pub any_model: bool,
    /// Milli-CPUs per milli-GPU of the workload; 0 if unknown.
    pub cpus_per_gpu: f64,
    /// Weight of GPUs that are stranded by a lack of CPUs.
    pub stranding_weight: f64,
    /// Value of a card by its free share, in thousandths of an empty card.
    pub card_value: Vec<f64>,
    /// For each device kind, the weight of keeping it free for tasks that name its model.
    pub pressure: Vec<f64>,
}

impl ScoringTarget {
    pub fn new(workload: &WorkloadEstimate, inventory: &DeviceInventory) -> Self {
        let (counts, turnover) = (&workload.counts(), workload.turnover());
        let target = workload::target_classes(counts);
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
        let tasks: Vec<TargetTaskClass> = target
            .iter()
            .map(|task| {
                let allowed = allowed_kinds(&task.class, inventory);
                TargetTaskClass {
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
            stranding_weight: stranding_weight(if gpus > 0.0 { several / gpus } else { 0.0 }, turnover),
            card_value: card_values(&sized),
            pressure: model_pressure(counts, inventory)
                .into_iter()
                .map(|demand| pressure_weight(demand, turnover))
                .collect(),
        }
    }
}

fn allowed_kinds(class: &TaskClass, inventory: &DeviceInventory) -> Vec<bool> {
    let allows =
        |facts: &DeviceFacts| class.models.is_empty() || class.model_names().any(|model| facts.is_model(model));
    inventory.kinds.iter().map(|kind| allows(&kind.facts)).collect()
}

/// Returns the demand for the models of each kind: Σ demand/capacity over the distinct sets of models that contain it,
/// with all demand scaled to fill the pool exactly.
fn model_pressure(counts: &[(TaskClass, u64)], inventory: &DeviceInventory) -> Vec<f64> {
    let mut pressure = vec![0.0; inventory.kinds.len()];
    let asked: f64 = counts.iter().map(|(class, count)| *count as f64 * class.gpu_milli() as f64).sum();
    if asked <= 0.0 {
        return pressure;
    }
    let milli = |kind: &DeviceKind| kind.members.len() as f64 * 1000.0;
    let capacity: f64 = inventory.kinds.iter().map(milli).sum();
    let mut by_set: BTreeMap<&str, (f64, &TaskClass)> = BTreeMap::new();
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

// FGD: the part of a node's free GPUs that the expected workload cannot use (F), and the score.

/// Returns `floor(100·sigmoid((F_before − F_after)/1000))`: high if the placement leaves little unusable.
pub(super) fn fgd_score(target: &ScoringTarget, class: &RequestClass, state: &NodeState, cards: &[CardShare]) -> i32 {
    let change = state.fragmentation - fragmentation_after(target, class, state, cards);
    (100.0 / (1.0 + (-change / 1000.0).exp())).floor() as i32
}

/// Returns the fragmentation of the state after the class is placed on these cards.
fn fragmentation_after(target: &ScoringTarget, class: &RequestClass, state: &NodeState, cards: &[CardShare]) -> f64 {
    let mut left: [CardState; MAX_STACK_CARDS] = [EMPTY; MAX_STACK_CARDS];
    let cpus = state.cpus - class.shape.cpus;
    if state.cards.len() > MAX_STACK_CARDS {
        let mut left = state.cards.to_vec();
        subtract_cards(&mut left, cards);
        return fragmentation(target, &left, cpus);
    }
    let left = &mut left[..state.cards.len()];
    left.copy_from_slice(&state.cards);
    subtract_cards(left, cards);
    fragmentation(target, left, cpus)
}

const MAX_STACK_CARDS: usize = 16;
const EMPTY: CardState = CardState { kind: DeviceKindId(0), free: Share::ZERO };

fn subtract_cards(left: &mut [CardState], cards: &[CardShare]) {
    for card in cards {
        left[card.position].free -= card.share;
    }
}

/// Returns the sum over the target workload of the free GPU that each task cannot use, weighted by the task's part.
///
/// A task that does not fit the node (cards, CPU or model), or takes no GPU, can use none of it; any other task cannot
/// use cards with less free than its share. The sums are kept apart and added in a fixed order: published figures
/// depend on the last bit.
pub(super) fn fragmentation(target: &ScoringTarget, cards: &[CardState], cpus: MilliCpus) -> f64 {
    let all = f64::from(cards.iter().map(|card| card.free.0).sum::<u32>());
    let one_kind = cards.windows(2).all(|pair| pair[0].kind == pair[1].kind);
    let mut by_size = [(0_u32, 0.0_f64); MAX_SIZES];
    let few_sizes = target.sizes.len() <= MAX_SIZES;
    if few_sizes {
        for (entry, size) in by_size.iter_mut().zip(&target.sizes) {
            *entry = count_fitting(cards.iter(), size.0);
        }
    }

    let [mut neither, mut cpu_fits, mut cards_fit, mut host_fits, mut host_not, mut model_not] = [0.0; 6];
    for task in &target.tasks {
        let cpu = cpus.0 >= task.cpus;
        if task.gpus == 0 {
            *if cpu { &mut host_fits } else { &mut host_not } += task.part * all;
            continue;
        }
        let allowed = |card: &&CardState| task.allows(card.kind);
        let some_allowed = target.any_model
            || if one_kind {
                cards.first().is_some_and(|card| task.allows(card.kind))
            } else {
                cards.iter().any(|card| allowed(&card))
            };
        if !some_allowed {
            model_not += task.part * all;
            continue;
        }
        let (fitting, residues) = if few_sizes && (one_kind || target.any_model) {
            by_size[task.size]
        } else {
            count_fitting(cards.iter().filter(allowed), target.sizes[task.size].0)
        };
        match (fitting >= task.gpus, cpu) {
            (true, true) => cpu_fits += task.part * residues,
            (false, true) => cpu_fits += task.part * all,
            (true, false) => cards_fit += task.part * all,
            (false, false) => neither += task.part * all,
        }
    }
    neither + cpu_fits + cards_fit + host_fits + host_not + model_not
}

const MAX_SIZES: usize = 64;

/// Returns the number of cards with at least `size` free, and the free share of the others.
fn count_fitting<'a>(cards: impl Iterator<Item = &'a CardState>, size: u32) -> (u32, f64) {
    let (mut fitting, mut residues) = (0, 0);
    for card in cards {
        if card.free.0 >= size {
            fitting += 1;
        } else {
            residues += card.free.0;
        }
    }
    (fitting, f64::from(residues))
}

// least-fragmentation: the loss of a placement in thousandths of a GPU, as one sum.

/// Step in which losses are compared, in thousandths of a GPU: finer differences are noise, and equal scores go to the
/// lowest-numbered node, which keeps work together.
const SCORE_STEP: f64 = 10.0;

/// Part of a model's capacity from which on demand that names the model matters; below it is a tie-break.
const SCARCE_DEMAND: f64 = 0.40;
/// Steepness of that onset.
const PRESSURE_EXPONENT: f64 = 8.0;

/// Returns the loss of placing the class on these cards, negated and in steps: the highest is the best.
///
/// - **F**: growth of fragmentation, as in FGD.
/// - **S**: growth of the GPU share that is stranded because the CPUs left cannot feed it at the workload's ratio. If
///   tasks leave, CPUs are freed: S then counts less, the more of the demand is for several GPUs at once, which needs
///   empty nodes more than balanced ones.
/// - **V**: value of the card beyond the part that the task takes; see [`card_values`].
/// - **P**: demand for this model, for a task that may use several models. If tasks leave, only a truly scarce model is
///   kept free.
pub(super) fn least_fragmentation_score(
    target: &ScoringTarget,
    class: &RequestClass,
    state: &NodeState,
    cards: &[CardShare],
) -> i32 {
    let fragmented = fragmentation_after(target, class, state, cards) - state.fragmentation;
    let loss = fragmented
        + target.stranding_weight * stranding_growth(target, class, state, cards)
        + card_value_lost(target, state, cards)
        + pressure_on(target, class, state, cards);
    -((loss / SCORE_STEP).floor() as i32)
}

/// Returns the weight of S from the demand for several GPUs and the turnover.
fn stranding_weight(several_part: f64, turnover: f64) -> f64 {
    1.0 - turnover * (4.0 * several_part).min(1.0)
}

/// Returns the weight in P of the demand for a model, as a part of its capacity.
fn pressure_weight(demand: f64, turnover: f64) -> f64 {
    demand * (demand / SCARCE_DEMAND).powf(PRESSURE_EXPONENT * (1.0 + 2.0 * turnover)).min(1.0)
}

fn stranding_growth(target: &ScoringTarget, class: &RequestClass, state: &NodeState, cards: &[CardShare]) -> f64 {
    if target.cpus_per_gpu <= 0.0 {
        return 0.0;
    }
    let stranded = |free: u32, cpus: u64| (f64::from(free) - cpus as f64 / target.cpus_per_gpu).max(0.0);
    let taken: u32 = cards.iter().map(|card| card.share.0).sum();
    stranded(state.free - taken, state.cpus.0 - class.shape.cpus.0) - stranded(state.free, state.cpus.0)
}

fn card_value_lost(target: &ScoringTarget, state: &NodeState, cards: &[CardShare]) -> f64 {
    let [card] = cards else { return 0.0 };
    if card.share == Share::WHOLE || target.card_value.is_empty() {
        return 0.0;
    }
    let free = state.cards[card.position].free;
    target.card_value[free.0 as usize] - target.card_value[(free - card.share).0 as usize]
}

fn pressure_on(target: &ScoringTarget, class: &RequestClass, state: &NodeState, cards: &[CardShare]) -> f64 {
    if class.model_count < 2 {
        return 0.0;
    }
    let on = |card: &CardShare| target.pressure.get(state.cards[card.position].kind.0 as usize).copied().unwrap_or(0.0);
    cards.iter().map(|card| on(card) * f64::from(card.share.0)).sum()
}

// Values of partly used cards: the dual prices of packing the workload into the fewest cards.

const CARD_CAPACITY: usize = Share::WHOLE.0 as usize;
const TOLERANCE: f64 = 1e-9;
const MAX_ROUNDS: usize = 1_000;

/// Returns the value of a card with 0..=1000 thousandths free, in thousandths of an empty card; empty without demand.
///
/// `demand` is the number of card parts of each size. The linear program "the least number of cards whose patterns of
/// parts cover the demand" has a dual price for each size; the value of a card is the best pattern that still fits.
/// Solved by column generation: the simplex method over the known patterns, and a knapsack that finds the next one.
fn card_values(demand: &[(Share, f64)]) -> Vec<f64> {
    let demand: Vec<(usize, f64)> = demand
        .iter()
        .filter(|(size, count)| (1..=Share::WHOLE.0).contains(&size.0) && *count > 0.0)
        .map(|(size, count)| (size.0 as usize, *count))
        .collect();
    if demand.is_empty() {
        return Vec::new();
    }
    let sizes: Vec<usize> = demand.iter().map(|(size, _)| *size).collect();
    let mut simplex = SimplexSolver::new(&sizes, &demand.iter().map(|(_, count)| *count).collect::<Vec<_>>());
    for _ in 0..MAX_ROUNDS {
        let prices = simplex.dual_prices();
        if let Some(negative) = prices.iter().position(|price| *price < -TOLERANCE) {
            // Surplus of a size costs nothing, so its price cannot stay below zero.
            let mut surplus = vec![0.0; sizes.len()];
            surplus[negative] = -1.0;
            simplex.enter_column(&surplus, 0.0);
            continue;
        }
        let (worth, pattern) = best_pattern(&sizes, &prices);
        if worth <= 1.0 + TOLERANCE {
            break;
        }
        simplex.enter_column(&pattern, 1.0);
    }
    let prices: Vec<f64> = simplex.dual_prices().into_iter().map(|price| price.max(0.0)).collect();
    knapsack(&sizes, &prices).0.into_iter().map(|worth| 1000.0 * worth).collect()
}

/// Returns the value of every free share, and the part that was added last to reach it.
fn knapsack(sizes: &[usize], prices: &[f64]) -> (Vec<f64>, Vec<Option<usize>>) {
    let mut worth = vec![0.0; CARD_CAPACITY + 1];
    let mut last = vec![None; CARD_CAPACITY + 1];
    for free in 1..=CARD_CAPACITY {
        worth[free] = worth[free - 1];
        for (i, &size) in sizes.iter().enumerate().filter(|(_, size)| **size <= free) {
            let with = worth[free - size] + prices[i];
            if with > worth[free] + 1e-12 {
                worth[free] = with;
                last[free] = Some(i);
            }
        }
    }
    (worth, last)
}

fn best_pattern(sizes: &[usize], prices: &[f64]) -> (f64, Vec<f64>) {
    let (worth, last) = knapsack(sizes, prices);
    let mut pattern = vec![0.0; sizes.len()];
    let mut free = CARD_CAPACITY;
    while free > 0 {
        match last[free] {
            Some(i) => {
                pattern[i] += 1.0;
                free -= sizes[i];
            }
            None => free -= 1,
        }
    }
    (worth[CARD_CAPACITY], pattern)
}

/// Revised simplex method on `min Σ cost·x, patterns·x = demand, x ≥ 0`, with columns entering one at a time.
struct SimplexSolver {
    rows: usize,
    /// Inverse of the basis, row by row.
    inverse: Vec<f64>,
    costs: Vec<f64>,
    values: Vec<f64>,
}

impl SimplexSolver {
    /// Starts with one pattern per size: as many parts of the size as fit a card.
    fn new(sizes: &[usize], demand: &[f64]) -> Self {
        let rows = sizes.len();
        let mut inverse = vec![0.0; rows * rows];
        let mut values = vec![0.0; rows];
        for (i, &size) in sizes.iter().enumerate() {
            let parts = (CARD_CAPACITY / size) as f64;
            inverse[i * rows + i] = 1.0 / parts;
            values[i] = demand[i] / parts;
        }
        Self { rows, inverse, costs: vec![1.0; rows], values }
    }

    fn dual_prices(&self) -> Vec<f64> {
        let column = |j: usize| (0..self.rows).map(|i| self.costs[i] * self.inverse[i * self.rows + j]).sum();
        (0..self.rows).map(column).collect()
    }

    fn enter_column(&mut self, column: &[f64], cost: f64) {
        let row = |i: usize| &self.inverse[i * self.rows..(i + 1) * self.rows];
        let direction: Vec<f64> = (0..self.rows).map(|i| row(i).iter().zip(column).map(|(a, b)| a * b).sum()).collect();
        let ratios = (0..self.rows).filter(|&i| direction[i] > TOLERANCE);
        let Some(leaving) =
            ratios.min_by(|&a, &b| (self.values[a] / direction[a]).total_cmp(&(self.values[b] / direction[b])))
        else {
            return;
        };
        let step = self.values[leaving] / direction[leaving];
        let pivot: Vec<f64> = row(leaving).iter().map(|cell| cell / direction[leaving]).collect();
        for i in (0..self.rows).filter(|&i| i != leaving) {
            self.values[i] = (self.values[i] - step * direction[i]).max(0.0);
            for (cell, pivot) in self.inverse[i * self.rows..(i + 1) * self.rows].iter_mut().zip(&pivot) {
                *cell -= direction[i] * pivot;
            }
        }
        self.inverse[leaving * self.rows..(leaving + 1) * self.rows].copy_from_slice(&pivot);
        self.values[leaving] = step;
        self.costs[leaving] = cost;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_worth_half_a_card_each() {
        let values = card_values(&[(Share(500), 10.0)]);
        assert!((values[499] - 0.0).abs() < 1e-6);
        assert!((values[500] - 500.0).abs() < 1e-6);
        assert!((values[999] - 500.0).abs() < 1e-6);
        assert!((values[1000] - 1000.0).abs() < 1e-6);
    }

    #[test]
    fn a_size_that_pairs_with_a_common_one_is_priced_by_displacement() {
        // A card of 0.7 and 0.3 has full value, since demand for 0.3 is high; three parts of 0.3 fill a card.
        let values = card_values(&[(Share(700), 1.0), (Share(300), 100.0)]);
        assert!((values[300] - 1000.0 / 3.0).abs() < 1e-6, "{}", values[300]);
        assert!((values[700] - 2000.0 / 3.0).abs() < 1e-6, "{}", values[700]);
    }

    #[test]
    fn value_never_falls_as_more_is_free_and_an_empty_card_is_worth_one() {
        let demand: Vec<(Share, f64)> = (1..25).map(|i| (Share(i * 40), f64::from(i % 7 + 1))).collect();
        let values = card_values(&demand);
        assert!(values.is_sorted());
        assert!((values[1000] - 1000.0).abs() < 1e-3);
    }

    #[test]
    fn no_demand_has_no_values() {
        assert!(card_values(&[]).is_empty());
        assert!(card_values(&[(Share(0), 3.0), (Share(10), 0.0)]).is_empty());
    }
}

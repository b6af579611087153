//! Our own score: what a placement loses, in thousandths of a GPU, as one sum.

use crate::classes::Class;
use crate::units::Share;

use super::target::Target;
use super::{Card, State, fragmentation};

/// Losses are compared in steps of this many thousandths of a GPU: finer differences are noise, and equal scores go to
/// the lowest-numbered node, which keeps work together.
const STEP: f64 = 10.0;

/// Demand that names a model matters from about this part of the model's capacity on; below it is a tie-break.
const SOUGHT_AFTER: f64 = 0.40;
/// How sharply it starts to matter.
const SHARPNESS: f64 = 8.0;

/// The loss of placing the class on these cards, negated and in steps: the highest is the best.
///
/// - **F**: how much fragmentation grows, as in FGD.
/// - **S**: how much more GPU is stranded because the CPUs left cannot feed it at the workload's own ratio. Where tasks
///   leave, CPUs come back; the more of the demand is for several GPUs at once, which then need untouched nodes more
///   than balanced ones, the less S counts.
/// - **V**: how much of the card's value goes beyond what the task takes; see [`super::card_value`].
/// - **P**: for a task that may go to several models, how sought after this one is. Where tasks leave, only a model that
///   is truly scarce is kept free.
pub(super) fn score(target: &Target, class: &Class, state: &State, cards: &[Card]) -> i32 {
    let fragmented = fragmentation::after(target, class, state, cards) - state.fragmentation;
    let loss = fragmented
        + target.stranding_counts * stranded_more(target, class, state, cards)
        + value_lost(target, state, cards)
        + pressure(target, class, state, cards);
    -((loss / STEP).floor() as i32)
}

/// How much S counts, from the part of demand that is for several GPUs and the part of tasks that leave.
pub(super) fn stranding_counts(several_part: f64, turnover: f64) -> f64 {
    1.0 - turnover * (4.0 * several_part).min(1.0)
}

/// What demand for a model, as a part of its capacity, weighs in P.
pub(super) fn keeps_free(demand: f64, turnover: f64) -> f64 {
    demand * (demand / SOUGHT_AFTER).powf(SHARPNESS * (1.0 + 2.0 * turnover)).min(1.0)
}

fn stranded_more(target: &Target, class: &Class, state: &State, cards: &[Card]) -> f64 {
    if target.cpus_per_gpu <= 0.0 {
        return 0.0;
    }
    let stranded = |free: u32, cpus: u64| (f64::from(free) - cpus as f64 / target.cpus_per_gpu).max(0.0);
    let taken: u32 = cards.iter().map(|card| card.take.0).sum();
    stranded(state.free - taken, state.cpus.0 - class.shape.cpus.0) - stranded(state.free, state.cpus.0)
}

fn value_lost(target: &Target, state: &State, cards: &[Card]) -> f64 {
    let [card] = cards else { return 0.0 };
    if card.take == Share::WHOLE || target.card_value.is_empty() {
        return 0.0;
    }
    let free = state.cards[card.position].free;
    target.card_value[free.0 as usize] - target.card_value[(free - card.take).0 as usize]
}

fn pressure(target: &Target, class: &Class, state: &State, cards: &[Card]) -> f64 {
    if class.models < 2 {
        return 0.0;
    }
    let on = |card: &Card| target.pressure.get(state.cards[card.position].kind.0 as usize).copied().unwrap_or(0.0);
    cards.iter().map(|card| on(card) * f64::from(card.take.0)).sum()
}

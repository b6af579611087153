//! How much of a node's free GPU the workload to come cannot use: the F of FGD, and its score.

use crate::classes::Class;
use crate::units::MilliCpus;

use super::states::CardState;
use super::target::Target;
use super::{Card, State};

/// `floor(100·sigmoid((F_before − F_after)/1000))`: high where placing leaves little unusable.
pub(super) fn fgd(target: &Target, class: &Class, state: &State, cards: &[Card]) -> i32 {
    let change = state.fragmentation - after(target, class, state, cards);
    (100.0 / (1.0 + (-change / 1000.0).exp())).floor() as i32
}

/// Fragmentation of the state once the class is placed on these cards.
pub(super) fn after(target: &Target, class: &Class, state: &State, cards: &[Card]) -> f64 {
    let mut left: [CardState; MAX_CARDS] = [EMPTY; MAX_CARDS];
    let cpus = state.cpus - class.shape.cpus;
    if state.cards.len() > MAX_CARDS {
        let mut left = state.cards.to_vec();
        take(&mut left, cards);
        return fragmentation(target, &left, cpus);
    }
    let left = &mut left[..state.cards.len()];
    left.copy_from_slice(&state.cards);
    take(left, cards);
    fragmentation(target, left, cpus)
}

const MAX_CARDS: usize = 16;
const EMPTY: CardState = CardState { kind: crate::inventory::KindId(0), free: crate::Share::ZERO };

fn take(left: &mut [CardState], cards: &[Card]) {
    for card in cards {
        left[card.position].free -= card.take;
    }
}

/// Σ over the target workload of what of the node's free GPU each task cannot use, weighted by the task's part.
///
/// A task that does not fit the node (cards, CPU or model), or takes no GPU, can use none of it; else it cannot use cards
/// with less free than its share. The sums are kept apart and added in a fixed order: published figures depend on the
/// last bit.
pub(super) fn fragmentation(target: &Target, cards: &[CardState], cpus: MilliCpus) -> f64 {
    let all = f64::from(cards.iter().map(|card| card.free.0).sum::<u32>());
    let one_kind = cards.windows(2).all(|pair| pair[0].kind == pair[1].kind);
    let mut by_size = [(0_u32, 0.0_f64); MAX_SIZES];
    let few_sizes = target.sizes.len() <= MAX_SIZES;
    if few_sizes {
        for (entry, size) in by_size.iter_mut().zip(&target.sizes) {
            *entry = usable(cards.iter(), size.0);
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
            usable(cards.iter().filter(allowed), target.sizes[task.size].0)
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

/// How many cards have at least `size` free, and what is free on the others.
fn usable<'a>(cards: impl Iterator<Item = &'a CardState>, size: u32) -> (u32, f64) {
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

//! The states nodes are in, each kept once.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};

use crate::inventory::{KindId, ShapeId};
use crate::units::{MilliCpus, Share};

use super::fragmentation::fragmentation;
use super::target::Target;

/// A state's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StateId(pub u32);

impl StateId {
    pub const NONE: Self = Self(0);
}

/// A card of a node, as far as scores see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CardState {
    pub kind: KindId,
    pub free: Share,
}

/// Everything about a node that scores see.
#[derive(Debug)]
pub(super) struct State {
    pub shape: ShapeId,
    pub cpus: MilliCpus,
    /// By kind, then the least free first.
    pub cards: Box<[CardState]>,
    /// Free thousandths of all cards.
    pub free: u32,
    /// How fragmented it is.
    pub fragmentation: f64,
}

impl State {
    /// Where a card like this is.
    pub fn position_of(&self, kind: KindId, free: Share) -> Option<usize> {
        self.cards.binary_search(&CardState { kind, free }).ok()
    }
}

/// All states met.
#[derive(Debug, Default)]
pub(super) struct States {
    states: Vec<State>,
    /// Looked up only, never walked.
    known: HashMap<Box<[u64]>, StateId, BuildHasherDefault<DefaultHasher>>,
    key: Vec<u64>,
    cards: Vec<CardState>,
}

impl States {
    pub fn len(&self) -> usize {
        self.states.len()
    }

    pub fn clear(&mut self) {
        self.states.clear();
        self.known.clear();
    }

    pub fn get(&self, id: StateId) -> &State {
        &self.states[id.0 as usize]
    }

    /// The state with these cards.
    pub fn intern(
        &mut self,
        shape: ShapeId,
        cpus: MilliCpus,
        cards: impl Iterator<Item = (KindId, Share)>,
        target: &Target,
    ) -> StateId {
        self.cards.clear();
        self.cards.extend(cards.map(|(kind, free)| CardState { kind, free }));
        self.cards.sort_unstable();
        self.key.clear();
        self.key.extend([u64::from(shape.0), cpus.0]);
        self.key.extend(self.cards.iter().map(|card| u64::from(card.kind.0) << 32 | u64::from(card.free.0)));
        if let Some(&id) = self.known.get(self.key.as_slice()) {
            return id;
        }
        let mut state = State {
            shape,
            cpus,
            cards: self.cards.as_slice().into(),
            free: self.cards.iter().map(|card| card.free.0).sum(),
            fragmentation: 0.0,
        };
        state.fragmentation = fragmentation(target, &state.cards, cpus);
        let id = StateId(self.states.len() as u32);
        self.states.push(state);
        self.known.insert(self.key.as_slice().into(), id);
        id
    }
}

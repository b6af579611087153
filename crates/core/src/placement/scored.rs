//! Strategies that score whole nodes: `paper-best-fit`, `fgd` and `least-fragmentation`.
//!
//! A score depends on the state of a node (free CPU and the free share of each card) and on the class of the request.
//! Many nodes are in the same state and most decisions change one node only, so scores are cached per class and state:
//! a decision looks up each node once and computes only scores of new states.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};

use crate::classes::{DeviceNeed, RequestClass};
use crate::ids::NodeId;
use crate::inventory::{DeviceInventory, DeviceKindId, NodeShapeId};
use crate::request::PlacementStrategy;
use crate::units::{MilliCpus, Share};
use crate::workload::WorkloadEstimate;

use super::fragmentation::{self, ScoringTarget};
use super::{PlacementChoice, PlacementSearch};

/// Score that is not computed yet.
const UNKNOWN_SCORE: i32 = i32::MIN;
/// Score of a state in which the class does not fit.
const NO_FIT: i32 = i32::MIN + 1;
/// Shape of a vacant node number, which hosts no class.
const NO_SHAPE: NodeShapeId = NodeShapeId(u32::MAX);
/// States per node up to which unused states are retained.
const STATES_PER_NODE: usize = 16;

/// Data cached between decisions.
#[derive(Debug, Default)]
pub(crate) struct NodeScorer {
    /// Versions of facts, workload and classes for which the data was computed.
    built_for: Option<(u64, u64, u64)>,
    states: NodeStateTable,
    node_states: Vec<NodeStateId>,
    /// Free host memory of each node, which is checked beside the score.
    memory_free: Vec<u64>,
    /// Score of each state, per strategy and class.
    scores: [Vec<Vec<i32>>; 3],
    target: ScoringTarget,
}

impl NodeScorer {
    fn refresh(&mut self, inventory: &mut DeviceInventory, workload: &WorkloadEstimate, classes_generation: u64) {
        let version = (inventory.version, workload.version, classes_generation);
        if self.built_for != Some(version) {
            let target_is_stale =
                self.built_for.is_none_or(|(facts, tasks, _)| (facts, tasks) != (version.0, version.1));
            if target_is_stale {
                self.target = ScoringTarget::new(workload, inventory);
            }
            self.built_for = Some(version);
            self.rebuild(inventory);
        } else if self.states.len() > STATES_PER_NODE * inventory.nodes.len() + 1024 {
            self.rebuild(inventory);
        }
        while let Some(node) = inventory.pop_changed_node() {
            self.refresh_node(node, inventory);
        }
    }

    fn rebuild(&mut self, inventory: &DeviceInventory) {
        self.states.clear();
        self.scores = Default::default();
        let vacant = self.states.intern(NO_SHAPE, MilliCpus::ZERO, std::iter::empty(), &self.target);
        self.node_states = vec![vacant; inventory.nodes.span() as usize];
        self.memory_free = vec![0; inventory.nodes.span() as usize];
        for (number, _) in inventory.nodes.iter() {
            self.refresh_node(NodeId(number), inventory);
        }
    }

    fn refresh_node(&mut self, node: NodeId, inventory: &DeviceInventory) {
        let slot = inventory.node(node);
        let cards = slot.devices.iter().map(|device| {
            let slot = inventory.device(*device);
            (slot.kind, slot.free_share())
        });
        self.node_states[node.index()] = self.states.intern(slot.shape, slot.cpus_free(), cards, &self.target);
        self.memory_free[node.index()] = slot.memory_free().0;
    }

    /// Returns the score of a class in a state.
    fn score(&self, class: &RequestClass, state: &NodeState) -> i32 {
        if !class.fits_shape(state.shape) || class.shape.cpus > state.cpus {
            return NO_FIT;
        }
        let fitting = state.cards.iter().enumerate().filter_map(|(position, card)| {
            let need = class.need_on(card.kind)?;
            (card.free >= need.share).then_some(CardShare { position, share: need.share })
        });
        match usize::from(class.shape.gpus) {
            0 => self.score_cards(class, state, &[]),
            1 => {
                // Equal cards have equal scores, so only the first of them is scored.
                let is_first = |at: usize| at == 0 || state.cards[at - 1] != state.cards[at];
                let distinct = fitting.filter(|card| is_first(card.position));
                distinct.map(|card| self.score_cards(class, state, &[card])).max().unwrap_or(NO_FIT)
            }
            // Least free first.
            gpus => match fitting.take(gpus).collect::<Vec<CardShare>>() {
                cards if cards.len() == gpus => self.score_cards(class, state, &cards),
                _ => NO_FIT,
            },
        }
    }

    /// Returns the score of a class in a state on given cards.
    fn score_cards(&self, class: &RequestClass, state: &NodeState, cards: &[CardShare]) -> i32 {
        match class.shape.strategy {
            PlacementStrategy::PaperBestFit => paper_best_fit_score(class, state, cards),
            PlacementStrategy::Fgd => fragmentation::fgd_score(&self.target, class, state, cards),
            _ => fragmentation::least_fragmentation_score(&self.target, class, state, cards),
        }
    }
}

/// Position of a card in a node state, and the share a class would take of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CardShare {
    pub position: usize,
    pub share: Share,
}

/// Returns `floor(100·(1 − (ΔCPU/128000 + ΔGPU/8000)/2))`, where Δ is the rest of the whole node after placing.
fn paper_best_fit_score(class: &RequestClass, state: &NodeState, cards: &[CardShare]) -> i32 {
    let taken: u32 = cards.iter().map(|card| card.share.0).sum();
    let cpus_left = (state.cpus.0 - class.shape.cpus.0) as f64;
    let gpus_left = f64::from(state.free - taken);
    (100.0 * (1.0 - (0.5 * cpus_left / 128_000.0 + 0.5 * gpus_left / 8_000.0))).floor() as i32
}

impl PlacementSearch<'_> {
    /// Updates the scorer; required before [`PlacementSearch::find`] with a scored strategy.
    pub fn refresh_scores(&mut self, workload: &WorkloadEstimate, classes_generation: u64) {
        self.scorer.refresh(self.inventory, workload, classes_generation);
    }

    /// Returns a placement on the node with the best score; ties go to the lowest-numbered node.
    pub(super) fn find_best_scored(&mut self, wanted: &impl Fn(&DeviceNeed) -> bool) -> Option<PlacementChoice> {
        let mut rejected: Vec<NodeId> = Vec::new();
        loop {
            let node = self.best_node(&rejected)?;
            match self.place_on(node, wanted) {
                Some(place) => return Some(place),
                // The score ignores thresholds, foreign memory and reservations: try the next best node.
                None => rejected.push(node),
            }
        }
    }

    fn best_node(&mut self, rejected: &[NodeId]) -> Option<NodeId> {
        let slot = match self.class.shape.strategy {
            PlacementStrategy::PaperBestFit => 0,
            PlacementStrategy::Fgd => 1,
            _ => 2,
        };
        let number = self.id.0 as usize;
        if self.scorer.scores[slot].len() <= number {
            self.scorer.scores[slot].resize_with(number + 1, Vec::new);
        }
        let mut scores = std::mem::take(&mut self.scorer.scores[slot][number]);
        scores.resize(self.scorer.states.len(), UNKNOWN_SCORE);
        let memory = self.class.shape.host_memory.0;
        let (mut best, mut best_score) = (None, NO_FIT);
        for (node, (&state, &memory_free)) in self.scorer.node_states.iter().zip(&self.scorer.memory_free).enumerate() {
            let mut score = scores[state.0 as usize];
            if score == UNKNOWN_SCORE {
                score = self.scorer.score(self.class, self.scorer.states.get(state));
                scores[state.0 as usize] = score;
            }
            if score > best_score && memory <= memory_free && !rejected.contains(&NodeId(node as u32)) {
                (best, best_score) = (Some(NodeId(node as u32)), score);
            }
        }
        self.scorer.scores[slot][number] = scores;
        best
    }

    fn place_on(&self, node: NodeId, wanted: &impl Fn(&DeviceNeed) -> bool) -> Option<PlacementChoice> {
        let slot = self.inventory.node(node);
        if !self.host_fits(slot) || !slot.up {
            return None;
        }
        let gpus = self.class.shape.gpus;
        if gpus == 0 {
            return Some(PlacementChoice { node, promises: Vec::new() });
        }
        if gpus > 1 {
            return self.promise_devices(&self.closest_on_node(node, wanted)?);
        }
        let state = self.scorer.states.get(self.scorer.node_states[node.index()]);
        let fitting = slot.devices.iter().filter_map(|&device| {
            let device_slot = self.inventory.device(device);
            let need =
                self.class.need_on(device_slot.kind).filter(|need| wanted(need) && self.device_fits(device, need))?;
            let position = state.position_of(device_slot.kind, device_slot.free_share())?;
            Some((device, CardShare { position, share: need.share }))
        });
        // The paper's BestFit scores nodes only and takes the tightest card; the other strategies score every card.
        let rank = |card: CardShare| match self.class.shape.strategy {
            PlacementStrategy::PaperBestFit => -i64::from(state.cards[card.position].free.0),
            _ => i64::from(self.scorer.score_cards(self.class, state, &[card])),
        };
        let best = fitting.map(|(device, card)| (rank(card), Reverse(device))).max();
        self.promise_devices(&[best?.1.0])
    }
}

// Node states, each stored once.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NodeStateId(pub u32);

/// Kind and free share of a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CardState {
    pub kind: DeviceKindId,
    pub free: Share,
}

/// Properties of a node that scores depend on.
#[derive(Debug)]
pub(super) struct NodeState {
    pub shape: NodeShapeId,
    pub cpus: MilliCpus,
    /// Cards by kind, then the least free first.
    pub cards: Box<[CardState]>,
    /// Free thousandths over all cards.
    pub free: u32,
    pub fragmentation: f64,
}

impl NodeState {
    /// Returns the position of an equal card.
    pub fn position_of(&self, kind: DeviceKindId, free: Share) -> Option<usize> {
        self.cards.binary_search(&CardState { kind, free }).ok()
    }
}

/// All known node states.
#[derive(Debug, Default)]
struct NodeStateTable {
    states: Vec<NodeState>,
    /// Only for lookups, never iterated.
    ids_by_key: HashMap<Box<[u64]>, NodeStateId, BuildHasherDefault<DefaultHasher>>,
    key: Vec<u64>,
    cards: Vec<CardState>,
}

impl NodeStateTable {
    pub fn len(&self) -> usize {
        self.states.len()
    }

    pub fn clear(&mut self) {
        self.states.clear();
        self.ids_by_key.clear();
    }

    pub fn get(&self, id: NodeStateId) -> &NodeState {
        &self.states[id.0 as usize]
    }

    /// Returns the state with these cards, adding it if it is new.
    pub fn intern(
        &mut self,
        shape: NodeShapeId,
        cpus: MilliCpus,
        cards: impl Iterator<Item = (DeviceKindId, Share)>,
        target: &ScoringTarget,
    ) -> NodeStateId {
        self.cards.clear();
        self.cards.extend(cards.map(|(kind, free)| CardState { kind, free }));
        self.cards.sort_unstable();
        self.key.clear();
        self.key.extend([u64::from(shape.0), cpus.0]);
        self.key.extend(self.cards.iter().map(|card| u64::from(card.kind.0) << 32 | u64::from(card.free.0)));
        if let Some(&id) = self.ids_by_key.get(self.key.as_slice()) {
            return id;
        }
        let mut state = NodeState {
            shape,
            cpus,
            cards: self.cards.as_slice().into(),
            free: self.cards.iter().map(|card| card.free.0).sum(),
            fragmentation: 0.0,
        };
        state.fragmentation = fragmentation::fragmentation(target, &state.cards, cpus);
        let id = NodeStateId(self.states.len() as u32);
        self.states.push(state);
        self.ids_by_key.insert(self.key.as_slice().into(), id);
        id
    }
}

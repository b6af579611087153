//! Who waits, in which order. Deciding who may go is [`crate::pool`]'s.
//!
//! Requests of one class and one owner form a *lane*: they want the same, so if the first of them cannot go, none can.
//! A pass over the queue therefore looks at lanes, not at requests.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::classes::ClassId;
use crate::ids::LeaseId;
use crate::owners::OwnerId;

/// A lane's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LaneId(u32);

/// Where a lane's first request comes: higher priority, then fairness among owners, then the order of arrival.
pub(crate) type LaneKey = (Reverse<i32>, (u64, u64), u64, LaneId);

/// Where a request comes within its lane.
type Place = (Reverse<i32>, u64);

/// Requests of one class and one owner.
#[derive(Debug)]
pub(crate) struct Lane {
    pub class: ClassId,
    pub owner: OwnerId,
    waiting: BTreeMap<Place, LeaseId>,
    fair: (u64, u64),
}

impl Lane {
    /// Who is first in it.
    pub fn head(&self) -> Option<LeaseId> {
        self.waiting.first_key_value().map(|(_, lease)| *lease)
    }

    fn key(&self, id: LaneId) -> Option<LaneKey> {
        self.waiting.first_key_value().map(|((priority, seq), _)| (*priority, self.fair, *seq, id))
    }
}

/// Everybody who waits.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    lanes: Vec<Option<Lane>>,
    free: Vec<LaneId>,
    by_wish: BTreeMap<(OwnerId, ClassId), LaneId>,
    order: BTreeSet<LaneKey>,
    len: usize,
}

impl Queue {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn push(&mut self, lease: LeaseId, wish: (OwnerId, ClassId), priority: i32, seq: u64, fair: (u64, u64)) {
        let (owner, class) = wish;
        let id = *self.by_wish.entry(wish).or_insert_with(|| {
            let lane = Lane { class, owner, waiting: BTreeMap::new(), fair };
            match self.free.pop() {
                Some(id) => {
                    self.lanes[id.0 as usize] = Some(lane);
                    id
                }
                None => {
                    self.lanes.push(Some(lane));
                    LaneId(self.lanes.len() as u32 - 1)
                }
            }
        });
        self.change(id, |lane| {
            lane.waiting.insert((Reverse(priority), seq), lease);
        });
        self.len += 1;
    }

    pub fn remove(&mut self, wish: (OwnerId, ClassId), priority: i32, seq: u64) {
        let Some(&id) = self.by_wish.get(&wish) else { return };
        let removed = self.change(id, |lane| lane.waiting.remove(&(Reverse(priority), seq)).is_some());
        self.len -= usize::from(removed);
        if self.lane(id).waiting.is_empty() {
            self.by_wish.remove(&wish);
            self.lanes[id.0 as usize] = None;
            self.free.push(id);
        }
    }

    /// Puts an owner's lanes where its books now say.
    pub fn set_fair(&mut self, owner: OwnerId, fair: (u64, u64)) {
        let lanes = self.by_wish.range((owner, ClassId(0))..=(owner, ClassId(u32::MAX)));
        for id in lanes.map(|(_, id)| *id).collect::<Vec<_>>() {
            self.change(id, |lane| lane.fair = fair);
        }
    }

    /// The lane after `key`, or the first.
    pub fn next(&self, key: Option<LaneKey>) -> Option<LaneKey> {
        match key {
            None => self.order.first().copied(),
            Some(key) => self.order.range((std::ops::Bound::Excluded(key), std::ops::Bound::Unbounded)).next().copied(),
        }
    }

    pub fn lane(&self, id: LaneId) -> &Lane {
        match &self.lanes[id.0 as usize] {
            Some(lane) => lane,
            None => unreachable!("a lane is kept while somebody waits in it"),
        }
    }

    /// Lanes in order.
    pub fn lanes(&self) -> impl Iterator<Item = &Lane> {
        self.order.iter().map(|key| self.lane(key.3))
    }

    /// Lanes whose first request comes before a newcomer with these terms.
    pub fn lanes_ahead(&self, priority: i32, fair: (u64, u64)) -> impl Iterator<Item = &Lane> {
        let end = (Reverse(priority), fair, u64::MAX, LaneId(u32::MAX));
        self.order.range(..=end).map(|key| self.lane(key.3))
    }

    /// How many wait before this request.
    pub fn ahead_of(&self, wish: (OwnerId, ClassId), priority: i32, seq: u64) -> usize {
        let Some(own) = self.by_wish.get(&wish).map(|id| self.lane(*id)) else { return 0 };
        let ahead = |lane: &Lane| {
            let before = match lane.fair.cmp(&own.fair) {
                std::cmp::Ordering::Less => (Reverse(priority), u64::MAX),
                std::cmp::Ordering::Equal => (Reverse(priority), seq),
                std::cmp::Ordering::Greater => (Reverse(priority), 0),
            };
            lane.waiting.range(..before).count()
        };
        self.lanes().map(ahead).sum()
    }

    fn change<R>(&mut self, id: LaneId, change: impl FnOnce(&mut Lane) -> R) -> R {
        let Some(lane) = &mut self.lanes[id.0 as usize] else {
            unreachable!("a lane is kept while somebody waits in it")
        };
        let before = lane.key(id);
        let result = change(lane);
        let after = lane.key(id);
        if before != after {
            if let Some(before) = before {
                self.order.remove(&before);
            }
            self.order.extend(after);
        }
        result
    }
}

//! The queue, the needs of its requests, and the owner accounts behind quotas and fair share. [`crate::pool`] decides
//! which request is served.
//!
//! Requests of one class and one owner form a *lane*: their needs are equal, so if the first of them cannot be placed,
//! none can. A pass over the queue therefore visits lanes, not requests.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::ops::Bound;
use std::sync::Arc;

use crate::classes::{RequestClassId, RequestShape};
use crate::ids::LeaseId;
use crate::inventory::ForeignLoadLevels;
use crate::policy::{OwnerQuota, Policies, QueueOrder};
use crate::request::LoadThresholds;
use crate::row::UsageRow;
use crate::units::{Millis, PoolTime, Share};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueueLaneId(u32);

/// Properties that all requests of a lane share.
pub(crate) type LaneKey = (OwnerId, RequestClassId);

/// Rank of a lane by its first request: higher priority, then fairness among owners, then order of arrival.
pub(crate) type LaneRank = (Reverse<i32>, (u64, u64), u64, QueueLaneId);

/// Position of a request in its lane.
type LanePosition = (Reverse<i32>, u64);

/// Requests of one class and one owner.
#[derive(Debug)]
pub(crate) struct QueueLane {
    pub class: RequestClassId,
    pub owner: OwnerId,
    waiting: BTreeMap<LanePosition, LeaseId>,
    fairness: (u64, u64),
}

impl QueueLane {
    /// Returns the first lease of the lane.
    pub fn head(&self) -> Option<LeaseId> {
        self.waiting.first_key_value().map(|(_, lease)| *lease)
    }

    fn rank(&self, id: QueueLaneId) -> Option<LaneRank> {
        self.waiting.first_key_value().map(|((priority, seq), _)| (*priority, self.fairness, *seq, id))
    }
}

#[derive(Debug, Default)]
pub(crate) struct RequestQueue {
    lanes: Vec<Option<QueueLane>>,
    free: Vec<QueueLaneId>,
    lanes_by_key: BTreeMap<LaneKey, QueueLaneId>,
    ranks: BTreeSet<LaneRank>,
    len: usize,
}

impl RequestQueue {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn push(&mut self, lease: LeaseId, lane_key: LaneKey, priority: i32, seq: u64, fairness: (u64, u64)) {
        let (owner, class) = lane_key;
        let id = *self.lanes_by_key.entry(lane_key).or_insert_with(|| {
            let lane = QueueLane { class, owner, waiting: BTreeMap::new(), fairness };
            match self.free.pop() {
                Some(id) => {
                    self.lanes[id.0 as usize] = Some(lane);
                    id
                }
                None => {
                    self.lanes.push(Some(lane));
                    QueueLaneId(self.lanes.len() as u32 - 1)
                }
            }
        });
        self.update_lane(id, |lane| {
            lane.waiting.insert((Reverse(priority), seq), lease);
        });
        self.len += 1;
    }

    pub fn remove(&mut self, lane_key: LaneKey, priority: i32, seq: u64) {
        let Some(&id) = self.lanes_by_key.get(&lane_key) else { return };
        let removed = self.update_lane(id, |lane| lane.waiting.remove(&(Reverse(priority), seq)).is_some());
        self.len -= usize::from(removed);
        if self.lane(id).waiting.is_empty() {
            self.lanes_by_key.remove(&lane_key);
            self.lanes[id.0 as usize] = None;
            self.free.push(id);
        }
    }

    /// Changes the priority of a waiting request, and returns whether this changed the rank of its lane.
    pub fn set_priority(&mut self, lane_key: LaneKey, seq: u64, before: i32, after: i32) -> bool {
        let Some(&id) = self.lanes_by_key.get(&lane_key) else { return false };
        let rank = self.lane(id).rank(id);
        self.update_lane(id, |lane| {
            let lease = lane.waiting.remove(&(Reverse(before), seq));
            lane.waiting.extend(lease.map(|lease| ((Reverse(after), seq), lease)));
        });
        self.lane(id).rank(id) != rank
    }

    /// Moves an owner's lanes to its current fairness.
    pub fn set_fairness(&mut self, owner: OwnerId, fairness: (u64, u64)) {
        let lanes = self.lanes_by_key.range((owner, RequestClassId(0))..=(owner, RequestClassId(u32::MAX)));
        for id in lanes.map(|(_, id)| *id).collect::<Vec<_>>() {
            self.update_lane(id, |lane| lane.fairness = fairness);
        }
    }

    /// Returns the lane after `key`, or the first lane.
    pub fn next_lane(&self, key: Option<LaneRank>) -> Option<LaneRank> {
        match key {
            None => self.ranks.first().copied(),
            Some(key) => self.ranks.range((Bound::Excluded(key), Bound::Unbounded)).next().copied(),
        }
    }

    pub fn lane(&self, id: QueueLaneId) -> &QueueLane {
        match &self.lanes[id.0 as usize] {
            Some(lane) => lane,
            None => unreachable!("a lane exists while it has waiters"),
        }
    }

    pub fn lanes(&self) -> impl Iterator<Item = &QueueLane> {
        self.ranks.iter().map(|key| self.lane(key.3))
    }

    /// Returns the lanes whose first request precedes a new one with this rank.
    pub fn lanes_ahead(&self, priority: i32, fairness: (u64, u64)) -> impl Iterator<Item = &QueueLane> {
        let end = (Reverse(priority), fairness, u64::MAX, QueueLaneId(u32::MAX));
        self.ranks.range(..=end).map(|key| self.lane(key.3))
    }

    /// Returns the number of requests that precede this one.
    pub fn count_ahead_of(&self, lane_key: LaneKey, priority: i32, seq: u64) -> usize {
        let Some(own) = self.lanes_by_key.get(&lane_key).map(|id| self.lane(*id)) else { return 0 };
        let ahead = |lane: &QueueLane| {
            let before = match lane.fairness.cmp(&own.fairness) {
                Ordering::Less => (Reverse(priority), u64::MAX),
                Ordering::Equal => (Reverse(priority), seq),
                Ordering::Greater => (Reverse(priority), 0),
            };
            lane.waiting.range(..before).count()
        };
        self.lanes().map(ahead).sum()
    }

    fn update_lane<R>(&mut self, id: QueueLaneId, change: impl FnOnce(&mut QueueLane) -> R) -> R {
        let Some(lane) = &mut self.lanes[id.0 as usize] else { unreachable!("a lane exists while it has waiters") };
        let before = lane.rank(id);
        let result = change(lane);
        let after = lane.rank(id);
        if before != after {
            if let Some(before) = before {
                self.ranks.remove(&before);
            }
            self.ranks.extend(after);
        }
        result
    }
}

/// Combined needs of all waiting requests: a reading triggers a pass only if it may matter to one of them.
#[derive(Debug, Default)]
pub(crate) struct WaitingNeeds {
    /// Requests that may start even if all GPUs are reserved: they need none, or are certain to end.
    pub gpu_optional: usize,
    /// Classes with waiters.
    pub classes: usize,
    /// Classes without GPUs.
    pub host_only: usize,
    /// Classes that need host resources.
    hosts: usize,
    /// Classes that name an amount of device memory.
    memory: usize,
    /// Smallest share that a class may take of a device, with the number of such classes.
    shares: BTreeMap<Share, usize>,
    /// Thresholds, with the number of classes that have them.
    thresholds: BTreeMap<LoadThresholds, usize>,
}

/// Distinct thresholds up to which each is compared when foreign load changes.
const MAX_THRESHOLDS_COMPARED: usize = 64;

impl WaitingNeeds {
    /// Adds a class of this shape that got its first waiter.
    pub fn add(&mut self, shape: &RequestShape) {
        self.classes += 1;
        self.host_only += usize::from(shape.gpus == 0);
        self.hosts += usize::from(shape.needs_host());
        self.memory += usize::from(shape.names_memory());
        *self.shares.entry(shape.least_share()).or_default() += 1;
        if let Some(thresholds) = shape.thresholds {
            *self.thresholds.entry(thresholds).or_default() += 1;
        }
    }

    /// Removes a class of this shape that lost its last waiter.
    pub fn remove(&mut self, shape: &RequestShape) {
        self.classes -= 1;
        self.host_only -= usize::from(shape.gpus == 0);
        self.hosts -= usize::from(shape.needs_host());
        self.memory -= usize::from(shape.names_memory());
        count_down(&mut self.shares, shape.least_share());
        if let Some(thresholds) = shape.thresholds {
            count_down(&mut self.thresholds, thresholds);
        }
    }

    /// Whether some class may fit in this free share of a device.
    pub fn fit_free_share(&self, free: Share) -> bool {
        !free.is_zero() && self.shares.first_key_value().is_some_and(|(least, _)| *least <= free)
    }

    pub fn include_hosts(&self) -> bool {
        self.hosts > 0
    }

    pub fn include_memory(&self) -> bool {
        self.memory > 0
    }

    pub fn have_thresholds(&self) -> bool {
        !self.thresholds.is_empty()
    }

    /// Whether a change of foreign load crosses a threshold of a waiting class.
    pub fn has_threshold_between(&self, before: ForeignLoadLevels, after: ForeignLoadLevels) -> bool {
        let mut thresholds = self.thresholds.keys();
        self.thresholds.len() > MAX_THRESHOLDS_COMPARED
            || thresholds.any(|thresholds| before.are_below(*thresholds) != after.are_below(*thresholds))
    }
}

fn count_down<K: Ord>(counts: &mut BTreeMap<K, usize>, key: K) {
    if let Entry::Occupied(mut count) = counts.entry(key) {
        *count.get_mut() -= 1;
        if *count.get() == 0 {
            count.remove();
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct OwnerId(pub u32);

#[derive(Debug, Clone)]
pub(crate) struct OwnerAccount {
    pub name: Arc<str>,
    /// Share held now, over all devices. Draining devices are not held.
    pub held: u64,
    period: u64,
    /// Thousandths × milliseconds used in the period, up to `settled_at`.
    used: u64,
    settled_at: PoolTime,
}

/// Limit of a quota that holds back an owner's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QuotaExcess {
    /// The owner holds its whole quota.
    Held,
    /// The GPU-hours of the period are used up until this time.
    ShareHours { until: PoolTime },
}

const HOUR_MILLIS: u64 = 3_600_000;

impl OwnerAccount {
    fn settle(&mut self, now: PoolTime, period: Millis) {
        let current = now.0 / period.0.max(1);
        if current != self.period {
            self.period = current;
            self.used = 0;
            self.settled_at = PoolTime(current.saturating_mul(period.0)).max(self.settled_at);
        }
        self.used = self.used.saturating_add(self.held.saturating_mul(now.since(self.settled_at).0));
        self.settled_at = now.max(self.settled_at);
    }

    /// Returns the account as of now. The stored account changes only together with a committed row, so that reading it
    /// never makes it differ from a restored one.
    fn settled(&self, now: PoolTime, period: Millis) -> Self {
        let mut account = self.clone();
        account.settle(now, period);
        account
    }

    /// Returns the limit of the quota that forbids holding `more`.
    pub fn quota_excess(&self, quota: &OwnerQuota, more: Share, now: PoolTime, period: Millis) -> Option<QuotaExcess> {
        if more.is_zero() {
            return None;
        }
        if quota.held.is_some_and(|most| self.held + u64::from(more.0) > u64::from(most.0)) {
            return Some(QuotaExcess::Held);
        }
        let budget = quota.share_hours?;
        let account = self.settled(now, period);
        let until = PoolTime(account.period.saturating_add(1).saturating_mul(period.0));
        (account.used >= budget.saturating_mul(HOUR_MILLIS)).then_some(QuotaExcess::ShareHours { until })
    }

    /// Returns the time at which the GPU-hours are used up at the current rate. From then on the owner's waiters claim
    /// nothing, which may let others start.
    pub fn exhausted_at(&self, quota: &OwnerQuota, now: PoolTime, period: Millis) -> Option<PoolTime> {
        let budget = quota.share_hours.filter(|_| self.held > 0)?.saturating_mul(HOUR_MILLIS);
        let left = budget.saturating_sub(self.settled(now, period).used);
        Some(now.after(Millis(left.div_ceil(self.held))))
    }

    /// Returns the use of this period up to the last settlement.
    pub fn row(&self) -> UsageRow {
        UsageRow { owner: self.name.clone(), period: self.period, share_millis: self.used, settled_at: self.settled_at }
    }
}

#[derive(Debug, Default)]
pub(crate) struct OwnerAccounts {
    by_name: BTreeMap<Arc<str>, OwnerId>,
    accounts: Vec<OwnerAccount>,
}

impl OwnerAccounts {
    pub fn get_or_open(&mut self, name: &Arc<str>, now: PoolTime) -> OwnerId {
        if let Some(&id) = self.by_name.get(name) {
            return id;
        }
        let id = OwnerId(self.accounts.len() as u32);
        self.by_name.insert(name.clone(), id);
        self.accounts.push(OwnerAccount { name: name.clone(), held: 0, period: 0, used: 0, settled_at: now });
        id
    }

    /// Removes an account that was opened last.
    pub fn close_newest(&mut self, id: OwnerId) {
        if let Some(account) = self.accounts.pop_if(|_| id.0 as usize + 1 == self.by_name.len()) {
            self.by_name.remove(&account.name);
        }
    }

    pub fn find(&self, name: &str) -> Option<OwnerId> {
        self.by_name.get(name).copied()
    }

    pub fn get(&self, id: OwnerId) -> &OwnerAccount {
        &self.accounts[id.0 as usize]
    }

    pub fn get_mut(&mut self, id: OwnerId) -> &mut OwnerAccount {
        &mut self.accounts[id.0 as usize]
    }

    pub fn accounts(&self) -> &[OwnerAccount] {
        &self.accounts
    }

    /// Changes an owner's held share and settles its use up to now.
    pub fn set_held(
        &mut self,
        id: OwnerId,
        now: PoolTime,
        period: Millis,
        change: impl FnOnce(u64) -> u64,
    ) -> UsageRow {
        let account = &mut self.accounts[id.0 as usize];
        account.settle(now, period);
        account.held = change(account.held);
        account.row()
    }

    /// Restores an account from its row. A time ahead of now would suspend counting until then, so it is capped.
    pub fn restore(&mut self, row: &UsageRow, now: PoolTime) {
        let id = self.get_or_open(&row.owner, now);
        let account = &mut self.accounts[id.0 as usize];
        (account.period, account.used, account.settled_at) = (row.period, row.share_millis, row.settled_at.min(now));
    }

    /// Returns the rank of an owner's requests among those of equal priority; lower goes first.
    pub fn fairness_of(&self, id: OwnerId, policies: &Policies) -> (u64, u64) {
        match policies.queue {
            QueueOrder::Fifo => (0, 0),
            QueueOrder::FairShare => {
                let account = self.get(id);
                let weight = u64::from(policies.quota_of(&account.name).weight.max(1));
                (account.held.saturating_mul(1_000) / weight, account.used / weight)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_counts_from_the_start_of_the_period() {
        let mut owners = OwnerAccounts::default();
        let id = owners.get_or_open(&"alice".into(), PoolTime(0));
        let period = Millis(1_000);
        owners.set_held(id, PoolTime(0), period, |_| 500);
        let row = owners.set_held(id, PoolTime(1_400), period, |_| 0);
        assert_eq!((row.period, row.share_millis), (1, 500 * 400));
    }

    #[test]
    fn used_up_gpu_hours_return_with_the_next_period() {
        let mut owners = OwnerAccounts::default();
        let id = owners.get_or_open(&"alice".into(), PoolTime(0));
        let quota = OwnerQuota { share_hours: Some(1_000), ..OwnerQuota::default() };
        let period = Millis(10 * HOUR_MILLIS);
        owners.set_held(id, PoolTime(0), period, |_| 1_000);
        let over = |hours: u64| owners.get(id).quota_excess(&quota, Share(1), PoolTime(hours * HOUR_MILLIS), period);
        assert_eq!(over(0), None);
        assert_eq!(over(1), Some(QuotaExcess::ShareHours { until: PoolTime(10 * HOUR_MILLIS) }));
        assert_eq!(over(10), None);
        assert_eq!(over(11), Some(QuotaExcess::ShareHours { until: PoolTime(20 * HOUR_MILLIS) }));
    }
}

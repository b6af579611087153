//! What each owner holds and has used: the books behind quotas and fair share.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::policy::{Policies, QueueOrder, Quota};
use crate::row::UsageRow;
use crate::units::{Millis, Share, Time};

/// An owner's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct OwnerId(pub u32);

/// An owner's account.
#[derive(Debug, Clone)]
pub(crate) struct Account {
    pub name: Arc<str>,
    /// Held now, over all devices; what drains is not held.
    pub held: u64,
    period: u64,
    /// Thousandths × milliseconds used in the period, up to `settled_at`.
    used: u64,
    settled_at: Time,
}

/// Why an owner's request must wait although there may be room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OverQuota {
    /// Holds too much already.
    Held,
    /// Used too much this period; from then on it is another.
    ShareHours { until: Time },
}

const HOUR: u64 = 3_600_000;

impl Account {
    fn settle(&mut self, now: Time, period: Millis) {
        let current = now.0 / period.0.max(1);
        if current != self.period {
            self.period = current;
            self.used = 0;
            self.settled_at = Time(current.saturating_mul(period.0)).max(self.settled_at);
        }
        self.used = self.used.saturating_add(self.held.saturating_mul(now.since(self.settled_at).0));
        self.settled_at = now.max(self.settled_at);
    }

    /// The account as of now. The books themselves change only with what is held, when a row is kept too: an account
    /// that was asked often must not differ from one that was restored.
    fn settled(&self, now: Time, period: Millis) -> Self {
        let mut account = self.clone();
        account.settle(now, period);
        account
    }

    /// What of the quota stands in the way of holding `more`.
    pub fn over(&self, quota: &Quota, more: Share, now: Time, period: Millis) -> Option<OverQuota> {
        if more.is_zero() {
            return None;
        }
        if quota.held.is_some_and(|most| self.held + u64::from(more.0) > u64::from(most.0)) {
            return Some(OverQuota::Held);
        }
        let budget = quota.share_hours?;
        let account = self.settled(now, period);
        let until = Time(account.period.saturating_add(1).saturating_mul(period.0));
        (account.used >= budget.saturating_mul(HOUR)).then_some(OverQuota::ShareHours { until })
    }

    /// When the GPU-hours are used up if it goes on like this. Its waiters then claim nothing any more, which may let
    /// others go.
    pub fn runs_out_at(&self, quota: &Quota, now: Time, period: Millis) -> Option<Time> {
        let budget = quota.share_hours.filter(|_| self.held > 0)?.saturating_mul(HOUR);
        let left = budget.saturating_sub(self.settled(now, period).used);
        Some(now.after(Millis(left.div_ceil(self.held))))
    }

    /// What this period's use comes to, up to when it was last settled.
    pub fn row(&self) -> UsageRow {
        UsageRow { owner: self.name.clone(), period: self.period, share_millis: self.used, settled_at: self.settled_at }
    }
}

/// All accounts.
#[derive(Debug, Default)]
pub(crate) struct Owners {
    by_name: BTreeMap<Arc<str>, OwnerId>,
    accounts: Vec<Account>,
}

impl Owners {
    pub fn id(&mut self, name: &Arc<str>, now: Time) -> OwnerId {
        if let Some(&id) = self.by_name.get(name) {
            return id;
        }
        let id = OwnerId(self.accounts.len() as u32);
        self.by_name.insert(name.clone(), id);
        self.accounts.push(Account { name: name.clone(), held: 0, period: 0, used: 0, settled_at: now });
        id
    }

    /// Takes back an account that was only just opened.
    pub fn close_last(&mut self, id: OwnerId) {
        if let Some(account) = self.accounts.pop_if(|_| id.0 as usize + 1 == self.by_name.len()) {
            self.by_name.remove(&account.name);
        }
    }

    pub fn find(&self, name: &str) -> Option<OwnerId> {
        self.by_name.get(name).copied()
    }

    pub fn get(&self, id: OwnerId) -> &Account {
        &self.accounts[id.0 as usize]
    }

    pub fn get_mut(&mut self, id: OwnerId) -> &mut Account {
        &mut self.accounts[id.0 as usize]
    }

    pub fn all(&self) -> &[Account] {
        &self.accounts
    }

    /// Changes what an owner holds, and settles the use up to now.
    pub fn hold(&mut self, id: OwnerId, now: Time, period: Millis, change: impl FnOnce(u64) -> u64) -> UsageRow {
        let account = &mut self.accounts[id.0 as usize];
        account.settle(now, period);
        account.held = change(account.held);
        account.row()
    }

    /// Puts back what a row kept. A time ahead of now would keep use from being counted until then.
    pub fn restore(&mut self, row: &UsageRow, now: Time) {
        let id = self.id(&row.owner, now);
        let account = &mut self.accounts[id.0 as usize];
        (account.period, account.used, account.settled_at) = (row.period, row.share_millis, row.settled_at.min(now));
    }

    /// Where an owner's requests come among those of equal priority; lower first.
    pub fn fair_key(&self, id: OwnerId, policies: &Policies) -> (u64, u64) {
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
    fn use_is_counted_from_the_start_of_the_period() {
        let mut owners = Owners::default();
        let id = owners.id(&"alice".into(), Time(0));
        let period = Millis(1_000);
        owners.hold(id, Time(0), period, |_| 500);
        let row = owners.hold(id, Time(1_400), period, |_| 0);
        assert_eq!((row.period, row.share_millis), (1, 500 * 400));
    }

    #[test]
    fn gpu_hours_that_are_used_up_come_back_with_the_next_period() {
        let mut owners = Owners::default();
        let id = owners.id(&"alice".into(), Time(0));
        let quota = Quota { share_hours: Some(1_000), ..Quota::default() };
        let period = Millis(10 * HOUR);
        owners.hold(id, Time(0), period, |_| 1_000);
        let over = |hours: u64| owners.get(id).over(&quota, Share(1), Time(hours * HOUR), period);
        assert_eq!(over(0), None);
        assert_eq!(over(1), Some(OverQuota::ShareHours { until: Time(10 * HOUR) }));
        assert_eq!(over(10), None);
        assert_eq!(over(11), Some(OverQuota::ShareHours { until: Time(20 * HOUR) }));
    }
}

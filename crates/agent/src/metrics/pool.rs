//! How the pool stands, taken in one look at the owner thread.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use gpupool_core::device::Health;
use gpupool_core::lease::LeaseState;
use gpupool_core::outcome::Closed;
use gpupool_core::reading::Foreign;
use gpupool_core::{Bytes, GpuId, Millis, Share};

use crate::limits::OWNERS_TOLD;
use crate::owner::OwnerThread;

use super::page::Page;

/// Whose share is told together with that of others.
const OTHERS: &str = "other";

/// How the pool stands.
#[derive(Debug)]
pub struct Stand {
    pub(super) devices: Vec<PoolDevice>,
    queued: usize,
    offered: usize,
    active: usize,
    draining: usize,
    longest_wait: Millis,
    held: HashMap<Arc<str>, Share>,
}

/// What the pool knows of a device.
#[derive(Debug)]
pub(super) struct PoolDevice {
    pub gpu_id: GpuId,
    pub uuid: String,
    pub name: String,
    pub health: Health,
    pub closed: Option<Closed>,
    pub promised: Share,
    pub promised_memory: Bytes,
    pub foreign: Option<Foreign>,
}

impl Stand {
    /// Looks at everything once.
    pub fn of(owner: &OwnerThread) -> Self {
        let pool = owner.pool();
        let devices = pool.devices().map(|view| PoolDevice {
            gpu_id: view.gpu_id,
            uuid: view.facts.identity.to_string(),
            name: view.facts.model.to_string(),
            health: view.health,
            closed: view.closed,
            promised: view.promised,
            promised_memory: view.promised_memory,
            foreign: view.foreign,
        });
        let mut stand = Self {
            devices: devices.collect(),
            queued: 0,
            offered: 0,
            active: 0,
            draining: 0,
            longest_wait: Millis(0),
            held: HashMap::new(),
        };
        for lease in pool.leases() {
            stand.draining += usize::from(lease.draining);
            match lease.state {
                LeaseState::Queued => {
                    stand.queued += 1;
                    stand.longest_wait = stand.longest_wait.max(owner.at().pool.since(lease.created_at));
                }
                LeaseState::Offered => stand.offered += 1,
                LeaseState::Active => stand.active += 1,
                _ => {}
            }
            if lease.state.is_granted() {
                let share: u32 = lease.promises.iter().map(|promise| promise.share.0).sum();
                stand.held.entry(lease.request.owner.clone()).or_default().0 += share;
            }
        }
        stand
    }
}

/// Writes how the pool stands; nothing where it could not be asked in time.
pub(super) fn encode(stand: Option<&Stand>, page: &mut Page<'_>) -> fmt::Result {
    let states = stand.map(|stand| {
        let Stand { queued, offered, active, draining, .. } = *stand;
        [("queued", queued), ("offered", offered), ("active", active), ("draining", draining)]
    });
    let lines = states.into_iter().flatten().map(|(state, count)| ([("state", state)], count as f64));
    page.gauges("gpupool_leases", "Leases by state", lines)?;
    let longest = stand.map(|stand| stand.longest_wait.0 as f64 / 1000.0);
    page.gauge("gpupool_longest_wait_seconds", "How long the oldest request in the queue waits", longest)?;
    let held = stand.map(|stand| by_owner(&stand.held)).unwrap_or_default();
    let lines = held.iter().map(|(owner, share)| ([("owner", *owner)], share.as_fraction()));
    page.gauges("gpupool_held_gpus", "GPUs held, by owner", lines)
}

/// Those who hold the most by name, the rest together.
fn by_owner(held: &HashMap<Arc<str>, Share>) -> Vec<(&str, Share)> {
    let mut owners: Vec<(&str, Share)> = held.iter().map(|(owner, share)| (&**owner, *share)).collect();
    owners.sort_unstable_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
    let rest: u32 = owners.split_off(owners.len().min(OWNERS_TOLD)).iter().map(|(_, share)| share.0).sum();
    if rest > 0 {
        // Somebody may be called so; a name must not be told twice.
        match owners.iter_mut().find(|(owner, _)| *owner == OTHERS) {
            Some((_, share)) => share.0 += rest,
            None => owners.push((OTHERS, Share(rest))),
        }
    }
    owners
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_owners_are_told_in_few_lines_and_nothing_is_lost() {
        let held: HashMap<Arc<str>, Share> = (0..OWNERS_TOLD * 3)
            .map(|n| (format!("owner-{n:04}").into(), Share(100 + n as u32)))
            .chain([(OTHERS.into(), Share(1_000_000))])
            .collect();
        let told = by_owner(&held);
        assert_eq!(told.len(), OWNERS_TOLD);
        let sum = |shares: &mut dyn Iterator<Item = Share>| shares.map(|share| u64::from(share.0)).sum::<u64>();
        assert_eq!(sum(&mut told.iter().map(|(_, share)| *share)), sum(&mut held.values().copied()));
        assert_eq!(told.iter().filter(|(owner, _)| *owner == OTHERS).count(), 1);
    }
}

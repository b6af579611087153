//! What has to be done from time to time: keeping where the clock stands, and letting old records go.

use std::time::{Duration, SystemTime};

use gpupool_store::LeaseStore;

use crate::clock;
use crate::owner::Owner;

/// How often the clock is kept.
const EVERY: Duration = Duration::from_secs(60);
/// How many of those make an hour, after which old records go.
const HOUR: u32 = 60;

/// Runs until the agent ends.
pub async fn run(owner: Owner, retention_days: u32) {
    let mut rounds = 0_u32;
    loop {
        let is_full_hour = rounds.is_multiple_of(HOUR);
        rounds = rounds.wrapping_add(1);
        let done = owner.work(move |store| {
            keep_clock(store);
            if is_full_hour && retention_days > 0 {
                let_go(store, retention_days);
            }
        });
        if done.await.is_err() {
            return;
        }
        tokio::time::sleep(EVERY).await;
    }
}

/// Keeps where the pool's clock stands.
pub fn keep_clock(store: &mut dyn LeaseStore) {
    if let Err(error) = store.set_anchor(&clock::anchor()) {
        tracing::warn!(%error, "the clock was not kept");
    }
}

fn let_go(store: &mut dyn LeaseStore, days: u32) {
    let age = Duration::from_secs(u64::from(days) * 86_400);
    let Some(before) = SystemTime::now().checked_sub(age) else { return };
    match store.retain(before) {
        Ok(0) => {}
        Ok(records) => tracing::info!(records, days, "let old records of the audit trail go"),
        Err(error) => tracing::warn!(%error, "old records of the audit trail stay"),
    }
}

//! Periodic work on the store: saving the clock, and removing old records of the audit trail.

use std::time::{Duration, SystemTime};

use gpupool_store::LeaseStore;

use crate::clock;

use super::{Authority, Refusal};

/// The time between two rounds.
const EVERY: Duration = Duration::from_secs(60);
/// The pause after a round for which the authority was busy, or which left more old records to remove.
const RETRY: Duration = Duration::from_secs(1);
/// The number of rounds between two removals of old records.
const ROUNDS_PER_REMOVAL: u32 = 60;

/// Runs housekeeping until the agent ends. A busy authority only delays a round.
pub(crate) async fn run_housekeeping(authority: Authority, retention_days: u32) {
    let mut round = 0_u32;
    loop {
        let removes = round.is_multiple_of(ROUNDS_PER_REMOVAL) && retention_days > 0;
        let done = authority.with_store(move |store| {
            save_clock(store);
            removes && remove_old_records(store, retention_days)
        });
        match done.await {
            // A removal is bounded, so that commits are not held up. The next one follows after other commits.
            Ok(true) => tokio::time::sleep(RETRY).await,
            Ok(false) => {
                round = round.wrapping_add(1);
                tokio::time::sleep(EVERY).await;
            }
            Err(Refusal::Stopping) => return,
            Err(_) => tokio::time::sleep(RETRY).await,
        }
    }
}

/// Saves the state of the pool's clock.
pub(crate) fn save_clock(store: &mut dyn LeaseStore) {
    if let Err(error) = store.set_clock_anchor(&clock::anchor()) {
        tracing::warn!(%error, "cannot save the clock");
    }
}

/// Removes old records, a bounded number of them. Returns whether there may be more.
fn remove_old_records(store: &mut dyn LeaseStore, days: u32) -> bool {
    let age = Duration::from_secs(u64::from(days) * 86_400);
    let Some(before) = SystemTime::now().checked_sub(age) else { return false };
    match store.prune_trail(before) {
        Ok(0) => false,
        Ok(records) => {
            tracing::info!(records, days, "removed old records of the audit trail");
            true
        }
        Err(error) => {
            tracing::warn!(%error, "cannot remove old records of the audit trail");
            false
        }
    }
}

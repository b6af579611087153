//! Housekeeping: old records of the audit trail.

use std::time::Duration;

use gpupool_core::PoolRow;
use gpupool_store::{MemoryFault, TrailQuery};

use super::*;
use crate::authority::run_housekeeping;

/// Returns a disk with leases that ended ten days ago, more than one removal takes.
fn disk_with_old_records() -> MemoryDisk {
    let mut stage = AuthorityStage::new();
    let lease = stage.take();
    let granted = stage.authority.pool().lease(LeaseId(lease.id)).unwrap().row().clone();
    stage.release(&lease);
    let ended = stage.authority.pool().lease(LeaseId(lease.id)).unwrap().row().clone();
    let (disk, days_10) = (MemoryDisk::default(), Duration::from_secs(10 * 86_400));
    let at = ClockReading { pool: stage.now, wall: SystemTime::now() - days_10 };
    let rows: Vec<PoolRow> = (1..=1_500)
        .flat_map(|id| [&granted, &ended].map(|row| gpupool_core::LeaseRow { id: LeaseId(id), ..row.clone() }))
        .map(|row| PoolRow::Lease(gpupool_core::LeaseRow { node: None, promises: [].into(), ..row }))
        .collect();
    disk.open().commit(&rows, at).unwrap();
    disk
}

#[tokio::test(flavor = "multi_thread")]
async fn all_old_records_are_removed_even_after_the_channel_was_full() {
    let disk = disk_with_old_records();
    let (authority, _thread) = start_in_memory(&disk);
    let records = async || {
        let query = |reader: &dyn gpupool_store::TrailReader| reader.history(&TrailQuery::default());
        authority.trail().query(query).await.unwrap().unwrap().records.len()
    };
    assert!(records().await > 0);
    disk.set_fault(Some(MemoryFault::Hang));
    authority.report(sampled(None)).unwrap();
    disk.wait_until_hanging();
    while authority.report(NodeReport::Drained { lease: LeaseId(9_999) }).is_ok() {}
    let mut housekeeping = Box::pin(run_housekeeping(authority.clone(), 1));
    poll_once(&mut housekeeping).await;
    let housekeeping = tokio::spawn(housekeeping);
    disk.set_fault(None);
    let removed = async {
        while records().await > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), removed).await.expect("old records are left");
    housekeeping.abort();
}

//! The published snapshot: it follows each commit, and only commits.

use gpupool_core::{ProcessAttribution, ProcessUsage};
use gpupool_store::MemoryFault;

use super::*;
use crate::authority::StoreState;

#[test]
fn a_snapshot_shows_the_committed_state_and_its_last_event() {
    let mut stage = AuthorityStage::new();
    let before = stage.authority.cell.latest();
    let lease = stage.take();
    let after = stage.authority.cell.latest();
    assert_eq!(before.leases().count(), 0, "a snapshot does not change");
    let row = after.lease(LeaseId(lease.id)).unwrap();
    assert_eq!((row.token.map(|token| token.0), &*row.request.owner), (lease.token, "alice"));
    let device = after.devices_of("node").next().unwrap();
    assert_eq!(device.view.leases, [LeaseId(lease.id)]);
    assert!(after.event > before.event);
    assert_eq!(after.event, stage.authority.events.last());
    stage.release(&lease);
    let freed = stage.authority.cell.latest();
    assert_eq!((freed.leases().count(), freed.devices().next().unwrap().view.leases.len()), (0, 0));
}

#[test]
fn a_snapshot_counts_the_queue() {
    let mut stage = AuthorityStage::new();
    stage.take();
    let first = stage.now;
    stage.request("alice");
    stage.pass(Millis(2_000));
    stage.request("bob");
    let snapshot = stage.authority.cell.latest();
    assert_eq!((snapshot.queued, snapshot.oldest_request_at), (2, Some(first)));
}

#[test]
fn a_batch_that_is_not_committed_is_refused_and_never_published() {
    let mut stage = AuthorityStage::new();
    stage.disk.set_fault(Some(MemoryFault::Io));
    assert!(matches!(stage.try_request("alice"), Err(Refusal::NotDurable(_))));
    let snapshot = stage.authority.cell.latest();
    assert_eq!(snapshot.leases().count(), 0);
    assert!(matches!(snapshot.store, StoreState::Broken(_)));
    assert_eq!(stage.authority.pool().leases().count(), 0, "the pool is as it was committed");
    stage.disk.set_fault(None);
    stage.authority.retried_at = std::time::Instant::now() - crate::limits::STORE_RETRY;
    stage.authority.retry_store();
    assert_eq!(stage.authority.cell.latest().store, StoreState::Fine);
    // The GPU is usable at once: the last sample is applied again to the rebuilt pool.
    stage.receive(Vec::new());
    stage.take();
}

#[test]
fn reports_while_the_store_is_broken_are_stored_once_each_and_take_effect_later() {
    let mut stage = AuthorityStage::new();
    let lease = stage.take();
    let (message, _answer) = attach(&lease, lease.token.unwrap(), LeaseHolder::Cgroup("/jobs/1".into()));
    stage.receive(vec![message]);
    stage.release(&lease);
    let waiting = stage.request("bob");
    stage.disk.set_fault(Some(MemoryFault::Io));
    assert!(matches!(stage.try_request("eve"), Err(Refusal::NotDurable(_))));
    // The temporary pool has no leases while nothing can be read.
    stage.authority.pool = gpupool_core::Pool::default();
    let id = LeaseId(lease.id);
    for _ in 0..3 {
        let gone = NodeReport::HolderGone { lease: LeaseId(waiting.id), holder: LeaseHolder::Connection };
        stage
            .receive(vec![AuthorityMessage::Report(NodeReport::Drained { lease: id }), AuthorityMessage::Report(gone)]);
    }
    assert_eq!(stage.authority.postponed.len(), 2);
    stage.disk.set_fault(None);
    stage.authority.retried_at = std::time::Instant::now() - crate::limits::STORE_RETRY;
    stage.authority.retry_store();
    stage.receive(Vec::new());
    assert!(!stage.authority.pool().lease(id).unwrap().draining, "the devices of the ended lease are free");
    assert_eq!(stage.state(waiting.id), LeaseState::Queued, "a connection did not hold it");
    assert!(stage.authority.postponed.is_empty());
}

#[test]
fn a_forgotten_node_leaves_no_samples_or_occupancy() {
    let mut stage = AuthorityStage::new();
    assert_eq!((stage.authority.samples.len(), stage.authority.occupancy.nodes()), (1, 1));
    let node = stage.authority.pool().node_by_name("node").unwrap();
    for command in [PoolCommand::NodeLost { node }, PoolCommand::ForgetNode { node }] {
        let (mut message, mut answer) = asked("root", command);
        if let AuthorityMessage::Command(asked) = &mut message {
            asked.caller = Caller::agent();
        }
        stage.receive(vec![message]);
        answer.try_recv().unwrap().unwrap();
    }
    assert!(stage.authority.samples.is_empty() && stage.authority.occupancy.nodes() == 0);
}

#[test]
fn the_event_and_the_reply_of_a_batch_share_one_explanation() {
    let mut stage = AuthorityStage::new();
    stage.take();
    let last = stage.authority.events.last();
    let waiting = stage.request("bob");
    let events = stage.authority.events.after(last, 10).events;
    let queued = events.iter().find(|(_, event)| event.kind == "queued").unwrap();
    let (in_event, in_reply) = (queued.1.reason.as_deref().unwrap(), waiting.reason.as_deref().unwrap());
    assert_eq!(in_event, format!("position 1; {in_reply}"));
    assert!(stage.authority.explained.is_empty(), "the next batch explains anew");
    let explain = |stage: &mut AuthorityStage| stage.authority.explain(LeaseId(waiting.id)).unwrap();
    assert!(Arc::ptr_eq(&explain(&mut stage), &explain(&mut stage)));
}

#[test]
fn a_full_disk_still_takes_releases() {
    let mut stage = AuthorityStage::new();
    let lease = stage.take();
    stage.disk.set_fault(Some(MemoryFault::Full));
    assert!(matches!(stage.try_request("alice"), Err(Refusal::DiskFull(_))));
    stage.release(&lease);
    assert_eq!(stage.state(lease.id), LeaseState::Released);
}

#[test]
fn a_reading_attributed_before_a_change_of_leases_neither_frees_nor_accuses() {
    let mut stage = AuthorityStage::new();
    let lease = stage.take();
    let as_of = stage.authority.cell.latest().at.pool;
    let process = |attribution| ProcessUsage { attribution, memory: None };
    stage.now = stage.now.after(Millis(1_000));
    let running = DeviceReading {
        processes: Some(vec![process(ProcessAttribution::Lease(LeaseId(lease.id)))]),
        ..DeviceReading::idle(stage.now)
    };
    stage.sample(DeviceReading { leases_as_of: Some(as_of), ..running });
    stage.now = stage.now.after(Millis(1_000));
    stage.release(&lease);
    let draining = |stage: &AuthorityStage| stage.authority.pool().lease(LeaseId(lease.id)).unwrap().draining;
    assert!(draining(&stage), "a process of it was on the device");
    // Taken after the end, but attributed by a snapshot from before it.
    stage.now = stage.now.after(Millis(1_000));
    stage.sample(DeviceReading { leases_as_of: Some(as_of), ..DeviceReading::idle(stage.now) });
    assert!(draining(&stage));
    let current = stage.authority.cell.latest().at.pool;
    stage.now = stage.now.after(Millis(1_000));
    stage.sample(DeviceReading { leases_as_of: Some(current), ..DeviceReading::idle(stage.now) });
    assert!(!draining(&stage));
}

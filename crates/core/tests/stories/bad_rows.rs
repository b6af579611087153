//! A bad row never stops the service: it is skipped and reported, and the others are restored.

use std::sync::Arc;

use crate::support::*;
use gpupool_core::{
    Bytes, DeviceId, DeviceIdentity, DevicePromise, DeviceRow, EndCause, GpuId, LeaseHolder, LeaseId, LeaseRow,
    LeaseState, NodeId, NodeRow, PlacementStrategy, Policies, PoolCounters, PoolRow, PoolTime, Request, RequestPolicy,
    RestoreError, Share, TaskClass, Token, UsageRow, WorkloadRow,
};

fn row_of_lease(test: &PoolFixture, id: LeaseId) -> LeaseRow {
    test.lease(id).row().clone()
}

/// Restarts with one more lease row, made from an active lease, and returns the error.
fn error_of_lease_row(change: impl FnOnce(&mut LeaseRow)) -> Option<String> {
    let mut test = PoolFixture::of(2);
    let kept = test.request(whole());
    let mut row = row_of_lease(&test, kept);
    row.id = LeaseId(10);
    row.seq = 10;
    row.token = Some(Token(10));
    row.promises = Arc::from([DevicePromise { device: DeviceId(1), share: Share::WHOLE, memory: gib(80) }]);
    change(&mut row);
    test.rows.push(PoolRow::Lease(row));
    let bad = test.restart();
    assert!(test.is_active(kept), "the good row beside it is taken");
    bad.first().map(ToString::to_string)
}

fn assert_skipped(change: impl FnOnce(&mut LeaseRow), why: &str) {
    let error = error_of_lease_row(change);
    assert_eq!(error.as_deref(), Some(&*format!("lease row 10: {why}")));
}

#[test]
fn the_template_of_the_bad_lease_rows_is_good() {
    assert_eq!(error_of_lease_row(|_| {}), None);
}

#[test]
fn a_lease_row_with_an_unknown_device_is_skipped() {
    let elsewhere = DevicePromise { device: DeviceId(7), share: HALF, memory: Bytes::ZERO };
    assert_skipped(|row| row.promises = Arc::from([elsewhere]), "a device is unknown");
    assert_skipped(|row| row.node = Some(NodeId(3)), "its node is unknown");
    assert_skipped(|row| row.node = None, "its node is unknown");
}

#[test]
fn a_lease_row_with_a_device_of_another_lease_is_skipped() {
    let taken = DevicePromise { device: DeviceId(0), share: Share(1), memory: Bytes::ZERO };
    assert_skipped(|row| row.promises = Arc::from([taken]), "a device is already promised to others");
    let twice = DevicePromise { device: DeviceId(1), share: HALF, memory: Bytes::ZERO };
    assert_skipped(|row| row.promises = Arc::from([twice, twice]), "a device is listed twice");
    let nothing = DevicePromise { device: DeviceId(1), share: Share::ZERO, memory: Bytes::ZERO };
    assert_skipped(|row| row.promises = Arc::from([nothing]), "a device is already promised to others");
}

#[test]
fn a_lease_row_in_an_impossible_state_is_skipped() {
    let ungranted = "it is granted without a token, a time or a decision";
    assert_skipped(|row| row.token = None, ungranted);
    assert_skipped(|row| row.granted_at = None, ungranted);
    assert_skipped(|row| row.decision = None, ungranted);
    assert_skipped(|row| row.state = LeaseState::Queued, "it waits but was granted");
    let held_after_the_end = |row: &mut LeaseRow| {
        end(row);
        row.holder = Some(LeaseHolder::Connection);
    };
    assert_skipped(held_after_the_end, "it has a holder but is not active");
    assert_skipped(|row| row.request = Arc::new(gpus(1_000)), "its request is invalid");
}

/// Turns the row into one of a released and drained lease.
fn end(row: &mut LeaseRow) {
    row.state = LeaseState::Released;
    row.cause = Some(EndCause::ByOwner);
    row.ended_at = row.granted_at;
    row.promises = Arc::from([]);
}

#[test]
fn a_lease_row_with_an_inconsistent_end_is_skipped() {
    let disagrees = "its end, cause and state are inconsistent";
    assert_eq!(error_of_lease_row(end), None, "a lease that is over is fine");
    assert_skipped(|row| row.cause = Some(EndCause::ByOwner), disagrees);
    assert_skipped(|row| row.ended_at = row.granted_at, disagrees);
    let over = |change: fn(&mut LeaseRow)| {
        move |row: &mut LeaseRow| {
            end(row);
            change(row);
        }
    };
    assert_skipped(over(|row| row.cause = None), disagrees);
    assert_skipped(over(|row| row.cause = Some(EndCause::Revoked)), disagrees);
    assert_skipped(|row| row.draining = true, "it drains but has not ended");
    assert_skipped(over(|row| row.quarantined = true), "it drains but has not ended");
    let held = DevicePromise { device: DeviceId(1), share: HALF, memory: Bytes::ZERO };
    let still_held = |row: &mut LeaseRow| {
        end(row);
        row.promises = Arc::from([held]);
    };
    assert_skipped(still_held, "it holds devices but is not granted");
}

#[test]
fn rows_with_unreachable_numbers_are_skipped() {
    let out_of_range = "a number is out of range";
    assert_skipped(|row| row.seq = u64::MAX, out_of_range);
    assert_skipped(|row| row.token = Some(Token(u64::MAX)), out_of_range);
    let id = error_of_lease_row(|row| row.id = LeaseId(u64::MAX));
    assert_eq!(id, Some(format!("lease row {}: {out_of_range}", u64::MAX)));

    let mut test = PoolFixture::of(1);
    let first = test.request(whole());
    test.release(first);
    test.rows.push(PoolRow::Counters(PoolCounters { next_token: u64::MAX, ..PoolCounters::default() }));
    assert_eq!(test.restart(), [RestoreError::Counters]);
    test.add_node(node("a"), devices("a", 1));
    let next = test.request(whole());
    assert_eq!((next, test.token(next)), (LeaseId(1), Token(1)), "the other rows count");
}

#[test]
fn two_waiters_cannot_share_a_queue_position() {
    let mut test = PoolFixture::of(1);
    test.request(whole());
    let waits = test.request(whole());
    test.rows.push(PoolRow::Lease(LeaseRow { id: LeaseId(9), ..row_of_lease(&test, waits) }));
    let bad = test.restart();
    assert_eq!(bad[0].to_string(), "lease row 9: another lease has its queue position");
    assert!(test.is_queued(waits) && test.pool.waiter_count() == 1);
}

#[test]
fn promises_that_overflow_the_memory_sum_are_skipped() {
    let mut test = PoolFixture::of(1);
    let (first, second) = (test.request(part(100)), test.request(part(100)));
    for lease in [first, second] {
        let promise = DevicePromise { device: DeviceId(0), share: Share(100), memory: Bytes(u64::MAX) };
        test.rows.push(PoolRow::Lease(LeaseRow { promises: Arc::from([promise]), ..row_of_lease(&test, lease) }));
    }
    let bad = test.restart();
    assert_eq!(bad[0].to_string(), format!("lease row {second}: its memory is out of range"));
    test.release(first);
    assert_eq!(test.device(0).promised_memory, Bytes::ZERO);
}

#[test]
fn usage_settled_in_the_future_still_counts() {
    let mut test = PoolFixture::of(1);
    let usage = UsageRow { owner: "alice".into(), period: 0, share_millis: 0, settled_at: PoolTime(u64::MAX) };
    test.rows.push(PoolRow::Usage(usage));
    test.restart();
    test.add_node(node("a"), devices("a", 1));
    let lease = test.request(owned("alice", whole()));
    test.advance(secs(10));
    test.release(lease);
    assert_eq!(test.pool.usage().map(|usage| usage.share_millis).sum::<u64>(), 10_000 * 1_000);
}

#[test]
fn maximal_workload_counts_do_not_overflow() {
    let mut test = PoolFixture::of(1);
    for gpus in [1, 2] {
        let class = TaskClass { cpus: cpus(1), share: Share::WHOLE, gpus, models: "".into() };
        test.rows.push(PoolRow::Workload(WorkloadRow { class, seen: u64::MAX, in_force: u64::MAX }));
    }
    test.rows.push(PoolRow::Counters(PoolCounters { workload_arrivals: u64::MAX, ..PoolCounters::default() }));
    test.restart();
    test.add_node(node("a"), devices("a", 1));
    let lease = test.request(by(PlacementStrategy::Fgd, Request { cpus: cpus(1), ..whole() }));
    assert!(test.is_active(lease));
}

#[test]
fn a_missing_device_row_does_not_affect_leases_of_other_devices() {
    let mut test = PoolFixture::of(4);
    let leases: Vec<LeaseId> = (0..4).map(|_| test.request(whole())).collect();
    test.rows.retain(|row| !matches!(row, PoolRow::Device(row) if row.device == DeviceId(1)));
    test.restart();
    test.add_node(node("a"), devices("a", 4));
    for (device, lease) in leases.into_iter().enumerate().filter(|(device, _)| *device != 1) {
        assert!(test.pool.lease(lease).is_some(), "the lease of device {device} is gone");
    }
    assert!(test.try_request(Request { queue: false, ..gpus(2) }).is_err(), "at most one of four is free");
}

#[test]
fn the_older_of_two_leases_keeps_a_contested_device() {
    let mut test = PoolFixture::of(1);
    let first = test.request(whole());
    let mut second = row_of_lease(&test, first);
    (second.id, second.token, second.seq) = (LeaseId(1), Some(Token(1)), 1);
    test.rows.insert(0, PoolRow::Lease(second));
    let bad = test.restart();
    assert_eq!(bad.len(), 1);
    assert!(test.is_active(first) && test.pool.lease(LeaseId(1)).is_none());
}

#[test]
fn an_inconsistent_device_row_is_skipped() {
    let facts = |uuid| Arc::new(device(uuid, "NVIDIA H100", 80));
    let good = DeviceRow {
        device: DeviceId(2),
        node: NodeId(0),
        gpu_id: GpuId(2),
        facts: facts("GPU-x"),
        cordon: Default::default(),
    };
    let known = DeviceIdentity::Uuid("GPU-a-0".into()).to_string();
    for (row, why) in [
        (DeviceRow { node: NodeId(9), ..good.clone() }, "its node is unknown"),
        (DeviceRow { gpu_id: GpuId(u32::MAX), ..good.clone() }, "its gpu_id is out of range"),
        (DeviceRow { gpu_id: GpuId(1), ..good.clone() }, "another device has its gpu_id"),
        (DeviceRow { facts: facts(&known), ..good.clone() }, "another device has its identity"),
    ] {
        let mut test = PoolFixture::of(2);
        let lease = test.request(gpus(2));
        test.rows.push(PoolRow::Device(row));
        assert_eq!(test.restart(), [RestoreError::Device { device: DeviceId(2), why }]);
        assert!(test.is_active(lease), "the devices beside it are taken");
    }
}

#[test]
fn a_node_row_with_a_duplicate_name_is_skipped() {
    let mut test = PoolFixture::of(1);
    test.rows.push(PoolRow::Node(NodeRow { node: NodeId(1), facts: node("a"), links: vec![] }));
    assert_eq!(test.restart(), [RestoreError::Node(NodeId(1))]);
    assert_eq!(test.pool.nodes().count(), 1);
}

#[test]
fn inconsistent_policies_are_replaced_by_the_given_ones() {
    let mut test = PoolFixture::of(1);
    let senseless =
        Policies { fallback: RequestPolicy { max_allocations: Some(0), ..policy("x") }, ..Policies::default() };
    test.rows.push(PoolRow::Policies(Box::new(senseless)));
    let bad = test.restart();
    assert_eq!(bad[0].to_string(), "policies row: policy.max_allocations: \"0\" is not allowed; it must be at least 1");
    assert_eq!(*test.pool.policies(), Policies::unlimited());
}

#[test]
fn rows_about_unknown_things_are_harmless() {
    let mut test = PoolFixture::empty();
    test.rows = vec![PoolRow::Forget(LeaseId(3))];
    assert!(test.restart().is_empty());
    test.add_node(node("a"), devices("a", 1));
    let lease = test.request(Request::default());
    assert!(test.is_active(lease));
}

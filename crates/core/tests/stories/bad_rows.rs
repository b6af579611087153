//! A bad row never stops the service: it is left out and complained of, and the others are taken.

use std::sync::Arc;

use crate::support::*;
use gpupool_core::{
    Bytes, DeviceId, DeviceIdentity, DevicePromise, DeviceRow, EndCause, GpuId, LeaseHolder, LeaseId, LeaseRow,
    LeaseState, NodeId, NodeRow, PlacementStrategy, Policies, PoolCounters, PoolRow, PoolTime, Request, RequestPolicy,
    RestoreError, Share, TaskClass, Token, UsageRow, WorkloadRow,
};

fn row_of_lease(stage: &Stage, id: LeaseId) -> LeaseRow {
    stage.lease(id).row().clone()
}

/// Restarts with one more row about a lease, made from an active one, and gives the complaint.
fn complaint_about_lease(change: impl FnOnce(&mut LeaseRow)) -> Option<String> {
    let mut stage = Stage::of(2);
    let kept = stage.ask(whole());
    let mut row = row_of_lease(&stage, kept);
    row.id = LeaseId(10);
    row.seq = 10;
    row.token = Some(Token(10));
    row.promises = Arc::from([DevicePromise { device: DeviceId(1), share: Share::WHOLE, memory: gib(80) }]);
    change(&mut row);
    stage.rows.push(PoolRow::Lease(row));
    let bad = stage.restart();
    assert!(stage.is_active(kept), "the good row beside it is taken");
    bad.first().map(ToString::to_string)
}

fn complains(change: impl FnOnce(&mut LeaseRow), why: &str) {
    let complaint = complaint_about_lease(change);
    assert_eq!(complaint.as_deref(), Some(&*format!("lease row 10: {why}")));
}

#[test]
fn the_row_all_the_bad_ones_are_made_from_is_good() {
    assert_eq!(complaint_about_lease(|_| {}), None);
}

#[test]
fn a_lease_on_a_device_nobody_knows_is_left_out() {
    let elsewhere = DevicePromise { device: DeviceId(7), share: HALF, memory: Bytes::ZERO };
    complains(|row| row.promises = Arc::from([elsewhere]), "a device is unknown");
    complains(|row| row.node = Some(NodeId(3)), "its node is unknown");
    complains(|row| row.node = None, "its node is unknown");
}

#[test]
fn a_lease_that_holds_what_others_hold_is_left_out() {
    let taken = DevicePromise { device: DeviceId(0), share: Share(1), memory: Bytes::ZERO };
    complains(|row| row.promises = Arc::from([taken]), "a device is already promised to others");
    let twice = DevicePromise { device: DeviceId(1), share: HALF, memory: Bytes::ZERO };
    complains(|row| row.promises = Arc::from([twice, twice]), "a device is listed twice");
    let nothing = DevicePromise { device: DeviceId(1), share: Share::ZERO, memory: Bytes::ZERO };
    complains(|row| row.promises = Arc::from([nothing]), "a device is already promised to others");
}

#[test]
fn a_lease_in_a_state_that_cannot_be_is_left_out() {
    let ungranted = "it is granted without a token, a time or a decision";
    complains(|row| row.token = None, ungranted);
    complains(|row| row.granted_at = None, ungranted);
    complains(|row| row.decision = None, ungranted);
    complains(|row| row.state = LeaseState::Queued, "it waits but was granted");
    let held_after_the_end = |row: &mut LeaseRow| {
        end(row);
        row.holder = Some(LeaseHolder::Connection);
    };
    complains(held_after_the_end, "it has a holder but is not active");
    complains(|row| row.request = Arc::new(gpus(1_000)), "its request is invalid");
}

/// Makes the row one of a lease that was released and drained.
fn end(row: &mut LeaseRow) {
    row.state = LeaseState::Released;
    row.cause = Some(EndCause::ByOwner);
    row.ended_at = row.granted_at;
    row.promises = Arc::from([]);
}

#[test]
fn an_end_that_does_not_agree_with_itself_is_left_out() {
    let disagrees = "its end, cause and state are inconsistent";
    assert_eq!(complaint_about_lease(end), None, "a lease that is over is fine");
    complains(|row| row.cause = Some(EndCause::ByOwner), disagrees);
    complains(|row| row.ended_at = row.granted_at, disagrees);
    let over = |change: fn(&mut LeaseRow)| {
        move |row: &mut LeaseRow| {
            end(row);
            change(row);
        }
    };
    complains(over(|row| row.cause = None), disagrees);
    complains(over(|row| row.cause = Some(EndCause::Revoked)), disagrees);
    complains(|row| row.draining = true, "it drains but has not ended");
    complains(over(|row| row.quarantined = true), "it drains but has not ended");
    let held = DevicePromise { device: DeviceId(1), share: HALF, memory: Bytes::ZERO };
    let still_held = |row: &mut LeaseRow| {
        end(row);
        row.promises = Arc::from([held]);
    };
    complains(still_held, "it holds devices but is not granted");
}

#[test]
fn numbers_no_pool_ever_counts_to_are_left_out() {
    let out_of_range = "a number is out of range";
    complains(|row| row.seq = u64::MAX, out_of_range);
    complains(|row| row.token = Some(Token(u64::MAX)), out_of_range);
    let id = complaint_about_lease(|row| row.id = LeaseId(u64::MAX));
    assert_eq!(id, Some(format!("lease row {}: {out_of_range}", u64::MAX)));

    let mut stage = Stage::of(1);
    let first = stage.ask(whole());
    stage.release(first);
    stage.rows.push(PoolRow::Counters(PoolCounters { next_token: u64::MAX, ..PoolCounters::default() }));
    assert_eq!(stage.restart(), [RestoreError::Counters]);
    stage.add(node("a"), devices("a", 1));
    let next = stage.ask(whole());
    assert_eq!((next, stage.token(next)), (LeaseId(1), Token(1)), "the other rows count");
}

#[test]
fn two_waiters_at_one_place_of_the_queue_are_one_too_many() {
    let mut stage = Stage::of(1);
    stage.ask(whole());
    let waits = stage.ask(whole());
    stage.rows.push(PoolRow::Lease(LeaseRow { id: LeaseId(9), ..row_of_lease(&stage, waits) }));
    let bad = stage.restart();
    assert_eq!(bad[0].to_string(), "lease row 9: another lease has its queue position");
    assert!(stage.is_queued(waits) && stage.pool.waiter_count() == 1);
}

#[test]
fn promises_of_more_memory_than_can_be_counted_are_left_out() {
    let mut stage = Stage::of(1);
    let (first, second) = (stage.ask(part(100)), stage.ask(part(100)));
    for lease in [first, second] {
        let promise = DevicePromise { device: DeviceId(0), share: Share(100), memory: Bytes(u64::MAX) };
        stage.rows.push(PoolRow::Lease(LeaseRow { promises: Arc::from([promise]), ..row_of_lease(&stage, lease) }));
    }
    let bad = stage.restart();
    assert_eq!(bad[0].to_string(), format!("lease row {second}: its memory is out of range"));
    stage.release(first);
    assert_eq!(stage.device(0).promised_memory, Bytes::ZERO);
}

#[test]
fn use_settled_in_the_future_does_not_make_an_owner_free_of_charge() {
    let mut stage = Stage::of(1);
    let usage = UsageRow { owner: "alice".into(), period: 0, share_millis: 0, settled_at: PoolTime(u64::MAX) };
    stage.rows.push(PoolRow::Usage(usage));
    stage.restart();
    stage.add(node("a"), devices("a", 1));
    let lease = stage.ask(owned("alice", whole()));
    stage.pass(secs(10));
    stage.release(lease);
    assert_eq!(stage.pool.usage().map(|usage| usage.share_millis).sum::<u64>(), 10_000 * 1_000);
}

#[test]
fn a_workload_counted_to_the_end_does_not_overflow() {
    let mut stage = Stage::of(1);
    for gpus in [1, 2] {
        let class = TaskClass { cpus: cpus(1), share: Share::WHOLE, gpus, models: "".into() };
        stage.rows.push(PoolRow::Workload(WorkloadRow { class, seen: u64::MAX, in_force: u64::MAX }));
    }
    stage.rows.push(PoolRow::Counters(PoolCounters { workload_arrivals: u64::MAX, ..PoolCounters::default() }));
    stage.restart();
    stage.add(node("a"), devices("a", 1));
    let lease = stage.ask(by(PlacementStrategy::Fgd, Request { cpus: cpus(1), ..whole() }));
    assert!(stage.is_active(lease));
}

#[test]
fn one_missing_device_row_leaves_the_leases_of_the_other_devices_alone() {
    let mut stage = Stage::of(4);
    let leases: Vec<LeaseId> = (0..4).map(|_| stage.ask(whole())).collect();
    stage.rows.retain(|row| !matches!(row, PoolRow::Device(row) if row.device == DeviceId(1)));
    stage.restart();
    stage.add(node("a"), devices("a", 4));
    for (device, lease) in leases.into_iter().enumerate().filter(|(device, _)| *device != 1) {
        assert!(stage.pool.lease(lease).is_some(), "the lease of device {device} is gone");
    }
    assert!(stage.try_ask(Request { queue: false, ..gpus(2) }).is_err(), "at most one of four is free");
}

#[test]
fn the_older_lease_keeps_a_device_two_rows_claim() {
    let mut stage = Stage::of(1);
    let first = stage.ask(whole());
    let mut second = row_of_lease(&stage, first);
    (second.id, second.token, second.seq) = (LeaseId(1), Some(Token(1)), 1);
    stage.rows.insert(0, PoolRow::Lease(second));
    let bad = stage.restart();
    assert_eq!(bad.len(), 1);
    assert!(stage.is_active(first) && stage.pool.lease(LeaseId(1)).is_none());
}

#[test]
fn a_device_row_that_does_not_fit_in_is_left_out() {
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
        let mut stage = Stage::of(2);
        let lease = stage.ask(gpus(2));
        stage.rows.push(PoolRow::Device(row));
        assert_eq!(stage.restart(), [RestoreError::Device { device: DeviceId(2), why }]);
        assert!(stage.is_active(lease), "the devices beside it are taken");
    }
}

#[test]
fn a_node_row_under_another_nodes_name_is_left_out() {
    let mut stage = Stage::of(1);
    stage.rows.push(PoolRow::Node(NodeRow { node: NodeId(1), facts: node("a"), links: vec![] }));
    assert_eq!(stage.restart(), [RestoreError::Node(NodeId(1))]);
    assert_eq!(stage.pool.nodes().count(), 1);
}

#[test]
fn rules_that_make_no_sense_give_way_to_the_given_ones() {
    let mut stage = Stage::of(1);
    let senseless =
        Policies { fallback: RequestPolicy { max_allocations: Some(0), ..policy("x") }, ..Policies::default() };
    stage.rows.push(PoolRow::Policies(Box::new(senseless)));
    let bad = stage.restart();
    assert_eq!(bad[0].to_string(), "policies row: policy.max_allocations: \"0\" is not allowed, it must be at least 1");
    assert_eq!(*stage.pool.policies(), Policies::unlimited());
}

#[test]
fn rows_about_nothing_known_do_no_harm() {
    let mut stage = Stage::empty();
    stage.rows = vec![PoolRow::Forget(LeaseId(3))];
    assert!(stage.restart().is_empty());
    stage.add(node("a"), devices("a", 1));
    let lease = stage.ask(Request::default());
    assert!(stage.is_active(lease));
}

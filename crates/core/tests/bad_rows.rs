//! A bad row never stops the service: it is left out and complained of, and the others are taken.

mod support;

use std::sync::Arc;

use gpupool_core::device::DeviceIdentity;
use gpupool_core::lease::{LeaseState, Promise};
use gpupool_core::policy::{Policies, Policy};
use gpupool_core::pool::RestoreError;
use gpupool_core::row::{DeviceRow, LeaseRow, NodeRow};
use gpupool_core::{Bytes, DeviceId, GpuId, LeaseId, NodeId, Request, Row, Share, Token};
use support::*;

fn row_of_lease(stage: &Stage, id: LeaseId) -> LeaseRow {
    LeaseRow::of(stage.lease(id))
}

/// Restarts with one more row about a lease, made from an active one, and gives the complaint.
fn complaint_about_lease(change: impl FnOnce(&mut LeaseRow)) -> Option<String> {
    let mut stage = Stage::of(2);
    let kept = stage.ask(whole());
    let mut row = row_of_lease(&stage, kept);
    row.id = LeaseId(10);
    row.seq = 10;
    row.token = Some(Token(10));
    row.promises = Arc::from([Promise { device: DeviceId(1), share: Share::WHOLE, memory: gib(80) }]);
    change(&mut row);
    stage.rows.push(Row::Lease(row));
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
    let elsewhere = Promise { device: DeviceId(7), share: HALF, memory: Bytes::ZERO };
    complains(|row| row.promises = Arc::from([elsewhere]), "a device of it is not known");
    complains(|row| row.node = Some(NodeId(3)), "its node is not known");
    complains(|row| row.node = None, "its node is not known");
}

#[test]
fn a_lease_that_holds_what_others_hold_is_left_out() {
    let taken = Promise { device: DeviceId(0), share: Share(1), memory: Bytes::ZERO };
    complains(|row| row.promises = Arc::from([taken]), "a device of it is promised to others already");
    let twice = Promise { device: DeviceId(1), share: HALF, memory: Bytes::ZERO };
    complains(|row| row.promises = Arc::from([twice, twice]), "a device of it is named twice");
    let nothing = Promise { device: DeviceId(1), share: Share::ZERO, memory: Bytes::ZERO };
    complains(|row| row.promises = Arc::from([nothing]), "a device of it is promised to others already");
}

#[test]
fn a_lease_in_a_state_that_cannot_be_is_left_out() {
    complains(|row| row.token = None, "it is granted without a token");
    complains(|row| row.state = LeaseState::Queued, "it holds devices although it is not granted");
    complains(|row| row.request = Arc::new(gpus(1_000)), "its request is not valid");
}

#[test]
fn the_older_lease_keeps_a_device_two_rows_claim() {
    let mut stage = Stage::of(1);
    let first = stage.ask(whole());
    let mut second = row_of_lease(&stage, first);
    (second.id, second.token, second.seq) = (LeaseId(1), Some(Token(1)), 1);
    stage.rows.insert(0, Row::Lease(second));
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
        (DeviceRow { node: NodeId(9), ..good.clone() }, "its node is not known"),
        (DeviceRow { gpu_id: GpuId(u32::MAX), ..good.clone() }, "its gpu_id is out of range"),
        (DeviceRow { gpu_id: GpuId(1), ..good.clone() }, "its gpu_id is another device's"),
        (DeviceRow { facts: facts(&known), ..good.clone() }, "its identity is another device's"),
    ] {
        let mut stage = Stage::of(2);
        let lease = stage.ask(gpus(2));
        stage.rows.push(Row::Device(row));
        assert_eq!(stage.restart(), [RestoreError::Device { device: DeviceId(2), why }]);
        assert!(stage.is_active(lease), "the devices beside it are taken");
    }
}

#[test]
fn a_node_row_under_another_nodes_name_is_left_out() {
    let mut stage = Stage::of(1);
    stage.rows.push(Row::Node(NodeRow { node: NodeId(1), facts: node("a"), links: vec![] }));
    assert_eq!(stage.restart(), [RestoreError::Node(NodeId(1))]);
    assert_eq!(stage.pool.nodes().count(), 1);
}

#[test]
fn rules_that_make_no_sense_give_way_to_the_given_ones() {
    let mut stage = Stage::of(1);
    let senseless = Policies { fallback: Policy { max_allocations: Some(0), ..policy("x") }, ..Policies::default() };
    stage.rows.push(Row::Policies(Box::new(senseless)));
    let bad = stage.restart();
    assert_eq!(bad[0].to_string(), "policies row: policy.max_allocations: \"0\" is not allowed, it must be at least 1");
    assert_eq!(*stage.pool.policies(), Policies::unlimited());
}

#[test]
fn rows_about_nothing_known_do_no_harm() {
    let mut stage = Stage::empty();
    stage.rows = vec![Row::Forget(LeaseId(3))];
    assert!(stage.restart().is_empty());
    stage.add(node("a"), devices("a", 1));
    let lease = stage.ask(Request::default());
    assert!(stage.is_active(lease));
}

//! After a crash: the rows bring back what was promised, and a bad row is left out and complained of.

use std::sync::Arc;

use crate::support::*;
use gpupool_core::{
    CommandDenied, CommandReply, CordonState, DeviceClosure, DeviceId, DeviceLink, EndCause, GpuId, LeaseHolder,
    LeaseId, LeaseRow, LinkKind, NodeId, OwnerQuota, PlacementStrategy, Policies, PoolCommand, PoolRow, Request, Share,
    Token,
};

/// A node comes back with its devices, read as idle.
fn come_back(stage: &mut Stage, count: usize) {
    stage.add(node("a"), devices("a", count));
}

#[test]
fn what_was_promised_is_promised_after_a_restart() {
    let mut stage = Stage::of(2);
    let (a, b) = (stage.ask(part(300)), stage.ask(Request { cpus: cpus(4), ..whole() }));
    let (released, queued) = (stage.ask(part(100)), stage.ask(gpus(2)));
    stage.release(released);
    let before: Vec<LeaseRow> = stage.pool.leases().map(|lease| lease.row().clone()).collect();
    assert!(stage.restart().is_empty());
    let after: Vec<LeaseRow> = stage.pool.leases().map(|lease| lease.row().clone()).collect();
    assert_eq!(before, after);
    assert_eq!((stage.device(0).promised, stage.device(0).leases), (Share(300), vec![a]));
    assert_eq!((stage.device(1).promised, stage.device(1).leases), (Share::WHOLE, vec![b]));
    assert!(stage.is_queued(queued));
    assert_eq!(stage.cause(released), Some(EndCause::ByOwner));
}

#[test]
fn a_device_takes_no_new_work_until_it_is_seen_again() {
    let mut stage = Stage::of(2);
    stage.restart();
    assert_eq!(stage.device(0).closed, Some(DeviceClosure::NodeLost));
    let lease = stage.ask(whole());
    assert!(stage.is_queued(lease));
    stage.see(node("a"), devices("a", 1));
    assert_eq!(stage.on(lease), [0]);
    assert_eq!(stage.device(1).closed, Some(DeviceClosure::NotSeen), "the node came back without it");
}

#[test]
fn every_lease_gets_one_full_ttl() {
    let mut stage = Stage::of(1);
    let lease = stage.ask(Request { ttl: secs(30), ..whole() });
    stage.pass(secs(29));
    stage.restart();
    stage.pass(secs(29));
    assert!(stage.is_active(lease));
    stage.pass(secs(1));
    assert_eq!(stage.cause(lease), Some(EndCause::TtlPassed));
}

#[test]
fn the_end_that_was_promised_is_not_put_off_by_a_restart() {
    let mut stage = Stage::of(2);
    let short = stage.ask(Request { max_duration: Some(mins(2)), ttl: mins(60), ..whole() });
    let revoked = stage.ask(Request { ttl: mins(60), ..whole() });
    stage.run(PoolCommand::Revoke { lease: revoked, grace: mins(2) });
    stage.pass(mins(1));
    stage.restart();
    stage.pass(mins(1));
    assert_eq!(stage.cause(short), Some(EndCause::MaxDurationPassed));
    assert_eq!(stage.cause(revoked), Some(EndCause::Revoked));
}

#[test]
fn tokens_and_lease_numbers_never_go_back() {
    let mut stage = Stage::of(1);
    let last = (0..5).fold(None, |_, _| {
        let lease = stage.ask(whole());
        stage.release(lease);
        Some((lease, stage.token(lease)))
    });
    let (lease, token) = last.unwrap();
    let is_counters = |row: &PoolRow| matches!(row, PoolRow::Counters(_));
    for (counters, others) in [(true, true), (false, true), (true, false)] {
        let mut again = Stage::of(1);
        again.rows = stage.rows.clone();
        again.rows.retain(|row| if is_counters(row) { counters } else { others });
        again.restart();
        come_back(&mut again, 1);
        let next = again.ask(whole());
        assert!(next > lease && again.token(next) > token, "{next} after {lease}");
    }
}

#[test]
fn an_old_row_does_not_turn_the_counters_back() {
    let mut stage = Stage::of(1);
    for _ in 0..3 {
        let lease = stage.ask(whole());
        stage.release(lease);
    }
    let oldest = stage.rows.iter().find(|row| matches!(row, PoolRow::Counters(_))).cloned();
    stage.rows.extend(oldest);
    stage.restart();
    come_back(&mut stage, 1);
    let lease = stage.ask(whole());
    assert_eq!((lease, stage.token(lease)), (LeaseId(3), Token(3)));
}

#[test]
fn gpu_ids_stay_when_devices_are_found_in_another_order() {
    let mut stage = Stage::of(4);
    let of_device = |stage: &Stage| -> Vec<(GpuId, String)> {
        stage.pool.devices().map(|view| (view.gpu_id, view.facts.identity.to_string())).collect()
    };
    let before = of_device(&stage);
    stage.restart();
    let mut turned = devices("a", 4);
    turned.reverse();
    turned.insert(1, device("GPU-new", "NVIDIA H100 80GB HBM3", 80));
    let (_, ids) = stage.see(node("a"), turned);
    assert_eq!(ids, [3, 4, 2, 1, 0].map(DeviceId));
    assert_eq!(of_device(&stage)[..4], before);
    assert_eq!(stage.device(4).gpu_id, GpuId(4), "the new one gets a new number");
}

#[test]
fn a_device_that_has_gone_keeps_its_number_to_itself() {
    let mut stage = Stage::of(2);
    stage.restart();
    let (_, ids) = stage.see(node("a"), vec![devices("a", 2).remove(1), device("GPU-new", "NVIDIA H100", 80)]);
    assert_eq!(ids, [DeviceId(1), DeviceId(2)]);
    assert_eq!(stage.device(2).gpu_id, GpuId(2));
}

#[test]
fn round_robin_goes_on_where_it_was() {
    let mut stage = Stage::of(3);
    stage.place(by(PlacementStrategy::RoundRobin, part(100)));
    stage.place(by(PlacementStrategy::RoundRobin, part(100)));
    stage.restart();
    come_back(&mut stage, 3);
    assert_eq!(stage.place(by(PlacementStrategy::RoundRobin, part(100))), [2]);
}

#[test]
fn the_order_of_the_queue_survives() {
    let mut stage = Stage::of(1);
    let mut holder = stage.ask(whole());
    let low = stage.ask(Request { priority: -1, ..whole() });
    let (first, second) = (stage.ask(owned("bob", whole())), stage.ask(owned("alice", whole())));
    stage.restart();
    come_back(&mut stage, 1);
    for next in [first, second, low] {
        stage.release(holder);
        assert!(stage.is_active(next), "{next}");
        holder = next;
    }
}

#[test]
fn waiters_have_their_whole_patience_again() {
    let mut stage = Stage::of(1);
    stage.ask(whole());
    let waits = stage.ask(whole());
    stage.pass(secs(14));
    stage.restart();
    stage.pass(secs(14));
    assert!(stage.is_queued(waits));
}

#[test]
fn keys_cordons_policies_and_usage_survive() {
    let mut stage = Stage::of(2);
    let ask = || PoolCommand::Request { request: Arc::new(owned("alice", whole())), key: Some("job".into()) };
    let lease = stage.run(ask());
    stage.run(PoolCommand::Cordon { device: DeviceId(1), cordon: CordonState::Cordoned });
    let quota = OwnerQuota { held: Some(Share::WHOLE), ..OwnerQuota::default() };
    let rules = Policies { default_quota: quota, ..Policies::unlimited() };
    stage.run(PoolCommand::SetPolicies { policies: Box::new(rules.clone()) });
    stage.pass(secs(10));
    let CommandReply::Lease(id) = lease else { panic!("{lease:?}") };
    stage.release(id);
    let used: Vec<_> = stage.pool.usage().collect();
    stage.restart();
    come_back(&mut stage, 2);
    assert_eq!(stage.run(ask()), lease);
    assert_eq!(stage.device(1).closed, Some(DeviceClosure::Cordoned));
    assert_eq!(*stage.pool.policies(), rules);
    assert_eq!(stage.pool.usage().collect::<Vec<_>>(), used);
    assert_eq!(used[0].share_millis, 10_000 * 1_000);
}

#[test]
fn links_survive() {
    let mut stage = Stage::of(4);
    let links = vec![DeviceLink { a: GpuId(1), b: GpuId(3), kind: LinkKind::NvLink(4) }];
    stage.run(PoolCommand::Links { node: NodeId(0), links });
    stage.restart();
    come_back(&mut stage, 4);
    assert_eq!(stage.place(gpus(2)), [1, 3]);
}

#[test]
fn a_held_lease_lives_one_ttl_for_its_holder_to_come_back() {
    let mut stage = Stage::of(1);
    let lease = stage.ask(whole());
    let token = stage.token(lease);
    stage.run(PoolCommand::Attach { lease, token, holder: LeaseHolder::Connection });
    stage.restart();
    stage.pass(secs(59));
    stage.run(PoolCommand::Attach { lease, token, holder: LeaseHolder::Connection });
    stage.pass(mins(60));
    assert!(stage.is_active(lease));
}

#[test]
fn draining_and_quarantine_survive() {
    let mut stage = Stage::draining(2, secs(10));
    let (stuck, drains) = (stage.ask(whole()), stage.ask(whole()));
    stage.release(stuck);
    stage.pass(secs(10));
    stage.release(drains);
    stage.restart();
    come_back(&mut stage, 2);
    assert!(!stage.lease(stuck).draining, "a reading after the restart shows both are gone");

    let mut stage = Stage::draining(1, secs(10));
    let stuck = stage.ask(whole());
    stage.release(stuck);
    stage.pass(secs(10));
    stage.restart();
    stage.see(node("a"), devices("a", 1));
    assert_eq!(stage.device(0).closed, Some(DeviceClosure::Quarantined));
    stage.run(PoolCommand::Drained { lease: stuck });
    assert_eq!(stage.device(0).closed, None);
}

#[test]
fn what_is_forgotten_stays_forgotten() {
    let mut stage = Stage::of(1);
    let lease = stage.ask(whole());
    stage.release(lease);
    stage.rows.push(PoolRow::Forget(lease));
    stage.restart();
    assert_eq!(stage.apply(PoolCommand::Release { lease }), Err(CommandDenied::UnknownLease(lease)));
}

#[test]
fn a_node_may_number_its_devices_and_a_number_is_never_anothers() {
    let mut stage = Stage::of(0);
    let numbers = vec![GpuId(1), GpuId(5), GpuId(1), GpuId(u32::MAX)];
    stage.run(PoolCommand::NodeSeen { facts: node("a"), devices: devices("a", 5), numbers });
    let given: Vec<GpuId> = stage.pool.devices().map(|device| device.gpu_id).collect();
    assert_eq!(given, [1, 5, 6, 7, 8].map(GpuId));
    assert!(stage.restart().is_empty());
    let numbers = vec![GpuId(3); 5];
    stage.run(PoolCommand::NodeSeen { facts: node("a"), devices: devices("a", 5), numbers });
    assert_eq!(stage.pool.devices().map(|device| device.gpu_id).collect::<Vec<_>>(), given);
}

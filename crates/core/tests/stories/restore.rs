//! Restart after a crash: rows restore promises, and bad rows are skipped and reported.

use std::sync::Arc;

use crate::support::*;
use gpupool_core::{
    CommandDenied, CommandReply, CordonState, DeviceClosure, DeviceId, DeviceLink, EndCause, GpuId, LeaseHolder,
    LeaseId, LeaseRow, LinkKind, NodeId, OwnerQuota, PlacementStrategy, Policies, PoolCommand, PoolRow, Request, Share,
    Token,
};

/// A node returns with its devices, read as idle.
fn reconnect_node(test: &mut PoolFixture, count: usize) {
    test.add_node(node("a"), devices("a", count));
}

#[test]
fn promises_survive_a_restart() {
    let mut test = PoolFixture::of(2);
    let (a, b) = (test.request(part(300)), test.request(Request { cpus: cpus(4), ..whole() }));
    let (released, queued) = (test.request(part(100)), test.request(gpus(2)));
    test.release(released);
    let before: Vec<LeaseRow> = test.pool.leases().map(|lease| lease.row().clone()).collect();
    assert!(test.restart().is_empty());
    let after: Vec<LeaseRow> = test.pool.leases().map(|lease| lease.row().clone()).collect();
    assert_eq!(before, after);
    assert_eq!((test.device(0).promised, test.device(0).leases), (Share(300), vec![a]));
    assert_eq!((test.device(1).promised, test.device(1).leases), (Share::WHOLE, vec![b]));
    assert!(test.is_queued(queued));
    assert_eq!(test.cause(released), Some(EndCause::ByOwner));
}

#[test]
fn a_device_takes_no_new_work_until_it_is_seen_again() {
    let mut test = PoolFixture::of(2);
    test.restart();
    assert_eq!(test.device(0).closed, Some(DeviceClosure::NodeLost));
    let lease = test.request(whole());
    assert!(test.is_queued(lease));
    test.register_node(node("a"), devices("a", 1));
    assert_eq!(test.devices_of(lease), [0]);
    assert_eq!(test.device(1).closed, Some(DeviceClosure::NotSeen), "the node came back without it");
}

#[test]
fn every_lease_gets_one_full_ttl() {
    let mut test = PoolFixture::of(1);
    let lease = test.request(Request { ttl: secs(30), ..whole() });
    test.advance(secs(29));
    test.restart();
    test.advance(secs(29));
    assert!(test.is_active(lease));
    test.advance(secs(1));
    assert_eq!(test.cause(lease), Some(EndCause::TtlPassed));
}

#[test]
fn a_restart_does_not_delay_promised_ends() {
    let mut test = PoolFixture::of(2);
    let short = test.request(Request { max_duration: Some(mins(2)), ttl: mins(60), ..whole() });
    let revoked = test.request(Request { ttl: mins(60), ..whole() });
    test.apply_ok(PoolCommand::Revoke { lease: revoked, grace: mins(2), revocation: None });
    test.advance(mins(1));
    test.restart();
    test.advance(mins(1));
    assert_eq!(test.cause(short), Some(EndCause::MaxDurationPassed));
    assert_eq!(test.cause(revoked), Some(EndCause::Revoked));
}

#[test]
fn tokens_and_lease_numbers_never_go_back() {
    let mut test = PoolFixture::of(1);
    let last = (0..5).fold(None, |_, _| {
        let lease = test.request(whole());
        test.release(lease);
        Some((lease, test.token(lease)))
    });
    let (lease, token) = last.unwrap();
    let is_counters = |row: &PoolRow| matches!(row, PoolRow::Counters(_));
    for (counters, others) in [(true, true), (false, true), (true, false)] {
        let mut again = PoolFixture::of(1);
        again.rows = test.rows.clone();
        again.rows.retain(|row| if is_counters(row) { counters } else { others });
        again.restart();
        reconnect_node(&mut again, 1);
        let next = again.request(whole());
        assert!(next > lease && again.token(next) > token, "{next} after {lease}");
    }
}

#[test]
fn an_old_row_does_not_turn_the_counters_back() {
    let mut test = PoolFixture::of(1);
    for _ in 0..3 {
        let lease = test.request(whole());
        test.release(lease);
    }
    let oldest = test.rows.iter().find(|row| matches!(row, PoolRow::Counters(_))).cloned();
    test.rows.extend(oldest);
    test.restart();
    reconnect_node(&mut test, 1);
    let lease = test.request(whole());
    assert_eq!((lease, test.token(lease)), (LeaseId(3), Token(3)));
}

#[test]
fn gpu_ids_stay_when_devices_are_found_in_another_order() {
    let mut test = PoolFixture::of(4);
    let of_device = |test: &PoolFixture| -> Vec<(GpuId, String)> {
        test.pool.devices().map(|view| (view.gpu_id, view.facts.identity.to_string())).collect()
    };
    let before = of_device(&test);
    test.restart();
    let mut turned = devices("a", 4);
    turned.reverse();
    turned.insert(1, device("GPU-new", "NVIDIA H100 80GB HBM3", 80));
    let (_, ids) = test.register_node(node("a"), turned);
    assert_eq!(ids, [3, 4, 2, 1, 0].map(DeviceId));
    assert_eq!(of_device(&test)[..4], before);
    assert_eq!(test.device(4).gpu_id, GpuId(4), "the new one gets a new number");
}

#[test]
fn the_number_of_a_missing_device_stays_reserved() {
    let mut test = PoolFixture::of(2);
    test.restart();
    let (_, ids) = test.register_node(node("a"), vec![devices("a", 2).remove(1), device("GPU-new", "NVIDIA H100", 80)]);
    assert_eq!(ids, [DeviceId(1), DeviceId(2)]);
    assert_eq!(test.device(2).gpu_id, GpuId(2));
}

#[test]
fn round_robin_continues_after_a_restart() {
    let mut test = PoolFixture::of(3);
    test.place(by(PlacementStrategy::RoundRobin, part(100)));
    test.place(by(PlacementStrategy::RoundRobin, part(100)));
    test.restart();
    reconnect_node(&mut test, 3);
    assert_eq!(test.place(by(PlacementStrategy::RoundRobin, part(100))), [2]);
}

#[test]
fn the_order_of_the_queue_survives() {
    let mut test = PoolFixture::of(1);
    let mut holder = test.request(whole());
    let low = test.request(Request { priority: -1, ..whole() });
    let (first, second) = (test.request(owned("bob", whole())), test.request(owned("alice", whole())));
    test.restart();
    reconnect_node(&mut test, 1);
    for next in [first, second, low] {
        test.release(holder);
        assert!(test.is_active(next), "{next}");
        holder = next;
    }
}

#[test]
fn waiters_get_their_full_patience_again() {
    let mut test = PoolFixture::of(1);
    test.request(whole());
    let waits = test.request(whole());
    test.advance(secs(14));
    test.restart();
    test.advance(secs(14));
    assert!(test.is_queued(waits));
}

#[test]
fn keys_cordons_policies_and_usage_survive() {
    let mut test = PoolFixture::of(2);
    let ask = || PoolCommand::Request {
        request: Arc::new(owned("alice", whole())),
        key: Some("job".into()),
        by_admin: false,
    };
    let lease = test.apply_ok(ask());
    test.apply_ok(PoolCommand::Cordon { device: DeviceId(1), cordon: CordonState::Cordoned });
    let quota = OwnerQuota { held: Some(Share::WHOLE), ..OwnerQuota::default() };
    let rules = Policies { default_quota: quota, ..Policies::unlimited() };
    test.apply_ok(PoolCommand::SetPolicies { policies: Box::new(rules.clone()) });
    test.advance(secs(10));
    let CommandReply::Lease(id) = lease else { panic!("{lease:?}") };
    test.release(id);
    let used: Vec<_> = test.pool.usage().collect();
    test.restart();
    reconnect_node(&mut test, 2);
    assert_eq!(test.apply_ok(ask()), lease);
    assert_eq!(test.device(1).closed, Some(DeviceClosure::Cordoned));
    assert_eq!(*test.pool.policies(), rules);
    assert_eq!(test.pool.usage().collect::<Vec<_>>(), used);
    assert_eq!(used[0].share_millis, 10_000 * 1_000);
}

#[test]
fn links_survive() {
    let mut test = PoolFixture::of(4);
    let links = vec![DeviceLink { a: GpuId(1), b: GpuId(3), kind: LinkKind::NvLink(4) }];
    test.apply_ok(PoolCommand::Links { node: NodeId(0), links });
    test.restart();
    reconnect_node(&mut test, 4);
    assert_eq!(test.place(gpus(2)), [1, 3]);
}

#[test]
fn a_held_lease_lives_one_ttl_for_its_holder_to_come_back() {
    let mut test = PoolFixture::of(1);
    let lease = test.request(whole());
    let token = test.token(lease);
    test.apply_ok(PoolCommand::Attach { lease, token, holder: LeaseHolder::Connection });
    test.restart();
    test.advance(secs(59));
    test.apply_ok(PoolCommand::Attach { lease, token, holder: LeaseHolder::Connection });
    test.advance(mins(60));
    assert!(test.is_active(lease));
}

#[test]
fn draining_and_quarantine_survive() {
    let mut test = PoolFixture::draining(2, secs(10));
    let (stuck, drains) = (test.request(whole()), test.request(whole()));
    test.release(stuck);
    test.advance(secs(10));
    test.release(drains);
    test.restart();
    reconnect_node(&mut test, 2);
    assert!(!test.lease(stuck).draining, "a reading after the restart shows both are gone");

    let mut test = PoolFixture::draining(1, secs(10));
    let stuck = test.request(whole());
    test.release(stuck);
    test.advance(secs(10));
    test.restart();
    test.register_node(node("a"), devices("a", 1));
    assert_eq!(test.device(0).closed, Some(DeviceClosure::Quarantined));
    test.apply_ok(PoolCommand::Drained { lease: stuck });
    assert_eq!(test.device(0).closed, None);
}

#[test]
fn a_forgotten_lease_stays_forgotten() {
    let mut test = PoolFixture::of(1);
    let lease = test.request(whole());
    test.release(lease);
    test.rows.push(PoolRow::Forget(lease));
    test.restart();
    assert_eq!(test.apply(PoolCommand::Release { lease }), Err(CommandDenied::UnknownLease(lease)));
}

#[test]
fn a_node_may_number_its_devices_without_duplicates() {
    let mut test = PoolFixture::of(0);
    let numbers = vec![GpuId(1), GpuId(5), GpuId(1), GpuId(u32::MAX)];
    test.apply_ok(PoolCommand::NodeSeen { facts: node("a"), devices: devices("a", 5), numbers });
    let given: Vec<GpuId> = test.pool.devices().map(|device| device.gpu_id).collect();
    assert_eq!(given, [1, 5, 6, 7, 8].map(GpuId));
    assert!(test.restart().is_empty());
    let numbers = vec![GpuId(3); 5];
    test.apply_ok(PoolCommand::NodeSeen { facts: node("a"), devices: devices("a", 5), numbers });
    assert_eq!(test.pool.devices().map(|device| device.gpu_id).collect::<Vec<_>>(), given);
}

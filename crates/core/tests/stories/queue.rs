//! Whose turn it is: order of arrival, priorities, backfill that delays nobody, quotas and fair share.

use crate::support::*;
use gpupool_core::{
    CommandDenied, DeviceFacts, LeaseId, LoadThresholds, Millis, OwnerQuota, Policies, PolicyMatch, PoolCommand,
    PoolTime, QueueOrder, QueueTurn, Request, RequestPolicy, Share, Unsatisfiable,
};

/// Holds its GPU through any story.
fn stays() -> Request {
    Request { ttl: mins(24 * 60), ..whole() }
}

fn held_for(minutes: u64, request: Request) -> Request {
    Request { max_duration: Some(mins(minutes)), ttl: mins(24 * 60), ..request }
}

fn quota_of(owner: &str, quota: OwnerQuota) -> Policies {
    Policies { quotas: [(owner.into(), quota)].into(), ..Policies::unlimited() }
}

fn position(stage: &Stage, lease: LeaseId) -> usize {
    stage.pool.explain(lease).expect("it waits").position
}

#[test]
fn who_came_first_is_served_first() {
    let mut stage = Stage::of(1);
    let mut holder = stage.ask(stays());
    let waiting: Vec<LeaseId> = (0..3).map(|_| stage.ask(stays())).collect();
    assert_eq!(waiting.iter().map(|lease| position(&stage, *lease)).collect::<Vec<_>>(), [1, 2, 3]);
    for next in waiting {
        stage.release(holder);
        assert!(stage.is_active(next));
        assert_eq!(stage.decision(next).turn, QueueTurn::Next);
        holder = next;
    }
}

#[test]
fn a_new_request_never_overtakes_a_waiting_one_that_could_use_the_same_gpu() {
    let mut stage = Stage::of(2);
    let holder = stage.ask(stays());
    let wants_two = stage.ask(gpus(2));
    let wants_one = stage.ask(whole());
    assert_eq!(stage.why(wants_one), "position 2; there is room, but 1 earlier request is ahead");
    assert_eq!(stage.refused(Request { queue: false, ..part(100) }), CommandDenied::NoCapacity, "nor does a small one");
    stage.release(holder);
    assert!(stage.is_active(wants_two) && stage.is_queued(wants_one));
}

#[test]
fn a_higher_priority_goes_first_and_equal_ones_in_order() {
    let mut stage = Stage::of(1);
    let holder = stage.ask(stays());
    let low = stage.ask(Request { priority: -1, ..whole() });
    let first = stage.ask(whole());
    let second = stage.ask(whole());
    let high = stage.ask(Request { priority: 7, ..whole() });
    let positions = [high, first, second, low].map(|lease| position(&stage, lease));
    assert_eq!(positions, [1, 2, 3, 4]);
    stage.release(holder);
    assert!(stage.is_active(high));
}

#[test]
fn a_higher_priority_takes_what_a_lower_one_waits_for() {
    let mut stage = Stage::of(2);
    stage.ask(stays());
    stage.ask(gpus(2));
    let urgent = stage.ask(Request { priority: 1, ..whole() });
    assert!(stage.is_active(urgent));
}

#[test]
fn a_request_passes_others_on_devices_they_could_not_use() {
    let mut stage = Stage::empty();
    stage.add(node("a"), vec![device("h", "NVIDIA H100", 80), device("v", "NVIDIA V100", 32)]);
    let h100 = |request| Request { select: model("H100"), ..request };
    stage.ask(h100(stays()));
    stage.ask(h100(whole()));
    let other = stage.ask(Request { select: model("V100"), ..whole() });
    assert_eq!((stage.on(other), stage.decision(other).turn), (vec![1], QueueTurn::PassedOthers));
    let any = stage.ask(whole());
    assert!(stage.is_queued(any));
    stage.release(other);
    assert_eq!((stage.on(any), stage.decision(any).turn), (vec![1], QueueTurn::PassedOthers));
}

#[test]
fn a_lease_that_ends_before_the_first_can_start_may_use_what_it_waits_for() {
    let mut stage = Stage::of(2);
    stage.ask(held_for(60, whole()));
    let first = stage.ask(gpus(2));
    let long = stage.ask(held_for(61, whole()));
    assert!(stage.is_queued(long), "it would end after the first could start");
    stage.release(long);
    let short = stage.ask(held_for(60, whole()));
    assert_eq!(stage.decision(short).turn, QueueTurn::EndsBeforeOthersStart);
    stage.pass_asking(mins(60));
    assert!(stage.is_active(first), "it was not delayed by a minute");
}

#[test]
fn who_waits_already_may_go_early_by_its_max_duration_too() {
    let mut stage = Stage::of(2);
    stage.ask(held_for(60, whole()));
    let quick = stage.ask(held_for(10, whole()));
    let first = stage.ask(gpus(2));
    let short = stage.ask(held_for(20, whole()));
    stage.release(quick);
    assert!(stage.is_queued(first));
    assert_eq!(stage.decision(short).turn, QueueTurn::EndsBeforeOthersStart);
}

#[test]
fn nobody_goes_early_while_the_first_ones_start_is_not_certain() {
    let mut stage = Stage::of(2);
    stage.ask(stays());
    stage.ask(gpus(2));
    let short = stage.ask(held_for(1, whole()));
    assert!(stage.is_queued(short), "the holder may end at any moment");
}

#[test]
fn an_announced_revocation_makes_a_start_certain() {
    let mut stage = Stage::of(2);
    let holder = stage.ask(stays());
    stage.ask(gpus(2));
    stage.run(PoolCommand::Revoke { lease: holder, grace: mins(30) });
    let short = stage.ask(held_for(30, whole()));
    assert!(stage.is_active(short));
}

#[test]
fn an_owner_waits_for_its_own_quota_and_others_do_not() {
    let quota = OwnerQuota { held: Some(Share::WHOLE), ..OwnerQuota::default() };
    let mut stage = Stage::under(quota_of("alice", quota), 3);
    let first = stage.ask(owned("alice", stays()));
    let second = stage.ask(owned("alice", whole()));
    assert_eq!(stage.why(second), "position 1; the owner holds 1 of its quota of 1 GPUs");
    let bob = stage.ask(owned("bob", gpus(2)));
    assert!(stage.is_active(bob), "who waits for a quota holds up nobody");
    stage.release(first);
    assert!(stage.is_active(second));
    let refused = stage.refused(owned("alice", gpus(2)));
    assert_eq!(
        refused,
        CommandDenied::Unsatisfiable(Unsatisfiable::OverQuota { wanted: Share(2000), quota: Share::WHOLE })
    );
}

#[test]
fn a_quota_counts_parts() {
    let quota = OwnerQuota { held: Some(Share(700)), ..OwnerQuota::default() };
    let mut stage = Stage::under(quota_of("alice", quota), 2);
    stage.ask(owned("alice", part(400)));
    let too_much = stage.ask(owned("alice", part(400)));
    let fits = stage.ask(owned("alice", part(300)));
    assert!(stage.is_queued(too_much) && stage.is_active(fits));
}

#[test]
fn used_up_gpu_hours_come_back_with_the_next_period() {
    let quota = OwnerQuota { share_hours: Some(1_000), ..OwnerQuota::default() };
    let mut stage = Stage::under(Policies { period: mins(10 * 60), ..quota_of("alice", quota) }, 1);
    let first = stage.ask(owned("alice", stays()));
    stage.pass(HOUR);
    stage.release(first);
    let second = stage.ask(owned("alice", whole()));
    assert_eq!(stage.why(second), "position 1; the owner has used up its GPU-hours; the next period starts in 8 h");
    let bob = stage.ask(owned("bob", whole()));
    assert!(stage.is_active(bob), "bob's hours are his own");
    stage.release(bob);
    let next_period = PoolTime(10 * HOUR.0);
    stage.pass_asking(Millis(next_period.since(stage.now).0 - 1));
    assert!(stage.is_queued(second));
    stage.pass(Millis(1));
    assert!(stage.is_active(second), "nobody had to ask for it");
}

#[test]
fn fair_share_serves_who_holds_least_for_its_weight() {
    let weight = |weight| OwnerQuota { weight, ..OwnerQuota::default() };
    let rules = Policies {
        queue: QueueOrder::FairShare,
        quotas: [("alice".into(), weight(2)), ("bob".into(), weight(1))].into(),
        ..Policies::unlimited()
    };
    let mut stage = Stage::under(rules, 6);
    let holders: Vec<LeaseId> = (0..6).map(|_| stage.ask(stays())).collect();
    let alice: Vec<LeaseId> = (0..6).map(|_| stage.ask(owned("alice", stays()))).collect();
    let bob: Vec<LeaseId> = (0..6).map(|_| stage.ask(owned("bob", stays()))).collect();
    for holder in holders {
        stage.release(holder);
    }
    let active = |leases: &[LeaseId]| leases.iter().filter(|lease| stage.is_active(**lease)).count();
    assert_eq!((active(&alice), active(&bob)), (4, 2), "bob came after all of alice's");
}

#[test]
fn first_come_first_served_does_not_look_at_who_asks() {
    let mut stage = Stage::of(1);
    let holder = stage.ask(owned("alice", stays()));
    let alice = stage.ask(owned("alice", whole()));
    stage.ask(owned("bob", whole()));
    stage.release(holder);
    assert!(stage.is_active(alice));
}

#[test]
fn a_policy_can_raise_the_priority_of_an_owner() {
    let boosted = RequestPolicy {
        applies_to: PolicyMatch { owners: vec!["prod".into()], ..PolicyMatch::default() },
        priority_boost: 100,
        ..policy("prod")
    };
    let mut stage = Stage::under(policies([boosted]), 1);
    let holder = stage.ask(stays());
    let dev = stage.ask(Request { priority: 50, ..owned("dev", whole()) });
    let prod = stage.ask(owned("prod", whole()));
    assert_eq!((position(&stage, prod), position(&stage, dev)), (1, 2));
    stage.release(holder);
    assert!(stage.is_active(prod));
}

#[test]
fn a_waiter_is_told_what_it_needs_what_is_free_and_when_the_first_is_due() {
    let mut stage = Stage::of(2);
    stage.ask(held_for(12, whole()));
    let lease = stage.ask(gpus(2));
    assert_eq!(stage.why(lease), "position 1; needs 2 free GPUs; 1 is free; the next is due in ≤ 12 min");
    stage.pass_asking(secs(10));
    assert_eq!(stage.why(lease), "position 1; needs 2 free GPUs; 1 is free; the next is due in ≤ 12 min");
    stage.pass_asking(mins(11));
    assert_eq!(stage.why(lease), "position 1; needs 2 free GPUs; 1 is free; the next is due in ≤ 50 s");
}

#[test]
fn a_device_is_not_due_when_only_one_of_its_leases_is() {
    let mut stage = Stage::of(1);
    stage.ask(held_for(12, part(500)));
    let stays = stage.ask(Request { ttl: mins(24 * 60), ..part(500) });
    let lease = stage.ask(whole());
    assert_eq!(stage.why(lease), "position 1; needs 1 free GPU; 0 are free");
    stage.run(PoolCommand::Revoke { lease: stays, grace: mins(30) });
    assert_eq!(stage.why(lease), "position 1; needs 1 free GPU; 0 are free; the next is due in ≤ 30 min");
}

#[test]
fn what_drains_is_not_due_at_any_certain_time() {
    let mut stage = Stage::draining(1, mins(10));
    let over = stage.ask(held_for(1, whole()));
    stage.pass(mins(1));
    assert!(stage.lease(over).draining);
    let lease = stage.ask(whole());
    assert_eq!(stage.why(lease), "position 1; needs 1 free GPU; 0 are free");
}

#[test]
fn nobody_goes_early_past_a_waiter_whose_devices_were_renumbered_meanwhile() {
    let v100 = |name: &str| device(name, "NVIDIA V100", 32);
    let mut stage = Stage::empty();
    stage.add(node("a"), vec![v100("v0"), v100("v1")]);
    stage.add(node("b"), devices("b", 2));
    let on = |select, request| Request { select, ..request };
    stage.ask(held_for(60, on(model("V100"), gpus(2))));
    stage.ask(on(model("H100"), stays()));
    let ends = stage.ask(on(model("H100"), stays()));
    let any_two = stage.ask(gpus(2));
    let two_h100 = stage.ask(on(model("H100"), gpus(2)));
    // One V100 turns out to be different: kinds of devices are counted anew while everybody waits.
    let labelled = DeviceFacts { labels: [("slot".into(), "2".into())].into(), ..v100("v1") };
    stage.see(node("a"), vec![v100("v0"), labelled]);
    stage.release(ends);
    assert!(stage.is_queued(any_two) && stage.is_queued(two_h100));
    let short = stage.ask(held_for(30, whole()));
    assert!(stage.is_queued(short), "two H100 may be free at any moment, and somebody waits for them");
}

#[test]
fn no_time_is_told_where_none_is_certain() {
    let mut stage = Stage::of(2);
    stage.ask(stays());
    let lease = stage.ask(gpus(2));
    assert_eq!(stage.why(lease), "position 1; needs 2 free GPUs; 1 is free");
}

#[test]
fn who_does_not_wait_has_nothing_to_explain() {
    let mut stage = Stage::of(1);
    let lease = stage.ask(whole());
    assert_eq!(stage.pool.explain(lease), None);
    assert_eq!(stage.pool.explain(LeaseId(9)), None);
}

#[test]
fn a_request_too_choosy_for_every_device_keeps_nobody_from_them() {
    let mut stage = Stage::of(2);
    for device in 0..2 {
        stage.busy(device, gib(2), percent(0));
    }
    let none_will_do = LoadThresholds { memory: percent(1), utilization: percent(1) };
    let choosy = stage.ask(Request { thresholds: Some(none_will_do), cpus: cpus(1), ..whole() });
    let other = stage.ask(careful(Request { cpus: cpus(1), ..whole() }));
    assert!(stage.is_queued(choosy) && stage.is_active(other));
}

#[test]
fn a_choosy_request_is_not_passed_on_the_device_it_wants() {
    let mut stage = Stage::of(2);
    let holder = stage.ask(Request { select: named(0), ..whole() });
    stage.busy(1, gib(2), percent(0));
    let strict = LoadThresholds { memory: percent(1), utilization: percent(1) };
    stage.pass(Millis(1));
    stage.idle(0);
    let choosy = stage.ask(Request { thresholds: Some(strict), ..whole() });
    assert_eq!(stage.place(whole()), [1], "the busy one is nobody's");
    let last = stage.ask(whole());
    stage.release(holder);
    assert!(stage.is_active(choosy) && stage.is_queued(last));
}

#[test]
fn any_number_of_wishes_held_back_by_a_quota_holds_nobody_else_back() {
    let mut stage = Stage::under(quota_of("hog", OwnerQuota { held: Some(Share::WHOLE), ..OwnerQuota::default() }), 2);
    assert!(!stage.place(owned("hog", whole())).is_empty());
    for bytes in 1..=1_100 {
        let waits = stage.ask(owned("hog", memory(gib(1) + gpupool_core::Bytes(bytes))));
        assert!(stage.is_queued(waits));
    }
    let other = stage.ask(owned("alice", whole()));
    assert!(stage.is_active(other));
}

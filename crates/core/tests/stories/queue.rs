//! Order of requests: arrival, priorities, backfill without delays, quotas and fair share.

use crate::support::*;
use gpupool_core::{
    CommandDenied, DeviceFacts, LeaseId, LoadThresholds, Millis, OwnerQuota, Policies, PolicyMatch, PoolCommand,
    PoolTime, QueueOrder, QueueTurn, Request, RequestPolicy, Share, Unsatisfiable,
};

/// Request that holds its GPU through any test.
fn stays() -> Request {
    Request { ttl: mins(24 * 60), ..whole() }
}

fn held_for(minutes: u64, request: Request) -> Request {
    Request { max_duration: Some(mins(minutes)), ttl: mins(24 * 60), ..request }
}

fn quota_of(owner: &str, quota: OwnerQuota) -> Policies {
    Policies { quotas: [(owner.into(), quota)].into(), ..Policies::unlimited() }
}

fn position(test: &PoolFixture, lease: LeaseId) -> usize {
    test.pool.explain(lease).expect("it waits").position
}

#[test]
fn requests_are_served_in_order_of_arrival() {
    let mut test = PoolFixture::of(1);
    let mut holder = test.request(stays());
    let waiting: Vec<LeaseId> = (0..3).map(|_| test.request(stays())).collect();
    assert_eq!(waiting.iter().map(|lease| position(&test, *lease)).collect::<Vec<_>>(), [1, 2, 3]);
    for next in waiting {
        test.release(holder);
        assert!(test.is_active(next));
        assert_eq!(test.decision(next).turn, QueueTurn::Next);
        holder = next;
    }
}

#[test]
fn a_new_request_never_overtakes_a_waiting_one_that_could_use_the_same_gpu() {
    let mut test = PoolFixture::of(2);
    let holder = test.request(stays());
    let wants_two = test.request(gpus(2));
    let wants_one = test.request(whole());
    assert_eq!(test.wait_reason(wants_one), "position 2; there is room, but 1 earlier request is ahead");
    assert_eq!(
        test.expect_denied(Request { queue: false, ..part(100) }),
        CommandDenied::NoCapacity,
        "nor does a small one"
    );
    test.release(holder);
    assert!(test.is_active(wants_two) && test.is_queued(wants_one));
}

#[test]
fn a_higher_priority_goes_first_and_equal_ones_in_order() {
    let mut test = PoolFixture::of(1);
    let holder = test.request(stays());
    let low = test.request(Request { priority: -1, ..whole() });
    let first = test.request(whole());
    let second = test.request(whole());
    let high = test.request(Request { priority: 7, ..whole() });
    let positions = [high, first, second, low].map(|lease| position(&test, lease));
    assert_eq!(positions, [1, 2, 3, 4]);
    test.release(holder);
    assert!(test.is_active(high));
}

#[test]
fn a_higher_priority_takes_devices_a_lower_one_waits_for() {
    let mut test = PoolFixture::of(2);
    test.request(stays());
    test.request(gpus(2));
    let urgent = test.request(Request { priority: 1, ..whole() });
    assert!(test.is_active(urgent));
}

#[test]
fn a_request_passes_others_on_devices_they_could_not_use() {
    let mut test = PoolFixture::empty();
    test.add_node(node("a"), vec![device("h", "NVIDIA H100", 80), device("v", "NVIDIA V100", 32)]);
    let h100 = |request| Request { select: model("H100"), ..request };
    test.request(h100(stays()));
    test.request(h100(whole()));
    let other = test.request(Request { select: model("V100"), ..whole() });
    assert_eq!((test.devices_of(other), test.decision(other).turn), (vec![1], QueueTurn::PassedOthers));
    let any = test.request(whole());
    assert!(test.is_queued(any));
    test.release(other);
    assert_eq!((test.devices_of(any), test.decision(any).turn), (vec![1], QueueTurn::PassedOthers));
}

#[test]
fn a_lease_that_ends_before_the_first_can_start_may_pass_it() {
    let mut test = PoolFixture::of(2);
    test.request(held_for(60, whole()));
    let first = test.request(gpus(2));
    let long = test.request(held_for(61, whole()));
    assert!(test.is_queued(long), "it would end after the first could start");
    test.release(long);
    let short = test.request(held_for(60, whole()));
    assert_eq!(test.decision(short).turn, QueueTurn::EndsBeforeOthersStart);
    test.advance_with_heartbeats(mins(60));
    assert!(test.is_active(first), "it was not delayed by a minute");
}

#[test]
fn a_waiting_short_request_may_start_early_too() {
    let mut test = PoolFixture::of(2);
    test.request(held_for(60, whole()));
    let quick = test.request(held_for(10, whole()));
    let first = test.request(gpus(2));
    let short = test.request(held_for(20, whole()));
    test.release(quick);
    assert!(test.is_queued(first));
    assert_eq!(test.decision(short).turn, QueueTurn::EndsBeforeOthersStart);
}

#[test]
fn backfill_needs_a_certain_start_of_the_first_request() {
    let mut test = PoolFixture::of(2);
    test.request(stays());
    test.request(gpus(2));
    let short = test.request(held_for(1, whole()));
    assert!(test.is_queued(short), "the holder may end at any moment");
}

#[test]
fn an_announced_revocation_makes_a_start_certain() {
    let mut test = PoolFixture::of(2);
    let holder = test.request(stays());
    test.request(gpus(2));
    test.apply_ok(PoolCommand::Revoke { lease: holder, grace: mins(30), revocation: None });
    let short = test.request(held_for(30, whole()));
    assert!(test.is_active(short));
}

#[test]
fn a_quota_holds_back_its_own_owner_only() {
    let quota = OwnerQuota { held: Some(Share::WHOLE), ..OwnerQuota::default() };
    let mut test = PoolFixture::under(quota_of("alice", quota), 3);
    let first = test.request(owned("alice", stays()));
    let second = test.request(owned("alice", whole()));
    assert_eq!(test.wait_reason(second), "position 1; the owner holds 1 of its quota of 1 GPUs");
    let bob = test.request(owned("bob", gpus(2)));
    assert!(test.is_active(bob), "a waiter behind its quota blocks no other owner");
    test.release(first);
    assert!(test.is_active(second));
    let refused = test.expect_denied(owned("alice", gpus(2)));
    assert_eq!(
        refused,
        CommandDenied::Unsatisfiable(Unsatisfiable::OverQuota { wanted: Share(2000), quota: Share::WHOLE })
    );
}

#[test]
fn a_quota_counts_parts() {
    let quota = OwnerQuota { held: Some(Share(700)), ..OwnerQuota::default() };
    let mut test = PoolFixture::under(quota_of("alice", quota), 2);
    test.request(owned("alice", part(400)));
    let too_much = test.request(owned("alice", part(400)));
    let fits = test.request(owned("alice", part(300)));
    assert!(test.is_queued(too_much) && test.is_active(fits));
}

#[test]
fn used_up_gpu_hours_let_the_owner_wait_for_the_next_period() {
    let quota = OwnerQuota { share_hours: Some(1_000), ..OwnerQuota::default() };
    let mut test = PoolFixture::under(Policies { period: mins(10 * 60), ..quota_of("alice", quota) }, 1);
    let first = test.request(owned("alice", stays()));
    test.advance(HOUR);
    test.release(first);
    let second = test.request(owned("alice", whole()));
    assert_eq!(
        test.wait_reason(second),
        "position 1; the owner has used up its GPU-hours; the next period starts in 8 h"
    );
    let bob = test.request(owned("bob", whole()));
    assert!(test.is_active(bob), "bob's hours are his own");
    test.release(bob);
    let next_period = PoolTime(10 * HOUR.0);
    test.advance_with_heartbeats(Millis(next_period.since(test.now).0 - 1));
    assert!(test.is_queued(second));
    test.advance(Millis(1));
    assert!(test.is_active(second), "without a request in between");
}

#[test]
fn fair_share_serves_the_owner_with_the_least_weighted_share() {
    let weight = |weight| OwnerQuota { weight, ..OwnerQuota::default() };
    let rules = Policies {
        queue: QueueOrder::FairShare,
        quotas: [("alice".into(), weight(2)), ("bob".into(), weight(1))].into(),
        ..Policies::unlimited()
    };
    let mut test = PoolFixture::under(rules, 6);
    let holders: Vec<LeaseId> = (0..6).map(|_| test.request(stays())).collect();
    let alice: Vec<LeaseId> = (0..6).map(|_| test.request(owned("alice", stays()))).collect();
    let bob: Vec<LeaseId> = (0..6).map(|_| test.request(owned("bob", stays()))).collect();
    for holder in holders {
        test.release(holder);
    }
    let active = |leases: &[LeaseId]| leases.iter().filter(|lease| test.is_active(**lease)).count();
    assert_eq!((active(&alice), active(&bob)), (4, 2), "bob came after all of alice's");
}

#[test]
fn fifo_order_ignores_owners() {
    let mut test = PoolFixture::of(1);
    let holder = test.request(owned("alice", stays()));
    let alice = test.request(owned("alice", whole()));
    test.request(owned("bob", whole()));
    test.release(holder);
    assert!(test.is_active(alice));
}

#[test]
fn a_policy_can_raise_the_priority_of_an_owner() {
    let boosted = RequestPolicy {
        applies_to: PolicyMatch { owners: vec!["prod".into()], ..PolicyMatch::default() },
        priority_boost: 100,
        ..policy("prod")
    };
    let mut test = PoolFixture::under(policies([boosted]), 1);
    let holder = test.request(stays());
    let dev = test.request(Request { priority: 50, ..owned("dev", whole()) });
    let prod = test.request(owned("prod", whole()));
    assert_eq!((position(&test, prod), position(&test, dev)), (1, 2));
    test.release(holder);
    assert!(test.is_active(prod));
}

/// Policies under which owners may use priorities up to `most`, and an hour of waiting counts as 1.
fn ageing_up_to(most: i32) -> Policies {
    let fallback = RequestPolicy { max_priority: most, ..RequestPolicy::unlimited() };
    Policies { fallback, ageing_step: HOUR, ..Policies::unlimited() }
}

#[test]
fn a_waiting_request_is_not_overtaken_forever() {
    for (rules, is_served) in [(ageing_up_to(2), true), (Policies::unlimited(), false)] {
        let mut test = PoolFixture::under(rules, 1);
        let mut holder = test.request(stays());
        let low = test.request(whole());
        for _ in 0..8 {
            let urgent = test.request(Request { priority: 2, ..stays() });
            test.advance_with_heartbeats(mins(30));
            test.release(holder);
            holder = urgent;
            if test.is_active(low) {
                break;
            }
        }
        assert_eq!(test.is_active(low), is_served);
    }
}

#[test]
fn waiting_raises_the_priority_each_hour_up_to_the_highest_that_policies_allow() {
    let mut test = PoolFixture::under(ageing_up_to(1), 1);
    test.request(stays());
    let low = test.request(Request { priority: -1, ..whole() });
    test.advance_with_heartbeats(mins(30));
    let urgent = test.request(Request { priority: 1, ..whole() });
    let usual = test.request(whole());
    let order = |test: &PoolFixture| [low, usual, urgent].map(|lease| position(test, lease));
    test.advance_with_heartbeats(mins(29));
    assert_eq!(order(&test), [3, 2, 1]);
    test.advance_with_heartbeats(mins(1));
    assert_eq!(order(&test), [2, 3, 1], "as high as the usual one, and earlier");
    let reason = "position 2 with priority 0 (1 of it for waiting); needs 1 free GPU; none is free";
    assert_eq!(test.wait_reason(low), reason);
    test.advance_with_heartbeats(HOUR);
    assert_eq!(order(&test), [1, 3, 2]);
    test.advance_with_heartbeats(mins(300));
    let explained = test.pool.explain(low).unwrap();
    assert_eq!((explained.priority, explained.gained_priority), (1, 2), "no higher");
}

#[test]
fn a_request_that_goes_ahead_by_waiting_starts_at_once() {
    let mut test = PoolFixture::under(ageing_up_to(1), 2);
    let holders = [test.request(stays()), test.request(stays())];
    let low = test.request(Request { priority: -1, ..whole() });
    let wants_two = test.request(Request { priority: 1, ..gpus(2) });
    test.release(holders[0]);
    test.advance_with_heartbeats(mins(119));
    assert!(test.is_queued(low), "a free GPU is reserved for the request ahead");
    test.advance_with_heartbeats(mins(1));
    assert!(test.is_active(low) && test.is_queued(wants_two));
}

#[test]
fn without_priorities_nothing_ages() {
    let mut test = PoolFixture::under(Policies::default(), 1);
    test.request(stays());
    let waits = test.request(whole());
    assert_eq!(test.pool.next_deadline(), Some(test.now.after(secs(15))), "the client must ask");
    test.advance_with_heartbeats(mins(120));
    assert_eq!(test.pool.explain(waits).unwrap().gained_priority, 0);
}

#[test]
fn ageing_continues_after_a_restart_and_under_new_policies() {
    let mut test = PoolFixture::of(1);
    test.apply_ok(PoolCommand::SetPolicies { policies: Box::new(ageing_up_to(1)) });
    let holder = test.request(stays());
    let low = test.request(Request { priority: -1, ..whole() });
    test.advance_with_heartbeats(mins(90));
    test.restart();
    assert_eq!(test.pool.explain(low).unwrap().priority, 0);
    test.add_node(node("a"), devices("a", 1));
    test.advance_with_heartbeats(mins(30));
    assert_eq!(test.pool.explain(low).unwrap().priority, 1);
    let rules = Policies { ageing_step: mins(240), ..ageing_up_to(1) };
    test.apply_ok(PoolCommand::SetPolicies { policies: Box::new(rules) });
    assert_eq!(test.pool.explain(low).unwrap().priority, -1);
    test.advance_with_heartbeats(mins(120));
    assert_eq!(test.pool.explain(low).unwrap().priority, 0);
    test.release(holder);
    assert!(test.is_active(low));
}

#[test]
fn the_reason_says_what_is_needed_free_and_due() {
    let mut test = PoolFixture::of(2);
    test.request(held_for(12, whole()));
    let lease = test.request(gpus(2));
    assert_eq!(test.wait_reason(lease), "position 1; needs 2 free GPUs; 1 is free; the next is due in ≤ 12 min");
    test.advance_with_heartbeats(secs(10));
    assert_eq!(test.wait_reason(lease), "position 1; needs 2 free GPUs; 1 is free; the next is due in ≤ 12 min");
    test.advance_with_heartbeats(mins(11));
    assert_eq!(test.wait_reason(lease), "position 1; needs 2 free GPUs; 1 is free; the next is due in ≤ 50 s");
}

#[test]
fn a_device_is_due_once_all_its_leases_are() {
    let mut test = PoolFixture::of(1);
    test.request(held_for(12, part(500)));
    let stays = test.request(Request { ttl: mins(24 * 60), ..part(500) });
    let lease = test.request(whole());
    assert_eq!(test.wait_reason(lease), "position 1; needs 1 free GPU; none is free");
    test.apply_ok(PoolCommand::Revoke { lease: stays, grace: mins(30), revocation: None });
    assert_eq!(test.wait_reason(lease), "position 1; needs 1 free GPU; none is free; the next is due in ≤ 30 min");
}

#[test]
fn a_draining_device_has_no_certain_time() {
    let mut test = PoolFixture::draining(1, mins(10));
    let over = test.request(held_for(1, whole()));
    test.advance(mins(1));
    assert!(test.lease(over).draining);
    let lease = test.request(whole());
    assert_eq!(test.wait_reason(lease), "position 1; needs 1 free GPU; none is free");
}

#[test]
fn backfill_respects_waiters_after_device_kinds_changed() {
    let v100 = |name: &str| device(name, "NVIDIA V100", 32);
    let mut test = PoolFixture::empty();
    test.add_node(node("a"), vec![v100("v0"), v100("v1")]);
    test.add_node(node("b"), devices("b", 2));
    let on = |select, request| Request { select, ..request };
    test.request(held_for(60, on(model("V100"), gpus(2))));
    test.request(on(model("H100"), stays()));
    let ends = test.request(on(model("H100"), stays()));
    let any_two = test.request(gpus(2));
    let two_h100 = test.request(on(model("H100"), gpus(2)));
    // One V100 turns out to be different: device kinds are computed again while requests wait.
    let labelled = DeviceFacts { labels: [("slot".into(), "2".into())].into(), ..v100("v1") };
    test.register_node(node("a"), vec![v100("v0"), labelled]);
    test.release(ends);
    assert!(test.is_queued(any_two) && test.is_queued(two_h100));
    let short = test.request(held_for(30, whole()));
    assert!(test.is_queued(short), "two H100 may be free at any moment, and a request waits for them");
}

#[test]
fn the_reason_names_no_time_without_a_certain_end() {
    let mut test = PoolFixture::of(2);
    test.request(stays());
    let lease = test.request(gpus(2));
    assert_eq!(test.wait_reason(lease), "position 1; needs 2 free GPUs; 1 is free");
}

#[test]
fn only_waiting_leases_have_an_explanation() {
    let mut test = PoolFixture::of(1);
    let lease = test.request(whole());
    assert_eq!(test.pool.explain(lease), None);
    assert_eq!(test.pool.explain(LeaseId(9)), None);
}

#[test]
fn a_request_above_its_thresholds_everywhere_claims_no_device() {
    let mut test = PoolFixture::of(2);
    for device in 0..2 {
        test.report_load(device, gib(2), percent(0));
    }
    let none_will_do = LoadThresholds { memory: percent(1), utilization: percent(1) };
    let strict_request = test.request(Request { thresholds: Some(none_will_do), cpus: cpus(1), ..whole() });
    let other = test.request(careful(Request { cpus: cpus(1), ..whole() }));
    assert!(test.is_queued(strict_request) && test.is_active(other));
}

#[test]
fn a_request_with_strict_thresholds_claims_the_device_below_them() {
    let mut test = PoolFixture::of(2);
    let holder = test.request(Request { select: named(0), ..whole() });
    test.report_load(1, gib(2), percent(0));
    let strict = LoadThresholds { memory: percent(1), utilization: percent(1) };
    test.advance(Millis(1));
    test.report_idle(0);
    let strict_request = test.request(Request { thresholds: Some(strict), ..whole() });
    assert_eq!(test.place(whole()), [1], "the busy device is not claimed");
    let last = test.request(whole());
    test.release(holder);
    assert!(test.is_active(strict_request) && test.is_queued(last));
}

#[test]
fn waiters_held_back_by_a_quota_do_not_block_other_owners() {
    let mut test =
        PoolFixture::under(quota_of("hog", OwnerQuota { held: Some(Share::WHOLE), ..OwnerQuota::default() }), 2);
    assert!(!test.place(owned("hog", whole())).is_empty());
    for bytes in 1..=1_100 {
        let waits = test.request(owned("hog", memory(gib(1) + gpupool_core::Bytes(bytes))));
        assert!(test.is_queued(waits));
    }
    let other = test.request(owned("alice", whole()));
    assert!(test.is_active(other));
}

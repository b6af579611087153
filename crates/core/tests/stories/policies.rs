//! Policies: requests that they match, rules that they enforce, and decisions that name them.

use std::sync::Arc;

use crate::support::*;
use gpupool_core::{
    CommandDenied, DeviceFacts, EndCause, IsolationLevel, IsolationSupport, Labels, Millis, NodeFacts, NodeId,
    OwnerQuota, PlacementStrategy, Policies, PolicyMatch, PolicyViolation, PoolCommand, QueueTurn, Request,
    RequestPolicy, RequestSize, RequestedAmount, Share, Unsatisfiable,
};

/// Returns the rule of `rules` that denies `request` on a node with four GPUs.
fn broken(rules: RequestPolicy, request: Request) -> Option<PolicyViolation> {
    let name = rules.name.clone();
    match PoolFixture::under(policies([rules]), 4).try_request(request) {
        Ok(_) => None,
        Err(CommandDenied::Policy { policy, rule }) => {
            assert_eq!(policy, name);
            Some(rule)
        }
        Err(other) => panic!("refused for another reason: {other}"),
    }
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(key, value)| (Arc::from(*key), Arc::from(*value))).collect()
}

#[test]
fn the_default_policy_sets_minimum_share_gpus_and_allocations() {
    let rules = RequestPolicy::default;
    assert_eq!(broken(rules(), part(99)), Some(PolicyViolation::MinShare { asked: Share(99), least: Share(100) }));
    assert_eq!(broken(rules(), part(100)), None);
    assert_eq!(broken(rules(), host(cpus(1))), Some(PolicyViolation::GpuRequired));
    assert_eq!(rules().max_allocations, Some(10));
    assert_eq!(broken(RequestPolicy::unlimited(), part(1)), None);
}

#[test]
fn shares_stay_between_the_least_and_the_most() {
    let rules = || RequestPolicy { min_share: Some(Share(200)), max_share: Some(HALF), ..policy("halves") };
    assert_eq!(broken(rules(), part(199)), Some(PolicyViolation::MinShare { asked: Share(199), least: Share(200) }));
    assert_eq!(broken(rules(), part(200)), None);
    assert_eq!(broken(rules(), part(500)), None);
    assert_eq!(broken(rules(), part(501)), Some(PolicyViolation::MaxShare { asked: Share(501), most: HALF }));
    assert_eq!(
        broken(rules(), whole()),
        Some(PolicyViolation::MaxShare { asked: Share::WHOLE, most: HALF }),
        "a whole one is above any part"
    );
}

#[test]
fn memory_stays_below_the_most() {
    let rules = || RequestPolicy { max_memory: Some(gib(16)), ..policy("small") };
    assert_eq!(broken(rules(), memory(gib(16))), None);
    assert_eq!(broken(rules(), memory(gib(17))), Some(PolicyViolation::MaxMemory { asked: gib(17), most: gib(16) }));
    let both = Request { amount: RequestedAmount::Both(Share(100), gib(17)), ..whole() };
    assert_eq!(broken(rules(), both), Some(PolicyViolation::MaxMemory { asked: gib(17), most: gib(16) }));
}

#[test]
fn sharing_may_be_forbidden() {
    let rules = || RequestPolicy { sharing_allowed: false, ..policy("alone") };
    for shared in [part(500), memory(gib(8)), Request { amount: RequestedAmount::Shared, ..whole() }] {
        assert_eq!(broken(rules(), shared), Some(PolicyViolation::SharingAllowed));
    }
    assert_eq!(broken(rules(), whole()), None);
    assert_eq!(broken(rules(), part(1000)), None, "1.0 is a whole GPU");
}

#[test]
fn isolation_may_be_limited_to_some_kinds() {
    let rules = || RequestPolicy { isolation_allowed: vec![IsolationLevel::TimeSlicing], ..policy("sliced") };
    assert_eq!(broken(rules(), whole()), Some(PolicyViolation::IsolationAllowed(IsolationLevel::None)));
    assert_eq!(broken(rules(), Request { isolation: IsolationLevel::TimeSlicing, ..whole() }), None);
}

#[test]
fn a_policys_max_duration_is_limit_and_default() {
    let rules = || RequestPolicy { max_duration: Some(mins(30)), ..policy("short") };
    let longer = Request { max_duration: Some(mins(31)), ..whole() };
    assert_eq!(broken(rules(), longer), Some(PolicyViolation::MaxDuration { asked: mins(31), most: mins(30) }));

    let mut test = PoolFixture::under(policies([rules()]), 2);
    let unsaid = test.request(whole());
    let shorter = test.request(Request { max_duration: Some(mins(10)), ..whole() });
    assert_eq!(test.lease(unsaid).hard_end, Some(test.now.after(mins(30))));
    assert_eq!(test.lease(shorter).hard_end, Some(test.now.after(mins(10))));
    test.advance_with_heartbeats(mins(30));
    assert_eq!(test.cause(unsaid), Some(EndCause::MaxDurationPassed));
}

#[test]
fn a_node_selector_keeps_requests_on_nodes_with_those_labels() {
    let zone = |name: &str, zone: &str| NodeFacts { labels: labels(&[("zone", zone)]), ..node(name) };
    let rules = |zone| RequestPolicy { node_selector: Arc::new(labels(&[("zone", zone)])), ..policy("zoned") };
    let mut test = PoolFixture::with(Default::default(), policies([rules("west")]));
    test.add_node(zone("a", "east"), devices("a", 4));
    test.add_node(zone("b", "west"), devices("b", 1));
    assert_eq!(test.place(whole()), [4]);
    let second = test.request(whole());
    assert!(test.is_queued(second), "the free ones are in the east");
    test.apply_ok(PoolCommand::SetPolicies { policies: Box::new(policies([rules("north")])) });
    assert_eq!(test.expect_denied(whole()), CommandDenied::Unsatisfiable(Unsatisfiable::NothingSelected));
}

#[test]
fn ten_leases_to_a_device_are_enough_though_share_is_left() {
    let rules = RequestPolicy { min_share: None, ..RequestPolicy::default() };
    let mut test = PoolFixture::under(policies([rules]), 1);
    for _ in 0..10 {
        let lease = test.request(part(10));
        assert!(test.is_active(lease));
    }
    let eleventh = test.request(part(10));
    assert!(test.is_queued(eleventh));
    test.release(gpupool_core::LeaseId(0));
    assert!(test.is_active(eleventh));
}

#[test]
fn an_equal_share_is_one_nth_of_a_device() {
    let rules = RequestPolicy { max_allocations: Some(4), ..policy("four to a device") };
    let mut test = PoolFixture::under(policies([rules]), 1);
    for _ in 0..4 {
        let lease = test.request(Request { amount: RequestedAmount::Shared, ..whole() });
        assert_eq!(test.lease(lease).promises[0].share, Share(250));
    }
    let fifth = test.request(Request { amount: RequestedAmount::Shared, ..whole() });
    assert!(test.is_queued(fifth));
}

#[test]
fn the_first_policy_that_covers_a_request_is_its_policy_and_the_decision_names_it() {
    let only = |name: &str, applies_to| RequestPolicy { applies_to, ..policy(name) };
    let owners = PolicyMatch { owners: vec!["alice".into()], ..PolicyMatch::default() };
    let sizes = PolicyMatch { sizes: vec![RequestSize::Several], ..PolicyMatch::default() };
    let labelled = PolicyMatch { labels: labels(&[("team", "vision")]), ..PolicyMatch::default() };
    let mut test =
        PoolFixture::under(policies([only("alice", owners), only("large", sizes), only("vision", labelled)]), 8);
    let vision = Request { labels: Arc::new(labels(&[("team", "vision"), ("run", "7")])), ..whole() };
    for (request, name) in [
        (owned("alice", whole()), "alice"),
        (owned("alice", gpus(2)), "alice"),
        (gpus(2), "large"),
        (vision, "vision"),
        (whole(), "unlimited"),
    ] {
        let lease = test.request(request);
        let decision = test.decision(lease);
        assert_eq!((&*decision.policy, decision.turn), (name, QueueTurn::OnArrival));
    }
}

#[test]
fn sizes_are_none_a_part_one_or_several() {
    for (request, size) in [
        (host(cpus(1)), RequestSize::HostOnly),
        (part(999), RequestSize::Part),
        (Request { gpus: 4, ..part(500) }, RequestSize::Part),
        (memory(gib(80)), RequestSize::Part),
        (part(1000), RequestSize::Whole),
        (whole(), RequestSize::Whole),
        (gpus(2), RequestSize::Several),
    ] {
        assert_eq!(RequestSize::of(&request), size, "{request:?}");
    }
}

#[test]
fn inconsistent_policies_are_denied_and_the_old_ones_stay() {
    let mut test = PoolFixture::of(1);
    let fallback = |rules: RequestPolicy| Policies { fallback: rules, ..Policies::default() };
    for (rules, field) in [
        (
            fallback(RequestPolicy { min_share: Some(HALF), max_share: Some(Share(100)), ..policy("x") }),
            "policy.min_share",
        ),
        (fallback(RequestPolicy { max_allocations: Some(0), ..policy("x") }), "policy.max_allocations"),
        (fallback(policy("")), "policy.name"),
        (
            Policies { default_quota: OwnerQuota { weight: 0, ..OwnerQuota::default() }, ..Policies::default() },
            "quota.weight",
        ),
        (Policies { period: Millis::ZERO, ..Policies::default() }, "period"),
    ] {
        match test.apply(PoolCommand::SetPolicies { policies: Box::new(rules) }) {
            Err(CommandDenied::Invalid(error)) => assert_eq!(error.field, field),
            other => panic!("{field}: {other:?}"),
        }
    }
    assert_eq!(*test.pool.policies(), Policies::unlimited());
}

#[test]
fn new_policies_apply_to_waiting_requests() {
    let mut test = PoolFixture::of(1);
    let holder = test.request(owned("alice", whole()));
    let dev = test.request(owned("dev", whole()));
    let prod = test.request(owned("prod", whole()));
    let boosted = RequestPolicy {
        applies_to: PolicyMatch { owners: vec!["prod".into()], ..PolicyMatch::default() },
        priority_boost: 1,
        strategy: Some(PlacementStrategy::WorstFit),
        ..policy("prod first")
    };
    test.apply_ok(PoolCommand::SetPolicies { policies: Box::new(policies([boosted])) });
    test.release(holder);
    assert!(test.is_active(prod) && test.is_queued(dev));
    assert_eq!(&*test.decision(prod).policy, "prod first");
}

#[test]
fn unsupported_isolation_is_refused_with_the_alternatives() {
    let mut test = PoolFixture::of(1);
    for isolation in [IsolationLevel::Mps, IsolationLevel::Mig] {
        let refused = test.expect_denied(Request { isolation, ..part(500) });
        assert_eq!(refused, CommandDenied::Unsatisfiable(Unsatisfiable::Isolation(isolation)));
        assert!(refused.to_string().contains("none and time-slicing"), "{refused}");
    }
    let lease = test.request(Request { isolation: IsolationLevel::TimeSlicing, ..part(500) });
    assert!(test.is_active(lease));
}

#[test]
fn a_request_with_isolation_gets_a_device_that_supports_it() {
    let with = |uuid, isolation| DeviceFacts { isolation, ..device(uuid, "NVIDIA H100", 80) };
    let mut test = PoolFixture::empty();
    let mps = IsolationSupport { mps: true, mig: false };
    let mig = IsolationSupport { mps: false, mig: true };
    test.add_node(node("a"), vec![with("plain", IsolationSupport::BASIC), with("mps", mps), with("mig", mig)]);
    assert_eq!(test.place(Request { isolation: IsolationLevel::Mps, ..part(500) }), [1]);
    assert_eq!(test.place(Request { isolation: IsolationLevel::Mig, ..whole() }), [2]);
    assert_eq!(test.pool.node(NodeId(0)).unwrap().devices.len(), 3);
}

#[test]
fn a_priority_stays_below_the_most() {
    let asking = |priority| Request { priority, ..whole() };
    let above = |asked, most| Some(PolicyViolation::MaxPriority { asked, most });
    assert_eq!(broken(RequestPolicy::default(), asking(1)), above(1, 0), "0 by default");
    assert_eq!(broken(RequestPolicy::default(), asking(-1_000_000)), None);
    let rules = || RequestPolicy { max_priority: 5, priority_boost: 100, ..policy("urgent") };
    assert_eq!(broken(rules(), asking(5)), None, "the boost is added after the check");
    assert_eq!(broken(rules(), asking(6)), above(6, 5));
    let refused = PoolFixture::under(Policies::default(), 1).expect_denied(asking(1_000_000)).to_string();
    let expected =
        "policy \"default\": priority: 1000000 is not allowed; it must be at most 0, the policy's max_priority";
    assert_eq!(refused, expected);
}

#[test]
fn an_administrator_may_ask_for_any_priority() {
    let mut test = PoolFixture::under(Policies::default(), 1);
    let request = Arc::new(Request { priority: 1_000_000, ..whole() });
    test.apply_ok(PoolCommand::Request { request, key: None, by_admin: true });
}

#[test]
fn a_refusal_names_the_policy_the_field_the_value_and_what_is_allowed() {
    let refused = PoolFixture::under(Policies::default(), 1).expect_denied(part(50)).to_string();
    assert_eq!(refused, r#"policy "default": fraction: 0.05 is not allowed; it must be at least 0.1"#);
}

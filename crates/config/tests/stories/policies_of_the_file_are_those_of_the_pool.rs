//! `[[policy]]`, `[default_policy]`, `[quota]` and `[queue]` become rules of the pool.

use gpupool_core::{
    Bytes, IsolationLevel, Millis, OwnerQuota, PlacementStrategy, QueueOrder, RequestPolicy, RequestSize, Share,
};

use super::{from_file, loaded, problem_lines};

#[test]
fn units_of_the_file_become_units_of_the_pool() {
    let text = r#"
        [[policy]]
        name = "students"
        owners = ["ann", "bob"]
        sizes = ["part", "host-only"]
        labels = { kind = "notebook" }
        strategy = "best-fit"
        min_fraction = 0.25
        max_fraction = "50%"
        max_memory = "24GiB"
        sharing = true
        isolation = ["none", "time-slicing"]
        max_priority = 20
        priority_boost = -5
        max_duration = "1h30m"
        node_selector = { zone = "a" }
        prefer_models = ["H100"]
        max_allocations = 4
        gpu_required = false
    "#;
    let policies = loaded(&from_file(text)).config.policies;
    let policy = &policies.policies[0];
    assert_eq!((&*policy.name, policy.applies_to.owners.len()), ("students", 2));
    assert_eq!(policy.applies_to.sizes, [RequestSize::Part, RequestSize::HostOnly]);
    assert_eq!(policy.applies_to.labels.get("kind").map(|value| &**value), Some("notebook"));
    assert_eq!(policy.strategy, Some(PlacementStrategy::BestFit));
    assert_eq!((policy.min_share, policy.max_share), (Some(Share(250)), Some(Share(500))));
    assert_eq!(policy.max_memory, Bytes::from_mib(24 * 1024));
    assert_eq!(policy.isolation_allowed, [IsolationLevel::None, IsolationLevel::TimeSlicing]);
    assert_eq!((policy.max_priority, policy.priority_boost), (20, -5));
    assert_eq!(policy.max_duration, Some(Millis::from_mins(90)));
    assert_eq!(policy.node_selector.get("zone").map(|value| &**value), Some("a"));
    assert_eq!(policy.preferred_models.iter().map(|model| &**model).collect::<Vec<_>>(), ["H100"]);
    assert_eq!((policy.max_allocations, policy.gpu_required, policy.sharing_allowed), (Some(4), false, true));
    assert_eq!(policies.fallback, RequestPolicy::default());
}

#[test]
fn quotas_and_queue_order_are_read() {
    let text = "queue.order = 'fair_share'\nqueue.ageing_step = '20m'\n[quota]\nperiod = '1d'\n[quota.default]\ngpus = 1\n\
                [quota.owners.ann]\ngpus = 2.5\ngpu_hours = 40\nweight = 3\n[quota.owners.'dr. bob']\nweight = 2";
    let policies = loaded(&from_file(text)).config.policies;
    assert_eq!((policies.queue, policies.period), (QueueOrder::FairShare, Millis::from_mins(24 * 60)));
    assert_eq!(policies.ageing_step, Millis::from_mins(20));
    assert_eq!(*policies.quota_of("ann"), OwnerQuota { held: Some(Share(2500)), share_hours: Some(40_000), weight: 3 });
    assert_eq!(*policies.quota_of("dr. bob"), OwnerQuota { weight: 2, ..OwnerQuota::default() });
    assert_eq!(*policies.quota_of("carl"), OwnerQuota { held: Some(Share(1000)), ..OwnerQuota::default() });
}

#[test]
fn a_file_without_rules_has_the_default_rules() {
    assert_eq!(loaded(&from_file("")).config.policies, gpupool_core::Policies::default());
}

#[test]
fn a_bad_rule_is_named_by_its_path() {
    for (text, part) in [
        (
            "[[policy]]\nmax_memory = 24",
            "gpupool.toml:2: policy[0].max_memory: 24 is not allowed; it must be an amount of memory",
        ),
        ("[[policy]]\n[[policy]]\nstrategy = 'bestfit'", "policy[1].strategy: \"bestfit\" is not allowed"),
        ("[default_policy]\nmax_priority = -1", "default_policy.max_priority: -1 is not allowed"),
        ("queue.ageing_step = -1", "queue.ageing_step: -1 is not allowed"),
        ("[[policy]]\nsizes = ['big']", "one of host-only, part, whole, several"),
        ("[[policy]]\nmax_fraction = 2", "from 0.001 to 1.0"),
        ("[[policy]]\nlabels = 'x'", "policy[0].labels: a value is not allowed"),
        ("[[policy]]\nlabels = { a = 1 }", "policy[0].labels.a: 1 is not allowed"),
        ("[policy]\nname = 'x'", "tables that each begin with [[policy]]"),
        ("[default_policy]\nowners = ['ann']", "default_policy.owners: unknown key"),
        ("[quota.owners.'']\ngpus = 1", "quota.owners: this is not allowed"),
        ("[quota.owners.ann]\nweight = 0", "quota.owners.ann.weight: 0 is not allowed"),
        ("[quota.owners]\nann = 5", "quota.owners.ann: a value is not allowed"),
        ("quota.owners = 3", "quota.owners: this is not allowed"),
        ("queue.order = 'fiffo'", "did you mean fifo?"),
    ] {
        let printed = problem_lines(&from_file(text)).join("\n");
        assert!(printed.contains(part), "{text}: {printed}");
    }
}

//! Promises of host CPUs and memory, with GPUs and alone.

use crate::support::*;
use gpupool_core::{
    Bytes, CommandDenied, MilliCpus, NodeFacts, NodeId, PlacementStrategy, Policies, PolicyViolation, PoolSettings,
    Request, Unsatisfiable, WaitReason,
};

#[test]
fn cpus_and_host_memory_are_accounted_on_grant_and_on_release() {
    let mut test = PoolFixture::of(4);
    let lease = test.request(Request { cpus: cpus(60), host_memory: gib(100), ..whole() });
    let host = test.pool.node(NodeId(0)).unwrap();
    assert_eq!((host.cpus_promised, host.memory_promised), (cpus(60), gib(100)));
    test.release(lease);
    let host = test.pool.node(NodeId(0)).unwrap();
    assert_eq!((host.cpus_promised, host.memory_promised), (MilliCpus::ZERO, Bytes::ZERO));
}

#[test]
fn a_request_waits_for_host_cpus_and_the_reason_says_so() {
    let mut test = PoolFixture::of(2);
    let first = test.request(Request { cpus: cpus(60), ..whole() });
    let second = test.request(Request { cpus: cpus(8), ..whole() });
    assert_eq!(test.wait_reason(second), "position 1; needs 8 host CPUs; 4 are free");
    test.release(first);
    assert!(test.is_active(second));
}

#[test]
fn a_request_waits_for_host_memory_and_the_reason_says_so() {
    let mut test = PoolFixture::of(2);
    test.request(Request { host_memory: gib(500), ..whole() });
    let second = test.request(Request { host_memory: gib(13), ..whole() });
    assert_eq!(test.wait_reason(second), "position 1; needs 13312 MiB of host memory; 12288 MiB is free");
}

#[test]
fn a_later_node_with_enough_cpus_is_chosen() {
    let mut test = PoolFixture::of(1);
    test.add_node(NodeFacts { cpus: cpus(128), ..node("b") }, devices("b", 1));
    assert_eq!(test.place(Request { cpus: cpus(100), ..whole() }), [1]);
}

#[test]
fn more_than_any_host_has_is_refused_with_the_maximum() {
    let mut test = PoolFixture::of(1);
    assert_eq!(
        test.expect_denied(Request { cpus: cpus(65), ..whole() }),
        CommandDenied::Unsatisfiable(Unsatisfiable::TooManyCpus { wanted: cpus(65), most: cpus(64) })
    );
    assert_eq!(
        test.expect_denied(Request { host_memory: gib(513), ..whole() }),
        CommandDenied::Unsatisfiable(Unsatisfiable::TooMuchHostMemory { wanted: gib(513), most: gib(512) })
    );
}

#[test]
fn gpus_and_cpus_on_different_nodes_do_not_satisfy_a_request() {
    let mut test = PoolFixture::empty();
    test.add_node(NodeFacts { cpus: cpus(8), ..node("gpus") }, devices("a", 4));
    test.add_node(NodeFacts { cpus: cpus(128), memory: gib(8), ..node("cpus") }, devices("b", 4));
    let refused = test.expect_denied(Request { cpus: cpus(64), host_memory: gib(64), ..gpus(4) });
    assert_eq!(refused, CommandDenied::Unsatisfiable(Unsatisfiable::NotTogether));
}

#[test]
fn a_cpu_only_request_holds_no_gpu() {
    let mut test = PoolFixture::of(1);
    test.request(whole());
    let lease = test.request(host(cpus(32)));
    assert!(test.is_active(lease) && test.devices_of(lease).is_empty());
    assert_eq!(test.lease(lease).node, Some(NodeId(0)));
    let second = test.request(host(cpus(33)));
    assert!(test.is_queued(second));
    test.release(lease);
    assert!(test.is_active(second));
}

#[test]
fn a_cpu_only_request_passes_gpu_waiters() {
    let mut test = PoolFixture::of(1);
    test.request(whole());
    let waits = test.request(whole());
    let cpu_only = test.request(host(cpus(1)));
    assert!(test.is_queued(waits) && test.is_active(cpu_only));
}

#[test]
fn a_cpu_only_request_leaves_cpus_to_earlier_waiters() {
    let mut test = PoolFixture::of(1);
    let holder = test.request(Request { cpus: cpus(40), ..whole() });
    let waits = test.request(Request { cpus: cpus(40), ..whole() });
    let cpu_only = test.request(host(cpus(8)));
    assert!(test.is_queued(cpu_only), "the one before it waits for CPUs of this node");
    test.release(holder);
    assert!(test.is_active(waits) && test.is_active(cpu_only));
}

#[test]
fn the_reason_names_resources_that_are_free_on_different_nodes_only() {
    let mut test = PoolFixture::of(1);
    test.add_node(node("b"), devices("b", 1));
    let host_of = |cpus, host_memory| by(PlacementStrategy::FirstFit, Request { cpus, host_memory, ..gpus(0) });
    test.request(host_of(MilliCpus::ZERO, gib(500)));
    let on_b = test.request(host_of(cpus(60), gib(20)));
    assert_eq!(test.lease(on_b).node, Some(NodeId(1)));

    let waits = test.request(Request { cpus: cpus(8), host_memory: gib(64), ..whole() });
    let why = test.pool.explain(waits).unwrap();
    assert_eq!(why.reasons, [WaitReason::NeedsTogether { gpus: 1, cpus: cpus(8), host_memory: gib(64) }]);
    let text = "position 1; no single node has 1 free GPU, 8 host CPUs and 64 GiB of host memory";
    assert_eq!(why.to_string(), text);

    let host_only = test.request(host_of(cpus(5), gib(13)));
    let text = "position 2; no single node has 5 host CPUs and 13 GiB of host memory";
    assert_eq!(test.wait_reason(host_only), text);
    test.release(on_b);
    assert!(test.is_active(waits) && test.is_active(host_only));
}

#[test]
fn a_node_without_gpus_serves_requests_for_cpus() {
    let mut test = PoolFixture::empty();
    test.add_node(node("plain"), vec![]);
    let lease = test.request(host(cpus(64)));
    assert!(test.is_active(lease));
    assert_eq!(test.expect_denied(whole()), CommandDenied::Unsatisfiable(Unsatisfiable::NoDevices));
}

#[test]
fn the_default_policy_requires_at_least_one_gpu() {
    let mut test = PoolFixture::with(PoolSettings::default(), Policies::default());
    test.add_node(node("a"), devices("a", 1));
    let refused = test.expect_denied(host(cpus(1)));
    assert_eq!(refused, CommandDenied::Policy { policy: "default".into(), rule: PolicyViolation::GpuRequired });
}

#[test]
fn a_request_for_nothing_is_an_error_that_names_the_field() {
    let mut test = PoolFixture::of(1);
    let CommandDenied::Invalid(error) = test.expect_denied(gpus(0)) else { panic!("it is not a matter of policy") };
    assert_eq!(error.field, "gpus");
}

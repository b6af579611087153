//! Host CPUs and memory are promised beside GPUs, and alone.

use crate::support::*;
use gpupool_core::{
    Bytes, CommandDenied, MilliCpus, NodeFacts, NodeId, PlacementStrategy, Policies, PolicyViolation, PoolSettings,
    Request, Unsatisfiable, WaitReason,
};

#[test]
fn cpus_and_host_memory_are_accounted_on_grant_and_on_release() {
    let mut stage = Stage::of(4);
    let lease = stage.ask(Request { cpus: cpus(60), host_memory: gib(100), ..whole() });
    let host = stage.pool.node(NodeId(0)).unwrap();
    assert_eq!((host.cpus_promised, host.memory_promised), (cpus(60), gib(100)));
    stage.release(lease);
    let host = stage.pool.node(NodeId(0)).unwrap();
    assert_eq!((host.cpus_promised, host.memory_promised), (MilliCpus::ZERO, Bytes::ZERO));
}

#[test]
fn a_free_gpu_without_free_cpus_is_no_place_and_the_reason_says_so() {
    let mut stage = Stage::of(2);
    let first = stage.ask(Request { cpus: cpus(60), ..whole() });
    let second = stage.ask(Request { cpus: cpus(8), ..whole() });
    assert_eq!(stage.why(second), "position 1; needs 8 host CPUs; 4 are free");
    stage.release(first);
    assert!(stage.is_active(second));
}

#[test]
fn a_free_gpu_without_free_host_memory_is_no_place_and_the_reason_says_so() {
    let mut stage = Stage::of(2);
    stage.ask(Request { host_memory: gib(500), ..whole() });
    let second = stage.ask(Request { host_memory: gib(13), ..whole() });
    assert_eq!(stage.why(second), "position 1; needs 13312 MiB of host memory; 12288 MiB is free");
}

#[test]
fn the_node_with_free_cpus_serves_though_another_comes_first() {
    let mut stage = Stage::of(1);
    stage.add(NodeFacts { cpus: cpus(128), ..node("b") }, devices("b", 1));
    assert_eq!(stage.place(Request { cpus: cpus(100), ..whole() }), [1]);
}

#[test]
fn more_than_any_host_has_is_refused_with_the_most_there_is() {
    let mut stage = Stage::of(1);
    assert_eq!(
        stage.refused(Request { cpus: cpus(65), ..whole() }),
        CommandDenied::Unsatisfiable(Unsatisfiable::TooManyCpus { wanted: cpus(65), most: cpus(64) })
    );
    assert_eq!(
        stage.refused(Request { host_memory: gib(513), ..whole() }),
        CommandDenied::Unsatisfiable(Unsatisfiable::TooMuchHostMemory { wanted: gib(513), most: gib(512) })
    );
}

#[test]
fn gpus_here_and_cpus_there_are_not_together() {
    let mut stage = Stage::empty();
    stage.add(NodeFacts { cpus: cpus(8), ..node("gpus") }, devices("a", 4));
    stage.add(NodeFacts { cpus: cpus(128), memory: gib(8), ..node("cpus") }, devices("b", 4));
    let refused = stage.refused(Request { cpus: cpus(64), host_memory: gib(64), ..gpus(4) });
    assert_eq!(refused, CommandDenied::Unsatisfiable(Unsatisfiable::NotTogether));
}

#[test]
fn a_request_for_cpus_only_holds_no_gpu() {
    let mut stage = Stage::of(1);
    stage.ask(whole());
    let lease = stage.ask(host(cpus(32)));
    assert!(stage.is_active(lease) && stage.on(lease).is_empty());
    assert_eq!(stage.lease(lease).node, Some(NodeId(0)));
    let second = stage.ask(host(cpus(33)));
    assert!(stage.is_queued(second));
    stage.release(lease);
    assert!(stage.is_active(second));
}

#[test]
fn a_request_for_cpus_only_passes_those_who_wait_for_gpus() {
    let mut stage = Stage::of(1);
    stage.ask(whole());
    let waits = stage.ask(whole());
    let cpu_only = stage.ask(host(cpus(1)));
    assert!(stage.is_queued(waits) && stage.is_active(cpu_only));
}

#[test]
fn a_request_for_cpus_only_does_not_take_the_cpus_somebody_waits_for() {
    let mut stage = Stage::of(1);
    let holder = stage.ask(Request { cpus: cpus(40), ..whole() });
    let waits = stage.ask(Request { cpus: cpus(40), ..whole() });
    let cpu_only = stage.ask(host(cpus(8)));
    assert!(stage.is_queued(cpu_only), "the one before it waits for CPUs of this node");
    stage.release(holder);
    assert!(stage.is_active(waits) && stage.is_active(cpu_only));
}

#[test]
fn what_is_free_on_different_nodes_only_is_not_told_as_enough() {
    let mut stage = Stage::of(1);
    stage.add(node("b"), devices("b", 1));
    let host_of = |cpus, host_memory| by(PlacementStrategy::FirstFit, Request { cpus, host_memory, ..gpus(0) });
    stage.ask(host_of(MilliCpus::ZERO, gib(500)));
    let on_b = stage.ask(host_of(cpus(60), gib(20)));
    assert_eq!(stage.lease(on_b).node, Some(NodeId(1)));

    let waits = stage.ask(Request { cpus: cpus(8), host_memory: gib(64), ..whole() });
    let why = stage.pool.explain(waits).unwrap();
    assert_eq!(why.reasons, [WaitReason::NeedsTogether { gpus: 1, cpus: cpus(8), host_memory: gib(64) }]);
    let told = "position 1; no single node has 1 free GPU, 8 host CPUs and 64 GiB of host memory";
    assert_eq!(why.to_string(), told);

    let host_only = stage.ask(host_of(cpus(5), gib(13)));
    let told = "position 2; no single node has 5 host CPUs and 13 GiB of host memory";
    assert_eq!(stage.why(host_only), told);
    stage.release(on_b);
    assert!(stage.is_active(waits) && stage.is_active(host_only));
}

#[test]
fn a_node_without_gpus_serves_requests_for_cpus() {
    let mut stage = Stage::empty();
    stage.add(node("plain"), vec![]);
    let lease = stage.ask(host(cpus(64)));
    assert!(stage.is_active(lease));
    assert_eq!(stage.refused(whole()), CommandDenied::Unsatisfiable(Unsatisfiable::NoDevices));
}

#[test]
fn the_usual_rules_ask_for_at_least_one_gpu() {
    let mut stage = Stage::with(PoolSettings::default(), Policies::default());
    stage.add(node("a"), devices("a", 1));
    let refused = stage.refused(host(cpus(1)));
    assert_eq!(refused, CommandDenied::Policy { policy: "default".into(), rule: PolicyViolation::GpuRequired });
}

#[test]
fn a_request_for_nothing_is_an_error_that_names_the_field() {
    let mut stage = Stage::of(1);
    let CommandDenied::Invalid(error) = stage.refused(gpus(0)) else { panic!("it is not a matter of policy") };
    assert_eq!(error.field, "gpus");
}

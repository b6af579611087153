//! Several GPUs: all or nothing, on one node, closest together.

use crate::support::*;
use gpupool_core::{
    CommandDenied, DeviceLink, GpuId, LinkKind, NodeId, PlacementStrategy, PoolCommand, Request, Unsatisfiable,
};

/// Returns a node of eight GPUs with these links; all other pairs cross NUMA nodes.
fn linked(links: &[(u32, u32, LinkKind)]) -> PoolFixture {
    let mut test = PoolFixture::of(8);
    let links = links.iter().map(|&(a, b, kind)| DeviceLink { a: GpuId(a), b: GpuId(b), kind }).collect();
    test.apply_ok(PoolCommand::Links { node: NodeId(0), links });
    test
}

fn pairs() -> Vec<(u32, u32, LinkKind)> {
    [(0, 4), (1, 5), (2, 6), (3, 7)].map(|(a, b)| (a, b, LinkKind::NvLink(4))).to_vec()
}

#[test]
fn several_gpus_are_granted_all_or_nothing() {
    let mut test = PoolFixture::of(2);
    let one = test.request(whole());
    let two = test.request(gpus(2));
    assert!(test.is_queued(two));
    assert!(test.devices_of(two).is_empty(), "nothing is held while it waits");
    assert!(test.device(1).leases.is_empty());
    test.release(one);
    assert_eq!(test.devices_of(two), [0, 1]);
}

#[test]
fn several_gpus_are_of_one_node_though_another_has_some_free() {
    let mut test = PoolFixture::of(2);
    test.add_node(node("b"), devices("b", 2));
    test.request(Request { strategy: Some(PlacementStrategy::FirstFit), ..whole() });
    assert_eq!(test.place(gpus(2)), [2, 3]);
    let split = test.request(gpus(2));
    assert!(test.is_queued(split), "device 1 is free, alone on its node");
}

#[test]
fn more_gpus_than_any_node_has_are_refused_with_the_maximum() {
    let mut test = PoolFixture::of(2);
    test.add_node(node("b"), devices("b", 4));
    let refused = test.expect_denied(gpus(5));
    assert_eq!(refused, CommandDenied::Unsatisfiable(Unsatisfiable::TooManyGpus { wanted: 5, most: 4 }));
    assert_eq!(
        refused.to_string(),
        "this pool can never satisfy the request: 5 GPUs on one node requested; the largest node has 4 that match"
    );
}

#[test]
fn only_matching_gpus_count_for_the_largest_node() {
    let mut test = PoolFixture::empty();
    let mut mixed = devices("a", 2);
    mixed.push(device("v", "NVIDIA V100", 32));
    test.add_node(node("a"), mixed);
    let refused = test.expect_denied(Request { select: model("H100"), ..gpus(3) });
    assert_eq!(refused, CommandDenied::Unsatisfiable(Unsatisfiable::TooManyGpus { wanted: 3, most: 2 }));
    assert_eq!(test.place(gpus(3)), [0, 1, 2], "without a selection all three will do");
}

#[test]
fn named_gpus_are_counted_by_name() {
    let mut test = PoolFixture::of(4);
    let refused = test.expect_denied(Request { select: named(3), ..gpus(2) });
    assert_eq!(refused, CommandDenied::Unsatisfiable(Unsatisfiable::TooManyGpus { wanted: 2, most: 1 }));
}

#[test]
fn two_gpus_are_an_nvlink_pair() {
    let mut test = linked(&pairs());
    assert_eq!(test.place(gpus(2)), [0, 4]);
    assert_eq!(test.place(gpus(2)), [1, 5]);
}

#[test]
fn an_intact_pair_is_preferred_to_a_broken_one() {
    let mut test = linked(&pairs());
    test.request(Request { select: named(0), ..whole() });
    test.request(Request { select: named(5), ..whole() });
    assert_eq!(test.place(gpus(2)), [2, 6]);
}

#[test]
fn the_widest_nvlink_is_the_closest() {
    let mut test = linked(&[(0, 1, LinkKind::NvLink(2)), (6, 7, LinkKind::NvLink(12))]);
    assert_eq!(test.place(gpus(2)), [6, 7]);
}

#[test]
fn fewer_xgmi_hops_are_closer() {
    let mut test = linked(&[(0, 1, LinkKind::Xgmi(2)), (4, 5, LinkKind::Xgmi(1))]);
    assert_eq!(test.place(gpus(2)), [4, 5]);
    assert_eq!(test.place(gpus(2)), [0, 1]);
}

#[test]
fn one_numa_node_is_closer_than_two_and_a_switch_is_closer_still() {
    let quad = [(4, 5), (4, 6), (4, 7), (5, 6), (5, 7), (6, 7)].map(|(a, b)| (a, b, LinkKind::SameNuma));
    let mut test = linked(&quad);
    assert_eq!(test.place(gpus(4)), [4, 5, 6, 7]);

    let mut with_switch = quad.to_vec();
    with_switch.push((6, 7, LinkKind::PcieSwitch));
    assert_eq!(linked(&with_switch).place(gpus(2)), [6, 7]);
    assert_eq!(linked(&with_switch).place(gpus(3)), [4, 6, 7]);
}

#[test]
fn without_links_the_lowest_numbers_serve() {
    assert_eq!(PoolFixture::of(8).place(gpus(3)), [0, 1, 2]);
}

#[test]
fn links_are_not_forgotten_when_another_device_is_found() {
    let mut test = linked(&[(6, 7, LinkKind::NvLink(4))]);
    test.add_node(node("a"), devices("a", 9));
    assert_eq!(test.place(gpus(2)), [6, 7]);
}

#[test]
fn parts_of_several_gpus_are_of_different_gpus() {
    let mut test = PoolFixture::of(2);
    assert_eq!(test.place(Request { gpus: 2, ..part(400) }), [0, 1]);
    assert_eq!(test.place(Request { gpus: 2, ..part(400) }), [0, 1]);
    let third = test.request(Request { gpus: 2, ..part(400) });
    assert!(test.is_queued(third));
}

#[test]
fn best_fit_chooses_the_fullest_node_and_worst_fit_the_emptiest() {
    let nodes = || {
        let mut test = PoolFixture::of(8);
        test.add_node(node("b"), devices("b", 4));
        test
    };
    assert_eq!(nodes().place(by(PlacementStrategy::BestFit, gpus(2))), [8, 9]);
    assert_eq!(nodes().place(by(PlacementStrategy::WorstFit, gpus(2))), [0, 1]);
}

//! Each strategy chooses exactly what its documentation says.

use std::sync::Arc;

use crate::support::*;
use gpupool_core::{
    LeaseId, MilliCpus, NodeFacts, NodeId, PlacementStrategy, PoolCommand, ReadingField, Request, RequestPolicy, Share,
    TaskClass,
};

/// Three devices: 0 empty, 1 with 0.3 promised, 2 with 0.6 promised.
fn uneven() -> PoolFixture {
    let mut test = PoolFixture::of(3);
    test.request(Request { select: named(1), ..part(300) });
    test.request(Request { select: named(2), ..part(600) });
    test
}

fn task(cpus: MilliCpus, share: u32, models: &str) -> TaskClass {
    TaskClass { cpus, share: Share(share), gpus: 1, models: models.into() }
}

#[test]
fn first_fit_takes_the_lowest_number_that_fits() {
    let mut test = uneven();
    assert_eq!(test.place(by(PlacementStrategy::FirstFit, part(300))), [0]);
    assert_eq!(test.place(by(PlacementStrategy::FirstFit, part(700))), [0]);
    assert_eq!(test.place(by(PlacementStrategy::FirstFit, part(700))), [1], "device 0 is full now");
}

#[test]
fn best_fit_takes_the_device_with_the_least_left_over() {
    let mut test = uneven();
    assert_eq!(test.place(by(PlacementStrategy::BestFit, part(300))), [2]);
    assert_eq!(test.place(by(PlacementStrategy::BestFit, part(300))), [1], "device 2 has only 0.1 left");
}

#[test]
fn best_fit_prefers_the_device_with_less_memory_left_among_equal_shares() {
    let mut test = PoolFixture::empty();
    test.add_node(node("a"), vec![device("big", "NVIDIA A100 80GB", 80), device("small", "NVIDIA A100 40GB", 40)]);
    assert_eq!(test.place(by(PlacementStrategy::BestFit, part(500))), [1]);
}

#[test]
fn worst_fit_takes_the_device_with_the_most_left_over() {
    let mut test = uneven();
    assert_eq!(test.place(by(PlacementStrategy::WorstFit, part(100))), [0]);
    assert_eq!(test.place(by(PlacementStrategy::WorstFit, part(300))), [0], "0.9 free beats 0.7 free");
    assert_eq!(test.place(by(PlacementStrategy::WorstFit, part(100))), [1], "0.7 free beats 0.6 free");
}

#[test]
fn round_robin_takes_the_next_after_the_last_used_and_wraps() {
    let mut test = PoolFixture::of(3);
    let places: Vec<u32> = (0..5).flat_map(|_| test.place(by(PlacementStrategy::RoundRobin, part(100)))).collect();
    assert_eq!(places, [0, 1, 2, 0, 1]);
}

#[test]
fn round_robin_skips_full_devices_and_goes_by_node_for_several_gpus() {
    let mut test = PoolFixture::of(3);
    test.request(Request { select: named(1), ..whole() });
    test.request(Request { select: named(0), ..part(100) });
    assert_eq!(test.place(by(PlacementStrategy::RoundRobin, part(100))), [2], "after 0 comes 1, which is full");

    let mut test = PoolFixture::of(4);
    test.add_node(node("b"), devices("b", 4));
    let places: Vec<Vec<u32>> = (0..3).map(|_| test.place(by(PlacementStrategy::RoundRobin, gpus(2)))).collect();
    assert_eq!(places, [[0, 1], [4, 5], [2, 3]]);
}

#[test]
fn load_balanced_takes_the_lowest_mean_of_measured_utilization_and_promised_share() {
    let mut test = PoolFixture::of(3);
    test.request(Request { select: named(1), ..part(500) });
    test.report_load(0, gib(0), percent(80));
    test.report_load(1, gib(0), percent(0));
    test.report_load(2, gib(0), percent(60));
    assert_eq!(test.place(by(PlacementStrategy::LoadBalanced, part(100))), [1], "means: 40, 25, 30");
    assert_eq!(test.place(by(PlacementStrategy::LoadBalanced, part(200))), [1], "means: 40, 30, 30");
    assert_eq!(test.place(by(PlacementStrategy::LoadBalanced, part(200))), [2], "means: 40, 40, 30");
}

#[test]
fn load_balanced_counts_the_promise_where_utilization_cannot_be_measured() {
    let mut test = PoolFixture::of(2);
    test.report(0, |reading| reading.utilization = ReadingField::Unsupported);
    test.report_load(1, gib(0), percent(10));
    test.request(Request { select: named(0), ..part(100) });
    assert_eq!(test.place(by(PlacementStrategy::LoadBalanced, part(100))), [1], "means: 10 and 5");
}

#[test]
fn least_used_takes_the_lowest_memory_plus_utilization() {
    let mut test = PoolFixture::of(3);
    test.report_load(0, gib(0), percent(50));
    test.report_load(1, gib(32), percent(20));
    test.report_load(2, gib(24), percent(10));
    assert_eq!(test.place(by(PlacementStrategy::LeastUsed, whole())), [2], "sums: 50, 60, 40");
    assert_eq!(test.place(by(PlacementStrategy::LeastUsed, whole())), [0]);
}

#[test]
fn least_used_counts_promises_as_used() {
    let mut test = PoolFixture::of(2);
    test.request(Request { select: named(0), ..part(200) });
    test.report_load(1, gib(8), percent(10));
    assert_eq!(
        test.place(by(PlacementStrategy::LeastUsed, part(200))),
        [1],
        "0.2 promised is 20 % + 20 %; 1 has 10 % + 10 %"
    );
}

#[test]
fn paper_best_fit_takes_the_node_with_the_least_cpu_and_gpu_left() {
    let mut test = PoolFixture::of(4);
    test.add_node(node("b"), devices("b", 2));
    test.add_node(NodeFacts { cpus: cpus(96), ..node("c") }, devices("c", 2));
    assert_eq!(test.place(by(PlacementStrategy::PaperBestFit, whole())), [4]);
    let spare_gpus = PoolFixture::of(4).place(by(PlacementStrategy::PaperBestFit, gpus(2)));
    assert_eq!(spare_gpus, [0, 1]);
}

#[test]
fn fgd_completes_a_partly_used_card_when_whole_cards_are_expected() {
    let mut test = PoolFixture::of(1);
    test.add_node(node("b"), devices("b", 1));
    test.apply_ok(PoolCommand::SetWorkload { classes: vec![(task(cpus(1), 1000, ""), 100)] });
    test.request(Request { strategy: Some(PlacementStrategy::WorstFit), ..part(500) });
    test.request(Request { select: model("H100"), strategy: Some(PlacementStrategy::WorstFit), ..part(400) });
    // 0: 0.5 free, 1: 0.6 free. Placing 0.5 on device 0 leaves nothing unusable.
    assert_eq!(test.place(by(PlacementStrategy::Fgd, part(500))), [0]);
    assert_eq!(test.place(by(PlacementStrategy::Fgd, part(600))), [1]);
}

#[test]
fn fgd_prefers_a_partly_used_card_to_an_empty_one() {
    let mut test = PoolFixture::of(1);
    test.add_node(node("b"), devices("b", 1));
    test.apply_ok(PoolCommand::SetWorkload { classes: vec![(task(cpus(1), 1000, ""), 100)] });
    test.request(Request { strategy: Some(PlacementStrategy::RoundRobin), ..part(100) });
    test.release(LeaseId(0));
    test.request(Request { strategy: Some(PlacementStrategy::RoundRobin), ..part(500) });
    assert_eq!(test.device(1).promised, HALF);
    assert_eq!(test.place(by(PlacementStrategy::Fgd, part(300))), [1], "first-fit would break device 0");
}

#[test]
fn least_fragmentation_keeps_a_scarce_model_for_tasks_that_need_it() {
    let mut test = PoolFixture::empty();
    test.add_node(node("a"), vec![device("h", "NVIDIA H100", 80)]);
    test.add_node(node("b"), vec![device("v", "NVIDIA V100", 32)]);
    let any = task(cpus(1), 1000, "");
    let picky = task(cpus(1), 1000, "H100");
    test.apply_ok(PoolCommand::SetWorkload { classes: vec![(any, 50), (picky, 50)] });
    assert_eq!(test.place(by(PlacementStrategy::LeastFragmentation, whole())), [1]);
}

#[test]
fn least_fragmentation_does_not_strand_a_gpu_by_taking_its_cpus() {
    let mut test = PoolFixture::empty();
    test.add_node(NodeFacts { cpus: cpus(8), ..node("a") }, devices("a", 1));
    test.add_node(NodeFacts { cpus: cpus(64), ..node("b") }, devices("b", 1));
    test.apply_ok(PoolCommand::SetWorkload { classes: vec![(task(cpus(8), 1000, ""), 100)] });
    let lease = test.request(by(PlacementStrategy::LeastFragmentation, host(cpus(4))));
    assert_eq!(test.lease(lease).node, Some(NodeId(1)));
}

#[test]
fn least_fragmentation_learns_from_requests() {
    let mut test = PoolFixture::of(1);
    test.add_node(node("b"), devices("b", 1));
    // Fifty whole cards are requested: from then on, splitting an empty card has a cost.
    for _ in 0..50 {
        let lease = test.request(by(PlacementStrategy::LeastFragmentation, whole()));
        test.release(lease);
    }
    test.request(Request { strategy: Some(PlacementStrategy::RoundRobin), ..part(500) });
    assert_eq!(test.device(1).promised, HALF, "round-robin went on after device 0");
    assert_eq!(test.place(by(PlacementStrategy::LeastFragmentation, part(500))), [1]);
}

#[test]
fn ties_go_to_the_lowest_number_in_every_strategy() {
    for &strategy in PlacementStrategy::ALL {
        let mut test = PoolFixture::of(2);
        test.add_node(node("b"), devices("b", 2));
        assert_eq!(test.place(by(strategy, part(500))), [0], "{strategy}, a part");
        let mut test = PoolFixture::of(2);
        test.add_node(node("b"), devices("b", 2));
        assert_eq!(test.place(by(strategy, whole())), [0], "{strategy}, a whole one");
        let mut test = PoolFixture::of(2);
        test.add_node(node("b"), devices("b", 2));
        assert_eq!(test.place(by(strategy, gpus(2))), [0, 1], "{strategy}, several");
    }
}

#[test]
fn preferred_models_go_first_and_others_serve_when_they_are_full() {
    let prefers = RequestPolicy { preferred_models: Arc::from([Arc::from("V100")]), ..policy("old cards first") };
    for &strategy in PlacementStrategy::ALL {
        let mut test = PoolFixture::with(Default::default(), policies([prefers.clone()]));
        test.add_node(node("a"), vec![device("h", "NVIDIA H100", 80), device("v", "NVIDIA V100", 32)]);
        assert_eq!(test.place(by(strategy, whole())), [1], "{strategy}");
        assert_eq!(test.place(by(strategy, whole())), [0], "{strategy}");
    }
}

#[test]
fn fits_are_compared_across_kinds_by_the_remaining_share() {
    let mixed = || {
        let mut test = PoolFixture::empty();
        test.add_node(node("a"), vec![device("big", "NVIDIA H100", 80), device("small", "NVIDIA A100", 40)]);
        test
    };
    // 20 GiB are a quarter of the big one and half of the small one.
    assert_eq!(mixed().place(by(PlacementStrategy::BestFit, memory(gib(20)))), [1]);
    assert_eq!(mixed().place(by(PlacementStrategy::WorstFit, memory(gib(20)))), [0]);
}

#[test]
fn the_default_strategy_is_least_used_for_whole_gpus_and_best_fit_for_parts() {
    let mut test = PoolFixture::of(4);
    for (request, strategy) in [
        (whole(), PlacementStrategy::LeastUsed),
        (gpus(2), PlacementStrategy::LeastUsed),
        (part(500), PlacementStrategy::BestFit),
        (memory(gib(8)), PlacementStrategy::BestFit),
        (by(PlacementStrategy::WorstFit, part(100)), PlacementStrategy::WorstFit),
    ] {
        let lease = test.request(request);
        assert_eq!(test.decision(lease).strategy, strategy);
    }
}

#[test]
fn a_policy_sets_the_strategy_for_requests_that_name_none() {
    let spread = RequestPolicy { strategy: Some(PlacementStrategy::WorstFit), ..policy("spread") };
    let mut test = PoolFixture::under(policies([spread]), 2);
    test.place(part(100));
    assert_eq!(test.place(part(100)), [1]);
    assert_eq!(test.place(by(PlacementStrategy::FirstFit, part(100))), [0], "the request's own word counts more");
}

#[test]
fn strategies_parse_from_their_names() {
    for &strategy in PlacementStrategy::ALL {
        assert_eq!(strategy.name().parse(), Ok(strategy));
    }
    let error = "bestfit".parse::<PlacementStrategy>().unwrap_err();
    assert_eq!(error.field, "strategy");
    assert!(error.allowed.contains("best-fit"), "{error}");
}

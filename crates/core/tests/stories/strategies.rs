//! Each strategy chooses exactly what its documentation says.

use std::sync::Arc;

use crate::support::*;
use gpupool_core::{
    LeaseId, MilliCpus, NodeFacts, NodeId, PlacementStrategy, PoolCommand, ReadingField, Request, RequestPolicy, Share,
    TaskClass,
};

/// Three devices: 0 empty, 1 with 0.3 promised, 2 with 0.6 promised.
fn uneven() -> Stage {
    let mut stage = Stage::of(3);
    stage.ask(Request { select: named(1), ..part(300) });
    stage.ask(Request { select: named(2), ..part(600) });
    stage
}

fn task(cpus: MilliCpus, share: u32, models: &str) -> TaskClass {
    TaskClass { cpus, share: Share(share), gpus: 1, models: models.into() }
}

#[test]
fn first_fit_takes_the_lowest_number_that_fits() {
    let mut stage = uneven();
    assert_eq!(stage.place(by(PlacementStrategy::FirstFit, part(300))), [0]);
    assert_eq!(stage.place(by(PlacementStrategy::FirstFit, part(700))), [0]);
    assert_eq!(stage.place(by(PlacementStrategy::FirstFit, part(700))), [1], "device 0 is full now");
}

#[test]
fn best_fit_takes_the_device_with_the_least_left_over() {
    let mut stage = uneven();
    assert_eq!(stage.place(by(PlacementStrategy::BestFit, part(300))), [2]);
    assert_eq!(stage.place(by(PlacementStrategy::BestFit, part(300))), [1], "device 2 has only 0.1 left");
}

#[test]
fn best_fit_prefers_the_device_with_less_memory_left_among_equal_shares() {
    let mut stage = Stage::empty();
    stage.add(node("a"), vec![device("big", "NVIDIA A100 80GB", 80), device("small", "NVIDIA A100 40GB", 40)]);
    assert_eq!(stage.place(by(PlacementStrategy::BestFit, part(500))), [1]);
}

#[test]
fn worst_fit_takes_the_device_with_the_most_left_over() {
    let mut stage = uneven();
    assert_eq!(stage.place(by(PlacementStrategy::WorstFit, part(100))), [0]);
    assert_eq!(stage.place(by(PlacementStrategy::WorstFit, part(300))), [0], "0.9 free beats 0.7 free");
    assert_eq!(stage.place(by(PlacementStrategy::WorstFit, part(100))), [1], "0.7 free beats 0.6 free");
}

#[test]
fn round_robin_takes_the_next_after_the_last_used_and_wraps() {
    let mut stage = Stage::of(3);
    let places: Vec<u32> = (0..5).flat_map(|_| stage.place(by(PlacementStrategy::RoundRobin, part(100)))).collect();
    assert_eq!(places, [0, 1, 2, 0, 1]);
}

#[test]
fn round_robin_skips_what_does_not_fit_and_goes_by_nodes_for_several_gpus() {
    let mut stage = Stage::of(3);
    stage.ask(Request { select: named(1), ..whole() });
    stage.ask(Request { select: named(0), ..part(100) });
    assert_eq!(stage.place(by(PlacementStrategy::RoundRobin, part(100))), [2], "after 0 comes 1, which is full");

    let mut stage = Stage::of(4);
    stage.add(node("b"), devices("b", 4));
    let places: Vec<Vec<u32>> = (0..3).map(|_| stage.place(by(PlacementStrategy::RoundRobin, gpus(2)))).collect();
    assert_eq!(places, [[0, 1], [4, 5], [2, 3]]);
}

#[test]
fn load_balanced_takes_the_lowest_mean_of_measured_utilization_and_promised_share() {
    let mut stage = Stage::of(3);
    stage.ask(Request { select: named(1), ..part(500) });
    stage.busy(0, gib(0), percent(80));
    stage.busy(1, gib(0), percent(0));
    stage.busy(2, gib(0), percent(60));
    assert_eq!(stage.place(by(PlacementStrategy::LoadBalanced, part(100))), [1], "means: 40, 25, 30");
    assert_eq!(stage.place(by(PlacementStrategy::LoadBalanced, part(200))), [1], "means: 40, 30, 30");
    assert_eq!(stage.place(by(PlacementStrategy::LoadBalanced, part(200))), [2], "means: 40, 40, 30");
}

#[test]
fn load_balanced_counts_the_promise_where_utilization_cannot_be_measured() {
    let mut stage = Stage::of(2);
    stage.read(0, |reading| reading.utilization = ReadingField::Unsupported);
    stage.busy(1, gib(0), percent(10));
    stage.ask(Request { select: named(0), ..part(100) });
    assert_eq!(stage.place(by(PlacementStrategy::LoadBalanced, part(100))), [1], "means: 10 and 5");
}

#[test]
fn least_used_takes_the_lowest_memory_plus_utilization() {
    let mut stage = Stage::of(3);
    stage.busy(0, gib(0), percent(50));
    stage.busy(1, gib(32), percent(20));
    stage.busy(2, gib(24), percent(10));
    assert_eq!(stage.place(by(PlacementStrategy::LeastUsed, whole())), [2], "sums: 50, 60, 40");
    assert_eq!(stage.place(by(PlacementStrategy::LeastUsed, whole())), [0]);
}

#[test]
fn least_used_counts_promises_as_used() {
    let mut stage = Stage::of(2);
    stage.ask(Request { select: named(0), ..part(200) });
    stage.busy(1, gib(8), percent(10));
    assert_eq!(
        stage.place(by(PlacementStrategy::LeastUsed, part(200))),
        [1],
        "0.2 promised is 20 % + 20 %; 1 has 10 % + 10 %"
    );
}

#[test]
fn paper_best_fit_takes_the_node_with_the_least_cpu_and_gpu_left() {
    let mut stage = Stage::of(4);
    stage.add(node("b"), devices("b", 2));
    stage.add(NodeFacts { cpus: cpus(96), ..node("c") }, devices("c", 2));
    assert_eq!(stage.place(by(PlacementStrategy::PaperBestFit, whole())), [4]);
    let spare_gpus = Stage::of(4).place(by(PlacementStrategy::PaperBestFit, gpus(2)));
    assert_eq!(spare_gpus, [0, 1]);
}

#[test]
fn fgd_completes_a_broken_card_when_whole_cards_are_what_is_to_come() {
    let mut stage = Stage::of(1);
    stage.add(node("b"), devices("b", 1));
    stage.run(PoolCommand::SetWorkload { classes: vec![(task(cpus(1), 1000, ""), 100)] });
    stage.ask(Request { strategy: Some(PlacementStrategy::WorstFit), ..part(500) });
    stage.ask(Request { select: model("H100"), strategy: Some(PlacementStrategy::WorstFit), ..part(400) });
    // 0: 0.5 free, 1: 0.6 free. Placing 0.5 on device 0 leaves nothing unusable.
    assert_eq!(stage.place(by(PlacementStrategy::Fgd, part(500))), [0]);
    assert_eq!(stage.place(by(PlacementStrategy::Fgd, part(600))), [1]);
}

#[test]
fn fgd_leaves_an_empty_card_alone_while_a_broken_one_fits() {
    let mut stage = Stage::of(1);
    stage.add(node("b"), devices("b", 1));
    stage.run(PoolCommand::SetWorkload { classes: vec![(task(cpus(1), 1000, ""), 100)] });
    stage.ask(Request { strategy: Some(PlacementStrategy::RoundRobin), ..part(100) });
    stage.release(LeaseId(0));
    stage.ask(Request { strategy: Some(PlacementStrategy::RoundRobin), ..part(500) });
    assert_eq!(stage.device(1).promised, HALF);
    assert_eq!(stage.place(by(PlacementStrategy::Fgd, part(300))), [1], "first-fit would break device 0");
}

#[test]
fn least_fragmentation_keeps_the_sought_after_model_for_those_who_need_it() {
    let mut stage = Stage::empty();
    stage.add(node("a"), vec![device("h", "NVIDIA H100", 80)]);
    stage.add(node("b"), vec![device("v", "NVIDIA V100", 32)]);
    let any = task(cpus(1), 1000, "");
    let picky = task(cpus(1), 1000, "H100");
    stage.run(PoolCommand::SetWorkload { classes: vec![(any, 50), (picky, 50)] });
    assert_eq!(stage.place(by(PlacementStrategy::LeastFragmentation, whole())), [1]);
}

#[test]
fn least_fragmentation_does_not_strand_a_gpu_by_taking_its_cpus() {
    let mut stage = Stage::empty();
    stage.add(NodeFacts { cpus: cpus(8), ..node("a") }, devices("a", 1));
    stage.add(NodeFacts { cpus: cpus(64), ..node("b") }, devices("b", 1));
    stage.run(PoolCommand::SetWorkload { classes: vec![(task(cpus(8), 1000, ""), 100)] });
    let lease = stage.ask(by(PlacementStrategy::LeastFragmentation, host(cpus(4))));
    assert_eq!(stage.lease(lease).node, Some(NodeId(1)));
}

#[test]
fn least_fragmentation_learns_from_what_is_asked_for() {
    let mut stage = Stage::of(1);
    stage.add(node("b"), devices("b", 1));
    // Fifty whole cards are asked for: from then on, breaking an empty card costs.
    for _ in 0..50 {
        let lease = stage.ask(by(PlacementStrategy::LeastFragmentation, whole()));
        stage.release(lease);
    }
    stage.ask(Request { strategy: Some(PlacementStrategy::RoundRobin), ..part(500) });
    assert_eq!(stage.device(1).promised, HALF, "round-robin went on after device 0");
    assert_eq!(stage.place(by(PlacementStrategy::LeastFragmentation, part(500))), [1]);
}

#[test]
fn ties_go_to_the_lowest_number_whatever_the_strategy() {
    for &strategy in PlacementStrategy::ALL {
        let mut stage = Stage::of(2);
        stage.add(node("b"), devices("b", 2));
        assert_eq!(stage.place(by(strategy, part(500))), [0], "{strategy}, a part");
        let mut stage = Stage::of(2);
        stage.add(node("b"), devices("b", 2));
        assert_eq!(stage.place(by(strategy, whole())), [0], "{strategy}, a whole one");
        let mut stage = Stage::of(2);
        stage.add(node("b"), devices("b", 2));
        assert_eq!(stage.place(by(strategy, gpus(2))), [0, 1], "{strategy}, several");
    }
}

#[test]
fn preferred_models_go_first_and_others_serve_when_they_are_full() {
    let prefers = RequestPolicy { preferred_models: Arc::from([Arc::from("V100")]), ..policy("old cards first") };
    for &strategy in PlacementStrategy::ALL {
        let mut stage = Stage::with(Default::default(), policies([prefers.clone()]));
        stage.add(node("a"), vec![device("h", "NVIDIA H100", 80), device("v", "NVIDIA V100", 32)]);
        assert_eq!(stage.place(by(strategy, whole())), [1], "{strategy}");
        assert_eq!(stage.place(by(strategy, whole())), [0], "{strategy}");
    }
}

#[test]
fn across_kinds_what_is_left_over_is_compared_not_what_is_taken() {
    let mixed = || {
        let mut stage = Stage::empty();
        stage.add(node("a"), vec![device("big", "NVIDIA H100", 80), device("small", "NVIDIA A100", 40)]);
        stage
    };
    // 20 GiB are a quarter of the big one and half of the small one.
    assert_eq!(mixed().place(by(PlacementStrategy::BestFit, memory(gib(20)))), [1]);
    assert_eq!(mixed().place(by(PlacementStrategy::WorstFit, memory(gib(20)))), [0]);
}

#[test]
fn whole_gpus_go_by_least_used_and_parts_by_best_fit_unless_said() {
    let mut stage = Stage::of(4);
    for (request, strategy) in [
        (whole(), PlacementStrategy::LeastUsed),
        (gpus(2), PlacementStrategy::LeastUsed),
        (part(500), PlacementStrategy::BestFit),
        (memory(gib(8)), PlacementStrategy::BestFit),
        (by(PlacementStrategy::WorstFit, part(100)), PlacementStrategy::WorstFit),
    ] {
        let lease = stage.ask(request);
        assert_eq!(stage.decision(lease).strategy, strategy);
    }
}

#[test]
fn a_policy_names_the_strategy_where_the_request_does_not() {
    let spread = RequestPolicy { strategy: Some(PlacementStrategy::WorstFit), ..policy("spread") };
    let mut stage = Stage::under(policies([spread]), 2);
    stage.place(part(100));
    assert_eq!(stage.place(part(100)), [1]);
    assert_eq!(stage.place(by(PlacementStrategy::FirstFit, part(100))), [0], "the request's own word counts more");
}

#[test]
fn strategies_are_spelled_as_people_write_them() {
    for &strategy in PlacementStrategy::ALL {
        assert_eq!(strategy.name().parse(), Ok(strategy));
    }
    let error = "bestfit".parse::<PlacementStrategy>().unwrap_err();
    assert_eq!(error.field, "strategy");
    assert!(error.allowed.contains("best-fit"), "{error}");
}

//! Figures of strategies, row by row: on the small lab of this repository always, and on the traces of the FGD paper if
//! they are present.
//!
//! The paper's traces are not part of this repository: the tests look for them in `$GPUPOOL_TRACES` or beside the
//! repository, and report when they skip that part.

use std::path::{Path, PathBuf};

use gpupool_core::PlacementStrategy;
use gpupool_sim::trace::TraceFolder;
use gpupool_sim::{NodeOrdering, Scenario, WorkloadSource};

use crate::skipped::skipped;
use crate::{lab, replay};

fn paper() -> Option<PathBuf> {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    let path = std::env::var_os("GPUPOOL_TRACES").map_or(beside, PathBuf::from);
    let there = path.join("golden.csv").is_file();
    if !there {
        skipped("published figures", "no traces of the FGD paper here; set GPUPOOL_TRACES to their folder");
    }
    there.then_some(path)
}

/// Replays every row of a table of figures, and returns their number.
fn check_figures(folder: &TraceFolder, golden: &str) -> usize {
    let mut rows = 0;
    for line in golden.lines().skip(1) {
        let cells: Vec<&str> = line.split(',').collect();
        let strategy = match cells[1] {
            "bestfit" => PlacementStrategy::PaperBestFit,
            "fgd" => PlacementStrategy::Fgd,
            "least-fragmentation" => PlacementStrategy::LeastFragmentation,
            _ => continue,
        };
        let got = replay(folder, cells[0], cells[2].parse().unwrap(), strategy, WorkloadSource::Known);
        let got = [got.arrivals, got.failed, got.used_gpu_milli_end, got.used_gpu_milli_100];
        let expected: Vec<u64> = cells[3..].iter().map(|cell| cell.parse().unwrap()).collect();
        assert_eq!(got.as_slice(), expected, "{line}");
        rows += 1;
    }
    rows
}

#[test]
fn paper_best_fit_and_fgd_match_every_published_row_to_the_integer() {
    assert_eq!(check_figures(&lab(), include_str!("../lab_figures.csv")), 9);
    let Some(path) = paper() else { return };
    let golden = std::fs::read_to_string(path.join("golden.csv")).unwrap();
    assert_eq!(check_figures(&TraceFolder::open(&path).unwrap(), &golden), 80);
}

/// Returns the mean over all seeds of the unallocated share when 100 % has arrived.
fn unallocated(folder: &TraceFolder, trace: &str, workload: WorkloadSource) -> f64 {
    let seeds = folder.seeds(trace).unwrap();
    let of = |seed: &u64| replay(folder, trace, *seed, PlacementStrategy::LeastFragmentation, workload).unallocated_100;
    seeds.iter().map(of).sum::<f64>() / seeds.len() as f64
}

#[test]
fn least_fragmentation_leaves_less_than_the_best_known_on_every_trace() {
    let check = |folder: &TraceFolder, traces: &[(&str, f64)]| {
        for (trace, reached) in traces {
            let known = unallocated(folder, trace, WorkloadSource::Known);
            assert!(known <= *reached, "{trace}: {known:.3} is more than {reached}");
        }
    };
    check(&lab(), &[("lab", 1.71)]);
    let Some(path) = paper() else { return };
    let traces = [
        ("default", 4.10),
        ("multigpu20", 3.58),
        ("multigpu50", 2.50),
        ("gpushare40", 5.47),
        ("gpushare100", 12.70),
        ("gpuspec10", 4.18),
        ("gpuspec33", 4.97),
        ("cpu250", 5.95),
    ];
    check(&TraceFolder::open(&path).unwrap(), &traces);
}

#[test]
fn learning_the_workload_costs_little() {
    let check = |folder: &TraceFolder, traces: &[(&str, f64)]| {
        for (trace, allowed) in traces {
            let known = unallocated(folder, trace, WorkloadSource::Known);
            let learned = unallocated(folder, trace, WorkloadSource::Learned);
            assert!(learned - known <= *allowed, "{trace}: {known:.3} known, {learned:.3} learned");
        }
    };
    check(&lab(), &[("lab", 2.5)]);
    let Some(path) = paper() else { return };
    check(&TraceFolder::open(&path).unwrap(), &[("default", 0.3), ("gpuspec33", 1.5)]);
}

#[test]
fn least_fragmentation_is_not_below_fgd_when_tasks_leave() {
    let check = |folder: &TraceFolder, traces: &[&str], arrivals: u64| {
        for trace in traces {
            let mean = |strategy| {
                let (workload, node_order) = (WorkloadSource::Known, NodeOrdering::Trace);
                let scenario = Scenario { folder, trace, seed: 42, strategy, workload, node_order };
                scenario.churn(1.0, arrivals).unwrap().mean_allocated
            };
            let (ours, fgd) = (mean(PlacementStrategy::LeastFragmentation), mean(PlacementStrategy::Fgd));
            assert!(ours >= fgd - 0.2, "{trace}: {ours:.3} is below {fgd:.3}");
        }
    };
    check(&lab(), &["lab"], 20_000);
    let Some(path) = paper() else { return };
    check(&TraceFolder::open(&path).unwrap(), &["default", "gpushare100", "gpuspec33", "multigpu50"], 60_000);
}

//! The published results of the FGD paper's traces, where the traces are at hand.
//!
//! The traces are not part of this repository: the tests look for them in `$GPUPOOL_TRACES` or beside the repository,
//! and say so when they skip.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::io::Write;
use std::path::{Path, PathBuf};

use gpupool_core::Strategy;
use gpupool_sim::replay::Replayed;
use gpupool_sim::trace::Folder;
use gpupool_sim::{NodeOrder, Scenario, WorkloadSource};

fn traces() -> Option<PathBuf> {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    let path = std::env::var_os("GPUPOOL_TRACES").map_or(beside, PathBuf::from);
    let there = path.join("golden.csv").is_file();
    if !there {
        // Straight to the terminal: what a passing test prints by macro is not shown, and a skip must be seen.
        let said = writeln!(
            std::io::stderr(),
            "skipped: published figures, for want of traces in {}; set GPUPOOL_TRACES to their folder",
            path.display()
        );
        said.unwrap();
    }
    there.then_some(path)
}

fn replay(folder: &Folder, trace: &str, seed: u64, strategy: Strategy, workload: WorkloadSource) -> Replayed {
    Scenario { folder, trace, seed, strategy, workload, node_order: NodeOrder::Trace }.replay().unwrap()
}

/// The mean over all seeds of what is unallocated when 100 % has arrived.
fn unallocated(folder: &Folder, trace: &str, strategy: Strategy, workload: WorkloadSource) -> f64 {
    let seeds = folder.seeds(trace).unwrap();
    let sum: f64 = seeds.iter().map(|seed| replay(folder, trace, *seed, strategy, workload).unallocated_100).sum();
    sum / seeds.len() as f64
}

#[test]
fn paper_best_fit_and_fgd_match_every_published_row_to_the_integer() {
    let Some(path) = traces() else { return };
    let folder = Folder::open(&path).unwrap();
    let golden = std::fs::read_to_string(path.join("golden.csv")).unwrap();
    let mut rows = 0;
    for line in golden.lines().skip(1) {
        let cells: Vec<&str> = line.split(',').collect();
        let strategy = match cells[1] {
            "bestfit" => Strategy::PaperBestFit,
            "fgd" => Strategy::Fgd,
            _ => continue,
        };
        let got = replay(&folder, cells[0], cells[2].parse().unwrap(), strategy, WorkloadSource::Known);
        let got = [got.arrivals, got.failed, got.used_gpu_milli_end, got.used_gpu_milli_100];
        let published: Vec<u64> = cells[3..].iter().map(|cell| cell.parse().unwrap()).collect();
        assert_eq!(got.as_slice(), published, "{line}");
        rows += 1;
    }
    assert_eq!(rows, 80);
}

#[test]
fn least_fragmentation_leaves_less_than_the_best_known_on_every_trace() {
    let Some(path) = traces() else { return };
    let folder = Folder::open(&path).unwrap();
    for (trace, reached) in [
        ("default", 4.10),
        ("multigpu20", 3.58),
        ("multigpu50", 2.50),
        ("gpushare40", 5.47),
        ("gpushare100", 12.70),
        ("gpuspec10", 4.18),
        ("gpuspec33", 4.97),
        ("cpu250", 5.95),
    ] {
        let known = unallocated(&folder, trace, Strategy::LeastFragmentation, WorkloadSource::Known);
        assert!(known <= reached, "{trace}: {known:.3} is more than {reached}");
    }
}

#[test]
fn learning_the_workload_costs_little() {
    let Some(path) = traces() else { return };
    let folder = Folder::open(&path).unwrap();
    for (trace, allowed) in [("default", 0.3), ("gpuspec33", 1.5)] {
        let of = |workload| unallocated(&folder, trace, Strategy::LeastFragmentation, workload);
        let (known, learned) = (of(WorkloadSource::Known), of(WorkloadSource::Learned));
        assert!(learned - known <= allowed, "{trace}: {known:.3} known, {learned:.3} learned");
    }
}

#[test]
fn with_tasks_that_leave_least_fragmentation_is_not_below_fgd() {
    let Some(path) = traces() else { return };
    let folder = Folder::open(&path).unwrap();
    for trace in ["default", "gpushare100", "gpuspec33", "multigpu50"] {
        let mean = |strategy| {
            let (workload, node_order) = (WorkloadSource::Known, NodeOrder::Trace);
            let scenario = Scenario { folder: &folder, trace, seed: 42, strategy, workload, node_order };
            scenario.churn(1.0, 60_000).unwrap().mean_allocated
        };
        let (ours, fgd) = (mean(Strategy::LeastFragmentation), mean(Strategy::Fgd));
        assert!(ours >= fgd - 0.2, "{trace}: {ours:.3} is below {fgd:.3}");
    }
}

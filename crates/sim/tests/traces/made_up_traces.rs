//! Replays of the small traces in this repository, checked by hand and against each other.

use std::fs;
use std::path::{Path, PathBuf};

use gpupool_core::PlacementStrategy;
use gpupool_sim::replay::ReplayResult;
use gpupool_sim::trace::{TraceError, TraceFolder};
use gpupool_sim::{NodeOrdering, Scenario, WorkloadSource};

use crate::lab;

fn replay(folder: &TraceFolder, trace: &str, seed: u64, strategy: PlacementStrategy) -> ReplayResult {
    crate::replay(folder, trace, seed, strategy, WorkloadSource::Known)
}

/// Writes a folder with one trace, `t`.
fn write_traces(name: &str, nodes: &str, types: &str, seed_1: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(root.join("arrivals")).unwrap();
    fs::write(root.join("openb_node_list_gpu_node.csv"), format!("sn,cpu_milli,memory_mib,gpu,model\n{nodes}"))
        .unwrap();
    let header = "type,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,count_in_trace\n";
    fs::write(root.join("arrivals/t_types.csv"), format!("{header}{types}")).unwrap();
    fs::write(root.join("arrivals/t_seed1.txt"), seed_1).unwrap();
    root
}

#[test]
fn the_readings_at_100_and_130_percent_are_as_defined() {
    // Two GPUs. Arrivals: 600, 600, 600 (which makes 1800 of 2000), 600 (2400: past 100 %), rejected ones included.
    let root = write_traces("readings", "a,8000,1024,2,M\n", "0,1000,64,1,600,,5\n", "0 0 0 0\n0\n");
    let row = replay(&TraceFolder::open(&root).unwrap(), "t", 1, PlacementStrategy::FirstFit);
    assert_eq!((row.arrivals, row.failed), (4, 2));
    assert_eq!((row.used_gpu_milli_100, row.used_gpu_milli_end), (1200, 1200));
    assert!((row.unallocated_100 - 40.0).abs() < 1e-9);
}

#[test]
fn equal_scores_go_to_the_node_of_the_lowest_rank() {
    // Node a has rank 1, node b rank 0. The second task fits only a, so all are placed only if the first went to b.
    let nodes = "a,8000,1024,1,M\nb,8000,1024,1,N\n";
    let types = "0,1000,64,1,1000,,1\n1,1000,64,1,1000,M,1\n";
    for strategy in [PlacementStrategy::FirstFit, PlacementStrategy::PaperBestFit] {
        for (ranks, failed) in [("1 0", 0), ("0 1", 1)] {
            let root = write_traces("ranks", nodes, types, &format!("0 1\n{ranks}\n"));
            let row = replay(&TraceFolder::open(&root).unwrap(), "t", 1, strategy);
            assert_eq!(row.failed, failed, "{strategy} with ranks {ranks}");
        }
    }
}

#[test]
fn a_model_that_other_tasks_need_is_left_to_them() {
    // Half of the demand names M: a strategy that knows it sends the rest to N, even though M has the lower rank.
    let nodes = "a,16000,1024,2,M\nb,16000,1024,2,N\n";
    let types = "0,1000,64,1,1000,,10\n1,1000,64,1,1000,M,10\n";
    let root = write_traces("named", nodes, types, "0 0 1 1\n0 1\n");
    let folder = TraceFolder::open(&root).unwrap();
    assert_eq!(replay(&folder, "t", 1, PlacementStrategy::FirstFit).failed, 2);
    assert_eq!(replay(&folder, "t", 1, PlacementStrategy::LeastFragmentation).failed, 0);
}

#[test]
fn the_same_replay_gives_the_same_figures() {
    let folder = lab();
    for &strategy in PlacementStrategy::ALL {
        let figures = || {
            let row = replay(&folder, "lab", 1, strategy);
            (row.failed, row.used_gpu_milli_100, row.used_gpu_milli_end)
        };
        assert_eq!(figures(), figures(), "{strategy}");
    }
}

#[test]
fn every_strategy_uses_between_half_and_all_of_the_capacity() {
    let folder = lab();
    for &strategy in PlacementStrategy::ALL {
        let row = replay(&folder, "lab", 2, strategy);
        assert!((0.0..50.0).contains(&row.unallocated_130), "{strategy}: {}", row.unallocated_130);
        assert!(row.curve.is_sorted_by(|earlier, later| earlier >= later), "{strategy}: what is used never shrinks");
    }
}

#[test]
fn tasks_that_leave_make_room() {
    let folder = lab();
    let (workload, node_order) = (WorkloadSource::Learned, NodeOrdering::GpusDesc);
    let (strategy, trace, seed) = (PlacementStrategy::LeastFragmentation, "lab", 1);
    let scenario = Scenario { folder: &folder, trace, seed, strategy, workload, node_order };
    let row = scenario.churn(0.5, 6_000).unwrap();
    assert!((40.0..55.0).contains(&row.mean_allocated), "half the load is half allocated, not {}", row.mean_allocated);
    assert!(row.failed < 60, "{} of 6000 found no place at half load", row.failed);
}

#[test]
fn a_bad_file_is_named_with_its_line() {
    let error = |nodes: &str, types: &str, seed: &str| -> String {
        let root = write_traces("bad", nodes, types, seed);
        let run = || -> Result<(), TraceError> {
            let folder = TraceFolder::open(&root)?;
            let types = folder.types("t")?;
            folder.arrivals("t", 1, types.len()).map(drop)
        };
        run().unwrap_err().to_string()
    };
    let (node, task) = ("a,8000,1024,1,M\n", "0,1000,64,1,1000,,1\n");
    assert!(error("a,many,1024,1,M\n", task, "0\n0\n").contains("line 2: \"many\""));
    assert!(error("a,8000,1024\n", task, "0\n0\n").contains("3 cells"));
    assert!(error(node, "0,1000,64,2,500,,1\n", "0\n0\n").contains("2 GPUs of 500 thousandths"));
    assert!(error(node, "7,1000,64,1,500,,1\n", "0\n0\n").contains("type 7 should be 0"));
    assert!(error(node, task, "0 9\n0\n").contains("line 1: \"9\""));
    assert!(error(node, task, "0\n").contains("line 2"));
    assert!(error(node, task, "0\n0 0\n").contains("2 ranks for 1 nodes"));
    assert!(matches!(TraceFolder::open(Path::new("/nowhere")), Err(TraceError::Read { .. })));
}

//! `gpupool sim placement` through the real binary.

use std::path::Path;
use std::process::{Command, Output};

fn sim(arguments: &[&str]) -> Output {
    let traces = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/traces");
    Command::new(env!("CARGO_BIN_EXE_gpupool"))
        .args(["sim", "placement", "--traces"])
        .arg(traces)
        .args(arguments)
        .output()
        .unwrap()
}

fn rows(arguments: &[&str]) -> Vec<serde_json::Value> {
    let output = sim(arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn json_has_a_row_per_trace_strategy_and_seed_with_the_published_fields() {
    let rows = rows(&["--strategy", "fgd,first-fit", "--seeds", "1-2", "--json"]);
    assert_eq!(rows.len(), 4);
    for field in [
        "trace",
        "strategy",
        "seed",
        "arrivals",
        "failed",
        "used_gpu_milli_100",
        "used_gpu_milli_end",
        "unallocated_100",
        "unallocated_130",
        "us_per_decision",
    ] {
        assert!(rows.iter().all(|row| row.get(field).is_some()), "{field} is missing");
    }
}

#[test]
fn the_order_of_nodes_and_learning_change_the_figures() {
    let figures = |more: &[&str]| {
        let rows = rows(&[&["--strategy", "fgd", "--json"], more].concat());
        rows.iter().map(|row| row["used_gpu_milli_100"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    let plain = figures(&[]);
    assert_ne!(figures(&["--node-order", "gpus-desc"]), plain);
    assert_ne!(figures(&["--node-order", "cpu-per-gpu-asc"]), plain);
    assert_ne!(figures(&["--workload", "learned"]), plain);
}

#[test]
fn the_table_names_every_strategy_and_the_plot_draws_it() {
    let svg = Path::new(env!("CARGO_TARGET_TMPDIR")).join("plot.svg");
    let output = sim(&["--trace", "lab", "--svg", svg.to_str().unwrap()]);
    let table = String::from_utf8(output.stdout).unwrap();
    let drawn = std::fs::read_to_string(svg).unwrap();
    for strategy in ["first-fit", "best-fit", "paper-best-fit", "fgd", "least-fragmentation"] {
        assert!(table.contains(strategy) && drawn.contains(strategy), "{strategy} is missing:\n{table}");
    }
}

#[test]
fn churn_reports_what_was_allocated_over_time() {
    let rows = rows(&["--churn", "--load", "0.8", "--arrivals", "2000", "--seeds", "7", "--json"]);
    assert_eq!(rows.len(), 5);
    assert!(rows.iter().all(|row| (30.0..=100.0).contains(&row["mean_allocated"].as_f64().unwrap())));
}

#[test]
fn bad_input_is_refused_with_the_available_values() {
    for (arguments, code, expected_parts) in [
        (&["--trace", "nope"][..], 1, "lab"),
        (&["--seeds", "1-x"], 2, "\"1-x\""),
        (&["--seeds", "9"], 1, "no seed 9"),
        (&["--strategy", "luck"], 2, "least-fragmentation"),
        (&["--load", "0.5"], 2, "--churn"),
        (&["--churn", "--load", "-1"], 2, "--load"),
        (&["--churn", "--load", "0"], 2, "above 0"),
        (&["--churn", "--arrivals", "0"], 2, "--arrivals"),
    ] {
        let output = sim(arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
        assert!(error.contains(expected_parts), "{arguments:?}: {error}");
    }
}

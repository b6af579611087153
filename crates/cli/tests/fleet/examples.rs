//! The examples run, and say what they are to show.

use std::path::PathBuf;
use std::process::Command;

use gpupool_testkit::skipped;

use crate::common::Fleet;

/// Where cargo puts the examples it builds with the tests of all crates.
fn example(name: &str) -> Option<PathBuf> {
    let program = std::env::current_exe().unwrap();
    let built = program.parent()?.parent()?.join("examples").join(name);
    built.exists().then_some(built)
}

async fn run(name: &str) -> Option<String> {
    let Some(program) = example(name) else {
        skipped(name, "it is not built; cargo test --workspace builds it");
        return None;
    };
    let fleet = Fleet::of(&["2xH100", "1xH100", "1xA100"]).await;
    let mut command = Command::new(program);
    command.env_clear().env("HOME", "/nonexistent").env("GPU_STATS_SERVICE_ENDPOINTS", fleet.addresses());
    let output = command.arg("0.5").output().unwrap();
    assert!(output.status.success(), "{name}: {output:?}");
    fleet.is_left_empty().await;
    Some(String::from_utf8(output.stdout).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn basic_takes_a_gpu_and_a_half_and_is_refused_the_impossible() {
    let Some(said) = run("basic").await else { return };
    assert!(said.contains("assigned 127.0.0.1_") && said.contains("CUDA_VISIBLE_DEVICES="), "{said}");
    assert!(said.contains("done") && said.contains("not assigned: "), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn multi_endpoint_fills_all_and_waits_for_one_more() {
    let Some(said) = run("multi_endpoint").await else { return };
    for strategy in ["availability", "round_robin", "weighted"] {
        assert!(said.contains(&format!("{strategy}: 4 of 4 GPUs available at 3 of 3 endpoints")), "{said}");
    }
    assert_eq!(said.matches("and it got").count(), 3, "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn scenarios_all_get_a_gpu() {
    let Some(said) = run("scenarios").await else { return };
    assert_eq!(said.lines().count(), 5, "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn health_reports_endpoints_and_recovery() {
    let Some(said) = run("health").await else { return };
    assert!(said.contains("=== Error Recovery Status ==="), "{said}");
    assert!(said.contains("Degradation Status: None (3/3 endpoints healthy)"), "{said}");
    assert!(said.contains("EndpointUp") && said.contains("success rate: 100%"), "{said}");
}

//! The examples run and print the expected results.

use std::path::PathBuf;
use std::process::Command;

use gpupool_testkit::skipped;

use crate::common::Fleet;

/// Path of an example that cargo builds with all tests.
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
    let fleet = Fleet::start(&["2xH100", "1xH100", "1xA100"]).await;
    let mut command = Command::new(program);
    command.env_clear().env("HOME", "/nonexistent").env("GPU_STATS_SERVICE_ENDPOINTS", fleet.addresses());
    let output = command.arg("0.5").output().unwrap();
    assert!(output.status.success(), "{name}: {output:?}");
    fleet.wait_until_empty().await;
    Some(String::from_utf8(output.stdout).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn basic_takes_a_gpu_and_a_half_and_is_refused_the_impossible() {
    let Some(printed) = run("basic").await else { return };
    assert!(printed.contains("assigned 127.0.0.1_") && printed.contains("CUDA_VISIBLE_DEVICES="), "{printed}");
    assert!(printed.contains("done") && printed.contains("not assigned: "), "{printed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn multi_endpoint_fills_all_and_waits_for_one_more() {
    let Some(printed) = run("multi_endpoint").await else { return };
    for strategy in ["availability", "round_robin", "weighted"] {
        assert!(printed.contains(&format!("{strategy}: 4 of 4 GPUs available at 3 of 3 endpoints")), "{printed}");
    }
    assert_eq!(printed.matches("and it got").count(), 3, "{printed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn scenarios_all_get_a_gpu() {
    let Some(printed) = run("scenarios").await else { return };
    assert_eq!(printed.lines().count(), 5, "{printed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn health_reports_endpoints_and_recovery() {
    let Some(printed) = run("health").await else { return };
    assert!(printed.contains("=== Error Recovery Status ==="), "{printed}");
    assert!(printed.contains("Degradation Status: None (3/3 endpoints healthy)"), "{printed}");
    assert!(printed.contains("EndpointUp") && printed.contains("success rate: 100%"), "{printed}");
}

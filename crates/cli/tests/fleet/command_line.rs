//! Several endpoints on the command line.

use std::process::{Command, Output};

use serde_json::Value;

use crate::common::Fleet;

fn gpupool(endpoints: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpupool"));
    command.args(arguments).env_clear().env("HOME", "/nonexistent").env("GPU_STATS_SERVICE_ENDPOINTS", endpoints);
    command.output().unwrap()
}

fn output_text(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[tokio::test(flavor = "multi_thread")]
async fn status_shows_every_agent_and_the_unreachable_one() {
    let fleet = Fleet::start(&["2xH100", "3xA100"]).await;
    let endpoints = format!("{},http://127.0.0.1:1", fleet.addresses());
    let output = gpupool(&endpoints, &["status"]);
    let (page, _) = output_text(&output);
    assert!(output.status.success(), "{page}");
    assert!(page.contains("2 GPUs (2 free)") && page.contains("3 GPUs (3 free)"), "{page}");
    assert!(page.contains("http://127.0.0.1:1 does not answer"), "{page}");
    let output = gpupool(&endpoints, &["status", "--json"]);
    let all: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let authorities: Vec<&str> = all.iter().map(|one| one["authority"].as_str().unwrap()).collect();
    assert_eq!(authorities, ["agent", "agent", "unknown"]);
    assert_eq!(gpupool("http://127.0.0.1:1,http://127.0.0.1:2", &["status"]).status.code(), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_acquired_where_a_gpu_is_free_and_released_there() {
    let fleet = Fleet::start(&["1xH100", "1xA100"]).await;
    let taken: Vec<String> = ["H100", "A100"]
        .iter()
        .map(|_| {
            let output = gpupool(&fleet.addresses(), &["lease", "acquire", "--ttl", "10m"]);
            let (text, notes) = output_text(&output);
            assert!(output.status.success() && notes.contains("expires at"), "{text}{notes}");
            let lease: Value = serde_json::from_str(&text).unwrap();
            lease["env"]["GPUPOOL_LEASE_ENDPOINT"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_ne!(taken[0], taken[1], "the second one goes where the first one is not");
    let output = gpupool(&fleet.addresses(), &["lease", "acquire", "--no-wait"]);
    assert!(output.status.code() == Some(1) && output_text(&output).1.contains("wait"), "{output:?}");
    let script = format!(
        "set -e; eval \"$({0} lease acquire --gpus 1 --wait 1m --export)\"; {0} lease renew; {0} lease release $GPUPOOL_LEASE",
        env!("CARGO_BIN_EXE_gpupool")
    );
    // A GPU becomes free at the second agent; the shell then finds that agent again.
    let waits = std::thread::spawn({
        let endpoints = fleet.addresses();
        move || {
            let mut command = Command::new("sh");
            command.args(["-c", &script]).env_clear().env("HOME", "/nonexistent").env("PATH", "/usr/bin:/bin");
            command.env("GPU_STATS_SERVICE_ENDPOINTS", endpoints).output().unwrap()
        }
    });
    gpupool_testkit::eventually("it to wait", async || (fleet.waiting_at(1).await == 1).then_some(())).await;
    fleet.agents[1].client().release(1).await.unwrap();
    let output = waits.join().unwrap();
    let (text, notes) = output_text(&output);
    assert!(output.status.success(), "{text}{notes}");
    assert!(text.contains("lease 3 released") || text.contains("lease 2 released"), "{text}{notes}");
    assert!(notes.contains("no agent can grant the request now; waiting at all of them"), "{notes}");
    assert_eq!(fleet.agents[1].client().pool().await.unwrap().active, 0);
    fleet.check_audit().await;
}

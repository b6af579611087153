//! `gpupool lease` against a real agent.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStderr, Command, Stdio};

use gpupool_api::lease::{HolderBody, LeaseState};
use gpupool_testkit::TestAgent;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::support::{BINARY, FinishedCommand, command_as_nobody, command_for, command_in, run_command};

async fn agent() -> TestAgent {
    TestAgent::builder(BINARY).simulate("2xH100").start().await
}

/// Starts a command and returns its standard error.
fn spawn_with_stderr(command: &mut Command) -> (Child, BufReader<ChildStderr>) {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let expected_parts = BufReader::new(child.stderr.take().unwrap());
    (child, expected_parts)
}

fn read_line(expected_parts: &mut impl BufRead) -> String {
    let mut line = String::new();
    expected_parts.read_line(&mut line).unwrap();
    line
}

/// Starts a command and returns its first line on standard error.
fn spawn_until_first_line(command: &mut Command) -> (Child, String) {
    let (child, mut expected_parts) = spawn_with_stderr(command);
    let line = read_line(&mut expected_parts);
    (child, line)
}

#[tokio::test]
async fn a_lease_is_acquired_renewed_listed_and_released() {
    let agent = agent().await;
    let lease =
        run_command(&agent, &["lease", "acquire", "--fraction", "0.5", "--memory", "8GiB", "--ttl", "10m"]).json();
    assert_eq!((&lease["state"], &lease["ttl_secs"]), (&"active".into(), &600.0.into()));
    assert_eq!((&lease["devices"][0]["fraction"], &lease["devices"][0]["memory_mib"]), (&0.5.into(), &8192.into()));
    let (id, token) = (lease["id"].to_string(), lease["token"].to_string());
    let renewed = run_command(&agent, &["lease", "renew", &id, "--token", &token]).success();
    assert!(renewed.starts_with(&format!("lease {id} expires at ")), "{renewed}");
    let mut from_job = command_for(&agent, &["lease", "renew", "--json"]);
    let from_job = FinishedCommand::run(from_job.env("GPUPOOL_LEASE", &id).env("GPUPOOL_FENCING_TOKEN", &token)).json();
    assert_eq!(from_job["id"].to_string(), id);
    let table = run_command(&agent, &["lease", "list"]).success();
    let row: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!((row[0], row[1]), (id.as_str(), "active"), "{table}");
    assert!(table.contains("0.5 of 1 GPU, 8 GiB") && table.contains("ttl 10 m"), "{table}");
    assert_eq!(run_command(&agent, &["lease", "release", &id]).success(), format!("lease {id} released\n"));
    assert_eq!(run_command(&agent, &["lease", "release", &id]).success(), format!("lease {id} released\n"));
    assert_eq!(run_command(&agent, &["lease", "list"]).success(), "no leases\n");
    let all = run_command(&agent, &["lease", "list", "--all", "--json"]).json();
    let table = run_command(&agent, &["lease", "list", "--all"]).success();
    let head: Vec<&str> = table.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(head[..6], ["LEASE", "STATE", "OWNER", "GPUS", "START", "DURATION"], "{table}");
    let row: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
    let gpu = lease["devices"][0]["gpu_id"].to_string();
    assert_eq!((row[0], row[1], row[3], row[6]), (id.as_str(), "released", gpu.as_str(), "0"), "{table}");
    assert_eq!((&all[0]["state"], all.as_array().unwrap().len()), (&"released".into(), 1));
    assert_eq!(run_command(&agent, &["lease", "list", "--all", "--owner", "nobody-else"]).success(), "no leases\n");
}

#[tokio::test]
async fn a_shell_can_evaluate_the_exported_lease() {
    let agent = agent().await;
    let script = format!(
        r#"export HIP_VISIBLE_DEVICES=7; eval "$('{BINARY}' lease acquire --gpu-ids 1)" 2>/dev/null; \
           eval "$('{BINARY}' lease acquire --gpu-ids 0 --export)"; \
           echo "$GPUPOOL_GPU_IDS $GPUPOOL_FRACTION ${{CUDA_VISIBLE_DEVICES%%-*}} ${{HIP_VISIBLE_DEVICES-unset}}""#
    );
    let mut shell = Command::new("sh");
    shell.args(["-c", &script]).env_clear().env("PATH", "/usr/bin:/bin").env("HOME", agent.state_dir());
    shell.env("GPU_SERVICE_ENDPOINT", agent.address());
    assert_eq!(FinishedCommand::run(&mut shell).success(), "0 1 GPU unset\n");
}

#[tokio::test]
async fn a_held_lease_lives_as_long_as_the_command() {
    let agent = agent().await;
    let mut watch = agent.watch_events().await;
    for signal in [Signal::INT, Signal::KILL] {
        let (mut child, line) =
            spawn_until_first_line(&mut command_for(&agent, &["lease", "acquire", "--hold", "--ttl", "1h"]));
        let granted = watch.wait_for("a grant", |event| event.kind == "granted").await.lease.unwrap();
        assert_eq!(line, format!("lease {granted} held until this command ends\n"));
        let lease = agent.client_unix().follow(granted, std::time::Duration::ZERO).await.unwrap();
        assert_eq!((lease.state, lease.holder), (LeaseState::Active, Some(HolderBody::Connection)));
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().success(), signal == Signal::INT);
        watch.wait_for_lease("ended", granted).await;
    }
}

#[tokio::test]
async fn a_held_lease_survives_a_restart_of_the_agent() {
    let mut agent = agent().await;
    let (mut child, mut expected_parts) = spawn_with_stderr(&mut command_for(&agent, &["lease", "acquire", "--hold"]));
    assert_eq!(read_line(&mut expected_parts), "lease 1 held until this command ends\n");
    agent.restart().await;
    assert_eq!(read_line(&mut expected_parts), "connection lost; reconnecting to hold lease 1\n");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(read_line(&mut expected_parts), "lease 1 released\n");
    let lease = agent.client_unix().follow(1, std::time::Duration::ZERO).await.unwrap();
    assert_eq!(lease.state, LeaseState::Released);
}

#[tokio::test]
async fn an_interrupted_request_leaves_the_queue() {
    let agent = agent().await;
    run_command(&agent, &["lease", "acquire", "--gpus", "2"]).success();
    let mut watch = agent.watch_events().await;
    let (mut child, line) = spawn_until_first_line(&mut command_for(&agent, &["lease", "acquire"]));
    assert!(line.starts_with("lease 2 waits, number 1 in the queue: "), "{line}");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(128 + 15));
    watch.wait_for_lease("ended", 2).await;
}

#[tokio::test]
async fn a_waiting_request_gets_a_released_gpu() {
    let agent = agent().await;
    run_command(&agent, &["lease", "acquire", "--gpus", "2"]).success();
    let (mut child, line) = spawn_until_first_line(&mut command_for(&agent, &["lease", "acquire", "--wait", "5m"]));
    assert!(line.starts_with("lease 2 waits"), "{line}");
    run_command(&agent, &["lease", "release", "1"]).success();
    assert!(child.wait().unwrap().success());
}

#[tokio::test]
async fn impossible_requests_are_refused_with_a_remedy() {
    let agent = agent().await;
    run_command(&agent, &["lease", "acquire", "--gpus", "2"]).success();
    run_command(&agent, &["lease", "acquire", "--no-wait"]).fails(1, &["no capacity", "gpupool status"]);
    run_command(&agent, &["lease", "acquire", "--gpus", "3"]).fails(1, &["2"]);
    run_command(&agent, &["lease", "acquire", "--gpus", "65"]).fails(2, &["gpus", "65", "64"]);
    run_command(&agent, &["lease", "acquire", "--fraction", "2"]).fails(2, &["--fraction", "0.001 to 1.0"]);
    run_command(&agent, &["lease", "renew", "1", "--token", "77"]).fails(1, &["77"]);
    run_command(&agent, &["lease", "renew", "1"]).fails(2, &["--token", "GPUPOOL_FENCING_TOKEN"]);
    run_command(&agent, &["lease", "release", "99"]).fails(1, &["no lease 99", "lease list --all"]);
    let home = TempDir::new().unwrap();
    FinishedCommand::run(&mut command_in(home.path(), &["lease", "list", "--endpoint", "/nowhere.sock"]))
        .fails(1, &["gpupool serve"]);
}

#[tokio::test]
async fn another_user_cannot_release_a_lease() {
    let agent = agent().await;
    run_command(&agent, &["lease", "acquire"]).success();
    let Some(mut release) = command_as_nobody(&agent, &["lease", "release", "1"]) else { return };
    FinishedCommand::run(&mut release).fails(1, &["belongs to", "GPUPOOL_TOKEN"]);
    let mut as_somebody = command_as_nobody(&agent, &["lease", "acquire", "--owner", "root"]).unwrap();
    FinishedCommand::run(&mut as_somebody).fails(1, &["owner is root"]);
}

//! `gpupool token`, `usage` and `simulate` against a real agent.

use gpupool_testkit::TestAgent;
use tempfile::TempDir;

use crate::support::{BINARY, FinishedCommand, command_as_nobody, command_for, command_in, run_command};

#[tokio::test]
async fn a_token_created_before_the_first_start_is_valid() {
    let home = TempDir::new().unwrap();
    let made = FinishedCommand::run(&mut command_in(home.path(), &["token", "create", "--owner", "alice"]));
    assert!(made.err.contains("token 1") && made.err.contains("GPUPOOL_TOKEN"), "{made:#?}");
    let secret = made.success();
    let secret = secret.strip_suffix('\n').unwrap();
    assert!(secret.starts_with("gpt_") && !secret.contains(char::is_whitespace), "{secret:?}");
    let agent = TestAgent::builder(BINARY).simulate("1xH100").state_dir(home.path().join("state")).start().await;
    let mut acquire = command_in(home.path(), &["lease", "acquire", "--endpoint", agent.address()]);
    let lease = FinishedCommand::run(acquire.env("GPUPOOL_TOKEN", secret)).json();
    assert_eq!(lease["owner"], "alice");
    // The token has no administrator rights, even if the user is root.
    let mut list = command_in(home.path(), &["token", "list", "--endpoint", agent.address()]);
    FinishedCommand::run(list.env("GPUPOOL_TOKEN", secret)).fails(1, &["alice is not an administrator", "as root"]);
}

#[tokio::test]
async fn tokens_are_created_listed_and_revoked_with_and_without_an_agent() {
    let home = TempDir::new().unwrap();
    let state = home.path().join("state");
    let token = |args: &[&str]| {
        FinishedCommand::run(command_in(home.path(), &[&["token"], args].concat()).env("COLUMNS", "80"))
    };
    assert_eq!(token(&["list"]).success(), "no tokens\n");
    token(&["create", "--owner", "alice"]).success();
    let agent = TestAgent::builder(BINARY).simulate("1xH100").state_dir(&state).start().await;
    let made = token(&["create", "--owner", "bob", "--admin", "--json"]).json();
    assert_eq!((&made["id"], &made["owner"], &made["admin"]), (&2.into(), &"bob".into(), &true.into()));
    assert_eq!(token(&["revoke", "1"]).success(), "token 1 revoked\n");
    let table = token(&["list"]).success();
    let row = |at: usize| table.lines().nth(at).unwrap().split_whitespace().collect::<Vec<_>>();
    assert_eq!((row(1)[..3].to_vec(), row(1).len()), (vec!["1", "alice", "user"], 5), "{table}");
    assert_eq!((row(2)[..3].to_vec(), row(2).len()), (vec!["2", "bob", "admin"], 4), "{table}");
    assert!(!table.contains("gpt_"), "{table}");
    token(&["revoke", "1"]).fails(1, &["no token 1"]);
    agent.stop().await;
    let kept = token(&["list", "--json", "--state-dir", state.to_str().unwrap()]).json();
    assert_eq!(kept.as_array().unwrap().len(), 2, "{kept}");
    token(&["revoke", "9"]).fails(1, &["no token 9", "token list"]);
    token(&["create", "--owner", "anonymous:x"]).fails(2, &["owner", "anonymous"]);
    token(&["create"]).fails(2, &["--owner"]);
}

#[tokio::test]
async fn only_administrators_create_tokens_and_faults() {
    let agent = TestAgent::builder(BINARY).simulate("1xH100").start().await;
    let Some(mut create) = command_as_nobody(&agent, &["token", "create", "--owner", "me", "--admin"]) else { return };
    FinishedCommand::run(&mut create).fails(1, &["is not an administrator", "as root", "GPUPOOL_TOKEN"]);
    FinishedCommand::run(&mut command_as_nobody(&agent, &["simulate", "fault", "lost"]).unwrap())
        .fails(1, &["is not an administrator"]);
    // Reading is allowed.
    FinishedCommand::run(&mut command_as_nobody(&agent, &["status"]).unwrap()).success();
    FinishedCommand::run(&mut command_as_nobody(&agent, &["simulate", "list"]).unwrap()).success();
}

#[tokio::test]
async fn usage_is_summed_by_owner_and_by_gpu() {
    let agent = TestAgent::builder(BINARY).simulate("2xH100").argument("--node-name").argument("lab7").start().await;
    assert!(run_command(&agent, &["usage"]).success().starts_with("no usage since "));
    run_command(&agent, &["lease", "acquire", "--gpu-ids", "0", "--owner", "alice"]).success();
    run_command(&agent, &["lease", "acquire", "--gpu-ids", "1", "--owner", "bob, \"jr\"", "--fraction", "0.5"])
        .success();
    let csv = run_command(&agent, &["usage", "--format", "csv"]).success();
    let mut lines: Vec<&str> = csv.split("\r\n").collect();
    assert_eq!((lines.remove(0), lines.pop()), ("owner,leases,gpu_hours,memory_gib_hours", Some("")), "{csv}");
    lines.sort_unstable();
    assert!(lines[0].starts_with("\"bob, \"\"jr\"\"\",1,0.") && lines[1].starts_with("alice,1,0."), "{csv}");
    let table = run_command(&agent, &["usage", "--by", "gpu", "--since", "12h"]).success();
    assert!(table.starts_with("GPU ") && table.contains("lab7/0") && table.contains("lab7/1"), "{table}");
    let printed = run_command(&agent, &["usage", "--json", "--since", "2026-01-01"]).json();
    assert_eq!((&printed["by"], printed["lines"].as_array().unwrap().len()), (&"owner".into(), 2));
    assert!(printed["since"].as_str().unwrap().starts_with("2026-01-01T00:00:00"), "{printed}");
    run_command(&agent, &["usage", "--since", "yesterday"]).fails(2, &["--since", "2026-01-01"]);
    run_command(&agent, &["usage", "--by", "team"]).fails(2, &["owner", "gpu"]);
}

#[tokio::test]
async fn faults_are_injected_and_cleared() {
    let agent = TestAgent::builder(BINARY).simulate("2xH100").start().await;
    let mut watch = agent.watch_events().await;
    assert_eq!(run_command(&agent, &["simulate", "list"]).success(), "no faults\n");
    assert_eq!(run_command(&agent, &["simulate", "fault", "hot:97", "--gpu", "0"]).success(), "");
    assert_eq!(run_command(&agent, &["simulate", "list"]).success(), "GPU  FAULT\n  0  hot:97\n");
    watch.wait_for_device("device_closed", 0).await;
    assert!(run_command(&agent, &["status"]).success().contains("closed: hot"));
    run_command(&agent, &["simulate", "clear"]).success();
    watch.wait_for_device("device_open", 0).await;
    assert_eq!(run_command(&agent, &["simulate", "list", "--json"]).json()["faults"], serde_json::json!([]));
    run_command(&agent, &["simulate", "fault", "melted"]).fails(2, &["melted", "hot:CELSIUS", "squatter:PID:MIB"]);
    run_command(&agent, &["simulate", "fault", "lost", "--gpu", "7"]).fails(1, &["7", "gpu_id"]);
    assert!(run_command(&agent, &["simulate", "fault", "--help"]).success().contains("stuck_utilization"));
    let mut real = command_for(&agent, &["simulate", "list"]);
    let others = TestAgent::builder(BINARY).real_devices().variable("GPUPOOL_BACKEND", "nvml").start().await;
    FinishedCommand::run(real.env("GPU_SERVICE_ENDPOINT", others.address())).fails(1, &["real", "--simulate"]);
}

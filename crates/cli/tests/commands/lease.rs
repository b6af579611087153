//! `gpupool lease`, as a person or a script uses it against a real agent.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStderr, Command, Stdio};

use gpupool_api::lease::{HolderBody, LeaseState};
use gpupool_testkit::TestAgent;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::support::{BINARY, Said, as_nobody, ask, asking, at_home};

async fn agent() -> TestAgent {
    TestAgent::builder(BINARY).simulate("2xH100").start().await
}

/// A command that goes on, and what it says on standard error.
fn followed(command: &mut Command) -> (Child, BufReader<ChildStderr>) {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let says = BufReader::new(child.stderr.take().unwrap());
    (child, says)
}

fn line_of(says: &mut impl BufRead) -> String {
    let mut line = String::new();
    says.read_line(&mut line).unwrap();
    line
}

/// The same with the first line it says, after which nobody listens to it any more.
fn started(command: &mut Command) -> (Child, String) {
    let (child, mut says) = followed(command);
    let line = line_of(&mut says);
    (child, line)
}

#[tokio::test]
async fn a_lease_is_taken_renewed_listed_and_given_back() {
    let agent = agent().await;
    let lease = ask(&agent, &["lease", "acquire", "--fraction", "0.5", "--memory", "8GiB", "--ttl", "10m"]).json();
    assert_eq!((&lease["state"], &lease["ttl_secs"]), (&"active".into(), &600.0.into()));
    assert_eq!((&lease["devices"][0]["fraction"], &lease["devices"][0]["memory_mib"]), (&0.5.into(), &8192.into()));
    let (id, token) = (lease["id"].to_string(), lease["token"].to_string());
    let renewed = ask(&agent, &["lease", "renew", &id, "--token", &token]).fine();
    assert!(renewed.starts_with(&format!("lease {id} lasts until ")), "{renewed}");
    let mut from_job = asking(&agent, &["lease", "renew", "--json"]);
    let from_job = Said::of(from_job.env("GPUPOOL_LEASE", &id).env("GPUPOOL_FENCING_TOKEN", &token)).json();
    assert_eq!(from_job["id"].to_string(), id);
    let table = ask(&agent, &["lease", "list"]).fine();
    let row: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!((row[0], row[1]), (id.as_str(), "active"), "{table}");
    assert!(table.contains("0.5 of 1 GPU, 8 GiB") && table.contains("ttl 10 m"), "{table}");
    assert_eq!(ask(&agent, &["lease", "release", &id]).fine(), format!("lease {id} released\n"));
    assert_eq!(ask(&agent, &["lease", "release", &id]).fine(), format!("lease {id} released\n"));
    assert_eq!(ask(&agent, &["lease", "list"]).fine(), "no leases\n");
    let all = ask(&agent, &["lease", "list", "--all", "--json"]).json();
    assert_eq!((&all[0]["state"], all.as_array().unwrap().len()), (&"released".into(), 1));
    assert_eq!(ask(&agent, &["lease", "list", "--all", "--owner", "nobody-else"]).fine(), "no leases\n");
}

#[tokio::test]
async fn a_shell_can_evaluate_what_it_got() {
    let agent = agent().await;
    let script = format!(
        r#"export HIP_VISIBLE_DEVICES=7; eval "$('{BINARY}' lease acquire --gpu-ids 1)" 2>/dev/null; \
           eval "$('{BINARY}' lease acquire --gpu-ids 0 --export)"; \
           echo "$GPUPOOL_GPU_IDS $GPUPOOL_FRACTION ${{CUDA_VISIBLE_DEVICES%%-*}} ${{HIP_VISIBLE_DEVICES-unset}}""#
    );
    let mut shell = Command::new("sh");
    shell.args(["-c", &script]).env_clear().env("PATH", "/usr/bin:/bin").env("HOME", agent.state_dir());
    shell.env("GPU_SERVICE_ENDPOINT", agent.address());
    assert_eq!(Said::of(&mut shell).fine(), "0 1 GPU unset\n");
}

#[tokio::test]
async fn what_is_held_lives_as_long_as_the_command() {
    let agent = agent().await;
    let mut watch = agent.watch_events().await;
    for signal in [Signal::INT, Signal::KILL] {
        let (mut child, line) = started(&mut asking(&agent, &["lease", "acquire", "--hold", "--ttl", "1h"]));
        let granted = watch.wait_for("a grant", |event| event.kind == "granted").await.lease.unwrap();
        assert_eq!(line, format!("lease {granted} is held until this command ends\n"));
        let lease = agent.client_unix().follow(granted, std::time::Duration::ZERO).await.unwrap();
        assert_eq!((lease.state, lease.holder), (LeaseState::Active, Some(HolderBody::Connection)));
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().success(), signal == Signal::INT);
        watch.wait_for_lease("ended", granted).await;
    }
}

#[tokio::test]
async fn what_is_held_is_held_again_after_the_agent_was_away() {
    let mut agent = agent().await;
    let (mut child, mut says) = followed(&mut asking(&agent, &["lease", "acquire", "--hold"]));
    assert_eq!(line_of(&mut says), "lease 1 is held until this command ends\n");
    agent.restart().await;
    assert_eq!(line_of(&mut says), "the connection broke; taking hold of lease 1 again\n");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(line_of(&mut says), "lease 1 released\n");
    let lease = agent.client_unix().follow(1, std::time::Duration::ZERO).await.unwrap();
    assert_eq!(lease.state, LeaseState::Released);
}

#[tokio::test]
async fn who_is_interrupted_while_waiting_leaves_the_queue() {
    let agent = agent().await;
    ask(&agent, &["lease", "acquire", "--gpus", "2"]).fine();
    let mut watch = agent.watch_events().await;
    let (mut child, line) = started(&mut asking(&agent, &["lease", "acquire"]));
    assert!(line.starts_with("lease 2 waits, number 1 in the queue: "), "{line}");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(128 + 15));
    watch.wait_for_lease("ended", 2).await;
}

#[tokio::test]
async fn a_waiter_gets_what_another_gives_back() {
    let agent = agent().await;
    ask(&agent, &["lease", "acquire", "--gpus", "2"]).fine();
    let (mut child, line) = started(&mut asking(&agent, &["lease", "acquire", "--wait", "5m"]));
    assert!(line.starts_with("lease 2 waits"), "{line}");
    ask(&agent, &["lease", "release", "1"]).fine();
    assert!(child.wait().unwrap().success());
}

#[tokio::test]
async fn what_cannot_be_is_refused_with_what_to_do() {
    let agent = agent().await;
    ask(&agent, &["lease", "acquire", "--gpus", "2"]).fine();
    ask(&agent, &["lease", "acquire", "--no-wait"]).failed(1, &["no capacity", "gpupool status"]);
    ask(&agent, &["lease", "acquire", "--gpus", "3"]).failed(1, &["2"]);
    ask(&agent, &["lease", "acquire", "--gpus", "65"]).failed(2, &["gpus", "65", "64"]);
    ask(&agent, &["lease", "acquire", "--fraction", "2"]).failed(2, &["--fraction", "0.001 to 1.0"]);
    ask(&agent, &["lease", "renew", "1", "--token", "77"]).failed(1, &["77"]);
    ask(&agent, &["lease", "renew", "1"]).failed(2, &["--token", "GPUPOOL_FENCING_TOKEN"]);
    ask(&agent, &["lease", "release", "99"]).failed(1, &["no lease 99", "lease list --all"]);
    let home = TempDir::new().unwrap();
    Said::of(&mut at_home(home.path(), &["lease", "list", "--endpoint", "/nowhere.sock"]))
        .failed(1, &["gpupool serve"]);
}

#[tokio::test]
async fn another_user_cannot_give_back_what_is_not_theirs() {
    let agent = agent().await;
    ask(&agent, &["lease", "acquire"]).fine();
    let Some(mut release) = as_nobody(&agent, &["lease", "release", "1"]) else { return };
    Said::of(&mut release).failed(1, &["belongs to", "GPUPOOL_TOKEN"]);
    let mut as_somebody = as_nobody(&agent, &["lease", "acquire", "--owner", "root"]).unwrap();
    Said::of(&mut as_somebody).failed(1, &["account of root"]);
}

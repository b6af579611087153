//! `gpupool token`, `usage` and `simulate`, as an administrator uses them.

use gpupool_testkit::TestAgent;
use tempfile::TempDir;

use crate::support::{BINARY, Said, as_nobody, ask, asking, at_home};

#[tokio::test]
async fn a_token_made_before_the_first_start_works_after_it() {
    let home = TempDir::new().unwrap();
    let made = Said::of(&mut at_home(home.path(), &["token", "create", "--owner", "alice"]));
    assert!(made.err.contains("token 1") && made.err.contains("GPUPOOL_TOKEN"), "{made:#?}");
    let secret = made.fine();
    let secret = secret.strip_suffix('\n').unwrap();
    assert!(secret.starts_with("gpt_") && !secret.contains(char::is_whitespace), "{secret:?}");
    let agent = TestAgent::builder(BINARY).simulate("1xH100").state_dir(home.path().join("state")).start().await;
    let mut acquire = at_home(home.path(), &["lease", "acquire", "--endpoint", agent.address()]);
    let lease = Said::of(acquire.env("GPUPOOL_TOKEN", secret)).json();
    assert_eq!(lease["owner"], "alice");
    // Its holder is no administrator, whoever the user is.
    let mut list = at_home(home.path(), &["token", "list", "--endpoint", agent.address()]);
    Said::of(list.env("GPUPOOL_TOKEN", secret)).failed(1, &["alice is no administrator", "as root"]);
}

#[tokio::test]
async fn tokens_are_made_listed_and_revoked_through_the_agent_and_without_it() {
    let home = TempDir::new().unwrap();
    let state = home.path().join("state");
    let token = |args: &[&str]| Said::of(at_home(home.path(), &[&["token"], args].concat()).env("COLUMNS", "80"));
    assert_eq!(token(&["list"]).fine(), "no tokens\n");
    token(&["create", "--owner", "alice"]).fine();
    let agent = TestAgent::builder(BINARY).simulate("1xH100").state_dir(&state).start().await;
    let made = token(&["create", "--owner", "bob", "--admin", "--json"]).json();
    assert_eq!((&made["id"], &made["owner"], &made["admin"]), (&2.into(), &"bob".into(), &true.into()));
    assert_eq!(token(&["revoke", "1"]).fine(), "token 1 revoked\n");
    let table = token(&["list"]).fine();
    let row = |at: usize| table.lines().nth(at).unwrap().split_whitespace().collect::<Vec<_>>();
    assert_eq!((row(1)[..3].to_vec(), row(1).len()), (vec!["1", "alice", "lease"], 5), "{table}");
    assert_eq!((row(2)[..3].to_vec(), row(2).len()), (vec!["2", "bob", "administrate"], 4), "{table}");
    assert!(!table.contains("gpt_"), "{table}");
    token(&["revoke", "1"]).failed(1, &["no token 1"]);
    agent.stop().await;
    let kept = token(&["list", "--json", "--state-dir", state.to_str().unwrap()]).json();
    assert_eq!(kept.as_array().unwrap().len(), 2, "{kept}");
    token(&["revoke", "9"]).failed(1, &["no token 9", "token list"]);
    token(&["create", "--owner", "anonymous:x"]).failed(2, &["owner", "anonymous"]);
    token(&["create"]).failed(2, &["--owner"]);
}

#[tokio::test]
async fn only_administrators_make_tokens_and_faults() {
    let agent = TestAgent::builder(BINARY).simulate("1xH100").start().await;
    let Some(mut create) = as_nobody(&agent, &["token", "create", "--owner", "me", "--admin"]) else { return };
    Said::of(&mut create).failed(1, &["is no administrator", "as root", "GPUPOOL_TOKEN"]);
    Said::of(&mut as_nobody(&agent, &["simulate", "fault", "lost"]).unwrap()).failed(1, &["is no administrator"]);
    // Looking is allowed.
    Said::of(&mut as_nobody(&agent, &["status"]).unwrap()).fine();
    Said::of(&mut as_nobody(&agent, &["simulate", "list"]).unwrap()).fine();
}

#[tokio::test]
async fn usage_is_summed_by_owner_and_by_gpu() {
    let agent = TestAgent::builder(BINARY).simulate("2xH100").argument("--node-name").argument("lab7").start().await;
    assert!(ask(&agent, &["usage"]).fine().starts_with("nothing was held since "));
    ask(&agent, &["lease", "acquire", "--gpu-ids", "0", "--owner", "alice"]).fine();
    ask(&agent, &["lease", "acquire", "--gpu-ids", "1", "--owner", "bob, \"jr\"", "--fraction", "0.5"]).fine();
    let csv = ask(&agent, &["usage", "--format", "csv"]).fine();
    let mut lines: Vec<&str> = csv.split("\r\n").collect();
    assert_eq!((lines.remove(0), lines.pop()), ("owner,leases,gpu_hours,memory_gib_hours", Some("")), "{csv}");
    lines.sort_unstable();
    assert!(lines[0].starts_with("\"bob, \"\"jr\"\"\",1,0.") && lines[1].starts_with("alice,1,0."), "{csv}");
    let table = ask(&agent, &["usage", "--by", "gpu", "--since", "12h"]).fine();
    assert!(table.starts_with("GPU ") && table.contains("lab7/0") && table.contains("lab7/1"), "{table}");
    let said = ask(&agent, &["usage", "--json", "--since", "2026-01-01"]).json();
    assert_eq!((&said["by"], said["lines"].as_array().unwrap().len()), (&"owner".into(), 2));
    assert!(said["since"].as_str().unwrap().starts_with("2026-01-01T00:00:00"), "{said}");
    ask(&agent, &["usage", "--since", "yesterday"]).failed(2, &["--since", "2026-01-01"]);
    ask(&agent, &["usage", "--by", "team"]).failed(2, &["owner", "gpu"]);
}

#[tokio::test]
async fn simulated_devices_fail_and_are_mended() {
    let agent = TestAgent::builder(BINARY).simulate("2xH100").start().await;
    let mut watch = agent.watch_events().await;
    assert_eq!(ask(&agent, &["simulate", "list"]).fine(), "nothing is wrong\n");
    assert_eq!(ask(&agent, &["simulate", "fault", "hot:97", "--gpu", "0"]).fine(), "");
    assert_eq!(ask(&agent, &["simulate", "list"]).fine(), "GPU  FAULT\n  0  hot:97\n");
    watch.wait_for_device("device_closed", 0).await;
    assert!(ask(&agent, &["status"]).fine().contains("closed: hot"));
    ask(&agent, &["simulate", "clear"]).fine();
    watch.wait_for_device("device_open", 0).await;
    assert_eq!(ask(&agent, &["simulate", "list", "--json"]).json()["faults"], serde_json::json!([]));
    ask(&agent, &["simulate", "fault", "melted"]).failed(2, &["melted", "hot:CELSIUS", "squatter:PID:MIB"]);
    ask(&agent, &["simulate", "fault", "lost", "--gpu", "7"]).failed(1, &["7", "gpu_id"]);
    assert!(ask(&agent, &["simulate", "fault", "--help"]).fine().contains("stuck_utilization"));
    let mut real = asking(&agent, &["simulate", "list"]);
    let others = TestAgent::builder(BINARY).real_devices().variable("GPUPOOL_BACKEND", "nvml").start().await;
    Said::of(real.env("GPU_SERVICE_ENDPOINT", others.address())).failed(1, &["real", "--simulate"]);
}

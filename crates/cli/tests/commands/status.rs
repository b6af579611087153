//! `gpupool status` against a real agent and against servers without leases.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;

use gpupool_testkit::TestAgent;
use tempfile::TempDir;

use crate::support::{BINARY, FinishedCommand, command_for, command_in, run_command};

/// Agent with two GPUs: alice holds one, a squatter uses the other, and bob waits for both.
async fn busy_agent() -> TestAgent {
    let agent = TestAgent::builder(BINARY).simulate("2xH100").argument("--node-name").argument("lab7").start().await;
    let mut watch = agent.watch_events().await;
    run_command(&agent, &["lease", "acquire", "--gpu-ids", "0", "--owner", "alice", "--worker-id", "train"]).success();
    run_command(&agent, &["simulate", "fault", "squatter:4242:40000:95", "--gpu", "1"]).success();
    let client = agent.client_unix();
    let request = gpupool_api::RequestBody { gpus: Some(2), owner: Some("bob".into()), ..Default::default() };
    let waits = client.request(&request).await.unwrap();
    watch.wait_for_lease("queued", waits.id).await;
    // The next reading finds the squatter.
    let seen = async {
        loop {
            let devices = client.devices().await.unwrap().devices;
            if devices[1].processes.iter().any(|process| process.squatter) {
                return;
            }
        }
    };
    gpupool_testkit::within_deadline("the squatter to be seen", seen).await;
    agent
}

#[tokio::test]
async fn status_shows_gpus_leases_squatters_and_the_queue() {
    let agent = busy_agent().await;
    let page = run_command(&agent, &["status"]).success();
    let lines: Vec<&str> = page.lines().collect();
    assert_eq!(lines[0], "lab7: 2 GPUs (0 free), 1 lease, 1 waiting, 1 squatter, simulated", "{page}");
    assert_eq!(lines[2], "GPU  NAME            BUSY  MEMORY GiB   TEMP  POWER  LEASED  STATE", "{page}");
    assert!(lines[3].starts_with("  0  H100 80GB HBM3 ") && lines[3].ends_with("  1  full"), "{page}");
    assert!(lines[4].starts_with("  1  H100 80GB HBM3 ") && lines[4].ends_with("  0  open, 1 squatter"), "{page}");
    let below = |title: &str| {
        let at = lines.iter().position(|line| line.starts_with(title)).unwrap_or_else(|| panic!("no {title}: {page}"));
        lines[at + 2].split_whitespace().collect::<Vec<_>>()
    };
    let held = below("LEASES");
    assert_eq!((&held[..4], held.last()), (&["0", "1", "alice", "1"][..], Some(&"train")), "{page}");
    assert_eq!(below("SQUATTERS (")[..2], ["1", "4242"], "{page}");
    let waits = below("QUEUE");
    assert_eq!(waits[..5], ["1", "2", "bob", "2", "GPUs"], "{page}");
    assert!(lines.iter().all(|line| line.chars().count() <= 80), "{page}");
    assert!(!page.contains('\u{1b}'), "{page}");
}

#[tokio::test]
async fn json_contains_everything() {
    let agent = busy_agent().await;
    let printed = run_command(&agent, &["status", "--json"]).json();
    assert_eq!(printed["authority"], "agent");
    assert_eq!(printed["pool"]["node"], "lab7");
    assert_eq!(printed["devices"][0]["leases"][0]["owner"], "alice");
    assert_eq!(printed["devices"][1]["processes"][0]["squatter"], true);
    let waits = &printed["waiting"][0];
    assert_eq!(
        (&waits["owner"], &waits["queue_position"], &waits["wish"]["gpus"]),
        (&"bob".into(), &1.into(), &2.into())
    );
    assert!(waits["reason"].is_string(), "{printed}");
}

#[tokio::test]
async fn names_cannot_control_the_terminal() {
    let agent = TestAgent::builder(BINARY).simulate("1xH100").start().await;
    let refused = ["lease", "acquire", "--worker-id", "\u{202e}evil日本"];
    run_command(&agent, &refused).fails(2, &["worker_id", "<U+202E>evil日本"]);
}

#[test]
fn without_an_agent_the_error_says_how_to_start_one() {
    let home = TempDir::new().unwrap();
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let endpoint = format!("http://{free}");
    FinishedCommand::run(&mut command_in(home.path(), &["status", "--endpoint", &endpoint]))
        .fails(1, &[&endpoint, "gpupool serve"]);
    FinishedCommand::run(&mut command_in(home.path(), &["status", "--endpoint", "/nowhere.sock"]))
        .fails(1, &["gpupool serve"]);
    FinishedCommand::run(&mut command_in(home.path(), &["status", "--endpoint", "gpu7:8000"]))
        .fails(2, &["http://gpu7:8000"]);
    let mut several = command_in(home.path(), &["lease", "list"]);
    several.env("GPU_STATS_SERVICE_ENDPOINTS", "http://a:1,http://b:2");
    FinishedCommand::run(&mut several).fails(2, &["several", "--endpoint"]);
}

#[tokio::test]
async fn the_agent_of_the_state_directory_is_the_default() {
    let agent = TestAgent::builder(BINARY).simulate("1xH100").start().await;
    let mut command = command_for(&agent, &["status", "--json"]);
    command.env_remove("GPU_SERVICE_ENDPOINT").env("GPUPOOL_STATE_DIR", agent.state_dir());
    let printed = FinishedCommand::run(&mut command).json();
    assert_eq!(printed["endpoint"], format!("unix://{}", agent.socket().display()));
}

/// Response of the published statistics server, which has no `/v1`.
const STATISTICS: &str = r#"{"gpu_count":1,"gpus":[{"gpu_id":0,"name":"NVIDIA A100","memory":{"total_mb":81920,
"used_mb":1024,"free_mb":80896,"usage_percent":1.25},"utilization_percent":7,"temperature_c":null,
"power":{"draw_w":61.5,"limit_w":400.0}}],"timestamp":"2026-01-01T00:00:00"}"#;

/// Starts a server with one route that runs until the test ends.
fn statistics_server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut received = [0; 4096];
            let length = stream.read(&mut received).unwrap_or(0);
            let (status, body) = match received[..length].starts_with(b"GET /gpu/stats ") {
                true => ("200 OK", STATISTICS),
                false => ("404 Not Found", r#"{"detail":"Not Found"}"#),
            };
            let head = format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n");
            let _ = stream.write_all(format!("{head}content-length: {}\r\n\r\n{body}", body.len()).as_bytes());
        }
    });
    address
}

#[test]
fn a_statistics_server_is_shown_without_leases() {
    let home = TempDir::new().unwrap();
    let address = statistics_server();
    let page = FinishedCommand::run(&mut command_in(home.path(), &["status", "--endpoint", &address])).success();
    assert!(page.starts_with(&format!("{address}: 1 GPU, statistics only")), "{page}");
    let row: Vec<&str> = page.lines().nth(3).unwrap().split_whitespace().collect();
    assert_eq!(row, ["0", "A100", "7%", "1.0/80.0", "?", "62", "W"], "{page}");
    let printed =
        FinishedCommand::run(&mut command_in(home.path(), &["status", "--json", "--endpoint", &address])).json();
    assert_eq!((&printed["authority"], &printed["stats"]["gpus"][0]["name"]), (&"none".into(), &"NVIDIA A100".into()));
    FinishedCommand::run(&mut command_in(home.path(), &["lease", "list", "--endpoint", &address]))
        .fails(1, &["not a gpupool agent"]);
}

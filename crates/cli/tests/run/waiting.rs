//! Waiting in the queue: order, reason, and nothing left when the request is cancelled.
use gpupool_api::lease::LeaseState;
use gpupool_confine::Signal;

use crate::support::{agent_of, lease_end, live_leases, run, take_gpus};

#[tokio::test]
async fn the_reason_is_shown_and_the_command_runs_once_a_gpu_is_released() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    let held = take_gpus(&client, 1).await;
    let mut running = run(&agent, &["--wait", "1h"], &["echo", "my turn"]);
    let why = running.wait_for_message("waits");
    assert!(why.contains("number 1") && why.contains("free") && why.contains(&held.owner), "{why}");
    let waiting = live_leases(&client).await;
    assert_eq!(waiting.iter().filter(|lease| lease.state == LeaseState::Queued).count(), 1, "{waiting:#?}");
    client.release(held.id).await.unwrap();
    running.wait_for_output("my turn");
    assert_eq!(running.code(), 0);
    assert_eq!(live_leases(&client).await, []);
}

#[tokio::test]
async fn earlier_requests_run_first() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    let held = take_gpus(&client, 1).await;
    let mut first = run(&agent, &[], &["sh", "-c", "echo first; exec sleep 600"]);
    first.wait_for_message("number 1");
    let mut second = run(&agent, &[], &["echo", "second"]);
    second.wait_for_message("number 2");
    client.release(held.id).await.unwrap();
    first.wait_for_output("first");
    second.wait_for_message("number 1");
    first.signal(Signal::TERM);
    assert_eq!(first.code(), 143);
    second.wait_for_output("second");
    assert_eq!(second.code(), 0);
}

#[tokio::test]
async fn a_cancelled_request_leaves_the_queue() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    let held = take_gpus(&client, 1).await;
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let mut running = run(&agent, &[], &["true"]);
        running.wait_for_message("waits");
        running.signal(signal);
        assert_eq!(running.code(), code);
        let left = live_leases(&client).await;
        assert_eq!(left.iter().map(|lease| lease.id).collect::<Vec<_>>(), [held.id], "after {signal:?}: {left:#?}");
    }
}

#[tokio::test]
async fn a_killed_request_leaves_the_queue() {
    let agent = agent_of("1xH100").start().await;
    let mut watch = agent.watch_events().await;
    let held = take_gpus(&agent.client_unix(), 1).await;
    let mut running = run(&agent, &[], &["true"]);
    running.wait_for_message("waits");
    let waiting =
        live_leases(&agent.client_unix()).await.into_iter().find(|lease| lease.state == LeaseState::Queued).unwrap();
    running.signal(Signal::KILL);
    watch.wait_for_lease("ended", waiting.id).await;
    assert_eq!(live_leases(&agent.client_unix()).await.len(), 1, "only lease {} should be left", held.id);
}

#[tokio::test]
async fn a_request_that_waited_too_long_reports_the_next_step() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    take_gpus(&client, 1).await;
    let (code, _, messages) = run(&agent, &["--wait", "300ms"], &["true"]).ended();
    assert_eq!(code, 1, "{messages}");
    assert!(messages.contains("--wait") && messages.contains("gpupool status"), "{messages}");
    let (code, _, messages) = run(&agent, &["--no-wait"], &["true"]).ended();
    assert_eq!(code, 1, "{messages}");
    assert!(messages.contains("--no-wait") && messages.contains("gpupool status"), "{messages}");
    assert_eq!(live_leases(&client).await.len(), 1);
}

#[tokio::test]
async fn a_waiting_request_survives_a_restart_of_the_agent() {
    let mut agent = agent_of("1xH100").start().await;
    let held = take_gpus(&agent.client_unix(), 1).await;
    let mut running = run(&agent, &[], &["echo", "my turn"]);
    running.wait_for_message("waits");
    agent.restart().await;
    let client = agent.client_unix();
    client.release(held.id).await.unwrap();
    running.wait_for_output("my turn");
    assert_eq!(running.code(), 0);
    assert_eq!(lease_end(&client, held.id).await.0, LeaseState::Released);
}

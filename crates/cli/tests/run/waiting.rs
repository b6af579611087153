//! A command waits its turn, says why, and leaves nothing in the queue when it is no longer wanted.
use gpupool_api::lease::LeaseState;
use gpupool_confine::Signal;

use crate::support::{agent_of, live, over, run, take};

#[tokio::test]
async fn it_says_why_it_waits_and_runs_once_a_gpu_is_given_back() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    let held = take(&client, 1).await;
    let mut running = run(&agent, &["--wait", "1h"], &["echo", "my turn"]);
    let why = running.tells("waits");
    assert!(why.contains("number 1") && why.contains("free") && why.contains(&held.owner), "{why}");
    let waiting = live(&client).await;
    assert_eq!(waiting.iter().filter(|lease| lease.state == LeaseState::Queued).count(), 1, "{waiting:#?}");
    client.release(held.id).await.unwrap();
    running.says("my turn");
    assert_eq!(running.code(), 0);
    assert_eq!(live(&client).await, []);
}

#[tokio::test]
async fn those_who_came_first_run_first() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    let held = take(&client, 1).await;
    let mut first = run(&agent, &[], &["sh", "-c", "echo first; exec sleep 600"]);
    first.tells("number 1");
    let mut second = run(&agent, &[], &["echo", "second"]);
    second.tells("number 2");
    client.release(held.id).await.unwrap();
    first.says("first");
    second.tells("number 1");
    first.signal(Signal::TERM);
    assert_eq!(first.code(), 143);
    second.says("second");
    assert_eq!(second.code(), 0);
}

#[tokio::test]
async fn one_that_is_cancelled_while_it_waits_leaves_nothing_in_the_queue() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    let held = take(&client, 1).await;
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let mut running = run(&agent, &[], &["true"]);
        running.tells("waits");
        running.signal(signal);
        assert_eq!(running.code(), code);
        let left = live(&client).await;
        assert_eq!(left.iter().map(|lease| lease.id).collect::<Vec<_>>(), [held.id], "after {signal:?}: {left:#?}");
    }
}

#[tokio::test]
async fn one_that_is_killed_while_it_waits_is_forgotten() {
    let agent = agent_of("1xH100").start().await;
    let mut watch = agent.watch_events().await;
    let held = take(&agent.client_unix(), 1).await;
    let mut running = run(&agent, &[], &["true"]);
    running.tells("waits");
    let waiting = live(&agent.client_unix()).await.into_iter().find(|lease| lease.state == LeaseState::Queued).unwrap();
    running.signal(Signal::KILL);
    watch.wait_for_lease("ended", waiting.id).await;
    assert_eq!(live(&agent.client_unix()).await.len(), 1, "only lease {} should be left", held.id);
}

#[tokio::test]
async fn one_that_waited_long_enough_says_what_to_do() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    take(&client, 1).await;
    let (code, _, messages) = run(&agent, &["--wait", "300ms"], &["true"]).ended();
    assert_eq!(code, 1, "{messages}");
    assert!(messages.contains("--wait") && messages.contains("gpupool status"), "{messages}");
    let (code, _, messages) = run(&agent, &["--no-wait"], &["true"]).ended();
    assert_eq!(code, 1, "{messages}");
    assert!(messages.contains("--no-wait") && messages.contains("gpupool status"), "{messages}");
    assert_eq!(live(&client).await.len(), 1);
}

#[tokio::test]
async fn one_that_waits_goes_on_waiting_through_a_restart_of_the_agent() {
    let mut agent = agent_of("1xH100").start().await;
    let held = take(&agent.client_unix(), 1).await;
    let mut running = run(&agent, &[], &["echo", "my turn"]);
    running.tells("waits");
    agent.restart().await;
    let client = agent.client_unix();
    client.release(held.id).await.unwrap();
    running.says("my turn");
    assert_eq!(running.code(), 0);
    assert_eq!(over(&client, held.id).await.0, LeaseState::Released);
}

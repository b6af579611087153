//! A client that dies between offer and confirmation leaves no active lease, and what it was offered goes on.

use std::process::{Command, Stdio};
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_testkit::{ProxyMode, eventually, within_deadline};

use crate::common::{Fleet, quick, started, whole};

/// Set in the process that is to die: the endpoints it waits at.
const ENDPOINTS: &str = "GPUPOOL_TEST_DYING_CLIENT";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by the test below, in a process of its own"]
async fn the_one_that_dies() {
    let endpoints = std::env::var(ENDPOINTS).unwrap();
    let client = started(quick(gpupool_client::Client::builder().endpoints(endpoints))).await;
    let lease = whole(&client).await;
    drop(lease);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_dead_client_was_offered_goes_to_the_next_and_never_becomes_active() {
    let fleet = Fleet::of(&["1xH100", "1xH100"]).await;
    let held = fleet.fill().await;
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["dying::the_one_that_dies", "--exact", "--ignored", "--nocapture"])
        .env(ENDPOINTS, fleet.addresses())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    for number in 0..2 {
        eventually("the other process to wait", async || (fleet.waiting_at(number).await == 1).then_some(())).await;
    }
    let mut next = Vec::new();
    for agent in &fleet.agents {
        next.push(agent.client().request(&RequestBody::default()).await.unwrap().id);
    }
    // What the agents say does not reach it any more: it is offered, and cannot confirm.
    fleet.set(0, ProxyMode::Silent);
    fleet.set(1, ProxyMode::Silent);
    for (agent, held) in fleet.agents.iter().zip(&held) {
        agent.client().release(held[0]).await.unwrap();
    }
    for agent in &fleet.agents {
        let client = agent.client();
        eventually("the offer", async || {
            let leases = client.leases(&Default::default()).await.unwrap().leases;
            leases.iter().any(|lease| lease.state.name() == "offered").then_some(())
        })
        .await;
    }
    child.kill().unwrap();
    child.wait().unwrap();
    for (agent, next) in fleet.agents.iter().zip(next) {
        let client = agent.client();
        let served = within_deadline("the next one", client.follow(next, Duration::from_secs(60))).await.unwrap();
        assert_eq!(served.state.name(), "active");
        let records = gpupool_testkit::audit::fetch_all_records(&client).await.unwrap();
        // What was offered is held too, and counts as such; it ended without ever being confirmed.
        let ends = records.iter().filter(|one| one.event == "ended");
        let ends: Vec<Option<&str>> = ends.map(|one| one.cause.as_deref()).collect();
        assert_eq!(ends, [Some("by_owner"), Some("offer_lapsed")], "{records:#?}");
    }
    fleet.is_clean().await;
}

//! A client that dies between offer and confirmation leaves no active lease, and the offer goes to the next request.

use std::process::{Command, Stdio};
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_testkit::{ProxyMode, eventually, within_deadline};

use crate::common::{Fleet, quick_polling, request_whole_gpu, start_client};

/// Variable with the endpoints of the process that is killed.
const ENDPOINTS: &str = "GPUPOOL_TEST_DYING_CLIENT";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by the test below, in a process of its own"]
async fn waits_until_it_is_killed() {
    let endpoints = std::env::var(ENDPOINTS).unwrap();
    let client = start_client(quick_polling(gpupool_client::Client::builder().endpoints(endpoints))).await;
    let lease = request_whole_gpu(&client).await;
    drop(lease);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_offer_of_a_dead_client_goes_to_the_next_request() {
    let fleet = Fleet::start(&["1xH100", "1xH100"]).await;
    let held = fleet.lease_all_gpus().await;
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["client_crash::waits_until_it_is_killed", "--exact", "--ignored", "--nocapture"])
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
    // Responses of the agents no longer arrive, so the client gets an offer and cannot confirm it.
    fleet.set_proxy_mode(0, ProxyMode::Silent);
    fleet.set_proxy_mode(1, ProxyMode::Silent);
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
        // An offer counts as held; it ended without a confirmation.
        let ends = records.iter().filter(|one| one.event == "ended");
        let ends: Vec<Option<&str>> = ends.map(|one| one.cause.as_deref()).collect();
        assert_eq!(ends, [Some("by_owner"), Some("offer_lapsed")], "{records:#?}");
    }
    fleet.check_audit().await;
}

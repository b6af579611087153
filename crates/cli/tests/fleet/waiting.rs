//! If all endpoints are full, a request waits at all of them and gets exactly one lease.

use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_client::{Client, ClientError, HeldLease};
use gpupool_testkit::{eventually, within_deadline};
use tokio::task::JoinHandle;

use crate::common::{Fleet, request_whole_gpu};

fn spawn_request(client: &Client) -> JoinHandle<Result<HeldLease, ClientError>> {
    let client = client.clone();
    tokio::spawn(async move { client.request(RequestBody::default()).await })
}

async fn wait_until_queued(fleet: &Fleet, count: usize) {
    for number in 0..fleet.agents.len() {
        eventually("requests to wait everywhere", async || (fleet.waiting_at(number).await == count).then_some(()))
            .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_free_endpoint_serves_and_the_others_are_cancelled() {
    let fleet = Fleet::start(&["1xH100", "1xH100", "1xH100"]).await;
    let held = fleet.lease_all_gpus().await;
    let client = fleet.client().await;
    let received = spawn_request(&client);
    wait_until_queued(&fleet, 1).await;
    assert_eq!(client.pool_status().unwrap().blocked_workers, 1);
    fleet.agents[1].client().release(held[1][0]).await.unwrap();
    let lease = within_deadline("a GPU", received).await.unwrap().unwrap();
    assert_eq!(lease.endpoint_id(), client.endpoints_info().unwrap()[1].endpoint_id);
    wait_until_queued(&fleet, 0).await;
    let status = client.pool_status().unwrap();
    assert_eq!((status.blocked_workers, status.active_workers), (0, 1));
    lease.release().await.unwrap();
    fleet.check_audit().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn simultaneous_offers_give_one_lease_and_the_others_go_to_the_next_requests() {
    let fleet = Fleet::start(&["1xH100", "1xH100", "1xH100"]).await;
    let held = fleet.lease_all_gpus().await;
    let client = fleet.client().await;
    let received = spawn_request(&client);
    wait_until_queued(&fleet, 1).await;
    // An unrelated request is next in every queue.
    let mut others = Vec::new();
    for agent in &fleet.agents {
        others.push(agent.client().request(&RequestBody::default()).await.unwrap().id);
    }
    // A request of the same client is last.
    let sibling = spawn_request(&client);
    wait_until_queued(&fleet, 3).await;
    let released = fleet.agents.iter().zip(&held).map(|(agent, held)| {
        let (client, lease) = (agent.client(), held[0]);
        async move { client.release(lease).await.unwrap() }
    });
    futures_util::future::join_all(released).await;
    let lease = within_deadline("a GPU", received).await.unwrap().unwrap();
    let winner =
        client.endpoints_info().unwrap().iter().position(|one| one.endpoint_id == lease.endpoint_id()).unwrap();
    // The other offers went to the unrelated requests, not to the last one.
    for number in (0..3).filter(|number| *number != winner) {
        let agent = fleet.agents[number].client();
        let other =
            within_deadline("the next one there", agent.follow(others[number], Duration::from_secs(60))).await.unwrap();
        assert_eq!(other.state.name(), "active", "at endpoint {number}");
    }
    assert!(!sibling.is_finished());
    lease.release().await.unwrap();
    let other = fleet.agents[winner].client().follow(others[winner], Duration::from_secs(60)).await.unwrap();
    assert_eq!(other.state.name(), "active");
    fleet.agents[winner].client().release(other.id).await.unwrap();
    within_deadline("the sibling", sibling).await.unwrap().unwrap().release().await.unwrap();
    fleet.check_audit().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_one_client_are_served_in_order() {
    let fleet = Fleet::start(&["1xH100", "1xH100"]).await;
    let held = fleet.lease_all_gpus().await;
    let client = fleet.client().await;
    let mut received = Vec::new();
    for number in 0..20 {
        received.push(spawn_request(&client));
        eventually("it to wait", async || (client.pool_status().unwrap().blocked_workers == number + 1).then_some(()))
            .await;
    }
    wait_until_queued(&fleet, 20).await;
    for (agent, held) in fleet.agents.iter().zip(&held) {
        agent.client().release(held[0]).await.unwrap();
    }
    // There are two GPUs, so the next one served is among the first two that still wait.
    let mut open: Vec<_> = received.into_iter().enumerate().collect();
    while !open.is_empty() {
        let lease = eventually("the next one", async || {
            let at = open.iter().position(|(_, received)| received.is_finished())?;
            let (number, received) = open.remove(at);
            assert!(at < 2, "request {number} was served before {:?}", open[0].0);
            Some(received.await.unwrap().unwrap())
        })
        .await;
        lease.release().await.unwrap();
    }
    fleet.check_audit().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_request_leaves_nothing_behind() {
    let fleet = Fleet::start(&["1xH100", "1xH100"]).await;
    let held = fleet.lease_all_gpus().await;
    let client = fleet.client().await;
    let body = RequestBody { wait_limit_secs: Some(0.3), worker_id: Some("w7".into()), ..RequestBody::default() };
    let error = client.request(body).await.unwrap_err();
    assert_eq!(error.to_string(), "Worker w7 request timed out after 0.3 seconds");
    wait_until_queued(&fleet, 0).await;
    // The request is dropped while it is sent, queued or waiting.
    for millis in [0, 1, 2, 5, 10, 20, 50] {
        let received = client.request(RequestBody::default());
        assert!(tokio::time::timeout(Duration::from_millis(millis), received).await.is_err());
    }
    wait_until_queued(&fleet, 0).await;
    for (agent, held) in fleet.agents.iter().zip(&held) {
        agent.client().release(held[0]).await.unwrap();
    }
    fleet.wait_until_empty().await;
    for millis in [0, 1, 1, 2, 2, 3, 5] {
        let _ = tokio::time::timeout(Duration::from_millis(millis), client.request(RequestBody::default())).await;
    }
    fleet.wait_until_empty().await;
    assert_eq!(client.pool_status().unwrap().active_workers, 0);
    drop(request_whole_gpu(&client).await);
    fleet.wait_until_empty().await;
    fleet.check_audit().await;
}

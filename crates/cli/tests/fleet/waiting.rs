//! Where all are full a request waits everywhere at once, and one lease comes of it.

use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_client::{Client, ClientError, HeldLease};
use gpupool_testkit::{eventually, within_deadline};
use tokio::task::JoinHandle;

use crate::common::{Fleet, whole};

fn asks(client: &Client) -> JoinHandle<Result<HeldLease, ClientError>> {
    let client = client.clone();
    tokio::spawn(async move { client.request(RequestBody::default()).await })
}

async fn all_wait(fleet: &Fleet, count: usize) {
    for number in 0..fleet.agents.len() {
        eventually("requests to wait everywhere", async || (fleet.waiting_at(number).await == count).then_some(()))
            .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_endpoint_with_room_serves_and_the_others_are_left() {
    let fleet = Fleet::of(&["1xH100", "1xH100", "1xH100"]).await;
    let held = fleet.fill().await;
    let client = fleet.client().await;
    let asked = asks(&client);
    all_wait(&fleet, 1).await;
    assert_eq!(client.pool_status().unwrap().blocked_workers, 1);
    fleet.agents[1].client().release(held[1][0]).await.unwrap();
    let lease = within_deadline("a GPU", asked).await.unwrap().unwrap();
    assert_eq!(lease.endpoint_id(), client.endpoints_info().unwrap()[1].endpoint_id);
    all_wait(&fleet, 0).await;
    let status = client.pool_status().unwrap();
    assert_eq!((status.blocked_workers, status.active_workers), (0, 1));
    lease.release().await.unwrap();
    fleet.is_clean().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_all_come_free_at_once_one_is_taken_and_the_others_go_to_whoever_is_next_there() {
    let fleet = Fleet::of(&["1xH100", "1xH100", "1xH100"]).await;
    let held = fleet.fill().await;
    let client = fleet.client().await;
    let asked = asks(&client);
    all_wait(&fleet, 1).await;
    // Behind it in every queue: somebody else, who has nothing to do with this client.
    let mut others = Vec::new();
    for agent in &fleet.agents {
        others.push(agent.client().request(&RequestBody::default()).await.unwrap().id);
    }
    // And a sibling, who came last.
    let sibling = asks(&client);
    all_wait(&fleet, 3).await;
    let released = fleet.agents.iter().zip(&held).map(|(agent, held)| {
        let (client, lease) = (agent.client(), held[0]);
        async move { client.release(lease).await.unwrap() }
    });
    futures_util::future::join_all(released).await;
    let lease = within_deadline("a GPU", asked).await.unwrap().unwrap();
    let winner =
        client.endpoints_info().unwrap().iter().position(|one| one.endpoint_id == lease.endpoint_id()).unwrap();
    // What it was offered elsewhere went to those who waited there, not to the sibling.
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
    fleet.is_clean().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clients_own_requests_are_served_in_the_order_they_came() {
    let fleet = Fleet::of(&["1xH100", "1xH100"]).await;
    let held = fleet.fill().await;
    let client = fleet.client().await;
    let mut asked = Vec::new();
    for number in 0..20 {
        asked.push(asks(&client));
        eventually("it to wait", async || (client.pool_status().unwrap().blocked_workers == number + 1).then_some(()))
            .await;
    }
    all_wait(&fleet, 20).await;
    for (agent, held) in fleet.agents.iter().zip(&held) {
        agent.client().release(held[0]).await.unwrap();
    }
    // Two GPUs: whoever is served is among the first two that still wait.
    let mut open: Vec<_> = asked.into_iter().enumerate().collect();
    while !open.is_empty() {
        let lease = eventually("the next one", async || {
            let at = open.iter().position(|(_, asked)| asked.is_finished())?;
            let (number, asked) = open.remove(at);
            assert!(at < 2, "request {number} was served before {:?}", open[0].0);
            Some(asked.await.unwrap().unwrap())
        })
        .await;
        lease.release().await.unwrap();
    }
    fleet.is_clean().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_gives_up_leaves_nothing_behind() {
    let fleet = Fleet::of(&["1xH100", "1xH100"]).await;
    let held = fleet.fill().await;
    let client = fleet.client().await;
    let body = RequestBody { wait_limit_secs: Some(0.3), worker_id: Some("w7".into()), ..RequestBody::default() };
    let error = client.request(body).await.unwrap_err();
    assert_eq!(error.to_string(), "Worker w7 request timed out after 0.3 seconds");
    all_wait(&fleet, 0).await;
    // Dropped at whatever instant: while it asks, enters, waits.
    for millis in [0, 1, 2, 5, 10, 20, 50] {
        let asked = client.request(RequestBody::default());
        assert!(tokio::time::timeout(Duration::from_millis(millis), asked).await.is_err());
    }
    all_wait(&fleet, 0).await;
    for (agent, held) in fleet.agents.iter().zip(&held) {
        agent.client().release(held[0]).await.unwrap();
    }
    fleet.is_left_empty().await;
    for millis in [0, 1, 1, 2, 2, 3, 5] {
        let _ = tokio::time::timeout(Duration::from_millis(millis), client.request(RequestBody::default())).await;
    }
    fleet.is_left_empty().await;
    assert_eq!(client.pool_status().unwrap().active_workers, 0);
    drop(whole(&client).await);
    fleet.is_left_empty().await;
    fleet.is_clean().await;
}

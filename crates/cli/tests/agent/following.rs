//! One call follows many leases: it keeps them in the queue, and returns those that left it.

use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::lease::{FollowBody, FollowResponse, LeaseState};
use gpupool_client::{AgentClient, ClientError};
use gpupool_testkit::{TestAgent, within_deadline};
use serde_json::json;

use crate::common::http::{RawEndpoint, RawResponse, request};
use crate::common::machine::{ALICE, accessible_directory, as_user, is_root};
use crate::common::{acquire, agent, eventually, skipped, whole_gpu};

/// A wait that outlasts every test, so that no response comes because of it.
const LONG_WAIT: Duration = Duration::from_secs(300);

const ROUTE: &str = "/v1/leases/follow";

/// Queues this many requests, one after the other.
async fn queue_requests(client: &AgentClient, count: usize) -> Vec<u64> {
    let mut queue = Vec::new();
    for _ in 0..count {
        let lease = client.request(&RequestBody::default()).await.unwrap();
        assert_eq!(lease.state, LeaseState::Queued, "{lease:?}");
        queue.push(lease.id);
    }
    queue
}

/// Waits until a call is in flight besides the one that reads the metrics.
async fn wait_for_call_in_flight(agent: &TestAgent) {
    let endpoint = RawEndpoint::unix(agent);
    eventually("the call to wait", async || {
        let metrics = endpoint.get("/metrics").text();
        let line = metrics.lines().find_map(|line| line.strip_prefix("gpupool_http_requests_in_flight "));
        (line?.parse::<f64>().unwrap() >= 2.0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_leases_followed_by_one_call_are_granted_in_order() {
    const WAITERS: usize = 1_000;
    let agent = agent().simulate("1xH100").argument("--access-log=false").argument("--log-level=warn").start().await;
    let client = agent.client();
    let (held, _) = acquire(&client, &whole_gpu()).await;
    let mut left = queue_requests(&client, WAITERS).await;
    let first = client.follow_leases(&left, Duration::ZERO).await.unwrap();
    assert_eq!(first, FollowResponse::default(), "all of them wait");
    client.release(held.id).await.unwrap();
    let mut last = 0;
    while let Some(&next) = left.first() {
        let followed = within_deadline("the next one's turn", client.follow_leases(&left, LONG_WAIT)).await.unwrap();
        let seen: Vec<_> = followed.changed.iter().map(|lease| (lease.id, lease.state)).collect();
        assert_eq!((seen, followed.unknown), (vec![(next, LeaseState::Active)], Vec::new()));
        let token = followed.changed[0].token.unwrap();
        assert!(token > last, "lease {next} got token {token}, the one before it {last}");
        last = token;
        left.remove(0);
        client.release(next).await.unwrap();
    }
}

#[tokio::test]
async fn a_waiting_call_returns_all_leases_that_left_the_queue_together() {
    let agent = agent().simulate("2xH100").start().await;
    let client = agent.client();
    let (held, _) = acquire(&client, &RequestBody { gpus: Some(2), ..whole_gpu() }).await;
    let mut queue = queue_requests(&client, 3).await;
    queue.reverse();
    let (follower, followed) = (client.clone(), queue.clone());
    let call = tokio::spawn(async move { follower.follow_leases(&followed, LONG_WAIT).await.unwrap() });
    wait_for_call_in_flight(&agent).await;
    client.release(held.id).await.unwrap();
    let followed = within_deadline("the response", call).await.unwrap();
    let seen: Vec<_> = followed.changed.iter().map(|lease| (lease.id, lease.state)).collect();
    assert_eq!(
        seen,
        [(queue[1], LeaseState::Active), (queue[2], LeaseState::Active)],
        "both GPUs, in the order of the call"
    );
    assert!(followed.changed.iter().all(|lease| lease.token.is_some() && !lease.env.is_empty()));
    client.release(queue[0]).await.unwrap();
    let over = client.follow_leases(&[queue[0], 999], LONG_WAIT).await.unwrap();
    assert_eq!((over.changed[0].state, over.unknown), (LeaseState::Released, vec![999]));
}

#[tokio::test]
async fn after_the_wait_the_response_is_empty_and_all_leases_stay_queued() {
    let agent = agent().simulate("1xH100").start().await;
    let client = agent.client();
    acquire(&client, &whole_gpu()).await;
    let queue = queue_requests(&client, 3).await;
    assert_eq!(client.follow_leases(&queue, Duration::from_millis(50)).await.unwrap(), FollowResponse::default());
    assert_eq!(client.pool().await.unwrap().waiting, 3);
}

#[tokio::test]
async fn leases_of_other_owners_are_unknown() {
    let folder = accessible_directory();
    let agent = agent().simulate("1xH100").state_dir(folder.path().join("state")).start().await;
    let client = agent.client();
    acquire(&client, &whole_gpu()).await;
    let queue = queue_requests(&client, 1).await;
    let body = json!({"leases": queue, "wait_secs": 300});
    // A client behind a proxy is a network client, which owns no leases.
    let endpoint = RawEndpoint::tcp(&agent);
    let text = body.to_string();
    let stranger = endpoint.send("POST", ROUTE, &[("X-Forwarded-For", "192.0.2.1")], Some(&text));
    assert_eq!((stranger.status, stranger.json()), (200, json!({"changed": [], "unknown": queue})));
    if !is_root() {
        return skipped("another local user", "only root can run as another user");
    }
    let alice = as_user(ALICE, move || {
        let mine = endpoint.post("/v1/leases", &json!({})).json()["id"].clone();
        let response = endpoint.post(ROUTE, &json!({"leases": [queue[0], mine], "wait_secs": 300}));
        (response.status, response.json(), json!({"changed": [], "unknown": queue}))
    });
    assert_eq!((alice.0, alice.1), (200, alice.2));
}

#[tokio::test]
async fn wrong_bodies_get_problems() {
    let agent = agent().start().await;
    let endpoint = RawEndpoint::tcp(&agent);
    let many: Vec<u64> = (0..4097).collect();
    for (body, field) in [
        (json!({}), "leases"),
        (json!({"leases": []}), "leases"),
        (json!({"leases": [7, 8, 7]}), "7 in it twice"),
        (json!({"leases": many}), "a list of 4097"),
        (json!({"leases": [1, -1]}), "leases[1]"),
        (json!({"leases": "all"}), "leases"),
        (json!({"leases": [1], "wait_secs": 301}), "wait_secs"),
        (json!({"leases": [1], "wait_secs": -1}), "wait_secs"),
        (json!({"leases": [1], "wait": 1}), "wait"),
    ] {
        let response = endpoint.post(ROUTE, &body);
        let shown = response.text();
        assert_eq!((response.status, response.code().as_str()), (422, "invalid"), "{shown}");
        assert!(response.json()["detail"].as_str().unwrap().contains(field), "{field}: {shown}");
    }
    let most: Vec<u64> = (0..4096).map(|number| u64::MAX - number).collect();
    let response = endpoint.post(ROUTE, &json!({"leases": most}));
    assert_eq!(
        (response.status, &response.json()["unknown"]),
        (200, &json!(most)),
        "the largest number of leases, with the longest ids"
    );
}

#[tokio::test]
async fn shutdown_answers_calls_that_follow_many_leases() {
    let mut agent = agent().simulate("1xH100").start().await;
    let client = agent.client();
    let (held, _) = acquire(&client, &whole_gpu()).await;
    let queue = queue_requests(&client, 3).await;
    let body = serde_json::to_string(&FollowBody { leases: queue.clone(), wait_secs: 300.0 }).unwrap();
    let mut stream = RawEndpoint::tcp(&agent).connect().unwrap();
    stream.write_all(request("POST", ROUTE, &[], Some(&body)).as_bytes()).unwrap();
    wait_for_call_in_flight(&agent).await;
    let response = tokio::task::spawn_blocking(move || RawResponse::read(&mut stream).unwrap());
    assert!(agent.stop().await.success());
    let response = within_deadline("the response", response).await.unwrap();
    assert_eq!((response.status, response.json()), (200, json!({"changed": [], "unknown": []})));
    agent.restart().await;
    client.release(held.id).await.unwrap();
    let followed = within_deadline("the first one's turn", client.follow_leases(&queue, LONG_WAIT)).await.unwrap();
    assert_eq!(followed.changed[0].id, queue[0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn following_many_leases_continues_after_a_kill_and_restart() {
    let mut agent = agent().simulate("1xH100").start().await;
    let client = agent.client();
    let (held, _) = acquire(&client, &whole_gpu()).await;
    let queue = queue_requests(&client, 3).await;
    let (follower, followed) = (client.clone(), queue.clone());
    let call = tokio::spawn(async move {
        loop {
            match follower.follow_leases(&followed, LONG_WAIT).await {
                Ok(followed) => return followed,
                // While the agent is away.
                Err(ClientError::Unreachable { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    });
    wait_for_call_in_flight(&agent).await;
    agent.restart().await;
    wait_for_call_in_flight(&agent).await;
    client.release(held.id).await.unwrap();
    let followed = within_deadline("the first one's turn", call).await.unwrap();
    let seen: Vec<_> = followed.changed.iter().map(|lease| (lease.id, lease.state)).collect();
    assert_eq!((seen, followed.unknown), (vec![(queue[0], LeaseState::Active)], Vec::new()));
}

//! One call follows many who wait: it keeps them in the queue, and tells of whose turn has come.

use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::lease::{FollowBody, FollowResponse, LeaseState};
use gpupool_client::{AgentClient, ClientError};
use gpupool_testkit::{TestAgent, within_deadline};
use serde_json::json;

use crate::common::http::{RawEndpoint, RawResponse, request};
use crate::common::machine::{ALICE, as_user, is_root, open_folder};
use crate::common::{acquire, agent, eventually, skipped, whole_gpu};

/// Longer than any story takes: an answer that comes did not come because of it.
const LONG: Duration = Duration::from_secs(300);

const ROUTE: &str = "/v1/leases/follow";

/// One after the other into the queue.
async fn queued(client: &AgentClient, count: usize) -> Vec<u64> {
    let mut queue = Vec::new();
    for _ in 0..count {
        let lease = client.request(&RequestBody::default()).await.unwrap();
        assert_eq!(lease.state, LeaseState::Queued, "{lease:?}");
        queue.push(lease.id);
    }
    queue
}

/// Waits until a call is under way besides the one that looks.
async fn under_way(agent: &TestAgent) {
    let endpoint = RawEndpoint::unix(agent);
    eventually("the call to wait", async || {
        let metrics = endpoint.get("/metrics").text();
        let line = metrics.lines().find_map(|line| line.strip_prefix("gpupool_http_requests_in_flight "));
        (line?.parse::<f64>().unwrap() >= 2.0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_followed_by_one_call_are_served_in_the_order_they_came() {
    const WAITERS: usize = 1_000;
    let agent = agent().simulate("1xH100").argument("--access-log=false").argument("--log-level=warn").start().await;
    let client = agent.client();
    let (held, _) = acquire(&client, &whole_gpu()).await;
    let mut left = queued(&client, WAITERS).await;
    let first = client.follow_leases(&left, Duration::ZERO).await.unwrap();
    assert_eq!(first, FollowResponse::default(), "all of them wait");
    client.release(held.id).await.unwrap();
    let mut last = 0;
    while let Some(&next) = left.first() {
        let followed = within_deadline("the next one's turn", client.follow_leases(&left, LONG)).await.unwrap();
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
async fn a_call_that_waits_hears_of_all_that_left_the_queue_at_once() {
    let agent = agent().simulate("2xH100").start().await;
    let client = agent.client();
    let (held, _) = acquire(&client, &RequestBody { gpus: Some(2), ..whole_gpu() }).await;
    let mut queue = queued(&client, 3).await;
    queue.reverse();
    let (asker, asked) = (client.clone(), queue.clone());
    let call = tokio::spawn(async move { asker.follow_leases(&asked, LONG).await.unwrap() });
    under_way(&agent).await;
    client.release(held.id).await.unwrap();
    let followed = within_deadline("the answer", call).await.unwrap();
    let seen: Vec<_> = followed.changed.iter().map(|lease| (lease.id, lease.state)).collect();
    assert_eq!(
        seen,
        [(queue[1], LeaseState::Active), (queue[2], LeaseState::Active)],
        "both GPUs, in the order asked for"
    );
    assert!(followed.changed.iter().all(|lease| lease.token.is_some() && !lease.env.is_empty()));
    client.release(queue[0]).await.unwrap();
    let over = client.follow_leases(&[queue[0], 999], LONG).await.unwrap();
    assert_eq!((over.changed[0].state, over.unknown), (LeaseState::Released, vec![999]));
}

#[tokio::test]
async fn after_its_time_the_answer_is_empty_and_all_still_wait() {
    let agent = agent().simulate("1xH100").start().await;
    let client = agent.client();
    acquire(&client, &whole_gpu()).await;
    let queue = queued(&client, 3).await;
    assert_eq!(client.follow_leases(&queue, Duration::from_millis(50)).await.unwrap(), FollowResponse::default());
    assert_eq!(client.pool().await.unwrap().waiting, 3);
}

#[tokio::test]
async fn what_is_not_ones_own_is_unknown() {
    let folder = open_folder();
    let agent = agent().simulate("1xH100").state_dir(folder.path().join("state")).start().await;
    let client = agent.client();
    acquire(&client, &whole_gpu()).await;
    let queue = queued(&client, 1).await;
    let body = json!({"leases": queue, "wait_secs": 300});
    // Who comes through a proxy is from the network, and nobody's leases are theirs.
    let endpoint = RawEndpoint::tcp(&agent);
    let text = body.to_string();
    let stranger = endpoint.send("POST", ROUTE, &[("X-Forwarded-For", "192.0.2.1")], Some(&text));
    assert_eq!((stranger.status, stranger.json()), (200, json!({"changed": [], "unknown": queue})));
    if !is_root() {
        return skipped("another local user", "only root can be somebody else");
    }
    let alice = as_user(ALICE, move || {
        let mine = endpoint.post("/v1/leases", &json!({})).json()["id"].clone();
        let answer = endpoint.post(ROUTE, &json!({"leases": [queue[0], mine], "wait_secs": 300}));
        (answer.status, answer.json(), json!({"changed": [], "unknown": queue}))
    });
    assert_eq!((alice.0, alice.1), (200, alice.2));
}

#[tokio::test]
async fn bad_bodies_are_named() {
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
        let answer = endpoint.post(ROUTE, &body);
        let shown = answer.text();
        assert_eq!((answer.status, answer.code().as_str()), (422, "invalid"), "{shown}");
        assert!(answer.json()["detail"].as_str().unwrap().contains(field), "{field}: {shown}");
    }
    let most: Vec<u64> = (0..4096).map(|number| u64::MAX - number).collect();
    let answer = endpoint.post(ROUTE, &json!({"leases": most}));
    assert_eq!((answer.status, &answer.json()["unknown"]), (200, &json!(most)), "the most, and the longest");
}

#[tokio::test]
async fn told_to_stop_it_answers_who_follows_many() {
    let mut agent = agent().simulate("1xH100").start().await;
    let client = agent.client();
    let (held, _) = acquire(&client, &whole_gpu()).await;
    let queue = queued(&client, 3).await;
    let body = serde_json::to_string(&FollowBody { leases: queue.clone(), wait_secs: 300.0 }).unwrap();
    let mut stream = RawEndpoint::tcp(&agent).connect().unwrap();
    stream.write_all(request("POST", ROUTE, &[], Some(&body)).as_bytes()).unwrap();
    under_way(&agent).await;
    let answer = tokio::task::spawn_blocking(move || RawResponse::read(&mut stream).unwrap());
    assert!(agent.stop().await.success());
    let answer = within_deadline("the answer", answer).await.unwrap();
    assert_eq!((answer.status, answer.json()), (200, json!({"changed": [], "unknown": []})));
    agent.restart().await;
    client.release(held.id).await.unwrap();
    let followed = within_deadline("the first one's turn", client.follow_leases(&queue, LONG)).await.unwrap();
    assert_eq!(followed.changed[0].id, queue[0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_follows_many_goes_on_when_the_agent_is_killed_and_started_again() {
    let mut agent = agent().simulate("1xH100").start().await;
    let client = agent.client();
    let (held, _) = acquire(&client, &whole_gpu()).await;
    let queue = queued(&client, 3).await;
    let (asker, asked) = (client.clone(), queue.clone());
    let call = tokio::spawn(async move {
        loop {
            match asker.follow_leases(&asked, LONG).await {
                Ok(followed) => return followed,
                // While it is away.
                Err(ClientError::Unreachable { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    });
    under_way(&agent).await;
    agent.restart().await;
    under_way(&agent).await;
    client.release(held.id).await.unwrap();
    let followed = within_deadline("the first one's turn", call).await.unwrap();
    let seen: Vec<_> = followed.changed.iter().map(|lease| (lease.id, lease.state)).collect();
    assert_eq!((seen, followed.unknown), (vec![(queue[0], LeaseState::Active)], Vec::new()));
}

//! A retried request never gets two leases, and a thousand waiters are served in order.

use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::lease::LeaseState;
use gpupool_client::{IdempotencyKey, LeaseQuery};
use gpupool_testkit::within_deadline;

use crate::common::http::{RawEndpoint, request};
use crate::common::{acquire, agent, eventually, skipped, whole_gpu};

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_request_never_gets_two_leases() {
    let mut agent = agent().simulate("8xH100").start().await;
    let client = agent.client();
    let key = IdempotencyKey::new("the same").unwrap();
    let at_once: Vec<_> = (0..32)
        .map(|_| {
            let (client, key) = (agent.client(), key.clone());
            tokio::spawn(async move { client.request_as(&whole_gpu(), &key).await.unwrap().id })
        })
        .collect();
    let mut ids = Vec::new();
    for call in at_once {
        ids.push(call.await.unwrap());
    }
    ids.dedup();
    assert_eq!(ids.len(), 1, "{ids:?}");
    // The response is lost, then the agent is killed.
    let mut stream = RawEndpoint::tcp(&agent).connect().unwrap();
    let lost = request("POST", "/v1/leases", &[("Idempotency-Key", "lost")], Some("{}"));
    stream.write_all(lost.as_bytes()).unwrap();
    drop(stream);
    let key = IdempotencyKey::new("lost").unwrap();
    let first = client.request_as(&whole_gpu(), &key).await.unwrap();
    agent.restart().await;
    assert_eq!(client.request_as(&whole_gpu(), &key).await.unwrap().id, first.id);
    let another = RequestBody { gpus: Some(2), ..whole_gpu() };
    let refused = client.request_as(&another, &key).await.unwrap_err();
    assert!(refused.code() == Some("invalid") && refused.to_string().contains("Idempotency-Key"), "{refused}");
    let waits_otherwise = RequestBody { queue: Some(true), hedged: true, wait_limit_secs: Some(9.0), ..whole_gpu() };
    assert_eq!(
        client.request_as(&waits_otherwise, &key).await.unwrap().id,
        first.id,
        "the request is the same apart from its wait"
    );
    assert_eq!(client.leases(&LeaseQuery::default()).await.unwrap().leases.len(), 2);
    client.release(first.id).await.unwrap();
    let again = client.request_as(&whole_gpu(), &key).await.unwrap();
    assert_eq!((again.id, again.state), (first.id, LeaseState::Released), "a key stays with its lease");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_waiters_are_served_in_order() {
    const WAITERS: usize = 1_000;
    let agent = agent().simulate("1xH100").argument("--access-log=false").argument("--log-level=warn").start().await;
    let client = agent.client();
    let (held, _) = acquire(&client, &whole_gpu()).await;
    // The requests enter the queue one after the other; then all of them wait.
    let mut queue = Vec::new();
    for _ in 0..WAITERS {
        queue.push(client.request(&RequestBody::default()).await.unwrap().id);
    }
    let waiting: Vec<_> = queue
        .iter()
        .map(|&id| {
            let client = client.clone();
            tokio::spawn(async move {
                let lease = client.follow(id, Duration::from_secs(120)).await.unwrap();
                assert_eq!(lease.state, LeaseState::Active, "{lease:?}");
                client.release(id).await.unwrap();
                lease.token.unwrap()
            })
        })
        .collect();
    client.release(held.id).await.unwrap();
    let mut last = 0;
    for (position, waiter) in waiting.into_iter().enumerate() {
        let token = within_deadline("a waiter's turn", waiter).await.unwrap();
        assert!(token > last, "position {position} of the queue got token {token}, the one before it {last}");
        last = token;
    }
}

#[tokio::test]
async fn a_waiter_that_hangs_up_leaves_the_queue_at_once() {
    let agent = agent().simulate("1xH100").start().await;
    acquire(&agent.client(), &whole_gpu()).await;
    let mut watch = agent.watch_events().await;
    let mut stream = RawEndpoint::tcp(&agent).connect().unwrap();
    stream.write_all(request("POST", "/v1/leases", &[], Some(r#"{"wait_secs":60}"#)).as_bytes()).unwrap();
    let queued = watch.wait_for("the waiter in the queue", |event| event.kind == "queued").await.lease.unwrap();
    drop(stream);
    let ended = watch.wait_for_lease("ended", queued).await;
    assert!(ended.reason.as_deref().unwrap_or_default().contains("released"), "{ended:?}");
}

/// Runs only with GPUPOOL_SOAK, because it takes 15 s.
#[tokio::test]
async fn an_abandoned_waiter_leaves_the_queue() {
    if std::env::var_os("GPUPOOL_SOAK").is_none() {
        return skipped("an abandoned waiter", "it takes 15 s; set GPUPOOL_SOAK=1 to run it");
    }
    let agent = agent().simulate("1xH100").start().await;
    let client = agent.client();
    let (held, token) = acquire(&client, &whole_gpu()).await;
    let waits = client.request(&RequestBody::default()).await.unwrap();
    let follows = client.request(&RequestBody::default()).await.unwrap();
    let gone = eventually("the waiter to leave", async || {
        client.renew(held.id, token).await.unwrap();
        assert_eq!(client.follow(follows.id, Duration::ZERO).await.unwrap().state, LeaseState::Queued);
        let all = LeaseQuery { state: Some("all".into()), ..LeaseQuery::default() };
        let leases = client.leases(&all).await.unwrap().leases;
        leases.into_iter().find(|lease| lease.id == waits.id && lease.state.is_ended())
    });
    assert_eq!(gone.await.cause.as_deref(), Some("abandoned"));
}

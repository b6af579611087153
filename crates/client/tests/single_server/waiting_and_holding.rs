//! Waiting and holding: the lease is always released, and a loss is reported.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{
    ReceivedRequest, ScriptedReply, ScriptedServer, json_reply, lease, problem_reply, within_deadline,
};
use gpupool_api::RequestBody;
use gpupool_api::lease::LeaseState;
use gpupool_client::{ClientError, LeaseLost, WaitOptions, WaitProgress};

/// An agent with a scripted response for each method.
async fn agent(
    post: fn() -> ScriptedReply,
    follow: fn(usize) -> ScriptedReply,
    renew: fn(usize) -> ScriptedReply,
) -> ScriptedServer {
    let (follows, renews) = (Mutex::new(0), Mutex::new(0));
    let count = |counter: &Mutex<usize>| {
        let mut count = counter.lock().unwrap();
        *count += 1;
        *count
    };
    ScriptedServer::start(move |_, request: &ReceivedRequest| match request.target.split_once(' ').unwrap() {
        ("DELETE", _) => json_reply("200 OK", &lease(1, LeaseState::Released)),
        ("POST", route) if route.ends_with("/renew") => renew(count(&renews)),
        ("POST", route) if route.ends_with("/confirm") => json_reply("200 OK", &lease(1, LeaseState::Active)),
        ("POST", _) => post(),
        _ => follow(count(&follows)),
    })
    .await
}

fn queued() -> ScriptedReply {
    json_reply("202 Accepted", &lease(1, LeaseState::Queued))
}

fn active() -> ScriptedReply {
    json_reply("200 OK", &lease(1, LeaseState::Active))
}

const DELETE: &str = "DELETE /v1/leases/1";
const RENEW: &str = "POST /v1/leases/1/renew";

#[tokio::test]
async fn each_wait_takes_one_request_and_no_other_is_sent() {
    let server = agent(queued, |number| if number < 3 { queued() } else { active() }, |_| active()).await;
    let granted = server.client().wait_until_granted(RequestBody::default(), WaitOptions::default(), |_| {});
    let guard = within_deadline("the grant", granted).await.unwrap();
    let request: Vec<String> = server.received().into_iter().map(|request| request.target).collect();
    let follow = "GET /v1/leases/1?wait_secs=10";
    assert_eq!(request, ["POST /v1/leases", follow, follow, follow]);
    within_deadline("the release", guard.release()).await.unwrap();
}

#[tokio::test]
async fn a_waiter_gets_progress_and_then_holds_the_lease() {
    let follow = |number| match number {
        1 => queued(),
        2 => ScriptedReply::ThenClose(String::new()),
        3..=6 => problem_reply(503, "stopping"),
        _ => active(),
    };
    let server = agent(queued, follow, |_| active()).await;
    let reported = Arc::new(Mutex::new(Vec::new()));
    let reporter = reported.clone();
    let granted = server.client().wait_until_granted(RequestBody::default(), WaitOptions::default(), move |progress| {
        reporter.lock().unwrap().push(progress);
    });
    let guard = within_deadline("the grant", granted).await.unwrap();
    assert_eq!(guard.lease().token, Some(41));
    let waiting = WaitProgress::Waiting { lease: 1, position: Some(1), reason: Some("because".into()) };
    assert_eq!(reported.lock().unwrap().first(), Some(&waiting));
    assert!(reported.lock().unwrap().iter().any(|progress| matches!(progress, WaitProgress::AgentAway { .. })));
    assert_eq!(within_deadline("the release", guard.release()).await.unwrap().unwrap().state, LeaseState::Released);
}

#[tokio::test]
async fn an_offer_is_confirmed_if_the_request_waits_nowhere_else() {
    let server = agent(|| json_reply("201 Created", &lease(1, LeaseState::Offered)), |_| queued(), |_| active()).await;
    let granted = server.client().wait_until_granted(RequestBody::default(), WaitOptions::default(), |_| {});
    let guard = within_deadline("the grant", granted).await.unwrap();
    server.wait_for_request("POST /v1/leases/1/confirm", 1).await;
    assert_eq!(guard.detach().state, LeaseState::Active);
}

#[tokio::test]
async fn a_request_that_left_the_queue_returns_the_reason() {
    let server = agent(queued, |_| json_reply("200 OK", &lease(1, LeaseState::Expired)), |_| active()).await;
    let waited = server.client().wait_until_granted(RequestBody::default(), WaitOptions::default(), |_| {});
    let error = within_deadline("the end", waited).await.unwrap_err();
    assert!(matches!(error, ClientError::Ended(_)), "{error}");
    assert_eq!(error.to_string(), "lease 1 expired: because");
}

#[tokio::test]
async fn a_cancelled_waiter_leaves_the_queue() {
    let server = agent(queued, |_| ScriptedReply::ThenSilence(String::new()), |_| active()).await;
    let client = server.client();
    let waiting = client.wait_until_granted(RequestBody::default(), WaitOptions::default(), |_| {});
    tokio::select! {
        _ = waiting => panic!("nothing was granted"),
        () = server.wait_for_request("GET /v1/leases/1", 1) => {}
    }
    server.wait_for_request(DELETE, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_arrives_after_the_cancellation_is_released() {
    let respond_now = Arc::new(tokio::sync::Notify::new());
    let (wait, now) = (respond_now.clone(), tokio::runtime::Handle::current());
    let server = ScriptedServer::start(move |_, request: &ReceivedRequest| {
        if request.target.starts_with("DELETE") {
            return json_reply("200 OK", &lease(1, LeaseState::Released));
        }
        tokio::task::block_in_place(|| now.block_on(wait.notified()));
        active()
    });
    let server = server.await;
    let client = server.client();
    let waiting = client.wait_until_granted(RequestBody::default(), WaitOptions::default(), |_| {});
    tokio::select! {
        _ = waiting => panic!("nothing was answered"),
        () = server.wait_for_request("POST /v1/leases", 1) => {}
    }
    respond_now.notify_one();
    server.wait_for_request(DELETE, 1).await;
}

#[tokio::test]
async fn a_guard_renews_through_a_restart_and_releases_on_drop() {
    let renew = |number| match number {
        2 => ScriptedReply::ThenClose(String::new()),
        3 => problem_reply(503, "not_durable"),
        _ => active(),
    };
    let server = agent(active, |_| active(), renew).await;
    let guard = server.client().guard_lease(lease(1, LeaseState::Active)).unwrap();
    server.wait_for_request(RENEW, 5).await;
    assert!(server.received().iter().all(|request| request.target == RENEW && request.body == r#"{"token":41}"#));
    drop(guard);
    server.wait_for_request(DELETE, 1).await;
}

#[tokio::test]
async fn a_detached_guard_releases_nothing() {
    let server = agent(active, |_| active(), |_| active()).await;
    let client = server.client();
    let lease_1 = client.guard_lease(lease(1, LeaseState::Active)).unwrap().detach();
    assert_eq!(lease_1.id, 1);
    // The second guard releases its lease; if the first one did too, there would be two releases.
    client.guard_lease(lease(2, LeaseState::Active)).unwrap().release().await.unwrap();
    let released: Vec<_> = server.received().into_iter().map(|request| request.target).collect();
    assert_eq!(released, ["DELETE /v1/leases/2"]);
}

#[tokio::test]
async fn a_guard_returns_the_reason_of_a_loss() {
    let server = agent(active, |_| active(), |_| problem_reply(409, "stale")).await;
    let guard = server.client().guard_lease(lease(1, LeaseState::Active)).unwrap();
    assert_eq!(within_deadline("the loss", guard.wait_until_lost()).await, LeaseLost::Stale { lease: 1, token: 41 });
    assert_eq!(guard.release().await.unwrap(), None, "the lease belongs to another holder");

    let over = |_| json_reply("200 OK", &lease(1, LeaseState::Revoked));
    let server = agent(active, over, |_| problem_reply(409, "ended")).await;
    let guard = server.client().guard_lease(lease(1, LeaseState::Active)).unwrap();
    let lost = within_deadline("the loss", guard.wait_until_lost()).await;
    let why = LeaseLost::Ended { lease: 1, cause: Some("ttl_passed".into()), reason: "because".into() };
    assert_eq!(lost, why);
}

#[tokio::test]
async fn a_lease_is_lost_after_its_ttl_if_the_agent_stays_away() {
    let server = agent(active, |_| active(), |_| ScriptedReply::ThenSilence(String::new())).await;
    let guard = server.client().guard_lease(lease(1, LeaseState::Active)).unwrap();
    let lost = within_deadline("the loss", guard.wait_until_lost()).await;
    assert!(matches!(&lost, LeaseLost::Unreachable { ttl, .. } if *ttl == Duration::from_secs(1)), "{lost}");
    drop(guard);
    server.wait_for_request(DELETE, 1).await;
}

#[tokio::test]
async fn a_guard_learns_of_an_announced_revocation() {
    let renew = |_| {
        let revoke_at = Some("2026-01-31T09:00:00Z".into());
        json_reply("200 OK", &gpupool_api::lease::LeaseBody { revoke_at, ..lease(1, LeaseState::Active) })
    };
    let server = agent(active, |_| active(), renew).await;
    let guard = server.client().guard_lease(lease(1, LeaseState::Active)).unwrap();
    assert_eq!(within_deadline("the announcement", guard.wait_for_revocation()).await, "2026-01-31T09:00:00Z");
}

#[tokio::test]
async fn only_an_active_lease_can_be_guarded() {
    let server = agent(active, |_| active(), |_| active()).await;
    let error = server.client().guard_lease(lease(1, LeaseState::Queued)).unwrap_err().to_string();
    assert!(error.contains("lease 1, queued") && error.contains("active"), "{error}");
    assert!(matches!(server.client().guard_lease(lease(1, LeaseState::Failed)), Err(ClientError::Ended(_))));
}

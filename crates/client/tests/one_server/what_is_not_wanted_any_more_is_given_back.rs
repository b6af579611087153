//! Waiting one's turn and holding: whatever way out is taken, the lease is given back; and a lost one is told.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{Asked, Reply, Server, in_time, json, lease, problem};
use gpupool_api::RequestBody;
use gpupool_api::lease::LeaseState;
use gpupool_client::{ClientError, LeaseLost, WaitOptions, WaitProgress};

/// An agent that answers each verb in its own way.
async fn agent(post: fn() -> Reply, follow: fn(usize) -> Reply, renew: fn(usize) -> Reply) -> Server {
    let (follows, renews) = (Mutex::new(0), Mutex::new(0));
    let count = |counter: &Mutex<usize>| {
        let mut count = counter.lock().unwrap();
        *count += 1;
        *count
    };
    Server::start(move |_, asked: &Asked| match asked.what.split_once(' ').unwrap() {
        ("DELETE", _) => json("200 OK", &lease(1, LeaseState::Released)),
        ("POST", route) if route.ends_with("/renew") => renew(count(&renews)),
        ("POST", route) if route.ends_with("/confirm") => json("200 OK", &lease(1, LeaseState::Active)),
        ("POST", _) => post(),
        _ => follow(count(&follows)),
    })
    .await
}

fn queued() -> Reply {
    json("202 Accepted", &lease(1, LeaseState::Queued))
}

fn active() -> Reply {
    json("200 OK", &lease(1, LeaseState::Active))
}

const DELETE: &str = "DELETE /v1/leases/1";
const RENEW: &str = "POST /v1/leases/1/renew";

#[tokio::test]
async fn each_wait_takes_one_question_and_nothing_is_asked_before_or_after() {
    let server = agent(queued, |number| if number < 3 { queued() } else { active() }, |_| active()).await;
    let granted = server.client().wait_until_granted(RequestBody::default(), WaitOptions::default(), |_| {});
    let guard = in_time("the grant", granted).await.unwrap();
    let asked: Vec<String> = server.seen().into_iter().map(|asked| asked.what).collect();
    let follow = "GET /v1/leases/1?wait_secs=10";
    assert_eq!(asked, ["POST /v1/leases", follow, follow, follow]);
    in_time("the release", guard.release()).await.unwrap();
}

#[tokio::test]
async fn a_waiter_is_told_how_it_goes_and_then_holds_the_lease() {
    let follow = |number| match number {
        1 => queued(),
        2 => Reply::ThenClose(String::new()),
        3..=6 => problem(503, "stopping"),
        _ => active(),
    };
    let server = agent(queued, follow, |_| active()).await;
    let told = Arc::new(Mutex::new(Vec::new()));
    let tell = told.clone();
    let granted = server.client().wait_until_granted(RequestBody::default(), WaitOptions::default(), move |progress| {
        tell.lock().unwrap().push(progress);
    });
    let guard = in_time("the grant", granted).await.unwrap();
    assert_eq!(guard.lease().token, Some(41));
    let waiting = WaitProgress::Waiting { lease: 1, position: Some(1), reason: Some("because".into()) };
    assert_eq!(told.lock().unwrap().first(), Some(&waiting));
    assert!(told.lock().unwrap().iter().any(|progress| matches!(progress, WaitProgress::AgentAway { .. })));
    assert_eq!(in_time("the release", guard.release()).await.unwrap().unwrap().state, LeaseState::Released);
}

#[tokio::test]
async fn an_offer_is_taken_where_nothing_else_is_waited_for() {
    let server = agent(|| json("201 Created", &lease(1, LeaseState::Offered)), |_| queued(), |_| active()).await;
    let granted = server.client().wait_until_granted(RequestBody::default(), WaitOptions::default(), |_| {});
    let guard = in_time("the grant", granted).await.unwrap();
    server.asked("POST /v1/leases/1/confirm", 1).await;
    assert_eq!(guard.detach().state, LeaseState::Active);
}

#[tokio::test]
async fn a_request_that_left_the_queue_says_why() {
    let server = agent(queued, |_| json("200 OK", &lease(1, LeaseState::Expired)), |_| active()).await;
    let waited = server.client().wait_until_granted(RequestBody::default(), WaitOptions::default(), |_| {});
    let error = in_time("the end", waited).await.unwrap_err();
    assert!(matches!(error, ClientError::Ended(_)), "{error}");
    assert_eq!(error.to_string(), "lease 1 expired: because");
}

#[tokio::test]
async fn a_waiter_that_gives_up_leaves_the_queue() {
    let server = agent(queued, |_| Reply::ThenSilence(String::new()), |_| active()).await;
    let client = server.client();
    let waiting = client.wait_until_granted(RequestBody::default(), WaitOptions::default(), |_| {});
    tokio::select! {
        _ = waiting => panic!("nothing was granted"),
        () = server.asked("GET /v1/leases/1", 1) => {}
    }
    server.asked(DELETE, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_gives_up_while_the_answer_is_on_its_way_gives_back_what_it_brings() {
    let answer_now = Arc::new(tokio::sync::Notify::new());
    let (wait, now) = (answer_now.clone(), tokio::runtime::Handle::current());
    let server = Server::start(move |_, asked: &Asked| {
        if asked.what.starts_with("DELETE") {
            return json("200 OK", &lease(1, LeaseState::Released));
        }
        tokio::task::block_in_place(|| now.block_on(wait.notified()));
        active()
    });
    let server = server.await;
    let client = server.client();
    let waiting = client.wait_until_granted(RequestBody::default(), WaitOptions::default(), |_| {});
    tokio::select! {
        _ = waiting => panic!("nothing was answered"),
        () = server.asked("POST /v1/leases", 1) => {}
    }
    answer_now.notify_one();
    server.asked(DELETE, 1).await;
}

#[tokio::test]
async fn a_guard_renews_through_a_restart_and_gives_back_when_it_is_dropped() {
    let renew = |number| match number {
        2 => Reply::ThenClose(String::new()),
        3 => problem(503, "not_durable"),
        _ => active(),
    };
    let server = agent(active, |_| active(), renew).await;
    let guard = server.client().guard_lease(lease(1, LeaseState::Active)).unwrap();
    server.asked(RENEW, 5).await;
    assert!(server.seen().iter().all(|asked| asked.what == RENEW && asked.body == r#"{"token":41}"#));
    drop(guard);
    server.asked(DELETE, 1).await;
}

#[tokio::test]
async fn a_guard_that_lets_go_on_gives_nothing_back() {
    let server = agent(active, |_| active(), |_| active()).await;
    let client = server.client();
    let lease_1 = client.guard_lease(lease(1, LeaseState::Active)).unwrap().detach();
    assert_eq!(lease_1.id, 1);
    // A second guard does give back; had the first one too, there would be two.
    client.guard_lease(lease(2, LeaseState::Active)).unwrap().release().await.unwrap();
    let released: Vec<_> = server.seen().into_iter().map(|asked| asked.what).collect();
    assert_eq!(released, ["DELETE /v1/leases/2"]);
}

#[tokio::test]
async fn a_guard_tells_why_its_lease_was_lost() {
    let server = agent(active, |_| active(), |_| problem(409, "stale")).await;
    let guard = server.client().guard_lease(lease(1, LeaseState::Active)).unwrap();
    assert_eq!(in_time("the loss", guard.wait_until_lost()).await, LeaseLost::Stale { lease: 1, token: 41 });
    assert_eq!(guard.release().await.unwrap(), None, "it is not ours to give back");

    let over = |_| json("200 OK", &lease(1, LeaseState::Revoked));
    let server = agent(active, over, |_| problem(409, "ended")).await;
    let guard = server.client().guard_lease(lease(1, LeaseState::Active)).unwrap();
    let lost = in_time("the loss", guard.wait_until_lost()).await;
    let why = LeaseLost::Ended { lease: 1, cause: Some("ttl_passed".into()), reason: "because".into() };
    assert_eq!(lost, why);
}

#[tokio::test]
async fn a_guard_whose_agent_stays_away_is_lost_after_its_ttl() {
    let server = agent(active, |_| active(), |_| Reply::ThenSilence(String::new())).await;
    let guard = server.client().guard_lease(lease(1, LeaseState::Active)).unwrap();
    let lost = in_time("the loss", guard.wait_until_lost()).await;
    assert!(matches!(&lost, LeaseLost::Unreachable { ttl, .. } if *ttl == Duration::from_secs(1)), "{lost}");
    drop(guard);
    server.asked(DELETE, 1).await;
}

#[tokio::test]
async fn a_guard_hears_that_its_lease_will_be_taken_back() {
    let renew = |_| {
        let revoke_at = Some("2026-01-31T09:00:00Z".into());
        json("200 OK", &gpupool_api::lease::LeaseBody { revoke_at, ..lease(1, LeaseState::Active) })
    };
    let server = agent(active, |_| active(), renew).await;
    let guard = server.client().guard_lease(lease(1, LeaseState::Active)).unwrap();
    assert_eq!(in_time("the announcement", guard.wait_for_revocation()).await, "2026-01-31T09:00:00Z");
}

#[tokio::test]
async fn only_an_active_lease_can_be_guarded() {
    let server = agent(active, |_| active(), |_| active()).await;
    let error = server.client().guard_lease(lease(1, LeaseState::Queued)).unwrap_err().to_string();
    assert!(error.contains("lease 1, queued") && error.contains("active"), "{error}");
    assert!(matches!(server.client().guard_lease(lease(1, LeaseState::Failed)), Err(ClientError::Ended(_))));
}

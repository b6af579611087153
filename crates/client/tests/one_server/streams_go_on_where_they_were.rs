//! Events and held leases: connections that break, garbage in them, and what hanging up means.

use crate::common::{Reply, Server, answer, in_time, lease, problem, stream};
use gpupool_api::lease::LeaseState;
use gpupool_client::{ClientError, LeaseHoldEnd};

const EVENTS: &str = "text/event-stream";
const LINES: &str = "application/x-ndjson";

fn event(id: &str, kind: &str) -> String {
    format!("id: {id}\nevent: {kind}\ndata: {{\"kind\":\"{kind}\",\"at\":\"2026-01-31T08:00:00Z\"}}\n\n")
}

#[tokio::test]
async fn events_go_on_after_the_last_one_seen_when_the_connection_breaks() {
    let server = Server::start(|number, _| match number {
        0 => {
            let (first, second) = (event("run-6", "queued"), event("run-7", "granted"));
            // Breaks off in the middle of the second event.
            Reply::ThenClose(stream(EVENTS, &["retry: 1\nid: run-5\n\n", &first, &second[..20]]))
        }
        1 => Reply::ThenClose(String::new()),
        2 => problem(503, "stopping"),
        // In one piece with the greeting, and nothing after it.
        _ => {
            let greeting = "id: run-6\n: listening\n\n".to_owned();
            Reply::ThenSilence(stream(EVENTS, &[&(greeting + &event("run-7", "granted"))]))
        }
    });
    let server = server.await;
    let mut events = server.client().events(None).await.unwrap();
    let mut told = Vec::new();
    for _ in 0..2 {
        let (id, event) = in_time("an event", events.next()).await.unwrap();
        told.push((id.to_string(), event.kind));
    }
    assert_eq!(told, [("run-6".into(), "queued".into()), ("run-7".into(), "granted".into())]);
    let seen = server.seen();
    let from: Vec<_> = seen.iter().map(|asked| asked.header("last-event-id")).collect();
    assert_eq!(from, [None, Some("run-6"), Some("run-6"), Some("run-6")]);
    drop(events);
    assert_eq!(server.hung_up().await, "GET /v1/events");
}

#[tokio::test]
async fn what_are_no_events_is_no_agent() {
    let server = Server::start(|number, _| match number {
        0 => Reply::Send(answer("200 OK", "text/html", "", "<html>")),
        _ => Reply::ThenSilence(stream(EVENTS, &["id: 1\n\n", "data: nonsense\n\n"])),
    });
    let server = server.await;
    let error = server.client().events(None).await.unwrap_err();
    assert!(matches!(error, ClientError::NotOurs { .. }), "{error}");
    let mut events = server.client().events(None).await.unwrap();
    let error = in_time("an error", events.next()).await.unwrap_err();
    assert!(matches!(error, ClientError::NotOurs { .. }), "{error}");
}

fn line(state: LeaseState) -> String {
    serde_json::to_string(&lease(1, state)).unwrap() + "\n"
}

#[tokio::test]
async fn holding_ends_with_the_lease() {
    let server = Server::start(|_, _| {
        let (held, over) = (line(LeaseState::Active), line(LeaseState::Revoked));
        let (begin, rest) = over.split_at(over.len() / 2);
        Reply::ThenSilence(stream(LINES, &[&held[..10], &held[10..], "\n", begin, rest]))
    });
    let server = server.await;
    let mut hold = server.client().hold_lease(1, 41).await.unwrap();
    assert_eq!(hold.lease().state, LeaseState::Active);
    let LeaseHoldEnd::Ended(lease) = in_time("the end", hold.wait_until_ended()).await else {
        panic!("the lease ended")
    };
    assert_eq!(lease.state, LeaseState::Revoked);
    assert_eq!(server.seen()[0].what, "GET /v1/leases/1/hold?token=41");
}

#[tokio::test]
async fn holding_ends_with_the_connection_and_dropping_it_hangs_up() {
    let server = Server::start(|number, _| match number {
        0 => Reply::ThenClose(stream(LINES, &[&line(LeaseState::Active)])),
        1 => Reply::ThenSilence(stream(LINES, &[&line(LeaseState::Active)])),
        _ => problem(409, "stale"),
    });
    let server = server.await;
    let mut hold = server.client().hold_lease(1, 41).await.unwrap();
    assert_eq!(in_time("the end", hold.wait_until_ended()).await, LeaseHoldEnd::Disconnected);
    let hold = server.client().hold_lease(1, 41).await.unwrap();
    drop(hold);
    assert!(server.hung_up().await.contains("/hold"));
    assert_eq!(server.client().hold_lease(1, 40).await.unwrap_err().code(), Some("stale"));
}

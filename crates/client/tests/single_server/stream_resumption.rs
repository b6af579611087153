//! Event streams and held leases: broken connections, malformed data, and the effect of closing a connection.

use crate::common::{ScriptedReply, ScriptedServer, chunked_response, lease, problem_reply, response, within_deadline};
use gpupool_api::lease::LeaseState;
use gpupool_client::{ClientError, LeaseHoldEnd};

const EVENT_STREAM: &str = "text/event-stream";
const LINE_STREAM: &str = "application/x-ndjson";

fn event(id: &str, kind: &str) -> String {
    format!("id: {id}\nevent: {kind}\ndata: {{\"kind\":\"{kind}\",\"at\":\"2026-01-31T08:00:00Z\"}}\n\n")
}

#[tokio::test]
async fn events_resume_after_the_last_one_when_the_connection_breaks() {
    let server = ScriptedServer::start(|number, _| match number {
        0 => {
            let (first, second) = (event("run-6", "queued"), event("run-7", "granted"));
            // Ends in the middle of the second event.
            ScriptedReply::ThenClose(chunked_response(
                EVENT_STREAM,
                &["retry: 1\nid: run-5\n\n", &first, &second[..20]],
            ))
        }
        1 => ScriptedReply::ThenClose(String::new()),
        2 => problem_reply(503, "stopping"),
        // In one chunk with the greeting, and nothing after it.
        _ => {
            let greeting = "id: run-6\n: listening\n\n".to_owned();
            ScriptedReply::ThenSilence(chunked_response(EVENT_STREAM, &[&(greeting + &event("run-7", "granted"))]))
        }
    });
    let server = server.await;
    let mut events = server.client().events(None).await.unwrap();
    let mut reported = Vec::new();
    for _ in 0..2 {
        let (id, event) = within_deadline("an event", events.next()).await.unwrap();
        reported.push((id.to_string(), event.kind));
    }
    assert_eq!(reported, [("run-6".into(), "queued".into()), ("run-7".into(), "granted".into())]);
    let received = server.received();
    let from: Vec<_> = received.iter().map(|request| request.header("last-event-id")).collect();
    assert_eq!(from, [None, Some("run-6"), Some("run-6"), Some("run-6")]);
    drop(events);
    assert_eq!(server.wait_for_hangup().await, "GET /v1/events");
}

#[tokio::test]
async fn a_server_without_valid_events_is_not_an_agent() {
    let server = ScriptedServer::start(|number, _| match number {
        0 => ScriptedReply::Send(response("200 OK", "text/html", "", "<html>")),
        _ => ScriptedReply::ThenSilence(chunked_response(EVENT_STREAM, &["id: 1\n\n", "data: nonsense\n\n"])),
    });
    let server = server.await;
    let error = server.client().events(None).await.unwrap_err();
    assert!(matches!(error, ClientError::NotAnAgent { .. }), "{error}");
    let mut events = server.client().events(None).await.unwrap();
    let error = within_deadline("an error", events.next()).await.unwrap_err();
    assert!(matches!(error, ClientError::NotAnAgent { .. }), "{error}");
}

fn line(state: LeaseState) -> String {
    serde_json::to_string(&lease(1, state)).unwrap() + "\n"
}

#[tokio::test]
async fn holding_ends_with_the_lease() {
    let server = ScriptedServer::start(|_, _| {
        let (held, over) = (line(LeaseState::Active), line(LeaseState::Revoked));
        let (begin, rest) = over.split_at(over.len() / 2);
        ScriptedReply::ThenSilence(chunked_response(LINE_STREAM, &[&held[..10], &held[10..], "\n", begin, rest]))
    });
    let server = server.await;
    let mut hold = server.client().hold_lease(1, 41).await.unwrap();
    assert_eq!(hold.lease().state, LeaseState::Active);
    let LeaseHoldEnd::Ended(lease) = within_deadline("the end", hold.wait_until_ended()).await else {
        panic!("the lease ended")
    };
    assert_eq!(lease.state, LeaseState::Revoked);
    let request = &server.received()[0];
    assert_eq!((request.target.as_str(), request.body.as_str()), ("POST /v1/leases/1/hold", r#"{"token":41}"#));
}

#[tokio::test]
async fn holding_at_an_older_agent_uses_the_route_that_it_has() {
    let server = ScriptedServer::start(|number, _| match number {
        0 => problem_reply(405, "method_not_allowed"),
        1 => ScriptedReply::ThenSilence(chunked_response(LINE_STREAM, &[&line(LeaseState::Active)])),
        // A newer agent that refuses is not asked again.
        _ => problem_reply(404, "unknown_lease"),
    });
    let server = server.await;
    let hold = server.client().hold_lease(1, 41).await.unwrap();
    assert_eq!(hold.lease().state, LeaseState::Active);
    assert_eq!(server.client().hold_lease(1, 41).await.unwrap_err().code(), Some("unknown_lease"));
    let targets: Vec<_> = server.received().into_iter().map(|request| request.target).collect();
    assert_eq!(
        targets,
        ["POST /v1/leases/1/hold", "GET /v1/leases/1/hold?token=41", "POST /v1/leases/1/hold"].map(String::from)
    );
}

#[tokio::test]
async fn holding_ends_with_the_connection_and_dropping_it_hangs_up() {
    let server = ScriptedServer::start(|number, _| match number {
        0 => ScriptedReply::ThenClose(chunked_response(LINE_STREAM, &[&line(LeaseState::Active)])),
        1 => ScriptedReply::ThenSilence(chunked_response(LINE_STREAM, &[&line(LeaseState::Active)])),
        _ => problem_reply(409, "stale"),
    });
    let server = server.await;
    let mut hold = server.client().hold_lease(1, 41).await.unwrap();
    assert_eq!(within_deadline("the end", hold.wait_until_ended()).await, LeaseHoldEnd::Disconnected);
    let hold = server.client().hold_lease(1, 41).await.unwrap();
    drop(hold);
    assert!(server.wait_for_hangup().await.contains("/hold"));
    assert_eq!(server.client().hold_lease(1, 40).await.unwrap_err().code(), Some("stale"));
}

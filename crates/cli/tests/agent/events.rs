//! What happens is told in order, after it is durable, and goes on where a client was.

use gpupool_api::RequestBody;
use gpupool_client::{EventId, EventStream};
use gpupool_testkit::within_deadline;

use crate::common::{agent, granted, now, whole};

async fn next(events: &mut EventStream) -> (EventId, gpupool_api::events::EventBody) {
    within_deadline("an event", events.next()).await.unwrap()
}

/// The next events of this lease, by kind.
async fn kinds(events: &mut EventStream, lease: u64, until: &str) -> Vec<String> {
    let mut kinds = Vec::new();
    loop {
        let (_, event) = next(events).await;
        if event.lease == Some(lease) {
            kinds.push(event.kind.clone());
            if event.kind == until {
                return kinds;
            }
        }
    }
}

#[tokio::test]
async fn a_stream_goes_on_after_the_last_event_seen() {
    let agent = agent().simulate("1xH100").start().await;
    let client = agent.client();
    let mut live = client.events(None).await.unwrap();
    let (first, _) = granted(&client, &whole()).await;
    let second = client.request(&RequestBody::default()).await.unwrap();
    assert_eq!(kinds(&mut live, first.id, "granted").await, ["granted"]);
    let seen = live.last().unwrap().clone();
    client.release(first.id).await.unwrap();
    client.release(second.id).await.unwrap();
    let mut later = client.events(Some(seen)).await.unwrap();
    let mut told = Vec::new();
    loop {
        let (live_id, live_event) = next(&mut live).await;
        let (later_id, later_event) = next(&mut later).await;
        assert_eq!((&live_id, &live_event), (&later_id, &later_event), "both streams tell the same in the same order");
        let is_last = live_event.lease == Some(second.id) && live_event.kind == "ended";
        told.push((live_event.lease, live_event.kind));
        if is_last {
            break;
        }
    }
    let place = |lease: u64, kind: &str| told.iter().position(|seen| *seen == (Some(lease), kind.to_owned())).unwrap();
    assert!(place(second.id, "queued") < place(first.id, "ended"), "{told:?}");
    assert!(place(first.id, "ended") < place(second.id, "granted"), "{told:?}");
    assert!(place(second.id, "granted") < place(second.id, "ended"), "{told:?}");
}

#[tokio::test]
async fn who_missed_events_is_told_to_look_again() {
    let mut agent = agent().start().await;
    let client = agent.client();
    let mut events = client.events(None).await.unwrap();
    let (lease, _) = granted(&client, &whole()).await;
    kinds(&mut events, lease.id, "granted").await;
    let seen = events.last().unwrap().clone();
    for nonsense in ["nonsense", "", "0123-18446744073709551615", "x-1"] {
        let mut stream = client.events(Some(EventId::new(nonsense))).await.unwrap();
        assert_eq!(next(&mut stream).await.1.kind, "reset", "after {nonsense:?}");
    }
    agent.restart().await;
    assert_eq!(next(&mut events).await.1.kind, "reset", "a stream that lives through a restart");
    let mut later = client.events(Some(seen)).await.unwrap();
    assert_eq!(next(&mut later).await.1.kind, "reset", "a stream of a run before");
    client.release(lease.id).await.unwrap();
    assert!(kinds(&mut later, lease.id, "ended").await.contains(&"ended".to_owned()));
}

#[tokio::test]
async fn what_was_told_survives_a_kill() {
    let mut agent = agent().argument("--access-log=false").start().await;
    let client = agent.client_unix();
    for round in 0..4 {
        let mut events = client.events(None).await.unwrap();
        let asker = client.clone();
        let asked = tokio::spawn(async move { asker.request(&whole()).await });
        let lease = loop {
            let (_, event) = next(&mut events).await;
            if event.kind == "granted" {
                break event.lease.unwrap();
            }
        };
        // The answer may not even have left yet.
        agent.restart().await;
        assert!(!now(&client, lease).await.state.is_ended(), "round {round}: lease {lease} was told and is gone");
        let answered = within_deadline("the answer", asked).await.unwrap().unwrap();
        assert_eq!(answered.id, lease, "round {round}: the same request took two");
        client.release(lease).await.unwrap();
    }
}

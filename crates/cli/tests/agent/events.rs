//! Events come in order, after they are durable, and a client can resume after the last event that it received.

use gpupool_api::RequestBody;
use gpupool_client::{EventId, EventStream};
use gpupool_testkit::within_deadline;

use crate::common::{acquire, agent, read_lease, whole_gpu};

async fn next_event(events: &mut EventStream) -> (EventId, gpupool_api::events::EventBody) {
    within_deadline("an event", events.next()).await.unwrap()
}

/// Returns the kinds of the next events of a lease, up to the kind `until`.
async fn kinds_until(events: &mut EventStream, lease: u64, until: &str) -> Vec<String> {
    let mut kinds = Vec::new();
    loop {
        let (_, event) = next_event(events).await;
        if event.lease == Some(lease) {
            kinds.push(event.kind.clone());
            if event.kind == until {
                return kinds;
            }
        }
    }
}

#[tokio::test]
async fn a_stream_resumes_after_the_last_event_received() {
    let agent = agent().simulate("1xH100").start().await;
    let client = agent.client();
    let mut live = client.events(None).await.unwrap();
    let (first, _) = acquire(&client, &whole_gpu()).await;
    let second = client.request(&RequestBody::default()).await.unwrap();
    assert_eq!(kinds_until(&mut live, first.id, "granted").await, ["granted"]);
    let seen = live.last().unwrap().clone();
    client.release(first.id).await.unwrap();
    client.release(second.id).await.unwrap();
    let mut later = client.events(Some(seen)).await.unwrap();
    let mut order = Vec::new();
    loop {
        let (live_id, live_event) = next_event(&mut live).await;
        let (later_id, later_event) = next_event(&mut later).await;
        assert_eq!(
            (&live_id, &live_event),
            (&later_id, &later_event),
            "both streams have the same events in the same order"
        );
        let is_last = live_event.lease == Some(second.id) && live_event.kind == "ended";
        order.push((live_event.lease, live_event.kind));
        if is_last {
            break;
        }
    }
    let place = |lease: u64, kind: &str| order.iter().position(|seen| *seen == (Some(lease), kind.to_owned())).unwrap();
    assert!(place(second.id, "queued") < place(first.id, "ended"), "{order:?}");
    assert!(place(first.id, "ended") < place(second.id, "granted"), "{order:?}");
    assert!(place(second.id, "granted") < place(second.id, "ended"), "{order:?}");
}

#[tokio::test]
async fn a_client_that_missed_events_gets_a_reset() {
    let mut agent = agent().start().await;
    let client = agent.client();
    let mut events = client.events(None).await.unwrap();
    let (lease, _) = acquire(&client, &whole_gpu()).await;
    kinds_until(&mut events, lease.id, "granted").await;
    let seen = events.last().unwrap().clone();
    for nonsense in ["nonsense", "", "0123-18446744073709551615", "x-1"] {
        let mut stream = client.events(Some(EventId::new(nonsense))).await.unwrap();
        assert_eq!(next_event(&mut stream).await.1.kind, "reset", "after {nonsense:?}");
    }
    agent.restart().await;
    assert_eq!(next_event(&mut events).await.1.kind, "reset", "a stream across a restart");
    let mut later = client.events(Some(seen)).await.unwrap();
    assert_eq!(next_event(&mut later).await.1.kind, "reset", "a stream of the previous run");
    client.release(lease.id).await.unwrap();
    assert!(kinds_until(&mut later, lease.id, "ended").await.contains(&"ended".to_owned()));
}

#[tokio::test]
async fn a_granted_event_survives_a_kill() {
    let mut agent = agent().argument("--access-log=false").start().await;
    let client = agent.client_unix();
    for round in 0..4 {
        let mut events = client.events(None).await.unwrap();
        let requester = client.clone();
        let call = tokio::spawn(async move { requester.request(&whole_gpu()).await });
        let lease = loop {
            let (_, event) = next_event(&mut events).await;
            if event.kind == "granted" {
                break event.lease.unwrap();
            }
        };
        // The response may not have been sent yet.
        agent.restart().await;
        assert!(
            !read_lease(&client, lease).await.state.is_ended(),
            "round {round}: lease {lease} had an event and is gone"
        );
        let lease_again = within_deadline("the response", call).await.unwrap().unwrap();
        assert_eq!(lease_again.id, lease, "round {round}: the same request got two leases");
        client.release(lease).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn devices_and_the_events_after_them_have_no_gap_and_no_duplicate() {
    let agent = agent().argument("--access-log=false").start().await;
    let client = agent.client();
    let mut stream = client.events(None).await.unwrap();
    let changes = tokio::spawn({
        let client = agent.client();
        let body = RequestBody { wait_secs: Some(30.0), ..RequestBody::default() };
        async move {
            for _ in 0..40 {
                let (lease, _) = acquire(&client, &body).await;
                client.release(lease.id).await.unwrap();
            }
        }
    });
    let mut readings = Vec::new();
    while !changes.is_finished() && readings.len() < 50 {
        let devices = client.devices().await.unwrap();
        let last = EventId::new(devices.event_id.clone().unwrap());
        let later = client.events(Some(last.clone())).await.unwrap();
        readings.push((devices, last, later));
    }
    within_deadline("the changes to end", changes).await.unwrap();
    let marker = client.request(&RequestBody { wait_secs: Some(30.0), ..RequestBody::default() }).await.unwrap();
    let mut events = Vec::new();
    loop {
        let (id, event) = next_event(&mut stream).await;
        let is_last = event.lease == Some(marker.id) && event.kind == "granted";
        events.push((id, event));
        if is_last {
            break;
        }
    }

    for (devices, last, mut later) in readings {
        let included = events.iter().position(|(id, _)| *id == last).map_or(0, |place| place + 1);
        for expected in &events[included..] {
            assert_eq!(next_event(&mut later).await, *expected, "after {last:?}");
        }
        let is_listed = |lease| devices.devices.iter().flat_map(|device| &device.leases).any(|held| held.id == lease);
        for (place, (_, event)) in events.iter().enumerate().filter(|(_, (_, event))| event.kind == "granted") {
            let lease = event.lease.unwrap();
            let ends = |(_, event): &(EventId, _)| is_end(event, lease);
            let ended = events.iter().position(ends).unwrap_or(usize::MAX);
            if place >= included {
                assert!(!is_listed(lease), "lease {lease} is on a device before its event");
            } else if ended >= included {
                assert!(is_listed(lease), "lease {lease} is on no device after its event");
            }
        }
    }
}

fn is_end(event: &gpupool_api::events::EventBody, lease: u64) -> bool {
    event.kind == "ended" && event.lease == Some(lease)
}

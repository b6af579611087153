//! Server-sent events, which a client can resume after the last event that it received.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream::unfold;
use gpupool_api::events::EventBody;
use gpupool_api::problem::ProblemBody;

use crate::clock;
use crate::events::{EventId, Events};
use crate::limits::{EVENTS_AT_ONCE, HOLD_BEAT};
use crate::net::Shutdown;

use super::SharedState;
use super::extract::QueryParameters;
use super::pool::NodeParameter;
use super::problem::Problem;

/// Events
///
/// Server-sent events, each sent after it is durable. A client that returns with `Last-Event-ID` continues after that event;
/// if events were missed meanwhile, or the agent was restarted, the first event is a `reset`.
#[utoipa::path(
    get, path = "/v1/events", tag = "pool",
    params(
        ("Last-Event-ID" = Option<String>, Header, description = "The last event that the client received"),
        ("node" = Option<String>, Query, description = "Only events on the node with this name; events on no node, such as `queued`, are left out"),
    ),
    responses(
        (status = 200, description = "Events, as long as the connection is open", body = EventBody, content_type = "text/event-stream"),
        (status = "default", description = "The node is unknown", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn events(
    State(app): State<SharedState>,
    QueryParameters(node): QueryParameters<NodeParameter>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let node = node.known(&app, &app.authority.snapshot())?.map(ToOwned::to_owned);
    let last_id = headers.get("last-event-id").and_then(|id| id.to_str().ok());
    let place = last_id.and_then(|id| app.events.place_of(id));
    let feed = EventFeed {
        more: app.events.follow(),
        place: place.unwrap_or_else(|| app.events.last()),
        node,
        reset: last_id.is_some() && place.is_none(),
        greeted: false,
        events: app.events.clone(),
        shutdown: app.shutdown.clone(),
    };
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    Ok((headers, Body::from_stream(Box::pin(unfold(feed, EventFeed::next)))).into_response())
}

/// The events of one connection.
struct EventFeed {
    events: Arc<Events>,
    more: tokio::sync::watch::Receiver<u64>,
    /// The place of the last event that was sent or left out.
    place: u64,
    /// The node whose events are sent; all events if there is none.
    node: Option<String>,
    /// Whether the client has to read the whole state again first.
    reset: bool,
    greeted: bool,
    shutdown: Shutdown,
}

impl EventFeed {
    async fn next(mut self) -> Option<(Result<Bytes, Infallible>, Self)> {
        if !self.greeted {
            // Confirms the subscription, and gives the client an id to resume from before the first event.
            self.greeted = true;
            let mut text = format!("retry: 2000\nid: {}\n: listening\n\n", self.id(self.place));
            if std::mem::take(&mut self.reset) {
                text.push_str(&self.reset_at(self.place));
            }
            return Some((Ok(text.into()), self));
        }
        loop {
            self.more.borrow_and_update();
            let batch = self.events.after(self.place, EVENTS_AT_ONCE);
            if batch.missed || !batch.events.is_empty() {
                let mut text = String::new();
                if batch.missed {
                    text.push_str(&self.reset_at(self.place));
                }
                for (place, event) in batch.events {
                    self.place = place;
                    if self.node.is_none() || self.node == event.node {
                        text.push_str(&event_frame(&self.id(place), &event));
                    }
                }
                if text.is_empty() {
                    // All events were left out. The client resumes after them.
                    text = format!("id: {}\n\n", self.id(self.place));
                }
                return Some((Ok(text.into()), self));
            }
            tokio::select! {
                changed = self.more.changed() => changed.ok()?,
                () = self.shutdown.begun() => return None,
                () = tokio::time::sleep(HOLD_BEAT) => return Some((Ok(Bytes::from_static(b": still here\n\n")), self)),
            }
        }
    }

    fn id(&self, place: u64) -> EventId {
        EventId { run: self.events.run().clone(), place }
    }

    fn reset_at(&self, place: u64) -> String {
        let event = EventBody {
            kind: "reset".into(),
            at: clock::iso(std::time::SystemTime::now()),
            lease: None,
            owner: None,
            worker_id: None,
            gpu_ids: Vec::new(),
            node: None,
            reason: Some("events were missed: read leases and devices again".into()),
        };
        event_frame(&self.id(place), &event)
    }
}

fn event_frame(id: &EventId, event: &EventBody) -> String {
    let data = serde_json::to_string(event).unwrap_or_default();
    format!("id: {id}\nevent: {}\ndata: {data}\n\n", event.kind)
}

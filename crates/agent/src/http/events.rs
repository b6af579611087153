//! What happens, as it happens: server-sent events that can be gone on with.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream::unfold;
use gpupool_api::events::EventBody;

use crate::clock;
use crate::events::{EventId, Events};
use crate::limits::{EVENTS_AT_ONCE, HOLD_BEAT};
use crate::net::Shutdown;

use super::Shared;

/// Events
///
/// Server-sent events, each told after it was made durable. A client that comes back with `Last-Event-ID` goes on where it
/// was; where events were missed meanwhile, or the agent was restarted, the first event is a `reset`.
#[utoipa::path(
    get, path = "/v1/events", tag = "pool",
    params(("Last-Event-ID" = Option<String>, Header, description = "The last event seen")),
    responses((status = 200, description = "Events, as long as the connection is open", body = EventBody, content_type = "text/event-stream"))
)]
pub(super) async fn events(State(app): State<Shared>, headers: HeaderMap) -> Response {
    let seen = headers.get("last-event-id").and_then(|id| id.to_str().ok());
    let place = seen.and_then(|id| app.events.place_of(id));
    let stream = Stream {
        more: app.events.follow(),
        place: place.unwrap_or_else(|| app.events.last()),
        reset: seen.is_some() && place.is_none(),
        greeted: false,
        events: app.events.clone(),
        shutdown: app.shutdown.clone(),
    };
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    (headers, Body::from_stream(Box::pin(unfold(stream, Stream::next)))).into_response()
}

struct Stream {
    events: Arc<Events>,
    more: tokio::sync::watch::Receiver<u64>,
    /// The last event sent.
    place: u64,
    /// Whether the client has to look at the whole again first.
    reset: bool,
    greeted: bool,
    shutdown: Shutdown,
}

impl Stream {
    async fn next(mut self) -> Option<(Result<Bytes, Infallible>, Self)> {
        if !self.greeted {
            // So that the client knows at once that it listens, and where to go on if nothing happens.
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
                    text.push_str(&frame(&self.id(place), &event));
                    self.place = place;
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
            reason: Some("events were missed: look at the whole again".into()),
        };
        frame(&self.id(place), &event)
    }
}

fn frame(id: &EventId, event: &EventBody) -> String {
    let data = serde_json::to_string(event).unwrap_or_default();
    format!("id: {id}\nevent: {}\ndata: {data}\n\n", event.kind)
}

//! What happens at the agent, as it happens. A connection that breaks is made anew, and goes on where it was.

use std::fmt;

use futures_util::Stream;
use futures_util::stream::unfold;
use gpupool_api::events::Event;
use http::header::CONTENT_TYPE;
use reqwest::Response;
use tokio::time::Instant;

use super::call::Call;
use super::sse::{Frame, Parser};
use crate::backoff::Backoff;
use crate::limits::{AWAY, STREAM_SILENCE};
use crate::{AgentClient, ClientError};

/// Which event: to go on after it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EventId(String);

impl EventId {
    /// An id that was kept as text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Events as they come. Has no task of its own: nothing is read before it is asked for.
#[derive(Debug)]
pub struct Events {
    client: AgentClient,
    last: Option<EventId>,
    open: Option<Response>,
    parser: Parser,
}

impl AgentClient {
    /// Follows what happens from now on, or on after an event. When this returns, the agent is listening: what is done after
    /// it will be told.
    pub async fn events(&self, after: Option<EventId>) -> Result<Events, ClientError> {
        let mut events = Events { client: self.clone(), last: after, open: None, parser: Parser::default() };
        events.connect().await?;
        Ok(events)
    }
}

impl Events {
    /// The next event. After a `reset` events are missing: look at the whole again. Can be dropped and asked for again
    /// without losing any, and after an error too.
    pub async fn next(&mut self) -> Result<(EventId, Event), ClientError> {
        loop {
            while let Some(frame) = self.parser.next() {
                if let Some(event) = self.take(frame)? {
                    return Ok(event);
                }
            }
            match self.open {
                Some(_) => self.read().await?,
                // The greeting may bring events with it: those first, before more is waited for.
                None => self.come_back().await?,
            }
        }
    }

    /// The last event seen, or where listening began.
    pub fn last(&self) -> Option<&EventId> {
        self.last.as_ref()
    }

    /// The events as a stream that ends after the first error.
    pub fn into_stream(self) -> impl Stream<Item = Result<(EventId, Event), ClientError>> {
        unfold(Some(self), |events| async move {
            let mut events = events?;
            match events.next().await {
                Ok(event) => Some((Ok(event), Some(events))),
                Err(error) => Some((Err(error), None)),
            }
        })
    }

    fn take(&mut self, frame: Frame) -> Result<Option<(EventId, Event)>, ClientError> {
        if let Some(id) = frame.id {
            self.last = Some(EventId(id));
        }
        let Some(data) = frame.data else { return Ok(None) };
        let event = serde_json::from_str(&data).map_err(|error| {
            self.client.not_ours(http::StatusCode::OK, format!("it tells of an event that is none ({error})"))
        })?;
        Ok(Some((self.last.clone().unwrap_or_else(|| EventId(String::new())), event)))
    }

    /// Reads on; a connection that ends or falls silent is let go.
    async fn read(&mut self) -> Result<(), ClientError> {
        let Some(open) = &mut self.open else { return Ok(()) };
        let Ok(Ok(Some(chunk))) = tokio::time::timeout(STREAM_SILENCE, open.chunk()).await else {
            self.let_go();
            return Ok(());
        };
        self.parser.push(&chunk).map_err(|error| {
            self.let_go();
            self.client.not_ours(http::StatusCode::OK, error.to_string())
        })
    }

    fn let_go(&mut self) {
        self.open = None;
        // Half an event is told again.
        self.parser = Parser::default();
    }

    /// Connects again, for as long as an agent may be away.
    async fn come_back(&mut self) -> Result<(), ClientError> {
        let until = Instant::now() + AWAY;
        let mut backoff = Backoff::default();
        loop {
            // Also before the first try: an agent that hangs up at once is not to be called without pause.
            backoff.pause_until(until).await;
            match self.connect().await {
                Err(error) if error.is_passing() && Instant::now() < until => {}
                outcome => return outcome,
            }
        }
    }

    /// Connects, and waits for the greeting.
    async fn connect(&mut self) -> Result<(), ClientError> {
        let mut call = Call::get("/v1/events").header("accept", "text/event-stream");
        if let Some(last) = &self.last {
            call = call.header("last-event-id", &last.0);
        }
        let open = self.client.open(&call).await?;
        let kind = open.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("");
        if !kind.starts_with("text/event-stream") {
            let what = format!("/v1/events was answered with {kind:?} in place of text/event-stream");
            return Err(self.client.not_ours(open.status(), what));
        }
        self.let_go();
        self.open = Some(open);
        self.read().await?;
        if self.open.is_none() {
            return Err(self.client.unreachable("it closed the stream of events at once"));
        }
        Ok(())
    }
}

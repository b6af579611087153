//! Streaming responses: events, over connections that reconnect and resume, and connections that hold a lease.

use std::collections::VecDeque;
use std::fmt;

use bytes::BytesMut;
use gpupool_api::events::EventBody;
use gpupool_api::lease::{FencingTokenBody, LeaseBody};
use http::StatusCode;
use http::header::CONTENT_TYPE;
use reqwest::Response;
use tokio::time::Instant;

use super::api_call::ApiCall;
use crate::limits::{AGENT_AWAY_LIMIT, MAX_EVENT_BYTES, STREAM_IDLE_TIMEOUT};
use crate::random::Backoff;
use crate::{AgentClient, ClientError};

/// Position in the event stream, from which a stream can resume.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EventId(String);

impl EventId {
    /// Restores an id that was saved as text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Stream of events. It has no task of its own: it reads only while a caller waits for the next event.
#[derive(Debug)]
pub struct EventStream {
    client: AgentClient,
    last_seen: Option<EventId>,
    response: Option<Response>,
    parser: SseParser,
}

impl AgentClient {
    /// Subscribes to events from now on, or after a given event. When this returns, the agent has subscribed the
    /// client: no later event is missed.
    pub async fn events(&self, after: Option<EventId>) -> Result<EventStream, ClientError> {
        let mut events =
            EventStream { client: self.clone(), last_seen: after, response: None, parser: SseParser::default() };
        events.connect().await?;
        Ok(events)
    }
}

impl EventStream {
    /// Returns the next event. After a `reset` event some events are missing: read the full state again. Cancel safe,
    /// and usable after an error.
    pub async fn next(&mut self) -> Result<(EventId, EventBody), ClientError> {
        loop {
            while let Some(frame) = self.parser.next() {
                if let Some(event) = self.decode_frame(frame)? {
                    return Ok(event);
                }
            }
            match self.response {
                Some(_) => self.read_chunk().await?,
                // The greeting may contain events: they are returned before more is read.
                None => self.reconnect().await?,
            }
        }
    }

    /// Returns the id of the last event, or of the start of the subscription.
    pub fn last(&self) -> Option<&EventId> {
        self.last_seen.as_ref()
    }

    fn decode_frame(&mut self, frame: SseFrame) -> Result<Option<(EventId, EventBody)>, ClientError> {
        if let Some(id) = frame.id {
            self.last_seen = Some(EventId(id));
        }
        let Some(data) = frame.data else { return Ok(None) };
        let event = serde_json::from_str(&data).map_err(|error| {
            self.client.not_an_agent(http::StatusCode::OK, format!("it sent an invalid event ({error})"))
        })?;
        Ok(Some((self.last_seen.clone().unwrap_or_else(|| EventId(String::new())), event)))
    }

    /// Reads one chunk; drops a connection that has ended or is silent.
    async fn read_chunk(&mut self) -> Result<(), ClientError> {
        let Some(response) = &mut self.response else { return Ok(()) };
        let Ok(Ok(Some(chunk))) = tokio::time::timeout(STREAM_IDLE_TIMEOUT, response.chunk()).await else {
            self.drop_connection();
            return Ok(());
        };
        self.parser.push(&chunk).map_err(|error| {
            self.drop_connection();
            self.client.not_an_agent(http::StatusCode::OK, error.to_string())
        })
    }

    fn drop_connection(&mut self) {
        self.response = None;
        // An incomplete event is sent again.
        self.parser = SseParser::default();
    }

    /// Reconnects, with retries for the time that an agent may be away.
    async fn reconnect(&mut self) -> Result<(), ClientError> {
        let until = Instant::now() + AGENT_AWAY_LIMIT;
        let mut backoff = Backoff::default();
        loop {
            // Also before the first attempt: an agent that closes connections at once must not be called without a
            // pause.
            backoff.pause_until(until).await;
            match self.connect().await {
                Err(error) if error.is_transient() && Instant::now() < until => {}
                outcome => return outcome,
            }
        }
    }

    /// Connects and waits for the greeting.
    async fn connect(&mut self) -> Result<(), ClientError> {
        let mut call = ApiCall::get("/v1/events").header("accept", "text/event-stream");
        if let Some(last_seen) = &self.last_seen {
            call = call.header("last-event-id", &last_seen.0);
        }
        let response = self.client.open_stream(&call).await?;
        let kind = response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("");
        if !kind.starts_with("text/event-stream") {
            let reason = format!("/v1/events has the content type {kind:?}, not text/event-stream");
            return Err(self.client.not_an_agent(response.status(), reason));
        }
        self.drop_connection();
        self.response = Some(response);
        self.read_chunk().await?;
        if self.response.is_none() {
            return Err(self.client.unreachable("it closed the event stream at once"));
        }
        Ok(())
    }
}

// Server-sent events, parsed from chunks that may end anywhere.

/// Fields between two empty lines.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct SseFrame {
    /// Id of the event, if any.
    pub id: Option<String>,
    /// Data lines, joined; a frame without data is no event.
    pub data: Option<String>,
}

/// An event or one of its lines exceeds the size limit.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event is larger than {MAX_EVENT_BYTES} bytes")]
pub(crate) struct EventTooLong;

/// Parser that assembles frames from chunks.
#[derive(Debug, Default)]
pub(crate) struct SseParser {
    line: Vec<u8>,
    /// Whether the last byte was a carriage return: a line feed after it ends the same line.
    after_carriage_return: bool,
    /// Whether a line was read already: a byte order mark can only precede the first one.
    has_started: bool,
    frame: SseFrame,
    complete: VecDeque<SseFrame>,
}

impl SseParser {
    /// Parses a chunk.
    pub(super) fn push(&mut self, chunk: &[u8]) -> Result<(), EventTooLong> {
        for &byte in chunk {
            let ends_same_line = std::mem::replace(&mut self.after_carriage_return, byte == b'\r') && byte == b'\n';
            match byte {
                b'\n' if ends_same_line => {}
                b'\n' | b'\r' => self.end_line(),
                _ => self.line.push(byte),
            }
            if self.line.len() + self.frame.data.as_ref().map_or(0, String::len) > MAX_EVENT_BYTES {
                return Err(EventTooLong);
            }
        }
        Ok(())
    }

    /// Returns the next complete frame.
    pub(super) fn next(&mut self) -> Option<SseFrame> {
        self.complete.pop_front()
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let line = String::from_utf8_lossy(&line);
        let line = if self.has_started { &*line } else { line.strip_prefix('\u{feff}').unwrap_or(&line) };
        self.has_started = true;
        if line.is_empty() {
            let frame = std::mem::take(&mut self.frame);
            if frame != SseFrame::default() {
                self.complete.push_back(frame);
            }
            return;
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "id" if !value.contains('\0') => self.frame.id = Some(value.to_owned()),
            "data" => match &mut self.frame.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                none => *none = Some(value.to_owned()),
            },
            // The data contains the kind as well; comments and retry times are not needed.
            _ => {}
        }
    }
}

/// An open connection that holds a lease. The lease is released when it is dropped or the process ends.
#[derive(Debug)]
#[must_use = "dropping it releases the lease"]
pub struct LeaseHold {
    reader: LeaseLineReader,
    lease: LeaseBody,
}

/// End of a lease hold.
#[derive(Debug, Clone, PartialEq)]
pub enum LeaseHoldEnd {
    /// The lease ended.
    Ended(Box<LeaseBody>),
    /// The connection broke, or the agent went away. After a restart the agent allows a short time to hold the lease
    /// again.
    Disconnected,
}

impl AgentClient {
    /// Holds a lease with an open connection in place of renewals; works over the network too.
    pub async fn hold_lease(&self, lease: u64, token: u64) -> Result<LeaseHold, ClientError> {
        let route = format!("/v1/leases/{lease}/hold");
        let response = match self.open_stream(&ApiCall::post(&*route, &FencingTokenBody { token })).await {
            // Only an agent older than this client has no POST; every other one knows no GET.
            Err(error) if error.code() == Some("method_not_allowed") => {
                self.open_stream(&ApiCall::get(route).query("token", Some(token))).await?
            }
            response => response?,
        };
        let mut reader =
            LeaseLineReader { client: self.clone(), status: response.status(), response, buffer: BytesMut::new() };
        match reader.next().await? {
            Some(lease) => Ok(LeaseHold { reader, lease }),
            None => Err(self.unreachable("it closed the connection that should hold the lease")),
        }
    }
}

impl LeaseHold {
    /// Returns the lease as last reported by the agent.
    pub fn lease(&self) -> &LeaseBody {
        &self.lease
    }

    /// Waits until the lease or the connection ends. Cancel safe.
    pub async fn wait_until_ended(&mut self) -> LeaseHoldEnd {
        loop {
            match self.reader.next().await {
                Ok(Some(lease)) if lease.state.is_ended() => return LeaseHoldEnd::Ended(Box::new(lease)),
                Ok(Some(lease)) => self.lease = lease,
                Ok(None) => return LeaseHoldEnd::Disconnected,
                Err(error) => {
                    tracing::warn!(%error, lease = self.lease.id, "unexpected data on the connection that holds the lease");
                    return LeaseHoldEnd::Disconnected;
                }
            }
        }
    }
}

/// Reader of leases, one per line; empty lines only keep the connection open.
#[derive(Debug)]
struct LeaseLineReader {
    client: AgentClient,
    status: StatusCode,
    response: Response,
    buffer: BytesMut,
}

impl LeaseLineReader {
    /// Returns the next lease; `None` if the connection has ended or is silent.
    async fn next(&mut self) -> Result<Option<LeaseBody>, ClientError> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line = self.buffer.split_to(end + 1);
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return serde_json::from_slice(&line).map(Some).map_err(|error| {
                    self.client.not_an_agent(self.status, format!("it sent an invalid lease ({error})"))
                });
            }
            if self.buffer.len() > MAX_EVENT_BYTES {
                let reason = format!("a line is larger than {MAX_EVENT_BYTES} bytes");
                return Err(self.client.not_an_agent(self.status, reason));
            }
            match tokio::time::timeout(STREAM_IDLE_TIMEOUT, self.response.chunk()).await {
                Ok(Ok(Some(chunk))) => self.buffer.extend_from_slice(&chunk),
                _ => return Ok(None),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(chunks: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Vec<(Option<String>, Option<String>)> {
        let mut parser = SseParser::default();
        let mut frames = Vec::new();
        for chunk in chunks {
            parser.push(chunk.as_ref()).unwrap();
            frames.extend(std::iter::from_fn(|| parser.next()).map(|frame| (frame.id, frame.data)));
        }
        frames
    }

    fn frame(id: Option<&str>, data: Option<&str>) -> (Option<String>, Option<String>) {
        (id.map(Into::into), data.map(Into::into))
    }

    const STREAM: &str = "\u{feff}retry: 2000\r\nid: run-0\r\n: listening\r\n\r\nid: run-1\nevent: granted\ndata: {\"ü\":1}\n\n\
                          : still here\n\ndata:a\rdata:  b\rid\r\rdata: unfinished";

    #[test]
    fn frames_do_not_depend_on_chunk_boundaries() {
        let expected =
            [frame(Some("run-0"), None), frame(Some("run-1"), Some("{\"ü\":1}")), frame(Some(""), Some("a\n b"))];
        assert_eq!(frames([STREAM]), expected);
        for size in 1..STREAM.len() {
            assert_eq!(frames(STREAM.as_bytes().chunks(size)), expected, "chunks of {size} bytes");
        }
    }

    #[test]
    fn events_beyond_the_size_limit_are_refused() {
        let mut parser = SseParser::default();
        assert_eq!(parser.push(&vec![b'x'; MAX_EVENT_BYTES + 1]), Err(EventTooLong));
        let mut parser = SseParser::default();
        let reader = "data: 1234567890\n".repeat(MAX_EVENT_BYTES / 10);
        assert_eq!(parser.push(reader.as_bytes()), Err(EventTooLong));
    }
}

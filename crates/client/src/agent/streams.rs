//! Answers that do not end: what happens at the agent, as it happens, over connections that are made anew and go on where they
//! were; and connections that are a lease.

use std::collections::VecDeque;
use std::fmt;

use bytes::BytesMut;
use gpupool_api::events::EventBody;
use gpupool_api::lease::LeaseBody;
use http::StatusCode;
use http::header::CONTENT_TYPE;
use reqwest::Response;
use tokio::time::Instant;

use super::call::Call;
use crate::limits::{AGENT_AWAY_LIMIT, EVENT_BYTES, STREAM_SILENCE};
use crate::random::Backoff;
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
pub struct EventStream {
    client: AgentClient,
    last: Option<EventId>,
    open: Option<Response>,
    parser: Parser,
}

impl AgentClient {
    /// Follows what happens from now on, or on after an event. When this returns, the agent is listening: what is done after
    /// it will be told.
    pub async fn events(&self, after: Option<EventId>) -> Result<EventStream, ClientError> {
        let mut events = EventStream { client: self.clone(), last: after, open: None, parser: Parser::default() };
        events.connect().await?;
        Ok(events)
    }
}

impl EventStream {
    /// The next event. After a `reset` events are missing: look at the whole again. Can be dropped and asked for again
    /// without losing any, and after an error too.
    pub async fn next(&mut self) -> Result<(EventId, EventBody), ClientError> {
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

    fn take(&mut self, frame: Frame) -> Result<Option<(EventId, EventBody)>, ClientError> {
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
        let until = Instant::now() + AGENT_AWAY_LIMIT;
        let mut backoff = Backoff::default();
        loop {
            // Also before the first try: an agent that hangs up at once is not to be called without pause.
            backoff.pause_until(until).await;
            match self.connect().await {
                Err(error) if error.is_transient() && Instant::now() < until => {}
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

// Server-sent events, read from chunks that may end anywhere.

/// What stood between two empty lines.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    /// Where to go on from, where it was said.
    pub id: Option<String>,
    /// The data, lines joined; `None` where there was none, which makes it no event.
    pub data: Option<String>,
}

/// An event, or a line of it, is larger than it may be.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event is larger than {EVENT_BYTES} bytes")]
pub(crate) struct TooLong;

/// Puts chunks together to frames.
#[derive(Debug, Default)]
pub(crate) struct Parser {
    line: Vec<u8>,
    /// The last byte was a carriage return: a line feed after it ends the same line.
    after_return: bool,
    /// Something was read already: a byte order mark can only stand before it.
    begun: bool,
    frame: Frame,
    ready: VecDeque<Frame>,
}

impl Parser {
    /// Takes a chunk.
    pub(super) fn push(&mut self, chunk: &[u8]) -> Result<(), TooLong> {
        for &byte in chunk {
            let ends_same_line = std::mem::replace(&mut self.after_return, byte == b'\r') && byte == b'\n';
            match byte {
                b'\n' if ends_same_line => {}
                b'\n' | b'\r' => self.end_line(),
                _ => self.line.push(byte),
            }
            if self.line.len() + self.frame.data.as_ref().map_or(0, String::len) > EVENT_BYTES {
                return Err(TooLong);
            }
        }
        Ok(())
    }

    /// The next frame that is whole.
    pub(super) fn next(&mut self) -> Option<Frame> {
        self.ready.pop_front()
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let line = String::from_utf8_lossy(&line);
        let line = if self.begun { &*line } else { line.strip_prefix('\u{feff}').unwrap_or(&line) };
        self.begun = true;
        if line.is_empty() {
            let frame = std::mem::take(&mut self.frame);
            if frame != Frame::default() {
                self.ready.push_back(frame);
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
            // The kind is told in the data too; comments and pauses between connections are not needed.
            _ => {}
        }
    }
}

// A connection that is the lease: while it is open the lease lives, when it closes the lease is released.

/// An open connection that keeps a lease alive. Dropping it, or the end of the process, releases the lease.
#[derive(Debug)]
#[must_use = "dropping it releases the lease"]
pub struct LeaseHold {
    lines: Lines,
    lease: LeaseBody,
}

/// How holding a lease ended.
#[derive(Debug, Clone, PartialEq)]
pub enum LeaseHoldEnd {
    /// The lease is over.
    Ended(Box<LeaseBody>),
    /// The connection broke, or the agent went away. Where it is restarted, there is a short time to hold it again.
    Disconnected,
}

impl AgentClient {
    /// Keeps a lease alive by an open connection in place of renewals, over the network too.
    pub async fn hold_lease(&self, lease: u64, token: u64) -> Result<LeaseHold, ClientError> {
        let call = Call::get(format!("/v1/leases/{lease}/hold")).query("token", Some(token));
        let open = self.open(&call).await?;
        let mut lines = Lines { client: self.clone(), status: open.status(), open, buffer: BytesMut::new() };
        match lines.next().await? {
            Some(lease) => Ok(LeaseHold { lines, lease }),
            None => Err(self.unreachable("it closed the connection that was to hold the lease")),
        }
    }
}

impl LeaseHold {
    /// The lease as it was when it was taken hold of.
    pub fn lease(&self) -> &LeaseBody {
        &self.lease
    }

    /// Waits until the lease or the connection is over. Can be dropped and waited for again.
    pub async fn wait_until_ended(&mut self) -> LeaseHoldEnd {
        loop {
            match self.lines.next().await {
                Ok(Some(lease)) if lease.state.is_ended() => return LeaseHoldEnd::Ended(Box::new(lease)),
                Ok(Some(lease)) => self.lease = lease,
                Ok(None) => return LeaseHoldEnd::Disconnected,
                Err(error) => {
                    tracing::warn!(%error, lease = self.lease.id, "the connection that holds the lease speaks nonsense");
                    return LeaseHoldEnd::Disconnected;
                }
            }
        }
    }
}

/// Leases, one a line; empty lines only say that the connection lives.
#[derive(Debug)]
struct Lines {
    client: AgentClient,
    status: StatusCode,
    open: Response,
    buffer: BytesMut,
}

impl Lines {
    /// The next one; `None` where the connection ended or fell silent.
    async fn next(&mut self) -> Result<Option<LeaseBody>, ClientError> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line = self.buffer.split_to(end + 1);
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return serde_json::from_slice(&line).map(Some).map_err(|error| {
                    self.client.not_ours(self.status, format!("it tells of a lease that is none ({error})"))
                });
            }
            if self.buffer.len() > EVENT_BYTES {
                return Err(self.client.not_ours(self.status, format!("a line is larger than {EVENT_BYTES} bytes")));
            }
            match tokio::time::timeout(STREAM_SILENCE, self.open.chunk()).await {
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
        let mut parser = Parser::default();
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
    fn frames_are_the_same_wherever_chunks_end() {
        let expected =
            [frame(Some("run-0"), None), frame(Some("run-1"), Some("{\"ü\":1}")), frame(Some(""), Some("a\n b"))];
        assert_eq!(frames([STREAM]), expected);
        for size in 1..STREAM.len() {
            assert_eq!(frames(STREAM.as_bytes().chunks(size)), expected, "chunks of {size} bytes");
        }
    }

    #[test]
    fn what_never_ends_is_refused() {
        let mut parser = Parser::default();
        assert_eq!(parser.push(&vec![b'x'; EVENT_BYTES + 1]), Err(TooLong));
        let mut parser = Parser::default();
        let lines = "data: 1234567890\n".repeat(EVENT_BYTES / 10);
        assert_eq!(parser.push(lines.as_bytes()), Err(TooLong));
    }
}

//! The deadlines of a connection: its current phase and the time at which the phase began, in a few atomic words.
//!
//! The stream and the bodies of a connection record their progress here. The loop of `server` reads it about once a
//! second and orders connections that are slower than allowed to close. A connection therefore needs no timer, and a
//! record costs one store. Times come from a clock that the loop advances. A phase may appear older than it is by one
//! check interval, which every limit therefore adds.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::NetLimits;
use super::connection::ClientSocket;

/// Milliseconds since the listeners began, advanced by the loop. Never 0, which stands for "not waiting".
#[derive(Debug)]
pub(super) struct CoarseClock {
    began: Instant,
    now: AtomicU64,
}

impl CoarseClock {
    pub(super) fn new() -> Self {
        Self { began: Instant::now(), now: AtomicU64::new(1) }
    }

    pub(super) fn advance(&self) -> u64 {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1);
        self.now.store(now, Relaxed);
        now
    }
}

/// The phase of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestPhase {
    /// Between two requests.
    Idle = 0,
    /// TLS handshake or headers.
    Head = 1,
    /// The handler has the request.
    Handling = 2,
    /// The response is on its way.
    Responding = 3,
}

/// An order of the loop to a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionOrder {
    /// Continue.
    Go = 0,
    /// Finish the request in progress, then close.
    Finish = 1,
    /// Close now.
    Close = 2,
    /// Respond that the client was too slow, then close.
    TooSlow = 3,
}

/// The progress of one connection, and the order given to it.
#[derive(Debug)]
pub(super) struct DeadlineTracker {
    clock: Arc<CoarseClock>,
    socket: Weak<ClientSocket>,
    /// Time << 2 | phase.
    phase: AtomicU64,
    /// Time since which a handler waits for the request's body; 0 if none waits.
    body_since: AtomicU64,
    /// Time since which the client accepts no bytes of the response; 0 if it does.
    write_since: AtomicU64,
    /// Whether reading would notice that the client closed the connection.
    notices_close: AtomicBool,
    order: AtomicU8,
    waker: AtomicWaker,
}

impl DeadlineTracker {
    pub(super) fn new(clock: Arc<CoarseClock>, socket: &Arc<ClientSocket>) -> Self {
        let tracker = Self {
            clock,
            socket: Arc::downgrade(socket),
            phase: AtomicU64::new(0),
            body_since: AtomicU64::new(0),
            write_since: AtomicU64::new(0),
            notices_close: AtomicBool::new(false),
            order: AtomicU8::new(ConnectionOrder::Go as u8),
            waker: AtomicWaker::new(),
        };
        tracker.enter(RequestPhase::Head);
        tracker
    }

    pub(super) fn enter(&self, phase: RequestPhase) {
        self.phase.store(self.now() << 2 | phase as u64, Relaxed);
        if phase == RequestPhase::Handling {
            self.notices_close.store(false, Relaxed);
        }
    }

    pub(super) fn phase(&self) -> RequestPhase {
        self.phase_and_since().0
    }

    /// Records whether a handler waits for the body.
    pub(super) fn waits_for_body(&self, waits: bool) {
        self.set_since(&self.body_since, waits);
    }

    /// Returns whether bytes of a response wait for the client.
    pub(super) fn is_writing(&self) -> bool {
        self.write_since.load(Relaxed) != 0
    }

    /// Gives the connection an order. A stronger order stays in force.
    pub(super) fn order(&self, order: ConnectionOrder) {
        self.order.fetch_max(order as u8, Relaxed);
        self.waker.wake();
    }

    /// Returns the order in force; the task of `cx` is woken when it changes.
    pub(super) fn poll_order(&self, cx: &Context<'_>) -> ConnectionOrder {
        self.waker.register(cx.waker());
        match self.order.load(Relaxed) {
            0 => ConnectionOrder::Go,
            1 => ConnectionOrder::Finish,
            2 => ConnectionOrder::Close,
            _ => ConnectionOrder::TooSlow,
        }
    }

    /// Returns the order that is due at `now`, with checks every `interval`.
    pub(super) fn order_due(&self, now: u64, interval: Duration, limits: &NetLimits) -> ConnectionOrder {
        let over = |since: u64, limit: Duration| {
            u128::from(now.saturating_sub(since)) > limit.saturating_add(interval).as_millis()
        };
        let write_since = self.write_since.load(Relaxed);
        if write_since != 0 && over(write_since, limits.write_time) {
            return ConnectionOrder::Close;
        }
        let (phase, since) = self.phase_and_since();
        let body_since = self.body_since.load(Relaxed);
        match phase {
            RequestPhase::Idle if over(since, limits.idle_time) => ConnectionOrder::Close,
            RequestPhase::Head if over(since, limits.header_time) => ConnectionOrder::TooSlow,
            RequestPhase::Handling if body_since != 0 && over(body_since, limits.body_time) => ConnectionOrder::TooSlow,
            RequestPhase::Responding if body_since != 0 && over(body_since, limits.body_time) => ConnectionOrder::Close,
            RequestPhase::Handling | RequestPhase::Responding if self.closed_unnoticed() => ConnectionOrder::Close,
            _ => ConnectionOrder::Go,
        }
    }

    /// Asks the kernel whether the client left, because the agent does not read from a client that sent several
    /// requests at once.
    fn closed_unnoticed(&self) -> bool {
        !self.notices_close.load(Relaxed) && self.socket.upgrade().is_some_and(|socket| socket.peer_has_closed())
    }

    fn phase_and_since(&self) -> (RequestPhase, u64) {
        let word = self.phase.load(Relaxed);
        let phase = match word & 3 {
            0 => RequestPhase::Idle,
            1 => RequestPhase::Head,
            2 => RequestPhase::Handling,
            _ => RequestPhase::Responding,
        };
        (phase, word >> 2)
    }

    fn now(&self) -> u64 {
        self.clock.now.load(Relaxed)
    }

    fn set_since(&self, since: &AtomicU64, waits: bool) {
        let is_set = since.load(Relaxed) != 0;
        if is_set != waits {
            since.store(if waits { self.now() } else { 0 }, Relaxed);
        }
    }

    fn record_read(&self, bytes: Poll<usize>) {
        match (self.phase(), bytes) {
            (RequestPhase::Idle, Poll::Ready(1..)) => self.enter(RequestPhase::Head),
            (RequestPhase::Handling | RequestPhase::Responding, bytes) => {
                self.notices_close.store(bytes.is_pending(), Relaxed)
            }
            _ => {}
        }
    }

    fn record_write(&self, is_pending: bool) {
        self.set_since(&self.write_since, is_pending);
    }
}

/// A stream that records each read and write.
#[derive(Debug)]
pub(super) struct TrackedStream<I> {
    pub stream: I,
    pub tracker: Arc<DeadlineTracker>,
}

impl<I: AsyncRead + Unpin> AsyncRead for TrackedStream<I> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let outcome = Pin::new(&mut self.stream).poll_read(cx, buf);
        let bytes = if outcome.is_pending() { Poll::Pending } else { Poll::Ready(buf.filled().len() - before) };
        self.tracker.record_read(bytes);
        outcome
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for TrackedStream<I> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.tracker.record_write(outcome.is_pending());
        outcome
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.tracker.record_write(outcome.is_pending());
        outcome
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_flush(cx);
        self.tracker.record_write(outcome.is_pending());
        outcome
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.tracker.record_write(outcome.is_pending());
        outcome
    }
}

/// The body of a request. If it does not arrive in time, the client gets 408 and the handler is cancelled.
#[derive(Debug)]
pub struct IncomingBody {
    incoming: Incoming,
    tracker: Arc<DeadlineTracker>,
}

impl IncomingBody {
    pub(super) fn new(incoming: Incoming, tracker: Arc<DeadlineTracker>) -> Self {
        Self { incoming, tracker }
    }
}

impl Body for IncomingBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.incoming).poll_frame(cx);
        match &frame {
            // Recorded once and kept while chunks trickle in: the limit is for the whole body.
            Poll::Pending => self.tracker.waits_for_body(true),
            Poll::Ready(Some(Ok(_))) if !self.incoming.is_end_stream() => {}
            Poll::Ready(_) => self.tracker.waits_for_body(false),
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

impl Drop for IncomingBody {
    fn drop(&mut self) {
        self.tracker.waits_for_body(false);
    }
}

/// The body of a response. Dropping it puts the connection between two requests.
#[derive(Debug)]
pub(super) struct ResponseBody<B> {
    body: B,
    tracker: Arc<DeadlineTracker>,
}

impl<B> ResponseBody<B> {
    pub(super) fn new(body: B, tracker: Arc<DeadlineTracker>) -> Self {
        Self { body, tracker }
    }
}

impl<B: Body + Unpin> Body for ResponseBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<B> Drop for ResponseBody<B> {
    fn drop(&mut self) {
        self.tracker.enter(RequestPhase::Idle);
    }
}

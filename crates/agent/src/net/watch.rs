//! The deadlines of a connection: its current step and the time it began, in a few atomic words.
//!
//! The stream and the bodies of a connection write them as they go on. The loop of `server` reads them about once a
//! second and orders those connections to close that are slower than allowed. So a connection needs no timer, and
//! noting a step costs one store. Times are those of a clock that the loop moves on; a step may look up to one look
//! older than it is, so the judgement adds one.

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

use super::Limits;
use super::connection::Socket;

/// Milliseconds since the listeners began, moved on by the loop. Never 0: that stands for "not waiting".
#[derive(Debug)]
pub(super) struct Clock {
    began: Instant,
    now: AtomicU64,
}

impl Clock {
    pub fn new() -> Self {
        Self { began: Instant::now(), now: AtomicU64::new(1) }
    }

    pub fn advance(&self) -> u64 {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1);
        self.now.store(now, Relaxed);
        now
    }
}

/// The part of a request that a connection is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Between two requests.
    Idle = 0,
    /// TLS handshake or headers.
    Head = 1,
    /// The handler has the request.
    Handling = 2,
    /// The answer is being produced.
    Answering = 3,
}

/// An order of the loop to a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Nothing.
    Go = 0,
    /// Finish the request in progress, then close.
    Finish = 1,
    /// Close now.
    Close = 2,
    /// Tell the client that it was too slow, then close.
    TooSlow = 3,
}

/// Current step of one connection, and the order given to it.
#[derive(Debug)]
pub(super) struct Watch {
    clock: Arc<Clock>,
    socket: Weak<Socket>,
    /// Time << 2 | phase.
    phase: AtomicU64,
    /// Time since which a handler waits for the request's body; 0 if none waits.
    body_since: AtomicU64,
    /// Time since which the client takes nothing of the answer; 0 if it does.
    write_since: AtomicU64,
    /// Whether a close by the client would be noticed by reading.
    hears_close: AtomicBool,
    order: AtomicU8,
    waker: AtomicWaker,
}

impl Watch {
    pub fn new(clock: Arc<Clock>, socket: &Arc<Socket>) -> Self {
        let watch = Self {
            clock,
            socket: Arc::downgrade(socket),
            phase: AtomicU64::new(0),
            body_since: AtomicU64::new(0),
            write_since: AtomicU64::new(0),
            hears_close: AtomicBool::new(false),
            order: AtomicU8::new(Order::Go as u8),
            waker: AtomicWaker::new(),
        };
        watch.enter(Phase::Head);
        watch
    }

    pub fn enter(&self, phase: Phase) {
        self.phase.store(self.now() << 2 | phase as u64, Relaxed);
        if phase == Phase::Handling {
            self.hears_close.store(false, Relaxed);
        }
    }

    pub fn phase(&self) -> Phase {
        self.phase_and_since().0
    }

    /// Notes that a handler waits for the body, or no longer does.
    pub fn waits_for_body(&self, waits: bool) {
        self.note(&self.body_since, waits);
    }

    /// Returns whether some of an answer is stuck on its way out.
    pub fn is_writing(&self) -> bool {
        self.write_since.load(Relaxed) != 0
    }

    /// Gives the connection an order; a stronger one stays.
    pub fn order(&self, order: Order) {
        self.order.fetch_max(order as u8, Relaxed);
        self.waker.wake();
    }

    /// Returns the order in force; the task of `cx` is woken when it changes.
    pub fn poll_order(&self, cx: &Context<'_>) -> Order {
        self.waker.register(cx.waker());
        match self.order.load(Relaxed) {
            0 => Order::Go,
            1 => Order::Finish,
            2 => Order::Close,
            _ => Order::TooSlow,
        }
    }

    /// Returns the order that this connection deserves at `now`; `look` is the time between two looks.
    pub fn judge(&self, now: u64, look: Duration, limits: &Limits) -> Order {
        let over = |since: u64, limit: Duration| {
            u128::from(now.saturating_sub(since)) > limit.saturating_add(look).as_millis()
        };
        let write_since = self.write_since.load(Relaxed);
        if write_since != 0 && over(write_since, limits.write_time) {
            return Order::Close;
        }
        let (phase, since) = self.phase_and_since();
        let body_since = self.body_since.load(Relaxed);
        match phase {
            Phase::Idle if over(since, limits.idle_time) => Order::Close,
            Phase::Head if over(since, limits.header_time) => Order::TooSlow,
            Phase::Handling if body_since != 0 && over(body_since, limits.body_time) => Order::TooSlow,
            Phase::Answering if body_since != 0 && over(body_since, limits.body_time) => Order::Close,
            Phase::Handling | Phase::Answering if self.went_unheard() => Order::Close,
            _ => Order::Go,
        }
    }

    /// Asks the kernel whether the client left: one that sent several requests at once is no longer read.
    fn went_unheard(&self) -> bool {
        !self.hears_close.load(Relaxed) && self.socket.upgrade().is_some_and(|socket| socket.peer_has_closed())
    }

    fn phase_and_since(&self) -> (Phase, u64) {
        let word = self.phase.load(Relaxed);
        let phase = match word & 3 {
            0 => Phase::Idle,
            1 => Phase::Head,
            2 => Phase::Handling,
            _ => Phase::Answering,
        };
        (phase, word >> 2)
    }

    fn now(&self) -> u64 {
        self.clock.now.load(Relaxed)
    }

    fn note(&self, since: &AtomicU64, waits: bool) {
        let noted = since.load(Relaxed) != 0;
        if noted != waits {
            since.store(if waits { self.now() } else { 0 }, Relaxed);
        }
    }

    fn note_read(&self, bytes: Poll<usize>) {
        match (self.phase(), bytes) {
            (Phase::Idle, Poll::Ready(1..)) => self.enter(Phase::Head),
            (Phase::Handling | Phase::Answering, bytes) => self.hears_close.store(bytes.is_pending(), Relaxed),
            _ => {}
        }
    }

    fn note_write(&self, stuck: bool) {
        self.note(&self.write_since, stuck);
    }
}

/// A stream that tells its watch about each read and write.
#[derive(Debug)]
pub(super) struct Watched<I> {
    pub stream: I,
    pub watch: Arc<Watch>,
}

impl<I: AsyncRead + Unpin> AsyncRead for Watched<I> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let outcome = Pin::new(&mut self.stream).poll_read(cx, buf);
        let bytes = if outcome.is_pending() { Poll::Pending } else { Poll::Ready(buf.filled().len() - before) };
        self.watch.note_read(bytes);
        outcome
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Watched<I> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch.note_write(outcome.is_pending());
        outcome
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.watch.note_write(outcome.is_pending());
        outcome
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_flush(cx);
        self.watch.note_write(outcome.is_pending());
        outcome
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.watch.note_write(outcome.is_pending());
        outcome
    }
}

/// The body of a request. A client that does not send it in time gets 408, its handler is cancelled.
#[derive(Debug)]
pub struct RequestBody {
    incoming: Incoming,
    watch: Arc<Watch>,
}

impl RequestBody {
    pub(super) fn new(incoming: Incoming, watch: Arc<Watch>) -> Self {
        Self { incoming, watch }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.incoming).poll_frame(cx);
        match &frame {
            // Noted once and kept while chunks trickle in: the time is for the whole body.
            Poll::Pending => self.watch.waits_for_body(true),
            Poll::Ready(Some(Ok(_))) if !self.incoming.is_end_stream() => {}
            Poll::Ready(_) => self.watch.waits_for_body(false),
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

impl Drop for RequestBody {
    fn drop(&mut self) {
        self.watch.waits_for_body(false);
    }
}

/// The body of an answer; when it is dropped, the connection is between two requests.
#[derive(Debug)]
pub(super) struct AnswerBody<B> {
    body: B,
    watch: Arc<Watch>,
}

impl<B> AnswerBody<B> {
    pub(super) fn new(body: B, watch: Arc<Watch>) -> Self {
        Self { body, watch }
    }
}

impl<B: Body + Unpin> Body for AnswerBody<B> {
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

impl<B> Drop for AnswerBody<B> {
    fn drop(&mut self) {
        self.watch.enter(Phase::Idle);
    }
}

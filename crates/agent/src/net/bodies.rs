//! The bodies of requests and answers, which tell the connection's watch when they begin to wait and when they end.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::watch::{Phase, Watch};

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
pub struct AnswerBody<B> {
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

//! A worker somebody has.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot, watch};

use super::error::WorkerError;
use super::owner::Message;
use super::roster::Ticket;
use super::tend::{Busy, Live, Order, Run};
use crate::limits::DEPTH;
use crate::plan::Speaks;
use crate::{Refused, WorkerId};

/// A worker somebody has, until it is given back, dropped, killed, or over a limit.
///
/// Dropped or released while it is still at work it is killed, and another takes its place.
#[derive(Debug)]
pub struct HeldWorker {
    pub(super) ticket: Ticket,
    pub(super) id: WorkerId,
    pub(super) device: Arc<str>,
    pub(super) gpu_ids: Vec<u32>,
    pub(super) speaks: Speaks,
    pub(super) live: Live,
    pub(super) orders: mpsc::UnboundedSender<Order>,
    pub(super) ended: watch::Receiver<Option<WorkerError>>,
    /// How many things it was told to do and has not done.
    pub(super) at_work: Arc<AtomicUsize>,
    pub(super) owner: mpsc::UnboundedSender<Message>,
    pub(super) is_given_back: bool,
}

impl HeldWorker {
    /// Which worker: the same for all that ever take its place.
    pub fn id(&self) -> WorkerId {
        self.id
    }

    /// What it works on.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// The GPUs it has, by their numbers on the node.
    pub fn gpu_ids(&self) -> &[u32] {
        &self.gpu_ids
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.live.pid
    }

    /// Bytes of host memory it uses now, with all it started; `None` where it has ended. Where no control group counts this
    /// looks through `/proc`, which takes about a millisecond.
    pub fn memory_usage(&self) -> Option<u64> {
        self.live.held.as_ref()?.usage().host_memory
    }

    /// How it ended, if it has, other than by being given back.
    pub fn ended(&self) -> Option<WorkerError> {
        self.ended.borrow().clone()
    }

    /// Kills it, with all it started. Another takes its place; this one can do nothing any more.
    pub fn kill(&self) {
        let _ = self.owner.send(Message::Kill(self.ticket));
    }

    /// Has it work on this; told to it at the call. Several are done one after the other. What has begun goes on when the
    /// future is dropped; what has not is not begun any more.
    pub fn run(&self, payload: Bytes) -> impl Future<Output = Result<Bytes, WorkerError>> + Send + use<> {
        let (answer, answered) = oneshot::channel();
        let taken = self.give(payload, answer);
        let ended = self.ended.clone();
        async move {
            taken?;
            tokio::select! {
                // An answer it gave before its end is its answer.
                biased;
                Ok(result) = answered => result,
                how = how_it_ended(ended) => Err(how),
            }
        }
    }

    /// Comes back when the hold is over, however, with what became of the worker; `Closed` where it was given back.
    pub fn over(&self) -> impl Future<Output = WorkerError> + Send + use<> {
        how_it_ended(self.ended.clone())
    }

    /// Comes back when a limit was passed, with which; never, while none is.
    pub fn exceeded(&self) -> impl Future<Output = WorkerError> + Send + use<> {
        let over = self.over();
        async move {
            let how = over.await;
            if !how.is_limit() {
                std::future::pending::<()>().await;
            }
            how
        }
    }

    /// Gives it back; done at the call, and seen by others when the future is over.
    pub fn release(mut self) -> impl Future<Output = ()> + Send + use<> {
        let (seen, is_seen) = oneshot::channel();
        self.give_back(Some(seen));
        async move {
            // A pool that has ended has nothing to be given back.
            let _ = is_seen.await;
        }
    }

    fn give(&self, payload: Bytes, answer: oneshot::Sender<Result<Bytes, WorkerError>>) -> Result<(), Refused> {
        self.speaks.check(&payload)?;
        if self.at_work.load(Ordering::Acquire) >= DEPTH {
            return Err(Refused::Full);
        }
        let busy = Busy::new(&self.at_work);
        // One that is gone drops the answer, and how it ended is told in its place.
        let _ = self.orders.send(Order::Run(Run { payload, answer, busy }));
        Ok(())
    }

    fn give_back(&mut self, seen: Option<oneshot::Sender<()>>) {
        if std::mem::replace(&mut self.is_given_back, true) {
            return;
        }
        let is_at_work = self.at_work.load(Ordering::Acquire) > 0;
        let _ = self.owner.send(Message::GiveBack { ticket: self.ticket, is_at_work, seen });
    }
}

impl Drop for HeldWorker {
    fn drop(&mut self) {
        self.give_back(None);
    }
}

async fn how_it_ended(mut ended: watch::Receiver<Option<WorkerError>>) -> WorkerError {
    match ended.wait_for(Option::is_some).await {
        Ok(how) => how.clone().unwrap_or(WorkerError::Closed),
        Err(_) => WorkerError::Closed,
    }
}

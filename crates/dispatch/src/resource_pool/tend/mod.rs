//! A worker's process from its start to its end, tended by one task on the owner's thread.
//!
//! It takes orders, and tells the owner what becomes of the worker: ready, over a limit, and last that it is gone. What takes
//! long (starting, seeing off) is done by threads of the runtime.

mod by_fd;
mod worker;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use gpupool_confine::bounds::{Excess, Held, Watcher};
use tokio::sync::{mpsc, oneshot};
use tokio::task::spawn_blocking;

use super::error::WorkerError;
use crate::Cause;
use crate::plan::{Place, Plan, Speaks};
use crate::process::start;
use worker::{Farewell, Worker};

/// What a worker is to do.
#[derive(Debug)]
pub(super) enum Order {
    Run(Run),
    /// Clean up and end, within so long.
    Stop(Duration),
    Kill,
    /// It used too much.
    End(Excess),
}

/// Work for a worker.
#[derive(Debug)]
pub(super) struct Run {
    pub payload: Bytes,
    pub answer: oneshot::Sender<Result<Bytes, WorkerError>>,
    pub busy: Busy,
}

/// Counts, as long as it lives, as something its holder has the worker do.
#[derive(Debug)]
pub(super) struct Busy(Arc<AtomicUsize>);

impl Busy {
    pub fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(count))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What becomes of a worker.
#[derive(Debug)]
pub(super) enum News {
    /// It is set up.
    Ready(Live),
    /// It used too much, and is being killed.
    Exceeded(Excess),
    /// It is being seen off, or died, and nobody may have it.
    Dying,
    /// It could not clean up.
    CleanUpFailed(Arc<str>),
    /// Its process is gone with all it started, or never was. The last news.
    Gone { cause: Cause, why: Arc<str>, was_ordered: bool },
}

/// What the owner knows of a process that lives.
#[derive(Debug, Clone)]
pub(super) struct Live {
    pub pid: u32,
    pub held: Option<Arc<Held>>,
}

pub(super) type NewsTo = mpsc::UnboundedSender<(usize, News)>;

/// How a process is to be started, and who hears of it.
pub(super) struct Tending {
    pub slot: usize,
    pub plan: Arc<Plan>,
    pub place: Place,
    pub watcher: Arc<Watcher>,
    pub setup_timeout: Duration,
    pub news: NewsTo,
}

impl Tending {
    /// Starts a process and tends it until it is gone.
    pub async fn tend(self, orders: mpsc::UnboundedReceiver<Order>, to_it: mpsc::WeakUnboundedSender<Order>) {
        let gone = |cause: Cause, why: Option<Arc<str>>, was_ordered| News::Gone {
            why: why.unwrap_or_else(|| cause.to_string().into()),
            cause,
            was_ordered,
        };
        let last = match self.start(to_it).await {
            Ok(worker) => {
                let Farewell { cause, setup_failure, was_ordered } = worker.live(orders).await;
                gone(cause, setup_failure, was_ordered)
            }
            Err(why) => gone(Cause::NotStarted(why.into()), None, false),
        };
        // The owner outlives all that it has tended.
        let _ = self.news.send((self.slot, last));
    }

    async fn start(&self, to_it: mpsc::WeakUnboundedSender<Order>) -> Result<Worker, String> {
        let (plan, place, watcher) = (Arc::clone(&self.plan), self.place.clone(), Arc::clone(&self.watcher));
        let on_excess = Box::new(move |excess| {
            if let Some(to_it) = to_it.upgrade() {
                let _ = to_it.send(Order::End(excess));
            }
        });
        let started = spawn_blocking(move || start(&plan, &place, &watcher, on_excess)).await;
        let process = started.map_err(|error| error.to_string())?.map_err(|reason| reason.why().to_owned())?;
        let mut worker = Worker::new(process, self).map_err(|error| error.to_string())?;
        if self.plan.program.speaks == Speaks::Lines {
            worker.is_ready();
        }
        Ok(worker)
    }
}

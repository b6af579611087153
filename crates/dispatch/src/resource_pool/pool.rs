//! The pool as its users see it.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use gpupool_confine::bounds::Watcher;
use gpupool_confine::cgroup::Cgroups;
use tokio::sync::{mpsc, oneshot, watch};

use super::audit::{AuditEntry, AuditTrail};
use super::config::ResourceConfig;
use super::error::{AcquireError, ResourceError};
use super::held::HeldWorker;
use super::leases::Leases;
use super::limits::TASK_ID_BYTES;
use super::owner::{Message, Parts, own};
use super::roster::Ticket;
use super::status::PoolStatus;
use crate::limits::{CANCEL_GRACE, DROP_PATIENCE};

/// Workers that are handed out one by one. Its futures work on any runtime, or none.
///
/// Dropping it ends the workers: they get a moment to clean up, and then are killed.
#[derive(Debug)]
pub struct ResourcePool {
    owner: mpsc::UnboundedSender<Message>,
    status: watch::Receiver<PoolStatus>,
    audit: Arc<AuditTrail>,
    next_ticket: AtomicU64,
    least: usize,
    clean_up_timeout: Duration,
    /// Hangs up when the owner has ended.
    is_over: watch::Receiver<()>,
    /// The same, for who waits without a runtime.
    is_over_too: Mutex<Receiver<()>>,
}

impl ResourcePool {
    /// Starts the least number of workers, without waiting for them: see [`ResourcePool::ready`].
    pub fn start(config: ResourceConfig) -> Result<Self, ResourceError> {
        Self::start_in(config, Cgroups::detect())
    }

    /// The same with these control groups; with [`Cgroups::none`] limits are kept by looking.
    pub fn start_in(config: ResourceConfig, cgroups: Cgroups) -> Result<Self, ResourceError> {
        config.check()?;
        let failed = |source| ResourceError::Audit { path: config.audit.clone().unwrap_or_default(), source };
        let audit = Arc::new(AuditTrail::new(config.audit.as_deref()).map_err(failed)?);
        let watcher = Watcher::start(cgroups)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (to_us, inbox) = mpsc::unbounded_channel();
        let (tells, status) = watch::channel(PoolStatus {
            // They are being started from here on.
            total_workers: if config.gpus.is_none() { config.min_workers as usize } else { 0 },
            worker_timeout: config.worker_timeout,
            worker_memory: config.worker_memory,
            ..PoolStatus::default()
        });
        let (least, clean_up_timeout) = (config.min_workers as usize, config.clean_up_timeout);
        let (tell, gpu_news) = mpsc::unbounded_channel();
        let lease = |wish| Leases::start(wish, config.max_workers, tell);
        let leases = config.gpus.clone().map(lease).transpose()?;
        let parts = Parts {
            config,
            watcher,
            audit: Arc::clone(&audit),
            status: tells,
            inbox,
            to_us: to_us.clone(),
            leases,
            gpu_news,
        };
        let (ends, is_over) = watch::channel(());
        let (ends_too, is_over_too) = sync_channel(0);
        std::thread::Builder::new().name("gpupool-workers".into()).spawn(move || {
            runtime.block_on(own(parts));
            drop(runtime);
            drop((ends, ends_too));
        })?;
        Ok(Self {
            owner: to_us,
            status,
            audit,
            next_ticket: AtomicU64::new(0),
            least,
            clean_up_timeout,
            is_over,
            is_over_too: Mutex::new(is_over_too),
        })
    }

    /// Waits in line for a worker. The place in line is taken at the call, and left when the future is dropped.
    pub fn acquire(&self, task_id: impl Into<Arc<str>>) -> Acquiring {
        let task_id = task_id.into();
        let ticket = Ticket(self.next_ticket.fetch_add(1, Ordering::Relaxed));
        let (answer, answered) = oneshot::channel();
        let owner = self.owner.clone();
        if task_id.len() > TASK_ID_BYTES {
            let _ = answer.send(Err(AcquireError::TaskId(task_id.len())));
        } else {
            // A pool that has ended drops the answer.
            let _ = owner.send(Message::Ask { ticket, task_id, answer });
        }
        Acquiring { ticket, answered, owner, is_over: false }
    }

    /// Waits until the least number of workers are set up, or says why none can be.
    pub fn ready(&self) -> impl Future<Output = Result<(), AcquireError>> + Send + use<> {
        let (mut status, least) = (self.status.clone(), self.least);
        async move {
            let is_ready = |status: &PoolStatus| status.available_workers + status.active_tasks >= least;
            let known = status.wait_for(|status| is_ready(status) || status.failure.is_some()).await;
            match known {
                Ok(status) if is_ready(&status) => Ok(()),
                Ok(status) => Err(AcquireError::NoWorker(status.failure.clone().unwrap_or_else(|| "unknown".into()))),
                Err(_) => Err(AcquireError::Closed),
            }
        }
    }

    /// How it stands.
    pub fn status(&self) -> PoolStatus {
        self.status.borrow().clone()
    }

    /// Changes of how it stands.
    pub fn watch_status(&self) -> watch::Receiver<PoolStatus> {
        self.status.clone()
    }

    /// The last holds, in the order they began.
    pub fn audit(&self) -> Vec<AuditEntry> {
        self.audit.entries()
    }

    /// Ends it: who waits is told, workers finish what they are at and clean up, or are killed when that takes too long.
    /// Begun at the call; over when no process is left.
    pub fn shutdown(&self) -> impl Future<Output = ()> + Send + use<> {
        let _ = self.owner.send(Message::ShutDown(self.clean_up_timeout));
        let mut is_over = self.is_over.clone();
        async move { while is_over.changed().await.is_ok() {} }
    }

    /// Ends it as dropping it does: workers get a moment to clean up, and then are killed. Blocks until no process is left.
    pub fn close(&self) {
        let _ = self.owner.send(Message::ShutDown(CANCEL_GRACE.min(self.clean_up_timeout)));
        let is_over = self.is_over_too.lock().unwrap_or_else(PoisonError::into_inner);
        // Nothing is ever sent: it hangs up, or takes too long.
        let _ = is_over.recv_timeout(DROP_PATIENCE);
    }
}

impl Drop for ResourcePool {
    fn drop(&mut self) {
        self.close();
    }
}

/// Somebody's place in line.
#[derive(Debug)]
#[must_use = "who does not wait leaves the line"]
pub struct Acquiring {
    ticket: Ticket,
    /// Holds the worker once it is granted: dropped, it goes back.
    answered: oneshot::Receiver<Result<HeldWorker, AcquireError>>,
    owner: mpsc::UnboundedSender<Message>,
    is_over: bool,
}

impl Future for Acquiring {
    type Output = Result<HeldWorker, AcquireError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let answered = Pin::new(&mut self.answered).poll(context);
        self.is_over = answered.is_ready();
        answered.map(|answer| answer.unwrap_or(Err(AcquireError::Closed)))
    }
}

impl Drop for Acquiring {
    fn drop(&mut self) {
        if !self.is_over {
            let _ = self.owner.send(Message::Leave(self.ticket));
        }
    }
}

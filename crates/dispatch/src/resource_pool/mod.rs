//! A resource pool: worker processes that are handed out one by one, each held to limits while somebody has it.
//!
//! - [`ResourcePoolConfig`]: how many workers, what they run, what each may use.
//! - [`ResourcePool`]: [`ResourcePool::acquire`] waits in line and gives a [`HeldWorker`].
//! - [`GpuLeaseConfig`]: a GPU of its own for each worker, from the agent of this machine.
//! - [`HeldWorker`]: work for it, its limits, and giving it back.
//! - [`AuditEntry`]: who held which worker, when, and how it ended.
//!
//! One thread for each pool (the owner) decides, by the `roster`, and keeps time: nobody who blocks a runtime can keep a limit
//! from being kept. On that thread each process has a task that tends it, from its start to its end. All of it ends with the pool.

mod allocator;
mod audit;
mod authority;
mod config;
mod worker_task;

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use gpupool_confine::bounds::BoundsWatcher;
use gpupool_confine::cgroup::CgroupManager;
use gpupool_confine::lock;
use serde::Serialize;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot, watch};

use allocator::AcquireTicket;
use audit::AuditTrail;
pub use audit::{AuditEntry, WorkerHoldEnd, WorkerHoldEndReason, read_audit_file};
pub use authority::GpuLeaseConfig;
use authority::{PoolAuthority, PoolAuthorityHandle, PoolMessage, TicketPermit};
pub use config::{AcquireError, HeldWorkerError, ResourcePoolConfig, ResourcePoolError, WorkerDevice};
use worker_task::{BusyGuard, LiveWorker, RunRequest};

use crate::limits::{CANCEL_GRACE, DROP_TIMEOUT, MAX_TASK_ID_BYTES};
pub use crate::limits::{MAX_DURATION, MAX_WAITING};
use crate::plan::WorkerProtocol;
use crate::{SubmitError, WorkerId};

/// Workers that are handed out one by one. Its futures work on any runtime, or none.
///
/// Dropping it ends the workers: they get a moment to clean up, and then are killed.
#[derive(Debug)]
pub struct ResourcePool {
    authority: PoolAuthorityHandle,
    status: watch::Receiver<ResourcePoolStatus>,
    audit: Arc<AuditTrail>,
    next_ticket: AtomicU64,
    min_workers: usize,
    clean_up_timeout: Duration,
    /// Hangs up when the owner has ended.
    has_ended: watch::Receiver<()>,
    /// The same, for who waits without a runtime.
    ended_blocking: Mutex<Receiver<()>>,
}

impl ResourcePool {
    /// Starts the least number of workers, without waiting for them: see [`ResourcePool::wait_until_ready`].
    pub fn start(config: ResourcePoolConfig) -> Result<Self, ResourcePoolError> {
        Self::start_with_cgroups(config, CgroupManager::detect())
    }

    /// The same with these control groups; with [`CgroupManager::unavailable`] limits are kept by looking.
    pub fn start_with_cgroups(config: ResourcePoolConfig, cgroups: CgroupManager) -> Result<Self, ResourcePoolError> {
        config.check()?;
        let failed = |source| ResourcePoolError::Audit { path: config.audit.clone().unwrap_or_default(), source };
        let audit = Arc::new(AuditTrail::new(config.audit.as_deref()).map_err(failed)?);
        let bounds_watcher = BoundsWatcher::start(cgroups)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (handle, inbox) = PoolAuthorityHandle::new(config.max_workers as usize);
        let (status_sender, status) = watch::channel(ResourcePoolStatus {
            // They are being started from here on.
            total_workers: if config.gpus.is_none() { config.min_workers as usize } else { 0 },
            worker_timeout: config.worker_timeout,
            worker_memory: config.worker_memory,
            ..ResourcePoolStatus::default()
        });
        let (min_workers, clean_up_timeout) = (config.min_workers as usize, config.clean_up_timeout);
        let authority = PoolAuthority::new(config, bounds_watcher, Arc::clone(&audit), status_sender, handle.clone())?;
        let (ended_sender, has_ended) = watch::channel(());
        let (ended_sender_blocking, ended_blocking) = sync_channel(0);
        // Ends with the pool, whose drop waits for it.
        std::thread::Builder::new().name("gpupool-workers".into()).spawn(move || {
            runtime.block_on(authority.run(inbox));
            drop(runtime);
            drop((ended_sender, ended_sender_blocking));
        })?;
        Ok(Self {
            authority: handle,
            status,
            audit,
            next_ticket: AtomicU64::new(0),
            min_workers,
            clean_up_timeout,
            has_ended,
            ended_blocking: Mutex::new(ended_blocking),
        })
    }

    /// Waits in line for a worker. The place in line is taken at the call, and left when the future is dropped.
    pub fn acquire(&self, task_id: impl Into<Arc<str>>) -> AcquireFuture {
        let task_id = task_id.into();
        let ticket = AcquireTicket(self.next_ticket.fetch_add(1, Ordering::Relaxed));
        let (reply, reply_receiver) = oneshot::channel();
        let authority = self.authority.clone();
        let permit = authority.admit_ticket().filter(|_| task_id.len() <= MAX_TASK_ID_BYTES);
        match &permit {
            // A pool that has ended drops the answer.
            Some(permit) => authority.send(PoolMessage::Acquire { ticket, task_id, reply, permit: Arc::clone(permit) }),
            None => {
                let too_long = task_id.len() > MAX_TASK_ID_BYTES;
                let why = if too_long { AcquireError::TaskId(task_id.len()) } else { AcquireError::TooManyWaiting };
                let _ = reply.send(Err(why));
            }
        }
        AcquireFuture { ticket, reply_receiver, authority, permit }
    }

    /// Waits until the least number of workers are set up, or says why none can be.
    pub fn wait_until_ready(&self) -> impl Future<Output = Result<(), AcquireError>> + Send + use<> {
        let (mut status, min_workers) = (self.status.clone(), self.min_workers);
        async move {
            let is_ready = |status: &ResourcePoolStatus| status.available_workers + status.active_tasks >= min_workers;
            let known = status.wait_for(|status| is_ready(status) || status.failure.is_some()).await;
            match known {
                Ok(status) if is_ready(&status) => Ok(()),
                Ok(status) => Err(AcquireError::NoWorker(status.failure.clone().unwrap_or_else(|| "unknown".into()))),
                Err(_) => Err(AcquireError::Closed),
            }
        }
    }

    /// How it stands.
    pub fn status(&self) -> ResourcePoolStatus {
        self.status.borrow().clone()
    }

    /// Changes of how it stands.
    pub fn watch_status(&self) -> watch::Receiver<ResourcePoolStatus> {
        self.status.clone()
    }

    /// The last holds, in the order they began.
    pub fn audit_entries(&self) -> Vec<AuditEntry> {
        self.audit.entries()
    }

    /// Ends it: who waits is told, workers finish what they are at and clean up, or are killed when that takes too long.
    /// Begun at the call; over when no process is left.
    pub fn shutdown(&self) -> impl Future<Output = ()> + Send + use<> {
        self.authority.shut_down(self.clean_up_timeout);
        let mut has_ended = self.has_ended.clone();
        async move { while has_ended.changed().await.is_ok() {} }
    }

    /// Ends it as dropping it does: workers get a moment to clean up, and then are killed. Blocks until no process is left.
    pub fn close(&self) {
        self.authority.shut_down(CANCEL_GRACE.min(self.clean_up_timeout));
        // Nothing is ever sent: it hangs up, or takes too long.
        let _ = lock(&self.ended_blocking).recv_timeout(DROP_TIMEOUT);
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
pub struct AcquireFuture {
    ticket: AcquireTicket,
    /// Holds the worker once it is granted: dropped, it goes back.
    reply_receiver: oneshot::Receiver<Result<HeldWorker, AcquireError>>,
    authority: PoolAuthorityHandle,
    /// `None` once it has an answer.
    permit: Option<TicketPermit>,
}

impl Future for AcquireFuture {
    type Output = Result<HeldWorker, AcquireError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let reply_receiver = Pin::new(&mut self.reply_receiver).poll(context);
        if reply_receiver.is_ready() {
            self.permit = None;
        }
        reply_receiver.map(|reply| reply.unwrap_or(Err(AcquireError::Closed)))
    }
}

impl Drop for AcquireFuture {
    fn drop(&mut self) {
        if let Some(permit) = self.permit.take() {
            self.authority.send(PoolMessage::CancelWait(self.ticket, permit));
        }
    }
}

/// A worker somebody has, until it is given back, dropped, killed, or over a limit.
///
/// Dropped or released while it is still at work it is killed, and another takes its place.
#[derive(Debug)]
pub struct HeldWorker {
    ticket: AcquireTicket,
    id: WorkerId,
    device: Arc<str>,
    gpu_ids: Vec<u32>,
    protocol: WorkerProtocol,
    live: LiveWorker,
    run_requests: mpsc::Sender<RunRequest>,
    ended: watch::Receiver<Option<HeldWorkerError>>,
    /// How many things it was told to do and has not done.
    run_count: Arc<AtomicUsize>,
    authority: PoolAuthorityHandle,
    is_killed: AtomicBool,
    /// `None` once it is given back.
    permit: Option<TicketPermit>,
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
        self.live.bounded_job.as_ref()?.usage().host_memory
    }

    /// How it ended, if it has, other than by being given back.
    pub fn ended(&self) -> Option<HeldWorkerError> {
        self.ended.borrow().clone()
    }

    /// Kills it, with all it started. Another takes its place; this one can do nothing any more.
    pub fn kill(&self) {
        if !self.is_killed.swap(true, Ordering::AcqRel) {
            self.authority.send(PoolMessage::Kill(self.ticket));
        }
    }

    /// Has it work on this; told to it at the call. Several are done one after the other. What has begun goes on when the
    /// future is dropped; what has not is not begun any more.
    pub fn run(&self, payload: Bytes) -> impl Future<Output = Result<Bytes, HeldWorkerError>> + Send + use<> {
        let (reply, reply_receiver) = oneshot::channel();
        let queued = self.queue_run(payload, reply);
        let ended = self.ended.clone();
        async move {
            queued?;
            tokio::select! {
                // An answer it gave before its end is its answer.
                biased;
                Ok(result) = reply_receiver => result,
                how = wait_for_hold_end(ended) => Err(how),
            }
        }
    }

    /// Comes back when the hold is over, however, with what became of the worker; `Closed` where it was given back.
    pub fn wait_until_ended(&self) -> impl Future<Output = HeldWorkerError> + Send + use<> {
        wait_for_hold_end(self.ended.clone())
    }

    /// Comes back when a limit was passed, with which; never, while none is.
    pub fn wait_until_exceeded(&self) -> impl Future<Output = HeldWorkerError> + Send + use<> {
        let over = self.wait_until_ended();
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
        let (released_reply, released) = oneshot::channel();
        self.return_to_pool(Some(released_reply));
        async move {
            // A pool that has ended has nothing to be given back.
            let _ = released.await;
        }
    }

    fn queue_run(
        &self,
        payload: Bytes,
        reply: oneshot::Sender<Result<Bytes, HeldWorkerError>>,
    ) -> Result<(), SubmitError> {
        self.protocol.check(&payload)?;
        let busy = BusyGuard::try_begin(&self.run_count).ok_or(SubmitError::Full)?;
        match self.run_requests.try_send(RunRequest { payload, reply, busy }) {
            Err(TrySendError::Full(_)) => Err(SubmitError::Full),
            // One that is gone drops the answer, and how it ended is told in its place.
            Ok(()) | Err(TrySendError::Closed(_)) => Ok(()),
        }
    }

    fn return_to_pool(&mut self, released_reply: Option<oneshot::Sender<()>>) {
        let Some(permit) = self.permit.take() else { return };
        let is_busy = self.run_count.load(Ordering::Acquire) > 0;
        self.authority.send(PoolMessage::Release { ticket: self.ticket, is_busy, released_reply, permit });
    }
}

impl Drop for HeldWorker {
    fn drop(&mut self) {
        self.return_to_pool(None);
    }
}

async fn wait_for_hold_end(mut ended: watch::Receiver<Option<HeldWorkerError>>) -> HeldWorkerError {
    match ended.wait_for(Option::is_some).await {
        Ok(how) => how.clone().unwrap_or(HeldWorkerError::Closed),
        Err(_) => HeldWorkerError::Closed,
    }
}

/// How a resource pool stands.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct ResourcePoolStatus {
    /// Workers there are, those that are being started or replaced included.
    pub total_workers: usize,
    /// Workers that could be had at once.
    #[serde(rename = "ready_workers")]
    pub available_workers: usize,
    /// Workers somebody has.
    pub active_tasks: usize,
    /// Those who wait for one.
    pub waiting_tasks: usize,
    /// How long a worker may be held.
    #[serde(skip)]
    pub worker_timeout: Duration,
    /// Bytes of host memory a worker may use.
    #[serde(skip)]
    pub worker_memory: Option<u64>,
    /// Who has a worker, in the order they got it.
    pub active_task_ids: Vec<Arc<str>>,
    /// Why no worker can be had: there is none, and none could be started for a while. It is tried again.
    pub failure: Option<Arc<str>>,
    /// What the last worker that could not clean up said.
    pub clean_up_failure: Option<Arc<str>>,
    /// Why the file of the audit trail is not complete.
    pub audit_failure: Option<Arc<str>>,
}

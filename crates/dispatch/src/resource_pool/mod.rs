//! A resource pool: worker processes that are acquired one by one, each held to limits during a hold.
//!
//! - [`ResourcePoolConfig`]: number, program and limits of workers.
//! - [`ResourcePool`]: [`ResourcePool::acquire`] waits in the queue and returns a [`HeldWorker`].
//! - [`GpuLeaseConfig`]: a GPU for each worker, leased from the agent of this machine.
//! - [`HeldWorker`]: runs tasks on a worker until it is released.
//! - [`AuditEntry`]: record of a hold.
//!
//! One thread per pool (the authority) applies the decisions of the `allocator` and keeps time, so a blocked runtime
//! cannot suspend a limit. On that thread, one task per process runs from its start to its end. Everything ends with
//! the pool.

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

/// Pool of workers that are acquired one by one. Its futures work on any runtime, or none.
///
/// Dropping it ends the workers: they get a moment to clean up and are then killed.
#[derive(Debug)]
pub struct ResourcePool {
    authority: PoolAuthorityHandle,
    status: watch::Receiver<ResourcePoolStatus>,
    audit: Arc<AuditTrail>,
    next_ticket: AtomicU64,
    min_workers: usize,
    clean_up_timeout: Duration,
    /// Closed when the authority has ended.
    has_ended: watch::Receiver<()>,
    /// The same for callers without a runtime.
    ended_blocking: Mutex<Receiver<()>>,
}

impl ResourcePool {
    /// Starts the minimum number of workers without waiting for them: see [`ResourcePool::wait_until_ready`].
    pub fn start(config: ResourcePoolConfig) -> Result<Self, ResourcePoolError> {
        Self::start_with_cgroups(config, CgroupManager::detect())
    }

    /// Starts with the given control groups. With [`CgroupManager::unavailable`], limits are enforced by polling.
    pub fn start_with_cgroups(config: ResourcePoolConfig, cgroups: CgroupManager) -> Result<Self, ResourcePoolError> {
        config.check()?;
        let failed = |source| ResourcePoolError::Audit { path: config.audit.clone().unwrap_or_default(), source };
        let audit = Arc::new(AuditTrail::new(config.audit.as_deref()).map_err(failed)?);
        let bounds_watcher = BoundsWatcher::start(cgroups)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (handle, inbox) = PoolAuthorityHandle::new(config.max_workers as usize);
        let (status_sender, status) = watch::channel(ResourcePoolStatus {
            // These are being started from here on.
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

    /// Waits in the queue for a worker. The call takes the queue position, and dropping the future leaves it.
    pub fn acquire(&self, task_id: impl Into<Arc<str>>) -> AcquireFuture {
        let task_id = task_id.into();
        let ticket = AcquireTicket(self.next_ticket.fetch_add(1, Ordering::Relaxed));
        let (reply, reply_receiver) = oneshot::channel();
        let authority = self.authority.clone();
        let permit = authority.admit_ticket().filter(|_| task_id.len() <= MAX_TASK_ID_BYTES);
        match &permit {
            // A pool that has ended drops the reply.
            Some(permit) => authority.send(PoolMessage::Acquire { ticket, task_id, reply, permit: Arc::clone(permit) }),
            None => {
                let too_long = task_id.len() > MAX_TASK_ID_BYTES;
                let why = if too_long { AcquireError::TaskId(task_id.len()) } else { AcquireError::TooManyWaiting };
                let _ = reply.send(Err(why));
            }
        }
        AcquireFuture { ticket, reply_receiver, authority, permit }
    }

    /// Waits until the minimum number of workers is set up. Fails if none can be.
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

    /// Returns the current status.
    pub fn status(&self) -> ResourcePoolStatus {
        self.status.borrow().clone()
    }

    /// Returns a watcher of the status.
    pub fn watch_status(&self) -> watch::Receiver<ResourcePoolStatus> {
        self.status.clone()
    }

    /// Returns the last holds in the order they began.
    pub fn audit_entries(&self) -> Vec<AuditEntry> {
        self.audit.entries()
    }

    /// Shuts the pool down: waiters are refused; workers finish their task and clean up, or are killed at the time
    /// limit. The call starts the shutdown, and the future ends when no process is left.
    pub fn shutdown(&self) -> impl Future<Output = ()> + Send + use<> {
        self.authority.shut_down(self.clean_up_timeout);
        let mut has_ended = self.has_ended.clone();
        async move { while has_ended.changed().await.is_ok() {} }
    }

    /// Shuts down as a drop does: workers get a moment to clean up and are then killed. Blocks until no process is
    /// left.
    pub fn close(&self) {
        self.authority.shut_down(CANCEL_GRACE.min(self.clean_up_timeout));
        // The channel carries no message; it closes or the wait times out.
        let _ = lock(&self.ended_blocking).recv_timeout(DROP_TIMEOUT);
    }
}

impl Drop for ResourcePool {
    fn drop(&mut self) {
        self.close();
    }
}

/// Future of an acquire.
#[derive(Debug)]
#[must_use = "dropping the future leaves the queue"]
pub struct AcquireFuture {
    ticket: AcquireTicket,
    /// Holds the worker once it is granted; dropping it returns the worker.
    reply_receiver: oneshot::Receiver<Result<HeldWorker, AcquireError>>,
    authority: PoolAuthorityHandle,
    /// `None` after the reply.
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

/// A held worker, until it is released, dropped, killed or over a limit.
///
/// If it is dropped or released while it is busy, it is killed and replaced.
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
    /// Number of unfinished runs.
    run_count: Arc<AtomicUsize>,
    authority: PoolAuthorityHandle,
    is_killed: AtomicBool,
    /// `None` after the return to the pool.
    permit: Option<TicketPermit>,
}

impl HeldWorker {
    /// Returns the worker id, which its replacements share.
    pub fn id(&self) -> WorkerId {
        self.id
    }

    /// Returns the device name.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Returns the GPUs of the worker, by their numbers on the node.
    pub fn gpu_ids(&self) -> &[u32] {
        &self.gpu_ids
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.live.pid
    }

    /// Returns the host memory that the worker and its descendants use, in bytes; `None` after its end. Without control
    /// groups this scans `/proc`, which takes about a millisecond.
    pub fn memory_usage(&self) -> Option<u64> {
        self.live.bounded_job.as_ref()?.usage().host_memory
    }

    /// Returns the error that ended the hold, other than its release.
    pub fn ended(&self) -> Option<HeldWorkerError> {
        self.ended.borrow().clone()
    }

    /// Kills the worker and its descendants. Another process replaces it, and this hold ends.
    pub fn kill(&self) {
        if !self.is_killed.swap(true, Ordering::AcqRel) {
            self.authority.send(PoolMessage::Kill(self.ticket));
        }
    }

    /// Runs a task. The call submits it, and tasks run one after the other. If the future is dropped, a started task
    /// continues and an unstarted one is skipped.
    pub fn run(&self, payload: Bytes) -> impl Future<Output = Result<Bytes, HeldWorkerError>> + Send + use<> {
        let (reply, reply_receiver) = oneshot::channel();
        let queued = self.queue_run(payload, reply);
        let ended = self.ended.clone();
        async move {
            queued?;
            tokio::select! {
                // A result that precedes the worker's end wins.
                biased;
                Ok(result) = reply_receiver => result,
                how = wait_for_hold_end(ended) => Err(how),
            }
        }
    }

    /// Waits for the end of the hold and returns its reason; `Closed` after a release.
    pub fn wait_until_ended(&self) -> impl Future<Output = HeldWorkerError> + Send + use<> {
        wait_for_hold_end(self.ended.clone())
    }

    /// Waits until a limit is exceeded and returns which; forever if none is.
    pub fn wait_until_exceeded(&self) -> impl Future<Output = HeldWorkerError> + Send + use<> {
        let ended = self.wait_until_ended();
        async move {
            let how = ended.await;
            if !how.is_limit() {
                std::future::pending::<()>().await;
            }
            how
        }
    }

    /// Releases the worker. The call releases it, and the future ends when the status shows it.
    pub fn release(mut self) -> impl Future<Output = ()> + Send + use<> {
        let (released_reply, released) = oneshot::channel();
        self.return_to_pool(Some(released_reply));
        async move {
            // A pool that has ended has nothing to release.
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
            // A worker that is gone drops the sender, and the reason of its end is returned instead.
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

/// Status of a resource pool.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct ResourcePoolStatus {
    /// Number of workers, including those that are being started or replaced.
    pub total_workers: usize,
    /// Number of workers that are free.
    #[serde(rename = "ready_workers")]
    pub available_workers: usize,
    /// Number of workers that are held.
    pub active_tasks: usize,
    /// Number of waiters.
    pub waiting_tasks: usize,
    /// Time limit of a hold.
    #[serde(skip)]
    pub worker_timeout: Duration,
    /// Limit on the host memory of a worker, in bytes.
    #[serde(skip)]
    pub worker_memory: Option<u64>,
    /// Tasks that hold a worker, in the order they got it.
    pub active_task_ids: Vec<Arc<str>>,
    /// Reason for which no worker is available: none runs, and none could be started for a while. Starts are retried.
    pub failure: Option<Arc<str>>,
    /// Reason of the last failed cleanup.
    pub clean_up_failure: Option<Arc<str>>,
    /// Reason for which the audit file is incomplete.
    pub audit_failure: Option<Arc<str>>,
}

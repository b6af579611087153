//! The authority of a pool: one loop on a separate thread that applies the decisions of the allocator.
//!
//! Requests of holders and waiters and events of processes arrive as messages. It ends when the pool is shut down and
//! every process is gone.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpupool_client::local::LocalAgent;
use gpupool_confine::bounds::BoundsWatcher;
use gpupool_confine::lock;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

use super::allocator::{AcquireRefusal, AcquireTicket, AllocatorEffect, WorkerAllocator, WorkerCondition};
use super::audit::{AuditTrail, WorkerHoldEndReason};
use super::config::worker_id;
use super::worker_task::{LiveWorker, RunRequest, WorkerEndOrder, WorkerEvent, WorkerTask};
use super::{AcquireError, HeldWorker, HeldWorkerError, ResourcePoolConfig, ResourcePoolStatus};
use crate::WorkerExitCause;
use crate::gpu_leases::{GpuError, GpuEvent, GpuEventReceiver, GpuLeaseManager, GpuRequest, GrantedLease};
use crate::limits::{MAX_SLEEP, MAX_WAITING, MAX_WORKER_QUEUE};
use crate::plan::{RunPlan, WorkerSlot};

pub(super) type AcquireReply = oneshot::Sender<Result<HeldWorker, AcquireError>>;

/// Message to the authority. Each of the first four is sent at most once per ticket.
#[derive(Debug)]
pub(super) enum PoolMessage {
    Acquire {
        ticket: AcquireTicket,
        task_id: Arc<str>,
        reply: AcquireReply,
        permit: TicketPermit,
    },
    CancelWait(AcquireTicket, TicketPermit),
    Release {
        ticket: AcquireTicket,
        is_busy: bool,
        released_reply: Option<oneshot::Sender<()>>,
        permit: TicketPermit,
    },
    Kill(AcquireTicket),
    Worker(usize, WorkerEvent),
    /// Shuts the pool down, with the time limit stored in [`PoolAuthorityHandle`].
    ShutDown,
}

/// Messages with a ticket: `Acquire`, `CancelWait`, `Kill` and `Release`.
const MESSAGES_PER_TICKET: usize = 4;
/// Events of a process. The next process of the slot starts after the last of them was handled.
const MESSAGES_PER_WORKER: usize = 5;

/// Reserves room for all messages of one ticket until the last one is handled.
pub(super) type TicketPermit = Arc<OwnedSemaphorePermit>;

/// Handle to the authority of a pool, for any thread.
///
/// Its channel has room for every possible message, so dropping a worker never waits and no message is lost: the number
/// of tickets is limited, and each kind of message is sent only once per ticket.
#[derive(Debug, Clone)]
pub(super) struct PoolAuthorityHandle {
    messages: mpsc::Sender<PoolMessage>,
    tickets: Arc<Semaphore>,
    /// Time limit of the shutdown, from the sending of [`PoolMessage::ShutDown`] until it is handled.
    shut_down: Arc<Mutex<Option<Duration>>>,
}

impl PoolAuthorityHandle {
    /// Creates a handle for a pool of so many workers, and its inbox.
    pub(super) fn new(workers: usize) -> (Self, mpsc::Receiver<PoolMessage>) {
        let tickets = MAX_WAITING + workers;
        let capacity = MESSAGES_PER_TICKET * tickets + MESSAGES_PER_WORKER * workers + 1;
        let (messages, inbox) = mpsc::channel(capacity);
        (Self { messages, tickets: Arc::new(Semaphore::new(tickets)), shut_down: Arc::default() }, inbox)
    }

    /// Admits one more ticket; `None` if too many wait.
    pub(super) fn admit_ticket(&self) -> Option<TicketPermit> {
        Arc::clone(&self.tickets).try_acquire_owned().ok().map(Arc::new)
    }

    /// Sends a message, which an authority that has ended drops.
    pub(super) fn send(&self, message: PoolMessage) {
        let sent = self.messages.try_send(message);
        debug_assert!(!matches!(sent, Err(TrySendError::Full(_))), "the inbox has room for every message");
    }

    /// Shuts the pool down. After several calls the last time limit counts.
    pub(super) fn shut_down(&self, patience: Duration) {
        if lock(&self.shut_down).replace(patience).is_none() {
            self.send(PoolMessage::ShutDown);
        }
    }
}

pub(super) struct PoolAuthority {
    config: ResourcePoolConfig,
    plan: Arc<RunPlan>,
    devices: Vec<Arc<str>>,
    gpu_leases: Option<PoolLeases>,
    watcher: Arc<BoundsWatcher>,
    allocator: WorkerAllocator,
    effects: Vec<AllocatorEffect>,
    processes: Vec<Option<SlotProcess>>,
    waiting: HashMap<AcquireTicket, (Arc<str>, AcquireReply, TicketPermit)>,
    /// In the order they began, because tickets are numbered.
    holds: BTreeMap<AcquireTicket, WorkerHold>,
    status: watch::Sender<ResourcePoolStatus>,
    audit: Arc<AuditTrail>,
    stop_timeout: Duration,
    clean_up_failure: Option<Arc<str>>,
    handle: PoolAuthorityHandle,
    /// Sent after the status shows the change.
    pending_replies: Vec<(AcquireReply, Result<HeldWorker, AcquireError>)>,
    released_replies: Vec<oneshot::Sender<()>>,
}

struct SlotProcess {
    run_requests: mpsc::Sender<RunRequest>,
    end_orders: watch::Sender<Option<WorkerEndOrder>>,
    /// Set once the worker is set up.
    live: Option<LiveWorker>,
}

struct WorkerHold {
    task_id: Arc<str>,
    ended: watch::Sender<Option<HeldWorkerError>>,
}

impl PoolAuthority {
    /// Requests GPU leases if workers need them. [`PoolAuthority::run`] starts the workers.
    pub(super) fn new(
        config: ResourcePoolConfig,
        watcher: BoundsWatcher,
        audit: Arc<AuditTrail>,
        status: watch::Sender<ResourcePoolStatus>,
        handle: PoolAuthorityHandle,
    ) -> Result<Self, GpuError> {
        let lease = |request| PoolLeases::start(request, config.max_workers);
        let gpu_leases = config.gpus.clone().map(lease).transpose()?;
        Ok(Self {
            plan: Arc::new(config.run_plan()),
            devices: match gpu_leases {
                Some(_) => vec![LEASED_DEVICE_NAME.into()],
                None => config.devices.iter().map(|device| device.name.as_str().into()).collect(),
            },
            gpu_leases,
            watcher: Arc::new(watcher),
            allocator: WorkerAllocator::new(config.allocator_rules()),
            effects: Vec::new(),
            processes: (0..config.max_workers).map(|_| None).collect(),
            waiting: HashMap::new(),
            holds: BTreeMap::new(),
            status,
            audit,
            stop_timeout: config.clean_up_timeout,
            clean_up_failure: None,
            handle,
            pending_replies: Vec::new(),
            released_replies: Vec::new(),
            config,
        })
    }

    /// Runs the pool until it is shut down.
    pub(super) async fn run(mut self, mut inbox: mpsc::Receiver<PoolMessage>) {
        self.apply_effects();
        while !self.allocator.is_over() {
            let until = self.allocator.next_deadline().unwrap_or_else(|| Instant::now() + MAX_SLEEP);
            tokio::select! {
                Some(message) = inbox.recv() => self.handle_message(message),
                Some(event) = next_gpu_event(&mut self.gpu_leases) => self.on_gpu_event(event, Instant::now()),
                () = tokio::time::sleep_until(until.into()) => {}
            }
            self.apply_effects();
        }
        // Released before the end of the pool is reported.
        drop(self.gpu_leases.take());
        self.audit.close();
    }

    fn handle_message(&mut self, message: PoolMessage) {
        let now = Instant::now();
        match message {
            PoolMessage::Acquire { ticket, task_id, reply, permit } => {
                self.waiting.insert(ticket, (task_id, reply, permit));
                self.allocator.enqueue(ticket, now, &mut self.effects);
            }
            PoolMessage::CancelWait(ticket, _permit) => {
                self.waiting.remove(&ticket);
                self.allocator.cancel_wait(ticket);
            }
            PoolMessage::Release { ticket, is_busy, released_reply, permit: _permit } => {
                if is_busy {
                    self.end_hold_and_worker(ticket, HeldWorkerError::GivenBack);
                } else if self.allocator.release_worker(ticket, WorkerCondition::Reusable, now, &mut self.effects) {
                    self.holds.remove(&ticket);
                    self.audit.end_hold(ticket.0, WorkerHoldEndReason::Released, None);
                }
                self.released_replies.extend(released_reply);
            }
            PoolMessage::Kill(ticket) => self.end_hold_and_worker(ticket, HeldWorkerError::Killed),
            PoolMessage::Worker(slot, event) => self.on_worker_event(slot, event, now),
            PoolMessage::ShutDown => {
                if let Some(patience) = lock(&self.handle.shut_down).take() {
                    self.stop_timeout = patience;
                }
                self.allocator.close(&mut self.effects);
            }
        }
    }

    fn on_worker_event(&mut self, slot: usize, event: WorkerEvent, now: Instant) {
        match event {
            WorkerEvent::Ready(live) => {
                if let Some(process) = &mut self.processes[slot] {
                    process.live = Some(live);
                }
                self.allocator.mark_ready(slot, now, &mut self.effects);
            }
            WorkerEvent::Exceeded(excess) => {
                if let Some(ticket) = self.allocator.holder(slot) {
                    self.end_hold_and_worker(ticket, HeldWorkerError::of_excess(excess));
                }
            }
            WorkerEvent::Dying => self.allocator.mark_dying(slot),
            WorkerEvent::CleanUpFailed(why) => self.clean_up_failure = Some(why),
            WorkerEvent::Gone { cause, why, was_ordered } => {
                self.processes[slot] = None;
                let failure = (!was_ordered).then_some(why);
                if let Some(ticket) = self.allocator.process_gone(slot, failure, now, &mut self.effects) {
                    self.end_hold(
                        ticket,
                        match cause {
                            WorkerExitCause::BoundExceeded(excess) => HeldWorkerError::of_excess(excess),
                            _ if was_ordered => HeldWorkerError::Closed,
                            other => HeldWorkerError::Lost(other),
                        },
                    );
                }
            }
        }
    }

    fn on_gpu_event(&mut self, event: GpuEvent, now: Instant) {
        let Some(gpu_leases) = &mut self.gpu_leases else { return };
        match event {
            GpuEvent::Granted(granted) => {
                let slot = granted.slot;
                (gpu_leases.granted[slot], gpu_leases.waiting[slot]) = (Some(granted), None);
                self.allocator.attach_device(slot, now, &mut self.effects);
            }
            GpuEvent::Lost { slot, why } => {
                gpu_leases.granted[slot] = None;
                if let Some(ticket) = self.allocator.detach_device(slot, now, &mut self.effects) {
                    self.end_hold(ticket, HeldWorkerError::Lost(WorkerExitCause::GpuWithdrawn(why.into())));
                }
            }
            GpuEvent::Refused { slot, why } => {
                gpu_leases.waiting[slot] = None;
                self.allocator.deny_device(slot, why.into(), &mut self.effects);
            }
            GpuEvent::Waiting { slot, text } => gpu_leases.waiting[slot] = Some(text.into()),
            GpuEvent::Note(_) => {}
        }
    }

    /// Applies all pending effects, then publishes the status and sends replies.
    fn apply_effects(&mut self) {
        self.allocator.advance_time(Instant::now(), &mut self.effects);
        for effect in std::mem::take(&mut self.effects) {
            self.apply_effect(effect);
        }
        self.publish_status();
        for (to, reply) in self.pending_replies.drain(..) {
            // If the waiter is gone, the dropped worker returns to the pool.
            let _ = to.send(reply);
        }
        for released_reply in self.released_replies.drain(..) {
            let _ = released_reply.send(());
        }
    }

    fn apply_effect(&mut self, effect: AllocatorEffect) {
        match effect {
            AllocatorEffect::Start(slot) => self.start_worker(slot),
            AllocatorEffect::Grant { ticket, slot } => self.grant_worker(ticket, slot),
            AllocatorEffect::Refuse { ticket, why } => {
                let Some((_, reply, _permit)) = self.waiting.remove(&ticket) else { return };
                let why = match why {
                    AcquireRefusal::Closed => AcquireError::Closed,
                    AcquireRefusal::NoWorker(why) => AcquireError::NoWorker(why),
                    AcquireRefusal::TimedOut => {
                        AcquireError::Timeout { patience: self.config.acquire_patience, why: self.no_worker_reason() }
                    }
                };
                self.pending_replies.push((reply, Err(why)));
            }
            AllocatorEffect::HoldTimedOut { ticket, slot } => {
                self.end_worker(slot, WorkerEndOrder::Kill);
                self.end_hold(ticket, HeldWorkerError::Timeout(self.config.worker_timeout));
            }
            AllocatorEffect::Stop(slot) => {
                self.end_worker(slot, WorkerEndOrder::Stop(tokio::time::Instant::now() + self.stop_timeout))
            }
            AllocatorEffect::Kill(slot) => self.end_worker(slot, WorkerEndOrder::Kill),
        }
    }

    fn start_worker(&mut self, slot: usize) {
        // Serves one holder after the other; the work of one is done before the next grant.
        let (run_requests, queued) = mpsc::channel(MAX_WORKER_QUEUE);
        let (end_orders, _) = watch::channel(None);
        let task = WorkerTask {
            slot,
            plan: Arc::clone(&self.plan),
            slot_spec: self
                .gpu_leases
                .as_ref()
                .map_or_else(|| self.config.worker_slot(slot), |gpu_leases| gpu_leases.worker_slot(slot)),
            watcher: Arc::clone(&self.watcher),
            setup_timeout: self.config.setup_timeout,
            authority: self.handle.clone(),
            run_requests: queued,
            end_orders: end_orders.clone(),
        };
        // Ends when the process is gone, which `run` waits for, on the runtime of this thread.
        tokio::spawn(task.run());
        self.processes[slot] = Some(SlotProcess { run_requests, end_orders, live: None });
    }

    fn grant_worker(&mut self, ticket: AcquireTicket, slot: usize) {
        let Some((task_id, reply, permit)) = self.waiting.remove(&ticket) else { return };
        let Some(SlotProcess { run_requests, live: Some(live), .. }) = &self.processes[slot] else { return };
        if let Some(bounded_job) = live.bounded_job.as_ref().filter(|_| self.config.worker_cpu_time.is_some()) {
            bounded_job.restart_cpu_time();
        }
        let device = Arc::clone(&self.devices[slot % self.devices.len()]);
        let id = worker_id(slot);
        self.audit.begin_hold(ticket.0, Arc::clone(&task_id), id.0, Arc::clone(&device), live.pid);
        let (end_sender, ended) = watch::channel(None);
        self.holds.insert(ticket, WorkerHold { task_id, ended: end_sender });
        let worker = HeldWorker {
            ticket,
            id,
            device,
            gpu_ids: self.gpu_ids(slot),
            protocol: self.plan.program.protocol,
            live: live.clone(),
            run_requests: run_requests.clone(),
            ended,
            run_count: Arc::new(AtomicUsize::new(0)),
            authority: self.handle.clone(),
            is_killed: AtomicBool::new(false),
            permit: Some(permit),
        };
        self.pending_replies.push((reply, Ok(worker)));
    }

    fn end_worker(&self, slot: usize, end_order: WorkerEndOrder) {
        if let Some(process) = &self.processes[slot] {
            end_order.issue(&process.end_orders);
        }
    }

    /// Ends a hold and its worker.
    fn end_hold_and_worker(&mut self, ticket: AcquireTicket, error: HeldWorkerError) {
        if self.allocator.release_worker(ticket, WorkerCondition::Unusable, Instant::now(), &mut self.effects) {
            self.end_hold(ticket, error);
        }
    }

    fn end_hold(&mut self, ticket: AcquireTicket, error: HeldWorkerError) {
        let Some(hold) = self.holds.remove(&ticket) else { return };
        let (how, why) = match &error {
            HeldWorkerError::Timeout(_) => (WorkerHoldEndReason::Timeout, None),
            HeldWorkerError::Memory(_) => (WorkerHoldEndReason::Memory, None),
            HeldWorkerError::BoundExceeded(excess) => {
                (WorkerHoldEndReason::BoundExceeded, Some(excess.to_string().into()))
            }
            HeldWorkerError::Killed => (WorkerHoldEndReason::Killed, None),
            HeldWorkerError::GivenBack => (WorkerHoldEndReason::Abandoned, None),
            HeldWorkerError::Lost(cause) => (WorkerHoldEndReason::Lost, Some(cause.to_string().into())),
            HeldWorkerError::Failed(_) | HeldWorkerError::Refused(_) | HeldWorkerError::Closed => {
                (WorkerHoldEndReason::Closed, None)
            }
        };
        self.audit.end_hold(ticket.0, how, why);
        // The holder may be gone.
        let _ = hold.ended.send(Some(error));
    }

    fn gpu_ids(&self, slot: usize) -> Vec<u32> {
        match &self.gpu_leases {
            Some(gpu_leases) => gpu_leases.gpu_ids(slot),
            None => self.config.device_of_slot(slot).gpu_ids.clone(),
        }
    }

    fn no_worker_reason(&self) -> Option<Arc<str>> {
        if self.processes.iter().flatten().any(|process| process.live.is_some()) {
            return None;
        }
        if let Some(waiting) = self.gpu_leases.as_ref().and_then(PoolLeases::waiting_text) {
            return Some(format!("waiting for a GPU: {waiting}").into());
        }
        self.allocator.last_failure().map(|why| format!("the last start failed: {why}").into())
    }

    fn publish_status(&self) {
        let status = ResourcePoolStatus {
            worker_timeout: self.config.worker_timeout,
            worker_memory: self.config.worker_memory,
            active_task_ids: self.holds.values().map(|hold| Arc::clone(&hold.task_id)).collect(),
            clean_up_failure: self.clean_up_failure.clone(),
            audit_failure: self.audit.failure(),
            ..self.allocator.status()
        };
        self.status.send_if_modified(|known| {
            let is_new = *known != status;
            *known = status;
            is_new
        });
    }
}

// Leased GPUs: each worker has its own, from the agent of this machine.
//
// They are requested when the pool starts, for the maximum number of workers, and released when this is dropped, after
// the last worker is gone.

/// Device name of a leased GPU: the worker sees no other, and frameworks use this name for all vendors.
const LEASED_DEVICE_NAME: &str = "cuda:0";

/// GPU lease of each worker.
#[derive(Debug, Clone)]
pub struct GpuLeaseConfig {
    /// Agent of this machine.
    pub agent: LocalAgent,
    /// Request body for each worker.
    pub body: gpupool_api::RequestBody,
}

/// GPU leases of a pool's workers.
#[derive(Debug)]
struct PoolLeases {
    manager: Arc<GpuLeaseManager>,
    events: GpuEventReceiver,
    granted: Vec<Option<GrantedLease>>,
    /// Wait text of each lease.
    waiting: Vec<Option<Arc<str>>>,
}

impl PoolLeases {
    /// Requests a GPU for each worker.
    fn start(request: GpuLeaseConfig, workers: u32) -> Result<Self, GpuError> {
        let slots = workers as usize;
        let GpuLeaseConfig { agent, body } = request;
        let request = GpuRequest { body, leases: slots, gpu_ids: Vec::new() };
        let (manager, events) = GpuLeaseManager::start(agent, request)?;
        Ok(Self { manager: Arc::new(manager), events, granted: vec![None; slots], waiting: vec![None; slots] })
    }

    /// Returns the text of one waiting request, if there is any.
    pub(crate) fn waiting_text(&self) -> Option<Arc<str>> {
        self.waiting.iter().flatten().next().cloned()
    }

    pub(crate) fn gpu_ids(&self, slot: usize) -> Vec<u32> {
        self.granted[slot].as_ref().map(GrantedLease::gpu_ids).unwrap_or_default()
    }

    /// Returns the worker slot with its leased GPU.
    pub(crate) fn worker_slot(&self, slot: usize) -> WorkerSlot {
        let Some(granted) = &self.granted[slot] else { return WorkerSlot::new(worker_id(slot)) };
        self.manager.worker_slot(worker_id(slot), granted)
    }
}

/// Waits for the next GPU event; forever if workers have no leases.
async fn next_gpu_event(gpu_leases: &mut Option<PoolLeases>) -> Option<GpuEvent> {
    match gpu_leases {
        Some(gpu_leases) => gpu_leases.events.next().await,
        None => std::future::pending().await,
    }
}

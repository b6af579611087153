//! Task of one worker process, from its start to its end, on the authority's thread.
//!
//! It takes orders and sends events to the authority: ready, over a limit, and last that the process is gone. Other
//! threads start and end processes, which takes long.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use gpupool_confine::bounds::{BoundExceeded, BoundedJob, BoundsWatcher};
use gpupool_confine::spawn::{Job, JobEvent};
use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, Ready};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep_until};

use super::HeldWorkerError;
use super::authority::{PoolAuthorityHandle, PoolMessage};
use crate::limits::{EXIT_TIMEOUT, MAX_WORKER_QUEUE};
use crate::plan::{RunPlan, WorkerProtocol, WorkerSlot};
use crate::process::{
    WorkerMessage, WorkerProcess, WorkerSocket, end_worker_process, parse_ready, start_worker_process,
};
use crate::protocol::{FrameKind, WorkerCounters};
use crate::{TaskId, TaskOutcome, WorkerExitCause};

/// Order to end a worker.
#[derive(Debug, Clone)]
pub(super) enum WorkerEndOrder {
    /// Clean up and exit by this time.
    Stop(Instant),
    Kill,
    /// Kill the worker because it exceeded a bound.
    Excess(BoundExceeded),
}

impl WorkerEndOrder {
    /// Issues this order. A kill replaces a stop, the first kill counts, and so does the earliest stop.
    pub(super) fn issue(self, end_orders: &watch::Sender<Option<Self>>) {
        end_orders.send_if_modified(|known| {
            let is_harder = match (&*known, &self) {
                (None, _) | (Some(Self::Stop(_)), Self::Kill | Self::Excess(_)) => true,
                (Some(Self::Stop(known)), Self::Stop(until)) => until < known,
                (Some(Self::Kill | Self::Excess(_)), _) => false,
            };
            if is_harder {
                *known = Some(self);
            }
            is_harder
        });
    }
}

/// A task for a worker.
#[derive(Debug)]
pub(super) struct RunRequest {
    pub payload: Bytes,
    pub reply: oneshot::Sender<Result<Bytes, HeldWorkerError>>,
    pub busy: BusyGuard,
}

/// Counts one unfinished run of a holder while it lives.
#[derive(Debug)]
pub(super) struct BusyGuard(Arc<AtomicUsize>);

impl BusyGuard {
    /// Counts one more run, up to [`MAX_WORKER_QUEUE`].
    pub(super) fn try_begin(count: &Arc<AtomicUsize>) -> Option<Self> {
        let one_more = |count: usize| (count < MAX_WORKER_QUEUE).then_some(count + 1);
        count.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).ok()?;
        Some(Self(Arc::clone(count)))
    }
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Event of a worker. Each is sent at most once per process.
#[derive(Debug)]
pub(super) enum WorkerEvent {
    /// The worker is set up.
    Ready(LiveWorker),
    /// The worker exceeded a bound and is being killed.
    Exceeded(BoundExceeded),
    /// The worker is ending and must not be granted any more.
    Dying,
    /// The worker failed to clean up.
    CleanUpFailed(Arc<str>),
    /// The process and its descendants are gone, or never started. The last event.
    Gone { cause: WorkerExitCause, why: Arc<str>, was_ordered: bool },
}

/// A running worker, as seen by the authority.
#[derive(Debug, Clone)]
pub(super) struct LiveWorker {
    pub pid: u32,
    pub bounded_job: Option<Arc<BoundedJob>>,
}

/// Start parameters and channels of a worker's task.
pub(super) struct WorkerTask {
    pub slot: usize,
    pub plan: Arc<RunPlan>,
    pub slot_spec: WorkerSlot,
    pub watcher: Arc<BoundsWatcher>,
    pub setup_timeout: Duration,
    pub authority: PoolAuthorityHandle,
    pub run_requests: mpsc::Receiver<RunRequest>,
    pub end_orders: watch::Sender<Option<WorkerEndOrder>>,
}

impl WorkerTask {
    /// Starts a process and runs the task until it is gone.
    pub(super) async fn run(mut self) {
        let last = match self.start().await {
            Ok(worker) => worker.run_until_gone(&mut self.run_requests, self.end_orders.subscribe()).await,
            Err(why) => gone_event(WorkerExitCause::StartFailed(why.into()), None, false),
        };
        self.authority.send(PoolMessage::Worker(self.slot, last));
    }

    async fn start(&self) -> Result<RunningWorker, String> {
        let (plan, slot_spec, watcher) = (Arc::clone(&self.plan), self.slot_spec.clone(), Arc::clone(&self.watcher));
        let end_orders = self.end_orders.clone();
        let on_excess = Box::new(move |excess| WorkerEndOrder::Excess(excess).issue(&end_orders));
        let started = spawn_blocking(move || start_worker_process(&plan, &slot_spec, &watcher, on_excess)).await;
        let process = started.map_err(|error| error.to_string())?.map_err(|reason| reason.to_string())?;
        let mut worker = RunningWorker::new(process, self).map_err(|error| error.to_string())?;
        if self.plan.program.protocol == WorkerProtocol::Lines {
            // A worker with the line protocol sends no ready message.
            worker.session.mark_ready();
        }
        Ok(worker)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PoolWorkerPhase {
    SettingUp(Instant),
    Serving,
    Stopping(Instant),
}

/// Decision to end a process.
struct EndDecision {
    /// `None` if the process exited on its own or is about to.
    cause: Option<WorkerExitCause>,
    grace: Duration,
}

impl EndDecision {
    fn killed(cause: WorkerExitCause) -> Self {
        Self { cause: Some(cause), grace: Duration::ZERO }
    }
}

/// A running worker process.
struct RunningWorker {
    job: AsyncFd<StableFd<Job>>,
    session: PoolWorkerSession,
}

/// Exchange of messages with a worker.
struct PoolWorkerSession {
    slot: usize,
    socket: AsyncFd<StableFd<WorkerSocket>>,
    counters: WorkerCounters,
    live: LiveWorker,
    phase: PoolWorkerPhase,
    setup_timeout: Duration,
    /// Task that the worker runs.
    running: Option<(TaskId, RunRequest)>,
    next_task: u64,
    queue: VecDeque<RunRequest>,
    setup_failure: Option<Arc<str>>,
    clean_up_failed: bool,
    was_ordered: bool,
    is_dead: bool,
    authority: PoolAuthorityHandle,
}

impl RunningWorker {
    pub(crate) fn new(process: WorkerProcess, task: &WorkerTask) -> io::Result<Self> {
        let WorkerProcess { job, bounded_job, socket, counters, .. } = process;
        let live = LiveWorker { pid: job.id().pid, bounded_job };
        let session = PoolWorkerSession {
            slot: task.slot,
            socket: StableFd(socket).register(Interest::READABLE | Interest::WRITABLE)?,
            counters,
            live,
            phase: PoolWorkerPhase::SettingUp(Instant::now() + task.setup_timeout),
            setup_timeout: task.setup_timeout,
            running: None,
            next_task: 0,
            queue: VecDeque::new(),
            setup_failure: None,
            clean_up_failed: false,
            was_ordered: false,
            is_dead: false,
            authority: task.authority.clone(),
        };
        Ok(Self { job: StableFd(job).register(Interest::READABLE)?, session })
    }

    /// Runs until the process is gone.
    async fn run_until_gone(
        mut self,
        run_requests: &mut mpsc::Receiver<RunRequest>,
        mut end_orders: watch::Receiver<Option<WorkerEndOrder>>,
    ) -> WorkerEvent {
        // An order issued during the start counts.
        end_orders.mark_changed();
        let EndDecision { cause, grace } = loop {
            if let Err(decision) = self.run_turn(run_requests, &mut end_orders).await {
                break decision;
            }
        };
        let Self { job, mut session } = self;
        session.is_dead = true;
        session.send_event(WorkerEvent::Dying);
        let (exit_sender, exit_receiver) = oneshot::channel();
        let bounded_job = session.live.bounded_job.clone();
        end_worker_process(job.into_inner().0, bounded_job, &mut session.socket.get_mut().0, grace, move |cause| {
            drop(exit_sender.send(cause))
        });
        let death = exit_receiver.await.unwrap_or(WorkerExitCause::Stopped);
        if !matches!(cause, Some(WorkerExitCause::ProtocolViolation(_))) {
            session.handle_remaining_messages();
        }
        gone_event(cause.unwrap_or(death), session.setup_failure, session.was_ordered)
    }

    /// Waits for the next event and handles it.
    async fn run_turn(
        &mut self,
        run_requests: &mut mpsc::Receiver<RunRequest>,
        end_orders: &mut watch::Receiver<Option<WorkerEndOrder>>,
    ) -> Result<(), EndDecision> {
        self.session.start_next_run()?;
        let until = match self.session.phase {
            PoolWorkerPhase::SettingUp(until) | PoolWorkerPhase::Stopping(until) => Some(until),
            PoolWorkerPhase::Serving => None,
        };
        let is_full = self.session.socket.get_ref().0.has_unsent();
        let interest = if is_full { Interest::READABLE | Interest::WRITABLE } else { Interest::READABLE };
        tokio::select! {
            // A run that precedes the order to stop is sent to the worker first.
            biased;
            Some(run) = run_requests.recv() => {
                self.session.queue.push_back(run);
                Ok(())
            }
            Ok(()) = end_orders.changed() => {
                let end_order = end_orders.borrow_and_update().clone();
                end_order.map_or(Ok(()), |end_order| self.session.apply_end_order(end_order))
            }
            ready = self.job.readable_mut() => match ready {
                Ok(mut guard) => match guard.get_inner_mut().0.try_next_event() {
                    Ok(None) => {
                        guard.clear_ready();
                        Ok(())
                    }
                    Ok(Some(JobEvent::Stopped(_) | JobEvent::Continued)) => Ok(()),
                    Ok(Some(JobEvent::Ended(_))) | Err(_) => Err(EndDecision { cause: None, grace: Duration::ZERO }),
                },
                Err(error) => Err(EndDecision::killed(WorkerExitCause::StartFailed(error.to_string().into()))),
            },
            ready = self.session.socket.ready_mut(interest) => {
                let is_open = match ready {
                    Ok(mut guard) => {
                        let ready = guard.ready();
                        let socket = &mut guard.get_inner_mut().0;
                        let (is_open, spent) = transfer_bytes(socket, ready);
                        guard.clear_ready_matching(spent);
                        is_open
                    }
                    Err(_) => false,
                };
                self.session.read_messages()?;
                // A worker that sends without end must not delay other workers or deadlines.
                tokio::task::yield_now().await;
                // If the process is exiting on its own, its own exit code is reported.
                if is_open { Ok(()) } else { Err(EndDecision { cause: None, grace: EXIT_TIMEOUT }) }
            }
            () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {
                if matches!(self.session.phase, PoolWorkerPhase::SettingUp(_)) {
                    self.session.setup_failure = Some(format!("setup took longer than {:?}", self.session.setup_timeout).into());
                }
                Err(EndDecision::killed(WorkerExitCause::IgnoredInterrupt))
            }
        }
    }
}

impl PoolWorkerSession {
    fn apply_end_order(&mut self, end_order: WorkerEndOrder) -> Result<(), EndDecision> {
        match end_order {
            WorkerEndOrder::Stop(until) => {
                self.was_ordered = true;
                match self.phase {
                    PoolWorkerPhase::Stopping(_) => self.phase = PoolWorkerPhase::Stopping(until),
                    PoolWorkerPhase::SettingUp(_) | PoolWorkerPhase::Serving => {
                        self.queue.clear();
                        self.phase = PoolWorkerPhase::Stopping(until);
                        self.socket.get_mut().0.queue_stop();
                        self.send_pending()?;
                    }
                }
                Ok(())
            }
            WorkerEndOrder::Kill => {
                self.was_ordered = true;
                Err(EndDecision::killed(WorkerExitCause::Stopped))
            }
            WorkerEndOrder::Excess(excess) => {
                self.send_event(WorkerEvent::Exceeded(excess.clone()));
                Err(EndDecision::killed(WorkerExitCause::BoundExceeded(excess)))
            }
        }
    }

    /// Sends the next run that is still awaited, if the worker is idle.
    fn start_next_run(&mut self) -> Result<(), EndDecision> {
        if self.running.is_some() || self.phase != PoolWorkerPhase::Serving {
            return Ok(());
        }
        while let Some(run) = self.queue.pop_front() {
            if run.reply.is_closed() {
                continue;
            }
            let task = TaskId(self.next_task);
            self.next_task += 1;
            self.socket.get_mut().0.queue_task(task, run.payload.clone());
            self.running = Some((task, run));
            return self.send_pending();
        }
        Ok(())
    }

    fn send_pending(&mut self) -> Result<(), EndDecision> {
        self.socket.get_mut().0.send_pending().map_err(|_| EndDecision { cause: None, grace: EXIT_TIMEOUT })
    }

    /// Marks the worker as set up.
    fn mark_ready(&mut self) {
        self.phase = PoolWorkerPhase::Serving;
        // A worker that died at the same moment is useless.
        if !self.is_dead {
            self.send_event(WorkerEvent::Ready(self.live.clone()));
        }
    }

    /// Handles messages that the worker sent before its exit.
    fn handle_remaining_messages(&mut self) {
        for message in self.socket.get_mut().0.remaining_messages(&self.counters) {
            if self.handle_message(message).is_err() {
                return;
            }
        }
    }

    fn send_event(&self, event: WorkerEvent) {
        self.authority.send(PoolMessage::Worker(self.slot, event));
    }

    /// Handles all received messages.
    fn read_messages(&mut self) -> Result<(), EndDecision> {
        loop {
            let handled = match self.socket.get_mut().0.next_message() {
                Ok(None) => return Ok(()),
                Ok(Some(message)) => self.handle_message(message),
                Err(violation) => Err(violation),
            };
            handled.map_err(|violation| EndDecision::killed(WorkerExitCause::ProtocolViolation(violation.into())))?;
        }
    }

    fn handle_message(&mut self, message: WorkerMessage) -> Result<(), String> {
        let frame = match message {
            WorkerMessage::Frame(frame) => frame,
            WorkerMessage::Result(outcome) => return deliver_result(&mut self.running, None, outcome),
        };
        let is_set_up = !matches!(self.phase, PoolWorkerPhase::SettingUp(_));
        match frame.kind {
            FrameKind::Ready if !is_set_up => {
                parse_ready(&frame.payload)?;
                self.mark_ready();
            }
            FrameKind::SetupFailed if !is_set_up => self.setup_failure = Some(frame.payload_text()),
            FrameKind::Done if is_set_up => {
                deliver_result(&mut self.running, Some(frame.task), TaskOutcome::Done(frame.payload))?
            }
            FrameKind::Failed if is_set_up => {
                deliver_result(&mut self.running, Some(frame.task), TaskOutcome::Failed(frame.payload))?
            }
            FrameKind::Started if is_set_up => {}
            FrameKind::CleanupFailed if is_set_up => {
                if !std::mem::replace(&mut self.clean_up_failed, true) {
                    self.send_event(WorkerEvent::CleanUpFailed(frame.payload_text()));
                }
            }
            kind => return Err(format!("it sent an unexpected {kind:?}")),
        }
        Ok(())
    }
}

/// Creates the last event of a process; `why` is the reason reported by the worker, if any.
fn gone_event(cause: WorkerExitCause, why: Option<Arc<str>>, was_ordered: bool) -> WorkerEvent {
    WorkerEvent::Gone { why: why.unwrap_or_else(|| cause.to_string().into()), cause, was_ordered }
}

/// Delivers the result of a run.
fn deliver_result(
    running: &mut Option<(TaskId, RunRequest)>,
    task: Option<TaskId>,
    outcome: TaskOutcome,
) -> Result<(), String> {
    let is_current = |(running, _): &mut (TaskId, RunRequest)| task.is_none_or(|task| task == *running);
    let Some((_, run)) = running.take_if(is_current) else {
        return Err(task.map_or("it wrote a line without a task".into(), |id| format!("it sent a result of task {id}")));
    };
    let RunRequest { reply, busy, .. } = run;
    // Dropped first, so that a holder that gets the result can return the worker.
    drop(busy);
    let _ = reply.send(match outcome {
        TaskOutcome::Done(result) => Ok(result),
        TaskOutcome::Failed(why) => Err(HeldWorkerError::Failed(why)),
        // Workers report no other outcome.
        TaskOutcome::TimedOut(_) | TaskOutcome::WorkerLost(_) | TaskOutcome::Cancelled => Err(HeldWorkerError::Killed),
    });
    Ok(())
}

/// Sends and reads what is possible now. Returns whether the socket is open, and the exhausted readiness.
fn transfer_bytes(socket: &mut WorkerSocket, ready: Ready) -> (bool, Ready) {
    let mut spent = Ready::EMPTY;
    if ready.is_writable() {
        if socket.send_pending().is_err() {
            return (false, spent);
        }
        if socket.has_unsent() {
            spent |= Ready::WRITABLE;
        }
    }
    if ready.is_readable() {
        match socket.read() {
            Ok(true) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => spent |= Ready::READABLE,
            Ok(false) | Err(_) => return (false, spent),
        }
    }
    (true, spent)
}

/// A value whose file descriptor stays open and unchanged during its lifetime. No type wrapped here ever changes its
/// descriptor.
#[derive(Debug)]
struct StableFd<T>(T);

impl<T: AsFd> StableFd<T> {
    /// Registers the descriptor with the runtime.
    #[allow(unsafe_code, reason = "registration promises that the descriptor stays open")]
    fn register(self, interest: Interest) -> io::Result<AsyncFd<Self>> {
        // SAFETY: the inner value owns its file descriptor and keeps it until it is dropped.
        unsafe { AsyncFd::register_with_interest(self, interest) }.map_err(io::Error::from)
    }
}

impl<T: AsFd> AsRawFd for StableFd<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

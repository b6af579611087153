//! The engine: one loop that performs what the scheduler decides. Starts workers, sends tasks, reads results and ends
//! processes.
//!
//! The driving thread calls [`Engine::run_turn`] repeatedly, one thread at a time. Slow operations (starting or ending
//! a process) run on short-lived threads that send a message when done.

mod queues;
mod worker_lifecycle;
mod worker_slot;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use gpupool_confine::Signal;
use gpupool_confine::bounds::BoundsWatcher;
use gpupool_confine::cgroup::CgroupManager;
use rustix::event::{Timespec, epoll};

use queues::EventQueue;
pub(crate) use queues::{EngineMailbox, EngineMessage, TaskQueue};
use worker_slot::{CounterClock, SlotRuntime, SlotStage, TaskMap, WorkerPhase};

use crate::command::CommandOutput;
use crate::event::{DispatchError, RunEvent, TaskEnd};
use crate::limits::{CANCEL_GRACE, MAX_SLEEP, UNUSED_WORKER_TIMEOUT};
use crate::plan::RunPlan;
use crate::scheduler::{SchedulerEffect, TaskScheduler};
use crate::{RunStats, WorkerExitCause, WorkerId, WorkerSlot, WorkerStats};

/// Origin of an epoll event: the wakeup descriptor, or a descriptor of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EpollSource {
    Wakeup,
    Socket(usize),
    Job(usize),
    Output(usize),
}

impl EpollSource {
    fn to_data(self) -> epoll::EventData {
        let number = match self {
            Self::Wakeup => 0,
            Self::Socket(slot) => slot << 2 | 1,
            Self::Job(slot) => slot << 2 | 2,
            Self::Output(slot) => slot << 2 | 3,
        };
        epoll::EventData::new_u64(number as u64)
    }

    fn from_data(data: epoll::EventData) -> Self {
        // The number was made from a slot index.
        let number = usize::try_from(data.u64()).unwrap_or(0);
        match number & 3 {
            1 => Self::Socket(number >> 2),
            2 => Self::Job(number >> 2),
            3 => Self::Output(number >> 2),
            _ => Self::Wakeup,
        }
    }
}

/// Condition for which the driving thread waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DriverGoal {
    Event,
    /// An event, until this time.
    EventUntil(Instant),
    /// An event, or room in the task queue.
    EventOrRoom,
    /// No wait: the driver returns at once.
    Nothing,
    /// No condition: the backup thread keeps the run going.
    Background,
    /// The end of the run, until this time.
    ShutdownUntil(Instant),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RunProgress {
    Open,
    /// All tasks have ended; the workers were ordered to stop.
    Ending,
    Over,
}

#[derive(Debug)]
pub(crate) struct Engine {
    plan: Arc<RunPlan>,
    scheduler: TaskScheduler,
    payloads: TaskMap<Bytes>,
    /// Output of commands whose tasks have not ended yet.
    outputs: TaskMap<CommandOutput>,
    slots: Vec<SlotRuntime>,
    epoll: OwnedFd,
    task_queue: Arc<TaskQueue>,
    mailbox: Arc<EngineMailbox>,
    effects: Vec<SchedulerEffect>,
    accepted: Vec<Bytes>,
    events: EventQueue,
    progress: RunProgress,
    failure: Option<DispatchError>,
    /// Whether a signal interrupted the last sleep.
    was_interrupted: bool,
    clock: CounterClock,
    /// Shared with the threads that start workers.
    watcher: Arc<BoundsWatcher>,
}

impl Engine {
    pub(crate) fn new(
        plan: RunPlan,
        task_queue: Arc<TaskQueue>,
        mailbox: Arc<EngineMailbox>,
    ) -> Result<Self, DispatchError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io::Error::from)?;
        epoll::add(&epoll, mailbox.as_fd(), EpollSource::Wakeup.to_data(), epoll::EventFlags::IN)
            .map_err(io::Error::from)?;
        let now = Instant::now();
        let mut rules = plan.rules.clone();
        // Per-task CPU time can only be measured if no other task is queued behind it.
        rules.prefetch &= !plan.counts_cpu_time_per_task();
        Ok(Self {
            scheduler: TaskScheduler::new(rules),
            payloads: TaskMap::default(),
            outputs: TaskMap::default(),
            slots: plan.slots.iter().map(|spec| SlotRuntime::new(spec.clone(), now)).collect(),
            epoll,
            task_queue,
            mailbox,
            effects: Vec::new(),
            accepted: Vec::new(),
            events: EventQueue::new(plan.order),
            progress: RunProgress::Open,
            failure: None,
            was_interrupted: false,
            clock: CounterClock::new(),
            watcher: Arc::new(BoundsWatcher::start(CgroupManager::detect())?),
            plan: Arc::new(plan),
        })
    }

    /// Performs all pending work, then sleeps until there is more or the driver's goal is reached.
    pub(crate) fn run_turn(&mut self, goal: DriverGoal) {
        if let Err(error) = self.try_run_turn(goal) {
            // Without epoll no worker can be read: end all workers and their tasks.
            self.abort_run(error);
            self.apply_effects(Instant::now());
            self.slots.clear();
            self.progress = RunProgress::Over;
        }
    }

    fn try_run_turn(&mut self, goal: DriverGoal) -> Result<(), DispatchError> {
        let now = Instant::now();
        self.handle_messages(now);
        self.accept_tasks();
        self.scheduler.assign_tasks(now, &mut self.effects);
        self.apply_effects(now);
        self.handle_deadlines(now);
        // Tasks recalled by a deadline go to other workers at once.
        self.scheduler.assign_tasks(now, &mut self.effects);
        self.apply_effects(now);
        self.send_pending();
        self.finish_if_done(now);
        if self.progress == RunProgress::Over {
            return Ok(());
        }
        self.wait_for_events(goal)
    }

    /// Returns how long to sleep. Announces the sleep before the last check for work, so that later work wakes the
    /// driver.
    fn sleep_duration(&self, goal: DriverGoal) -> Duration {
        let is_reached = match goal {
            DriverGoal::Event | DriverGoal::EventUntil(_) => self.events.ready_count() > 0,
            DriverGoal::EventOrRoom => self.events.ready_count() > 0 || self.task_queue.room() > 0,
            DriverGoal::Nothing => true,
            DriverGoal::Background | DriverGoal::ShutdownUntil(_) => false,
        };
        if is_reached {
            return Duration::ZERO;
        }
        self.mailbox.announce_sleep();
        let (waiting, undelivered) = (self.scheduler.waiting_count(), self.events.undelivered_count());
        if !self.mailbox.is_empty() || self.task_queue.has_update(waiting, undelivered, self.scheduler.is_open()) {
            return Duration::ZERO;
        }
        let until = match goal {
            DriverGoal::ShutdownUntil(until) | DriverGoal::EventUntil(until) => Some(until),
            _ => None,
        };
        let due = self.slots.iter().filter_map(SlotRuntime::deadline).chain(until).min();
        due.map_or(MAX_SLEEP, |due| due.saturating_duration_since(Instant::now()).min(MAX_SLEEP))
    }

    fn wait_for_events(&mut self, goal: DriverGoal) -> Result<(), DispatchError> {
        let timeout = self.sleep_duration(goal);
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 64];
        let timeout = Timespec { tv_sec: timeout.as_secs().cast_signed(), tv_nsec: timeout.subsec_nanos().into() };
        let woken = epoll::wait(&self.epoll, &mut events, Some(&timeout));
        self.mailbox.end_sleep();
        let ready: Vec<(EpollSource, epoll::EventFlags)> = match woken {
            Ok((ready, _)) => ready.iter().map(|event| (EpollSource::from_data(event.data), event.flags)).collect(),
            Err(rustix::io::Errno::INTR) => {
                self.was_interrupted = true;
                return Ok(());
            }
            Err(error) => return Err(io::Error::from(error).into()),
        };
        let now = Instant::now();
        for (source, flags) in ready {
            match source {
                EpollSource::Wakeup => self.mailbox.clear_wakeup(),
                EpollSource::Socket(slot) => self.on_socket_ready(slot, flags, now),
                EpollSource::Job(slot) => self.on_job_ready(slot),
                EpollSource::Output(slot) => self.read_output(slot),
            }
        }
        self.apply_effects(now);
        Ok(())
    }

    /// Moves ready events to the caller.
    pub(crate) fn take_events(&mut self, into: &mut VecDeque<RunEvent>) {
        self.events.drain_into(into);
        self.resume_output_reading();
    }

    /// Whether every task has ended and every worker has exited.
    pub(crate) fn is_finished(&self) -> bool {
        self.progress == RunProgress::Over
    }

    /// Returns and clears whether a signal interrupted a sleep.
    pub(crate) fn take_interrupt(&mut self) -> bool {
        std::mem::take(&mut self.was_interrupted)
    }

    /// Returns the error that ended the run.
    pub(crate) fn failure(&self) -> Option<&DispatchError> {
        self.failure.as_ref()
    }

    /// Returns the current statistics.
    pub(crate) fn stats(&self) -> RunStats {
        let (pending, running, _) = self.scheduler.task_counts();
        let worker = |slot: &SlotRuntime| {
            let (task, since) = self.scheduler.current_task(slot.spec.id);
            WorkerStats {
                id: slot.spec.id,
                gpu_ids: slot.spec.gpu_ids.clone(),
                state: slot.worker_state(task.is_some()),
                pid: match &slot.stage {
                    SlotStage::Running(process, _) => Some(process.job.id().pid),
                    _ => None,
                },
                task,
                task_since: since,
                completed: slot.totals.completed,
                failed: slot.totals.failed,
                timeouts: slot.totals.timeouts,
                replaced: slot.replaced,
            }
        };
        let workers = self.slots.iter().map(worker).collect();
        RunStats { pending: pending as u64, running: running as u64, workers, ..self.events.totals.clone() }
    }

    fn accept_tasks(&mut self) {
        if self.progress != RunProgress::Open {
            return;
        }
        let (waiting, undelivered) = (self.scheduler.waiting_count(), self.events.undelivered_count());
        let is_last = self.task_queue.take_tasks(&mut self.accepted, waiting, undelivered);
        self.register_payloads();
        if is_last {
            self.scheduler.close();
        }
    }

    fn accept_all_tasks(&mut self) {
        self.task_queue.close_and_drain(&mut self.accepted);
        self.register_payloads();
    }

    fn register_payloads(&mut self) {
        for payload in self.accepted.drain(..) {
            let task = self.scheduler.accept_task();
            self.payloads.insert(task, payload);
        }
    }

    fn slot_index(&self, worker: WorkerId) -> Option<usize> {
        self.slots.iter().position(|slot| slot.spec.id == worker)
    }

    fn handle_deadlines(&mut self, now: Instant) {
        for index in 0..self.slots.len() {
            if self.slots[index].deadline().is_none_or(|deadline| now < deadline) {
                continue;
            }
            match self.slots[index].stage {
                SlotStage::Waiting(until) if until <= now => self.start_process(index),
                SlotStage::Running(_, WorkerPhase::SettingUp(Some(until))) if until <= now => {
                    let limit = self.plan.setup_timeout.filter(|_| self.progress == RunProgress::Open);
                    self.slots[index].setup_failure =
                        limit.map(|limit| format!("setup took longer than {limit:?}").into());
                    self.kill_process(index, WorkerExitCause::Stopped);
                }
                SlotStage::Running(_, WorkerPhase::Serving(Some(until))) if until <= now => self.retire_worker(index),
                SlotStage::Running(_, WorkerPhase::Cancelling(until) | WorkerPhase::Stopping(until))
                    if until <= now =>
                {
                    self.kill_process(index, WorkerExitCause::IgnoredInterrupt);
                }
                _ => {}
            }
            self.check_task_timeout(index, now);
        }
        self.apply_effects(now);
    }

    /// Stops the workers when all tasks have ended, and finishes when all workers have exited.
    fn finish_if_done(&mut self, now: Instant) {
        if self.progress == RunProgress::Open && self.scheduler.is_done() {
            self.progress = RunProgress::Ending;
            for index in 0..self.slots.len() {
                match &mut self.slots[index].stage {
                    SlotStage::Waiting(_) => self.slots[index].stage = SlotStage::Gone,
                    SlotStage::Running(_, phase @ WorkerPhase::SettingUp(_)) => {
                        *phase = WorkerPhase::SettingUp(Some(now + UNUSED_WORKER_TIMEOUT));
                    }
                    SlotStage::Running(process, phase) => {
                        process.socket.queue_stop();
                        *phase = WorkerPhase::Stopping(now + self.plan.clean_up_timeout);
                    }
                    SlotStage::Starting | SlotStage::Dying(_) | SlotStage::Gone => {}
                }
            }
            self.send_pending();
        }
        if self.progress == RunProgress::Ending && self.slots.iter().all(|slot| matches!(slot.stage, SlotStage::Gone)) {
            self.progress = RunProgress::Over;
        }
    }

    /// Ends the run with an error and cancels every task.
    fn abort_run(&mut self, why: DispatchError) {
        self.failure.get_or_insert(why);
        self.accept_all_tasks();
        self.scheduler.cancel_all(&mut self.effects);
    }
}

// Messages of other threads.

impl Engine {
    pub(super) fn handle_messages(&mut self, now: Instant) {
        for message in self.mailbox.take_messages() {
            match message {
                EngineMessage::Started { slot, generation, outcome } => {
                    self.on_process_started(slot, generation, outcome, now)
                }
                EngineMessage::Reaped { slot, generation, cause } => {
                    self.on_process_reaped(slot, generation, cause, now)
                }
                EngineMessage::ExceededBound { slot, generation, excess } => {
                    if self.slots.get(slot).is_some_and(|slot| slot.generation == generation) {
                        self.kill_process(slot, WorkerExitCause::BoundExceeded(excess));
                    }
                }
                EngineMessage::ReportedExceededBound { worker, pid, excess } => {
                    let has_pid = |slot: &SlotRuntime| matches!(&slot.stage, SlotStage::Running(process, _) if process.job.id().pid == pid);
                    if let Some(index) = self.slot_index(worker).filter(|index| has_pid(&self.slots[*index])) {
                        self.kill_process(index, WorkerExitCause::BoundExceeded(excess));
                    }
                }
                EngineMessage::AddSlot(spec) => self.add_slot(spec, now),
                EngineMessage::WithdrawSlot { worker, why } => self.withdraw_slot(worker, &why),
                EngineMessage::Cancel => self.cancel_run(),
                EngineMessage::Stop => self.stop_run(now),
                EngineMessage::CancelPending => {
                    self.accept_all_tasks();
                    self.scheduler.cancel_pending(&mut self.effects);
                }
                EngineMessage::Stats(to) => {
                    // The caller may have stopped waiting.
                    let _ = to.try_send(self.stats());
                }
            }
        }
    }

    fn add_slot(&mut self, spec: WorkerSlot, now: Instant) {
        let Some(index) = self.slot_index(spec.id) else { return self.slots.push(SlotRuntime::new(spec, now)) };
        let slot = &mut self.slots[index];
        slot.spec = spec;
        (slot.withdrawn, slot.deaths) = (None, 0);
        // A slot whose process is still dying restarts when it is reaped.
        if matches!(slot.stage, SlotStage::Gone) {
            slot.stage = SlotStage::Waiting(now);
        }
    }

    fn withdraw_slot(&mut self, worker: WorkerId, why: &Arc<str>) {
        let Some(index) = self.slot_index(worker) else { return };
        self.slots[index].withdrawn = Some(Arc::clone(why));
        match &mut self.slots[index].stage {
            waiting @ SlotStage::Waiting(_) => *waiting = SlotStage::Gone,
            SlotStage::Starting => self.slots[index].is_outdated = true,
            SlotStage::Running(..) | SlotStage::Dying(_) | SlotStage::Gone => {}
        }
        self.kill_process(index, WorkerExitCause::GpuWithdrawn(Arc::clone(why)));
    }

    fn cancel_run(&mut self) {
        self.accept_all_tasks();
        self.scheduler.cancel_all(&mut self.effects);
        for index in 0..self.slots.len() {
            self.interrupt_worker(index);
            self.end_process(index, Some(WorkerExitCause::Stopped), CANCEL_GRACE);
        }
    }

    /// Cancels running tasks within the grace. Workers that comply or are idle are ordered to stop when all tasks have
    /// ended.
    fn stop_run(&mut self, now: Instant) {
        self.accept_all_tasks();
        self.scheduler.cancel_all(&mut self.effects);
        let until = now + self.plan.rules.grace;
        for index in 0..self.slots.len() {
            if self.scheduler.current_task(self.slots[index].spec.id).0.is_none() {
                continue;
            }
            if let SlotStage::Running(_, phase @ WorkerPhase::Serving(_)) = &mut self.slots[index].stage {
                *phase = WorkerPhase::Cancelling(until);
                self.interrupt_worker(index);
            }
        }
    }

    /// Makes a worker cancel its task and start no other.
    fn interrupt_worker(&mut self, index: usize) {
        let SlotStage::Running(process, _) = &self.slots[index].stage else { return };
        process.counters.mark_all_interrupted();
        let claimed = process.counters.recall_unclaimed();
        // A process that has exited needs no interrupt.
        let _ = process.job.signal(Signal::INT);
        let worker = self.slots[index].spec.id;
        if self.scheduler.can_recall(worker) {
            self.scheduler.take_back_unclaimed(worker, claimed, &mut self.effects);
        }
    }
}

// Effects of the scheduler.

impl Engine {
    pub(super) fn apply_effects(&mut self, now: Instant) {
        while !self.effects.is_empty() {
            for effect in std::mem::take(&mut self.effects) {
                match effect {
                    SchedulerEffect::Send { worker, tasks } => self.send_tasks(worker, &tasks, now),
                    SchedulerEffect::TaskEnded { task, worker, outcome, started, tries } => {
                        self.payloads.remove(&task);
                        let output = self.outputs.remove(&task);
                        if let Some(index) = worker.and_then(|worker| self.slot_index(worker)) {
                            self.slots[index].totals.count(&outcome);
                        }
                        let end = TaskEnd { task, worker, outcome, started, finished: now, tries, output };
                        self.events.push_task_end(end);
                    }
                    SchedulerEffect::TaskRetried { task, worker, outcome } => {
                        self.outputs.remove(&task);
                        if let Some(index) = self.slot_index(worker) {
                            // A retry on the same worker is reported as a new start.
                            self.slots[index].reported_task = None;
                        }
                        self.events.totals.retried += 1;
                        self.events.push_event(RunEvent::TaskRetried { task, worker, outcome });
                    }
                    SchedulerEffect::Interrupt { worker, started } => {
                        if let Some(SlotStage::Running(process, _)) =
                            self.slot_index(worker).map(|index| &self.slots[index].stage)
                        {
                            process.counters.mark_interrupted(started);
                            // A process that has exited needs no interrupt.
                            let _ = process.job.signal(Signal::INT);
                        }
                    }
                    SchedulerEffect::Recall { worker } => self.recall_tasks(worker),
                    SchedulerEffect::Kill { worker } => {
                        if let Some(index) = self.slot_index(worker) {
                            self.kill_process(index, WorkerExitCause::IgnoredInterrupt);
                        }
                    }
                }
            }
        }
    }
}

//! A run as its caller sees it: submits tasks and receives events.
//!
//! The thread that waits for events also drives the engine, so a task's way to a worker and back costs no thread
//! switch. While that thread is busy in a callback or with the source, a backup thread drives the engine: workers still
//! get tasks and time limits still hold. The backup thread ends when the dispatcher is dropped.

use std::collections::VecDeque;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use gpupool_confine::bounds::BoundExceeded;
use gpupool_confine::lock;

use crate::driver_handoff::DriverHandoff;
use crate::engine::{DriverGoal, Engine, EngineMailbox, EngineMessage, TaskQueue};
use crate::event::{DispatchError, RunError, RunEvent, SubmitError, TaskEnd};
use crate::limits::{DROP_TIMEOUT, STATS_TIMEOUT};
use crate::plan::{RunPlan, WorkerSlot};
use crate::process::spawn_without_signals;
use crate::{RunStats, TaskId, WorkerId};

/// A run. Dropping it cancels unfinished tasks and ends every worker process.
#[derive(Debug)]
pub struct Dispatcher {
    context: Arc<RunContext>,
    events: VecDeque<RunEvent>,
    backup_driver: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct RunContext {
    engine: Mutex<Engine>,
    task_queue: Arc<TaskQueue>,
    mailbox: Arc<EngineMailbox>,
    handoff: DriverHandoff,
}

impl Dispatcher {
    /// Starts the workers of the plan. Tasks may be submitted at once; they wait for the first worker that is set up.
    pub fn start(plan: RunPlan) -> Result<Self, DispatchError> {
        plan.check()?;
        spawn_without_signals(|| Self::start_threads(plan))
    }

    fn start_threads(plan: RunPlan) -> Result<Self, DispatchError> {
        let mailbox = Arc::new(EngineMailbox::new()?);
        let task_queue = Arc::new(TaskQueue::new(plan.program.protocol, plan.rules.queue_size));
        let engine = Mutex::new(Engine::new(plan, Arc::clone(&task_queue), Arc::clone(&mailbox))?);
        let context = Arc::new(RunContext { engine, task_queue, mailbox, handoff: DriverHandoff::default() });
        let backup_context = Arc::clone(&context);
        // Joined when the dispatcher is dropped.
        let backup_driver = std::thread::Builder::new()
            .name("gpupool-backup".into())
            .spawn(move || backup_context.run_backup_driver())?;
        Ok(Self { context, events: VecDeque::new(), backup_driver: Some(backup_driver) })
    }

    /// Returns a handle with which other threads submit tasks, end the run or read its statistics.
    pub fn handle(&self) -> RunHandle {
        RunHandle { context: Arc::clone(&self.context) }
    }

    /// Submits a task. Fails if the queue is full.
    pub fn submit(&self, payload: Bytes) -> Result<TaskId, SubmitError> {
        self.context.try_push(payload)
    }

    /// Returns the number of tasks that can be submitted now.
    pub fn queue_room(&self) -> usize {
        self.context.task_queue.room()
    }

    /// Whether an event is available already, so that work on earlier events can wait.
    pub fn has_event(&self) -> bool {
        !self.events.is_empty()
    }

    /// Ends the input: no more tasks follow.
    pub fn close(&self) {
        self.context.close();
    }

    /// Waits for the next event. Returns `None` when every task has ended and every worker has exited.
    pub fn next_event(&mut self) -> Option<RunEvent> {
        if self.events.is_empty() {
            self.drive(false);
        }
        self.events.pop_front()
    }

    /// Waits up to `patience` for the next event, for callers that handle signals themselves. Returns `None` on
    /// timeout, when a signal interrupts this thread, or when the run has ended ([`Dispatcher::is_finished`]).
    pub fn next_event_timeout(&mut self, patience: Duration) -> Option<RunEvent> {
        let until = Instant::now() + patience;
        let mut guard = self.context.lock_engine();
        let engine = &mut guard.engine;
        loop {
            engine.take_events(&mut self.events);
            let event = self.events.pop_front();
            if event.is_some() || engine.is_finished() || engine.take_interrupt() || Instant::now() >= until {
                return event;
            }
            engine.run_turn(DriverGoal::EventUntil(until));
        }
    }

    /// Whether every task has ended and every worker has exited. Events may still wait to be taken.
    pub fn is_finished(&self) -> bool {
        self.context.is_finished()
    }

    /// Returns the events since the last call, without waiting.
    pub fn take_events(&mut self) -> Vec<RunEvent> {
        let mut guard = self.context.lock_engine();
        let engine = &mut guard.engine;
        engine.run_turn(DriverGoal::Nothing);
        engine.take_events(&mut self.events);
        drop(guard);
        self.events.drain(..).collect()
    }

    /// Returns the current statistics.
    pub fn stats(&self) -> RunStats {
        self.context.lock_engine().engine.stats()
    }

    /// Submits all tasks of the source and passes every event to `on_event`, in this thread. An error of the source
    /// ends the run after the tasks submitted before it.
    pub fn run<E>(
        mut self,
        source: impl IntoIterator<Item = Result<Bytes, E>>,
        mut on_event: impl FnMut(RunEvent),
    ) -> Result<RunStats, RunError<E>> {
        let mut source = Some(source.into_iter());
        let mut failure = None;
        // A task that was read from the source when the queue had room, but could not be submitted a moment later.
        let mut deferred = None;
        loop {
            while let Some(tasks) = source.as_mut().filter(|_| self.queue_room() > 0) {
                match deferred.take().or_else(|| tasks.next()) {
                    Some(Ok(payload)) => match self.submit(payload.clone()) {
                        Ok(_) => continue,
                        // The queue filled up or closed meanwhile: submit again, or count as cancelled.
                        Err(SubmitError::Full | SubmitError::Closed) => {
                            deferred = Some(Ok(payload));
                            continue;
                        }
                        Err(refused) => failure = Some(RunError::Refused(refused)),
                    },
                    Some(Err(error)) => failure = Some(RunError::Source(error)),
                    None => {}
                }
                source = None;
                self.close();
            }
            self.drive(source.is_some());
            if self.events.is_empty() && self.context.is_finished() {
                break;
            }
            while let Some(event) = self.events.pop_front() {
                on_event(event);
            }
        }
        let dropped = u64::from(deferred.is_some());
        if deferred.is_some() {
            on_event(RunEvent::TaskEnded(TaskEnd::never_started(self.context.task_queue.next_task_id())));
        }
        match failure {
            Some(error) => Err(error),
            None => {
                let stats = self.finish().map_err(RunError::Dispatch)?;
                Ok(RunStats { cancelled: stats.cancelled + dropped, ..stats })
            }
        }
    }

    /// Waits for the end of the run and returns its statistics. Discards events that were not taken.
    pub fn finish(mut self) -> Result<RunStats, DispatchError> {
        self.close();
        while self.next_event().is_some() {}
        let engine = &self.context.lock_engine().engine;
        match engine.failure() {
            Some(failure) => Err(failure.clone()),
            None => Ok(engine.stats()),
        }
    }

    /// Drives the engine until an event is available, the queue has room (with `wants_room`), or the run has ended.
    fn drive(&mut self, wants_room: bool) {
        let mut guard = self.context.lock_engine();
        let engine = &mut guard.engine;
        loop {
            engine.take_events(&mut self.events);
            if !self.events.is_empty() || engine.is_finished() || (wants_room && self.context.task_queue.room() > 0) {
                return;
            }
            engine.run_turn(if wants_room { DriverGoal::EventOrRoom } else { DriverGoal::Event });
        }
    }
}

impl Drop for Dispatcher {
    fn drop(&mut self) {
        let until = Instant::now() + DROP_TIMEOUT;
        if !self.context.is_finished() {
            self.context.mailbox.send(EngineMessage::Cancel);
            let mut guard = self.context.lock_engine();
            let engine = &mut guard.engine;
            while !engine.is_finished() && Instant::now() < until {
                engine.take_events(&mut self.events);
                self.events.clear();
                engine.run_turn(DriverGoal::ShutdownUntil(until));
            }
        }
        self.context.handoff.shut_down();
        self.context.mailbox.force_wakeup();
        if let Some(backup_driver) = self.backup_driver.take() {
            // A panic of the thread was reported by its own message.
            let _ = backup_driver.join();
        }
    }
}

/// A handle to a run for other threads.
#[derive(Debug, Clone)]
pub struct RunHandle {
    context: Arc<RunContext>,
}

impl RunHandle {
    /// Submits a task and waits for room in the queue. The thread that takes the events must not call this: it would
    /// deadlock.
    pub fn submit_blocking(&self, payload: Bytes) -> Result<TaskId, SubmitError> {
        let task = self.context.task_queue.push_task(payload, true)?;
        self.context.mailbox.wake_driver();
        Ok(task)
    }

    /// Submits a task. Fails if the queue is full.
    pub fn submit(&self, payload: Bytes) -> Result<TaskId, SubmitError> {
        self.context.try_push(payload)
    }

    /// Ends the input: no more tasks follow.
    pub fn close(&self) {
        self.context.close();
    }

    /// Stops the run early: unfinished tasks are cancelled, and the workers clean up and exit as at a regular end. A
    /// worker that does not give up its task within the grace is killed.
    pub fn stop(&self) {
        self.context.mailbox.send(EngineMessage::Stop);
    }

    /// Cancels the run now: workers are interrupted and shortly after killed; unfinished tasks are cancelled.
    pub fn cancel(&self) {
        self.context.mailbox.send(EngineMessage::Cancel);
    }

    /// Cancels waiting tasks; running tasks continue.
    pub fn cancel_pending(&self) {
        self.context.mailbox.send(EngineMessage::CancelPending);
    }

    /// Adds a worker slot, or restores one that was withdrawn.
    pub fn add_worker(&self, slot: WorkerSlot) {
        self.context.mailbox.send(EngineMessage::AddSlot(slot));
    }

    /// Withdraws a worker slot: its worker is killed, and other workers run its tasks.
    pub fn withdraw_worker(&self, worker: WorkerId, why: impl Into<Arc<str>>) {
        self.context.mailbox.send(EngineMessage::WithdrawSlot { worker, why: why.into() });
    }

    /// Reports that a worker exceeded a bound. Its process with this pid is killed and replaced.
    pub fn report_exceeded_bound(&self, worker: WorkerId, pid: u32, excess: BoundExceeded) {
        self.context.mailbox.send(EngineMessage::ReportedExceededBound { worker, pid, excess });
    }

    /// Returns the current statistics.
    pub fn stats(&self) -> RunStats {
        loop {
            match self.context.engine.try_lock() {
                Ok(engine) => return engine.stats(),
                Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner().stats(),
                Err(TryLockError::WouldBlock) => {}
            }
            let (to, from) = sync_channel(1);
            self.context.mailbox.send(EngineMessage::Stats(to));
            if let Ok(stats) = from.recv_timeout(STATS_TIMEOUT) {
                return stats;
            }
        }
    }
}

impl RunContext {
    fn try_push(&self, payload: Bytes) -> Result<TaskId, SubmitError> {
        let task = self.task_queue.push_task(payload, false)?;
        self.mailbox.wake_driver();
        Ok(task)
    }

    fn close(&self) {
        self.task_queue.close();
        self.mailbox.wake_driver();
    }

    fn is_finished(&self) -> bool {
        self.lock_engine().engine.is_finished()
    }

    /// Makes the caller the driver and locks the engine.
    fn lock_engine(&self) -> EngineGuard<'_> {
        if self.handoff.begin_caller_turn() {
            self.mailbox.force_wakeup();
        }
        // A panic in the engine was already reported; the rest of the run must still be ended.
        EngineGuard { engine: lock(&self.engine), handoff: &self.handoff }
    }

    /// Drives the engine while the caller stays away past the delay.
    fn run_backup_driver(&self) {
        self.handoff.run_backup_driver(|| {
            let mut engine = lock(&self.engine);
            while !self.handoff.must_backup_yield() && !engine.is_finished() {
                engine.run_turn(DriverGoal::Background);
            }
            engine.is_finished()
        });
    }
}

/// Locked engine while the caller drives it.
struct EngineGuard<'a> {
    engine: MutexGuard<'a, Engine>,
    handoff: &'a DriverHandoff,
}

impl Drop for EngineGuard<'_> {
    fn drop(&mut self) {
        self.handoff.end_caller_turn();
    }
}

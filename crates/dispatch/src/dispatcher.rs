//! A run from the outside: tasks in, events out.
//!
//! Whoever waits for events drives the engine, in its own thread: a task's way to a worker and back costs no more than that.
//! While that thread is away, in a callback or reading the source, another one (the relief) drives: workers get their tasks
//! and time limits hold whatever a callback does. The relief ends when the dispatcher is dropped.

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

/// A run. Dropping it ends it: what is not over is cancelled, and no process is left.
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
    /// Starts the workers of the plan. Tasks may be put at once; they wait for the first worker that is set up.
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
            .name("gpupool-relief".into())
            .spawn(move || backup_context.run_backup_driver())?;
        Ok(Self { context, events: VecDeque::new(), backup_driver: Some(backup_driver) })
    }

    /// What other threads need to feed it, to end it, or to know how it stands.
    pub fn handle(&self) -> RunHandle {
        RunHandle { context: Arc::clone(&self.context) }
    }

    /// Puts a task; refused where the queue is full.
    pub fn submit(&self, payload: Bytes) -> Result<TaskId, SubmitError> {
        self.context.try_push(payload)
    }

    /// How many tasks can be put now.
    pub fn queue_room(&self) -> usize {
        self.context.task_queue.room()
    }

    /// Whether the next thing has happened already: what was collected from earlier ones can wait for it.
    pub fn has_event(&self) -> bool {
        !self.events.is_empty()
    }

    /// No more tasks come.
    pub fn close(&self) {
        self.context.close();
    }

    /// The next thing that happens; `None` when every task is over and every worker gone. Waits for it.
    pub fn next_event(&mut self) -> Option<RunEvent> {
        if self.events.is_empty() {
            self.drive(false);
        }
        self.events.pop_front()
    }

    /// The next thing that happens, if it happens soon; `None` as well when this thread is interrupted by a signal, or when all
    /// is over ([`Dispatcher::is_finished`]). For callers that have to look after their signals.
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

    /// Whether every task is over and every worker gone; events may still wait to be taken.
    pub fn is_finished(&self) -> bool {
        self.context.is_finished()
    }

    /// What happened since it was last asked, without waiting.
    pub fn take_events(&mut self) -> Vec<RunEvent> {
        let mut guard = self.context.lock_engine();
        let engine = &mut guard.engine;
        engine.run_turn(DriverGoal::Nothing);
        engine.take_events(&mut self.events);
        drop(guard);
        self.events.drain(..).collect()
    }

    /// How things stand.
    pub fn stats(&self) -> RunStats {
        self.context.lock_engine().engine.stats()
    }

    /// Puts all of the source and tells all that happens, in this thread. An error of the source ends it, when what was taken
    /// in before is over.
    pub fn run<E>(
        mut self,
        source: impl IntoIterator<Item = Result<Bytes, E>>,
        mut on_event: impl FnMut(RunEvent),
    ) -> Result<RunStats, RunError<E>> {
        let mut source = Some(source.into_iter());
        let mut failure = None;
        // Taken from the source when there was room, which was filled, or not wanted any more, a moment later.
        let mut deferred = None;
        loop {
            while let Some(tasks) = source.as_mut().filter(|_| self.queue_room() > 0) {
                match deferred.take().or_else(|| tasks.next()) {
                    Some(Ok(payload)) => match self.submit(payload.clone()) {
                        Ok(_) => continue,
                        // Both are put again, or are too late.
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

    /// Waits until all is over, and says how it went. Events that were not taken are not told.
    pub fn finish(mut self) -> Result<RunStats, DispatchError> {
        self.close();
        while self.next_event().is_some() {}
        let engine = &self.context.lock_engine().engine;
        match engine.failure() {
            Some(failure) => Err(failure.clone()),
            None => Ok(engine.stats()),
        }
    }

    /// Drives until there is something to tell, room for more tasks where `feeds`, or all is over.
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
            // One that panicked has been seen to by the panic's own message.
            let _ = backup_driver.join();
        }
    }
}

/// A run from other threads.
#[derive(Debug, Clone)]
pub struct RunHandle {
    context: Arc<RunContext>,
}

impl RunHandle {
    /// Puts a task, and waits for room. Not to be called by the thread that takes the events: it would wait for itself.
    pub fn submit_blocking(&self, payload: Bytes) -> Result<TaskId, SubmitError> {
        let task = self.context.task_queue.push_task(payload, true)?;
        self.context.mailbox.wake_driver();
        Ok(task)
    }

    /// Puts a task; refused where the queue is full.
    pub fn submit(&self, payload: Bytes) -> Result<TaskId, SubmitError> {
        self.context.try_push(payload)
    }

    /// No more tasks come.
    pub fn close(&self) {
        self.context.close();
    }

    /// Ends the run before its time: what is not over is cancelled, and the workers clean up and end as they do when all is
    /// done. One that does not give up its task within the grace is killed.
    pub fn stop(&self) {
        self.context.mailbox.send(EngineMessage::Stop);
    }

    /// Ends everything now: workers are interrupted and shortly after killed; what is not over is cancelled.
    pub fn cancel(&self) {
        self.context.mailbox.send(EngineMessage::Cancel);
    }

    /// Begins nothing any more: what waits is cancelled, what runs goes on.
    pub fn cancel_pending(&self) {
        self.context.mailbox.send(EngineMessage::CancelPending);
    }

    /// Another worker, or one whose place had been taken away.
    pub fn add_worker(&self, slot: WorkerSlot) {
        self.context.mailbox.send(EngineMessage::AddSlot(slot));
    }

    /// Takes a worker's place away: it is killed, and its tasks are done by others.
    pub fn withdraw_worker(&self, worker: WorkerId, why: impl Into<Arc<str>>) {
        self.context.mailbox.send(EngineMessage::WithdrawSlot { worker, why: why.into() });
    }

    /// A worker used more than it may, as somebody else found: its process of this number is killed and replaced.
    pub fn report_exceeded_bound(&self, worker: WorkerId, pid: u32, excess: BoundExceeded) {
        self.context.mailbox.send(EngineMessage::ReportedExceededBound { worker, pid, excess });
    }

    /// How things stand.
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

    /// The caller drives from now on.
    fn lock_engine(&self) -> EngineGuard<'_> {
        if self.handoff.begin_caller_turn() {
            self.mailbox.force_wakeup();
        }
        // A panic in the engine is ours, and has been told; what is left is still to be ended.
        EngineGuard { engine: lock(&self.engine), handoff: &self.handoff }
    }

    /// Drives whenever the caller is away for longer than a moment.
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

/// The engine, while the caller drives it.
struct EngineGuard<'a> {
    engine: MutexGuard<'a, Engine>,
    handoff: &'a DriverHandoff,
}

impl Drop for EngineGuard<'_> {
    fn drop(&mut self) {
        self.handoff.end_caller_turn();
    }
}

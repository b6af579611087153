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

use crate::engine::{Driver, Engine, Feed, Message, Post};
use crate::event::{DispatchError, RunError, RunEvent, SubmitError, TaskEnd};
use crate::limits::{DROP_PATIENCE, STATS_PATIENCE};
use crate::plan::{RunPlan, WorkerSlot};
use crate::process::untaken_by_threads_of;
use crate::shift::Shift;
use crate::{RunStats, TaskId, WorkerId};

/// A run. Dropping it ends it: what is not over is cancelled, and no process is left.
#[derive(Debug)]
pub struct Dispatcher {
    shared: Arc<Shared>,
    events: VecDeque<RunEvent>,
    relief: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    engine: Mutex<Engine>,
    feed: Arc<Feed>,
    post: Arc<Post>,
    shift: Shift,
}

impl Dispatcher {
    /// Starts the workers of the plan. Tasks may be put at once; they wait for the first worker that is set up.
    pub fn start(plan: RunPlan) -> Result<Self, DispatchError> {
        plan.check()?;
        untaken_by_threads_of(|| Self::with_threads(plan))
    }

    fn with_threads(plan: RunPlan) -> Result<Self, DispatchError> {
        let post = Arc::new(Post::new()?);
        let feed = Arc::new(Feed::new(plan.program.speaks, plan.rules.queue_size));
        let engine = Mutex::new(Engine::new(plan, Arc::clone(&feed), Arc::clone(&post))?);
        let shared = Arc::new(Shared { engine, feed, post, shift: Shift::default() });
        let for_relief = Arc::clone(&shared);
        // Joined when the dispatcher is dropped.
        let relief = std::thread::Builder::new().name("gpupool-relief".into()).spawn(move || for_relief.relieve())?;
        Ok(Self { shared, events: VecDeque::new(), relief: Some(relief) })
    }

    /// What other threads need to feed it, to end it, or to know how it stands.
    pub fn handle(&self) -> RunHandle {
        RunHandle { shared: Arc::clone(&self.shared) }
    }

    /// Puts a task; refused where the queue is full.
    pub fn submit(&self, payload: Bytes) -> Result<TaskId, SubmitError> {
        self.shared.try_push(payload)
    }

    /// How many tasks can be put now.
    pub fn queue_room(&self) -> usize {
        self.shared.feed.room()
    }

    /// Whether the next thing has happened already: what was collected from earlier ones can wait for it.
    pub fn has_event(&self) -> bool {
        !self.events.is_empty()
    }

    /// No more tasks come.
    pub fn close(&self) {
        self.shared.close();
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
        let mut driving = self.shared.enter();
        let engine = &mut driving.engine;
        loop {
            engine.take_events(&mut self.events);
            let event = self.events.pop_front();
            if event.is_some() || engine.is_over() || engine.take_interrupt() || Instant::now() >= until {
                return event;
            }
            engine.turn(Driver::Watcher(until));
        }
    }

    /// Whether every task is over and every worker gone; events may still wait to be taken.
    pub fn is_finished(&self) -> bool {
        self.shared.is_over()
    }

    /// What happened since it was last asked, without waiting.
    pub fn take_events(&mut self) -> Vec<RunEvent> {
        let mut driving = self.shared.enter();
        let engine = &mut driving.engine;
        engine.turn(Driver::Passer);
        engine.take_events(&mut self.events);
        drop(driving);
        self.events.drain(..).collect()
    }

    /// How things stand.
    pub fn stats(&self) -> RunStats {
        self.shared.enter().engine.stats()
    }

    /// Puts all of the source and tells all that happens, in this thread. An error of the source ends it, when what was taken
    /// in before is over.
    pub fn run<E>(
        mut self,
        source: impl IntoIterator<Item = Result<Bytes, E>>,
        mut on_event: impl FnMut(RunEvent),
    ) -> Result<RunStats, RunError<E>> {
        let mut source = Some(source.into_iter());
        let mut failed = None;
        // Taken from the source when there was room, which was filled, or not wanted any more, a moment later.
        let mut put_off = None;
        loop {
            while let Some(tasks) = source.as_mut().filter(|_| self.queue_room() > 0) {
                match put_off.take().or_else(|| tasks.next()) {
                    Some(Ok(payload)) => match self.submit(payload.clone()) {
                        Ok(_) => continue,
                        // Both are put again, or are too late.
                        Err(SubmitError::Full | SubmitError::Closed) => {
                            put_off = Some(Ok(payload));
                            continue;
                        }
                        Err(refused) => failed = Some(RunError::Refused(refused)),
                    },
                    Some(Err(error)) => failed = Some(RunError::Source(error)),
                    None => {}
                }
                source = None;
                self.close();
            }
            self.drive(source.is_some());
            if self.events.is_empty() && self.shared.is_over() {
                break;
            }
            while let Some(event) = self.events.pop_front() {
                on_event(event);
            }
        }
        let too_late = u64::from(put_off.is_some());
        if put_off.is_some() {
            on_event(RunEvent::TaskEnded(TaskEnd::never_begun(self.shared.feed.next())));
        }
        match failed {
            Some(error) => Err(error),
            None => {
                let stats = self.finish().map_err(RunError::Dispatch)?;
                Ok(RunStats { cancelled: stats.cancelled + too_late, ..stats })
            }
        }
    }

    /// Waits until all is over, and says how it went. Events that were not taken are not told.
    pub fn finish(mut self) -> Result<RunStats, DispatchError> {
        self.close();
        while self.next_event().is_some() {}
        let engine = &self.shared.enter().engine;
        match engine.failure() {
            Some(failure) => Err(failure.clone()),
            None => Ok(engine.stats()),
        }
    }

    /// Drives until there is something to tell, room for more tasks where `feeds`, or all is over.
    fn drive(&mut self, feeds: bool) {
        let mut driving = self.shared.enter();
        let engine = &mut driving.engine;
        loop {
            engine.take_events(&mut self.events);
            if !self.events.is_empty() || engine.is_over() || (feeds && self.shared.feed.room() > 0) {
                return;
            }
            engine.turn(if feeds { Driver::Feeder } else { Driver::Listener });
        }
    }
}

impl Drop for Dispatcher {
    fn drop(&mut self) {
        let until = Instant::now() + DROP_PATIENCE;
        if !self.shared.is_over() {
            self.shared.post.send(Message::Cancel);
            let mut driving = self.shared.enter();
            let engine = &mut driving.engine;
            while !engine.is_over() && Instant::now() < until {
                engine.take_events(&mut self.events);
                self.events.clear();
                engine.turn(Driver::Leaver(until));
            }
        }
        self.shared.shift.end();
        self.shared.post.ring();
        if let Some(relief) = self.relief.take() {
            // One that panicked has been seen to by the panic's own message.
            let _ = relief.join();
        }
    }
}

/// A run from other threads.
#[derive(Debug, Clone)]
pub struct RunHandle {
    shared: Arc<Shared>,
}

impl RunHandle {
    /// Puts a task, and waits for room. Not to be called by the thread that takes the events: it would wait for itself.
    pub fn submit_blocking(&self, payload: Bytes) -> Result<TaskId, SubmitError> {
        let task = self.shared.feed.put(payload, true)?;
        self.shared.post.wake();
        Ok(task)
    }

    /// Puts a task; refused where the queue is full.
    pub fn submit(&self, payload: Bytes) -> Result<TaskId, SubmitError> {
        self.shared.try_push(payload)
    }

    /// No more tasks come.
    pub fn close(&self) {
        self.shared.close();
    }

    /// Ends the run before its time: what is not over is cancelled, and the workers clean up and end as they do when all is
    /// done. One that does not give up its task within the grace is killed.
    pub fn stop(&self) {
        self.shared.post.send(Message::Stop);
    }

    /// Ends everything now: workers are interrupted and shortly after killed; what is not over is cancelled.
    pub fn cancel(&self) {
        self.shared.post.send(Message::Cancel);
    }

    /// Begins nothing any more: what waits is cancelled, what runs goes on.
    pub fn cancel_pending(&self) {
        self.shared.post.send(Message::FinishSoon);
    }

    /// Another worker, or one whose place had been taken away.
    pub fn add_worker(&self, place: WorkerSlot) {
        self.shared.post.send(Message::Add(place));
    }

    /// Takes a worker's place away: it is killed, and its tasks are done by others.
    pub fn withdraw_worker(&self, worker: WorkerId, why: impl Into<Arc<str>>) {
        self.shared.post.send(Message::Withdraw { worker, why: why.into() });
    }

    /// A worker used more than it may, as somebody else found: its process of this number is killed and replaced.
    pub fn report_exceeded_bound(&self, worker: WorkerId, pid: u32, excess: BoundExceeded) {
        self.shared.post.send(Message::ReportedExcess { worker, pid, excess });
    }

    /// How things stand.
    pub fn stats(&self) -> RunStats {
        loop {
            match self.shared.engine.try_lock() {
                Ok(engine) => return engine.stats(),
                Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner().stats(),
                Err(TryLockError::WouldBlock) => {}
            }
            let (to, from) = sync_channel(1);
            self.shared.post.send(Message::Stats(to));
            if let Ok(stats) = from.recv_timeout(STATS_PATIENCE) {
                return stats;
            }
        }
    }
}

impl Shared {
    fn try_push(&self, payload: Bytes) -> Result<TaskId, SubmitError> {
        let task = self.feed.put(payload, false)?;
        self.post.wake();
        Ok(task)
    }

    fn close(&self) {
        self.feed.close();
        self.post.wake();
    }

    fn is_over(&self) -> bool {
        self.enter().engine.is_over()
    }

    /// The caller drives from now on.
    fn enter(&self) -> Driving<'_> {
        if self.shift.caller_enters() {
            self.post.ring();
        }
        // A panic in the engine is ours, and has been told; what is left is still to be ended.
        Driving { engine: lock(&self.engine), shift: &self.shift }
    }

    /// Drives whenever the caller is away for longer than a moment.
    fn relieve(&self) {
        self.shift.relieve(|| {
            let mut engine = lock(&self.engine);
            while !self.shift.is_relief_done() && !engine.is_over() {
                engine.turn(Driver::Relief);
            }
            engine.is_over()
        });
    }
}

/// The engine, while the caller drives it.
struct Driving<'a> {
    engine: MutexGuard<'a, Engine>,
    shift: &'a Shift,
}

impl Drop for Driving<'_> {
    fn drop(&mut self) {
        self.shift.caller_leaves();
    }
}
